"""Steps that are compiled or captured, and the figures that say whether that worked."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import torch

from gpuarena.bench.device import Device
from gpuarena.bench.harness import WrongDataError

__all__ = [
    "NO_GRAPH_OF_VIEWS",
    "capture_step",
    "compile_options",
    "compile_step",
    "forget",
    "graph_counts",
    "graph_figures",
]

_NUMBERS = itertools.count()

#: Why there is no captured step of an `ArenaCache`.
NO_GRAPH_OF_VIEWS = (
    "its views grow by a token each step, so a captured step would write the same slot again and again; "
    "ArenaStaticCache is the cache for graphs"
)


def compile_options(where: Device) -> dict[str, Any]:
    """Return what torch.compile is given: on a GPU what transformers gives it, CUDA graphs included."""
    if where.is_fake:
        return {"backend": "eager"}  # traced only: its figures mean nothing, and no compiler is needed
    return {"mode": "reduce-overhead" if where.is_gpu else "default"}


def compile_step(call: Callable[..., torch.Tensor], options: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """Return `call` compiled, apart from all other functions that were made from the same code.

    torch keeps graphs with the code object of a function, and by its name the sizes that it has seen. Sharing them, a
    variant would try the guards of the others first, be compiled for any size, and all together eight times at most.
    """
    name = f"{call.__name__}_{next(_NUMBERS)}"
    own = types.FunctionType(
        call.__code__.replace(co_name=name), call.__globals__, name, call.__defaults__, call.__closure__
    )
    compiled: Callable[..., torch.Tensor] = torch.compile(own, **options)
    return compiled


def capture_step(
    where: Device, cache: Any, call: Callable[[torch.Tensor], torch.Tensor], token: torch.Tensor
) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """Capture one step of a filled `ArenaStaticCache`; return what does steps with the tokens that it is given.

    The cache is at the same length afterwards as before.

    Raises
    ------
    WrongDataError
        A replay does not move the position on the device by one.
    """
    n_tokens = cache.stats.n_tokens
    held = token.clone()
    output: dict[str, torch.Tensor] = {}

    def body() -> None:
        output["logits"] = call(held)

    replay = where.capture(body)
    cache.truncate(n_tokens)
    replay()
    where.synchronize()
    n_seen, n_written = cache.stats.n_tokens, int(cache.get_seq_length())
    if n_written != n_tokens + 1:
        raise WrongDataError(f"a replay moved the position from {n_tokens} to {n_written}")
    host_sees_it = n_seen > n_tokens  # where the replay is the call itself, as without a GPU
    cache.truncate(n_tokens)

    def steps(tokens: list[torch.Tensor]) -> torch.Tensor:
        if not host_sees_it:
            cache.advance(len(tokens))
        for one in tokens:
            held.copy_(one)
            replay()
        return output["logits"]

    return steps


def graph_counts() -> tuple[int, int]:
    """Return how many graphs torch.compile has made so far, and how often it could not make a CUDA graph of one."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]


def graph_figures(before: tuple[int, int], after: tuple[int, int]) -> dict[str, int]:
    """Return what is between two `graph_counts`: one graph and no skip, where a step is a single CUDA graph."""
    return {"n_graphs": after[0] - before[0], "n_cudagraph_skips": after[1] - before[1]}


def forget() -> None:
    """Drop all that was compiled, and the memory of its CUDA graphs."""
    import torch._dynamo  # takes seconds where nothing was compiled yet

    torch._dynamo.reset()
