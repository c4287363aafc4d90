"""The memory map in a browser: what it shows, how it answers, and that nothing leaves or enters it."""

import contextlib
import dataclasses
import json
import random
import re
import shutil

import pytest

from gpuarena import Arena
from gpuarena.errors import OutOfMemoryError
from gpuarena.observe.page import write_page
from gpuarena.observe.timeline import RegionSpan, Rollback, ScopeSpan, Timeline, timeline

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: there is none on this machine")

ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--renderer-process-limit=1",  # a process for each page takes longer than most of what is tested
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def contexts(browser):
    """Where pages are opened, one for each set of options."""
    made = {}

    def of(**options):
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = browser.new_context(offline=True, **options)
            made[key].set_default_timeout(120_000)  # on a machine that is busy
        return made[key]

    return of


@pytest.fixture
def show(contexts, tmp_path):
    """Opens a timeline; at the end, nothing was asked of a network, nothing was printed, nothing popped up."""
    pages, requests, complaints = [], [], []

    def open_page(one, *, title=None, width=1000, height=700, **options):
        path = tmp_path / f"map{len(pages)}.html"
        write_page(one, path, title=title)
        page = contexts(**options).new_page()
        pages.append(page)
        page.set_viewport_size({"width": width, "height": height})
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(path.as_uri())
        settle(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert complaints == []
    assert requests == [(tmp_path / f"map{n}.html").as_uri() for n in range(len(pages))]


def settle(page):
    """Wait until everything is drawn, the table included, which waits for the pointer to rest."""
    page.evaluate(
        "new Promise((done) => { const busy = () => document.querySelector('[aria-busy=true]'),"
        # Timers between the frames: each frame of a loop of frames would be drawn.
        "wait = () => busy() ? setTimeout(wait, 20) : requestAnimationFrame(() => busy() ? wait() : setTimeout(done));"
        "requestAnimationFrame(wait); })"
    )


def seen(page):
    """What the map shows, in pixels, events or nanoseconds, and bytes."""
    return json.loads(page.get_attribute("#plot", "data-view"))


def point(page, x, y):
    """Where a time and an address are on the screen."""
    view, left, top = page.eval_on_selector(
        "#plot",
        "(plot) => { const box = document.getElementById('map').getBoundingClientRect();"
        "return [JSON.parse(plot.dataset.view), box.left, box.top]; }",
    )
    return (
        left + view["left"] + (x - view["x0"]) / (view["x1"] - view["x0"]) * view["width"],
        top + view["top"] + view["height"] - (y - view["y0"]) / (view["y1"] - view["y0"]) * view["height"],
    )


def facts(page, place):
    """A list of terms and values, numbers without the spaces between their digits."""
    rows = page.eval_on_selector(
        place,
        "(node) => node.checkVisibility() ? "
        "[...node.querySelectorAll('dt')].map((dt) => [dt.textContent, dt.nextSibling.textContent]) : []",
    )
    return {term: value.replace("\u202f", "") for term, value in rows}


def cells(page, body):
    return page.eval_on_selector_all(
        f"#{body} tr",
        "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent.replaceAll('\u202f', '')))",
    )


def colour(page, x, y):
    """The pixel of the map there, as red, green and blue."""
    rect = page.locator("#map").bounding_box()
    return tuple(
        page.eval_on_selector(
            "#map",
            "(map, [x, y]) => { const pixel = new OffscreenCanvas(1, 1).getContext('2d'); pixel.drawImage(map, -x, -y);"
            "return [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3); }",
            [int(x - rect["x"]), int(y - rect["y"])],
        )
    )


@pytest.fixture(scope="module")
def log():
    """Both ends, scopes, padding, a failure, regions with and without labels."""
    # Aligned to its largest alignment, so that the padding is the same wherever the memory lies.
    arena, rng = Arena("1MiB", name="model", alignment=65_536), random.Random(5)
    with arena.record() as trace:
        arena.alloc(100_000, "uint8", label="weights")
        arena.alloc(3, "uint8", label="bias")
        arena.alloc((50, 1000), "float32", label="cache", side="high")
        for step in range(4):
            with arena.scope(f"step {step}"):
                arena.alloc(rng.randrange(100_000, 200_000), "uint8", label="activations")
                with arena.scope("mlp"):
                    arena.alloc((rng.randrange(20, 90), 512), "float16")
                with contextlib.suppress(OutOfMemoryError):
                    arena.alloc(900_000 if step == 2 else 40_000, "uint8", label="Hidden")
    found, times = timeline(trace.events), [0]
    while len(times) < found.n_events:  # uneven, and the same each time
        times.append(times[-1] + rng.randrange(0, 900_000))
    return dataclasses.replace(found, times_ns=tuple(times))


def live(one, event):
    """The regions that are live after an event, by address: each ends with the event that ended it."""
    stop = one.n_events
    return sorted(
        (r for r in one.regions if r.start <= event < (stop if r.stop is None else r.stop)),
        key=lambda r: r.offset,
    )


def held(one, event, address):
    """The region that has that byte then, by itself or as its padding; None if it is free."""
    for region in live(one, event):
        low, high = region.offset, region.offset + region.nbytes
        low, high = (low - region.padding, high) if region.side == "low" else (low, high + region.padding)
        if low <= address < high:
            return region
    return None


def test_the_page_says_what_the_log_holds(show, log):
    page = show(log, title="run 7")
    assert page.title() == page.text_content("h1") == "run 7"
    line = page.text_content("#facts").replace("\u202f", " ")
    for words in ("arena model", "1 048 576 bytes (1.00 MiB)", f"{log.n_events} events", "1 failure"):
        assert words in line
    assert f"{len(log.regions)} regions" in line
    assert facts(page, "#now")["high-water"].startswith(f"{log.peaks[-1][1]} bytes")
    # The cursor begins where most was taken.
    assert seen(page)["cursor"] == log.peaks[-1][0]
    # The high-water line is dashed: some of the pixels along it are not of free space, as those above it are.
    event, peak = next((e, p) for e, p in log.peaks if held(log, e, p) is held(log, e, p + 20_000) is None)
    x, y = point(page, event + 0.2, peak)
    free = colour(page, *point(page, 0.5, log.capacity / 2))
    line, above = ({colour(page, x + dx, y - dy) for dx in range(0, 12, 2)} for dy in (0, 6))
    assert line - {free}
    assert above == {free}


@pytest.mark.parametrize(("scale", "unit"), [(1, "events"), (1.5, "ms")])
def test_what_is_under_the_pointer_is_what_was_there(show, log, scale, unit):
    page, rng, kinds = show(log, device_scale_factor=scale), random.Random(1), []
    page.click("#whole")
    if unit == "ms":
        page.check("#by-time")
    settle(page)
    view = seen(page)
    if unit == "events":
        at = list(range(log.n_events + 1))
    else:
        last = log.times_ns[-1]
        at = [*log.times_ns, last + max(last / 100, 1)]
    assert (view["x0"], view["x1"]) == (0, pytest.approx(at[-1]))
    tall = log.capacity / view["height"]  # bytes a pixel
    wide = at[-1] / view["width"]
    padded = [region for region in log.regions if region.padding]
    while len(kinds) < 12:
        x, address = rng.uniform(0, at[-1]), rng.uniform(0, log.capacity)
        if len(kinds) % 3:  # few points of all are in regions, and fewer in padding
            region = rng.choice(padded)
            x = rng.uniform(at[region.start], at[log.n_events if region.stop is None else region.stop])
            low, high = region.offset, region.offset + region.nbytes
            if len(kinds) % 3 == 1:
                low, high = (
                    (low - region.padding, low) if region.side == "low" else (high, high + region.padding)
                )
            address = rng.uniform(low, high)
        around = {
            held(
                log,
                max(e for e in range(log.n_events) if at[e] <= max(0, x + dx * wide)),
                address + dy * tall,
            )
            for dx in (-2, 0, 2)
            for dy in (-2, 0, 2)
        }
        if len(around) > 1:
            continue  # an edge
        (region,) = around
        page.mouse.move(*point(page, x, address))
        tip = facts(page, "#tip")
        assert bool(tip) == (region is not None)
        if region is None:
            kinds.append("free")
            continue
        inside = region.offset <= address < region.offset + region.nbytes
        kinds.append("region" if inside else "padding")
        assert tip["label"] == (region.label or "no label")
        assert tip["dtype"] == region.dtype
        assert json.loads(tip["shape"]) == list(region.shape)
        assert tip["size"].split()[0] == str(region.nbytes)
        assert tip["offset"] == f"{region.offset}, {region.side} end"
        assert tip["end"] == str(region.offset + region.nbytes)
        assert tip["padding"].split()[0] == str(region.padding)
        assert tip["call site"] == region.site
        assert re.search(r"test_view\.py:\d+$", tip["call site"])
        until = "the end, live" if region.stop is None else f"event {region.stop} "
        assert tip["live"].startswith(f"event {region.start} ")
        assert f" to {until}" in tip["live"]
        n_events = (log.n_events if region.stop is None else region.stop) - region.start
        duration = log.times_ns[-1 if region.stop is None else region.stop] - log.times_ns[region.start]
        assert tip["live"].endswith(f": {n_events} event{'s' * (n_events != 1)}, {duration / 1e6:.3f} ms")
    assert set(kinds) == {"free", "region", "padding"}


def test_a_click_pins_and_escape_lets_go(show, log):
    page = show(log)
    weights = log.regions[0]
    x, y = point(page, 8.5, 50_000)
    page.mouse.click(x, y)
    settle(page)
    assert facts(page, "#region")["label"] == "weights"
    assert "weights, uint8 [100000]" in page.text_content("#live")
    assert "pinned" in page.text_content("#live")
    assert page.text_content("#region-head") == "Region, pinned"
    assert page.locator("#rows tr[aria-current=true]").text_content().startswith("weights")
    page.mouse.move(x + 200, y)  # the cursor stays where it was pinned
    settle(page)
    assert seen(page)["cursor"] == 8
    page.keyboard.press("Escape")
    page.mouse.move(x + 150, y)
    settle(page)
    assert seen(page)["cursor"] > 8
    assert facts(page, "#region") == {}
    assert weights.label == "weights"


def test_figures_at_the_cursor_are_those_of_the_event(show, log):
    page = show(log)
    page.focus("#plot")
    page.keyboard.press("Home")
    peaks = dict.fromkeys([r.label for r in log.regions], 0)
    ends = sorted({r.stop for r in log.regions if r.stop is not None})[::3]
    for event in range(log.n_events):
        there = live(log, event)
        by_label = dict.fromkeys(peaks, 0)
        for region in there:
            by_label[region.label] += region.nbytes
        peaks = {label: max(nbytes, by_label[label]) for label, nbytes in peaks.items()}
        if event % 10 == 0 or event in ends:
            settle(page)
            now = facts(page, "#now")
            used, padding = sum(r.nbytes for r in there), sum(r.padding for r in there)
            assert now["event"].startswith(f"{event} of {log.n_events}")
            assert now["time"] == f"{log.times_ns[event] / 1e6:.3f} ms"
            assert [int(now[k].split()[0]) for k in ("regions", "in use", "padding", "free")] == [
                len(there), used, padding, log.capacity - used - padding,
            ]  # fmt: skip
            expected = [
                [
                    r.label or "no label",
                    str(r.nbytes),
                    str(r.offset),
                    str(r.offset + r.nbytes),
                    str(r.padding),
                ]
                for r in reversed(there)
            ]
            assert [row[:5] for row in cells(page, "rows")] == expected
            found = {label: at for label, at, _ in cells(page, "legend")}
            assert found == {
                label or "no label": short(nbytes) if nbytes else "\u2013"
                for label, nbytes in by_label.items()
            }
        page.keyboard.press("ArrowRight")
    assert {label: peak for label, _, peak in cells(page, "legend")} == {
        label or "no label": short(nbytes) for label, nbytes in peaks.items()
    }


def short(nbytes):
    return f"{nbytes} B" if nbytes < 1024 else f"{nbytes / 1024:.2f} KiB"


def test_keys_walk_through_regions_and_events(show, log):
    page = show(log)
    page.focus("#plot")
    page.keyboard.press("Home")
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    settle(page)
    assert seen(page)["cursor"] == 8
    there = live(log, 8)
    for region in there:  # upwards, one after the other
        page.keyboard.press("ArrowUp")
        assert f"{region.nbytes} bytes" in page.text_content("#live").replace("\u202f", "")
        assert (region.label or "no label") in page.text_content("#live")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    settle(page)
    assert facts(page, "#region")["offset"].split(",")[0] == str(there[-2].offset)
    assert page.text_content("#region-head") == "Region, pinned"
    page.keyboard.press("End")
    assert f"event {log.n_events - 1}" in page.text_content("#live")
    page.keyboard.press("f")
    assert f"event {log.failures[0].index}, failure: 900000 bytes" in page.text_content("#live").replace(
        "\u202f", ""
    )
    page.keyboard.press("Home")
    page.keyboard.press("r")
    assert f"event {log.rollbacks[0].index}, rollback" in page.text_content("#live")


def test_a_selection_keeps_its_address_when_its_region_ends(show, log):
    page = show(log)
    first, second = [r for r in log.regions if r.label == "activations"][:2]
    assert first.offset == second.offset
    page.mouse.click(*point(page, first.start + 0.5, first.offset + 10))
    for event in range(first.start + 1, second.start + 1):
        page.keyboard.press("ArrowRight")
        region = held(log, event, first.offset)
        settle(page)
        assert seen(page)["cursor"] == event
        assert facts(page, "#region").get("live", "").startswith(f"event {region.start} " if region else "")
        assert ("nothing at this address" in page.text_content("#live")) is (region is None)
    assert held(log, second.start, first.offset) == second
    page.keyboard.press("n")  # without a search: the next region as they were made
    settle(page)
    following = log.regions[log.regions.index(second) + 1]
    assert facts(page, "#region")["live"].startswith(f"event {following.start} ")


def test_tab_reaches_everything_and_shows_where_it_is(show, log):
    page, reached = show(log), []
    for _ in range(30):
        page.keyboard.press("Tab")
        name, width, style = page.evaluate(
            "(() => { const it = document.activeElement, css = getComputedStyle(it);"
            "return [it.id || it.closest('tbody')?.id, parseFloat(css.outlineWidth), css.outlineStyle]; })()"
        )
        if not name:
            break
        reached.append(name)
        assert (width, style) == (2, "solid"), name
    wanted = [
        "theme",
        "search",
        "by-event",
        "zoom-in",
        "zoom-out",
        "used",
        "whole",
        "failure",
        "plot",
        "legend",
    ]
    assert [name for name in reached if name != "scroller"] == [*wanted, "rows"]
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    # From the first of a list, arrows go on.
    page.focus("#legend button")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("#legend button[aria-pressed=true]").count() == 1
    label = cells(page, "legend")[1][0]
    assert page.text_content("#count").endswith(f"of {label}")
    page.keyboard.press("Enter")
    assert page.locator("#legend button[aria-pressed=true]").count() == 0
    page.focus("#rows button")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    settle(page)
    assert facts(page, "#region")["label"] == cells(page, "rows")[1][0]


def test_search_counts_steps_and_dims(show, log):
    page = show(log)
    matches = [r for r in log.regions if r.label == "Hidden"]
    weights = point(page, 8.5, 60_000)
    bright = colour(page, *weights)
    page.keyboard.press("/")
    page.keyboard.type("hidd")
    settle(page)
    assert page.text_content("#count") == f"{len(matches)} regions"
    assert colour(page, *weights) != bright
    for n, match in enumerate([*matches, matches[0]]):
        page.keyboard.press("Enter")
        settle(page)
        assert page.text_content("#count") == f"{n % len(matches) + 1} of {len(matches)} regions"
        assert facts(page, "#region")["offset"] == f"{match.offset}, low end"
        assert facts(page, "#region")["live"].startswith(f"event {match.start} ")
    page.click("#previous")
    assert page.text_content("#count") == f"{len(matches)} of {len(matches)} regions"
    page.fill("#search", "test_view.PY")  # call sites are searched as well
    assert page.text_content("#count").replace("\u202f", "") == f"{len(log.regions)} regions"
    page.fill("#search", "float32")  # types are not
    assert page.text_content("#count") == "no region matches"
    assert page.is_disabled("#next")
    page.focus("#search")
    page.keyboard.press("Escape")
    settle(page)
    assert page.input_value("#search") == page.text_content("#count") == ""
    assert colour(page, *weights) == bright


def test_wheel_drag_and_keys_move_the_view(show, log):
    page = show(log)
    before = seen(page)
    x, y = point(page, 10.5, 100_000)
    page.mouse.move(x, y)
    page.mouse.wheel(0, -300)
    settle(page)
    after = seen(page)
    assert after["x1"] - after["x0"] < before["x1"] - before["x0"]
    assert (after["y0"], after["y1"]) == (before["y0"], before["y1"])
    assert point(page, 10.5, 100_000) == pytest.approx((x, y), abs=1)  # what is under the pointer stays there
    page.mouse.down()
    page.mouse.move(x + 60, y, steps=3)
    page.mouse.up()
    settle(page)
    assert point(page, 10.5, 100_000)[0] == pytest.approx(x + 60, abs=2)
    assert facts(page, "#region") == {}  # a drag is no click
    page.keyboard.down("Shift")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Shift")
    settle(page)
    assert seen(page)["y1"] - seen(page)["y0"] < after["y1"] - after["y0"]
    page.focus("#plot")
    wide = seen(page)["x1"] - seen(page)["x0"]
    for key, share in (("+", 0.5), ("-", 1)):
        page.keyboard.press(key)
        settle(page)
        assert seen(page)["x1"] - seen(page)["x0"] == pytest.approx(share * wide)
    left = seen(page)["x0"]
    page.keyboard.press("Shift+ArrowRight")
    settle(page)
    assert seen(page)["x0"] == pytest.approx(left + 0.1 * wide)
    page.keyboard.press("0")
    settle(page)
    assert {k: seen(page)[k] for k in ("x0", "x1", "y0")} == {"x0": 0, "x1": log.n_events, "y0": 0}
    for _ in range(60):  # neither way leads out of the arena
        page.keyboard.press("+")
    page.keyboard.press("End")
    settle(page)
    view = seen(page)
    assert 0 <= view["x0"] <= view["cursor"] <= view["x1"] <= log.n_events


def test_marks_and_scopes_say_what_they_are(show, log):
    page = show(log)
    view, rect = seen(page), page.locator("#map").bounding_box()
    failure, back = log.failures[0], log.rollbacks[0]
    below = rect["y"] + view["top"] + view["height"] + 6
    page.mouse.move(point(page, failure.index, 0)[0], below)
    tip = facts(page, "#tip")
    assert (tip["asked for"].split()[0], tip["label"], tip["call site"]) == ("900000", "Hidden", failure.site)
    page.mouse.move(point(page, back.index, 0)[0], below)
    tip = facts(page, "#tip")
    assert tip["rollback"].endswith(f"{back.n_regions} region{'s' * (back.n_regions != 1)} dropped")
    assert tip["pointer"] == f"{back.old_top} to {back.new_top}"
    for scope in log.scopes:
        lane = 1 if scope.label == "mlp" else 0
        page.mouse.move(point(page, scope.start + 0.5, 0)[0], rect["y"] + 2 + 14 * lane + 6)
        tip = facts(page, "#tip")
        assert tip["scope"] == scope.label
        assert tip["open"].startswith(f"event {scope.start} ")


HOSTILE = [
    "</script><script>document.hacked = 1; alert(1)</script>",
    "<img src=x onerror='document.hacked = 1; alert(1)'>",
    "<svg onload=alert(1)>",
    "&amp;&lt;b&gt;",
    "\"'`${document.hacked = 1}",
    "javascript:alert(1)",
]


def odd_timeline(labels):
    n = len(labels)
    regions = tuple(
        RegionSpan("low", 1000 * i, 1000, 0, (1000,), label or "", label, label or "", i, None)
        for i, label in enumerate(labels)
    )
    scopes = tuple(ScopeSpan("low", label, label or "", 0, i, None) for i, label in enumerate(labels))
    backs = (Rollback(n - 1, "low", 5, 0, 0, labels[0] or ""),)
    return Timeline(
        labels[0],
        labels[0] or "",
        1000 * n,
        tuple(range(n)),
        regions,
        scopes,
        backs,
        (),
        ((n - 1, 1000 * n),),
    )


def test_labels_that_are_markup_are_shown_and_do_nothing(show):
    page = show(odd_timeline(HOSTILE), title=HOSTILE[0])
    elements = "[...document.querySelectorAll('body *')].map((node) => node.localName)"
    assert page.title() == page.text_content("h1") == HOSTILE[0]
    page.focus("#plot")
    page.keyboard.press("End")
    for label in HOSTILE:
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Enter")
        assert label in page.text_content("#live")
        settle(page)
        region = facts(page, "#region")
        assert region["label"] == region["dtype"] == region["call site"] == label
    assert [row[0] for row in cells(page, "rows")] == HOSTILE[::-1]
    assert {row[0] for row in cells(page, "legend")} == set(HOSTILE)
    for n, label in enumerate(HOSTILE):
        page.mouse.move(*point(page, n + 0.5, 1000 * n + 500))
        assert facts(page, "#tip")["label"] == label
        page.fill("#search", label)
        settle(page)
        assert page.text_content("#count") == "1 region"
    assert not {"img", "svg", "b"} & set(page.evaluate(elements))
    assert page.locator("script").count() == 2
    assert page.evaluate("document.hacked") is None
    # The policy holds on its own: a script that came in by another way would not run.
    page.evaluate("document.body.append(Object.assign(document.createElement('p'), {id: 'new'}))")
    assert "script-src 'sha256-" in page.get_attribute("meta[http-equiv]", "content")


def test_labels_that_cannot_be_seen_are_made_visible_and_told_apart(show):
    labels = [
        None,
        "None",
        "no label",
        "",
        "a\u202eb",
        "c\x00\n\u2028d",
        "\ud800",
        "\u6f22\U0001f600",
        "x" * 10_000,
    ]
    shown = [
        "no label", "None", "no label", "empty label", "a\u2039U+202E\u203ab", "c\u2039U+0000\u203a\u2039U+000A\u203a\u2039U+2028\u203ad",
        "\u2039U+D800\u203a", "\u6f22\U0001f600", f"{'x' * 60}\u2026 (10000 characters)",
    ]  # fmt: skip
    page = show(odd_timeline(labels))
    page.focus("#plot")
    page.keyboard.press("End")
    settle(page)
    assert [row[0] for row in cells(page, "rows")] == shown[::-1]
    assert sorted(row[0] for row in cells(page, "legend")) == sorted(shown)
    # No label is told from a label of that text.
    rows = page.locator("#rows tr")
    assert rows.nth(len(labels) - 1).locator(".none").count() == 1
    assert rows.nth(len(labels) - 3).locator(".none").count() == 0
    page.keyboard.press("ArrowDown")
    settle(page)
    assert facts(page, "#region")["label"] == "x" * 10_000
    box = page.locator("#region").bounding_box()
    assert box["height"] < 1000
    page.keyboard.press("ArrowDown")
    settle(page)
    assert facts(page, "#region")["label"] == "\u6f22\U0001f600"


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_dark_and_light(show, log):
    free = {}
    for scheme in ("light", "dark"):
        page = show(log, color_scheme=scheme, reduced_motion="reduce")
        free[scheme] = colour(page, *point(page, 0.5, 500_000))
        at_first = background(page)
        weights = colour(page, *point(page, 8.5, 60_000))
        page.click("#theme")
        settle(page)
        assert background(page) != at_first
        assert colour(page, *point(page, 0.5, 500_000)) != free[scheme]
        assert colour(page, *point(page, 8.5, 60_000)) == weights  # a label keeps its colour
        page.click("#theme")
        assert background(page) == at_first
        assert page.evaluate("getComputedStyle(document.getElementById('theme')).transitionDuration") == "0s"
        page.emulate_media(color_scheme="dark" if scheme == "light" else "light")  # the switch wins
        assert background(page) == at_first
    assert sum(free["light"]) > 600
    assert sum(free["dark"]) < 200


@pytest.mark.parametrize("width", [800, 1600])
def test_everything_fits(show, log, width):
    page = show(log, width=width, height=900, title="a title " * 40)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    plot = page.locator("#plot").bounding_box()
    assert plot["width"] > 0.65 * width
    assert plot["height"] > 350
    for place in ("#theme", "#search", "#failure", "#now", "#legend", "#rows", "#help"):
        box = page.locator(place).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + min(box["width"], 50) <= width
    page.set_viewport_size({"width": 1000, "height": 900})  # what is drawn follows
    settle(page)
    assert seen(page)["width"] == pytest.approx(page.locator("#plot").bounding_box()["width"] - 88, abs=1)
    page.mouse.move(*point(page, 8.5, 50_000))
    assert facts(page, "#tip")["label"] == "weights"


def test_the_tip_is_of_what_lies_there_now(show, log):
    page = show(log)
    page.focus("#plot")
    page.mouse.move(*point(page, 8.5, 50_000))
    assert facts(page, "#tip")["label"] == "weights"
    page.keyboard.press("ArrowRight")  # keys take over
    assert facts(page, "#tip") == {}
    x, y = point(page, 9.5, 50_000)
    page.mouse.move(x, y)
    page.fill("#search", "cache")
    page.keyboard.press("Enter")  # the view goes there, and the pointer rests
    page.evaluate("for (let i = 0; i < 2; i++) document.getElementById('zoom-in').click()")
    settle(page)
    view, rect = seen(page), page.locator("#map").bounding_box()
    time = view["x0"] + (x - rect["x"] - view["left"]) / view["width"] * (view["x1"] - view["x0"])
    assert int(time) != 9
    under = held(log, int(time), 50_000)
    assert facts(page, "#tip").get("label") == (under and (under.label or "no label"))
    assert not page.locator("#tip").is_hidden() or under is None


def test_the_tip_stays_inside_the_map(show, log):
    page = show(log)
    plot = page.locator("#plot").bounding_box()
    page.click("#whole")
    settle(page)
    for x, y in ((log.n_events - 0.3, 2000), (log.n_events - 0.3, log.capacity - 2000), (2.5, 2000)):
        page.mouse.move(*point(page, x, y))
        tip = page.locator("#tip").bounding_box()
        assert plot["x"] <= tip["x"]
        assert tip["x"] + tip["width"] <= plot["x"] + plot["width"] + 1
        assert plot["y"] <= tip["y"]
        assert tip["y"] + tip["height"] <= plot["y"] + plot["height"] + 1


def test_a_hundred_thousand_events(show):
    n = 100_000
    regions = [RegionSpan("low", 0, 2**20, 0, (2**20,), "uint8", "weights", "a.py:1", 0, None)]
    for event in range(1, n - 1, 2):
        size = 2**18 + event
        regions.append(
            RegionSpan(
                "low", 2**20, size, 0, (size,), "uint8", f"layer.{event % 86}", "a.py:2", event, event + 1
            )
        )
    backs = tuple(Rollback(e, "low", 2**21, 2**20, 1, "") for e in range(2, n, 2))
    one = Timeline(
        "large",
        "cpu",
        2**21,
        tuple(range(0, 10 * n, 10)),
        tuple(regions),
        (),
        backs,
        (),
        ((0, 2**20), (n - 3, 2**20 + 2**18 + n - 3)),
    )
    page = show(one)
    page.mouse.move(*point(page, n // 2, 2**19))
    assert facts(page, "#tip")["label"] == "weights"
    page.mouse.move(
        *point(page, n // 2, 2**20 + 2**17)
    )  # hundreds of regions share that pixel; one of them answers
    assert facts(page, "#tip")["label"].startswith("layer.")
    assert abs(seen(page)["cursor"] - n // 2) < 500
    page.fill("#search", "layer.85")
    expected = [r for r in regions if r.label == "layer.85"]
    settle(page)
    assert page.text_content("#count").replace("\u202f", "") == f"{len(expected)} regions"
    page.click("#previous")  # the last; it is brought into view
    settle(page)
    view, last = seen(page), expected[-1]
    assert view["x1"] - view["x0"] < 100
    assert facts(page, "#region")["offset"].startswith(str(2**20))
    page.mouse.move(*point(page, last.start + 0.5, 2**20 + 2**17))
    assert facts(page, "#tip")["size"].startswith(f"{last.nbytes} ")


def test_several_arenas_take_turns(show, log):
    other = Timeline(
        "other",
        "cuda:0",
        4096,
        (0,),
        (RegionSpan("low", 0, 64, 0, (64,), "uint8", "only", "", 0, None),),
        (),
        (),
        (),
        ((0, 64),),
    )
    page = show([log, other])
    page.fill("#search", "only")
    page.select_option("#which", "1")
    settle(page)
    assert "cuda:0" in page.text_content("#facts")
    assert page.text_content("#count") == "1 region"
    assert [row[0] for row in cells(page, "rows")] == ["only"]
    assert page.is_disabled("#by-time")  # one moment
    page.select_option("#which", "0")
    settle(page)
    assert page.is_enabled("#by-time")
    assert page.text_content("#count") == "no region matches"


def test_a_log_of_nothing_and_one_without_events(show):
    page = show(Timeline(None, "cpu", 1024, (), (), (), (), (), ()))
    assert "0 events" in page.text_content("#facts")
    for key in ("ArrowRight", "ArrowUp", "+", "0", "n", "f", "r", "Escape"):
        page.locator("#plot").press(key)
    assert page.text_content("#table-head") == "Regions at the cursor: 0"
    held_before = RegionSpan("low", 0, 512, 0, (512,), "uint8", "held", "", -1, None)
    page = show(Timeline(None, "cpu", 1024, (), (held_before,), (), (), (), ((-1, 512),)))
    assert [row[0] for row in cells(page, "rows")] == ["held"]
    page.mouse.move(*point(page, 0.5, 256))
    assert facts(page, "#tip")["live"].startswith("before the log to the end, live")
