"""What can be read of a lane cache: keys and values, masks, attention."""

from __future__ import annotations

from typing import Any

from gpuarena.errors import ArgumentError, ShapeError
from gpuarena.kv.lanes import _mask
from gpuarena.kv.lanes._arrays import Lanes
from gpuarena.kv.lanes._base import LaneBase
from gpuarena.kv.spec import positive


class LaneReading(LaneBase):
    """The part of `LaneCache` that reads."""

    def read(self, layer: int, lanes: Any = None) -> tuple[Any, Any]:
        """Return the keys and values of a layer, or of the one that it shares.

        Parameters
        ----------
        layer : int
        lanes : ``[rows]`` integers, optional
            None for those of the `step` in whose block this is, otherwise for all.

        Returns
        -------
        keys : ``[rows, kv_heads, longest, key_dim]``
        values : ``[rows, kv_heads, longest, value_dim]``
            Of consecutive lanes these are views, which show what is in the cache, also after it changes. Other lanes
            are gathered into a scratch that all layers share, and stay until the next call that gathers: an `append`
            or `read` of such lanes, an `attend` to them, `packed` or `remove`. Behind the length of a lane there are
            zeros.

        Raises
        ------
        LayerOrderError
            A step is under way that has not written the layer yet.
        """
        number = self.spec.owner(layer)
        rows = self._lanes(lanes, self.n_lanes)
        self._store.check()
        self._table.need_written(number)
        return self._read(number, rows)

    def _read(self, layer: int, lanes: Lanes) -> tuple[Any, Any]:
        return self._store.read(layer, lanes, [self._table.lengths[lane] for lane in lanes])

    def packed(self, layer: int, lanes: Any = None) -> tuple[Any, Any]:
        """Return the tokens of one lane behind those of the other, without padding, for attention of ragged rows.

        Parameters and errors as for `read`; `cu_seqlens` says where each lane begins.

        Returns
        -------
        keys : ``[total, kv_heads, key_dim]``
        values : ``[total, kv_heads, value_dim]``
            In the scratch, until the next call that gathers; see `read`.
        """
        number = self.spec.owner(layer)
        rows = self._lanes(lanes, self.n_lanes)
        self._store.check()
        self._table.need_written(number)
        return self._store.packed(number, rows, [self._table.lengths[lane] for lane in rows])

    def cu_seqlens(self, lanes: Any = None) -> Any:
        """Return the running sums of the lengths, from 0, int32 ``[rows + 1]`` in the arena.

        The next call overwrites them, at the same address. `lanes` as for `read`.
        """
        rows = self._lanes(lanes, self.n_lanes)
        return self._store.offsets([self._table.lengths[lane] for lane in rows])

    def mask(self, n_tokens: Any = None, lanes: Any = None, layer: int | None = None) -> Any:
        """Return which tokens the last tokens of each lane may look at, for a masked attention over `read`.

        Parameters
        ----------
        n_tokens : int or ``[rows]`` integers, optional
            How many tokens of each lane are the queries: the same number of the last tokens of all, or, as in a
            chunk that is padded on the right, one number a row. None for those of the `step` in whose block
            this is, otherwise for 1.
        lanes : ``[rows]`` integers, optional
            None for those of the step, otherwise for the first ``len(n_tokens)``, or for all.
        layer : int, optional
            Whose `window` and `sinks` to heed; None for neither.

        Returns
        -------
        mask : bool ``[rows, 1, n, longest]``, a new array
            True where a query may look: at itself and the tokens before it in its lane. Queries that are padding, or
            that an empty lane does not have, see nothing.

        Raises
        ------
        ArgumentError
            There are no such lanes or layer, or more queries than `max_tokens`.
        """
        spec = None if layer is None else self._spec(self.spec.owner(layer))
        self._store.check()
        rows, counts = self._rows_and_counts(n_tokens, lanes)
        if counts is not None:
            width = max(counts, default=0)
        else:
            width = 1 if n_tokens is None else positive(n_tokens, "n_tokens", least=0)
        if width > self.max_tokens:
            raise ArgumentError(f"mask: {width} queries asked, a lane has at most {self.max_tokens} tokens")
        lengths = [self._table.lengths[lane] for lane in rows]
        queries = _mask.query_indices(lengths, counts, width)
        return _mask.mask_of(self.arena, queries, max(lengths, default=0), spec)

    def attend(
        self, layer: int, q: Any, *, lanes: Any = None, n_tokens: Any = None, scale: float | None = None
    ) -> Any:
        """Return the attention of the last tokens of each lane, by torch's SDPA; torch arenas only.

        Parameters
        ----------
        layer : int
        q : ``[rows, heads, n, key_dim]``
            `heads` is a multiple of ``kv_heads``.
        lanes, n_tokens
            As for `append`: which lane each row is, and how many of its queries count.
        scale : float, optional
            None for ``key_dim ** -0.5``.

        Returns
        -------
        out : ``[rows, heads, n, value_dim]``
            Zeros for padding, and for lanes that hold nothing.

        Raises
        ------
        BackendError
            The arena is no torch arena.
        ArgumentError, ArgumentTypeError, DeviceMismatchError, AutogradError, ShapeError, DTypeError, StaleRegionError
        LayerOrderError
            A step is under way that has not written the layer yet.
        """
        number = self.spec.owner(layer)
        spec = self._spec(number)
        _mask.check_queries(self.arena, self._ops, layer, spec, q)
        scale = _mask.checked_scale(scale)
        n_rows, width = q.shape[0], q.shape[2]
        rows = self._lanes(lanes, n_rows)
        if len(rows) != n_rows:
            raise ShapeError(
                f"layer {layer}: {n_rows} rows of queries given for {len(rows)} lanes, {list(rows)}"
            )
        counts = self._counts(n_tokens, rows, width)
        self._store.check()
        self._table.need_written(number)
        queries = _mask.query_indices([self._table.lengths[lane] for lane in rows], counts, width)
        return _mask.attend(self.arena, spec, q, self._read(number, rows), queries, scale)
