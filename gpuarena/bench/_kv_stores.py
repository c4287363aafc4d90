"""The ways to hold keys and values that are compared: what people write by hand, what transformers has, and ours.

Each holds one row, takes one token a step in all layers, and returns keys and values of each layer, as attention
wants them. `back` returns to the tokens of `hold`; it costs each of them something else, so it is never timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gpuarena.arena import Arena
from gpuarena.bench._kv_setup import Setup, halves, transformers_or_none
from gpuarena.errors import BackendError
from gpuarena.kv import KVCache

__all__ = [
    "Arenas",
    "Cat",
    "Growing",
    "HandWritten",
    "Layers",
    "Static",
    "Stepping",
    "Store",
    "Token",
    "Views",
    "Window",
    "growing_cache",
    "tokens_of",
]

Views = list[tuple[Any, Any]]


@dataclass(frozen=True)
class Token:
    """One new token of all layers: as pairs ``[2, 1, kv_heads, 1, head_dim]``, and as keys and values, views of them."""

    pairs: list[Any]
    halves: Views


def tokens_of(setup: Setup, n: int, *, seed: int = 7) -> list[Token]:
    """Return `n` random tokens."""
    made = [setup.pairs(1, seed=seed + number) for number in range(n)]
    return [Token(pairs, halves(pairs)) for pairs in made]


class Stepping(Protocol):
    """What a loop needs."""

    def step(self, token: Token) -> Views:
        """Append a token to all layers; return what attention reads."""


class Store(Stepping, Protocol):
    """What can hold a prompt as well."""

    def hold(self, prompt: list[Any]) -> None:
        """Hold a prompt, given as pairs; called once."""

    def back(self) -> None:
        """Hold nothing but the prompt."""


class Cat:
    """``torch.cat`` of all that is held and the new token; with `keeps` off each step begins with the prompt again.

    As in ``DynamicLayer`` the old tensor dies when the new one takes its place, one at a time.
    """

    def __init__(self, setup: Setup, *, keeps: bool = True) -> None:
        self._keys, self._values = _tensors(setup.pairs(0, seed=0))
        self._keeps = keeps
        self._held = (self._keys, self._values)

    def hold(self, prompt: list[Any]) -> None:
        """Hold the prompt itself."""
        self._held = _tensors(prompt)
        self._keys, self._values = self._held if self._keeps else _tensors(prompt)

    def back(self) -> None:
        """Do nothing: only what drops its results has to go back."""
        assert not self._keeps, "a store that keeps its results is not to go back"

    def step(self, token: Token) -> Views:
        """Copy everything."""
        keys, values = self._keys, self._values
        held_keys, held_values = self._held
        for number, (new_keys, new_values) in enumerate(token.halves):
            keys[number] = torch.cat((held_keys[number], new_keys), dim=2)
            values[number] = torch.cat((held_values[number], new_values), dim=2)
        return list(zip(keys, values, strict=True))


class Growing:
    """Buffers that are replaced by larger ones when they are full; `larger` returns the new size in tokens."""

    def __init__(self, setup: Setup, larger: Callable[[int], int]) -> None:
        self._keys, self._values = _tensors(setup.pairs(0, seed=0))
        self._larger = larger
        self._n_slots = self._length = 0

    def step(self, token: Token) -> Views:
        """Write in place, or copy everything first."""
        length, views = self._length, []
        if length == self._n_slots:
            self._n_slots = self._larger(length)
            for buffers in (self._keys, self._values):
                for number, old in enumerate(buffers):
                    buffers[number] = self._grown(old)
        for keys, values, (new_keys, new_values) in zip(self._keys, self._values, token.halves, strict=True):
            keys.narrow(2, length, 1).copy_(new_keys)
            values.narrow(2, length, 1).copy_(new_values)
            views.append((keys.narrow(2, 0, length + 1), values.narrow(2, 0, length + 1)))
        self._length = length + 1
        return views

    def _grown(self, buffer: torch.Tensor) -> torch.Tensor:
        rows, heads, _, dim = buffer.shape
        grown = buffer.new_empty((rows, heads, self._n_slots, dim))
        grown.narrow(2, 0, self._length).copy_(buffer.narrow(2, 0, self._length))
        return grown


def _tensors(pairs: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the keys of all layers, and the values."""
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


class HandWritten:
    """Buffers of full size, as one writes them by hand; `way` is ``"index_copy"``, ``"index_copy, no view"`` or ``"narrow"``."""

    def __init__(self, setup: Setup, max_tokens: int, way: str) -> None:
        shape = (1, setup.kv_heads, max_tokens, setup.head_dim)
        self._buffers = [
            tuple(torch.empty(shape, dtype=setup.torch_dtype, device=setup.torch_device) for _ in range(2))
            for _ in range(setup.layers)
        ]
        self._positions = torch.arange(max_tokens, device=setup.torch_device)[:, None].unbind()
        self._way = way
        self._length = self._n_prompt = 0
        self.step = self._narrow if way == "narrow" else self._index_copy

    def hold(self, prompt: list[Any]) -> None:
        """Copy the prompt to the front."""
        self._length = self._n_prompt = prompt[0].shape[3]
        for buffers, pair in zip(self._buffers, prompt, strict=True):
            for buffer, new in zip(buffers, pair, strict=True):
                buffer.narrow(2, 0, self._length).copy_(new)

    def back(self) -> None:
        """Set the length."""
        self._length = self._n_prompt

    def _index_copy(self, token: Token) -> Views:
        length, views = self._length, []
        position, wants_views = self._positions[length], self._way == "index_copy"
        for (keys, values), (new_keys, new_values) in zip(self._buffers, token.halves, strict=True):
            keys.index_copy_(2, position, new_keys)
            values.index_copy_(2, position, new_values)
            if wants_views:
                views.append((keys.narrow(2, 0, length + 1), values.narrow(2, 0, length + 1)))
        self._length = length + 1
        return views

    def _narrow(self, token: Token) -> Views:
        length, views = self._length, []
        for (keys, values), (new_keys, new_values) in zip(self._buffers, token.halves, strict=True):
            keys.narrow(2, length, 1).copy_(new_keys)
            values.narrow(2, length, 1).copy_(new_values)
            views.append((keys.narrow(2, 0, length + 1), values.narrow(2, 0, length + 1)))
        self._length = length + 1
        return views

    def held(self) -> Views:
        """Return views of what is held."""
        n = self._length
        return [(keys.narrow(2, 0, n), values.narrow(2, 0, n)) for keys, values in self._buffers]


class Static:
    """A ``StaticLayer`` of transformers for each layer, which returns all slots."""

    def __init__(self, setup: Setup, max_tokens: int) -> None:
        self._layers = [transformers_or_none().StaticLayer(max_tokens) for _ in range(setup.layers)]
        self._n_prompt = 0

    def hold(self, prompt: list[Any]) -> None:
        """Update each layer with the prompt."""
        self._n_prompt = prompt[0].shape[3]
        for layer, pair in zip(self._layers, prompt, strict=True):
            layer.update(pair[0], pair[1])

    def back(self) -> None:
        """Set the lengths, which are tensors."""
        for layer in self._layers:
            layer.cumulative_length.fill_(self._n_prompt)

    def step(self, token: Token) -> Views:
        """Update each layer."""
        return [
            layer.update(keys, values)
            for layer, (keys, values) in zip(self._layers, token.halves, strict=True)
        ]


class Arenas:
    """A `KVCache`, appended to by way of the cache."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._prompt: list[Any] = []

    def hold(self, prompt: list[Any]) -> None:
        """Append the prompt."""
        self._prompt = prompt
        for number, pair in enumerate(prompt):
            self.cache.append(number, pair[0], pair[1])

    def back(self) -> None:
        """Truncate."""
        self.cache.truncate(self._prompt[0].shape[3])

    def step(self, token: Token) -> Views:
        """Append to each layer."""
        append = self.cache.append
        return [append(number, keys, values) for number, (keys, values) in enumerate(token.halves)]


class Layers(Arenas):
    """A `KVCache`, appended to by its layers, keys and values in one array."""

    def step(self, token: Token) -> Views:
        """Append to each layer."""
        return [layer.append_pair(pair) for layer, pair in zip(self.cache.layers, token.pairs, strict=True)]


class Window(Arenas):
    """A `KVCache` of bounded windows, which cannot go back over a move: the prompt is appended anew."""

    def back(self) -> None:
        """Begin again."""
        self.cache.reset()
        self.hold(self._prompt)


def growing_cache(setup: Setup, max_tokens: int) -> KVCache | None:
    """Return a token-major cache on memory that follows its tokens; None where the device has no such memory."""
    spec = setup.spec()
    nbytes = spec.arena_nbytes(1, max_tokens, layout="token-major")
    try:
        arena = Arena(nbytes, backend="virtual:torch", device=setup.device.name)
    except BackendError:  # CUDA's bindings for Python are an extra
        return None
    return KVCache(arena, spec, batch=1, max_tokens=max_tokens)
