"""The memory map as a file: what is in it, without a browser. How it looks and answers is in tests/browser."""

import base64
import hashlib
import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena.errors import ArgumentError, ArgumentTypeError
from gpuarena.observe.page import page_text, write_page
from gpuarena.observe.timeline import Failure, RegionSpan, Rollback, ScopeSpan, Timeline

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>",
    "<img src=x onerror=alert(1)>",
    "&amp;",
    "\"'`",
    "\u2028\u2029",
    "\x00\x1b[2J\r\n",
    "\u202eabc",
    "\ud800",
    "\udc00\ud800",
    "x" * 10_000,
    "",
    "None",
    "{{script}}",
    "\\u003c",
]
texts = st.sampled_from(HOSTILE) | st.text(
    st.characters(codec=None, categories=None), max_size=8
)  # halves of pairs too
sides = st.sampled_from(["low", "high"])
sizes = st.integers(0, 2**40)


@st.composite
def timelines(draw):
    n = draw(st.integers(0, 20))
    spans = st.tuples(st.integers(-1, n), st.none() | st.integers(0, 30)).map(
        lambda pair: (pair[0], None if pair[1] is None else pair[0] + pair[1])
    )
    regions = draw(
        st.lists(
            st.builds(
                lambda side, offset, nbytes, padding, shape, dtype, label, site, span: RegionSpan(
                    side, offset, nbytes, padding, shape, dtype, label, site, *span
                ),
                sides, sizes, sizes, sizes, st.lists(sizes, max_size=4).map(tuple), texts, st.none() | texts, texts, spans,
            ),
            max_size=12,
        )
    )  # fmt: skip
    scopes = draw(
        st.lists(
            st.builds(
                lambda side, label, site, top, span: ScopeSpan(side, label, site, top, *span),
                sides, st.none() | texts, texts, sizes, spans,
            ),
            max_size=4,
        )
    )  # fmt: skip
    return Timeline(
        draw(st.none() | texts),
        draw(texts),
        draw(sizes),
        tuple(sorted(draw(st.lists(st.integers(0, 2**45), min_size=n, max_size=n)))),
        tuple(sorted(regions, key=lambda span: span.start)),
        tuple(scopes),
        tuple(
            draw(
                st.lists(
                    st.builds(Rollback, st.integers(0, n), sides, sizes, sizes, sizes, texts), max_size=4
                )
            )
        ),
        tuple(
            draw(
                st.lists(
                    st.builds(
                        Failure, st.integers(0, n), sides, st.integers(0, 2**70), st.none() | texts, texts
                    ),
                    max_size=4,
                )
            )
        ),
        tuple(draw(st.lists(st.tuples(st.integers(-1, n), sizes), max_size=4))),
    )


def held(page, tag, **attributes):
    """What the one element of that kind holds; read by hand, as a browser ends a script at the first ``</script``."""
    marks = "".join(f' {name}="{value}"' for name, value in attributes.items())
    (found,) = re.findall(rf"<{tag}{marks}>(.*?)</{tag}", page, re.DOTALL | re.IGNORECASE)
    return found


def carried(page):
    return json.loads(held(page, "script", type="application/json", id="data"))


def rebuilt(columns):
    """A timeline from the columns of a page."""

    def text(place):
        return None if place == -1 else columns["strings"][place]

    def shape(place):
        return tuple(json.loads(text(place)))

    side = ["low", "high"]
    starts = itertools.accumulate(columns["start"])
    regions = [
        RegionSpan(
            side[high], offset, nbytes, padding, shape(dims), text(dtype), text(label), text(site), start,
            None if life == -1 else start + life,
        )
        for high, offset, nbytes, padding, dims, dtype, label, site, start, life in zip(
            *(columns[name] for name in ("high", "offset", "nbytes", "padding", "shape", "dtype", "label", "site")),
            starts, columns["life"], strict=True,
        )
    ]  # fmt: skip
    return Timeline(
        columns["name"],
        columns["device"],
        columns["capacity"],
        tuple(itertools.accumulate(columns["times"])),
        tuple(regions),
        tuple(
            ScopeSpan(side[s["high"]], text(s["label"]), text(s["site"]), s["top"], s["start"], s["stop"])
            for s in columns["scopes"]
        ),
        tuple(
            Rollback(
                r["index"], side[r["high"]], r["old_top"], r["new_top"], r["n_regions"], text(r["cause"])
            )
            for r in columns["rollbacks"]
        ),
        tuple(
            Failure(f["index"], side[f["high"]], int(f["nbytes"]), text(f["label"]), text(f["site"]))
            for f in columns["failures"]
        ),
        tuple(map(tuple, columns["peaks"])),
    )


def joined(value):
    """The same with two halves of a pair that follow each other as one letter, which is what JSON makes of them."""
    return json.loads(json.dumps(value))


def plain(one):
    """A timeline as values, its texts as JSON carries them."""
    return joined(
        [
            [getattr(one, name) for name in ("name", "device", "capacity", "times_ns", "peaks")],
            *(
                [[getattr(span, name) for name in span.__slots__] for span in spans]
                for spans in (one.regions, one.scopes, one.rollbacks, one.failures)
            ),
        ]
    )


@given(timelines(), st.none() | texts)
def test_a_page_carries_all_of_a_timeline_and_no_text_of_it_is_markup(one, title):
    page = page_text(one, title=title)
    page.encode("ascii")
    data = carried(page)
    assert plain(rebuilt(data["maps"][0])) == plain(one)
    assert data["title"] == joined(one.name or "Memory map" if title is None else title)
    # The elements are those of a page of nothing, whatever the texts are.
    assert re.findall("<[^>]*>", _without_title(page)) == re.findall("<[^>]*>", _without_title(NOTHING))


def _without_title(page):
    return page.replace(f"<title>{held(page, 'title')}</title>", "")


EMPTY = Timeline("arena", "cpu", 1024, (), (), (), (), (), ())
NOTHING = page_text(EMPTY)


def region(label="weights", start=0, stop=None, **changes):
    values = {"side": "low", "offset": 0, "nbytes": 64, "padding": 0, "shape": (16,), "dtype": "float32"}
    values |= changes
    return RegionSpan(**values, label=label, site="a.py:1", start=start, stop=stop)


def test_titles_are_text():
    (title,) = re.findall(
        "<title>(.*?)</title>", page_text(EMPTY, title="</title><b>\u2028\x00\ud800 \u00e9")
    )
    assert (
        title
        == "&lt;/title&gt;&lt;b&gt;&#8232;\ufffd\ufffd \u00e9".encode("ascii", "xmlcharrefreplace").decode()
    )


def test_the_policy_allows_nothing_but_the_two_parts_of_the_page():
    page = page_text(EMPTY)
    (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))

    def digest(text):
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    assert rules == {
        "default-src": "'none'",
        "script-src": digest(script),
        "style-src": digest(held(page, "style")),
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_a_page_refers_to_nothing():
    page = page_text(EMPTY)
    assert not re.search(r"https?:|\b(src|href)=|@import|url\(|fetch\(|XMLHttpRequest|innerHTML", page)
    assert "{{" not in page


def test_regions_are_in_the_order_of_their_events():
    spans = (region("late", 5), region("first", -1), region("middle", 2))
    data = carried(page_text(Timeline("a", "cpu", 64, (0,) * 6, spans, (), (), (), ())))["maps"][0]
    assert [data["strings"][place] for place in data["label"]] == ["first", "middle", "late"]


def test_several_timelines_are_on_one_page():
    other = Timeline("other", "cuda:0", 9, (), (), (), (), (), ())
    data = carried(page_text([EMPTY, other]))
    assert [one["name"] for one in data["maps"]] == ["arena", "other"]
    assert data["title"] == "arena, other"


def test_columns_are_small():
    """A region is figures only: what it has in common with others is written once."""
    regions = tuple(region(f"layer.{i % 30}", i, i + 3, offset=256 * i) for i in range(10_000))
    one = Timeline("a", "cpu", 2**30, tuple(range(10_000)), regions, (), (), (), ())
    assert (len(page_text(one)) - len(NOTHING)) / 10_000 < 45


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ([], ArgumentError, "no timeline"),
        ([EMPTY, 3], ArgumentTypeError, "not int"),
        (Timeline("a", "cpu", 2**53, (), (), (), (), (), ()), ArgumentError, "9007199254740992 bytes"),
        (
            Timeline("a", "cpu", 1, (), (region(offset=2**53 - 64, nbytes=64),), (), (), (), ()),
            ArgumentError,
            "9007199254740992 bytes",
        ),
    ],
    ids=["none", "no-timeline", "capacity", "address"],
)
def test_what_is_no_timeline_is_refused_and_the_old_file_stays(tmp_path, value, error, words):
    path = tmp_path / "map.html"
    path.write_text("old")
    with pytest.raises(error, match=words):
        write_page(value, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_is_written_as_it_is(tmp_path):
    write_page(EMPTY, tmp_path / "map.html", title="one")
    assert (tmp_path / "map.html").read_bytes() == page_text(EMPTY, title="one").encode("ascii")
    with pytest.raises(FileNotFoundError):
        write_page(EMPTY, tmp_path / "no" / "map.html")


# -- colours ----------------------------------------------------------------------------------------------------

#: Machado, Oliveira and Fernandes 2009, severity 1: what is left of linear red, green and blue.
DEFICIENCIES = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}  # fmt: skip


def linear(colour):
    part = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one, other):
    low, high = sorted(linear(colour) @ [0.2126, 0.7152, 0.0722] + 0.05 for colour in (one, other))
    return high / low


def hues():
    (found,) = re.findall(r"HUES = \[(.*?)\]", NOTHING)
    return re.findall("#[0-9a-f]{6}", found)


def themes(name):
    """The colour of that name in the light and in the dark theme."""
    return sorted(set(re.findall(rf"--{name}: (#[0-9a-f]{{6}})", NOTHING)))


@pytest.mark.parametrize("eyes", DEFICIENCIES)
def test_colours_of_labels_can_be_told_apart(eyes):
    seen = [lab(np.array(DEFICIENCIES[eyes]) @ linear(colour)) for colour in hues()]
    assert len(seen) == 7
    # 2.3 is the least that anybody notices; four times that on small areas.
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 10


def test_colours_stand_out_in_both_themes():
    backgrounds = themes("free")
    assert len(backgrounds) == 2
    assert min(contrast(hue, free) for hue in hues() for free in backgrounds) > 1.9
    (dark_paper, light_paper), inks = themes("paper"), themes("ink")
    (dark_panel, light_panel), faint = themes("panel"), themes("faint")
    for paper in (dark_paper, light_paper, dark_panel, light_panel):  # 4.5 is what WCAG asks of text
        assert max(contrast(ink, paper) for ink in inks) > 7
        assert max(contrast(ink, paper) for ink in faint) > 4.5
