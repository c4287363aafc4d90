"""What a KV cache costs, next to ``torch.cat``, the caches of transformers and what people write by hand.

Geometry of Qwen2.5-1.5B. What the variants of a group give is compared before any of them is timed, and they are
timed interleaved, so that ratios mean something on a noisy machine. Going back to where a sample begins is never
timed: each cache does that in another way. Tokens, queries, rows and layers take turns, so that no body sees the
same input twice in a row; a prompt that is kept, and the positions that are written after going back, stay the same,
since that is what the groups are about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpuarena.bench._collect import Maker, collect, on_device
from gpuarena.bench._kv_append import append_groups, loop_groups
from gpuarena.bench._kv_moves import move_groups
from gpuarena.bench._kv_pages import page_groups
from gpuarena.bench._kv_reads import quantized_groups, read_groups
from gpuarena.bench._kv_setup import Setup
from gpuarena.bench.device import Device, device_of
from gpuarena.bench.environment import environment
from gpuarena.bench.harness import Group, WrongDataError
from gpuarena.errors import ArgumentError

__all__ = ["CAT_LIMIT", "DTYPES", "WrongDataError", "run"]

DTYPES = ("bfloat16", "float32")
#: Longest loop that torch.cat runs: at 8 192 tokens it takes a minute on a CPU.
CAT_LIMIT = 2048


def run(
    *,
    device: str | Device = "cpu",
    dtype: str = "bfloat16",
    layers: int = 28,
    rounds: int = 9,
    cat_limit: int = CAT_LIMIT,
    quick: bool = False,
    on_group: Callable[[Group], object] = lambda group: None,
) -> dict[str, Any]:
    """Time all groups; return the figures with the machine and the versions, for JSON.

    Parameters
    ----------
    device : str or Device
        ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"fake-gpu"``.
    dtype : str
        One of `DTYPES`.
    layers : int
        Of the caches; reads are of one layer.
    rounds : int
        Samples of each variant; at most 3 of loops over more than 2048 tokens.
    cat_limit : int
        Tokens of the longest loop that ``torch.cat`` takes part in.
    quick : bool
        Two layers, short contexts and few samples, to see that it runs.
    on_group : callable, optional
        Called with each group when it is done.

    Raises
    ------
    WrongDataError
        A variant gave other keys, values or outputs than it should; on a GPU the result holds an ``"error"`` instead.
    ArgumentError
        Another dtype, or fewer than one layer or round.
    BackendError
        There is no such device.
    """
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if rounds < 1 or layers < 1:
        raise ArgumentError(f"rounds and layers must be at least 1, not {rounds} and {layers}")
    if quick:
        rounds, layers = min(rounds, 3), min(layers, 2)
    where = device_of(device)
    setup = Setup(where, dtype, layers, rounds, quick)
    with torch.inference_mode(), on_device(where):
        found = collect(where, _makers(setup, cat_limit), on_group)
    geometry = {
        "layers": layers,
        "kv_heads": setup.kv_heads,
        "q_heads": setup.q_heads,
        "head_dim": setup.head_dim,
        "dtype": dtype,
    }
    return {
        "benchmark": "kv",
        "geometry": geometry,
        "environment": environment(where.name),
        "fake": where.is_fake,
        "rounds": rounds,
        **found,
    }


def _makers(setup: Setup, cat_limit: int) -> Iterator[Maker]:
    yield from append_groups(setup)
    yield from page_groups(setup)
    yield from loop_groups(setup, cat_limit)
    yield from move_groups(setup)
    yield from read_groups(setup)
    yield from quantized_groups(setup)
