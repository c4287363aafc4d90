"""The contiguous cache: each request has one piece of token slots, reserved when it comes, as before paging."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpuarena._bump import align_up
from gpuarena.arena import Arena
from gpuarena.errors import (
    ArenaError,
    ArgumentError,
    ArgumentTypeError,
    CapacityError,
    LayerOrderError,
    ShapeError,
    refuse_copy,
)
from gpuarena.kv._ops import ops_for
from gpuarena.kv._whole import taken_whole
from gpuarena.kv.contiguous._buddy import Buddy
from gpuarena.kv.contiguous._diagnosis import Compaction, Diagnosis, compaction_for_longest, diagnose
from gpuarena.kv.contiguous._free_list import FreeList
from gpuarena.kv.contiguous._layers import (
    SlotLayer,
    check_arrays,
    check_spec,
    copy_tokens,
    first_seen,
    scratch_alignment_of,
    scratch_nbytes_of,
    staging_like,
)
from gpuarena.kv.contiguous._slots import Occupancy, Slots
from gpuarena.kv.contiguous.request import Piece, Request
from gpuarena.kv.spec import KVSpec, as_arena, as_spec, positive

__all__ = ["ContiguousKVCache", "ContiguousStats"]

_POLICIES: dict[str, Callable[[int], Slots]] = {
    "first_fit": FreeList,
    "best_fit": lambda capacity: FreeList(capacity, fit="best"),
    "buddy": Buddy,
}


@dataclass(frozen=True, slots=True)
class ContiguousStats:
    """A snapshot of a cache; the sums go on over `ContiguousKVCache.reset`."""

    n_requests: int
    """Requests that have slots now."""
    n_requests_total: int
    """Requests that ever had."""
    n_refused_memory: int
    """Refusals of `request` for lack of free slots."""
    n_refused_fragmentation: int
    """Refusals of `request` though enough slots were free."""
    n_moved_total: int
    """Requests that compactions moved."""
    n_copied_total: int
    """Tokens that compactions copied."""
    high_water_slots: int
    """Most slots ever reserved at once."""
    bytes_per_token: int
    """Bytes of one token, over all layers."""
    reserved_nbytes: int
    """Bytes of all key and value regions."""
    used_nbytes: int
    """Bytes of the tokens that are held."""
    scratch_nbytes: int
    """Bytes reserved for compactions."""


class ContiguousKVCache:
    """A cache in which each request has one contiguous piece of token slots, as serving systems had before paging.

    It is for kernels that take no page table, and to compare with. Its fault is that the free slots end up
    scattered: long requests are refused while short ones are served. Here 40 % are free in two pieces of 200:

    >>> import numpy as np
    >>> from gpuarena import Arena
    >>> spec = KVSpec.uniform(layers=1, kv_heads=2, head_dim=4, dtype="float32")
    >>> cache = ContiguousKVCache(Arena("1MiB"), spec, capacity_tokens=1000)
    >>> first, second, third, fourth, fifth = [cache.request(200) for _ in range(5)]
    >>> k = np.ones((1, 2, 30, 4), np.float32)  # [1, kv_heads, tokens, head_dim]
    >>> keys, values = third.append(0, k, k)
    >>> keys.shape
    (1, 2, 30, 4)
    >>> second.free(), fourth.free()
    (None, None)
    >>> cache.would_fit(300), cache.would_fit(200)
    (False, True)
    >>> print(cache.diagnose(300))  # doctest: +NORMALIZE_WHITESPACE
    A request of 300 tokens does not fit although 400 of 1000 slots (40 %) are free, in 2 holes of at most 200. Of the
    600 reserved slots, 570 hold no token; without them 970 would be free. The holes at 200 and 600 would be one that is
    long enough without the allocation at 400. The request fits after a compaction that moves 1 allocation and copies 30
    tokens, or once any one of the allocations at 0, 400 and 800 ends. A request of at most 200 tokens fits now. In
    pages of 16 tokens it would fit: the tokens held and the request take 21 of 62 pages.
    >>> cache.compact(for_tokens=300)  # tokens copied
    30
    >>> cache.request(300).start, third.start
    (400, 200)

    A layer's keys and values lie head-major, ``[kv_heads, slots, dim]``: the tokens of one head of a request are one
    run of bytes, which is how attention reads them, with the strides that the linear cache's views have; and a request
    grows into the slots behind it without moving a byte. All heads together are no single run.

    Parameters
    ----------
    arena : Arena
        A torch arena takes and gives tensors, a host or cupy arena arrays of its own library.
    spec : KVSpec
        Without layers that have ``slack`` or ``storage``.
    capacity_tokens : int
        Slots for all requests together.
    policy : {"first_fit", "best_fit", "buddy"}
        Whether a request goes to the lowest hole that is long enough, to the shortest, or to a block of the next
        power of two.

    Raises
    ------
    OutOfMemoryError
        The arena has less than ``arena_nbytes(spec, capacity_tokens=...)`` left; nothing was taken of it.
    ArgumentError, ArgumentTypeError
        An unknown policy, a layer of a kind named above, or a value of the wrong kind; nothing was taken.

    Notes
    -----
    All array memory is taken here, none later. Not safe for use from several threads. Rolling the arena back to
    before this call makes the cache stale; later appends raise.
    """

    def __init__(
        self, arena: Arena, spec: KVSpec, *, capacity_tokens: int, policy: str = "first_fit"
    ) -> None:
        arena, spec = as_arena(arena), as_spec(spec)
        self.capacity_tokens = positive(capacity_tokens, "capacity_tokens")
        if not isinstance(policy, str):
            raise ArgumentTypeError(f"policy must be a str, not {type(policy).__name__}")
        if policy not in _POLICIES:
            raise ArgumentError(f"policy must be one of {', '.join(map(repr, _POLICIES))}, not {policy!r}")
        check_spec(spec)
        self.arena = arena
        self.spec = spec
        self.policy = policy
        self._ops = ops_for(arena, 1)
        self._layers: list[SlotLayer | None] = [None] * len(spec.layers)  # None for a SharedLayer

        def nbytes() -> int:
            return self.arena_nbytes(spec, capacity_tokens=self.capacity_tokens, alignment=arena.alignment)

        with taken_whole(arena, "ContiguousKVCache", nbytes):
            for turn, (index, layer) in enumerate(spec.owned):
                self._layers[index] = SlotLayer(arena, index, turn, layer, self.capacity_tokens, self._ops)
            self._owned = [layer for layer in self._layers if layer is not None]
            self._scratch = arena.alloc(
                scratch_nbytes_of(spec, self.capacity_tokens),
                "uint8",
                align=max(arena.alignment, scratch_alignment_of(spec)),
                label="scratch",
            )
            self._ops.reach(self.capacity_tokens)
        self._slots = _POLICIES[policy](self.capacity_tokens)
        self._pieces: dict[int, Piece] = {}  # by first slot
        self._n_requests = self._n_moved = self._n_copied = self._high_water = 0
        self._n_refused = {"memory": 0, "fragmentation": 0}

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    @staticmethod
    def arena_nbytes(spec: KVSpec, *, capacity_tokens: int, alignment: int = 256) -> int:
        """Return the bytes that a cache takes of an arena whose alignment is `alignment`, scratch and padding included.

        >>> spec = KVSpec.uniform(layers=28, kv_heads=2, head_dim=128, dtype="bfloat16")
        >>> ContiguousKVCache.arena_nbytes(spec, capacity_tokens=8192) - spec.nbytes(batch=1, tokens=8192)
        262144
        """
        check_spec(as_spec(spec))
        alignment = max(alignment, scratch_alignment_of(spec))
        # Without slack, batch rows of tokens slots are slots alike.
        scratch = align_up(scratch_nbytes_of(spec, positive(capacity_tokens, "capacity_tokens")), alignment)
        return spec.arena_nbytes(1, capacity_tokens, alignment=alignment) + scratch

    # -- requests -----------------------------------------------------------------------------------------------

    def request(self, max_tokens: int) -> Request:
        """Reserve `max_tokens` slots in one piece.

        Raises
        ------
        CapacityError
            No piece is long enough. `cause` is "memory" where less than that are free, and else "fragmentation";
            `free` and `largest_hole` count tokens, `diagnosis` is what `diagnose` returns, and the message says it
            in words. Unchanged on error but for `stats`.
        ArgumentError, ArgumentTypeError
            `max_tokens` is no positive integer.
        """
        n = positive(max_tokens, "max_tokens")
        piece = Piece(0, n)
        try:
            piece.start = self._slots.allocate(n)
            self._slots.use(piece.start, 0)
            self._pieces[piece.start] = piece
            self._n_requests += 1
            self._high_water = max(self._high_water, self._slots.reserved_slots)
            return Request(self, piece)
        except CapacityError as error:
            self._n_refused[error.cause] += 1
            raise self._explained(error, n) from None
        except BaseException:
            self._end(piece, "request(), which was interrupted")
            raise

    def would_fit(self, n_tokens: int) -> bool:
        """Return whether a request of `n_tokens` tokens would be served now."""
        return positive(n_tokens, "n_tokens") <= self._slots.largest_hole

    def diagnose(self, n_tokens: int) -> Diagnosis:
        """Say why a request of `n_tokens` tokens does not fit, and what would make it fit: ``print`` it.

        Requests that have slots are its "allocations", each named by its `Request.start`.
        """
        return diagnose(self._slots, n_tokens)

    def compact(self, *, for_tokens: int | None = None) -> int:
        """Move requests together, and return how many tokens were copied, in all layers each.

        Views that were returned before then show other tokens. An interrupt (Ctrl-C) inside of it may end the request
        that is being moved, whose tokens are lost: then `Request.is_live` is false. The others keep theirs.

        Parameters
        ----------
        for_tokens : int, optional
            Make the moves of ``diagnose(for_tokens).least_copy``, none if it fits already. None makes room for the
            longest request that moves can make room for: with ``"first_fit"`` and ``"best_fit"`` all free slots
            become one piece.

        Raises
        ------
        CapacityError
            No moves make room for `for_tokens`. Unchanged on error.
        StaleRegionError, ArgumentError, ArgumentTypeError
            The arena was rolled back, or `for_tokens` is no positive integer. Unchanged on error.
        """
        if for_tokens is None:
            plan = compaction_for_longest(self._slots)
        else:
            found = diagnose(self._slots, for_tokens)
            plan = found.least_copy
            if plan is None and not found.fits:
                raise self._explained(self._slots.refusal(found.requested), found.requested)
        return 0 if plan is None else self._move(plan)

    def reset(self) -> None:
        """End all requests; the memory stays."""
        for piece in self._pieces.values():
            piece.ended_by = "reset()"
        self._pieces.clear()
        self._slots = _POLICIES[self.policy](self.capacity_tokens)

    @property
    def is_live(self) -> bool:
        """Whether the memory is there: the arena was not rolled back to before the cache, and is open."""
        return self._scratch.is_live  # the last that was allocated

    @property
    def occupancy(self) -> Occupancy:
        """How the slots are taken, with internal and external fragmentation."""
        return self._slots.occupancy()

    @property
    def stats(self) -> ContiguousStats:
        """An immutable snapshot of the figures."""
        per_token = self.spec.bytes_per_token
        return ContiguousStats(
            n_requests=len(self._pieces),
            n_requests_total=self._n_requests,
            n_refused_memory=self._n_refused["memory"],
            n_refused_fragmentation=self._n_refused["fragmentation"],
            n_moved_total=self._n_moved,
            n_copied_total=self._n_copied,
            high_water_slots=self._high_water,
            bytes_per_token=per_token,
            reserved_nbytes=per_token * self.capacity_tokens,
            used_nbytes=per_token * sum(piece.length for piece in self._pieces.values()),
            scratch_nbytes=self._scratch.nbytes,
        )

    def _explained(self, error: CapacityError, n: int) -> CapacityError:
        found = diagnose(self._slots, n)
        return CapacityError(f"{found.text} Nothing was changed", **vars(error), diagnosis=found)

    def _grow(self, piece: Piece, n: int) -> None:
        if n < piece.max_tokens:
            raise ArgumentError(f"grow({n}): the request has {piece.max_tokens} tokens reserved already")
        try:
            self._slots.resize(piece.start, n)
            piece.max_tokens = n
            self._high_water = max(self._high_water, self._slots.reserved_slots)
        except ArenaError:
            raise
        except BaseException:
            self._mend()
            raise

    def _free(self, piece: Piece) -> None:
        try:
            piece.ended_by = "free()"
            del self._pieces[piece.start]
            self._slots.free(piece.start)
        except BaseException:
            self._end(piece, "free()")
            raise

    def _end(self, piece: Piece, how: str) -> None:
        """Take the slots of a request away, however much of it is there."""
        piece.ended_by = how
        self._pieces = {each.start: each for each in self._pieces.values() if each is not piece}
        self._mend()

    def _mend(self) -> None:
        """Work out the free slots from the requests that there are, after an interrupt that left a change half done."""
        slots = _POLICIES[self.policy](self.capacity_tokens)
        for piece in self._pieces.values():
            slots.reserve(piece.start, piece.max_tokens)
            slots.use(piece.start, piece.held)
        self._slots = slots

    # -- contents -----------------------------------------------------------------------------------------------

    def _append(self, piece: Piece, layer: int, keys: Any, values: Any) -> tuple[Any, Any]:
        own = self._layers[self.spec.owner(layer)]
        assert own is not None, "an owner owns"
        spec, ops = own.spec, self._ops
        if own.index != layer:
            raise ArgumentError(
                f"layer {layer} owns nothing to append to: it reads layer {own.index}; read({layer}) returns that"
            )
        try:
            n_rows, heads, n_new, dim = keys.shape
            fine = (
                n_rows == 1
                and heads == spec.kv_heads
                and dim == spec.key_dim
                and values.shape == (1, heads, n_new, spec.value_dim)
                and ops.agree(keys, values, own.dtypes)
            )
        except (AttributeError, TypeError, ValueError, RuntimeError):  # no array, or not four dimensions
            fine = False
        if not fine:
            check_arrays(own, ops, keys, values)
            n_new = keys.shape[2]
        if own.turn != piece.n_written:
            raise self._order_error(piece, own)
        first = own.turn == 0
        start = piece.length
        stop = start + n_new
        if first and stop > piece.max_tokens:
            raise self._full(piece, n_new)
        if not first and stop != piece.held:
            raise ShapeError(
                f"layer {layer}: {n_new} tokens given, but this step has {piece.held - start} in the layers before",
                shape=tuple(keys.shape),
            )
        k_buffer, v_buffer = own.keys.array, own.values.array  # raises where stale
        ops.write(k_buffer, v_buffer, piece.start + start, keys, values)
        if first:
            piece.held = stop
            self._slots.use(piece.start, stop)
        if piece.n_written + 1 < len(self._owned):
            piece.n_written += 1
        else:  # one statement, so that an interrupt does not divide it
            piece.length, piece.n_written = stop, 0
        low = piece.start + first_seen(spec, start)
        return ops.tokens(k_buffer, low, piece.start + stop), ops.tokens(v_buffer, low, piece.start + stop)

    def _read(self, piece: Piece, layer: int, n_tokens: int) -> tuple[Any, Any]:
        own = self._layers[self.spec.owner(layer)]
        assert own is not None, "an owner owns"
        n_tokens = positive(n_tokens, "n_tokens", least=0)
        held = piece.held if own.turn < piece.n_written else piece.length
        if n_tokens > held:
            raise ArgumentError(f"read({layer}, {n_tokens}): layer {own.index} holds only {held} tokens")
        low, stop = piece.start + first_seen(own.spec, held - n_tokens), piece.start + held
        return self._ops.tokens(own.keys.array, low, stop), self._ops.tokens(own.values.array, low, stop)

    def _order_error(self, piece: Piece, own: SlotLayer) -> LayerOrderError:
        due = self._owned[piece.n_written].index
        if own.turn < piece.n_written:
            what = f"was written in this step already, which lacks layer {due}"
        else:
            what = f"is written before layer {due}, which is due"
        return LayerOrderError(
            f"layer {own.index} {what}: a step writes each layer once, in ascending order; "
            f"truncate({piece.length}) drops an unfinished step",
            layer=own.index,
        )

    def _full(self, piece: Piece, n_new: int) -> CapacityError:
        room = piece.max_tokens - piece.length
        could = self._slots.max_length(piece.start)
        how = (
            f"grow({piece.length + n_new}) makes room"
            if could >= piece.length + n_new
            else f"it can grow to {could} tokens where it lies"
        )
        return CapacityError(
            f"the request at slot {piece.start} is full: {piece.length} of {piece.max_tokens} tokens used, {n_new} "
            f"more asked, {n_new - room} too many. Nothing was written: {how}; or truncate, or reserve at least "
            f"{piece.length + n_new} tokens at first",
            used=piece.length,
            requested=n_new,
            capacity=piece.max_tokens,
            available=room,
            free=room,
            largest_hole=room,
            missing=n_new - room,
            aligned_offset=piece.length,
            cause="memory",
            label=None,
        )

    def _move(self, plan: Compaction) -> int:
        """Make the moves, in which a piece may slide over itself."""
        jobs = [
            (region.array, staging_like(self._scratch, region).array)
            for own in self._owned
            for region in own.moved
            if region.nbytes
        ]
        for move in plan.moves:
            piece = self._pieces[move.start]
            try:
                for buffer, staging in jobs:
                    copy_tokens(self._ops, buffer, staging, move.start, move.to, move.n_tokens)
                self._slots.move(move.start, move.to)
                del self._pieces[move.start]
                piece.start = move.to
                self._pieces[move.to] = piece
            except BaseException:
                # What was copied may lie where other tokens of it were: neither place holds all.
                self._end(piece, "compact(), which was interrupted")
                raise
        self._n_moved += len(plan.moves)
        self._n_copied += plan.n_tokens
        return plan.n_tokens
