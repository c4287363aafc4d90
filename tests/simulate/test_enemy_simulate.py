"""Traces, sizes and names that are made to break the simulator."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpuarena.errors import ArgumentError
from gpuarena.simulate import Request, RequestTraceError, load_trace, run, synthetic
from gpuarena.simulate._job import Job
from gpuarena.simulate.policies import Regions, Settings

POLICIES = ["max", "exact", "buddy_max", "buddy_pow2", "buddy_exact", "grow", "paged", "linear(2)"]
TWO = [Request(0, 100, 40), Request(50_000, 30, 20)]


def invoke(*arguments: Any) -> Any:
    """Run a command in this process; errors that `main` would print are raised."""
    typer_testing = pytest.importorskip("typer.testing")
    pytest.importorskip("rich")
    from gpuarena.cli import app

    result = typer_testing.CliRunner().invoke(app, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# --- sizes


@pytest.mark.parametrize("policy", POLICIES)
def test_a_memory_of_any_size_takes_no_more_than_its_requests_need(policy: str) -> None:
    """Ten billion pages, one by one, were more than the machine has."""
    small = run(TWO, policy, capacity=2**14, max_length=160, drain=True)
    huge = run(TWO, policy, capacity=2**62, max_length=160, drain=True)
    assert (huge.done, huge.preempt) == (2, 0)
    assert huge.sum_free == small.sum_free + (2**62 - 2**14) * small.steps
    for name in ("steps", "sum_used", "sum_reserved", "sum_internal", "done", "tokens", "preempt"):
        assert getattr(huge, name) == getattr(small, name), name


def test_pages_that_no_simulation_can_count_are_refused() -> None:
    with pytest.raises(ArgumentError, match="62500000000 pages of 16 tokens") as caught:
        run([Request(0, 10**12 - 1, 1)], "paged", capacity=2**62, max_length=10**12)
    assert caught.value.n_pages == 62_500_000_000
    big = run([Request(0, 10**12 - 1, 1)], "paged", capacity=2**62, max_length=10**12, page_size=10**9)
    assert (big.done, big.sum_used) == (1, 10**12)


def test_more_users_than_requests_and_than_fit_a_list() -> None:
    few, many = (run(TWO, f"linear({users})", capacity=160 * users, max_length=160) for users in (2, 10**9))
    for name in ("steps", "done", "sum_used", "max_running", "tokens", "wait_p99_s"):
        assert getattr(few, name) == getattr(many, name), name
    assert many.sum_internal == 160 * 10**9 * many.steps - many.sum_used - many.sum_reserved


def test_each_user_has_a_region_and_the_steps_to_come_are_known() -> None:
    memory = Regions(Settings(100, 10, 16, "first", 256, None, users=10))
    jobs = [Job(Request(0, 4, 2), 0) for _ in range(10)]
    assert all(memory.place(job) for job in jobs)
    assert [job.place for job in jobs] == list(range(0, 100, 10))
    memory.release(jobs[3])
    assert memory.place(jobs[3])
    assert (jobs[3].place, memory.free) == (30, 0)
    told: list[tuple[int, int]] = []
    run(TWO, "linear(9)", capacity=1440, max_length=160, progress=lambda *told_of: told.append(told_of))
    assert {total for _, total in told} == {40}


@pytest.mark.parametrize("name", ["capacity", "max_length", "page_size", "chunk", "rate"])
def test_sizes_beyond_any_float_are_refused_by_name(name: str) -> None:
    sizes: dict[str, Any] = {"capacity": 2**62, "max_length": 160} | {name: 10**400}
    with pytest.raises(ArgumentError, match=rf"^{name} must be at most 2\*\*63 - 1"):
        run(TWO, "exact", **sizes)


def test_times_beyond_any_float_are_refused() -> None:
    with pytest.raises(ArgumentError, match="between first and last request"):
        run([Request(0, 1, 1), Request(10**400, 1, 1)], "exact", capacity=10, max_length=10)


@pytest.mark.parametrize("policy", ["exact", "grow", "paged"])
def test_a_billion_steps_a_second_and_the_largest_sizes_are_simulated(policy: str) -> None:
    one = run(TWO, policy, capacity=2**63 - 1, max_length=2**62, rate=10**9, n_samples=9)
    assert (one.steps, one.done) == (50_000_001, 1)
    assert len(one.samples) <= 9
    assert one.sum_used + one.sum_reserved + one.sum_internal + one.sum_free == one.capacity * one.steps


@pytest.mark.parametrize("name", ["linear(" + "9" * 5000 + ")", "linear(\u0663)", "x" * 5000])
def test_a_policy_of_thousands_of_letters_is_told_in_a_line(name: str) -> None:
    with pytest.raises(ArgumentError, match="there is no policy") as caught:
        run(TWO, name, capacity=160, max_length=160)
    assert len(str(caught.value)) < 300


# --- what a step does, worked out by hand from its description


def test_the_last_request_is_preempted_even_where_it_is_the_one_that_asks() -> None:
    """Two requests fill the pages at once; the younger asks last, and gives up its own."""
    together = [Request(0, 2, 4), Request(0, 2, 5)]
    one = run(together, "paged", capacity=7, max_length=7, page_size=1, n_samples=99)
    # Step 0 gives both 3 pages; step 1 the elder the seventh, and the younger itself is preempted. It needs 4
    # of the 3 that are free until the elder, of 6 in the end, leaves before step 4, and makes tokens in steps 4 to 7.
    assert [(s.n_running, s.n_waiting) for s in one.samples] == [(2, 0)] + 3 * [(1, 1)] + 4 * [(1, 0)]
    assert (one.preempt, one.done, one.steps, one.tokens) == (1, 2, 8, 9)
    assert [s.used for s in one.samples] == [6, 4, 5, 6, 4, 5, 6, 7]


def test_several_requests_grow_in_one_step_in_the_order_of_admission() -> None:
    """Three ask for a page in the same step, two pages are free: the third is preempted, not the first."""
    one = run([Request(0, 1, 3)] * 3, "paged", capacity=8, max_length=4, page_size=1, n_samples=99)
    assert [(s.n_running, s.used, s.n_waiting) for s in one.samples] == [
        (3, 6, 0),
        (2, 6, 1),
        (2, 8, 1),
        (1, 3, 0),
        (1, 4, 0),
    ]
    assert one.preempt == 1


def test_an_output_of_one_token_leaves_before_the_next_step_admits() -> None:
    """The slots of a request that ends are those of one that arrives in the same step."""
    one = run(
        [Request(0, 7, 1), Request(50_000, 7, 1), Request(100_000, 7, 1)], "exact", capacity=8, max_length=8
    )
    assert (one.steps, one.done, one.max_running) == (3, 3, 1)
    assert (one.first_fail_nofree, one.first_fail_frag, one.wait_p99_s) == (0, 0, 0)
    assert one.sum_used == 24


def test_a_preempted_request_is_not_turned_away_and_new_ones_are_not_lost() -> None:
    """It waits at the head of the line with its tokens; whoever comes meanwhile waits behind it."""
    requests = [Request(0, 2, 4), Request(0, 2, 4), Request(100_000, 6, 1), Request(200_000, 1, 1)]
    one = run(requests, "paged", capacity=7, max_length=7, page_size=1, reject=True, drain=True, n_samples=99)
    assert one.preempt == 1
    assert one.done + one.rejected == 4
    assert one.tokens == sum(request.output for request in requests) - (
        6 if one.rejected == 2 else one.rejected
    )
    assert all(s.n_waiting >= (1 if 1 <= s.step < 4 else 0) for s in one.samples)


def test_a_full_memory_of_cached_pages_is_free_for_others() -> None:
    """Pages that nobody holds go, the longest unused first, and what was evicted is not found again."""
    first, second = (1, 2), (3, 4)
    requests = [
        Request(0, 4, 1, first),
        Request(100_000, 4, 1, second),  # takes the pages that were never used, and evicts the eldest
        Request(200_000, 4, 1, first),
    ]
    from gpuarena.simulate import RequestTrace

    found = {}
    for capacity in (6, 100):
        trace = RequestTrace(requests, block_size=2)
        one = run(trace, "paged", capacity=capacity, max_length=6, page_size=2, share=True, drain=True)
        found[capacity] = one.hit_tokens
        assert one.done == 3
    assert found == {6: 0, 100: 2}, "one token at least is computed, so one page of two is found"


def test_equal_inputs_give_equal_results_in_threads_and_whatever_ran_before() -> None:
    trace = synthetic(150, rate=20, seed=3)
    alone = {name: run(trace, name, capacity=2**14, max_length=8192, n_samples=20) for name in POLICIES}
    again: dict[int, Any] = {}

    def serve(number: int) -> None:
        order = POLICIES if number else POLICIES[::-1]
        again[number] = {n: run(trace, n, capacity=2**14, max_length=8192, n_samples=20) for n in order}

    threads = [threading.Thread(target=serve, args=(number,)) for number in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert again[0] == again[1] == alone


def test_a_progress_that_raises_ends_the_run_and_no_other() -> None:
    trace = synthetic(100, rate=20)
    sizes: dict[str, Any] = {"capacity": 2**14, "max_length": 8192}
    before, told = run(trace, "grow", **sizes), []

    def stop(done: int, total: int) -> None:
        told.append((done, total))
        if len(told) == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(trace, "grow", progress=stop, **sizes)
    assert all(a[0] <= b[0] for a, b in pairwise(told))
    assert all(done <= total for done, total in told)
    assert run(trace, "grow", **sizes) == before


# --- commands


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--capacity", "1"], "served with 1 slot; least needed are 6 slots for exact; 16 slots for paged"),
        (["--memory", "1B", "--bytes-per-token", "3"], "with 1 byte, which is 0 slots"),
        (["--capacity", "9", "--page-size", "99"], "99 slots for paged"),
        (["--capacity", str(10**30)], "capacity must be at most 2**63 - 1"),
    ],
)
def test_explain_blames_the_memory_and_no_option_that_was_not_given(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("prompt,output\n4,2\n100,30\n")
    with pytest.raises(ArgumentError) as caught:
        invoke("explain", path, *arguments)
    assert said in str(caught.value)
    assert "all 2 requests are longer" not in str(caught.value)


@pytest.mark.parametrize("after", ["plot", "html"])
def test_an_interrupt_while_files_are_written_leaves_each_whole_or_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"p.{name}" for name in ("svg", "html")}
    for path in files.values():
        path.write_text("old")

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    if after == "plot":  # while the picture is drawn
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", stop)
    else:  # when the new page is written but has not taken its place
        monkeypatch.setattr("gpuarena.simulate.page.render_page", stop)
    options = ["--policy", "paged", "--json", "--plot", files["svg"], "--html", files["html"]]
    result = invoke("simulate", "--synthetic", "--limit", 9, "--capacity", 2**14, *options)
    assert result.exit_code == 130
    assert json.loads(result.stdout)["results"]["paged"]["done"] >= 0, "printed before, and whole"
    assert files["html"].read_text() == "old"
    assert (files["svg"].read_text() == "old") == (after == "plot")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.html", "p.svg"]


HOSTILE = "[red]x\x1b[2J<script>alert(1)\u202e$a$_\n[bold].csv"
AS_TEXT = r"[red]x\x1b[2J<script>alert(1)\u202e$a$_\n[bold].csv"


def test_names_of_files_are_text_in_pictures_and_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / HOSTILE).write_text("prompt,output\n4,2\n100,30\n")
    options = ["--policy", "exact", "--plot", "[red]\x1b.svg", "--html", "[b]\x1b.html"]
    shown = invoke("simulate", HOSTILE, "--capacity", 256, "--max-length", 256, *options).stdout
    assert shown.startswith(f"{AS_TEXT}: 2 requests")
    assert r"drawn in [red]\x1b.svg" in shown
    assert r"written to [b]\x1b.html" in shown
    page = (tmp_path / "[b]\x1b.html").read_text()
    assert "<script" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<svg" in (tmp_path / "[red]\x1b.svg").read_text()


def test_names_of_files_are_text_in_a_narrow_terminal_without_unicode(tmp_path: Path) -> None:
    (tmp_path / HOSTILE).write_text("prompt,output\n4,2\n100,30\n")
    done = subprocess.run(
        [sys.executable, "-m", "gpuarena.cli", "explain", HOSTILE, "--capacity=256"],
        cwd=tmp_path,
        capture_output=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "20", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "NO_COLOR": "1"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    shown = done.stdout.decode("ascii")
    assert shown.startswith(r"[red]x\x1b[2J<script>aler")
    assert max(map(len, shown.splitlines()[3:])) <= 20


# --- files


def refused(path: Path, line: int | None) -> str:
    with pytest.raises(RequestTraceError) as caught:
        load_trace(path)
    assert caught.value.line == line
    return str(caught.value)


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    with path.open("wb") as file:
        file.write(b"prompt,output\n1,2\n")
        file.truncate(1 << 34)  # 16 GiB of zeros that take no room on the disk
    assert "line is longer than 16 MiB" in refused(path, 3)


def test_a_small_file_of_many_zeros_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"prompt,output\n")
        file.write(bytes(40 << 20))
    assert path.stat().st_size < 1 << 20
    assert "line is longer than 16 MiB" in refused(path, 2)


def test_a_line_as_long_as_any_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    spaces = " " * (8 << 20)
    path.write_text('{"timestamp": 0, ' + spaces + '"input_length": 3, "output_length": 1}\r\n')
    assert list(load_trace(path)) == [Request(0, 3, 1)]


def test_line_ends_may_be_mixed_and_other_letters_end_no_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("\ufeffprompt,output,note\r\n1,2,\u2028\n3,4,\x0b\r\n\r\n5,6,\x85".encode())
    assert [(one.prompt, one.output) for one in load_trace(path)] == [(1, 2), (3, 4), (5, 6)]
    path.write_bytes(b"prompt,output\r1,2\r")
    assert "no known format" in refused(path, 1)
    path.write_bytes(b"prompt,output\n1,2\n\0\n")
    assert r"'\x00'" in refused(path, 3)


def test_integers_of_any_length_are_refused_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for number in (10**30, "9" * 5000):
        path.write_text(f'{{"timestamp": 0, "input_length": {number}, "output_length": 1}}\n')
        assert len(refused(path, 1)) < 400


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
@pytest.mark.parametrize("zipped", [False, True])
def test_a_pipe_is_read_to_its_end(tmp_path: Path, zipped: bool) -> None:
    path, text = tmp_path / "pipe", b"prompt,output\n1,2\n3,4\n"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(gzip.compress(text) if zipped else text,))
    writer.start()
    assert len(load_trace(path)) == 2
    writer.join()


def test_a_file_that_becomes_a_device_while_it_is_opened_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("prompt,output\n1,2\n")
    regular = os.stat(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    monkeypatch.setattr(os, "stat", lambda *_, **__: regular)
    assert "is a device" in refused(path, None)


def test_a_file_that_cannot_be_read_to_its_end_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("prompt,output\n1,2\n")

    class Failing:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def peek(self, n: int) -> bytes:
            return b"pr"

        def readline(self, limit: int) -> bytes:
            raise OSError(5, "Input/output error")

    from gpuarena.simulate import _trace_files

    opened = _trace_files._File._opened
    monkeypatch.setattr(_trace_files._File, "_opened", lambda file: Failing(opened(file)))
    assert re.search(r"cannot be read: input/output error$", refused(path, None))
