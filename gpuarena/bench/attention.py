"""What ``attn_implementation="gpuarena"`` costs, next to transformers' own attention functions.

Geometry of Qwen2.5-1.5B, one layer. Each group is one shape of call; its outputs are compared before it is timed,
and its variants are timed interleaved. For each shape both ways to share keys in a group of query heads are timed,
the one that gpuarena takes and the other, so that the choice can be checked on another machine. Each call gets other
queries, keys and values than the one before, as from layer to layer of a model; the mask is the same, as it is there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gpuarena_transformers  # noqa: F401 - without it nothing here can be measured, which is said at once
import torch
import torch.nn.functional as F

from gpuarena.bench._collect import Maker, collect, on_device
from gpuarena.bench._kv_setup import Setup
from gpuarena.bench.device import Device, device_of
from gpuarena.bench.environment import environment
from gpuarena.bench.harness import Group, Variant, WrongDataError
from gpuarena.bench.memory import AllocationMeter
from gpuarena.errors import ArgumentError
from gpuarena.kv import attention as kv_attention

__all__ = ["BATCHES", "DTYPES", "LENGTHS", "QUERIES", "WrongDataError", "run"]

DTYPES = ("bfloat16", "float32")
BATCHES = (1, 4)
LENGTHS = (512, 4096, 16384)
QUERIES = (1, 2, 4, 8, 16, 32, 64, 128)

_STOCK = "sdpa_attention_forward"
_OWN = "the model's eager function"
_OURS = "gpuarena"
#: Of outputs, as a part of the largest: rounding alone.
_TOLERANCE = {"bfloat16": 0.05, "float32": 1e-4}
#: Pairs of keys and values whose numbers differ.
_N_DIFFERENT = 2
#: Queries a token of a call with a soft cap or sinks: a step, a verification, a part of a prompt.
_QUERIES_BEYOND = (1, 8, 128)


def run(
    *,
    device: str | Device = "cpu",
    dtype: str = "bfloat16",
    batches: Sequence[int] = BATCHES,
    lengths: Sequence[int] = LENGTHS,
    queries: Sequence[int] = QUERIES,
    rounds: int = 7,
    quick: bool = False,
    on_group: Callable[[Group], object] = lambda group: None,
) -> dict[str, Any]:
    """Time all shapes; return the figures with the machine and the versions, for JSON.

    Parameters
    ----------
    device : str or Device
        ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"fake-gpu"``.
    dtype : str
        One of `DTYPES`.
    batches, lengths, queries : sequence of int
        Rows, tokens held, and query tokens of a call.
    rounds : int
        Samples of each variant.
    quick : bool
        A few small shapes, to see that it runs.
    on_group : callable, optional
        Called with each group when it is done.

    Raises
    ------
    WrongDataError
        A variant gave other outputs than it should; on a GPU the result holds an ``"error"`` instead.
    ArgumentError
        Another dtype, a number below 1, or fewer tokens than queries.
    BackendError
        There is no such device.
    """
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if quick:
        batches, lengths, queries, rounds = (1, 2), (48,), (1, 3, 40), min(rounds, 3)
    if rounds < 1 or not all(numbers and min(numbers) >= 1 for numbers in (batches, lengths, queries)):
        raise ArgumentError("rounds, batches, lengths and queries must be positive")
    if min(lengths) < max(queries):
        raise ArgumentError(f"{min(lengths)} tokens cannot hold {max(queries)} queries")
    where = device_of(device)
    setup = Setup(where, dtype, layers=1, rounds=rounds, quick=quick)
    with torch.inference_mode(), on_device(where):
        found = collect(where, _makers(setup, batches, lengths, queries), on_group)
    geometry = {name: getattr(setup, name) for name in ("q_heads", "kv_heads", "head_dim", "dtype")}
    return {
        "benchmark": "attention",
        "geometry": geometry,
        "environment": environment(where.name),
        "fake": where.is_fake,
        "rounds": rounds,
        "fold_max_queries": kv_attention.FOLD_MAX_QUERIES,
        **found,
    }


def _makers(
    setup: Setup, batches: Sequence[int], lengths: Sequence[int], queries: Sequence[int]
) -> Iterator[Maker]:
    for batch, length in itertools.product(batches, lengths):
        for n, masked in itertools.product(queries, (False, True)):
            title = f"{_count(n, 'query', 'queries')}, {length} tokens, batch {batch}, "
            title += "mask" if masked else "no mask"
            yield title, functools.partial(_plain_group, setup, batch, length, n, masked)
    for batch, length in itertools.product(batches[:1], lengths):
        for n in [n for n in _QUERIES_BEYOND if n in queries] or queries[:1]:
            for needs in ("soft cap", "sinks"):
                title = f"{needs}: {_count(n, 'query', 'queries')}, {length} tokens, batch {batch}, mask"
                yield title, functools.partial(_beyond_group, setup, needs, batch, length, n)


@dataclass(frozen=True)
class _Inputs:
    """Of one call."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


_Body = Callable[[_Inputs], Any]


class _Module(torch.nn.Module):
    """What attention functions read of a module; not causal, so that several queries need no mask."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.num_key_value_groups = group
        self.is_causal = False
        self.eval()


def _plain_group(setup: Setup, batch: int, length: int, n: int, masked: bool, title: str) -> Group:
    from gpuarena_transformers.attention import gpuarena_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = _mask(setup, batch, length, n) if masked else None
    module = _Module(setup.q_heads // setup.kv_heads)
    folds = n == 1 or n * module.num_key_value_groups <= kv_attention.FOLD_MAX_QUERIES
    taken, other = ("folded", "enable_gqa") if folds else ("enable_gqa", "folded")
    bodies: dict[str, _Body] = {
        _STOCK: lambda one: sdpa_attention_forward(module, one.q, one.keys, one.values, mask)[0],
        f"{_OURS}, {taken}": lambda one: gpuarena_attention_forward(
            module, one.q, one.keys, one.values, mask
        )[0],
        other: lambda one: _attend(one, mask, folded=not folds).transpose(1, 2).contiguous(),
    }
    return _group(title, bodies, _STOCK, setup, _inputs(setup, batch, length, n), batch * length * n)


def _attend(one: _Inputs, mask: Any, *, folded: bool) -> Any:
    """Attend in the way that gpuarena does not take for this shape."""
    q, keys, values = one.q, one.keys, one.values
    if not folded:
        return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)
    limit = kv_attention.FOLD_MAX_QUERIES
    kv_attention.FOLD_MAX_QUERIES = q.shape[1] * q.shape[2]
    try:
        return kv_attention.scaled_dot_product(q, keys, values, mask)
    finally:
        kv_attention.FOLD_MAX_QUERIES = limit


def _beyond_group(setup: Setup, needs: str, batch: int, length: int, n: int, title: str) -> Group:
    from gpuarena_transformers.attention import gpuarena_attention_forward

    mask = _mask(setup, batch, length, n)
    dtype = setup.torch_dtype
    added = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    module, eager, extra = _model_module(setup, needs)
    scaling = setup.head_dim**-0.5
    bodies: dict[str, _Body] = {
        # The model makes its mask once for all layers, so it is ready here.
        _OWN: lambda one: eager(module, one.q, one.keys, one.values, added, scaling=scaling, **extra)[0],
        _OURS: lambda one: gpuarena_attention_forward(
            module, one.q, one.keys, one.values, mask, scaling=scaling, **extra
        )[0],
    }
    return _group(title, bodies, _OWN, setup, _inputs(setup, batch, length, n), batch * length * n)


def _model_module(setup: Setup, needs: str) -> tuple[Any, Callable[..., Any], dict[str, Any]]:
    """Return an attention module of a model that needs this, its eager function, and what the model passes."""
    geometry = {
        "hidden_size": setup.q_heads,  # the projections are not used
        "num_attention_heads": setup.q_heads,
        "num_key_value_heads": setup.kv_heads,
        "head_dim": setup.head_dim,
    }
    if needs == "soft cap":
        from transformers.models.gemma2 import modeling_gemma2 as gemma2

        module = gemma2.Gemma2Attention(gemma2.Gemma2Config(**geometry), layer_idx=0).eval()
        return module, gemma2.eager_attention_forward, {"softcap": 50.0}
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

    other = gpt_oss.GptOssAttention(gpt_oss.GptOssConfig(**geometry), layer_idx=0).eval()
    sinks = torch.linspace(-1, 3, setup.q_heads, device=setup.torch_device).to(setup.torch_dtype)
    other.sinks = torch.nn.Parameter(sinks, requires_grad=False)
    return other, gpt_oss.eager_attention_forward, {"s_aux": other.sinks}


def _group(
    title: str, bodies: dict[str, _Body], reference: str, setup: Setup, inputs: list[_Inputs], n_scores: int
) -> Group:
    # A call of microseconds is timed as one of several.
    n_calls = 1 if setup.quick else max(1, 2**13 // n_scores)

    def variant(body: _Body) -> Variant:
        turn = itertools.cycle(inputs)

        def calls() -> Any:
            for one in itertools.islice(turn, n_calls):
                out = body(one)
            return out

        return Variant(
            calls,
            n=n_calls,
            # The first sample ends with these.
            wanted=lambda: bodies[reference](inputs[(n_calls - 1) % len(inputs)]),
            tolerance=_TOLERANCE[setup.dtype],
            figures={"peak_nbytes": _peak_nbytes(body, inputs[0])},
        )

    return setup.group(title, {name: variant(body) for name, body in bodies.items()}, reference)


def _peak_nbytes(body: _Body, one: _Inputs) -> int:
    """Return the most bytes that a call holds at once, without those inside kernels."""
    with AllocationMeter() as meter:
        body(one)
    return int(meter.peak_nbytes)


def _inputs(setup: Setup, batch: int, length: int, n: int) -> list[_Inputs]:
    """Return inputs that take turns: queries as a projection gives them, keys and values with room for more."""
    generator = torch.Generator(setup.torch_device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, device=setup.torch_device)
        return made.to(setup.torch_dtype)

    slots = (2, batch, setup.kv_heads, length + 64, setup.head_dim)
    n_inputs = setup.n_to_rotate(setup.spec().bytes_per_token * batch * length)
    pairs = [random(*slots) for _ in range(min(n_inputs, _N_DIFFERENT))]
    # The others hold the same numbers elsewhere in memory, which is quicker to make.
    pairs += [pairs[number % len(pairs)].clone() for number in range(n_inputs - len(pairs))]
    return [
        _Inputs(random(batch, n, setup.q_heads, setup.head_dim).transpose(1, 2), *pair[:, :, :, :length])
        for pair in pairs
    ]


def _mask(setup: Setup, batch: int, length: int, n: int) -> torch.Tensor:
    """Return the mask of the last `n` tokens, of which the first row has three of padding."""
    at = torch.arange(length, device=setup.torch_device)
    mask = (at[None] <= at[length - n :, None]).repeat(batch, 1, 1, 1)
    mask[0, :, :, :3] = False
    return mask


def _count(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"
