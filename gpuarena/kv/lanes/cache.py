"""The lane cache: rows of one linear cache that have lengths of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpuarena.arena import Arena
from gpuarena.errors import ArgumentError, ArgumentTypeError, CheckpointError
from gpuarena.kv.lanes._handles import LaneCheckpoint, LaneScope, LaneStats, LaneStep
from gpuarena.kv.lanes._writing import LaneWriting
from gpuarena.kv.spec import KVSpec, positive

__all__ = ["LaneCache", "LaneCheckpoint", "LaneScope", "LaneStats", "LaneStep"]


class LaneCache(LaneWriting):
    """A linear cache of fixed capacity whose rows, the lanes, are filled, cut and forked one by one.

    >>> import numpy as np
    >>> from gpuarena import Arena
    >>> from gpuarena.kv import KVSpec
    >>> spec = KVSpec.uniform(layers=1, kv_heads=2, head_dim=4, dtype="float32")
    >>> cache = LaneCache(Arena("1MiB"), spec, lanes=3, max_tokens=16)
    >>> prompts = np.ones((2, 2, 5, 4), np.float32)  # [rows, kv_heads, tokens, head_dim], padded on the right
    >>> keys, values = cache.append(0, prompts, prompts, n_tokens=[5, 2])
    >>> keys.shape, cache.lengths
    ((2, 2, 5, 4), (5, 2, 0))
    >>> cache.copy(source=0, target=2)  # a fork of lane 0
    >>> cache.truncate(0, 3)
    >>> cache.lengths, cache.mask().shape
    ((3, 2, 5), (3, 1, 1, 5))

    Keys and values of a layer lie head-major, ``[lanes, kv_heads, max_tokens, dim]``, at addresses that never
    change. All layers advance in step: the first that is written opens a step, for certain lanes and numbers of
    tokens; the others follow in any order, once each, with the same lanes and numbers. From then on `lengths`,
    `length_vector`, `positions` and `mask` count the tokens of the step; a layer can be read once it is written.

    A step that failed half-way is undone by `abandon`, and by `truncate`, `rollback`, `reset` and `keep`, which begin
    with that: no layer has lost a token then, and all hold the same. `step` does it by itself.

    Parameters
    ----------
    arena : Arena
        A torch arena takes and gives tensors, a host or cupy arena arrays of its own library.
    spec : KVSpec
        A layer's `window` and `sinks` count in `mask` and `attend` only; its whole history is stored.
    lanes : int
        Sequences that are held at once.
    max_tokens : int
        Capacity of each lane, in tokens.

    Raises
    ------
    ArgumentError
        A layer has `slack` or `storage`, which lanes do not have; or there are 2**31 tokens or more, which int32
        tables cannot count.
    OutOfMemoryError
        The arena has less than ``LaneCache.arena_nbytes(spec, lanes, max_tokens)`` left; nothing was taken of it.

    Notes
    -----
    Rolling the arena back to before this call makes the cache stale: whatever touches its memory then raises
    `StaleRegionError`. A cache is not locked; use it from one thread at a time.

    An interrupt (Ctrl-C, a signal handler that raises) inside of a call leaves the cache before or behind it, with
    these exceptions. `remove` may leave the tokens before `start`, and `copy` and `move` an empty `target`.
    A step may stay under way when an `append` outside of a block, or the end of a block whose layers are all written,
    is interrupted: `abandon` undoes it. `length_vector` may be behind until it is asked for, or a lane changes, again.

    Tokens are numbered by their place in the lane, from 0, in every argument and in the mask, also after a `remove`
    has left gaps between their positions.
    """

    def __init__(self, arena: Arena, spec: KVSpec, *, lanes: int, max_tokens: int) -> None:
        # Only for the name that Python gives in the error of an argument that there is not.
        super().__init__(arena, spec, lanes=lanes, max_tokens=max_tokens)

    # -- cutting ------------------------------------------------------------------------------------------------

    def truncate(self, lane: int, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens of a lane; constant in tokens. Abandons a step under way.

        Raises
        ------
        ArgumentError
            Negative, or more than the lane holds without that step. Unchanged on error.
        """
        number = self._table.lane(lane)
        keep = positive(n_tokens, "n_tokens", least=0)
        held = self._table.settled(number)
        if keep > held:
            raise ArgumentError(f"truncate({number}, {keep}): lane {number} holds only {held} tokens")
        self._check_free("truncate")
        self._table.abandon()
        self._table.cut({number: keep})
        self._store.publish(self._table.lengths)

    def reset(self, lane: int | None = None) -> None:
        """Forget everything, or everything of one lane; the memory stays. Abandons a step under way."""
        gone = range(self.n_lanes) if lane is None else (self._table.lane(lane),)
        self._clear("reset", gone)

    def keep(self, lane: int) -> None:
        """Forget everything of all lanes but one. Abandons a step under way."""
        kept = self._table.lane(lane)
        self._clear("keep", (other for other in range(self.n_lanes) if other != kept))

    def _clear(self, verb: str, lanes: Iterable[int]) -> None:
        self._check_free(verb)
        self._table.abandon()
        self._table.clear(lanes)
        self._store.publish(self._table.lengths)

    def _check_free(self, verb: str) -> None:
        """Raise unless the cache can be changed, which ends a step that is under way."""
        self._table.need_unturned(verb)
        self._store.check()

    def checkpoint(self, lane: int | None = None) -> LaneCheckpoint:
        """Return the present length of a lane, or of all, to which `rollback` goes back.

        Raises
        ------
        LayerOrderError
            A step is under way.
        """
        lanes = range(self.n_lanes) if lane is None else (self._table.lane(lane),)
        self._table.need_idle("checkpoint")
        return LaneCheckpoint(self, {number: self._table.mark(number) for number in lanes})

    def rollback(self, checkpoint: LaneCheckpoint) -> None:
        """Forget every token appended since to the lanes of `checkpoint`, which stays usable.

        Constant in tokens: nothing is copied. Abandons a step under way.

        Raises
        ------
        CheckpointError
            It belongs to another cache; or a lane of it was truncated below it, copied or moved over, moved away or
            reset, or tokens below it were removed or shifted. Unchanged on error, in all lanes.
        """
        if not isinstance(checkpoint, LaneCheckpoint):
            raise ArgumentTypeError(f"rollback takes a LaneCheckpoint, not {type(checkpoint).__name__}")
        if checkpoint._cache is not self:
            raise CheckpointError("the checkpoint belongs to another cache")
        for lane, (slot, mark) in checkpoint._marks.items():
            self._table.check_mark(lane, slot, mark)
        self._check_free("rollback")
        self._table.abandon()
        self._table.cut({lane: n_tokens for lane, (_, (n_tokens, _)) in checkpoint._marks.items()})
        self._store.publish(self._table.lengths)

    def scope(self, lane: int | None = None) -> LaneScope:
        """Return a context manager that rolls a lane, or all, back on exit, also when an exception passes."""
        if lane is not None:
            self._table.lane(lane)
        return LaneScope(self, lane)

    # -- moving -------------------------------------------------------------------------------------------------

    def remove(self, lane: int, start: int, stop: int | None = None) -> None:
        """Take the tokens `start` to `stop` out of a lane; what is behind them moves down.

        The tokens that move keep their positions, and their keys are still right. To close the gap in the positions
        as well, `shift` what was moved.

        Checkpoints at more than `start` tokens die.

        Raises
        ------
        ArgumentError
            No such lane, or no such range of tokens. Unchanged on error.
        LayerOrderError
            A step is under way.
        """
        number, low, high = self._range("remove", lane, start, stop)
        if low == high:
            return
        held = self._table.lengths[number]
        self._table.cut({number: low})  # so that an interrupt finds whole tokens, here and below
        self._store.move_down(number, low, high, held)
        self._table.close_gap(number, low, high, held)
        self._store.publish(self._table.lengths)

    def copy(self, source: int, target: int, start: int = 0, stop: int | None = None) -> None:
        """Let lane `target` hold copies of the tokens `start` to `stop` of lane `source`, and nothing else.

        The copies have the positions of the originals. Checkpoints of `target` die. Errors as for `remove`; and
        a lane cannot be copied over itself.
        """
        number, low, high = self._range("copy", source, start, stop)
        other = self._table.lane(target)
        if number == other:
            raise ArgumentError(
                f"copy: lane {number} cannot be copied over itself; remove() cuts tokens out of it"
            )
        self._table.clear([other])
        self._store.copy(number, other, low, high)
        self._table.duplicate(number, other, low, high)
        self._store.publish(self._table.lengths)

    def move(self, source: int, target: int) -> None:
        """Let lane `target` hold the tokens of lane `source`, which is empty afterwards.

        To the same lane nothing moves. Checkpoints of both lanes die. Errors as for `remove`.
        """
        number, _, held = self._range("move", source, 0, None)
        other = self._table.lane(target)
        if number == other:
            return
        self._table.clear([other])
        self._store.copy(number, other, 0, held)
        self._table.duplicate(number, other, 0, held, is_move=True)
        self._store.publish(self._table.lengths)

    def shift(
        self,
        lane: int,
        start: int,
        stop: int | None,
        delta: int,
        rotate: Callable[[int, Any, int], Any] | bool | None = None,
    ) -> None:
        """Add `delta` to the positions of the tokens `start` to `stop` of a lane.

        Keys of a model with rotary embeddings were turned by their token's position before they were appended.
        Such keys are **wrong** after a shift unless they are turned by `delta` positions more, which only the
        model knows how to do. So `rotate` has no default.

        Parameters
        ----------
        lane, start, stop
            A `stop` of None is the end of the lane.
        delta : int
            Positions stay ascending, and none may become negative.
        rotate : callable or False
            Called as ``rotate(layer, keys, delta)`` for each layer that owns keys, to change `keys`, a view
            ``[1, kv_heads, stop - start, key_dim]``, in place. False declares that keys do not depend on
            positions (ALiBi, learned embeddings of the inputs, keys that are turned when they are read).
            While it runs, calls that change the cache raise `LayerOrderError`.

        Raises
        ------
        ArgumentError
            No `rotate`; no such lane or range; or two tokens would change their order.
        ArgumentTypeError
            `rotate` is neither callable nor False.
        LayerOrderError
            A step is under way.

        Notes
        -----
        What `rotate` raises passes through. Unchanged on error: while it runs there is a copy of the keys it may
        change, outside of the arena. Checkpoints at more than `start` tokens die.
        """
        if rotate is None:
            raise ArgumentError(
                "shift: give rotate=, a function that turns keys with rotary embeddings by delta positions, or "
                "rotate=False if keys do not depend on positions"
            )
        if rotate is not False and not callable(rotate):
            raise ArgumentTypeError(f"rotate must be callable or False, not {type(rotate).__name__}")
        by = positive(delta, "delta", least=-(2**62))
        number, low, high = self._range("shift", lane, start, stop)
        if low == high or by == 0:
            return
        self._table.check_shift(number, low, high, by)
        if rotate is False:
            self._table.shift(number, low, high, by)
            return
        turn: Callable[[int, Any, int], Any] = rotate

        def turn_layer(layer: int, keys: Any) -> None:
            self._table.turned_layer = layer
            turn(layer, keys, by)
            self._table.turned_layer = None

        try:
            self._store.rotate(
                turn_layer, number, low, high, lambda: self._table.shift(number, low, high, by)
            )
        except BaseException:
            self._table.turned_layer = None
            raise

    # -- files --------------------------------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        metadata: Mapping[str, str] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Write the tokens of all lanes and their positions to a file, which `load` and ``safetensors`` read.

        Parameters and errors are those of `KVCache.save`; also

        Raises
        ------
        LayerOrderError
            A step is under way.
        """
        from gpuarena.kv.state._sequences import save_lanes

        save_lanes(self, path, metadata, progress)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        arena: Arena,
        *,
        spec: KVSpec | None = None,
        lanes: int | None = None,
        max_tokens: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> LaneCache:
        """Return a new cache on `arena` whose first lanes hold the sequences of a file, of lanes or of pages.

        >>> import tempfile
        >>> import numpy as np
        >>> spec = KVSpec.uniform(layers=1, kv_heads=2, head_dim=4, dtype="float32")
        >>> cache = LaneCache(Arena("1MiB"), spec, lanes=3, max_tokens=16)
        >>> prompts = np.ones((2, 2, 5, 4), np.float32)
        >>> _ = cache.append(0, prompts, prompts, n_tokens=[5, 2])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "lanes.safetensors")
        ...     cache.save(path)
        ...     LaneCache.load(path, Arena("1MiB"), lanes=4).lengths
        (5, 2, 0, 0)

        Parameters and errors are those of `KVCache.load`, with `lanes` for its `batch`; by default there are as many
        as there are sequences in the file.
        """
        from gpuarena.kv.state._sequences import load_lanes

        return load_lanes(cls, path, arena, spec, lanes, max_tokens, progress)

    def restore(
        self, path: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None
    ) -> None:
        """Let lane K hold sequence K of a file, for all of them, instead of what is held; other lanes are empty.

        Checkpoints die, and a step under way is abandoned. Parameters and errors are those of `KVCache.restore`: if
        reading the bytes fails, all lanes are empty.
        """
        from gpuarena.kv.state._sequences import restore_lanes

        restore_lanes(self, path, progress)

    def _range(self, verb: str, lane: Any, start: Any, stop: Any) -> tuple[int, int, int]:
        """Return a lane and a range of its tokens, for a verb that cannot be used within a step."""
        self._table.lane(lane)
        self._table.need_idle(verb)
        span = self._table.span(lane, start, stop)
        self._store.check()
        return span
