"""Memory that grows in place to tens of GiB: addresses, kernels across the borders of chunks, costs, and giving back."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from gpuarena.arena import Arena
from gpuarena.bench.device import Device
from gpuarena.bench.gpu._check import Check, NotMeasuredError, Probe
from gpuarena.bench.gpu._left_over import expect_given_back, free_nbytes, slack_nbytes, used_nbytes
from gpuarena.bench.harness import Group, Variant, group, measure

__all__ = ["checks", "need_bindings"]

MIB, GIB = 1 << 20, 1 << 30
#: As large as chunks become, so that from then on each step is one chunk.
STEP_NBYTES = 64 * MIB
MOST_NBYTES = 48 * GIB
_LEAST_STEPS = 8
#: Elements of the region that is there before all others.
_N_HEAD = 1024


def checks() -> list[Check]:
    """Return the checks of this module."""
    return [Check("memory that grows in place", _growth, 20)]


def need_bindings(device: Device) -> None:
    """Raise unless there is what device memory that grows is made with.

    Raises
    ------
    NotMeasuredError
        cuda-bindings is not installed.
    """
    if device.is_fake:
        return
    try:
        importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise NotMeasuredError(
            f"cuda-bindings cannot be imported: {error}; pip install 'gpuarena[cuda]'"
        ) from error


def _growth(probe: Probe) -> None:
    device = probe.device
    need_bindings(device)
    step, n_steps = 4 * MIB, 12
    if not probe.quick:
        step = STEP_NBYTES
        n_steps = min(MOST_NBYTES, free_nbytes(device) // 3) // step
        if n_steps < _LEAST_STEPS:
            raise NotMeasuredError(
                f"a third of the free memory is less than {_LEAST_STEPS * step // MIB} MiB"
            )
    _warm_up(device)
    before = used_nbytes(device)
    arena = Arena(2 * n_steps * step + GIB, backend="virtual:torch", device=device.name, name="growing")
    try:
        _grow_and_give_back(probe, arena, step, n_steps, before)
    finally:
        arena.close()
    expect_given_back(probe, "left over after closing", before, "closing the arena")


def _grow_and_give_back(probe: Probe, arena: Arena, step: int, n_steps: int, before: int) -> None:
    device = probe.device
    head = arena.alloc(_N_HEAD, "int64", fill=7, label="head")
    address = head.array.data_ptr()
    start = arena.checkpoint()
    n_grown = _time_growth(probe, arena, step, n_steps)
    _expect_head(probe, head, address, "while the memory behind it grew")
    arena.rollback(start)
    n_elements = n_grown * step // 8
    whole = arena.alloc(n_elements, "int64", label="all of it").array
    _run_across(probe, whole, step // 8)
    _expect_head(probe, head, address, "while kernels ran on the memory behind it")
    probe.groups.append(_time_kernel(probe, whole))

    committed = arena.stats.committed
    top = used_nbytes(device)
    probe.figure("grown to", committed / GIB, "GiB")
    probe.figure("used before", before / GIB, "GiB")
    probe.figure("used at the top", top / GIB, "GiB")
    slack = slack_nbytes(device)
    # A host counts pages that were written; what is committed beyond the pointer was not.
    untouched = committed - arena.stats.top if device.is_fake else 0
    probe.expect(
        abs(top - before - (committed - untouched)) <= slack,
        f"{committed} bytes are committed, {untouched} of them untouched, and {top - before} more than before are used",
    )
    del whole
    arena.rollback(start)
    given_back = _time_trim(probe, arena)
    after = used_nbytes(device)
    probe.figure("given back by trim", given_back / GIB, "GiB")
    probe.figure("used after trim", after / GIB, "GiB")
    probe.figure("left over after trim", after - before, "bytes")
    probe.expect(
        abs(top - after - (given_back - untouched)) <= slack,
        f"trim says that it gave back {given_back} bytes, and {top - after} fewer are used",
    )
    probe.expect(
        after - before <= slack,
        f"{after - before} bytes more than before are used after trim, which should take all",
    )
    _expect_head(probe, head, address, "while trim gave back what was behind it")


def _time_growth(probe: Probe, arena: Arena, step: int, n_steps: int) -> int:
    """Grow by a chunk at a time, by turns with an allocation of torch; return the number of steps."""
    device = probe.device
    others: list[torch.Tensor] = []
    warmup, n_grown = 2, 0

    def grow() -> None:
        nonlocal n_grown
        n_grown += 1
        arena.alloc(step, "uint8")

    def allocate() -> None:
        others.append(torch.empty(step, dtype=torch.uint8, device=device.torch_device))

    # The first chunks double, up to a step. The cache of torch is empty, so each of its tensors is a cudaMalloc.
    while arena.stats.top < step:
        grow()
    device.forget_peak()
    ours = f"growing by {step // MIB} MiB"
    found = group(
        f"{step // MIB} MiB of memory more, up to {n_steps * step / GIB:.3g} GiB",
        {ours: Variant(grow), "torch.empty, nothing cached": Variant(allocate)},
        ours,
        rounds=n_steps - warmup - n_grown - 1,  # one more is the check of each variant
        warmup=warmup,
        synchronize=device.synchronize,
    )
    probe.groups.append(found)
    row = found["rows"][ours]
    probe.figure(f"a chunk of {step // MIB} MiB, median", row["median_s"] * 1e6, "us")
    for name, seconds in zip(("lower", "upper"), row["quartiles_s"], strict=True):
        probe.figure(f"a chunk of {step // MIB} MiB, {name} quartile", seconds * 1e6, "us")
    probe.figure("growth", step / GIB / row["median_s"], "GiB/s")
    probe.figure(
        "torch.empty, nothing cached", found["rows"]["torch.empty, nothing cached"]["ratio"], "times a chunk"
    )
    return n_grown


def _time_trim(probe: Probe, arena: Arena) -> int:
    """Give back all memory above the pointer; return the bytes."""
    found: list[int] = []
    trim = Variant(lambda: found.append(arena.trim()))
    timing = measure({"trim": trim}, rounds=1, warmup=0, synchronize=probe.device.synchronize)["trim"]
    probe.figure("trim", timing.median * 1e3, "ms")
    return found[0]


def _expect_head(probe: Probe, head: Any, address: int, when: str) -> None:
    found = head.array.data_ptr()
    probe.expect(found == address, f"an array moved from {address:#x} to {found:#x} {when}")
    probe.expect(bool((head.array == 7).all()), f"the contents of an array changed {when}")


def _run_across(probe: Probe, whole: torch.Tensor, n_step: int) -> None:
    """Run kernels over all of `whole`, [elements] int64, and compare its numbers in pieces that begin mid-chunk."""
    n_elements = whole.numel()
    torch.arange(n_elements, out=whole)
    whole += 1
    wrong = torch.zeros((), dtype=torch.int64, device=whole.device)
    offsets = torch.arange(n_step, device=whole.device)
    for start in range(n_step // 2, n_elements - n_step, n_step):
        wrong += (whole[start : start + n_step] - start != offsets + 1).sum()
    n_wrong = int(wrong)
    probe.figure("wrong numbers across borders of chunks", n_wrong, f"of {n_elements} elements")
    probe.expect(
        n_wrong == 0, f"{n_wrong} of {n_elements} numbers that a kernel wrote across chunks are wrong"
    )
    whole.fill_(1)
    total = int(whole.sum())
    probe.expect(total == n_elements, f"{n_elements} ones in memory of many chunks add up to {total}")


def _time_kernel(probe: Probe, whole: torch.Tensor) -> Group:
    """Time a kernel on memory of many chunks against one on memory of one piece."""
    n_elements = min(whole.numel(), (4 * GIB if not probe.quick else MIB) // 8)
    part = whole[:n_elements]
    one_piece = torch.ones(n_elements, dtype=torch.int64, device=whole.device)
    ours, theirs = "on memory of many chunks", "on memory of one piece"
    found = group(
        f"x += 1, {n_elements * 8 / GIB:.3g} GiB",
        {ours: Variant(lambda: part.add_(1)), theirs: Variant(lambda: one_piece.add_(1))},
        theirs,
        rounds=3 if probe.quick else 21,
        synchronize=probe.device.synchronize,
    )
    probe.figure("a kernel on memory of many chunks", found["rows"][ours]["ratio"], "times one of one piece")
    return found


def _warm_up(device: Device) -> None:
    """Run every kernel once: a driver takes memory for the code of a kernel when it first runs."""
    with Arena(4 * MIB, backend="torch", device=device.name) as arena:
        arena.alloc(_N_HEAD, "int64", fill=7)
        x = arena.empty(_N_HEAD, "int64")
        _run_across(Probe(device), x, 64)
        bool((x == 7).all())
        x.add_(1)
