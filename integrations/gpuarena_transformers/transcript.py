"""Which token ids a cache is known to hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from gpuarena.errors import ArgumentTypeError

__all__ = ["Transcript"]


class Transcript:
    """The ids of the first tokens of a cache, as far as somebody noted them.

    A cache sees keys and values and never an id, so what a plain forward appends is unknown. What is known stays
    true, because the cache cuts and moves its transcript along with its tokens.

    >>> held = Transcript()
    >>> held.note(torch.tensor([[5, 6, 7]]))
    >>> held.common_prefix(torch.tensor([[5, 6, 9, 9]]))
    2
    """

    def __init__(self) -> None:
        self.ids = torch.empty((1, 0), dtype=torch.long)
        """``[rows, n]`` int64, on the CPU."""
        self.mask = torch.empty((1, 0), dtype=torch.bool)
        """``[rows, n]`` bool: False where padding was given."""
        self.n_noted = 0
        """First tokens that a prefix, a file or `note` said are there; what `generate_from` runs is behind them."""
        self._model: weakref.ref[Any] | None = None
        self._weights: _Weights | None = None

    def __len__(self) -> int:
        return self.ids.shape[1]

    def __repr__(self) -> str:
        return f"Transcript({len(self)} tokens of {self.ids.shape[0]} rows)"

    def note(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Take ``ids [rows, n]`` for the first n tokens of the cache; `mask` is that of the attention.

        Raises
        ------
        ArgumentTypeError
            No integers of two dimensions, or a mask of another shape. Unchanged on error.
        """
        _check_ids(ids)
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != ids.shape):
            raise ArgumentTypeError(f"mask must be a tensor of the shape of the ids, {list(ids.shape)}")
        self.ids = ids.detach().to("cpu", torch.long, copy=True)
        self.mask = torch.ones_like(self.ids, dtype=torch.bool)
        if mask is not None:
            self.mask &= mask.detach().to("cpu") != 0
        self.n_noted = len(self)

    def cut(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens` tokens, and whose they are where none are left."""
        if n_tokens < len(self):
            self.ids, self.mask = self.ids[:, :n_tokens], self.mask[:, :n_tokens]
            self.n_noted = min(self.n_noted, n_tokens)
        if not len(self):
            self._model = self._weights = None

    def clear(self) -> None:
        """Forget everything."""
        self.cut(0)

    def select(self, rows: torch.Tensor) -> None:
        """Keep only the given rows, in the given order."""
        rows = rows.detach().to("cpu", torch.long)
        if len(self):
            self.ids, self.mask = self.ids[rows], self.mask[rows]

    def keep_first(self, n_rows: int | None) -> None:
        """Keep the first `n_rows` rows, as a rollback to before they were repeated does; None keeps all."""
        if n_rows is not None and n_rows < self.ids.shape[0]:
            self.ids, self.mask = self.ids[:n_rows], self.mask[:n_rows]

    def repeat(self, n: int) -> None:
        """Put `n` copies of each row side by side."""
        self.ids, self.mask = self.ids.repeat_interleave(n, 0), self.mask.repeat_interleave(n, 0)

    def common_prefix(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> int:
        """Return how many first tokens of ``ids [rows, m]`` are what the cache is known to hold, in every row."""
        return self.match(ids, mask)[0] if ids.shape[0] == self.ids.shape[0] else 0

    def match(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[int, list[int]]:
        """Return how many first tokens of ``ids [rows, m]`` are held, and in which row each of its rows finds them.

        A row that is held may serve several, where those are a multiple (one prefix, many questions), and is the
        best of several, where these are a multiple (beams, returned sequences). Other numbers of rows share nothing.

        >>> held = Transcript()
        >>> held.note(torch.tensor([[5, 6, 7], [5, 6, 8]]))
        >>> held.match(torch.tensor([[5, 6, 8, 9]]))
        (3, [1])
        """
        n_wanted, n_held = ids.shape[0], self.ids.shape[0]
        if n_wanted % n_held and n_held % n_wanted:
            return 0, []
        wanted = ids.detach().to("cpu")
        visible = torch.ones_like(wanted, dtype=torch.bool) if mask is None else mask.detach().to("cpu") != 0
        n = min(len(self), wanted.shape[1])
        # [rows that are wanted, rows that are held for each, or 1]
        candidates = torch.arange(max(n_wanted, n_held)) * n_held // max(n_wanted, n_held)
        candidates = candidates.view(n_wanted, -1)
        same = self.ids[candidates, :n] == wanted[:, None, :n]
        same &= self.mask[candidates, :n] == visible[:, None, :n]
        lengths, best = same.long().cumprod(-1).sum(-1).max(dim=1)
        return int(lengths.min()), candidates.gather(1, best[:, None]).flatten().tolist()

    # -- whose tokens they are ----------------------------------------------------------------------------------

    def bind(self, model: Any) -> None:
        """Note that the tokens are of `model`, with the weights that it has now; it is not kept alive."""
        self._model, self._weights = weakref.ref(model), _Weights(model)

    @property
    def model(self) -> Any:
        """The model that is bound, or None: none was, or it is gone."""
        return None if self._model is None else self._model()

    def is_of(self, model: Any) -> bool:
        """Return whether `model` can have computed the tokens: it did, with these weights, or nobody knows who did."""
        if self._model is None or self._weights is None:
            return True
        return self._model() is model and self._weights.are_those_of(model)


#: Attributes of modules that change what they compute: those of adapters as PEFT names them, and dropout.
_SETTINGS = ("training", "_disable_adapters", "_active_adapter", "merged_adapters", "scaling")


class _Weights:
    """Marks of a model that change when its weights or its adapters do; nothing is read from the device.

    Kept alive is nothing. References and no ids, since Python gives the id of a weight that is gone to the next.
    """

    def __init__(self, model: Any) -> None:
        self._tensors = [(weakref.ref(tensor), _mark(tensor)) for tensor in _tensors(model)]
        self._settings = _settings(model)

    def are_those_of(self, model: Any) -> bool:
        """Return whether nothing has changed since, as far as that leaves a mark."""
        now = list(_tensors(model))
        return (
            len(now) == len(self._tensors)
            and all(
                seen() is tensor and mark == _mark(tensor)
                for (seen, mark), tensor in zip(self._tensors, now, strict=True)
            )
            and self._settings == _settings(model)
        )


def _tensors(model: Any) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()  # where quantised weights lie


def _mark(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        address = tensor.data_ptr()  # changes with an assignment to .data
    except RuntimeError:  # subclasses without a storage of their own
        address = 0
    version = 0 if tensor.is_inference() else tensor._version
    # requires_grad: of an adapter, whether it is the active one.
    return version, address, tensor.dtype, tensor.device, tensor.requires_grad


def _settings(model: Any) -> list[Any]:
    """Return what modules are set to, and the hooks inside of the model; those of the model itself may count."""
    found: list[Any] = []
    for module in model.modules():
        own = module.__dict__
        found.append((type(module), *(repr(own[name]) for name in _SETTINGS if name in own)))
        if module is not model:
            found += list(own["_forward_hooks"]), list(own["_forward_pre_hooks"])  # their numbers
    return found


def _check_ids(ids: Any) -> None:
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point() or not len(ids):
        kind = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise ArgumentTypeError(
            f"ids must be a tensor of integers [rows, n] with rows of 1 or more, not {kind}"
        )
