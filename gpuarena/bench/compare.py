"""What moved between two files of results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuarena.errors import ArgumentError

__all__ = ["Comparison", "Figure", "Move", "compare", "figures", "load"]

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

    name: tuple[str, str, str]
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
class Comparison:
    """What `compare` found."""

    moves: tuple[Move, ...]
    """The largest change first."""
    only_before: tuple[tuple[str, str, str], ...]
    only_after: tuple[tuple[str, str, str], ...]
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
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArgumentError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict) or not {"benchmark", "benchmarks"} & found.keys():
        raise ArgumentError(f"{path} holds no results of gpuarena bench: it names no benchmark")
    return found


def figures(results: dict[str, Any]) -> dict[tuple[str, str, str], Figure]:
    """Return the ratios of results by benchmark, group and row; references are left out, being 1.

    Raises
    ------
    ArgumentError
        Figures are missing, or are no numbers.
    """
    return dict(_figures(results))


def _figures(results: dict[str, Any]) -> Iterator[tuple[tuple[str, str, str], Figure]]:
    for one in results.get("benchmarks", []):  # of the GPU kit
        yield from _figures(one)
    name = results.get("benchmark", "")
    if isinstance(results.get("dtype"), str):
        name += f", {results['dtype']}"
    try:
        yield from _of_one(name, results)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ArgumentError(
            f"the results of {name or 'an unnamed benchmark'} are incomplete: {type(error).__name__} {error}"
        ) from None


def _of_one(name: str, results: dict[str, Any]) -> Iterator[tuple[tuple[str, str, str], Figure]]:
    for group in results.get("groups", []):
        reference = group.get("reference")
        if reference is not None:
            yield from _rows(name, group["title"], group["rows"], reference)


def _rows(
    name: str, title: str, rows: dict[str, Any], reference: str
) -> Iterator[tuple[tuple[str, str, str], Figure]]:
    base = _noise(rows[reference]) if reference in rows else 0.0
    for row, found in rows.items():
        if row != reference and "ratio" in found:
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
    first, second = figures(before), figures(after)
    moves = [Move(name, first[name], second[name]) for name in first if name in second]
    moves.sort(key=lambda move: max(move.change, 1 / move.change), reverse=True)
    here, there = _environment(before), _environment(after)
    return Comparison(
        moves=tuple(moves),
        only_before=tuple(name for name in first if name not in second),
        only_after=tuple(name for name in second if name not in first),
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
