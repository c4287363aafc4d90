"""Figures of benchmarks that pages of docs/ quote: they are those of the files that the pages link to."""

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
HELD = ("512", "2048", "8192")


def text_of(page):
    return (DOCS / page).read_text(encoding="utf-8")


def prose_of(page):
    """Return the text with single spaces, however its lines are broken."""
    return " ".join(text_of(page).split())


def groups_of(page, ending):
    """Return the groups of the one linked file whose name ends so."""
    [name] = set(re.findall(rf"\(\.\./benchmarks/([\w-]+-{ending}\.json)\)", text_of(page)))
    return json.loads((DOCS / "benchmarks" / name).read_text())["groups"]


def by_title(groups):
    return {group["title"]: group["rows"] for group in groups}


def ratio(row):
    return f"{row['ratio']:.2f}"


def cells(page, head):
    """Return the cells of the table whose first line begins so, line by line, without its head."""
    table = text_of(page).split(f"\n{head}", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_allocation():
    page = "explanation/when-not.md"
    groups = by_title(groups_of(page, "cpu-alloc"))
    new, repeated = (rows for title, rows in groups.items() if title.startswith("torch arrays"))
    names = ["arena.empty", "arena.alloc(...).array"]
    expected = [[ratio(new[name]), ratio(repeated[f"scope + {name}"])] for name in names]
    assert [row[1:] for row in cells(page, "| call |")] == expected


@pytest.fixture(scope="module")
def generated():
    return [
        (f"{dtype}, {group['n_tokens']} tokens, {group['batch']} row{'s' * (group['batch'] > 1)}", group)
        for dtype in ("bfloat16", "float32")
        for group in groups_of("explanation/when-not.md", f"cpu-generate-{dtype}")
    ]


def test_decoding_steps(generated):
    names = [
        "DynamicCache + sdpa", "DynamicCache + gpuarena", "StaticCache (exact) + sdpa", "ideal + gpuarena",
    ]  # fmt: skip
    steps = [(title, group) for title, group in generated if group["kind"] == "step"]
    expected = [[title, *(ratio(group["rows"][name]) for name in names)] for title, group in steps]
    assert cells("explanation/when-not.md", "| held |") == expected
    assert all(group["rows"]["ArenaCache + gpuarena"]["allocated_nbytes"] == 0 for _, group in steps)


def test_what_is_said_of_the_decoding_steps(generated):
    def spread(name, kind, **limits):
        found = [
            group["rows"][name]["ratio"]
            for _, group in generated
            if group["kind"] == kind and all(group[key] <= most for key, most in limits.items())
        ]
        return f"{min(found):.2f} to {max(found):.2f}"

    prose = prose_of("explanation/when-not.md")
    short = spread("DynamicCache + gpuarena", "step", batch=1, n_tokens=4096)
    assert f"a `DynamicCache` with the same attention takes {short} times" in prose
    assert f"of exactly the right size takes {spread('StaticCache (exact) + sdpa', 'step')} times" in prose
    largest = spread("StaticCache (largest) + sdpa", "step")
    assert f"one for 16 384 tokens, whatever is held, takes {largest} times" in prose
    assert f"writes nothing: {spread('ideal + gpuarena', 'step')}." in prose
    assert f"({spread('DynamicCache.crop', 'reuse')} times as long in the same files)" in prose


def test_reads_and_appends_of_caches():
    page = "howto/pages-or-linear.md"
    groups = by_title(groups_of(page, "cpu-kv-bfloat16"))
    reads, appends = [], []
    for n in HELD:
        gathered = groups[f"attention of one token, {n} held, 1 layer, 12 query heads"]
        converted = groups[f"attention over quantised tokens, {n} held, 1 layer, 12 query heads"]
        reads.append(
            [n, ratio(gathered["view, attend"])]
            + [ratio(gathered[f"pages of {size}, gather, attend"]) for size in (16, 256)]
            + [ratio(converted[f"{kind}, read, attend"]) for kind in ("int8", "int4", "float8_e4m3fn")]
        )
        rows = groups[f"append a token, {n} held, 28 layers"]
        window = f"KVCache, window {int(n) // 2}, slack {int(n) // 16}"
        names = ["torch.cat", "KVCache, token-major, growing", window, "KVCache, int8"]
        appends.append([n, *(ratio(rows[name]) for name in names)])
    assert cells(page, "| held | views") == reads
    assert cells(page, "| held | `torch.cat`") == appends


def test_the_appends_that_the_bounds_name():
    page = "explanation/bounds.md"
    groups = by_title(groups_of(page, "cpu-kv-bfloat16"))
    found = [f"{groups[f'append a token, {n} held, 28 layers']['torch.cat']['ratio']:.0f}" for n in HELD]
    assert f"({', '.join(found)} times at {', '.join(HELD[:2])} and {HELD[2]} tokens)" in prose_of(page)
    assert f"A ratio of {found[-1]} for an append" in prose_of(page)


def test_the_bounds_that_other_pages_name():
    weights, token = 2 * 1_543_714_304, 28_672
    least, middle, most = (
        f"{2 * n * token / (weights + n * token):.0%}".replace("%", " %") for n in map(int, HELD)
    )
    prose = prose_of("explanation/when-not.md")
    assert f"at most {least} to a memory-bound step at 512 tokens" in prose
    assert f"{middle} at 2 048 and {most} at 8 192" in prose
    assert f"at 2 048 tokens saves, by the table, at most {middle} in" in prose_of("explanation/bounds.md")
