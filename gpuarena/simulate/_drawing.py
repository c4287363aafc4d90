"""Figures of a simulation as parts of a page: SVG and tables, made as text in which every name is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from gpuarena.simulate._format import class_bounds, class_label, count, grouped, percent, seconds
from gpuarena.simulate.result import Moment, Result, Sample

__all__ = ["PARTS", "classes_table", "figures_table", "share_bars", "slot_map", "time_area"]

#: Fields of a `Sample`, and of a `Result` after ``sum_``; also the classes of the page's style.
PARTS = ("used", "reserved", "internal", "free")

_WIDTH = 1000  # of a drawing, in its own units; the page scales it
_ROWS = 4  # of the map of slots, so that a hole of a hundredth of them is seen


def figures_table(results: Mapping[str, Result], bytes_per_token: int | None) -> str:
    """Return the figures of all policies as a table with a row each; what none of them has is left out."""
    scale = (bytes_per_token or 0) / 1e9
    columns: dict[str, list[str]] = {
        "policy": list(results),
        "slots": [grouped(one.capacity) for one in results.values()],
        "GB": [f"{one.capacity * scale:.2f}" if scale else "" for one in results.values()],
        "requests": [grouped(one.requests) for one in results.values()],
        "done": [grouped(one.done) for one in results.values()],
        "% of them": [percent(one.done, one.requests) for one in results.values()],
        "running, mean": [f"{one.mean_running:.1f}" for one in results.values()],
        "too few free": [_some(one.first_fail_nofree) for one in results.values()],
        "no hole": [_some(one.first_fail_frag) for one in results.values()],
        "turned away": [_some(one.rejected) for one in results.values()],
        "never started": [_some(one.unadmitted) for one in results.values()],
        "median wait": [seconds(one.wait_p50_s) for one in results.values()],
        "1 in 100 waits": [seconds(one.wait_p99_s) for one in results.values()],
        "preempted": [_some(one.preempt) for one in results.values()],
        "tokens copied": [_some(one.copied) for one in results.values()],
    }
    shown = {head: cells for head, cells in columns.items() if head == "policy" or any(map(str.strip, cells))}
    rows = [[cell or "0" for cell in row] for row in zip(*shown.values(), strict=True)]
    caption = (
        "A slot is for one token. Too few free, no hole: why requests did not fit at their first attempt. "
        "Preempted: how often running requests gave up their slots. Waits are of those that started."
    )
    return _table(list(shown), rows, caption)


def _some(number: int) -> str:
    """Return a number, and nothing for 0, so that a column without any can be left out."""
    return grouped(number) if number else ""


def classes_table(results: Mapping[str, Result]) -> str:
    """Return the share of the requests of each length that failed, a row a policy."""
    bounds = class_bounds(results.values())
    if not bounds:
        return "<p>There is no figure by length.</p>"
    rows = []
    for name, one in results.items():
        shares = {
            (each.least, each.limit): percent(
                each.n_rejected if one.reject else each.n_failed, each.n_requests
            )
            for each in one.classes
            if each.n_requests
        }
        rows.append([name, *(shares.get(bound, "-") for bound in bounds)])
    heads = ["policy", *(class_label(*bound) for bound in bounds)]
    rejects = any(one.reject for one in results.values())
    what = "turned away" if rejects else "that did not fit at their first attempt"
    return _table(heads, rows, f"Share of the requests {what}, by prompt and output in tokens.")


def share_bars(results: Mapping[str, Result]) -> str:
    """Return one bar a policy: what its slots are in the mean over all steps."""
    row, left = 30, 190
    drawn, says = [], []
    for index, (name, one) in enumerate(results.items()):
        whole = one.capacity * one.steps
        x, y = float(left), index * row
        drawn.append(f'<text x="0" y="{y + 17}">{escape(_short(name))}</text>')
        parts = []
        for part in PARTS:
            slots = getattr(one, f"sum_{part}")
            wide = (_WIDTH - left) * slots / whole if whole else 0.0
            parts.append(f"{percent(slots, whole)} {part}")
            drawn.append(_rect(part, x, y + 2, wide, row - 8, f"{name}: {parts[-1]}"))
            x += wide
        says.append(f"{name}: {', '.join(parts)}")
    height = row * len(results) + 18
    drawn.extend(
        f'<text x="{left + (_WIDTH - left) * at / 100:g}" y="{height - 4}" text-anchor="{anchor}">{at} %</text>'
        for at, anchor in ((0, "start"), (50, "middle"), (100, "end"))
    )
    return _svg(height, "What the slots are, mean over all steps", "; ".join(says), drawn)


def time_area(name: str, one: Result) -> str:
    """Return what the slots are at each sampled step, as areas on top of each other."""
    if len(one.samples) < 2:
        return f"<div><h3>{escape(name)}</h3><p class='note'>Too few samples to draw.</p></div>"
    wide, high, bottom = 400, 160, 18
    first, last = one.samples[0].step, one.samples[-1].step

    def point(sample: Sample, level: int) -> str:
        x = wide * (sample.step - first) / max(1, last - first)
        return f"{x:.2f},{high * (1 - level / one.capacity):.2f}"

    drawn = []
    below = [0] * len(one.samples)
    for part in PARTS:
        above = [level + getattr(sample, part) for level, sample in zip(below, one.samples, strict=True)]
        forth = [point(sample, level) for sample, level in zip(one.samples, above, strict=True)]
        back = [point(sample, level) for sample, level in zip(one.samples, below, strict=True)][::-1]
        drawn.append(f'<polygon class="{part}" points="{" ".join(forth + back)}"/>')
        below = above
    worst = one.worst
    if worst is not None and first <= worst.step <= last:
        x = wide * (worst.step - first) / max(1, last - first)
        drawn.append(f'<line class="when" x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{high}"/>')
    drawn.append(f'<line class="axis" x1="0" x2="{wide}" y1="{high}" y2="{high}"/>')
    rate = max(1, one.rate)
    for x, step, anchor in ((0, first, "start"), (wide, last, "end")):
        drawn.append(f'<text x="{x}" y="{high + 14}" text-anchor="{anchor}">{seconds(step / rate)}</text>')
    most = max(sample.used for sample in one.samples)
    says = f"At most {grouped(most)} of {grouped(one.capacity)} slots hold a token at the sampled steps."
    picture = _svg(high + bottom, f"The slots of {name} over time", says, drawn, width=wide)
    return f"<div><h3>{escape(name)}, {grouped(one.capacity)} slots</h3>{picture}</div>"


def slot_map(moment: Moment) -> str:
    """Return where the allocations and the holes lie, the largest hole marked, and the request to the same scale."""
    row, gap = 34, 8
    per_row = -(-moment.capacity // _ROWS)
    scale = _WIDTH / per_row

    def rects(kind: str, start: int, length: int, title: str) -> Iterator[str]:
        for index, begin, end in _cut(start, length, per_row):
            yield _rect(kind, begin * scale, index * (row + gap), (end - begin) * scale, row, title)

    drawn: list[str] = []
    for start, length in moment.holes:
        drawn.extend(rects("free", start, length, f"hole of {count(length, 'slot')} at {grouped(start)}"))
    for start, length, held in moment.allocations:
        title = f"allocation of {count(length, 'slot')} at {grouped(start)}, {count(held, 'token')} held"
        drawn.extend(rects("used", start, held, title))
        drawn.extend(rects("reserved", start + held, length - held, title))
        index, begin, _ = next(_cut(start, 1, per_row))
        x, y = begin * scale, index * (row + gap)
        drawn.append(f'<line class="gap" x1="{x:.2f}" x2="{x:.2f}" y1="{y}" y2="{y + row}"/>')
    largest = max(moment.holes, key=lambda hole: hole[1], default=None)
    if largest is not None:
        drawn.extend(rects("largest", *largest, f"the largest hole, {count(largest[1], 'slot')}"))
    y = _ROWS * (row + gap) + 20
    drawn.append(
        f'<text x="0" y="{y - 5}">the request, {count(moment.need, "slot")}, to the same scale</text>'
    )
    for index, begin, end in _cut(0, moment.need, per_row):
        at = y + index * (row // 2 + 2)
        drawn.append(_rect("need", begin * scale, at, (end - begin) * scale, row // 2, "the request"))
    height = y + (-(-moment.need // per_row)) * (row // 2 + 2)
    says = (
        f"{grouped(moment.free)} of {grouped(moment.capacity)} slots are free, in {count(len(moment.holes), 'hole')} of at "
        f"most {grouped(moment.largest_hole)}; the request needs {grouped(moment.need)}."
    )
    return _svg(height, f"The slots {seconds(moment.time_s)} after the first arrival", says, drawn)


def _cut(start: int, length: int, per_row: int) -> Iterator[tuple[int, int, int]]:
    """Yield row, begin and end in that row of each part of a run of slots."""
    end = start + length
    while start < end:
        index, begin = divmod(start, per_row)
        stop = min(end, (index + 1) * per_row)
        yield index, begin, stop - index * per_row
        start = stop


def _rect(kind: str, x: float, y: float, width: float, height: float, title: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:g}" width="{max(0.0, width):.2f}" height="{height:g}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _svg(height: float, title: str, says: str, drawn: Iterable[str], *, width: int = _WIDTH) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height:g}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}</title><desc>{escape(says)}</desc>{''.join(drawn)}</svg>"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    head = "".join(f'<th scope="col">{escape(one)}</th>' for one in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _short(name: str) -> str:
    return name if len(name) <= 24 else name[:23] + "\N{HORIZONTAL ELLIPSIS}"
