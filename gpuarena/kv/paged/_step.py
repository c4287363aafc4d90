"""A step of a model: some sequences get new tokens in every layer, or none do."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from gpuarena.errors import LayerOrderError, SequenceError, ShapeError, refuse_copy
from gpuarena.kv.paged._core import Core, TokenSlots
from gpuarena.kv.paged._growth import Growth
from gpuarena.kv.paged._read import attend
from gpuarena.kv.paged._sequence import Sequence
from gpuarena.kv.spec import positive

__all__ = ["Step"]


class Step:
    """What ``cache.step(sequences, n_tokens)`` returns: on entry the sequences grow, each layer is written once.

    Leaving it with an exception takes the new tokens back from all sequences, and so does leaving it before every
    layer that owns keys and values was written, which raises `LayerOrderError`. Once it was left, leaving it again does
    nothing.

    An interrupt (Ctrl-C) that comes in the very moment of leaving may leave it open; then leave it once more:
    ``step.__exit__(None, None, None)``.
    """

    __slots__ = ("_core", "_growth", "_n", "_slots", "_state", "_written", "n_tokens", "sequences", "starts")

    def __init__(self, core: Core, sequences: list[Sequence], n_tokens: Any) -> None:
        n_dims: int = getattr(n_tokens, "ndim", 1)  # an array of no dimensions has __iter__ too
        if hasattr(n_tokens, "__iter__") and n_dims:
            counts = [positive(n, "n_tokens") for n in n_tokens]
            if len(counts) != len(sequences):
                raise ShapeError(f"n_tokens has {len(counts)} numbers for {len(sequences)} sequences")
        else:
            counts = [positive(n_tokens, "n_tokens")] * len(sequences)
        if len(set(map(id, sequences))) < len(sequences):
            raise SequenceError("a sequence is given twice; fork() makes another of the same tokens")
        self._core = core
        self.sequences = tuple(sequences)
        self.n_tokens = tuple(counts)
        self.starts: tuple[int, ...] = ()
        self._n = (
            counts[0] if len(set(counts)) == 1 else None
        )  # new tokens of each sequence if they are as many
        self._state = "new"
        self._written: set[int] = set()
        self._slots: TokenSlots | None = None
        self._growth: Growth | None = None

    def __repr__(self) -> str:
        return f"<step of {sum(self.n_tokens)} tokens of {len(self.sequences)} sequences, {self._state}>"

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    def __enter__(self) -> Step:
        core = self._core
        if self._state != "new":
            raise SequenceError("this step was entered before; make another with cache.step()")
        core.check_live()
        for sequence in self.sequences:
            core.check_sequence(sequence)
            sequence._check_idle("step")
        self._growth = growth = Growth(
            core, [(sequence._pages, n) for sequence, n in zip(self.sequences, self.n_tokens, strict=True)]
        )
        try:
            growth.make()
            self.starts = growth.starts
            self._slots = TokenSlots(core, self.ranges())
            for sequence in self.sequences:
                sequence._step = self
            core.open_steps.add(self)
            self._state = "open"
            return self
        except BaseException:
            growth.undo()
            self._release("new")
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._growth is None or self._state == "new":
            raise SequenceError("this step was not entered; use it in a with block")
        if self._state == "closed":
            return
        try:
            missing = self._unwritten()
            if missing or exc is not None:
                self._growth.undo()
            self._release("closed")
        except BaseException:
            self._growth.undo()
            self._release("closed")
            raise
        if missing and exc is None:
            raise LayerOrderError(
                f"the step was left before layers {', '.join(map(str, missing))} were written; the new tokens of all "
                f"sequences were taken back",
                layer=missing[0],
            )

    def _release(self, state: str) -> None:
        """Let the sequences be used otherwise."""
        for sequence in self.sequences:
            if sequence._step is self:
                sequence._step = None
        self._core.open_steps.discard(self)
        self._state = state

    def _unwritten(self) -> list[int]:
        return [number for number in self._core.owned if number not in self._written]

    def _check_open(self) -> None:
        if self._state != "open":
            raise SequenceError(f"this step is {self._state}; write and attend inside of its with block")
        self._core.check_live()

    def ranges(self) -> list[tuple[Any, int, int]]:
        """The new tokens, ``(pages, start, stop)`` of each sequence."""
        return [
            (sequence._pages, start, start + n)
            for sequence, start, n in zip(self.sequences, self.starts, self.n_tokens, strict=True)
        ]

    def write(self, layer: int, keys: Any, values: Any) -> None:
        """Write the new keys and values of one layer; the layers may come in any order, each once.

        Parameters
        ----------
        layer : int
            One that owns keys and values.
        keys : ``[sequences, kv_heads, n, key_dim]`` or ``[tokens, kv_heads, key_dim]``
            The second form, the tokens of the first sequence first, where sequences get different numbers of tokens.
        values : as `keys`, with `value_dim`

        Raises
        ------
        LayerOrderError
            The layer was written before in this step.
        ArgumentTypeError, ArgumentError, DeviceMismatchError, AutogradError, ShapeError, DTypeError, StaleRegionError
            Checked before the first byte is written; unchanged on error.
        SequenceError
            The step is not open.
        """
        self._check_open()
        pages = self._core.owned_layer(layer, "write")
        who = f"layer {layer}"
        if pages.number in self._written:
            raise LayerOrderError(f"{who} was written before in this step", layer=pages.number)
        self._core.check_kv(who, pages.spec, keys, values)
        self._check_lead(who, "keys", tuple(keys.shape))
        assert self._slots is not None, "an open step has its slots"
        self._core.write(pages, self._slots, keys, values)
        self._written.add(pages.number)

    def attend(self, layer: int, q: Any, scale: float | None = None) -> Any:
        """Attend from the new tokens to all tokens of their sequences; see `PagedKVCache.attend`.

        Parameters
        ----------
        layer : int
            A layer that was written, or one that shares the keys and values of such a layer.
        q : ``[sequences, q_heads, n, key_dim]`` or ``[tokens, q_heads, key_dim]``

        Returns
        -------
        ``[sequences, q_heads, n, value_dim]`` or ``[tokens, q_heads, value_dim]``

        Raises
        ------
        LayerOrderError
            The layer was not written yet.
        """
        self._check_open()
        core, sequences = self._core, list(self.sequences)
        core.check_query(q)
        shape = tuple(q.shape)
        if len(shape) not in (3, 4):
            raise ShapeError(
                f"q is {list(shape)}; it has to be [sequences, q_heads, n, dim] or [tokens, q_heads, dim]",
                shape=shape,
            )
        self._check_lead(f"layer {layer}", "q", shape)
        if len(shape) == 4:
            return attend(core, layer, q, sequences, scale)
        if self._n is not None:  # as many of each, so all at once
            by_head = q.reshape(len(sequences), self._n, *shape[1:]).transpose(1, 2)
            return attend(core, layer, by_head, sequences, scale).transpose(1, 2).flatten(0, 1)
        out = q.new_empty((shape[0], shape[1], core.layers[core.spec.owner(layer)].spec.value_dim))
        first = 0
        for sequence, n in zip(sequences, self.n_tokens, strict=True):
            mine = q[first : first + n].transpose(0, 1)[None]
            out[first : first + n] = attend(core, layer, mine, [sequence], scale)[0].transpose(0, 1)
            first += n
        return out

    def _check_lead(self, who: str, name: str, shape: tuple[int, ...]) -> None:
        n_rows, total = len(self.sequences), sum(self.n_tokens)
        if len(shape) == 3:
            if shape[0] != total:
                raise ShapeError(
                    f"{who}: {name} are {list(shape)}, the step has {total} new tokens", shape=shape
                )
        elif shape[0] != n_rows:
            raise ShapeError(f"{who}: {name} are {list(shape)}, the step has {n_rows} sequences", shape=shape)
        elif n_rows and self._n is None:
            raise ShapeError(
                f"{who}: {name} are {list(shape)}, but the sequences get {list(self.n_tokens)} tokens; give "
                f"[{total}, heads, dim], the tokens of the first sequence first",
                shape=shape,
            )
        elif n_rows and shape[2] != self._n:
            raise ShapeError(
                f"{who}: {name} are {list(shape)}, each sequence gets {self._n} tokens", shape=shape
            )
