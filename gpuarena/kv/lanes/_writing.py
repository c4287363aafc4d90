"""How tokens get into a lane cache: steps of all layers."""

from __future__ import annotations

from typing import Any

from gpuarena.errors import ShapeError
from gpuarena.kv._layer import check_dtypes, check_shapes
from gpuarena.kv.lanes._arrays import Lanes
from gpuarena.kv.lanes._handles import LaneStep
from gpuarena.kv.lanes._reading import LaneReading
from gpuarena.kv.lanes._table import Step
from gpuarena.kv.spec import positive


class LaneWriting(LaneReading):
    """The part of `LaneCache` that writes."""

    def append(
        self, layer: int, keys: Any, values: Any, *, lanes: Any = None, n_tokens: Any = None
    ) -> tuple[Any, Any]:
        """Write new tokens of one layer, each row behind the tokens of its own lane.

        Parameters
        ----------
        layer : int
        keys : ``[rows, kv_heads, n, key_dim]``
        values : ``[rows, kv_heads, n, value_dim]``
        lanes : ``[rows]`` integers, optional
            The lane of each row, each lane once. None for those of the `step` in whose block this is, otherwise for
            the first lanes.
        n_tokens : ``[rows]`` integers, optional
            How many tokens of each row count; the rest of the row is padding, and not written. None for those
            of the `step`, otherwise for all `n`.

        Returns
        -------
        keys, values
            As `read` gives them.

        Raises
        ------
        ArgumentError, ArgumentTypeError, DeviceMismatchError, AutogradError, ShapeError, DTypeError, StaleRegionError
            Among these: a lane twice, or a layer that shares the keys and values of another.
        LayerOrderError
            The layer is written already in this step, or the step has other lanes or numbers of tokens.
        CapacityError
            A lane is full; nothing is written in the others either.

        Notes
        -----
        Everything is checked before the first byte is written; the cache is unchanged on error.
        """
        number = self._own_layer(layer)
        table, store = self._table, self._store
        n_rows, width = self._check(number, keys, values)
        rows = self._lanes(lanes, n_rows)
        if len(rows) != n_rows:
            raise ShapeError(f"layer {number}: {n_rows} rows given for {len(rows)} lanes, {list(rows)}")
        counts = self._counts(n_tokens, rows, width)
        step = table.check_turn(number, rows, counts)
        store.check()
        store.write(number, rows, step.starts, counts, keys, values)
        if step is not table.step:
            table.open(step)
            store.publish(table.lengths)
        table.wrote(number)
        return self._read(number, rows)

    def _check(self, layer: int, keys: Any, values: Any) -> tuple[int, int]:
        """Return the rows and tokens of keys and values, or raise unless they can be written to `layer`."""
        spec = self._spec(layer)
        self._ops.check(keys, "keys")
        self._ops.check(values, "values")
        check_shapes(layer, spec, keys, values)
        k_shape = tuple(keys.shape)
        if k_shape[0] > self.n_lanes:
            raise ShapeError(
                f"layer {layer}: {k_shape[0]} rows given, the cache has {self.n_lanes} lanes; make it with more",
                shape=k_shape,
            )
        check_dtypes(layer, spec, keys, values, self._wanted[layer])
        return k_shape[0], k_shape[2]

    def step(self, lanes: Any = None, n_tokens: Any = 1) -> LaneStep:
        """Return a context manager in whose block every layer is appended once.

        >>> import numpy as np
        >>> from gpuarena import Arena
        >>> from gpuarena.kv import KVSpec
        >>> from gpuarena.kv.lanes import LaneCache
        >>> spec = KVSpec.uniform(layers=2, kv_heads=1, head_dim=4, dtype="float32")
        >>> cache = LaneCache(Arena("1MiB"), spec, lanes=3, max_tokens=16)
        >>> new = np.ones((2, 1, 1, 4), np.float32)
        >>> with cache.step(lanes=[2, 0]):
        ...     for layer in range(2):
        ...         _ = cache.append(layer, new, new)
        >>> cache.lengths
        (1, 0, 1)

        The lanes have their new lengths from the beginning, so that a mask can be made before the first layer.
        `lanes` and `n_tokens` of the calls inside default to the step's.

        Leaving the block by an exception, at any point, takes all of it back. The numbers of the step are checked on
        entry: `CapacityError`, or `LayerOrderError` while another step is under way.

        Parameters
        ----------
        lanes : ``[rows]`` integers, optional
            None for the first ``len(n_tokens)`` lanes, or for all if `n_tokens` is one number.
        n_tokens : int or ``[rows]`` integers
            One number for every row, or one a row.

        Raises
        ------
        LayerOrderError
            On leaving: a layer was not written. The step was abandoned.
        """
        rows, counts = self._rows_and_counts(n_tokens, lanes)
        if counts is None:
            counts = (positive(n_tokens, "n_tokens", least=0),) * len(rows)
        return LaneStep(self, rows, counts)

    def _plan(self, lanes: Lanes, counts: Lanes) -> Step:
        step = self._table.plan(lanes, counts, in_block=True)
        self._store.check()
        return step

    def _open(self, step: Step) -> None:
        self._table.open(step)
        self._store.publish(self._table.lengths)

    def _close(self, step: Step, *, failed: bool) -> None:
        if self._table.step is not step:  # abandoned inside, or over
            return
        if failed:
            self._undo()
            return
        try:
            self._table.need_all_written()
            self._table.commit()
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        """Abandon the step under way while an error is on its way, which says more than a stale cache would."""
        if self._table.abandon() and self._store.is_live:
            self._store.publish(self._table.lengths)

    def abandon(self) -> None:
        """Undo a step that is under way, in every layer; without one, do nothing."""
        self._store.check()
        if self._table.abandon():
            self._store.publish(self._table.lengths)
