"""The report: its figures are those of the results, names stay text, and it needs nothing but itself."""

import itertools
import os
import re
import shutil
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_results_kit import FORTY, made, moments, results, struck

from gpuarena.errors import ArgumentError, ArgumentTypeError
from gpuarena.simulate._drawing import slot_map
from gpuarena.simulate.page import render_page, write_page

HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;${title}"
_VOID = {"meta", "link", "br", "img", "hr", "input"}


class Tree(HTMLParser):
    """Elements with their texts; fails on what is not nested as it should be."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.elements = [], []
        self.feed(page)
        self.close()
        assert self.open == [], "all elements end"

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", "inside": [one["tag"] for one in self.open], **dict(attributes)}
        self.elements.append(element)
        if tag not in _VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag, inside=None):
        return [
            one for one in self.elements if one["tag"] == tag and (inside is None or inside in one["inside"])
        ]


def page_of(given_results, **options):
    return render_page(given_results, **{"title": "a trace", "words": "Said.\n\nMore.", **options})


# What is on it.


def test_the_words_are_paragraphs_whose_figures_stay_together():
    tree = Tree(page_of({"exact": made()}, words="In 1 234 slots.\n\nThe 38.3 % rest."))
    texts = [one["text"] for one in tree.all("p")]
    assert "In 1\u00a0234 slots." in texts
    assert "The 38.3\u00a0% rest." in texts


def test_the_table_has_the_figures_and_its_headers_say_their_scope():
    one = struck(unadmitted=6, preempt=4)
    tree = Tree(page_of({"exact": one, "paged": made("paged", capacity=1000)}, bytes_per_token=2_000_000))
    columns = [head["text"] for head in tree.all("th", "thead") if head["scope"] == "col"]
    rows = {head["text"] for head in tree.all("th", "tbody") if head["scope"] == "row"}
    assert rows == {"exact", "paged"}
    assert all(head.get("scope") in ("col", "row") for head in tree.all("th"))
    cells = [cell["text"] for cell in tree.all("td")]
    first = dict(zip(columns[1:], cells, strict=False))
    assert first["slots"] == "1 000"
    assert first["GB"] == "2.00"
    assert (first["done"], first["% of them"]) == ("40", "80.0 %")
    assert (first["too few free"], first["no hole"]) == ("2", "7")
    assert (first["never started"], first["preempted"]) == ("6", "4")
    assert (first["median wait"], first["1 in 100 waits"]) == ("1.5 s", "4 s")
    assert "tokens copied" not in first, "nothing was copied by any policy"
    assert "turned away" not in first
    assert len(tree.all("caption")) == len(tree.all("table")) == 2


def test_a_column_of_which_one_policy_has_figures_is_there_for_all():
    tree = Tree(page_of({"exact": made(), "grow": made("grow", copied=5)}))
    columns = [head["text"] for head in tree.all("th", "thead") if head["scope"] == "col"]
    assert "tokens copied" in columns
    n = columns.index("policy", 1) - 1 if columns.count("policy") > 1 else len(columns) - 1
    cells = [cell["text"] for cell in tree.all("td")]
    assert (cells[n - 1], cells[2 * n - 1]) == ("0", "5")


def test_shares_by_length():
    tree = Tree(page_of({"exact": struck()}))
    cells = [cell["text"] for cell in tree.all("td")]
    assert cells[-3:] == ["3.3 %", "20.0 %", "60.0 %"]
    assert {"< 100", "100 to 399", ">= 400"} <= {head["text"] for head in tree.all("th")}


def test_bars_are_as_wide_as_the_shares():
    one = made(sum_used=50_000, sum_reserved=10_000, sum_internal=15_000, sum_free=25_000)
    tree = Tree(page_of({"exact": one}))
    widths = {
        rect["class"]: float(rect["width"]) for rect in tree.all("rect") if rect["text"].startswith("exact:")
    }
    whole = sum(widths.values())
    assert {part: round(width / whole, 3) for part, width in widths.items()} == {
        "used": 0.5,
        "reserved": 0.1,
        "internal": 0.15,
        "free": 0.25,
    }


def test_areas_of_each_policy_with_samples():
    tree = Tree(page_of({"exact": struck(), "paged": made("paged")}))
    used = next(one for one in tree.all("polygon") if one["class"] == "used")
    points = [tuple(map(float, point.split(","))) for point in used["points"].split()]
    assert points[0] == (0, 160 * (1 - 0.3))
    assert points[9] == (400, pytest.approx(160 * (1 - 0.39)))
    assert "Too few samples to draw." in [one["text"] for one in tree.all("p")]


def test_the_worst_moment_has_its_map_and_its_diagnosis():
    tree = Tree(page_of({"exact": struck(), "grow": struck("grow"), "paged": made("paged")}))
    assert any("copies 200 tokens" in one["text"] for one in tree.all("p"))
    assert [one["text"] for one in tree.all("summary")] == ["Of the other policies"]
    calm = page_of({"exact": made()})
    assert "No request failed by fragmentation." in calm
    assert "<details>" not in calm


@given(moments())
def test_the_map_shows_each_slot_once_and_the_request_to_scale(moment):
    if moment is None:
        return
    tree = Tree(slot_map(moment))
    rects = {"free": [], "used": [], "reserved": [], "largest": [], "need": []}
    for rect in tree.all("rect"):
        rects[rect["class"]].append((float(rect["y"]), float(rect["x"]), float(rect["width"])))
    per_row = -(-moment.capacity // 4)
    unit = 1000 / per_row
    held = sum(tokens for _, _, tokens in moment.allocations)

    def slots(kind):
        return sum(width for _, _, width in rects[kind]) / unit

    near = 0.02 * len(tree.all("rect")) / unit + 0.01  # widths have two digits
    assert slots("free") == pytest.approx(moment.free, abs=near)
    assert slots("used") == pytest.approx(held, abs=near)
    assert slots("reserved") == pytest.approx(moment.capacity - moment.free - held, abs=near)
    assert slots("largest") == pytest.approx(moment.largest_hole, abs=near)
    assert slots("need") == pytest.approx(moment.need, abs=near)
    placed = sorted(rects["free"] + rects["used"] + rects["reserved"])
    for (y, x, width), (next_y, next_x, _) in itertools.pairwise(placed):
        assert y < next_y or x + width <= next_x + 0.02, "no two overlap"
        assert x + width <= 1000.02


# That it is one file for everybody.


@given(
    st.dictionaries(
        st.text(max_size=12),
        st.sampled_from(["exact", "paged", "linear", "buddy_exact"]),
        min_size=1,
        max_size=3,
    ).flatmap(lambda names: st.fixed_dictionaries({name: results(policy) for name, policy in names.items()})),
    st.text(max_size=30),
)
def test_any_results_make_a_page_that_is_well_formed(given_results, title):
    page = render_page(given_results, title=title, words=title)
    tree = Tree(page)
    assert not tree.all("script")
    assert not re.search(
        r"\b(nan|inf)\b", "".join(one.get("points", "") + one.get("width", "") for one in tree.elements)
    )
    for svg in tree.all("svg"):
        assert svg["role"] == "img"
    n_svg = len(tree.all("svg"))
    named = [one for one in tree.all("title") if one["inside"] and one["inside"][-1] == "svg"]
    assert len(named) == len(tree.all("desc")) == n_svg
    page.encode("utf-8")


def test_hostile_names_stay_text():
    page = page_of({HOSTILE: struck()}, title=HOSTILE, words=HOSTILE)
    tree = Tree(page)
    assert {one["tag"] for one in tree.elements} & {"script", "img"} == set()
    assert tree.all("h1")[0]["text"] == HOSTILE
    assert HOSTILE in [one["text"] for one in tree.all("th")]
    assert not [name for one in tree.elements for name in one if name.startswith("on")]


def test_nothing_is_loaded_and_all_is_labelled():
    tree = Tree(page_of({"exact": struck(), "paged": made("paged")}))
    for one in tree.elements:
        for attribute in ("src", "href", "srcset", "data", "action"):
            assert attribute not in one
    assert "url(" not in tree.all("style")[0]["text"]
    assert "@import" not in tree.all("style")[0]["text"]
    assert "prefers-color-scheme: dark" in tree.all("style")[0]["text"]
    ids = [one["id"] for one in tree.elements if "id" in one]
    assert len(ids) == len(set(ids))
    for section in tree.all("section"):
        assert section["aria-labelledby"] in ids
    assert tree.all("html")[0]["lang"] == "en"
    levels = [int(one["tag"][1]) for one in tree.elements if re.fullmatch("h[1-6]", one["tag"])]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_text_is_readable_on_its_background():
    """By the contrast that WCAG 2 asks of text, 4.5, in both schemes."""
    style = Tree(page_of({"exact": made()})).all("style")[0]["text"]
    schemes = [
        dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.S)
    ]
    assert len(schemes) == 2

    def luminance(colour):
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(first, second):
        low, high = sorted((luminance(first), luminance(second)))
        return (high + 0.05) / (low + 0.05)

    for colours in schemes:
        assert contrast(colours["text"], colours["page"]) >= 4.5
        assert contrast(colours["faint"], colours["page"]) >= 4.5
        assert contrast(colours["need"] if "need" in colours else colours["mark"], colours["page"]) >= 3
        assert contrast(colours["used"], colours["free"]) >= 2


# Errors and files.


def test_no_result_and_no_text_are_refused():
    with pytest.raises(ArgumentError, match="no result"):
        page_of({})
    with pytest.raises(ArgumentTypeError, match="title must be a text"):
        page_of({"exact": made()}, title=None)
    with pytest.raises(ArgumentTypeError, match="words"):
        page_of({"exact": made()}, words=3)
    with pytest.raises(ArgumentError):
        page_of({"exact": made()}, bytes_per_token=0)


def test_the_file_is_whole_or_as_before(tmp_path):
    path = tmp_path / "a.html"
    write_page({"exact": struck()}, path, title="t", words="w")
    before = path.read_text(encoding="utf-8")
    assert before == render_page({"exact": struck()}, title="t", words="w")
    with pytest.raises(ArgumentError):
        write_page({}, path, title="t", words="w")
    assert path.read_text(encoding="utf-8") == before
    assert os.listdir(tmp_path) == ["a.html"]
    with pytest.raises(OSError, match="missing"):
        write_page({"exact": made()}, tmp_path / "missing" / "a.html", title="t", words="w")


def test_a_name_that_is_no_unicode_is_written(tmp_path):
    write_page({"exact": made()}, tmp_path / "a.html", title="bad\udcff", words="w")
    assert "bad?" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_a_browser_shows_it_in_both_schemes_without_a_complaint(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    path = tmp_path / "a.html"
    write_page({HOSTILE: struck(), "paged": made("paged")}, path, title=HOSTILE, words=HOSTILE)
    said, asked, backgrounds = [], [], []
    with playwright.sync_playwright() as browsers:
        try:
            browser = browsers.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
        except playwright.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        for scheme in ("light", "dark"):
            context = browser.new_context(
                color_scheme=scheme, viewport={"width": 400, "height": 800}, offline=True
            )
            page = context.new_page()
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("dialog", lambda dialog: (said.append("a dialog"), dialog.dismiss()))
            page.on("request", lambda request: asked.append(request.url))
            page.goto(path.as_uri())
            backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert page.evaluate("document.documentElement.scrollWidth") <= 400, (
                "a phone does not scroll sideways"
            )
            assert page.locator("svg rect.largest").first.bounding_box()["width"] > 10
        browser.close()
    assert said == []
    assert asked == [path.as_uri()] * 2
    assert backgrounds == ["rgb(255, 255, 255)", "rgb(22, 24, 27)"]


def test_a_moment_of_forty_percent_is_told_to_those_who_do_not_see_it():
    (told,) = [one["text"] for one in Tree(slot_map(FORTY)).all("desc")]
    assert told == "400 of 1 000 slots are free, in 2 holes of at most 200; the request needs 300."
