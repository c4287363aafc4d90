"""``gpuarena simulate``, as a user types it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

typer_testing = pytest.importorskip("typer.testing")
pytest.importorskip("rich")

from gpuarena.cli import app  # noqa: E402 - after the skips
from gpuarena.errors import ArgumentError, BackendError  # noqa: E402
from gpuarena.simulate import RequestTraceError, load_trace, synthetic  # noqa: E402
from gpuarena.simulate.engine import run as simulate_one  # noqa: E402
from gpuarena.simulate.words import explain_results  # noqa: E402

ALL = ["max", "buddy_max", "buddy_pow2", "buddy_exact", "exact", "grow", "paged"]
SMALL = ("--synthetic", "--limit", "60", "--capacity", "16384")


def command(*arguments: Any, columns: int = 80) -> Any:
    """Run in this process; errors that `main` would print are raised."""
    runner = typer_testing.CliRunner()
    # NO_COLOR and TERM keep what a developer's shell asks of Rich away
    environment = {"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb", "FORCE_COLOR": None}
    result = runner.invoke(app, ["simulate", *map(str, arguments)], env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def figures(*arguments: Any) -> dict[str, Any]:
    result = command(*arguments, "--json")
    assert result.exit_code == 0
    return json.loads(result.stdout)


def process(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuarena.cli", "simulate", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "80", **environment},
    )


def table_of(text: str, title: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the headings, and the cells of each policy."""
    lines = text[text.index(f"\n{title}") + 1 :].splitlines()[2:]
    columns = re.split(r"  +", lines[0].strip())
    rows: dict[str, list[str]] = {}
    for line in lines[2:]:
        if not line.strip():
            break
        name, *cells = re.split(r"  +", line.strip())
        rows[name] = cells
    return columns, rows


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.csv"
    path.write_text("prompt,output\n4,2\n4,2\n")
    return path


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if anything is simulated."""

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("it was simulated")

    monkeypatch.setattr("gpuarena.simulate.engine.run", refuse)


# --- what is printed


def test_the_tables_of_an_example_computed_by_hand(pairs: Path) -> None:
    """Two requests of 4 + 2 tokens take both halves of 16 slots for two steps, 5 and then 6 of 8 each."""
    text = command(pairs, "--capacity", "16", "--max-length", "8", "--policy", "max").stdout
    assert "pairs.csv: 2 requests, all at time 0" in text
    columns, rows = table_of(text, "slots, %")
    assert columns == ["policy", "used", "reserved", "internal", "free", "external", "effective"]
    # used 10 + 12 of 32, later 2 + 0, never 4 + 4
    assert rows == {"max": ["68.8", "6.2", "25.0", "0", "0", "68.8"]}
    columns, rows = table_of(text, "requests, times")
    assert columns == ["policy", "running", "at most", "done", "never started", "wait p50", "p99"]
    assert rows == {"max": ["2.0", "2", "2", "0", "0", "0"]}
    columns, rows = table_of(text, "requests that did not fit")
    assert columns == ["policy", "too few free", "no hole", "preempted", "tokens copied"]
    assert rows == {"max": ["0", "0", "0", "0"]}


def test_half_the_memory_lets_the_others_wait(pairs: Path) -> None:
    pairs.write_text(pairs.read_text() + "4,2\n")
    text = command(pairs, "--capacity", "8", "--max-length", "8", "--policy", "max", "--rate", "2").stdout
    assert table_of(text, "requests, times")[1] == {
        "max": ["1.0", "1", "3", "0", "1", "2"]
    }  # two steps of 1/2 s before the second, four before the third
    assert table_of(text, "requests that did not fit")[1] == {"max": ["2", "0", "0", "0"]}


def test_local_users_get_their_answer_with_one_command(pairs: Path) -> None:
    """Two requests of 4 and 2 tokens, one after the other: by hand."""
    arguments = (pairs, "--policy", "local", "--max-length", 10, "--page-size", 4, "--bytes-per-token", 1000)
    text = command(*arguments).stdout
    assert "36 slots (36.00 kB), each for one token: enough for nobody to wait" in text  # 3 * 12
    columns, rows = table_of(text, "slots that the users take")
    assert columns == ["policy", "most", "mean", "used, %", "tokens copied", "did not fit", "done"]
    # In steps of 5 and 6 tokens; grow copies 5 of them from a piece of 5 to one of 6.
    assert rows == {
        "linear(1)": ["10", "10", "55.0", "0", "0", "2"],
        "grow": ["11", "6", "100", "10", "0", "2"],
        "paged": ["8", "8", "68.8", "0", "0", "2"],
    }
    assert "requests, times in s" not in text
    own = "One user sends 2 requests, the next one when the last one is answered. It takes 0.2 s under each policy."
    assert own in " ".join(text.split())


def test_local_users_are_those_asked_for_and_have_the_memory_given() -> None:
    arguments = ("--synthetic", "--limit", 40, "--policy", "local", "--users", 3, "--max-length", 4096)
    found = figures(*arguments)
    assert found["capacity"] == 7 * 4096
    assert {name: (one["users"], one["chunk"], one["done"]) for name, one in found["results"].items()} == {
        "linear(3)": (3, 1, 40),
        "grow": (3, 1, 40),
        "paged": (3, 1, 40),
    }
    assert all(not one["blocked_steps"] + one["preempt"] for one in found["results"].values())
    found = figures(*arguments, "--capacity", 3 * 4096, "--chunk", 256)["results"]
    assert (found["grow"]["capacity"], found["grow"]["chunk"]) == (3 * 4096, 256)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_of_users_fits(columns: int) -> None:
    text = command("--synthetic", "--limit", 40, "--policy", "local", "--users", 4, columns=columns).stdout
    assert max(map(len, text.splitlines())) <= columns
    assert list(table_of(text, "slots that the users take")[1]) == ["linear(4)", "grow", "paged"]


def test_all_policies_print_what_the_figures_say() -> None:
    arguments = (
        "--synthetic",
        "--limit",
        300,
        "--arrivals",
        20,
        "--capacity",
        16384,
        "--users",
        2,
        "--chunk",
        2,
    )
    found, text = figures(*arguments), command(*arguments).stdout
    results = found["results"]
    assert list(results) == [*ALL, "linear(2)"]
    slots, requests, failures = (
        table_of(text, title)[1] for title in ("slots, %", "requests, times", "requests that did not fit")
    )
    assert list(slots) == list(requests) == list(failures) == list(results)
    for name, one in results.items():
        whole = one["capacity"] * one["steps"]
        shares = [100 * one[f"sum_{part}"] / whole for part in ("used", "reserved", "internal", "free")]
        assert sum(shares) == pytest.approx(100)
        taken = one["sum_used"] + one["sum_reserved"] + one["sum_internal"]
        shares += [100 * one["ext_mean"], 100 * one["sum_used"] / taken]
        for cell, share in zip(slots[name], shares, strict=True):
            assert float(cell.lstrip("<> ")) == pytest.approx(
                share, abs=0.1001 if cell[0] in "<>" else 0.0501
            )
            assert (cell == "0") == (share == 0)
            assert (cell == "100") == (share == 100)
        mean, most, done, within, never, p50, p99 = (cell.replace(" ", "") for cell in requests[name])
        assert float(mean) == pytest.approx(one["sum_running"] / one["steps"], abs=0.0501)
        assert [int(most), int(done), int(never)] == [one["max_running"], one["done"], one["unadmitted"]]
        assert float(within) == pytest.approx(one["steps"] / 20, rel=5e-3)
        assert [float(p50), float(p99)] == pytest.approx([one["wait_p50_s"], one["wait_p99_s"]], rel=5e-3)
        counts = [cell.replace(" ", "") for cell in failures[name]]
        assert [int(n) for n in counts[:3]] == [
            one[k] for k in ("first_fail_nofree", "first_fail_frag", "preempt")
        ]
        copied = counts[3]
        assert (int(copied) if "M" not in copied else float(copied[:-1]) * 1e6) == pytest.approx(
            one["copied"], abs=5001
        )
    assert any(one["first_fail_frag"] for one in results.values())
    assert results["grow"]["copied"] > 10**6
    assert {"preempt", "first_fail_nofree"} < {key for key in results["grow"] if results["grow"][key]}
    assert " ".join(text.split()).endswith(" ".join(found["explanation"].split()))


def test_rejection_shows_the_lengths_that_are_turned_away() -> None:
    arguments = (
        "--synthetic",
        "--limit",
        200,
        "--capacity",
        16384,
        "--reject",
        "--policy",
        "exact",
        "--policy",
        "paged",
    )
    found, text = figures(*arguments), command(*arguments).stdout
    columns, rows = table_of(text, "turned away, %")
    classes = found["results"]["exact"]["classes"]
    assert len(columns) == 1 + len(classes)
    assert [int(cell.replace(" ", "")) for cell in rows.pop("requests")] == [
        one["n_requests"] for one in classes
    ]
    assert list(rows) == ["exact", "paged"]
    for name, cells in rows.items():
        of_it = found["results"][name]
        for cell, one in zip(cells, of_it["classes"], strict=True):
            expected = 100 * one["n_rejected"] / one["n_requests"] if one["n_requests"] else None
            assert cell == "-" if expected is None else float(cell) == pytest.approx(expected, abs=0.0501)
        assert table_of(text, "requests, times")[1][name][3] == str(of_it["rejected"])
        assert of_it["rejected"] > 0
    assert "turned away" not in command(*SMALL, "--policy", "paged").stdout


@pytest.mark.parametrize("columns", [80, 120])
def test_nothing_is_cut_off(columns: int) -> None:
    """With figures as wide as those of a trace of twenty thousand requests."""
    wide = (
        "--synthetic",
        "--limit",
        "2000",
        "--arrivals",
        "1000",
        "--capacity",
        "32768",
        "--max-length",
        "1024",
    )
    text = command(*wide, "--page-size", 1024, "--users", "24", columns=columns).stdout
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= columns
    for title in ("slots, %", "requests, times", "requests that did not fit"):
        assert list(table_of(text, title)[1]) == [*ALL, "linear(24)"]
    assert not re.search(r"\d\n *\d{3}\b", text.split("\n\n", 8)[-1])  # "1\n024" in the words


def test_requests_that_are_too_long_are_told_with_the_length_that_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("prompt,output\n4,2\n100,50\n400,100\n")
    text = command(path, "--capacity", 300, "--max-length", 10, "--policy", "paged").stdout
    assert "left out: 2 requests of more than 10 tokens, up to 500 (--max-length)" in text
    with pytest.raises(
        ArgumentError, match=r"all 3 requests are longer than --max-length 5; the shortest has 6"
    ):
        command(path, "--capacity", 300, "--max-length", 5)


# --- JSON


def test_json_is_what_the_simulation_returns_and_nothing_else() -> None:
    done = process(*SMALL, "--bytes-per-token", 10, "--policy", "exact", "--policy", "paged", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    trace = synthetic(60)
    results = {
        p: simulate_one(trace, p, capacity=16384, max_length=8192, n_samples=400) for p in ("exact", "paged")
    }
    expected = {name: json.loads(json.dumps(one.to_dict())) for name, one in results.items()}
    for one in expected.values():
        del one["samples"]
    assert found["results"] == expected
    assert found["explanation"] == explain_results(results, bytes_per_token=10)
    assert found["trace"] == {
        "name": "synthetic",
        "requests": 60,
        "duration_s": trace.duration_s,
        "block_size": None,
    }
    assert (found["capacity"], found["bytes_per_token"], found["memory_nbytes"]) == (16384, 10, None)
    assert "synthetic: 60 requests" in done.stderr  # what is no figure
    assert command(*SMALL, "--policy", "paged", "--json", "--quiet").stderr == ""


def test_options_reach_the_simulation(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": 10 * n, "input_length": 1100, "output_length": 30, "hash_ids": [1, 2, 10 + n]}
        for n in range(9)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked: dict[str, Any] = {
        "max_length": 1200,
        "rate": 40,
        "page_size": 64,
        "fit": "best",
        "chunk": 100,
        "reject": True,
    }
    options = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items() if name != "reject"]
    found = figures(path, "--capacity", 4096, "--limit", 8, "--share", "--reject", *options)
    assert found["trace"] == {"name": "t.jsonl", "requests": 8, "duration_s": 0.07, "block_size": 512}
    for name, one in found["results"].items():
        share = {"share": True} if name == "paged" else {}
        result = simulate_one(load_trace(path)[:8], name, capacity=4096, n_samples=400, **asked, **share)
        expected = json.loads(json.dumps(result.to_dict()))
        del expected["samples"]
        assert one == expected
    assert found["results"]["paged"]["hit_tokens"] > 0
    text = command(path, "--capacity", 8192, "--share", "--policy", "paged").stdout
    assert "tokens shared" in text


def test_synthetic_requests_are_drawn_with_rate_and_seed() -> None:
    found = figures("--synthetic", "--arrivals", 2, "--seed", 5, "--capacity", 16384, "--policy", "paged")
    drawn = synthetic(2000, rate=2, seed=5)
    assert found["trace"]["requests"] == 2000
    assert found["trace"]["duration_s"] == drawn.duration_s


# --- memory


def test_memory_over_the_bytes_of_a_token_is_the_capacity() -> None:
    found = figures(
        "--synthetic", "--limit", 20, "--memory", "1MiB", "--bytes-per-token", 100, "--policy", "paged"
    )
    assert found["capacity"] == (1 << 20) // 100 == found["results"]["paged"]["capacity"]
    assert found["memory_nbytes"] == 1 << 20
    text = command("--synthetic", "--limit", 20, "--memory", "1MiB", "--bytes-per-token", 100).stdout
    assert "100 bytes a token\n10 485 slots (1.05 MB), each for one token\n" in text


def test_a_model_says_what_a_token_takes() -> None:
    pytest.importorskip("transformers")
    arguments = ("--synthetic", "--limit", 20, "--memory", "512MiB", "--policy", "paged")
    found = figures(*arguments, "--model", "qwen2.5-1.5b", "--dtype", "float16")
    assert (found["bytes_per_token"], found["capacity"]) == (28_672, 512 * 2**20 // 28_672)
    assert (found["model"], found["dtype"]) == ("qwen2.5-1.5b", "float16")


@pytest.fixture
def one_model(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The figures of whatever model is asked for."""
    found: dict[str, Any] = {"model": "odd", "dtype": "float16", "bytes_per_token": 100, "state_nbytes": 0}
    found["layers"] = [{"n_layers": 3, "windows": []}]
    monkeypatch.setattr("gpuarena.cli._simulate_arguments.find_size", lambda *_, **__: found)
    return found


def test_what_is_not_counted_of_a_model_is_told(one_model: dict[str, Any]) -> None:
    arguments = ("--synthetic", "--limit", 20, "--memory", "1MB", "--model", "odd", "--policy", "paged")
    text = command(*arguments).stdout
    assert "odd in float16: 100 bytes a token\n10 000 slots (1.00 MB), each for one token\n" in text
    assert "counted as if" not in text
    one_model["layers"].append({"n_layers": 13, "windows": [4096]})
    assert "counted as if all layers kept all tokens; 13 have a window\n" in command(*arguments).stdout
    one_model |= {"state_nbytes": 5000}
    assert "13 have a window, 5 000 bytes of state a sequence come on top\n" in command(*arguments).stdout
    one_model |= {"bytes_per_token": 0}
    with pytest.raises(ArgumentError, match="any number of them fits"):
        command(*arguments)


def test_without_transformers_the_way_around_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BackendError) as caught:
        command("--synthetic", "--memory", "1GiB", "--model", "qwen2.5-1.5b")
    assert "pip install 'gpuarena[cli,transformers]'" in str(caught.value)
    assert "--bytes-per-token" in str(caught.value)


def test_too_little_memory_is_refused_with_the_least_that_works(no_run: None) -> None:
    arguments = ("--max-length", 1000, "--page-size", 48, "--chunk", 300, "--users", 3)
    with pytest.raises(ArgumentError) as caught:
        command("--synthetic", "--memory", "4kB", "--bytes-per-token", 10, *arguments)
    message = str(caught.value)
    assert "4 000 bytes, which is 400 slots" in message
    assert "1 000 slots (10.00 kB) for max, exact" in message
    assert "1 024 slots (10.24 kB) for buddy_max, buddy_pow2, buddy_exact" in message
    assert "3 000 slots (30.00 kB) for linear(3)" in message
    assert "Give --memory 30000 or a smaller --max-length" in message
    least = caught.value.least_capacity
    assert least == dict.fromkeys(ALL, 1000) | {
        "buddy_max": 1024, "buddy_pow2": 1024, "buddy_exact": 1024, "grow": 1200, "paged": 1008, "linear(3)": 3000
    }  # fmt: skip


def test_the_least_that_is_named_works() -> None:
    trace, sizes = synthetic(5), {"max_length": 3000, "page_size": 48, "chunk": 300}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    with pytest.raises(ArgumentError) as caught:
        command("--synthetic", "--limit", 5, "--capacity", 1, "--users", 2, *options)
    assert list(caught.value.least_capacity) == [*ALL, "linear(2)"]
    for policy, least in caught.value.least_capacity.items():
        assert f"{least:,}".replace(",", " ") in str(caught.value)
        simulate_one(trace, policy, capacity=least, **sizes)
        with pytest.raises(ArgumentError):
            simulate_one(trace, policy, capacity=least - 1, **sizes)
        users = ("--users", 2) if policy == "linear(2)" else ()
        found = figures(
            "--synthetic", "--limit", 5, "--capacity", least, "--policy", policy, *options, *users
        )
        assert found["capacity"] == least


def test_policies_that_would_work_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"or leave these policies out \(paged would work\)$"):
        command(*SMALL, "--max-length", 16384, "--policy", "paged", "--policy", "linear", "--users", 2)


# --- files


def test_a_plot_and_a_page_are_written(tmp_path: Path, pairs: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, html = tmp_path / "p.svg", tmp_path / "p.html"
    html.write_text("old")
    arguments = (pairs, "--capacity", 256, "--max-length", 8, "--plot", plot, "--html", html)
    text = command(*arguments).stdout
    assert f"drawn in {plot}" in text
    assert f"written to {html}" in text
    assert "<svg" in plot.read_text()
    page = html.read_text()
    assert "pairs.csv: 2 requests, all at time 0" in page
    assert "buddy_pow2" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.html", "p.svg", "pairs.csv"]
    quiet = command(*arguments, "--quiet")
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (0, "", "")


def test_a_file_that_could_not_be_written_is_refused_before_anything_runs(
    tmp_path: Path, no_run: None
) -> None:
    for option, name in (("--plot", "a.png"), ("--html", "a.html")):
        with pytest.raises(OSError, match="No such file"):
            command(*SMALL, option, tmp_path / "absent" / name)
        with pytest.raises(IsADirectoryError):
            command(*SMALL, option, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    tmp_path: Path, no_run: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendError, match=re.escape("pip install 'gpuarena[plot]'")):
        command(*SMALL, "--plot", tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    html = tmp_path / "p.html"
    html.write_text("old")

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpuarena.simulate.engine.run", stop)
    result = command(*SMALL, "--html", html)
    assert result.exit_code == 130
    assert html.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["p.html"]


# --- errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--capacity", "16384"], "give a file of requests, or --synthetic"),
        (["t.csv", *SMALL], "not both"),
        (["t.csv", "--capacity", "16384", "--seed", "1"], "--seed: only with --synthetic"),
        (["t.csv", "--capacity", "16384", "--arrivals", "1"], "--arrivals: only with --synthetic"),
        (["--synthetic"], "say how much memory there is"),
        (["--synthetic", "--memory", "1GiB"], "depends on --model or --bytes-per-token"),
        ([*SMALL, "--memory", "1GiB"], "--memory says it already"),
        ([*SMALL, "--model", "gpt2", "--bytes-per-token", "3"], "--model says it already"),
        (["--synthetic", "--memory", "1 XB", "--bytes-per-token", "3"], "'1 XB' is not a size"),
        (["--synthetic", "--memory", "0", "--bytes-per-token", "3"], "at least 1 byte"),
        ([*SMALL, "--policy", "fastest"], "there is no policy 'fastest'; there are max, exact"),
        ([*SMALL, "--policy", "linear"], "linear needs --users"),
        ([*SMALL, "--policy", "linear(0)"], "users"),
        ([*SMALL, "--policy", "paged", "--users", "2"], "--users: only of the policies linear and all"),
        ([*SMALL, "--policy", "local", "--policy", "max"], "local compares linear, grow, paged"),
        ([*SMALL, "--policy", "local", "--reject"], "--reject: not with --policy local"),
        ([*SMALL, "--policy", "local", "--share"], "--share: not with --policy local"),
        ([*SMALL, "--fit", "worst"], "'worst' is none of first, best"),
        ([*SMALL, "--dtype", "int3"], "'int3' is none of bfloat16"),
        ([*SMALL, "--arrivals", "0"], "rate must be more than 0"),
        ([*SMALL, "--arrivals", "nan"], "rate must be more than 0"),
        ([*SMALL, "--share", "--policy", "exact"], "only of the policy paged"),
        ([*SMALL, "--share"], "synthetic has no hashes of prefixes"),
        ([*SMALL, "--limit", "0"], "--limit"),
        ([*SMALL, "--rate", "x"], "--rate"),
        ([*SMALL, "--plot", "a.xyz"], "its ending is none of .png"),
        ([*SMALL, "--plot", "a.svg", "--html", "a.svg"], "is the file of --plot"),
    ],
)
def test_wrong_usage_ends_with_2_before_anything_runs(
    arguments: list[str], said: str, no_run: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    result = command(*arguments, columns=200)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_pages_must_divide_the_blocks_of_hashes(tmp_path: Path, no_run: None) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n')
    result = command(path, "--capacity", 16384, "--share", "--page-size", 100, columns=200)
    assert result.exit_code == 2
    assert "pages of 100 tokens do not divide blocks of 512" in result.stderr


def test_a_policy_asked_twice_runs_once() -> None:
    found = figures(
        *SMALL,
        "--policy",
        "paged",
        "--policy",
        "paged",
        "--policy",
        "linear(1)",
        "--policy",
        "linear(users=1)",
    )
    assert list(found["results"]) == ["paged", "linear(1)"]


def test_a_file_of_no_requests_is_one_line_and_status_1(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("prompt,output\n1,2\n3,x\n")
    with pytest.raises(RequestTraceError):
        command(path, "--capacity", 16384)
    done = process(path, "--capacity", 16384)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {path}, line 3: output is 'x', no integer from 1 to 10**15 - 1\n"


# --- what is loaded, what is on a terminal


def test_neither_help_nor_a_run_loads_torch_and_help_shows_examples() -> None:
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from gpuarena.cli import app\n"
        "shown = CliRunner().invoke(app, ['simulate', '--help'])\n"
        "print(shown.stdout)\n"
        "assert 'gpuarena.simulate' not in sys.modules, 'help has no need of it'\n"
        "done = CliRunner().invoke(app, ['simulate', '--synthetic', '--limit', '9', '--capacity', '16384'])\n"
        "assert done.exit_code == 0, done.output\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'cupy'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "80", "TERMINAL_WIDTH": "80"},
    )
    assert done.returncode == 0, done.stderr
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.stdout
    for text in ("gpuarena simulate --synthetic --capacity 65536\n", "without the weights", "paged: pages"):
        assert text in "\n".join(line.strip() for line in done.stdout.splitlines())


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no pseudo-terminals here")
def test_progress_is_on_a_terminal_only_and_gone_in_the_end(pairs: Path) -> None:
    arguments = [
        sys.executable,
        "-m",
        "gpuarena.cli",
        "simulate",
        str(pairs),
        "--capacity=256",
        "--max-length=8",
        "--json",
    ]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    outer, inner = os.openpty()
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=inner, env=environment) as child:
        os.close(inner)
        shown = b""
        while part := _read(outer):
            shown += part
        assert child.stdout is not None
        json.loads(child.stdout.read())
    os.close(outer)
    assert child.returncode == 0
    assert b"paged (7 of 7)" in shown
    assert b"100%" in shown
    assert shown.rstrip(b"\r\n").endswith(b"\x1b[2K")  # the line of the bar is erased last
    assert command(pairs, "--capacity=256", "--max-length=8").stderr == ""


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux says so when the other end is closed
        return b""
