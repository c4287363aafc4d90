"""Results as tables, and as one Markdown document.

A `Sheet` is a table of texts: headings, and rows of cells. It is made here from a group, from checks or from tests,
and drawn by two renderers: `markdown` below, and the tables of ``gpuarena bench`` in a terminal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuarena.bench._labels import NOT_MEASURED, OUTCOMES, complete, failures, label, parts
from gpuarena.errors import ArgumentError

__all__ = ["Sheet", "checks_sheet", "figure_text", "group_sheet", "markdown", "sheets", "sheets_of_tests"]

#: What Markdown would not show as it is; an underscore within a word it does.
_MARKUP = re.compile(r"[\\|<>*`\[\]]|(?<![^\W_])_|_(?![^\W_])")
#: Letters of a failed test's message that are shown.
_MESSAGE_LIMIT = 300


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table of texts.

    >>> Sheet("copies", ("", "ratio"), (("a", "1.00"), ("b", "2.50"))).markdown()
    ['| | ratio |', '|---|---:|', '| a | 1.00 |', '| b | 2.50 |']
    """

    title: str
    headings: tuple[str, ...]
    """Of the columns; the first is that of the rows' names."""
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    """Sentences below the table."""
    are_numbers: bool = True
    """Whether all columns but the first hold numbers, which stand on the right."""

    def markdown(self) -> list[str]:
        """Return the lines of the table, without title and notes."""
        rule = ["---", *(["---:" if self.are_numbers else "---"] * (len(self.headings) - 1))]
        lines = [_line(self.headings), f"|{'|'.join(rule)}|"]
        return lines + [_line(row) for row in self.rows]


def _line(cells: Sequence[str]) -> str:
    return "|" + "|".join(f" {_cell(cell)} " if cell else " " for cell in cells) + "|"


def _cell(text: str) -> str:
    r"""Return a text that Markdown shows as it is, in one cell of one line.

    >>> print(_cell("a | b_c\n<d> *e* __f__"))
    a \| b_c \<d\> \*e\* \_\_f\_\_
    """
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


# -- a group ----------------------------------------------------------------------------------------------------------


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}"


#: What rows may hold besides times: the heading, and how a figure reads. Others are told by the end of their names.
_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "floor_ratio": ("x floor", "{:.2f}".format),
    "write_amplification": ("x written", "{:.2f}".format),
    "launches": ("launches", "{:.0f}".format),
    "peak_nbytes": ("peak, MB", _megabytes),
    "allocated_nbytes": ("allocated, B", "{:.0f}".format),
    "nbytes": ("bytes", "{:.0f}".format),
    "bytes_per_token": ("B/token", "{:.0f}".format),
    "logits_difference": ("off by, std", "{:.1e}".format),
}
_TIMES = ("median_s", "quartiles_s", "ratio")


def _figure(name: str) -> tuple[str, Callable[[float], str]]:
    """Return the heading of a figure and how it reads."""
    if name in _FIGURES:
        return _FIGURES[name]
    for end, (unit, text) in {
        "_nbytes": ("MB", _megabytes),
        "_s": ("us", lambda value: significant(value * 1e6)),
        "_bytes_per_s": ("GB/s", lambda value: significant(value / 1e9)),
    }.items():
        if name.endswith(end):
            return f"{name.removesuffix(end).replace('_', ' ')}, {unit}", text
    return name.replace("_", " "), significant


def significant(value: float) -> str:
    """Return a number of at least four significant digits, none of them lost before the point.

    >>> [significant(value) for value in (0.123456, 2.0, 17, 1234567.8, 1.5e-7)]
    ['0.1235', '2', '17', '1 234 568', '1.500e-07']
    """
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}".replace(",", " ")
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3e}" if abs(value) < 1e-3 else f"{value:.4g}"


def group_sheet(group: Mapping[str, Any], *, title: str | None = None) -> Sheet:
    r"""Return the table of a group: medians, quartiles, ratios and what else its rows hold.

    Parameters
    ----------
    group : dict
        As `gpuarena.bench.harness.group` returns it. It may also hold ``"not_measured"``, names and why, and
        ``"floor_s"``, the seconds that nothing can be faster than.
    title : str, optional
        In place of the group's own.

    Raises
    ------
    ArgumentError
        The group has no title or no rows, or a figure is no number.

    Examples
    --------
    >>> row = {"median_s": 2e-6, "quartiles_s": [1.5e-6, 3e-6], "ratio": 1.0, "peak_nbytes": 5_000_000}
    >>> sheet = group_sheet({"title": "append", "reference": "ours", "rows": {"ours": row}})
    >>> print(*sheet.markdown(), sep="\n")
    | | median, us | quartiles | ratio | peak, MB |
    |---|---:|---:|---:|---:|
    | ours | 2.00 | 1.50 - 3.00 | 1.00 | 5.0 |
    """
    try:
        return _group_sheet(group, title)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        name = title or (group.get("title") if isinstance(group, Mapping) else None)
        raise ArgumentError(
            f"the group {name or 'without a title'} is incomplete: {type(error).__name__} {error}"
        ) from None


def _group_sheet(group: Mapping[str, Any], title: str | None) -> Sheet:
    rows: dict[str, dict[str, Any]] = group["rows"]
    names = list(dict.fromkeys(key for row in rows.values() for key in row if key not in _TIMES))
    figures = [key for key in _FIGURES if key in names] + [key for key in names if key not in _FIGURES]
    medians = [row["median_s"] for row in rows.values() if row.get("median_s") is not None]
    headings = [""]
    if medians:
        in_ms = min(medians) >= 1e-3
        headings += [f"median, {'ms' if in_ms else 'us'}", "quartiles", "ratio"]
    headings += [_figure(key)[0] for key in figures]
    cells = []
    for name, row in rows.items():
        here = [name]
        if medians:
            here += _times(row, 1e3 if in_ms else 1e6)
        here += [_text(row[key], _figure(key)[1]) if key in row else "" for key in figures]
        cells.append(tuple(here))
    notes = []
    if "floor_s" in group:
        floor = f"{significant(group['floor_s'] * 1e3)} ms"
        notes.append(
            f"Floor: {floor} for the bytes of weights and live keys and values, at the bandwidth of a copy."
        )
    notes += [f"{NOT_MEASURED}: {name}: {why}" for name, why in (group.get("not_measured") or {}).items()]
    return Sheet(title or group["title"], tuple(headings), tuple(cells), tuple(notes))


def _times(row: Mapping[str, Any], factor: float) -> list[str]:
    if row.get("median_s") is None or None in row["quartiles_s"]:
        return [NOT_MEASURED if "median_s" in row else "", "", ""]
    low, high = row["quartiles_s"]
    median, low, high = (_three_digits(seconds * factor) for seconds in (row["median_s"], low, high))
    return [median, f"{low} - {high}", f"{row['ratio']:.2f}" if row.get("ratio") is not None else ""]


def _three_digits(value: float) -> str:
    """Return a time with three digits, and all of those before the point.

    >>> [_three_digits(value) for value in (0.02345, 1.0, 45.678, 12345.6)]
    ['0.0234', '1.00', '45.7', '12346']
    """
    if value < 1:
        return f"{value:#.3g}"
    return f"{value:.{max(0, 2 - int(math.log10(value)))}f}"


def _text(value: Any, text: Callable[[float], str]) -> str:
    if value is None:
        return NOT_MEASURED
    return value if isinstance(value, str) else text(value)


# -- checks and tests -------------------------------------------------------------------------------------------------


def checks_sheet(checks: Sequence[Mapping[str, Any]], title: str = "checks") -> Sheet:
    """Return what checks found, one row a check: its outcome, why, and its figures with their units.

    >>> check = {"title": "replay", "passed": None, "why": "no CUDA", "figures": {"n": {"value": 2, "unit": "launches"}}}
    >>> checks_sheet([check]).rows
    (('replay', 'not measured: no CUDA', 'n: 2 launches'),)
    """
    rows = []
    for check in checks:
        outcome, why = OUTCOMES[check["passed"]], check.get("why")
        figures = "; ".join(f"{name}: {figure_text(one)}" for name, one in check.get("figures", {}).items())
        rows.append((check["title"], f"{outcome}: {why}" if why else outcome, figures))
    return Sheet(title, ("check", "outcome", "figures"), tuple(rows), are_numbers=False)


def figure_text(figure: Mapping[str, Any]) -> str:
    """Return a figure of a check with its unit."""
    value = figure["value"]
    if value is None:
        return NOT_MEASURED
    text = str(value) if isinstance(value, (str, bool)) else significant(value)
    return f"{text} {figure.get('unit', '')}".strip()


def sheets_of_tests(tests: Mapping[str, Any]) -> Iterator[Sheet]:
    """Return the counts of tests, then those that failed, then what tests measured beside passing."""
    counts = tests.get("counts") or {}
    notes = [f"{NOT_MEASURED}: {tests['not_measured']}"] if tests.get("not_measured") else []
    yield Sheet(
        "counts", ("outcome", "tests"), tuple((key, str(n)) for key, n in counts.items()), tuple(notes)
    )
    cases = tests.get("cases", [])
    bad = [case for case in cases if case["outcome"] in ("failed", "error")]
    if bad:
        rows = [(case["name"], case["outcome"], case.get("message", "")[:_MESSAGE_LIMIT]) for case in bad]
        yield Sheet("failures", ("test", "outcome", "message"), tuple(rows), are_numbers=False)
    found = [
        (case["name"], "; ".join(f"{name}: {value}" for name, value in case["figures"].items()))
        for case in cases
        if case.get("figures")
    ]
    if found:
        yield Sheet("figures of tests", ("test", "figures"), tuple(found), are_numbers=False)


# -- the document -----------------------------------------------------------------------------------------------------


def markdown(results: Mapping[str, Any], *, level: int = 1, title: str | None = None) -> str:
    """Return results as one Markdown document, without HTML.

    Parameters
    ----------
    results : dict
        What a benchmark, `gpuarena.bench.suite.run`, the checks of a GPU or the GPU kit returned or wrote.
    level : int
        Of the top heading, 1 to 5; parts are one level below.
    title : str, optional
        Of the top heading.

    Raises
    ------
    ArgumentError
        The level is another one, or results lack what every result has.
    """
    if not 1 <= level <= 5:
        raise ArgumentError(f"the level of the top heading must be 1 to 5, not {level}")
    with complete():
        return _markdown(results, level, title)


def _markdown(results: Mapping[str, Any], level: int, title: str | None) -> str:
    found = list(parts(results))
    lines = [f"{'#' * level} {title or _title(results)}", "", *_circumstances(results), *_verdict(results)]
    for part in found:
        if len(found) > 1 or part is not results:
            lines += [f"{'#' * (level + 1)} {label(part)}", ""]
        lines += _part(part)
    if results.get("tests"):
        lines += [f"{'#' * (level + 1)} tests", ""]
        for sheet in sheets_of_tests(results["tests"]):
            lines += _drawn(sheet)
    return "\n".join(lines).rstrip() + "\n"


def _title(results: Mapping[str, Any]) -> str:
    names = [label(part) for part in parts(results)]
    return f"Results: {names[0]}" if len(names) == 1 else "Results of all benchmarks"


def _circumstances(results: Mapping[str, Any]) -> list[str]:
    """Return the list of what a reader of the figures has to know."""
    found: Mapping[str, Any] = results.get("environment") or {}
    machine = [found.get("gpu"), found.get("processor")]
    if found.get("cpu_count"):
        machine.append(f"{found['cpu_count']} CPUs")
    if found.get("torch_threads"):
        machine.append(f"torch on {found['torch_threads']} threads")
    versions = {"Python": found.get("python"), **found.get("versions", {}), "CUDA": found.get("cuda")}
    entries = {
        "date": found.get("date"),
        "device": found.get("device"),
        "machine": ", ".join(str(part) for part in machine if part),
        "system": found.get("platform"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "commit": found.get("commit"),
        "clock": found.get("clock"),
        "seconds in all": results.get("seconds"),
    }
    lines = [f"- {name}: {_cell(str(value))}" for name, value in entries.items() if value]
    return [*lines, ""] if lines else []


def _verdict(results: Mapping[str, Any]) -> list[str]:
    lines = []
    if results.get("fake"):
        lines += ["**This is a dry run on the CPU: the figures mean nothing.**", ""]
    bad = failures(results)
    if bad:
        lines += [f"**{len(bad)} failed:**", "", *(f"- {_cell(one)}" for one in bad), ""]
    return lines


def _part(part: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    if part.get("error"):
        lines += [f"**FAILED**: {_cell(str(part['error']))}", ""]
    if part.get("not_measured"):
        lines += [f"{NOT_MEASURED}: {_cell(str(part['not_measured']))}", ""]
    facts = [
        f"{key.replace('_', ' ')} {value}"
        for key, value in (part.get("geometry") or {}).items()
        if value is not None
    ]
    if part.get("rounds"):
        facts.append(f"medians of {part['rounds']} rounds")
    if part.get("left_out"):
        facts.append(f"left out: {part['left_out']}")
    if facts:
        lines += [_cell("; ".join(facts)), ""]
    for sheet in sheets(part):
        lines += _drawn(sheet)
    return lines


def sheets(part: Mapping[str, Any]) -> Iterator[Sheet]:
    """Return the tables of one benchmark, or of the checks: these first, then the groups that they timed."""
    if part.get("checks"):
        yield checks_sheet(part["checks"])
    for check in part.get("checks", []):
        for group in check.get("groups", []):
            yield group_sheet(group, title=f"{check['title']}: {group.get('title')}")
    for group in part.get("groups", []):
        yield group_sheet(group)


def _drawn(sheet: Sheet) -> list[str]:
    lines = [f"**{_cell(sheet.title)}**", ""]
    if sheet.rows:
        lines += [*sheet.markdown(), ""]
    if sheet.notes:
        lines += [*(f"- {_cell(note)}" for note in sheet.notes), ""]
    return lines
