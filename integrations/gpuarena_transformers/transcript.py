"""Which token ids a cache is known to hold."""

from __future__ import annotations

import weakref
from typing import Any

import torch

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
        self._model: weakref.ref[Any] | None = None
        self._weights: int | None = None

    def __len__(self) -> int:
        return self.ids.shape[1]

    def __repr__(self) -> str:
        return f"Transcript({len(self)} tokens of {self.ids.shape[0]} rows)"

    def note(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Take ``ids [rows, n]`` for the first n tokens of the cache; `mask` is that of the attention."""
        self.ids = ids.detach().to("cpu", torch.long, copy=True)
        self.mask = torch.ones_like(self.ids, dtype=torch.bool)
        if mask is not None:
            self.mask &= mask.detach().to("cpu") != 0

    def cut(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens` tokens."""
        self.ids, self.mask = self.ids[:, :n_tokens], self.mask[:, :n_tokens]

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
        self._model, self._weights = weakref.ref(model), _state_of(model)

    @property
    def model(self) -> Any:
        """The model that is bound, or None: none was, or it is gone."""
        return None if self._model is None else self._model()

    def is_of(self, model: Any) -> bool:
        """Return whether `model` can have computed the tokens: it did, with these weights, or nobody knows who did."""
        return self._model is None or (self._model() is model and self._weights == _state_of(model))


def _state_of(model: Any) -> int:
    """Return a number that changes when weights are replaced, written to, moved, or another adapter is chosen.

    Nothing is read from the device. A write through ``.data`` leaves no trace.
    """
    return hash(
        tuple(
            (
                id(weight),
                0 if weight.is_inference() else weight._version,
                weight.dtype,
                weight.device,
                weight.requires_grad,  # of an adapter: whether it is the active one
            )
            for weight in model.parameters()
        )
    )
