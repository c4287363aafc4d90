"""What moved between two files of results."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuarena.bench._labels import OUTCOMES, complete, label, parts
from gpuarena.errors import ArgumentError

__all__ = ["Change", "Comparison", "Figure", "Move", "compare", "figures", "load", "outcomes", "readings"]

Name = tuple[str, str, str]

#: Where a file says under what circumstances it was measured.
_CIRCUMSTANCES = ("date", "commit", "device", "gpu", "processor", "cpu_count", "torch_threads", "python")


@dataclass(frozen=True, slots=True)
class Figure:
    """A ratio of two medians of one run, and how far its quartiles lie apart."""

    ratio: float
    noise: float
    """Half the distance of the quartiles over the median, of both times added: 0.1 is about 10 %."""


@dataclass(frozen=True, slots=True)
class Move:
    """One ratio in both files."""

    name: Name
    """Benchmark, group and row."""
    before: Figure
    after: Figure

    @property
    def change(self) -> float:
        """The ratio afterwards over that before; below 1 the row gained on its reference."""
        return self.after.ratio / self.before.ratio

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the change is larger than the quartiles of both files explain."""
        factor = max(self.change, 1 / self.change)
        return factor > 1 + self.before.noise + self.after.noise


@dataclass(frozen=True, slots=True)
class Change:
    """What is no ratio and reads otherwise in the second file: an outcome, or a figure of a check."""

    name: Name
    """Benchmark, check or test, and figure; ``"outcome"`` is that of the check itself."""
    before: Any
    after: Any

    @property
    def change(self) -> float | None:
        """The second over the first where both are numbers above 0."""
        if all(isinstance(one, (int, float)) and one > 0 for one in (self.before, self.after)):
            return float(self.after / self.before)
        return None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found."""

    moves: tuple[Move, ...]
    """The largest change first."""
    only_before: tuple[Name, ...]
    only_after: tuple[Name, ...]
    outcomes: tuple[Change, ...]
    """Checks, tests and benchmarks that ended otherwise."""
    readings: tuple[Change, ...]
    """Figures of checks that are others, the largest change first; nobody knows their noise."""
    circumstances: dict[str, tuple[Any, Any]]
    """What differs of machine, versions and commit, before and after."""


def load(path: Any) -> dict[str, Any]:
    """Return the results in a file that ``gpuarena bench ... --json`` or the GPU kit wrote.

    Raises
    ------
    ArgumentError
        The file is no JSON, or holds no results.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = json.loads(text, parse_constant=lambda name: None)  # NaN, which is no JSON, is no figure
    except ValueError as error:
        raise ArgumentError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict) or not {"benchmark", "benchmarks"} & found.keys():
        raise ArgumentError(f"{path} holds no results of gpuarena bench: it names no benchmark")
    return found


def figures(results: dict[str, Any]) -> dict[Name, Figure]:
    """Return the ratios of results by benchmark, group and row; references are left out, being 1.

    Raises
    ------
    ArgumentError
        Figures are missing, or are no numbers.
    """
    return dict(_figures(results))


def _figures(results: dict[str, Any]) -> Iterator[tuple[Name, Figure]]:
    for part in parts(results):
        with _told(part):
            for group in part.get("groups", []):
                yield from _of_group(label(part), group["title"], group)
            for check in part.get("checks", []):
                for group in check.get("groups", []):
                    yield from _of_group(label(part), f"{check['title']}: {group['title']}", group)


@contextlib.contextmanager
def _told(part: Mapping[str, Any]) -> Iterator[None]:
    """Let what is missing in results be told with their name."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ArgumentError(
            f"the results of {label(part)} are incomplete: {type(error).__name__} {error}"
        ) from None


def _of_group(name: str, title: str, group: dict[str, Any]) -> Iterator[tuple[Name, Figure]]:
    reference = group.get("reference")
    if reference is not None:
        yield from _rows(name, title, group["rows"], reference)


def outcomes(results: dict[str, Any]) -> dict[Name, str]:
    """Return how checks, tests and benchmarks ended, by benchmark, title and ``"outcome"``.

    Raises
    ------
    ArgumentError
        A check has no title or no outcome.
    """
    found: dict[Name, str] = {}
    for part in parts(results):
        with _told(part):
            if "checks" not in part:
                ended = (
                    "broken" if part.get("error") else "not measured" if part.get("not_measured") else "done"
                )
                found[label(part), "", "outcome"] = ended
            for check in part.get("checks", []):
                found[label(part), check["title"], "outcome"] = OUTCOMES[check["passed"]]
    for case in (results.get("tests") or {}).get("cases", []):
        found["tests", case["name"], "outcome"] = case["outcome"]
    return found


def readings(results: dict[str, Any]) -> dict[Name, Any]:
    """Return the figures of checks and tests, by benchmark, title, and name with its unit.

    Raises
    ------
    ArgumentError
        A figure has no value.
    """
    found: dict[Name, Any] = {}
    for part in parts(results):
        with _told(part):
            for check in part.get("checks", []):
                for name, figure in check.get("figures", {}).items():
                    unit = figure.get("unit")
                    found[label(part), check["title"], f"{name}, {unit}" if unit else name] = figure["value"]
    for case in (results.get("tests") or {}).get("cases", []):
        for name, value in case.get("figures", {}).items():
            found["tests", case["name"], name] = value
    return found


def _changes(first: Mapping[Name, Any], second: Mapping[Name, Any]) -> list[Change]:
    return [
        Change(name, value, second[name])
        for name, value in first.items()
        if name in second and second[name] != value
    ]


def _rows(name: str, title: str, rows: dict[str, Any], reference: str) -> Iterator[tuple[Name, Figure]]:
    base = _noise(rows[reference]) if reference in rows else 0.0
    for row, found in rows.items():
        if row != reference and found.get("ratio") is not None and found.get("median_s") is not None:
            yield (name, title, row), Figure(found["ratio"], _noise(found) + base)


def _noise(row: dict[str, Any]) -> float:
    low, high = row["quartiles_s"]
    return float((high - low) / 2 / row["median_s"])


def compare(before: dict[str, Any], after: dict[str, Any]) -> Comparison:
    """Return what moved from one run to another.

    Ratios are compared and not times, since each is of two things that were measured side by side: they hold on
    another machine, as far as anything does.

    >>> def run(ratio):
    ...     rows = {"ours": {"median_s": 1.0, "quartiles_s": [0.98, 1.02], "ratio": 1.0},
    ...             "theirs": {"median_s": ratio, "quartiles_s": [0.98 * ratio, 1.02 * ratio], "ratio": ratio}}
    ...     return {"benchmark": "kv", "groups": [{"title": "append", "reference": "ours", "rows": rows}]}
    >>> [(move.name[-1], round(move.change, 2), move.is_beyond_noise) for move in compare(run(2.0), run(3.0)).moves]
    [('theirs', 1.5, True)]
    """
    with complete():
        return _compare(before, after)


def _compare(before: dict[str, Any], after: dict[str, Any]) -> Comparison:
    first, second = figures(before), figures(after)
    moves = [Move(name, first[name], second[name]) for name in first if name in second]
    moves.sort(key=lambda move: max(move.change, 1 / move.change), reverse=True)
    changed = _changes(readings(before), readings(after))
    changed.sort(key=lambda one: max(one.change, 1 / one.change) if one.change else math.inf, reverse=True)
    here, there = _environment(before), _environment(after)
    return Comparison(
        moves=tuple(moves),
        only_before=tuple(name for name in first if name not in second),
        only_after=tuple(name for name in second if name not in first),
        outcomes=tuple(_changes(outcomes(before), outcomes(after))),
        readings=tuple(changed),
        circumstances={
            key: (here.get(key), there.get(key))
            for key in dict.fromkeys([*here, *there])
            if here.get(key) != there.get(key)
        },
    )


def _environment(results: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = results.get("environment", {})
    versions: dict[str, Any] = found.get("versions", {})
    return {key: found[key] for key in _CIRCUMSTANCES if key in found} | versions
