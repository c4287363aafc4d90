"""A layer that holds every token: keys and values from the front of a buffer on."""

from __future__ import annotations

from typing import Any

from gpuarena.errors import ArgumentError, ShapeError
from gpuarena.kv._layer import KVLayer

__all__ = ["FullLayer"]


class FullLayer(KVLayer):
    """Keys and values, head-major: ``[batch, kv_heads, max_tokens, dim]``, of which the first tokens are filled.

    Keys and values lie in one region where their dims and dtypes agree.
    """

    __slots__ = (
        "_k",
        "_k_tokens",
        "_n_before",
        "_n_clean",
        "_n_ready",
        "_n_used",
        "_pair",
        "_pair_shape",
        "_v",
        "_v_tokens",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._k: Any = None  # [rows, kv_heads, max_tokens, key_dim], set by _bind
        self._v: Any = None
        self._k_tokens: Any = None  # (start, stop) -> view of those tokens
        self._v_tokens: Any = None
        self._n_before = self.spec.window or 0  # 0: queries see all
        self._pair: Any = None  # [2, rows, kv_heads, max_tokens, dim] where there is one region
        self._pair_shape: Any = None  # of what append_pair got last
        self._n_ready = self._common.max_tokens  # tokens that the views reach
        self._n_used = 0  # below, slots may hold tokens that were cut off since they were clean
        self._n_clean = 0  # below, no slot of any row holds what lay in the memory before

    def _bind(self, n_rows: int) -> None:
        """Look at the first `n_rows` rows of the buffers."""
        ops = self._ops
        planes = [ops.rows(plane, n_rows) for _, plane in self.planes()]
        self._k, self._v = planes
        self._k_tokens, self._v_tokens = map(ops.viewer, planes)
        self._pair = None
        self._bound = n_rows

    def append(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write new tokens behind the filled ones, and return views of what a query may see; see `KVLayer.append`."""
        n_rows, n_new = self._accept(keys, values)
        common = self._common
        start = common.lengths[self._slot]
        stop = start + n_new
        if stop > self._n_ready:
            self._make_ready(n_new)
        region = self.regions[-1]
        if not region.is_live:
            region._check()
        if n_rows != self._bound:
            self._bind(n_rows)
        self._ops.write(self._k, self._v, start, keys, values)
        self._advance(n_rows, stop)
        low = self._n_before and self.low(start)
        return self._k_tokens(low, stop), self._v_tokens(low, stop)

    def append_pair(self, pair: Any) -> tuple[Any, Any]:
        """Write keys and values that come as one array ``[2, rows, kv_heads, n, dim]``, with one operation.

        Otherwise as `append`.

        Raises
        ------
        ArgumentError
            Keys and values of this layer differ in dim or dtype.
        """
        self._check_pair(pair)
        common, ops = self._common, self._ops
        n_rows, n_new = pair.shape[1], pair.shape[3]
        start = common.lengths[self._slot]
        stop = start + n_new
        if stop > self._n_ready:
            self._make_ready(n_new)
        self.check_live()
        if n_rows != self._bound:
            self._bind(n_rows)
        if self._pair is None:
            self._pair = self.regions[0].array[:, :n_rows]
        ops.write_pair(self._pair, start, pair)
        self._advance(n_rows, stop)
        return self._views(start, stop)

    def _check_pair(self, pair: Any) -> None:
        try:
            if (  # as the one before, which was checked
                pair.shape == self._pair_shape
                and pair.shape[1] == self._common.rows
                and self._ops.agree(pair, pair, self._wanted)
            ):
                return
        except (AttributeError, TypeError, RuntimeError):  # no array, or a nested one
            pass
        spec = self.spec
        if not spec.is_joint:
            raise ArgumentError(
                f"append_pair: keys and values of layer {self.index} differ in dim or dtype; append them apart"
            )
        self._ops.check(pair, "pairs")
        if pair.ndim != 5 or pair.shape[0] != 2:
            raise ShapeError(
                f"layer {self.index}: pairs are {list(pair.shape)}, the cache holds "
                f"[2, rows, {spec.kv_heads}, tokens, {spec.key_dim}]",
                shape=tuple(pair.shape),
            )
        self._check(pair[0], pair[1])
        self._pair_shape = pair.shape

    def _advance(self, n_rows: int, stop: int) -> None:
        common = self._common
        common.rows = n_rows  # differs only while nothing is held, the check saw to that
        common.lengths[self._slot] = stop
        if stop > common.high_water:
            common.high_water = stop

    def _make_ready(self, n_new: int) -> None:
        """Raise: the tokens end behind the views, which reach the capacity."""
        raise self._capacity_error(n_new)

    def _views(self, start: int, stop: int) -> tuple[Any, Any]:
        low = self.low(start)
        return self._k_tokens(low, stop), self._v_tokens(low, stop)

    def _prepare(self) -> None:
        """Raise if the memory is gone, and look at the rows in use."""
        self.check_live()
        rows = self._common.batch if self._common.rows is None else self._common.rows
        if rows != self._bound:
            self._bind(rows)

    @property
    def keys(self) -> Any:
        """View of the filled keys, ``[rows, kv_heads, length, key_dim]``."""
        self._prepare()
        return self._k_tokens(0, self.length)

    @property
    def values(self) -> Any:
        """View of the filled values, ``[rows, kv_heads, length, value_dim]``."""
        self._prepare()
        return self._v_tokens(0, self.length)

    def read(self, n_tokens: int = 1) -> tuple[Any, Any]:
        """Return what the queries of the last `n_tokens` tokens may see; see `KVLayer.read`."""
        n_tokens = self._check_read(n_tokens)
        self._prepare()
        return self._views(self.length - n_tokens, self.length)

    # -- reads and writes at fixed addresses --------------------------------------------------------------------

    def buffers(self) -> tuple[Any, Any]:
        """Return keys and values of all slots, ``[rows, kv_heads, max_tokens, dim]``, filled or not.

        Their addresses and shapes do not change while the number of rows does not, which compiled code and captured
        graphs need. Slots that never held a token are 0, so that attention can mask them.
        """
        self._prepare()
        self.clear_up_to(self._common.max_tokens)
        return self._k, self._v

    def make_room(self, n_tokens: int) -> None:
        """Make sure that there are `n_tokens` slots, which there are."""

    def clear_up_to(self, n_tokens: int) -> None:
        """Put 0 in slots below `n_tokens` that hold no token: memory may hold NaN, which no mask hides."""
        clean, length, rows = self._n_clean, self.length, self._common.rows or 0
        if self._n_used > length:  # tokens that were cut off may be NaN as well
            for _, plane in self.planes():
                self._ops.clear(plane, length, min(self._n_used, clean), 0)
            self._n_used = 0
        if n_tokens <= clean:
            return
        self.make_room(n_tokens)
        for _, plane in self.planes():
            self._ops.clear(plane, max(length, clean), n_tokens, 0)
            if length > clean:  # rows that are not in use
                self._ops.clear(plane, clean, min(length, n_tokens), rows)
        self._n_clean = n_tokens

    def _cut(self, n_tokens: int) -> None:
        if n_tokens < self.length and self._n_clean:
            self._n_used = max(self._n_used, self.length)
        super()._cut(n_tokens)

    def write_at(self, positions: Any, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write tokens at `positions`, ``[n]`` integers on the device, and return keys and values of all slots.

        For code that is compiled or captured: nothing that changes from step to step is read on the host, and nothing
        is changed there. `KVCache.advance` has made room and counted the tokens before, `buffers` was called outside,
        once for each number of rows.

        Raises
        ------
        ArgumentError
            `buffers` was not called, or on the CPU a position is out of range.
        ArgumentTypeError, DeviceMismatchError, AutogradError, ShapeError, DTypeError
            As `append`; also for positions that are not as many integers as there are tokens. Unchanged on error.
        """
        if self._k is None or self._bound != self._common.rows:
            raise ArgumentError(
                f"write_at: call buffers({self.index}) first, outside of the compiled code, and again when the number "
                f"of rows has changed"
            )
        if not self._ops.is_compiling():  # compiled code relies on what advance() saw
            self.check_live()
        self._check(keys, values)
        self._ops.check_positions(positions, keys.shape[2], self._n_ready)
        self._ops.write_at(self._k, self._v, positions, keys, values)
        return self._k, self._v

    def read_bucket(self, n_slots: int) -> tuple[Any, Any]:
        """Return views of the first `n_slots` slots; see `KVCache.read_bucket`."""
        self._prepare()
        self.clear_up_to(n_slots)
        return self._k_tokens(0, n_slots), self._v_tokens(0, n_slots)
