from __future__ import annotations

import io
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import Arena, Debug
from gpuarena.errors import ArgumentError, ArgumentTypeError, OutOfMemoryError
from gpuarena.observe import LabelUse, MemoryMap

# A line of the bar: where it begins, and its cells.
BAR = re.compile(r"^ *[\d.]+ (?:B|[KMGTPE]iB) ([A-T*.~-]+)$")


def bar(made, width=80):
    return "".join(match[1] for line in made._text(width).splitlines() if (match := BAR.match(line)))


def legend(made, width=120):
    """Return the lines of the legend, by their sign."""
    lines = made._text(width).splitlines()
    at = next(number for number, line in enumerate(lines) if line.split()[:2] == ["label", "bytes"])
    return {line[2]: line[5:] for line in lines[at + 1 :]}


def columns(text):
    import unicodedata

    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def test_the_figures_are_those_of_the_arena():
    arena = Arena(4096, alignment=64, name="room")
    arena.alloc(100, "uint8", label="x")
    arena.alloc(50, "uint8", label="x", side="high")
    arena.alloc(3, "float32")
    with arena.scope():
        arena.alloc(1000, "uint8")
    made = arena.memory_map()
    stats = arena.stats
    assert isinstance(made, MemoryMap)
    assert (made.name, made.device, made.capacity, made.closed) == ("room", "cpu", 4096, False)
    assert (made.low, made.high, made.peak) == (stats.top, stats.high, stats.peak)
    assert (made.used, made.padding, made.free) == (stats.used, stats.padding, stats.available)
    assert (made.n_regions, made.committed) == (3, 4096)
    assert made.labels == (LabelUse("x", 150, 2, ("low", "high")), LabelUse(None, 12, 1, ("low",)))
    assert made.spans == ((0, 100, "x"), (128, 12, None), (4032, 50, "x"))


def test_a_picture_of_both_ends():
    arena = Arena(256, alignment=16)  # as many bytes as cells
    arena.alloc(20, "uint8", label="first")
    arena.alloc(30, "uint8", label="second")
    arena.alloc(10, "uint8", label="third", side="high")
    made = arena.memory_map(width=80)
    assert bar(made) == "B" * 20 + "-" * 12 + "A" * 30 + "." * 178 + "C" * 10 + "-" * 6
    assert str(made) == repr(made) == made._text(80)
    shown = legend(made)
    assert list(shown) == ["A", "B", "C", "-", "."]
    assert shown["A"].split() == ["second", "30", "B", "11.7", "%", "1", "low"]
    assert shown["C"].split() == ["third", "10", "B", "3.9", "%", "1", "high"]
    assert shown["-"].split() == ["padding", "18", "B", "7.0", "%"]
    assert shown["."].split() == ["free", "178", "B", "69.5", "%"]


def test_the_bar_of_a_growing_arena_shows_what_has_memory():
    arena = Arena("256MiB", backend="virtual")
    arena.alloc(1 << 20, "uint8", label="x")
    made = arena.memory_map()
    assert 1 << 20 <= made.committed < 1 << 28
    cells = bar(made)
    n_committed = -(-made.committed // (1 << 20))  # a cell is a MiB
    assert cells == "A" + "." * (n_committed - 1) + "~" * (256 - n_committed)
    shown = legend(made)
    assert shown["~"].startswith("free, no memory behind it yet")
    assert "committed" in str(made)
    assert "committed" not in str(Arena(100).memory_map())


def test_an_empty_arena_and_one_of_a_few_bytes():
    assert set(bar(Arena(4096).memory_map())) == {"."}
    for capacity in (1, 2, 63, 64, 65, 255, 256, 257):
        assert len(bar(Arena(capacity).memory_map())) == min(capacity, 256)
    assert Arena(1).memory_map().labels == ()


def test_a_closed_arena_says_so():
    arena = Arena(4096, name="room")
    arena.alloc(100, "uint8", label="x")
    arena.close()
    made = arena.memory_map()
    assert str(made) == "arena room on cpu is closed"
    assert (made.closed, made.n_regions, made.labels) == (True, 0, ())
    parent = Arena(4096)
    with parent.scope():
        child = parent.child(1024, name="child")
        child.alloc(10, "uint8", label="x")
        assert bar(child.memory_map()).startswith("AAA")
        assert "child" in legend(parent.memory_map())["A"]
    assert "closed" in str(child.memory_map())


def test_zero_size_regions_are_counted_and_take_no_cell():
    arena = Arena(256, alignment=1)
    arena.alloc(0, "uint8", label="nothing")
    arena.alloc((3, 0), "float32", label="nothing")
    made = arena.memory_map()
    assert set(bar(made)) == {"."}
    assert legend(made)["A"].split() == ["nothing", "0", "B", "0.0", "%", "2", "low"]


def test_a_small_region_is_seen_between_large_ones():
    arena = Arena(1 << 20, alignment=1)
    arena.alloc(1 << 19, "uint8", label="large")
    arena.alloc(1, "uint8", label="tiny")
    assert bar(arena.memory_map()) == "A" * 128 + "B" + "." * 127
    arena.alloc(4000, "uint8", label="more")
    assert bar(arena.memory_map())[128] == "B", "the one with the most bytes is shown"


def test_ten_thousand_regions_of_many_labels():
    arena = Arena(1 << 20, alignment=1)
    for number in range(10_000):
        arena.alloc(number % 100, "uint8", label=f"layer {number % 33}")
    made = arena.memory_map()
    lines = str(made).splitlines()
    assert len(lines) < 40
    shown = legend(made)
    assert [*shown] == [*"ABCDEFGHIJKLMNOPQRST", "*", "-", "."]
    assert shown["*"].split()[:3] == ["13", "more", "labels"]
    named = {shown[sign].split("  ")[0] for sign in "ABCDEFGHIJKLMNOPQRST"}
    sums = sorted(arena.by_label().values())
    assert sum(arena.by_label()[label] for label in named) == sum(sums[13:])
    assert int(shown["*"].split()[-2]) == sum(use.n_regions for use in made.labels[20:])


HOSTILE = [
    "[bold red]x[/]", "[/]", "[link=file:///etc/passwd]y[/link]", "\x1b[2J\x1b[31mred", "a\nb\r\nc", "\x00\x07\x9b",
    "\u202egnp.exe", "\u2028\u2029\x85", "日本語" * 30, "🤖" * 50, "\ud800", "x" * 500, "", " ", ":smile:", "\\[x]", "A\u0300" * 60,
]  # fmt: skip


@pytest.mark.parametrize("label", HOSTILE, ids=ascii)
def test_labels_are_shown_as_text_whatever_they_hold(label):
    arena = Arena(4096, name=label)
    arena.alloc(10, "uint8", label=label)
    arena.alloc(10, "uint8", label="plain")
    made = arena.memory_map()
    for width in (40, 50, 80, 120):
        text = made._text(width)
        assert all(letter.isprintable() for line in text.split("\n") for letter in line)
        assert len(text.split("\n")) == len(made._text(width).splitlines())
        assert "plain" in text
        text.encode()
        for line in text.split("\n"):
            assert len(line.encode("ascii", "ignore")) <= width
            assert columns(line) <= width or "\u0300" in line
        assert rich_text(made, width).split("\n") == text.split("\n")
    if label.isascii() and label.isprintable() and len(label) < 60 and label.strip():
        assert label in made._text(120)


@given(st.text(max_size=40), st.sampled_from([40, 80, 100]))
def test_any_label_keeps_the_lines_as_they_are(label, width):
    arena = Arena(4096)
    arena.alloc(10, "uint8", label=label)
    made = arena.memory_map(width=width)
    assert len(str(made).split("\n")) == len(str(made).splitlines())
    assert all(letter.isprintable() for line in str(made).split("\n") for letter in line)
    assert rich_text(made, 200).split("\n") == str(made).split("\n")


def rich_text(made, width, **options):
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=width, **options).print(made)
    return "\n".join(line.rstrip() for line in file.getvalue().removesuffix("\n").split("\n"))


def test_rich_colours_the_letters():
    arena = Arena(256, alignment=1)
    arena.alloc(20, "uint8", label="x")
    text = rich_text(arena.memory_map(), 80, force_terminal=True, color_system="standard")
    assert re.search("\x1b\\[30;46mA{20}\x1b\\[0m", text)
    assert re.sub("\x1b\\[[0-9;]*m", "", text) == str(arena.memory_map(width=80))


@pytest.mark.parametrize("width", [40, 41, 52, 64, 80, 100, 120, 137, 138, 200, 500])
def test_the_text_fits_its_width(width, monkeypatch):
    arena = Arena(100_000_007, name="a name of some length for an arena", alignment=64)
    for number in range(30):
        arena.alloc(number * 10_007, "uint8", label=f"label number {number} " + "long " * number)
    made = arena.memory_map(width=width)
    assert max(map(len, str(made).splitlines())) <= width
    monkeypatch.setenv("COLUMNS", str(width))
    assert str(arena.memory_map()) == str(made)
    assert rich_text(arena.memory_map(), width) == str(made)
    assert len(bar(made, width)) in (64, 128, 256, 512)


@pytest.mark.parametrize("width", ["80", 80.0, True, [80]])
def test_a_width_is_a_number(width):
    with pytest.raises(ArgumentTypeError, match="width"):
        Arena(100).memory_map(width=width)


@pytest.mark.parametrize("width", [39, 0, -1])
def test_a_width_that_is_too_small_is_refused(width):
    with pytest.raises(ArgumentError, match=f"width={width}: .*at least 40"):
        Arena(100).memory_map(width=width)


def test_a_map_is_of_its_moment_and_needs_no_arena():
    arena = Arena(4096)
    arena.alloc(100, "uint8")
    made = arena.memory_map(width=80)
    before = str(made)
    arena.reset()
    del arena
    assert str(made) == before


def test_the_lock_is_taken_for_the_moment_only():
    arena = Arena(4096, name="x")
    arena.alloc(100, "uint8")
    made, done = arena.memory_map(), threading.Event()

    def hold():
        with arena._lock:
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert "arena x" in str(made)  # with somebody else in the lock
    finally:
        done.set()
        thread.join()


def test_a_map_loads_neither_rich_nor_torch():
    program = (
        "import sys; from gpuarena import Arena; str(Arena(100).memory_map());"
        "from gpuarena.observe import memory_map as m;"
        "print([name for name in ('torch',) if name in sys.modules], 'rich' in vars(m))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == "[] False"


# -- against bytes ----------------------------------------------------------------------------------------------


@given(
    st.integers(1, 1500),
    st.lists(st.tuples(st.integers(0, 90), st.sampled_from(["low", "high"]), st.sampled_from("abc")), max_size=30),
    st.sampled_from([1, 16]),
    st.booleans(),
    st.sampled_from([40, 80]),
)  # fmt: skip
def test_each_cell_shows_what_most_of_its_bytes_are(capacity, requests, alignment, debug, width):
    settings = Debug(guard=4, on_live_arrays="ignore") if debug else False
    arena = Arena(capacity, alignment=alignment, debug=settings)
    owner = np.full(capacity, ".")
    sums = {}
    for nbytes, side, label in requests:
        try:
            region = arena.alloc(nbytes, "uint8", side=side, label=label)
        except OutOfMemoryError:
            continue
        owner[region.offset : region.offset + nbytes] = label
        sums[label] = sums.get(label, 0) + nbytes
    low, high = arena.stats.top, arena.stats.high
    taken = np.r_[0:low, high:capacity].astype(int)
    owner[taken[owner[taken] == "."]] = "-"
    made = arena.memory_map()
    letters = {use.label: letter for use, letter in zip(made.labels, "ABC", strict=False)}
    assert {use.label: use.nbytes for use in made.labels} == sums
    assert sorted(sums.values(), reverse=True) == [use.nbytes for use in made.labels]
    cells = bar(made, width)
    n_cells = len(cells)
    assert n_cells == min(capacity, {40: 64, 80: 256}[width])
    for number, sign in enumerate(cells):
        piece = owner[number * capacity // n_cells : (number + 1) * capacity // n_cells].tolist()
        counts = {label: piece.count(label) for label in "abc" if label in piece}
        if counts:
            assert sign in {letters[label] for label, n in counts.items() if n == max(counts.values())}
        elif piece.count(".") != piece.count("-"):
            assert sign == ("." if piece.count(".") > piece.count("-") else "-")
        else:
            assert sign in "-."
