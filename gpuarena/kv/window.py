"""A layer of bounded memory: the sinks, and the tokens of a window with some slack behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuarena.kv._layer import KVLayer

__all__ = ["WindowLayer"]


class WindowLayer(KVLayer):
    """Keys and values of the last ``window + slack`` tokens at most, and of the first `sinks`.

    The slots are ``[sinks | body]``. The body holds the tokens from `held_from` on, in order; when it is full, the
    last ``window - 1`` are moved to its front: once in ``slack + 1`` tokens that come one at a time, at least half as
    seldom if they come in pieces. So every view is one ascending piece: with no sinks exactly the window, with sinks
    those and all of the body, and `mask` tells.
    """

    __slots__ = ("_held_from", "_k", "_n_slots", "_v")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._n_slots = self.spec.n_slots(self._common.max_tokens)
        self._held_from = self.spec.sinks
        self._k: Any = None  # [rows, kv_heads, slots, key_dim]
        self._v: Any = None

    def append(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write new tokens, and return views of what a query may see; see `KVLayer.append`.

        The first tokens of all may be more than there are slots, as a prompt is: then `keys` and `values` themselves
        come back, since those are all that there is to see, and their end is held. Later ones may be at most
        ``slack + 1`` at once.

        Raises
        ------
        CapacityError
            Also for more tokens at once than fit beside the window; the figures count tokens.
        """
        n_rows, n_new = self._accept(keys, values)
        common, ops, sinks = self._common, self._ops, self.spec.sinks
        start = self.length
        stop = start + n_new
        if stop > common.max_tokens:
            raise self._capacity_error(n_new)
        low = self._first_needed(start)
        is_whole = start == 0 and n_new > self._n_slots
        must_move = not is_whole and self._slot_of(stop) > self._n_slots
        if must_move and sinks + stop - low > self._n_slots:
            raise self._chunk_error(n_new, self._n_slots - sinks - (start - low))
        self.check_live()
        self._bind(n_rows)
        if is_whole:
            self._held_from = stop - (self._n_slots - sinks)
            self._write(0, ops.tokens(keys, 0, sinks), ops.tokens(values, 0, sinks))
            keys_held, values_held = (ops.tokens(new, self._held_from, stop) for new in (keys, values))
            self._write(sinks, keys_held, values_held)
        else:
            if must_move:
                keys, values = ops.apart(keys, self._k), ops.apart(values, self._v)
                self._move(low)
            self._write(self._slot_of(start), keys, values)
        common.rows = n_rows
        common.lengths[self._slot] = stop
        common.high_water = max(common.high_water, stop)
        return (keys, values) if is_whole else self._views(start)

    def _write(self, slot: int, keys: Any, values: Any) -> None:
        self._ops.write(self._k, self._v, slot, keys, values)

    def _first_needed(self, start: int) -> int:
        """Return the first token behind the sinks that a query of token `start` sees."""
        assert self.spec.window is not None, "a bounded layer has a window"
        return max(self.spec.sinks, start - self.spec.window + 1)

    def _move(self, low: int) -> None:
        """Move the tokens from `low` on to the front of the body."""
        source, n_kept = self._slot_of(low), self.length - low
        if n_kept > 0:
            # A rollback may bring back more rows, which then must have been moved as well.
            planes = [plane for _, plane in self.planes()] if self._common.marks else [self._k, self._v]
            for plane in planes:
                self._ops.move(plane, source, self.spec.sinks, n_kept)
        self._held_from = low

    def _slot_of(self, token: int) -> int:
        """Return where a token lies, or would; the front of the body for one that is forgotten."""
        sinks = self.spec.sinks
        return token if token < sinks else sinks + max(token - self._held_from, 0)

    def _views(self, start: int) -> tuple[Any, Any]:
        """Return what queries from token `start` on may see."""
        low, stop = self._slot_of(self.low(start)), self._slot_of(self.length)
        return self._ops.tokens(self._k, low, stop), self._ops.tokens(self._v, low, stop)

    def _bind(self, n_rows: int) -> None:
        if n_rows != self._bound:
            self._k, self._v = (self._ops.rows(plane, n_rows) for _, plane in self.planes())
            self._bound = n_rows

    # -- what it holds ------------------------------------------------------------------------------------------

    @property
    def held_from(self) -> int:
        """The first token behind the sinks that is still held."""
        return self._held_from if self._held_from > self.spec.sinks else 0

    @property
    def n_held(self) -> int:
        """Tokens that are held."""
        return self._slot_of(self.length)

    @property
    def positions(self) -> list[range]:
        """The runs of tokens that `keys` and `values` show: the sinks and the body, or all."""
        if not self.held_from:
            return [range(self.length)]
        return [range(self.spec.sinks), range(self._held_from, self.length)]

    @property
    def keys(self) -> Any:
        """View of the keys that are held, ``[rows, kv_heads, n_held, key_dim]``."""
        self._prepare()
        return self._ops.tokens(self._k, 0, self.n_held)

    @property
    def values(self) -> Any:
        """View of the values that are held, ``[rows, kv_heads, n_held, value_dim]``."""
        self._prepare()
        return self._ops.tokens(self._v, 0, self.n_held)

    def read(self, n_tokens: int = 1) -> tuple[Any, Any]:
        """Return what the queries of the last `n_tokens` tokens may see; see `KVLayer.read`."""
        n_tokens = self._check_read(n_tokens)
        self._prepare()
        return self._views(self.length - n_tokens)

    def _prepare(self) -> None:
        self.check_live()
        self._bind(self._common.batch if self._common.rows is None else self._common.rows)

    def _restart(self) -> None:
        self._held_from = self.spec.sinks

    def _hold(self, runs: Sequence[range]) -> None:
        super()._hold(runs)
        self._held_from = runs[-1].start if len(runs) > 1 else self.spec.sinks
