"""``gpuarena explain``, as a user types it: one screen whose figures are those of the run."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("typer")

from made_results_kit import FORTY, struck
from rich.console import Console
from typer.testing import CliRunner

from gpuarena.cli import app
from gpuarena.cli._explain_screen import print_moment
from gpuarena.errors import ArgumentError
from gpuarena.simulate import synthetic
from gpuarena.simulate.engine import run
from gpuarena.simulate.words import diagnose_worst

#: Small, so that a run takes a tenth of a second; requests fail by fragmentation in it.
SMALL = ("--limit", "300", "--capacity", "16384")
TAKEN, FREE, HOLE, REQUEST = "\u2588\u2593", "\u00b7", "\u2550", "\u2592"


def explain(*arguments, columns=80, **environment):
    """Return what is printed, run in this process."""
    done = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": str(columns), **environment})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def grouped(number):
    return f"{number:,}".replace(",", " ")


def words_of(screen):
    return " ".join(screen.split())


def bare(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "gpuarena.cli", "explain", *arguments],
        capture_output=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "80", **environment},
    )


def lengths_file(tmp_path, lengths):
    path = tmp_path / "lengths.csv"
    path.write_text("prompt,output\n" + "".join(f"{p},{o}\n" for p, o in lengths))
    return path


@pytest.fixture(scope="module")
def exact():
    """The policy that the command shows, run apart from it."""
    requests = synthetic(300)
    longest = max(one.prompt + one.output for one in requests)
    result = run(requests, "exact", capacity=16384, max_length=min(longest, 16384))
    assert result.worst is not None, "the example fails by fragmentation"
    return result


@pytest.fixture(scope="module")
def screen():
    return explain(*SMALL)


# The screen.


def test_alone_it_shows_a_failure_with_over_forty_percent_free_in_one_screen():
    lines = explain().splitlines()
    assert 24 <= len(lines) <= 30
    assert max(map(len, lines)) <= 80
    title = next(line for line in lines if line.startswith("exact:"))
    assert float(re.search(r"([\d.]+) % of the slots free", title)[1]) >= 40


def test_the_figures_are_those_of_the_run(screen, exact):
    worst, text = exact.worst, words_of(screen)
    assert f"with {100 * worst.free / worst.capacity:.1f} % of the slots free" in text
    assert f"largest hole {grouped(worst.largest_hole)}" in text
    assert f"the request {grouped(worst.need)}" in text
    assert f"A request of {worst.need} tokens does not fit" in text
    assert f"{worst.pages_needed} of {worst.n_pages} pages" in text
    start, length = max(worst.holes, key=lambda hole: hole[1])
    assert f"Holes: {grouped(length)} at {grouped(start)}, " in text
    assert f", and {len(worst.holes) - 3} smaller." in text
    paged = run(synthetic(300), "paged", capacity=16384, max_length=exact.max_length)
    (ours,) = re.findall(r"^ exact +(.*)", screen, re.M)
    (theirs,) = re.findall(r"^ pages of 16 +(.*)", screen, re.M)
    assert ours.split()[:3] == [str(exact.done), str(exact.first_fail_nofree), str(exact.first_fail_frag)]
    assert theirs.split()[:3] == [str(paged.done), str(paged.first_fail_nofree), "0"]
    assert f"Pages finish {paged.done - exact.done} requests more" in text


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_the_map_shows_what_is_taken_and_what_is_free(columns, exact):
    worst = exact.worst
    rows = [
        line.strip()
        for line in explain(*SMALL, columns=columns).splitlines()
        if re.match(rf" *\d[\d ]* [{TAKEN}{FREE}{HOLE}]+$", line)
    ]
    assert len(rows) == 4
    cells = "".join(row.split()[-1] for row in rows)
    assert len({len(row.split()[-1]) for row in rows}) == 1
    starts = [int("".join(row.split()[:-1])) for row in rows]
    assert starts[0] == 0
    assert all(abs(start - number * worst.capacity / 4) <= 1 for number, start in enumerate(starts))
    # What lies at the middle of a cell, by a bitmap; a cell of two kinds may show the other one.
    bitmap = ["."] * worst.capacity
    for start, length, _ in worst.allocations:
        bitmap[start : start + length] = ["x"] * length
    largest = max(worst.holes, key=lambda hole: hole[1])
    bitmap[largest[0] : sum(largest)] = ["="] * largest[1]
    per_cell = worst.capacity / len(cells)
    for index, cell in enumerate(cells):
        inside = bitmap[int(index * per_cell + 1) : int((index + 1) * per_cell)]
        if len(set(inside)) == 1:
            assert {"x": cell in TAKEN, ".": cell == FREE, "=": cell == HOLE}[inside[0]], (index, cell)
    # Neighbours are told apart.
    shown = {cell for cell in cells if cell in TAKEN}
    assert shown == set(TAKEN)


def test_the_bars_are_to_the_scale_of_the_map(screen, exact):
    worst = exact.worst
    lines = screen.splitlines()
    (hole,) = [line for line in lines if line.endswith(f"largest hole {grouped(worst.largest_hole)}")]
    (request,) = [line for line in lines if line.endswith(f"the request {grouped(worst.need)}")]
    per_cell = float(re.search(r"one character: ([\d. ]+) slots", screen)[1].replace(" ", ""))
    assert hole.count(HOLE) == pytest.approx(worst.largest_hole / per_cell, abs=1)
    assert request.count(REQUEST) == pytest.approx(worst.need / per_cell, abs=1)
    assert request.count(REQUEST) > hole.count(HOLE), (
        "the request is longer, also where both round to the same"
    )


@pytest.mark.parametrize("columns", range(30, 100, 7))
def test_a_request_that_is_one_slot_longer_than_the_largest_hole_is_drawn_longer(columns):
    console = Console(file=io.StringIO(), width=columns, legacy_windows=False)
    taken = ((0, 200, 1), (400, 200, 1), (800, 9200, 1))
    result = struck(worst=dataclasses.replace(FORTY, need=201, capacity=10_000, allocations=taken))
    print_moment(console, result, diagnose_worst(result))
    text = console.file.getvalue()
    hole, request = (
        re.search(rf"({bar}+)(>?) +{name}", text) for bar, name in ((HOLE, "largest"), (REQUEST, "the"))
    )
    assert (hole[2], request[2]) == ("", ""), "neither is cut"
    assert len(request[1]) > len(hole[1])


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_no_line_is_wider_than_the_window_nor_than_reads_well(columns):
    lines = explain(*SMALL, columns=columns).splitlines()
    assert max(map(len, lines)) <= min(columns, 100)


@pytest.mark.parametrize("policy", ["grow", "max", "buddy_exact", "buddy_pow2", "buddy_max"])
def test_other_policies(policy):
    text = words_of(explain(*SMALL, "--policy", policy))
    assert f"{policy} gives each request one piece" in text or f"{policy} gives each request a block" in text
    assert "pages of 16" in text
    assert "nan" not in text


def test_without_block_characters_it_is_plain_ascii():
    done = bare(*SMALL, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("ascii")
    assert re.search(r"^ *\d[\d ]* [#%.=]+$", text, re.M)
    assert "\\u" not in text
    assert re.search(r"^ *@+ the request", text, re.M)
    assert done.stderr == b""


def test_it_prints_no_colour_into_a_pipe_and_none_where_it_is_not_wanted():
    done = bare(*SMALL, PYTHONIOENCODING="utf-8")
    assert b"\x1b" not in done.stdout
    assert FREE in done.stdout.decode("utf-8")


def test_colours_are_only_added(screen):
    coloured = explain(*SMALL, FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == screen


def test_it_needs_no_torch_and_no_matplotlib():
    code = (
        "import sys; from gpuarena.cli import app; sys.argv[1:] = ['explain', '--limit', '50'];\n"
        "try: app()\nexcept SystemExit: pass\n"
        "sys.exit(int('torch' in sys.modules or 'matplotlib' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


# What it is asked.


def test_json_has_the_same_figures(exact):
    found = json.loads(explain(*SMALL, "--json"))
    assert set(found["results"]) == {"exact", "paged"}
    assert found["results"]["exact"]["first_fail_frag"] == exact.first_fail_frag
    assert found["results"]["exact"]["worst"]["need"] == exact.worst.need
    assert found["diagnosis"]["requested"] == exact.worst.need
    assert found["diagnosis"]["text"].startswith("A request of")
    assert found["smaller"] is None
    assert f"Under exact {exact.first_fail_frag} requests" in found["explanation"]


def test_a_trace_from_a_file_and_memory_in_bytes(tmp_path):
    path = lengths_file(tmp_path, [(300, 20), (200, 10), (300, 30), (500, 40)] * 10)
    text = words_of(explain(str(path), "--memory", "20MB", "--bytes-per-token", "10000"))
    assert (
        "lengths.csv: 40 requests of at most 540 tokens, all at time 0; 2 000 slots (20.00 MB), one a token."
        in text
    )


def test_longer_requests_are_left_out_and_counted(tmp_path):
    path = lengths_file(tmp_path, [(300, 20), (900, 10), (300, 30)] * 5)
    text = words_of(explain(str(path), "--capacity", "800"))
    assert "10 requests of at most 800 tokens, 5 longer ones left out, all at time 0; 800 slots" in text
    assert "5 requests of at most 320 tokens, 10 longer" in words_of(
        explain(str(path), "--capacity", "800", "--max-length", "320")
    )


def test_the_default_memory_has_room_for_about_eight_long_requests(tmp_path):
    path = lengths_file(tmp_path, [(900, 100)] * 100)
    assert "8 192 slots" not in words_of(explain(str(path)))
    assert "4 096 slots" in words_of(explain(str(path))), "the highest power of two in 8 x 1000"


def test_where_nothing_fails_it_says_so_and_names_a_memory_in_which_something_does():
    text = words_of(explain("--limit", "300", "--capacity", "900000"))
    assert "No request failed by fragmentation under exact: each found its slots in one piece" in text
    smaller = int(re.search(r"With --capacity (\d+) (\d+) requests? would fail so", text)[1])
    requests = synthetic(300)
    again = run(
        requests, "exact", capacity=smaller, max_length=max(one.prompt + one.output for one in requests)
    )
    assert again.first_fail_frag == int(re.search(r"With --capacity \d+ (\d+)", text)[1]) > 0
    assert "Pages finish no more of these requests." in text


def test_where_equal_pieces_cannot_leave_holes_nothing_is_promised():
    text = words_of(explain(*SMALL, "--policy", "max"))
    assert "No request failed by fragmentation under max" in text
    assert "did not fit at first because too few slots were free" in text
    assert "would fail so" not in text


def test_a_request_alone():
    text = words_of(explain("--limit", "1"))
    assert "No request failed by fragmentation" in text


def test_a_hostile_file_name_reaches_no_terminal(tmp_path):
    path = tmp_path / "[red]\x1b[2J.csv"
    path.write_text("prompt,output\n" + "500,20\n" * 30)
    text = explain(str(path))
    assert "\x1b" not in text
    assert "[red]" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "paged"), "none of exact"),
        (("--memory", "2GiB"), "--bytes-per-token"),
        (("--memory", "2GiB", "--capacity", "5", "--bytes-per-token", "1"), "--capacity"),
        (("--memory", "much", "--bytes-per-token", "1"), "is not a size"),
        (("--model", "gpt2", "--bytes-per-token", "1"), "--bytes-per-token"),
        (("--limit", "0"), "--limit"),
        (("--page-size", "0"), "--page-size"),
        (("x.csv", "--synthetic"), "--synthetic"),
    ],
)
def test_wrong_usage_is_told(arguments, said):
    done = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize("arguments", [("/no/such/file.csv",), ("--capacity", "10"), ("--max-length", "2")])
def test_what_cannot_be_simulated_is_one_error(arguments):
    with pytest.raises(ArgumentError):
        explain(*arguments)
