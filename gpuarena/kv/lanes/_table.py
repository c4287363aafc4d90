"""Which tokens the lanes of a cache hold, in whole numbers: lengths, positions, checkpoints, the step under way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpuarena.errors import (
    ArgumentError,
    ArgumentTypeError,
    CapacityError,
    CheckpointError,
    LayerOrderError,
    ShapeError,
)
from gpuarena.kv.spec import positive

Mark = tuple[int, int]
"""``(n_tokens, serial)`` of a checkpoint of one lane."""


@dataclass(slots=True)
class Step:
    """Tokens that every layer is to append: `counts` of them to `lanes`, behind `starts`."""

    lanes: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    in_block: bool = False
    """Whether a ``with`` block decides when it ends, instead of its last layer."""
    written: set[int] = field(default_factory=set)


class LaneTable:
    """The bookkeeping of `LaneCache`; knows no memory. A call that raises has changed nothing."""

    def __init__(self, lanes: int, max_tokens: int, layers: Iterable[int]) -> None:
        self.n_lanes = lanes
        self.max_tokens = max_tokens
        self.layers = tuple(layers)  # the layers that own keys and values
        self.lengths = [0] * lanes  # with the tokens of the step under way
        self.high_water = 0
        self.step: Step | None = None
        self.turned_layer: int | None = None
        """The layer whose keys a function given to `LaneCache.shift` is turning."""
        self._positions = np.zeros((lanes, max_tokens), np.int64)
        self._marks: list[list[Mark]] = [[] for _ in range(lanes)]  # ascending: the checkpoints that live
        self._serial = 0

    # -- arguments ----------------------------------------------------------------------------------------------

    def lane(self, lane: Any) -> int:
        """Return the number of a lane, or raise `ArgumentTypeError` or `ArgumentError`."""
        number = positive(lane, "lane", least=0)
        if number >= self.n_lanes:
            raise ArgumentError(f"lane {number}: the cache has lanes 0 to {self.n_lanes - 1}")
        return number

    def lanes(self, lanes: Any) -> tuple[int, ...]:
        """Return the numbers of distinct lanes."""
        numbers = tuple(self.lane(lane) for lane in items(lanes, "lanes"))
        if len(set(numbers)) != len(numbers):
            raise ArgumentError(f"lanes {list(numbers)}: each lane may be named once")
        return numbers

    def counts(self, n_tokens: Any, n_rows: int, width: int | None) -> tuple[int, ...]:
        """Return one number of tokens a row, each at most `width`."""
        counts = tuple(positive(n, "n_tokens", least=0) for n in items(n_tokens, "n_tokens"))
        if len(counts) != n_rows:
            raise ShapeError(f"n_tokens has {len(counts)} numbers, there are {n_rows} rows; give one a row")
        if width is not None and counts and max(counts) > width:
            raise ArgumentError(f"n_tokens {list(counts)}: the rows given are {width} tokens long")
        return counts

    def span(self, lane: Any, start: Any, stop: Any) -> tuple[int, int, int]:
        """Return a lane and a range of its tokens; a `stop` of None is its length."""
        number = self.lane(lane)
        held = self.lengths[number]
        low = positive(start, "start", least=0)
        high = held if stop is None else positive(stop, "stop", least=0)
        if not low <= high <= held:
            raise ArgumentError(f"tokens {low} to {high}: lane {number} holds tokens 0 to {held}")
        return number, low, high

    # -- steps --------------------------------------------------------------------------------------------------

    def plan(self, lanes: tuple[int, ...], counts: tuple[int, ...], *, in_block: bool = False) -> Step:
        """Return a step that could be opened now, or raise `CapacityError` or `LayerOrderError`."""
        self.need_unturned("append")
        if self.step is not None:
            raise LayerOrderError(
                f"a step is under way, {len(self.step.written)} of {len(self.layers)} layers are written: finish it, "
                f"or abandon() it",
                layer=self._missing()[0] if self._missing() else self.layers[0],
            )
        for lane, count in zip(lanes, counts, strict=True):
            if self.lengths[lane] + count > self.max_tokens:
                raise self._full(lane, count)
        return Step(lanes, tuple(self.lengths[lane] for lane in lanes), counts, in_block)

    def _full(self, lane: int, count: int) -> CapacityError:
        used, capacity = self.lengths[lane], self.max_tokens
        missing = used + count - capacity
        return CapacityError(
            f"lane {lane} is full: {used} of {capacity} tokens used, {count} more asked, {missing} too many. Nothing "
            f"was written in any lane: truncate or reset lane {lane}, or make the cache for at least "
            f"{used + count} tokens",
            lane=lane,
            used=used,
            requested=count,
            capacity=capacity,
            available=capacity - used,
            free=capacity - used,
            missing=missing,
            aligned_offset=used,
            label=f"lane{lane}",
        )

    def check_turn(self, layer: int, lanes: tuple[int, ...], counts: tuple[int, ...]) -> Step:
        """Return the step that `layer` may write now: the one under way, or a planned one."""
        step = self.step
        if step is None:
            return self.plan(lanes, counts)
        if layer in step.written:
            missing = self._missing()
            what = (
                f"layers {missing} are not" if missing else "so are all others; leave the block of the step"
            )
            raise LayerOrderError(
                f"layer {layer} is written already in this step, {what}: a step writes each layer once; "
                f"abandon() undoes a step that failed",
                layer=layer,
            )
        if (lanes, counts) != (step.lanes, step.counts):
            raise LayerOrderError(
                f"layer {layer}: {list(counts)} tokens for lanes {list(lanes)}, the step under way has "
                f"{list(step.counts)} for lanes {list(step.lanes)}: all layers of a step append alike; "
                f"abandon() undoes a step that failed",
                layer=layer,
            )
        return step

    def open(self, step: Step) -> None:
        """Begin a planned step: the lanes have their new lengths from now on."""
        lengths = list(self.lengths)
        for lane, start, count in zip(step.lanes, step.starts, step.counts, strict=True):
            first = self.next_position(lane)
            self._positions[lane, start : start + count] = np.arange(first, first + count)
            lengths[lane] = start + count
        # At once, here and below: an interrupt finds lengths from before or from behind the change.
        self.lengths, self.step = lengths, step

    def wrote(self, layer: int) -> None:
        """Note that a layer is written; the last one ends the step, unless a block does."""
        assert self.step is not None, "a layer is written in a step"
        self.step.written.add(layer)
        if not self.step.in_block and len(self.step.written) == len(self.layers):
            self.commit()

    def commit(self) -> None:
        """End the step under way, whose layers are all written."""
        self.high_water = max(self.high_water, *self.lengths)
        self.step = None

    def abandon(self) -> bool:
        """Give the lanes the lengths from before the step under way; return whether there was one."""
        step = self.step
        if step is None:
            return False
        lengths = list(self.lengths)
        for lane, start in zip(step.lanes, step.starts, strict=True):
            lengths[lane] = start
        self.lengths, self.step = lengths, None
        return True

    def _missing(self) -> list[int]:
        written = set() if self.step is None else self.step.written
        return [layer for layer in self.layers if layer not in written]

    def need_all_written(self) -> None:
        """Raise `LayerOrderError` if the step under way has left out a layer."""
        missing = self._missing()
        if missing:
            raise LayerOrderError(
                f"the block of the step was left with layers {missing} unwritten: the step was abandoned, "
                f"the lanes are as before",
                layer=missing[0],
            )

    def need_idle(self, verb: str) -> None:
        """Raise `LayerOrderError` while a step or a turn is under way."""
        self.need_unturned(verb)
        if self.step is not None:
            missing = self._missing()
            raise LayerOrderError(
                f"{verb}: a step is under way, layers {missing} are not written yet; finish it, or abandon() it",
                layer=missing[0] if missing else self.layers[0],
            )

    def need_unturned(self, verb: str) -> None:
        """Raise `LayerOrderError` while a function given to `LaneCache.shift` turns keys."""
        if self.turned_layer is not None:
            raise LayerOrderError(
                f"{verb}: shift() is turning the keys of layer {self.turned_layer}, and its rotate may change the keys "
                f"that it is given and nothing else of the cache; do this when shift() has returned",
                layer=self.turned_layer,
            )

    def need_written(self, layer: int) -> None:
        """Raise `LayerOrderError` if `layer` lags behind the step under way."""
        if self.step is not None and layer not in self.step.written:
            raise LayerOrderError(
                f"layer {layer} cannot be read yet: the step under way has not written it", layer=layer
            )

    def settled(self, lane: int) -> int:
        """Return the length of a lane without the step under way."""
        step = self.step
        if step is not None and lane in step.lanes:
            return step.starts[step.lanes.index(lane)]
        return self.lengths[lane]

    # -- positions ----------------------------------------------------------------------------------------------

    def positions(self, lane: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return a copy of the positions of a lane's tokens."""
        return self._positions[lane, : self.lengths[lane]].copy()

    def next_position(self, lane: int) -> int:
        """Return one more than the last token's position."""
        held = self.lengths[lane]
        return int(self._positions[lane, held - 1]) + 1 if held else 0

    def check_shift(self, lane: int, start: int, stop: int, delta: int) -> None:
        """Raise `ArgumentError` unless the positions stay ascending and none becomes negative."""
        row = self._positions[lane]
        first, last = int(row[start]) + delta, int(row[stop - 1]) + delta
        before = int(row[start - 1]) if start else -1
        if last > 2**62:
            raise ArgumentError(f"shift by {delta}: positions go up to {2**62}")
        if first <= before:
            limit = f"token {start - 1} is at {before}" if start else "no position is negative"
            raise ArgumentError(
                f"shift by {delta}: token {start} of lane {lane} would come to position {first}, but {limit}"
            )
        if stop < self.lengths[lane] and last >= int(row[stop]):
            raise ArgumentError(
                f"shift by {delta}: token {stop - 1} of lane {lane} would come to position {last}, "
                f"but token {stop} is at {int(row[stop])}"
            )

    def shift(self, lane: int, start: int, stop: int, delta: int) -> None:
        """Add `delta` to positions."""
        self._forget_above(lane, start)
        self._positions[lane, start:stop] += delta

    # -- lengths ------------------------------------------------------------------------------------------------

    # Checkpoints go first: one too few does no harm, one too many would bring back what is overwritten.

    def cut(self, kept: Mapping[int, int]) -> None:
        """Keep the first ``kept[lane]`` tokens of some lanes."""
        for lane, n_tokens in kept.items():
            self._forget_above(lane, n_tokens)
        self._set(kept)

    def clear(self, lanes: Iterable[int]) -> None:
        """Forget the tokens of some lanes, and their checkpoints, those of the empty lane too."""
        empty = dict.fromkeys(lanes, 0)
        for lane in empty:
            self._marks[lane].clear()
        self._set(empty)

    def close_gap(self, lane: int, start: int, stop: int, held: int) -> None:
        """Let a lane that was cut to `start` hold the tokens `stop` to `held` as well, with their positions."""
        row, n_tokens = self._positions[lane], start + held - stop
        row[start:n_tokens] = row[stop:held].copy()
        self._set({lane: n_tokens})

    def duplicate(self, source: int, target: int, start: int, stop: int, *, is_move: bool = False) -> None:
        """Let `target`, which is cleared, hold a range of the tokens of `source`, which keeps them unless they move."""
        self._positions[target, : stop - start] = self._positions[source, start:stop]
        if is_move:
            self._marks[source].clear()
        self._set({target: stop - start, **({source: 0} if is_move else {})})

    def _set(self, lengths: Mapping[int, int]) -> None:
        self.lengths = [lengths.get(lane, held) for lane, held in enumerate(self.lengths)]

    # -- checkpoints --------------------------------------------------------------------------------------------

    def _forget_above(self, lane: int, n_tokens: int) -> None:
        marks = self._marks[lane]
        while marks and marks[-1][0] > n_tokens:
            marks.pop()

    def mark(self, lane: int) -> tuple[int, Mark]:
        """Return the slot and the mark of a checkpoint at the present length of a lane."""
        marks, held = self._marks[lane], self.lengths[lane]
        if not marks or marks[-1][0] != held:
            self._serial += 1
            marks.append((held, self._serial))
        return len(marks) - 1, marks[-1]

    def check_mark(self, lane: int, slot: int, mark: Mark) -> None:
        """Raise `CheckpointError` if the tokens that a mark stood for are gone."""
        marks = self._marks[lane]
        if slot >= len(marks) or marks[slot] != mark:
            raise CheckpointError(
                f"the checkpoint of lane {lane} at {mark[0]} tokens is dead: the lane was truncated below it, copied "
                f"over, reset, or tokens below it were removed or shifted"
            )


def items(values: Any, what: str) -> list[Any]:
    """Return the items of a list, range, array or tensor."""
    try:
        if hasattr(values, "tolist"):  # one copy from the device, instead of one an item
            return list(values.tolist())
        return list(values)
    except (TypeError, ValueError, RuntimeError):  # the last from tensors without memory
        raise ArgumentTypeError(f"{what} must be a list of integers, not {type(values).__name__}") from None
