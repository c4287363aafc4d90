"""Pages: ours next to those of transformers' continuous batching, one request appending a token."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import torch

from gpuarena.arena import Arena
from gpuarena.bench._collect import Maker
from gpuarena.bench._kv_append import (
    N_SLOW_STEPS,
    N_STEPS,
    N_TOKENS,
    OURS,
    launches,
    lengths,
    oracle,
    steps,
)
from gpuarena.bench._kv_setup import Setup
from gpuarena.bench._kv_stores import Arenas, Store, Token, Views, tokens_of
from gpuarena.bench._labels import reason
from gpuarena.bench.harness import Group, Variant, check
from gpuarena.errors import CapacityError

__all__ = ["Pages", "TheirPages", "page_groups"]

#: Tokens a page; what transformers takes for its own kernels as well.
_PAGE_SIZE = 16
_REQUEST = "request"


def page_groups(setup: Setup) -> Iterator[Maker]:
    """Time appending one token to all layers of pages, with and without gathering what attention reads."""
    for n_held in lengths(setup)[:1] if setup.quick else lengths(setup):
        title = f"pages of {_PAGE_SIZE}: append a token, {n_held} held, {setup.layers} layers"
        yield title, partial(_page_group, setup, n_held)


def _page_group(setup: Setup, n_held: int, title: str) -> Group:
    prompt = setup.pairs(n_held, seed=n_held)
    tokens = tokens_of(setup, N_TOKENS)
    room = n_held + N_STEPS
    missing: dict[str, str] = {}

    def variant(store: Store, n: int, given: Callable[[Any], Any] = lambda views: views) -> Variant:
        store.hold(prompt)
        return Variant(
            partial(steps, store, cycle(tokens), n),
            n,
            ready=store.back,
            wanted=lambda: oracle(prompt, tokens, n),
            given=given,
            figures=launches(setup, store, tokens, 1, missing),
        )

    blind = Pages(setup, room, gathers=False)
    variants = {
        OURS: variant(Arenas(setup.cache(setup.spec(), room)), N_STEPS),
        "PagedKVCache, append": variant(blind, N_STEPS, lambda _: blind.held()),
        "PagedKVCache, append, gather": variant(Pages(setup, room, gathers=True), N_SLOW_STEPS),
    }
    try:
        theirs, reading = (TheirPages(setup, room, gathers=gathers) for gathers in (False, True))
        makers = {
            "PagedAttentionCache.update, no read": partial(
                variant, theirs, N_STEPS, lambda _: theirs.held(tokens[0])
            ),
            "PagedAttentionCache.update": partial(variant, reading, N_SLOW_STEPS),
        }
        for name, make in makers.items():
            check(name, make())  # one that is wrong is left out, and ours are timed
        variants |= {name: make() for name, make in makers.items()}
    except Exception as error:  # these are internals of transformers, which move from version to version
        missing["PagedAttentionCache of transformers"] = reason(error)
    group = setup.group(title, variants, OURS)
    return {**group, "not_measured": missing} if missing else group


class Pages:
    """One sequence of a `PagedKVCache`; with `gathers` a step returns copies of all tokens, otherwise nothing."""

    def __init__(self, setup: Setup, max_tokens: int, *, gathers: bool) -> None:
        from gpuarena.kv.paged import PagedKVCache

        spec = setup.spec()
        sizes: dict[str, Any] = {
            "num_pages": -(-max_tokens // _PAGE_SIZE),
            "page_size": _PAGE_SIZE,
            "gather_tokens": 0,
        }
        arena = Arena(PagedKVCache.arena_nbytes(spec, **sizes), backend="torch", device=setup.device.name)
        self._sequence = PagedKVCache(arena, spec, **sizes).sequence()
        self._layers = range(setup.layers)
        self._n_prompt = 0
        self._gathers = gathers

    def hold(self, prompt: list[Any]) -> None:
        """Append the prompt."""
        self._n_prompt = prompt[0].shape[3]
        for number, pair in enumerate(prompt):
            self._sequence.append(number, pair[0], pair[1])

    def back(self) -> None:
        """Truncate."""
        self._sequence.truncate(self._n_prompt)

    def step(self, token: Token) -> Views:
        """Append to each layer, and gather it."""
        append, gathers, views = self._sequence.append, self._gathers, []
        for number, (keys, values) in enumerate(token.halves):
            append(number, keys, values)
            if gathers:
                keys, values = self._sequence.read(number)
                views.append((keys[None], values[None]))
        return views

    def held(self) -> Views:
        """Return copies of what is held."""
        found = [self._sequence.read(number) for number in self._layers]
        return [(keys[None], values[None]) for keys, values in found]


class TheirPages:
    """One request in the pages of transformers' continuous batching, as versions 5.17 to 5.24 have them.

    Its pages are taken beforehand, for all tokens to come. A step makes the indices of the request anew and brings
    them to the device, as each step of continuous batching does, and updates the layers.

    Raises
    ------
    Exception
        Whatever another version raises: nothing here is public there.
    """

    def __init__(self, setup: Setup, max_tokens: int, *, gathers: bool) -> None:
        self._device = setup.torch_device
        self._n_prompt = self._length = 0
        self._gathers = gathers
        self._layers = range(setup.layers)
        self._cache = _their_cache(setup, -(-max_tokens // _PAGE_SIZE))
        _take_pages(self._cache, max_tokens)
        takes_kwargs = "kwargs" in inspect.signature(self._cache.update).parameters
        self._update = self._update_by_kwargs if takes_kwargs else self._update_by_indices
        # What kernels that read pages themselves need; `update` takes it along.
        self._lengths = {"full_attention": torch.zeros(2, dtype=torch.int32, device=self._device)}

    def hold(self, prompt: list[Any]) -> None:
        """Write the prompt, reading nothing."""
        self._n_prompt = prompt[0].shape[3]
        _, write = self._indices(0, self._n_prompt)
        for number, pair in enumerate(prompt):
            self._update(number, pair[0], pair[1], self._index([]), write)

    def back(self) -> None:
        """Set the length."""
        self._length = self._n_prompt

    def step(self, token: Token) -> Views:
        """Update each layer."""
        read, write = self._indices(self._length, 1)
        found = [
            self._update(number, keys, values, read, write)
            for number, (keys, values) in enumerate(token.halves)
        ]
        self._length += 1
        return found

    def held(self, like: Token) -> Views:
        """Return copies of what is held, by updates that write no token; `like` is any token."""
        read, _ = self._indices(0, self._length, reads=True)
        return [
            self._update(number, keys[:, :, :0], values[:, :, :0], read, self._index([]))
            for number, (keys, values) in enumerate(like.halves)
        ]

    def _indices(self, n_before: int, n_new: int, *, reads: bool | None = None) -> tuple[Any, Any]:
        """Return the slots to read, all of them or none, and those to write."""
        reads = self._gathers if reads is None else reads
        read: list[list[int]] = [[]]
        write: list[list[int]] = [[]]
        self._cache.extend_read_and_write_indices(_REQUEST, n_before, n_new, read if reads else None, write)
        return self._index(read[0]), self._index(write[0])

    def _index(self, slots: list[int]) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self._device)

    def _update_by_kwargs(self, layer: int, keys: Any, values: Any, read: Any, write: Any) -> tuple[Any, Any]:
        kwargs = {
            "cu_seq_lens_k": self._lengths,
            "max_length_k": {"full_attention": 0},
            "read_index": [read],
            "write_index": [write],
        }
        found: tuple[Any, Any] = self._cache.update(keys, values, layer, kwargs)
        return found

    def _update_by_indices(
        self, layer: int, keys: Any, values: Any, read: Any, write: Any
    ) -> tuple[Any, Any]:
        keys, values = self._cache.update(keys, values, layer, [read], [write])
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


def _their_cache(setup: Setup, n_pages: int) -> Any:
    from transformers import Qwen2Config
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.distributed import DistributedHelper

    config = Qwen2Config(
        num_hidden_layers=setup.layers,
        num_attention_heads=setup.q_heads,
        num_key_value_heads=setup.kv_heads,
        head_dim=setup.head_dim,
        hidden_size=setup.q_heads * setup.head_dim,
        vocab_size=1,  # there are no logits, for which it would leave room
    )
    fields = ContinuousBatchingConfig.__dataclass_fields__
    size = "page_size" if "page_size" in fields else "block_size"
    batching = ContinuousBatchingConfig(
        num_blocks=n_pages,
        max_batch_tokens=256,
        max_memory_percent=0.9,
        max_blocks_per_request=0,  # indices and no block table, for which flash-attn would be needed
        allow_block_sharing=False,
        **{size: _PAGE_SIZE},
    )
    parameters = inspect.signature(PagedAttentionCache).parameters
    options: dict[str, Any] = {"tp_plan": {}} if "tp_plan" in parameters else {}
    return PagedAttentionCache(
        config,
        batching,
        setup.torch_device,
        DistributedHelper(None, None),
        dtype=setup.torch_dtype,
        **options,
    )


def _take_pages(cache: Any, n_tokens: int) -> None:
    if hasattr(cache, "allocate_blocks"):
        if cache.allocate_blocks(-(-n_tokens // _PAGE_SIZE), _REQUEST, 0) is None:
            raise CapacityError(f"transformers' pages do not hold {n_tokens} tokens")
        return
    request = SimpleNamespace(request_id=_REQUEST, current_len=lambda: 0)
    if not cache.can_store_request_tokens(request, n_tokens):
        raise CapacityError(f"transformers' pages do not hold {n_tokens} tokens")
