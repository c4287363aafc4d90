"""A layer that holds every token quantised, and shows keys and values in memory that all layers share."""

from __future__ import annotations

from typing import Any

from gpuarena import _bump
from gpuarena.arena import Arena
from gpuarena.errors import BackendError
from gpuarena.kv._layer import Common, KVLayer
from gpuarena.kv._ops import Ops
from gpuarena.kv._quantize import dequantize, quantize
from gpuarena.kv.spec import SCRATCH_ALIGNMENT, LayerSpec
from gpuarena.region import Region

__all__ = ["QuantizedLayer"]


class QuantizedLayer(KVLayer):
    """Codes and scales of keys and values, head-major, of which the first tokens are filled.

    Every token is quantised when it is appended, alone, and never again: nothing recent is kept in full precision,
    and what is read does not depend on how the tokens came. See `gpuarena.kv._quantize` for formats and errors.

    `append`, `read`, `keys` and `values` write what they return to the scratch of the cache. **It is valid until the
    next of these calls on any layer with storage, and until rows are reordered**: use it, or copy it, before. (Keys
    and values of one layer do not disturb each other.) The time of each call grows with the tokens that it shows; a
    layer with a window shows those of the window alone.

    Raises
    ------
    BackendError
        The arena is neither of torch nor of NumPy.
    """

    __slots__ = ("_key_planes", "_value_offset", "_value_planes")

    def __init__(
        self,
        common: Common,
        index: int,
        arena: Arena,
        spec: LayerSpec,
        ops: Ops,
        regions: tuple[Region, ...] | None = None,
    ) -> None:
        if arena.backend not in ("torch", "host"):
            raise BackendError(
                f"layer {index}: storage={spec.storage!r} needs a torch or a host arena, not {arena.backend}"
            )
        super().__init__(common, index, arena, spec, ops, regions)
        self._key_planes: tuple[Any, Any] = (
            None,
            None,
        )  # codes, scales [rows, kv_heads, max_tokens, elements]
        self._value_planes: tuple[Any, Any] = (None, None)
        n_tokens = common.batch * spec.kv_heads * spec.n_slots(common.max_tokens)
        key_nbytes = n_tokens * spec.key_dim * spec.dtype.itemsize
        self._value_offset = _bump.align_up(key_nbytes, SCRATCH_ALIGNMENT)

    def append(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Quantise new tokens behind the filled ones, and return what a query may see; see `KVLayer.append`.

        A token with a NaN or an infinity reads back as NaN, in that head alone: nothing is raised, since a GPU would
        have to be waited for.

        Returns
        -------
        keys, values
            All filled tokens, or the last ``window - 1 + n`` in a layer with a window, also the new ones as they
            are stored. Valid until the next call on a layer with storage, or a reorder.
        """
        n_rows, n_new = self._accept(keys, values)
        common = self._common
        start = self.length
        stop = start + n_new
        if stop > common.max_tokens:
            raise self._capacity_error(n_new)
        self._prepare(n_rows)
        # What is appended may itself lie in the scratch, so both are stored before anything is shown.
        for new, planes in ((keys, self._key_planes), (values, self._value_planes)):
            quantize(new, self._storage, *(self._ops.tokens(plane, start, stop) for plane in planes))
        common.rows = n_rows  # differs only while nothing is held, the check saw to that
        common.lengths[self._slot] = stop
        common.high_water = max(common.high_water, stop)
        low = self.low(start)
        return self._show_keys(low, stop), self._show_values(low, stop)

    def read(self, n_tokens: int = 1) -> tuple[Any, Any]:
        """Return what the queries of the last `n_tokens` tokens may see, valid as what `append` returns."""
        n_tokens = self._check_read(n_tokens)
        self._prepare()
        low = self.low(self.length - n_tokens)
        return self._show_keys(low, self.length), self._show_values(low, self.length)

    @property
    def keys(self) -> Any:
        """The filled keys, ``[rows, kv_heads, length, key_dim]``, valid as what `append` returns."""
        self._prepare()
        return self._show_keys(0, self.length)

    @property
    def values(self) -> Any:
        """The filled values, ``[rows, kv_heads, length, value_dim]``, valid as what `append` returns."""
        self._prepare()
        return self._show_values(0, self.length)

    @property
    def _storage(self) -> str:
        assert self.spec.storage is not None, "a quantised layer has a storage"
        return self.spec.storage

    def _prepare(self, n_rows: int | None = None) -> None:
        """Raise if the memory is gone, and look at `n_rows` rows, or those in use."""
        self.check_live()
        self._common.scratch[self.arena.device]._check()
        if n_rows is None:
            n_rows = self._common.batch if self._common.rows is None else self._common.rows
        if n_rows != self._bound:
            planes = [self._ops.rows(plane, n_rows) for _, plane in self.planes()]
            self._key_planes, self._value_planes = (planes[0], planes[1]), (planes[2], planes[3])
            self._bound = n_rows

    def _show_keys(self, low: int, stop: int) -> Any:
        return self._show(
            self._key_planes, low, stop, self._wanted[0], self.spec.dtype.itemsize, self.spec.key_dim, 0
        )

    def _show_values(self, low: int, stop: int) -> Any:
        spec = self.spec
        itemsize, offset = spec.value_dtype.itemsize, self._value_offset
        return self._show(self._value_planes, low, stop, self._wanted[1], itemsize, spec.value_dim, offset)

    def _show(
        self, planes: tuple[Any, Any], low: int, stop: int, dtype: Any, itemsize: int, dim: int, offset: int
    ) -> Any:
        """Return the tokens from `low` to `stop` as numbers, in the scratch from `offset` bytes on."""
        shape = (self._bound, self.spec.kv_heads, stop - low, dim)
        nbytes = self._bound * self.spec.kv_heads * (stop - low) * dim * itemsize
        scratch = self._common.scratch[self.arena.device].array
        out = scratch[offset : offset + nbytes].view(dtype).reshape(shape)
        codes, scales = (self._ops.tokens(plane, low, stop) for plane in planes)
        dequantize(codes, scales, self._storage, out)
        return out
