"""What all kinds of layers have in common: the checks of what is appended, lengths, and the regions that hold it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpuarena.arena import Arena
from gpuarena.errors import ArgumentError, CapacityError, DTypeError, ShapeError, refuse_copy
from gpuarena.kv._ops import Ops
from gpuarena.kv.spec import LayerSpec, positive
from gpuarena.region import Region

__all__ = ["Common", "KVLayer", "check_dtypes", "check_shapes"]


class Common:
    """What the layers of a group have in common.

    They refer to this and not to their group, so that no cycle keeps the memory of a cache that was dropped.
    """

    __slots__ = (
        "batch",
        "batch_name",
        "capacity_hint",
        "high_water",
        "lengths",
        "marks",
        "max_tokens",
        "n_shared",
        "rows",
        "scratch",
    )

    def __init__(self, batch: int, max_tokens: int, capacity_hint: str, batch_name: str = "batch") -> None:
        self.batch = batch
        self.batch_name = batch_name  # what the argument is called that was `batch`
        self.max_tokens = max_tokens
        self.capacity_hint = capacity_hint
        self.rows: int | None = None
        self.high_water = 0
        self.lengths: list[int] = []  # tokens of each layer
        self.n_shared = 0  # the first tokens that are the same in all rows, since repeat() copied one row
        self.marks: list[tuple[int, int]] = []  # (n_tokens, serial), ascending: the checkpoints that live
        self.scratch: dict[str, Region] = {}  # device -> region of bytes

    def forget_above(self, n_tokens: int) -> None:
        """Note that only the first `n_tokens` tokens are still what they were."""
        self.n_shared = min(self.n_shared, n_tokens)
        while self.marks and self.marks[-1][0] > n_tokens:
            self.marks.pop()


class KVLayer:
    """Keys and values of one layer. Made by `LayerGroup.add`, as the kind that its `LayerSpec` asks for.

    A kind implements `append`, `read`, `keys` and `values`; one that forgets tokens also `held_from`, `n_held`,
    `positions`, `_slot_of` and `_restart`.

    Attributes
    ----------
    index : int
        The layer's number, for messages.
    spec : LayerSpec
    arena : Arena
    regions : tuple of Region
        Those of ``spec.buffers``, each ``[batch, kv_heads, slots, dim]``, with 2 in front where it holds pairs.
    """

    __slots__ = (
        "_bound", "_common", "_ops", "_seen", "_slot", "_wanted", "arena", "index", "regions", "spec",
    )  # fmt: skip

    def __init__(
        self,
        common: Common,
        index: int,
        arena: Arena,
        spec: LayerSpec,
        ops: Ops,
        regions: tuple[Region, ...] | None = None,
    ) -> None:
        self._common = common
        self._slot = len(common.lengths)
        self._ops = ops
        self._wanted = (ops.dtype(spec.dtype), ops.dtype(spec.value_dtype))
        self._bound = 0  # rows that the views in use show
        self._seen: tuple[Any, Any, tuple[int, int]] = (
            None,
            None,
            (0, 0),
        )  # shapes, rows and tokens appended last
        self.index = index
        self.spec = spec
        self.arena = arena
        self.regions = self._allocate() if regions is None else regions

    def _allocate(self) -> tuple[Region, ...]:
        """Return the regions of ``spec.buffers``, all or none."""
        common, spec = self._common, self.spec
        shape = (common.batch, spec.kv_heads, spec.n_slots(common.max_tokens))
        start = self.arena.checkpoint()
        try:
            return tuple(
                self.arena.alloc(
                    (*((buffer.n_planes,) if buffer.n_planes > 1 else ()), *shape, buffer.dim),
                    buffer.dtype,
                    label=f"layer{self.index}.{buffer.name}",
                )
                for buffer in spec.buffers
            )
        except BaseException:
            self.arena.rollback(start)
            raise

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    # -- what it holds ------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens that were appended and not cut off."""
        return self._common.lengths[self._slot]

    @property
    def rows(self) -> int | None:
        """Rows that are in use, None until the first append after a reset."""
        return self._common.rows

    @property
    def held_from(self) -> int:
        """The first token behind the sinks that is still held; 0 where nothing is ever forgotten."""
        return 0

    @property
    def n_held(self) -> int:
        """Tokens that are held, which `keys` and `values` show."""
        return self.length

    @property
    def floor(self) -> int:
        """The least length that the layer can be cut to, apart from 0: from there on, whole windows are held."""
        window, low = self.spec.window, self.held_from
        return 0 if window is None or low <= self.spec.sinks else low + window - 1

    @property
    def positions(self) -> list[range]:
        """The runs of tokens that `keys` and `values` show."""
        return [range(self.length)]

    @property
    def keys(self) -> Any:
        """View of the keys that are held, ``[rows, kv_heads, n_held, key_dim]``."""
        raise NotImplementedError

    @property
    def values(self) -> Any:
        """View of the values that are held, ``[rows, kv_heads, n_held, value_dim]``."""
        raise NotImplementedError

    def read(self, n_tokens: int = 1) -> tuple[Any, Any]:
        """Return what the queries of the last `n_tokens` tokens may see, as `append` does.

        Raises
        ------
        ArgumentTypeError, ArgumentError
            Fewer than 0 tokens, or more than are held. StaleRegionError: the memory was rolled back.
        """
        raise NotImplementedError

    def append(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write new tokens behind the filled ones, and return views of what a query may see.

        Parameters
        ----------
        keys : ``[rows, kv_heads, n, key_dim]``
        values : ``[rows, kv_heads, n, value_dim]``

        Returns
        -------
        keys, values
            Views of all filled tokens, or of the last ``window - 1 + n`` in a layer with a window. They show
            what is in the cache, also after it changes.

        Raises
        ------
        ArgumentTypeError, DeviceMismatchError, AutogradError, ShapeError, DTypeError, CapacityError, StaleRegionError
            Checked before the first byte is written; the cache is unchanged on error.
        """
        raise NotImplementedError

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens of this layer alone, 0 to `length`; checkpoints above die.

        Raises
        ------
        ArgumentTypeError, ArgumentError
            Negative, more than there are, or less than `floor` and not 0. Unchanged on error.
        """
        keep = positive(n_tokens, "n_tokens", least=0)
        if keep > self.length:
            raise ArgumentError(f"truncate({keep}): layer {self.index} holds only {self.length} tokens")
        reason = self.reason_against(keep)
        if reason:
            raise ArgumentError(f"truncate({keep}): {reason}")
        self._cut(keep)
        self._common.forget_above(keep)

    def mask(self, n_tokens: int = 1) -> Any:
        """Return which of the tokens that `read` gives the queries of the last `n_tokens` may see.

        A bool array ``[n_tokens, tokens]``, True where a query may look: causal, inside of the window, and the
        sinks. It is needed where a query sees less than the views show: several tokens at once, or sinks.
        """
        if positive(n_tokens, "n_tokens", least=0) == self.length:
            # also those that `append` gave back, and a bounded layer does not hold
            shown = [range(self.length)]
        else:
            n_tokens = self._check_read(n_tokens)
            low = self.low(self.length - n_tokens)
            shown = [range(max(run.start, low), run.stop) for run in self.positions if run.stop > low]
        spec, stop = self.spec, self.length
        return self._ops.mask(shown, stop - n_tokens, stop, spec.window, spec.sinks)

    def low(self, start: int) -> int:
        """Return the first token that the views for queries from token `start` on show."""
        window = self.spec.window
        return 0 if window is None or self.spec.sinks or start < window else start - window + 1

    # -- for the group ------------------------------------------------------------------------------------------

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of its regions."""
        return sum(region.nbytes for region in self.regions)

    def reason_against(self, n_tokens: int) -> str:
        """Return why the layer cannot be cut to `n_tokens`, which it has; an empty text if it can."""
        if n_tokens in (0, self.length) or n_tokens >= self.floor:
            return ""
        return (
            f"layer {self.index} has a bounded window of {self.spec.window} tokens and slack {self.spec.slack}: it "
            f"holds tokens {self.held_from} to {self.length - 1}, which is enough for lengths of {self.floor} or "
            f"more; give it more slack, or reset()"
        )

    def check_live(self) -> None:
        """Raise `StaleRegionError` if the arena was rolled back below the layer."""
        self.regions[-1]._check()

    def planes(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the whole of each buffer, ``[batch, kv_heads, slots, dim]``; pairs give two."""
        for buffer, region in zip(self.spec.buffers, self.regions, strict=True):
            for plane in self._ops.planes(region.array, buffer.n_planes):
                yield buffer.name, plane

    def filled(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the filled part of each buffer, ``[rows, kv_heads, n_held, dim]``; pairs give two."""
        rows = self._common.batch if self._common.rows is None else self._common.rows
        for name, plane in self.planes():
            yield name, self._ops.tokens(self._ops.rows(plane, rows), 0, self.n_held)

    def make_room(self, n_tokens: int) -> None:
        """Make sure that there are slots for `n_tokens` tokens, of which only those that can be held have one."""

    def _hold(self, runs: Sequence[range]) -> None:
        """Take over the tokens of `runs`, which are as in `positions`; the caller then writes them to `filled`."""
        self._common.lengths[self._slot] = runs[-1].stop

    def _cut(self, n_tokens: int) -> None:
        """Set the length, which the caller checked."""
        self._common.lengths[self._slot] = n_tokens
        if n_tokens == 0:
            self._restart()

    def _restart(self) -> None:
        """Note that nothing is held."""

    def gather(self, rows: Any, low: int, count: int) -> None:
        """Put `count` rows in place of those that are held, from token `low` on; `rows` are checked."""
        first, stop = self._slot_of(low), self.n_held
        if stop <= first:
            return
        ops, scratch = self._ops, self._common.scratch[self.arena.device].array
        for _, plane in self.planes():
            n_at_once = ops.tokens_in(scratch, plane, count)
            for start in range(first, stop, n_at_once):
                source = ops.tokens(plane, start, min(start + n_at_once, stop))
                ops.gather_rows(source, rows, scratch, ops.rows(source, count))

    def _slot_of(self, token: int) -> int:
        """Return where a token lies, or would; the first slot for one that is forgotten."""
        return token

    # -- checks -------------------------------------------------------------------------------------------------

    def _accept(self, keys: Any, values: Any) -> tuple[int, int]:
        """Return how many rows and new tokens these have; raise what `append` raises for what is wrong with them."""
        k_shape, v_shape, new = self._seen
        try:
            if (  # as those before, which were checked
                keys.shape == k_shape
                and values.shape == v_shape
                and new[0] == self._common.rows
                and self._ops.agree(keys, values, self._wanted)
            ):
                return new
        except (AttributeError, TypeError, ValueError, RuntimeError):  # no array, or a nested one
            pass
        self._check(keys, values)
        new = keys.shape[0], keys.shape[2]
        self._seen = keys.shape, values.shape, new  # at once: an interrupt must not leave half of it
        return new

    def _check(self, keys: Any, values: Any) -> None:
        """Raise unless `append` may write these, or may once it has decided the number of rows."""
        self._ops.check(keys, "keys")
        self._ops.check(values, "values")
        check_shapes(self.index, self.spec, keys, values)
        self._check_rows(keys.shape[0], tuple(keys.shape))
        check_dtypes(self.index, self.spec, keys, values, self._wanted)

    def _check_rows(self, n_rows: int, shape: tuple[int, ...]) -> None:
        common = self._common
        # In this order: compiled code must not depend on the lengths.
        if common.rows is not None and n_rows != common.rows and any(common.lengths):
            raise ShapeError(
                f"layer {self.index}: {n_rows} rows given, the cache holds {common.rows}; reset() starts anew, "
                f"and what repeats or selects rows changes those that are held",
                shape=shape,
            )
        if not 1 <= n_rows <= common.batch:
            raise ShapeError(
                f"layer {self.index}: {n_rows} rows given, the cache was made for at most {common.batch} "
                f"(sequences times beams or returned sequences)"
                + (f"; make it with {common.batch_name} of at least {n_rows}" if n_rows > 0 else ""),
                shape=shape,
            )

    def _check_read(self, n_tokens: int) -> int:
        """Return how many tokens ask, or raise: more than are there, or than are still held with their windows."""
        n_tokens = positive(n_tokens, "n_tokens", least=0)
        if n_tokens > self.length:
            raise ArgumentError(f"read({n_tokens}): layer {self.index} holds only {self.length} tokens")
        if n_tokens > 0 and self.length - n_tokens < self.floor:
            raise ArgumentError(
                f"read({n_tokens}): layer {self.index} holds the whole window of its last "
                f"{self.length - self.floor} tokens only"
            )
        return n_tokens

    def _capacity_error(self, n_new: int) -> CapacityError:
        capacity = self._common.max_tokens
        missing = self.length + n_new - capacity
        return CapacityError(
            f"layer {self.index}: the cache is full: {self.length} of {capacity} tokens used, {n_new} more asked, "
            f"{missing} too many. Nothing was written: roll back or truncate, or make the cache for at least "
            f"{self.length + n_new} tokens{self._common.capacity_hint}",
            used=self.length,
            requested=n_new,
            capacity=capacity,
            available=capacity - self.length,
            missing=missing,
            aligned_offset=self.length,
            label=f"layer{self.index}",
        )

    def _chunk_error(self, n_new: int, room: int) -> CapacityError:
        """Return the error of a bounded window for more tokens at once than the `room` beside it."""
        window, slack, capacity = (
            self.spec.window,
            self.spec.slack,
            self.spec.n_slots(self._common.max_tokens),
        )
        return CapacityError(
            f"layer {self.index}: {n_new} tokens at once do not fit beside a window of {window} tokens with slack "
            f"{slack}, {room} do. Nothing was written: append the first tokens of all at once, later ones "
            f"{room} at a time, or give the layer more slack",
            used=capacity - room,
            requested=n_new,
            capacity=capacity,
            available=room,
            missing=n_new - room,
            aligned_offset=self.length,
            label=f"layer{self.index}",
        )


def check_shapes(index: int, spec: LayerSpec, keys: Any, values: Any) -> None:
    """Raise `ShapeError` unless keys and values are ``[rows, kv_heads, n, dim]`` of a layer, with equal rows and n."""
    k_shape, v_shape = tuple(keys.shape), tuple(values.shape)
    if len(k_shape) != 4 or k_shape[1] != spec.kv_heads or k_shape[3] != spec.key_dim:
        raise ShapeError(
            f"layer {index}: keys are {list(k_shape)}, the cache holds "
            f"[rows, {spec.kv_heads}, tokens, {spec.key_dim}]",
            shape=k_shape,
        )
    if v_shape != (*k_shape[:3], spec.value_dim):
        raise ShapeError(
            f"layer {index}: values are {list(v_shape)}, for these keys they must be "
            f"{[*k_shape[:3], spec.value_dim]}",
            shape=v_shape,
        )


def check_dtypes(index: int, spec: LayerSpec, keys: Any, values: Any, wanted: tuple[Any, Any]) -> None:
    """Raise `DTypeError` unless keys and values have the dtypes of a layer, `wanted` in the library's own objects."""
    if (keys.dtype, values.dtype) != wanted:
        raise DTypeError(
            f"layer {index}: keys are {keys.dtype} and values {values.dtype}, the cache holds {spec.dtype} "
            f"and {spec.value_dtype}; convert them, or make the cache with their dtype",
            dtype=keys.dtype,
        )
