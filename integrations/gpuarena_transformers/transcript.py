"""Which token ids a cache is known to hold."""

from __future__ import annotations

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

    def repeat(self, n: int) -> None:
        """Put `n` copies of each row side by side."""
        self.ids, self.mask = self.ids.repeat_interleave(n, 0), self.mask.repeat_interleave(n, 0)

    def common_prefix(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> int:
        """Return how many first tokens of ``ids [rows, m]`` are what the cache is known to hold, in every row."""
        if ids.shape[0] != self.ids.shape[0]:
            return 0
        n = min(len(self), ids.shape[1])
        same = self.ids[:, :n] == ids[:, :n].to("cpu")
        if mask is None:
            same &= self.mask[:, :n]
        else:
            same &= self.mask[:, :n] == (mask[:, :n].to("cpu") != 0)
        return int(same.all(dim=0).long().cumprod(0).sum())
