"""One decoding step of a model at a given context length, in all the ways in which people decode.

Eager with each cache that transformers users have; on a GPU also as a CUDA graph that is captured by hand; and by
torch.compile where that is asked for. The model has the geometry of Qwen2.5-1.5B, fewer layers on a CPU, a small
vocabulary (so that the output projection does not hide the cache) and random weights.

The same for all variants of a group: the weights, the random keys and values that a cache holds at first, the tokens
that are fed (another one each step), and the positions, which go on by one each step: nothing is measured on a slot
that was just written. What differs is the capacity of static caches, which is in the names: "exact" has room for the
steps of its group, "largest" for the longest context of the run, and so has "bucket", of which attention reads the
first ``256 * 2**k`` slots that hold the tokens. A sample is `steps` steps without waiting for the device between
them; all its figures are for one.

A compiled step is ``torch.compile`` of a whole forward, which makes the mask as well, where `generate` makes it
outside; mode "reduce-overhead" on a GPU, as transformers has it, and "default" on a CPU.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from gpuarena.bench import _caches, _compiled, _models
from gpuarena.bench._caches import COMPILED, GPU_VARIANTS, OURS, REFERENCE, VARIANTS, Way
from gpuarena.bench._floor import floor
from gpuarena.bench._labels import reason
from gpuarena.bench._models import Models
from gpuarena.bench._peaks import step_memory
from gpuarena.bench._steps import CHECKED, TOLERANCE, Steps
from gpuarena.bench.device import Device, device_of
from gpuarena.bench.environment import environment
from gpuarena.bench.harness import Group, Timing, Variant, WrongDataError, measure, rows
from gpuarena.errors import ArgumentError

__all__ = ["COMPILED", "GPU_LENGTHS", "LENGTHS", "OURS", "VARIANTS", "WrongDataError", "measure_step", "run"]

LENGTHS = (512, 4096, 16384)
GPU_LENGTHS = (512, 8192, 32768)

_WARMUP = 2

#: Steps of a sample on a GPU, so that the host can be ahead of it as it is when text is generated.
_GPU_STEPS = 4


def run(
    *,
    device: str | Device | None = None,
    dtype: str = "bfloat16",
    lengths: Sequence[int] | None = None,
    largest: int | None = None,
    layers: int | None = None,
    rounds: int | None = None,
    steps: int | None = None,
    compiled: bool | Collection[str] = False,
    compile_budget_s: float | None = None,
    quick: bool = False,
    on_group: Callable[[Group], object] = lambda group: None,
) -> dict[str, Any]:
    """Time a step at each length and return the figures; `on_group` sees each as it is ready.

    Parameters
    ----------
    device : str or Device, optional
        The GPU if there is one, otherwise the CPU.
    dtype : str
    lengths : sequence of int, optional
        Tokens held before the first step; `GPU_LENGTHS` or `LENGTHS` by default.
    largest : int, optional
        Tokens that static caches are made for which are not exact; the longest of `lengths` by default.
    layers : int, optional
        Of the model: by default 28, all that Qwen2.5-1.5B has, on a GPU, and 4 on a CPU.
    rounds : int, optional
        Samples of every variant: by default 15 on a GPU, 9 on a CPU.
    steps : int, optional
        Steps of a sample: by default 4 on a GPU, 1 on a CPU.
    compiled : bool or names of `COMPILED`
        Variants that torch.compile is to make; each takes up to a minute at each length.
    compile_budget_s : float, optional
        Seconds for compiling, of which each length gets a share; after that no other variant is compiled.
    quick : bool
        A very small model, to try the script out; so is every run on a fake GPU.

    Returns
    -------
    dict
        For JSON. Each group has ``floor_s``, the least that a step takes at the bandwidth of a copy, and each row
        ``floor_ratio``, its median over that. ``not_measured`` says for each variant that failed why. At the longest
        length ``peak_nbytes`` is the most that is held in a few steps, see `gpuarena.bench._peaks`. Where something is
        compiled, ``graphs`` says in how many pieces, and how many of them are no CUDA graphs.

    Raises
    ------
    WrongDataError
        The logits of `ArenaCache` differ from those of transformers' cache by more than rounding. Any other variant
        that gives wrong data is not timed, and is among those that failed.
    ArgumentError, BackendError
        Before a model is built.
    """
    where = device_of(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    quick = quick or where.is_fake
    lengths = (
        lengths if lengths is not None else (32, 64) if quick else GPU_LENGTHS if where.is_gpu else LENGTHS
    )
    layers = layers if layers is not None else 2 if quick else 28 if where.is_gpu else 4
    rounds = rounds if rounds is not None else 3 if quick else 15 if where.is_gpu else 9
    steps = steps if steps is not None else _GPU_STEPS if where.is_gpu else 1
    if dtype not in TOLERANCE:
        raise ArgumentError(f"dtype must be one of {', '.join(TOLERANCE)}, not {dtype!r}")
    if min([rounds, layers, steps, *lengths]) < 1 or not lengths:
        raise ArgumentError("rounds, layers, steps and lengths must be positive")
    largest = max(lengths) if largest is None else largest
    if largest < max(lengths):
        raise ArgumentError(f"largest is {largest} tokens, less than the longest length of {max(lengths)}")
    ways = VARIANTS | (GPU_VARIANTS if where.is_gpu else {}) | _chosen(compiled)
    left_s = compile_budget_s
    geometry = _models.TINY if quick else _models.GEOMETRY
    models = _models.random_models(where, getattr(torch, dtype), layers, geometry)
    bandwidth = where.copy_bandwidth(1 << 22) if quick else where.copy_bandwidth()
    groups = []
    for number, length in enumerate(lengths):
        group = measure_step(
            models,
            length,
            largest=largest,
            rounds=rounds,
            steps=steps,
            bandwidth=bandwidth,
            ways=ways,
            compile_budget_s=None if left_s is None else left_s / (len(lengths) - number),
        )
        if left_s is not None:
            left_s = max(left_s - group.get("compile_s", 0.0), 0.0)
        if length == max(lengths):
            whole = {name: way for name, way in VARIANTS.items() if way.kind != "ideal"}
            found = step_memory(models, length, group["capacity"], 1, whole, group["not_measured"])
            for name, figures in found.items():
                if name in group["rows"]:
                    group["rows"][name]["peak_nbytes"] = figures["peak_nbytes"]
        groups.append(group)
        on_group(group)
    return {
        "benchmark": "decode",
        "geometry": models.geometry,
        "environment": environment(where.name),
        "fake": where.is_fake,
        "compiled": bool(compiled),
        "rounds": rounds,
        "steps": steps,
        "copy_nbytes_per_s": bandwidth,
        "groups": groups,
    }


def _chosen(compiled: bool | Collection[str]) -> dict[str, Way]:
    if isinstance(compiled, bool):
        return COMPILED if compiled else {}
    unknown = [name for name in compiled if name not in COMPILED]
    if isinstance(compiled, str) or unknown:
        raise ArgumentError(
            f"compiled must be a bool, or some of {', '.join(map(repr, COMPILED))}, not {compiled!r}"
        )
    return {name: COMPILED[name] for name in compiled}


def measure_step(
    models: Models,
    length: int,
    *,
    largest: int,
    rounds: int,
    steps: int = 1,
    batch: int = 1,
    bandwidth: float | None = None,
    ways: Mapping[str, Way] = VARIANTS,
    compile_budget_s: float | None = None,
) -> dict[str, Any]:
    """Time steps of `batch` rows with `length` tokens held at first, in every way; return the figures of one step.

    `largest` is the length that static caches are made for which are not exact, in tokens; `bandwidth` is that of the
    device in bytes in a second. After `compile_budget_s` seconds of compiling no other variant is compiled.

    Raises
    ------
    WrongDataError
        The logits of `ArenaCache` differ from those of the reference by more than rounding.
    """
    n_steps = CHECKED + (_WARMUP + rounds) * steps
    capacity = {"exact": length + n_steps, "largest": largest + n_steps}
    compiles = any(way.run_by == "compiler" for way in ways.values())
    failed: dict[str, str] = {}
    try:
        timings, figures, facts = _timed(
            models,
            length,
            capacity,
            batch,
            n_steps,
            ways,
            compile_budget_s,
            failed,
            rounds=rounds,
            steps=steps,
        )
    finally:
        if compiles:
            _compiled.forget()
        models.where.give_back()
    if any(way.run_by == "graph" for way in ways.values()):
        failed["ArenaCache + gpuarena, graph"] = _compiled.NO_GRAPH_OF_VIEWS
    reference = OURS if OURS in timings else next(iter(timings), None)
    found = {} if reference is None else rows(timings, reference, figures)
    group: dict[str, Any] = {
        "title": f"one step, {length} tokens held, batch {batch}",
        "kind": "step",
        "n_tokens": length,
        "batch": batch,
        "capacity": capacity,
    }
    if any(way.rule == "bucket" for way in ways.values()):
        group["bucket"] = _caches.bucket_of(capacity["largest"])
    if compiles:
        group |= facts
    # Tokens that the middle one of the timed steps attends to, its own among them.
    attended = length + CHECKED + _WARMUP * steps + (rounds * steps + 1) / 2
    least = floor(models, batch, attended, bandwidth)
    if least is not None:
        group |= {
            "floor_s": least.seconds,
            "weights_nbytes": least.weights_nbytes,
            "kv_nbytes": least.kv_nbytes,
        }
        for row in found.values():
            row["floor_ratio"] = row["median_s"] / least.seconds
    return group | {"reference": reference, "rows": found, "not_measured": failed}


def _timed(
    models: Models,
    length: int,
    capacity: Mapping[str, int],
    batch: int,
    n_steps: int,
    ways: Mapping[str, Way],
    compile_budget_s: float | None,
    failed: dict[str, str],
    *,
    rounds: int,
    steps: int,
) -> tuple[dict[str, Timing], dict[str, dict[str, float]], dict[str, Any]]:
    """Return times and other figures of the ways that work, and what compiling took.

    Nothing that it made is alive afterwards. Why the others do not work is in `failed`.
    """
    tokens = _tokens(models, batch, n_steps)
    ready: dict[str, Steps] = {}
    compile_s = 0.0
    for name in sorted(ways, key=lambda name: (name != REFERENCE, ways[name].kind == "ideal")):
        is_late = compile_budget_s is not None and compile_s >= compile_budget_s
        left_out = _left_out(ways[name], capacity, is_late=is_late)
        began = time.monotonic()
        found = left_out or _prepared(models, name, ways[name], length, capacity, tokens, ready)
        if ways[name].run_by == "compiler":
            compile_s += time.monotonic() - began
        if isinstance(found, Steps):
            ready[name] = found
            continue
        failed[name] = found
        if models.where.is_gpu and not left_out:
            models.where.give_back()  # before the next one takes memory
    compiles = any(one.way.run_by == "compiler" for one in ready.values())
    n_graphs = _compiled.graph_counts()[0] if compiles else 0
    timings: dict[str, Timing] = {}
    if ready:
        variants = {
            name: Variant(functools.partial(_sample, name, ready[name], steps, failed), n=steps)
            for name in ways
            if name in ready
        }
        timings = measure(variants, rounds=rounds, warmup=_WARMUP, synchronize=models.where.synchronize)
    n_late = _compiled.graph_counts()[0] - n_graphs if compiles else 0  # should be none
    for name, one in ready.items():
        if name not in failed:
            try:
                one.check_position()
            except Exception as error:  # the other variants are worth having
                failed[name] = reason(error)
    figures = {name: one.figures for name, one in ready.items()}
    facts = {
        "compile_s": compile_s,
        "graphs": {name: one.graphs for name, one in ready.items() if one.way.run_by == "compiler"},
        "n_graphs_while_timed": n_late,
    }
    return {name: timing for name, timing in timings.items() if name not in failed}, figures, facts


def _left_out(way: Way, capacity: Mapping[str, int], *, is_late: bool) -> str:
    """Say why a variant is not even tried, if so."""
    if way.run_by != "compiler":
        return ""
    if way.rule == "largest" and capacity["largest"] == capacity["exact"]:
        return "here the largest capacity is the exact one"
    return "the time for compiling was over" if is_late else ""


def _prepared(
    models: Models,
    name: str,
    way: Way,
    length: int,
    capacity: Mapping[str, int],
    tokens: list[torch.Tensor],
    ready: Mapping[str, Steps],
) -> Steps | str:
    """Return a variant that was compared with the first that is ready, or why there is none."""
    try:
        one = Steps(models, way, length, capacity, tokens)
        one.check(next(iter(ready.values()), None), str(models.dtype).removeprefix("torch."))
    except WrongDataError as error:
        if name == OURS:
            raise WrongDataError(f"{name!r}: {error}") from None
        return reason(error)
    except Exception as error:  # no memory, no compiler: the other variants are worth having
        return reason(error)
    return one


def _sample(name: str, one: Steps, steps: int, failed: dict[str, str]) -> torch.Tensor | None:
    """Do the steps of a sample, or nothing after a failure."""
    if name in failed:
        return None
    try:
        return one.run(steps)
    except Exception as error:  # out of memory, say: the other variants go on
        failed[name] = reason(error)
        return None


def _tokens(models: Models, batch: int, n: int) -> list[torch.Tensor]:
    """Return `n` tokens a row, random ones and the same each time, in tensors of their own."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(models.config.vocab_size, (n, batch, 1), generator=generator).to(models.device)
    return [one.clone() for one in ids]
