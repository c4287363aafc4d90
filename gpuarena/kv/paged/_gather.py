"""Attention over pages with any kernel: gather the pages of some sequences into a scratch, and attend there.

Only the pages that a window or the sinks show are gathered. Sequences are taken together as long as the scratch holds
them, each as long as the longest of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gpuarena.errors import CapacityError
from gpuarena.kv.attention import causal_mask, scaled_dot_product
from gpuarena.kv.paged._ops import PageOps
from gpuarena.kv.paged._page_lists import PageList
from gpuarena.kv.paged._storage import LayerPages

__all__ = ["Gatherer"]

#: The position of slots that hold nothing of a sequence: no query sees it.
NOWHERE = 2**62

Row = tuple[tuple[int, ...], int]  # pages, length


@dataclass(slots=True)
class _Part:
    """Some sequences that are gathered at once. Slots are those gathered, positions those in the sequence."""

    first: int
    stop: int
    """The sequences, by their places in the call."""
    pages: np.ndarray[Any, Any]
    """``[rows, width]`` int64, the pages gathered, padded with page 0."""
    span: tuple[int, int]
    """The slots that any query sees."""
    is_causal: bool
    """As many slots as queries."""
    mask: torch.Tensor | None
    tails: list[tuple[int, int]]
    """(row, slot) from which on it holds nothing, though the span goes on."""
    index: dict[int, Any] = field(default_factory=dict)
    """kv_heads -> what to gather."""


class Gatherer:
    """The scratch, and the plan for the sequences of the last call, which the layers of a step share."""

    def __init__(self, ops: PageOps, scratch: Any, layout: str, page_size: int, gather_tokens: int) -> None:
        self._ops = ops
        self._scratch = scratch  # [nbytes] uint8
        self._layout = layout
        self._page_size = page_size
        self._gather_tokens = gather_tokens
        self._key: Any = None
        self._plans: dict[Any, list[_Part]] = {}

    def attend(
        self,
        layer: LayerPages,
        q: torch.Tensor,
        sequences: tuple[PageList, ...],
        scale: float | None,
        version: int,
    ) -> torch.Tensor:
        """Return attention of the last tokens of each sequence; at one version sequences hold what they hold.

        Parameters
        ----------
        q : ``[sequences, q_heads, n, key_dim]``
        """
        spec = layer.spec
        key = (version, sequences)
        if key != self._key:
            self._plans.clear()
            self._key = key
        what = (q.shape[2], spec.window, spec.sinks)
        parts = self._plans.get(what)
        if parts is None:
            rows = [(pages.pages, pages.length) for pages in sequences]
            with torch.inference_mode(False):  # a plan is used in another inference mode, too
                parts = self._plans[what] = list(self._plan(rows, *what, q.device))
        if len(parts) == 1:
            return self._attend(layer, q, parts[0], scale)
        out = q.new_empty((*q.shape[:3], spec.value_dim))
        for part in parts:
            out[part.first : part.stop] = self._attend(layer, q[part.first : part.stop], part, scale)
        return out

    def _attend(self, layer: LayerPages, q: torch.Tensor, part: _Part, scale: float | None) -> torch.Tensor:
        keys, values = self._gather(layer, part)
        start, stop = part.span
        # What lies there must not be NaN, which a weight of 0 does not hide.
        for row, tail in part.tails:
            keys[row, :, tail:stop].zero_()
            values[row, :, tail:stop].zero_()
        keys, values = keys[:, :, start:stop], values[:, :, start:stop]
        return scaled_dot_product(q, keys, values, part.mask, scale=scale, is_causal=part.is_causal)

    def _gather(self, layer: LayerPages, part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values in the scratch, ``[rows, kv_heads, slots, dim]``."""
        heads, size = layer.spec.kv_heads, self._page_size
        batch, width = part.pages.shape
        found: list[torch.Tensor] = []
        start = 0
        for pool in layer.pools:
            planes, dim, source = pool.n_planes, pool.dim, pool.movable
            nbytes = planes * batch * width * size * heads * dim * source.element_size()
            flat = self._scratch.narrow(0, start, nbytes).view(source.dtype)
            start += -(-nbytes // 16) * 16
            index = self._index(layer, part)
            if self._layout == "HND":
                source = source.view(-1, size * dim)
                index = index if planes == 2 else index[: len(index) // 2]
                torch.index_select(source, 0, index, out=flat.view(-1, size * dim))
                taken = flat.view(planes, batch, heads, width * size, dim)
            elif self._layout == "NHD":
                source = source.view(planes, -1, size * heads * dim)
                torch.index_select(source, 1, index, out=flat.view(planes, -1, size * heads * dim))
                taken = flat.view(planes, batch, width * size, heads, dim).transpose(2, 3)
            else:
                source = source.view(planes * heads, -1, size * dim)
                torch.index_select(source, 1, index, out=flat.view(planes * heads, -1, size * dim))
                taken = flat.view(planes, heads, batch, width * size, dim).transpose(1, 2)
            found.extend(taken.view(pool.array.dtype).unbind(0))
        return found[0], found[1]

    def _index(self, layer: LayerPages, part: _Part) -> Any:
        heads = layer.spec.kv_heads
        index = part.index.get(heads)
        if index is None:
            pages = part.pages
            if self._layout == "HND":  # the pages of a head are apart, and so each is an index of its own
                n_pages = layer.geometry.n_rows // heads // self._page_size
                of_keys = pages[:, None, :] * heads + np.arange(heads)[:, None]
                pages = np.stack([of_keys, of_keys + n_pages * heads])
            with torch.inference_mode(False):
                index = part.index[heads] = self._ops.index(pages.reshape(-1))
        return index

    # -- plans --------------------------------------------------------------------------------------------------

    def _plan(
        self, rows: list[Row], n: int, window: int | None, sinks: int, device: torch.device
    ) -> Iterator[_Part]:
        """Yield parts that fit the scratch."""
        shown = [_shown(length, n, window, sinks, self._page_size) for _, length in rows]
        first = 0
        while first < len(rows):
            stop, width = first, 0
            while stop < len(rows):
                wider = max(width, len(shown[stop]))
                if wider * self._page_size * (stop + 1 - first) > self._gather_tokens:
                    break
                stop, width = stop + 1, wider
            if stop == first:
                raise self._too_long(len(shown[first]) * self._page_size, rows[first][1])
            yield self._part(first, rows[first:stop], shown[first:stop], n, window, sinks, device)
            first = stop

    def _part(
        self,
        first: int,
        rows: list[Row],
        shown: list[list[int]],
        n: int,
        window: int | None,
        sinks: int,
        device: torch.device,
    ) -> _Part:
        size = self._page_size
        width = max(map(len, shown))
        pages = np.zeros((len(rows), width), np.int64)
        for row, (numbers, (held, _)) in enumerate(zip(shown, rows, strict=True)):
            pages[row, : len(numbers)] = [held[number] for number in numbers]
        stops = [
            len(numbers) * size - (-length % size) for numbers, (_, length) in zip(shown, rows, strict=True)
        ]
        start, stop = 0, max(stops)
        length = rows[0][1]
        is_even = all(other == length for _, other in rows)
        if (
            is_even and shown[0][-1] - shown[0][0] == width - 1 and not sinks
        ):  # no page is left out in between
            base = shown[0][0] * size  # position of slot 0
            start = 0 if window is None else max(0, length - n - window + 1 - base)
            sees_all = n == 1
            is_causal = n > 1 and n == stop - start and window is None
            if sees_all or is_causal:
                return _Part(first, first + len(rows), pages, (start, stop), is_causal, None, [])
        positions = np.full((1 if is_even else len(rows), width * size), NOWHERE, np.int64)
        for row, numbers in enumerate(shown[: len(positions)]):
            slots = np.repeat(np.array(numbers) * size, size) + np.tile(np.arange(size), len(numbers))
            positions[row, : stops[row]] = slots[: stops[row]]
        keys = torch.from_numpy(positions[:, start:stop]).to(device)
        last = torch.tensor([other for _, other in rows[: len(positions)]], device=device)
        queries = last[:, None] - n + torch.arange(n, device=device)
        mask = causal_mask(queries, keys, window, sinks)
        tails = [(row, tail) for row, tail in enumerate(stops) if tail < stop]
        return _Part(first, first + len(rows), pages, (start, stop), False, mask, tails)

    def _too_long(self, n_tokens: int, length: int) -> CapacityError:
        return CapacityError(
            f"attend: a sequence of {length} tokens takes {n_tokens} tokens of scratch, there are "
            f"{self._gather_tokens}: {n_tokens - self._gather_tokens} too few. Make the cache with gather_tokens of "
            f"at least {n_tokens}",
            used=0,
            requested=n_tokens,
            capacity=self._gather_tokens,
            available=self._gather_tokens,
            missing=n_tokens - self._gather_tokens,
            aligned_offset=0,
            label="gather",
        )


def _shown(length: int, n: int, window: int | None, sinks: int, page_size: int) -> list[int]:
    """Return which pages of a sequence its last `n` tokens see, by their places in it."""
    n_pages = -(-length // page_size)
    if window is None:
        return list(range(n_pages))
    low = max(0, length - n - window + 1) // page_size
    n_sinks = min(-(-sinks // page_size), low)
    return [*range(n_sinks), *range(low, n_pages)]
