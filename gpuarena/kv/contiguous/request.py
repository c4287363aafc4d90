"""One request of a contiguous cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuarena.errors import ArgumentError, SequenceError, refuse_copy
from gpuarena.kv.spec import positive

if TYPE_CHECKING:
    from gpuarena.kv.contiguous.cache import ContiguousKVCache

__all__ = ["Request"]


class Piece:
    """What is known of one request; the cache refers to this and not to `Request`, so that they make no cycle."""

    __slots__ = ("ended_by", "held", "length", "max_tokens", "n_written", "start")

    def __init__(self, start: int, max_tokens: int) -> None:
        self.start = start
        self.max_tokens = max_tokens
        self.ended_by: str | None = None
        self.cut(0)

    def cut(self, n_tokens: int) -> None:
        # length: tokens that every layer holds
        # held: tokens that the layers hold which the present step has written
        # n_written: layers that the present step has written
        self.length, self.held, self.n_written = n_tokens, n_tokens, 0


class Request:
    """One request's slots in a `ContiguousKVCache`, made by `ContiguousKVCache.request`.

    A request that is dropped without `free` keeps its slots until the cache is reset.
    """

    __slots__ = ("_cache", "_piece")

    def __init__(self, cache: ContiguousKVCache, piece: Piece) -> None:
        self._cache = cache
        self._piece = piece

    @property
    def start(self) -> int:
        """Its first slot, by which a diagnosis names it; a compaction may change it."""
        return self._piece.start

    @property
    def max_tokens(self) -> int:
        """Tokens that it has reserved."""
        return self._piece.max_tokens

    @property
    def length(self) -> int:
        """Tokens that every layer holds."""
        return self._piece.length

    @property
    def is_live(self) -> bool:
        """Whether it has its slots: it was not freed, the cache not reset, and the arena not rolled back."""
        return self._piece.ended_by is None and self._cache.is_live

    def append(self, layer: int, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write new tokens of one layer behind its filled ones, and return views of what a query may see.

        A step writes the layers that own their keys in ascending order, each with the same number of tokens.

        Parameters
        ----------
        layer : int
        keys : ``[1, kv_heads, n, key_dim]``
        values : ``[1, kv_heads, n, value_dim]``

        Returns
        -------
        keys, values
            Views of all filled tokens, or of the last ``window - 1 + n`` in a layer with a window. After a `free`
            or a compaction they show what has come to lie there; `read` returns new ones.

        Raises
        ------
        LayerOrderError
            The layer was written in this step already, or one before it was not. `truncate` drops a step.
        CapacityError
            More than `max_tokens`; the figures count tokens of this request.
        SequenceError
            The request was freed.
        ArgumentError
            There is no such layer, or it is a `SharedLayer`, which owns nothing to write.
        ArgumentTypeError, DeviceMismatchError, AutogradError, ShapeError, DTypeError, StaleRegionError
            Checked before the first byte is written; unchanged on error.
        """
        return self._cache._append(self._live_piece("append"), layer, keys, values)

    def read(self, layer: int, n_tokens: int = 1) -> tuple[Any, Any]:
        """Return what the queries of a layer's last `n_tokens` tokens may see, as `append` does.

        A `SharedLayer` reads its owner.

        Raises
        ------
        SequenceError, ArgumentError, ArgumentTypeError, StaleRegionError
            The request was freed, there is no such layer, it holds fewer tokens, or the arena was rolled back.
        """
        return self._cache._read(self._live_piece("read"), layer, n_tokens)

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens of every layer, and drop a step that is unfinished; nothing is copied.

        Raises
        ------
        SequenceError, ArgumentError, ArgumentTypeError
            The request was freed, or every layer holds less than that. Unchanged on error.
        """
        piece = self._live_piece("truncate")
        keep = positive(n_tokens, "n_tokens", least=0)
        if keep > piece.length:
            raise ArgumentError(f"truncate({keep}): the request holds only {piece.length} tokens")
        try:
            piece.cut(keep)
            self._cache._slots.use(piece.start, keep)
        except BaseException:
            self._cache._mend()
            raise

    def grow(self, max_tokens: int) -> None:
        """Reserve more, in place.

        Raises
        ------
        CapacityError
            The slots behind it are not free. Unchanged on error.
        SequenceError, ArgumentError, ArgumentTypeError
            The request was freed, or has more than `max_tokens` already. Unchanged on error.
        """
        self._cache._grow(self._live_piece("grow"), positive(max_tokens, "max_tokens"))

    def free(self) -> None:
        """Give the slots back.

        Raises
        ------
        SequenceError
            They were given back before. Unchanged on error.
        """
        self._cache._free(self._live_piece("free"))

    def _live_piece(self, action: str) -> Piece:
        piece = self._piece
        if piece.ended_by is not None:
            raise SequenceError(
                f"{action}: the request at slot {piece.start} gave its slots back by {piece.ended_by}; "
                f"cache.request(max_tokens) makes another"
            )
        return piece

    def __repr__(self) -> str:
        piece = self._piece
        state = f"freed by {piece.ended_by}" if piece.ended_by else f"at slot {piece.start}"
        return f"<Request {state}: {piece.length} of {piece.max_tokens} tokens>"

    def __reduce__(self) -> Any:
        raise refuse_copy(self)
