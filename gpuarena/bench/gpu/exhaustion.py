"""Out of memory half-way: what raises, what is kept, what is left over, and whether things go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from gpuarena import backends
from gpuarena.arena import Arena
from gpuarena.backends import Backend, BackendFactory
from gpuarena.backends._vmm import DriverError
from gpuarena.backends._vmm_host import HostVmm
from gpuarena.backends.virtual import VirtualTorchBackend, _numpy_bytes
from gpuarena.bench.device import Device
from gpuarena.bench.gpu._check import Check, NotMeasuredError, Probe
from gpuarena.bench.gpu._left_over import expect_given_back, free_nbytes, slack_nbytes, used_nbytes
from gpuarena.bench.gpu.growth import need_bindings
from gpuarena.errors import CapacityError, OutOfMemoryError
from gpuarena.kv import KVCache, KVSpec

__all__ = ["checks"]

MIB, GIB = 1 << 20, 1 << 30
#: Regions that a growing arena may take before it runs out of what was left for 4.
_MOST_REGIONS = 64
#: Between the logits of two caches, in their standard deviations: float32 in another order of summation.
_TOLERANCE = 1e-3


def checks() -> list[Check]:
    """Return the checks of this module."""
    return [
        Check("an arena larger than the device", _too_large, 3),
        Check("a growing arena on a device that is full", _full_device, 15),
        Check("a cache that is full", _full_cache, 10),
    ]


# -- an arena larger than the device ------------------------------------------------------------------------------------


def _too_large(probe: Probe) -> None:
    device = probe.device
    before = used_nbytes(device)
    memory = device.memory()
    assert memory is not None, "used_nbytes has counted it"
    # A host gives addresses for more than it has; no process has 2**60 of them.
    nbytes = 1 << 60 if device.is_fake else memory.total_nbytes + GIB
    error = _refused(lambda: Arena(nbytes, backend="torch", device=device.name))
    probe.expect(
        error is not None, f"an arena of {nbytes} bytes was made on a device of {memory.total_nbytes} bytes"
    )
    assert error is not None, "expected just now"
    probe.figure("asked", error.requested, "bytes")
    probe.expect(
        error.requested == nbytes, f"the error says that {error.requested} bytes were asked, not {nbytes}"
    )
    del error
    expect_given_back(probe, "left over", before, "the failure")
    arena = Arena(MIB, backend="torch", device=device.name)
    probe.expect(
        int(arena.full(1000, 1, "int64").sum()) == 1000, "an arena made after the failure holds wrong data"
    )


def _refused(body: Callable[[], object]) -> OutOfMemoryError | None:
    """Return the error without what it refers to, which would keep memory alive; None if there is none."""
    try:
        body()
    except OutOfMemoryError as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    return None


# -- a growing arena on a full device -------------------------------------------------------------------------------------


class _Room(Protocol):
    """A device that can be filled."""

    @property
    def backend(self) -> str | BackendFactory:
        """Of arenas whose memory comes from here."""

    def fill(self, left_nbytes: int) -> None:
        """Let this many bytes be free."""

    def empty(self) -> None:
        """Let everything be free again."""


class _CudaRoom:
    """A GPU; what fills it are tensors."""

    backend = "virtual:torch"
    #: As much at once: one piece as large as the device might not be found.
    PIECE_NBYTES = 8 * GIB
    #: Kept in torch's cache for what kernels need, which on a full device they could not get any more.
    SCRATCH_NBYTES = 256 * MIB

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tensors: list[torch.Tensor] = []

    def fill(self, left_nbytes: int) -> None:
        surplus = free_nbytes(self._device) - left_nbytes - self.SCRATCH_NBYTES
        if surplus <= 0:
            raise NotMeasuredError(f"{left_nbytes + self.SCRATCH_NBYTES} bytes of free memory are needed")
        while surplus > 0:
            nbytes = min(surplus, self.PIECE_NBYTES)
            self._tensors.append(self._empty(nbytes))
            surplus -= nbytes
        self._empty(self.SCRATCH_NBYTES)  # goes into the cache at once

    def empty(self) -> None:
        self._tensors.clear()
        self._device.forget_peak()

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)


class _HostVmmWithLimit(HostVmm):
    """Refuses memory beyond a limit."""

    def __init__(self) -> None:
        super().__init__()
        self.held = 0
        self.limit: int | None = None

    def create(self, nbytes: int) -> int:
        if self.limit is not None and self.held + nbytes > self.limit:
            raise DriverError("create", "the dry run's limit is reached", out_of_memory=True)
        self.held += nbytes
        return super().create(nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        super().unmap(address, nbytes)
        self.held -= nbytes


class _HostRoom:
    """The host on a dry run, which nobody wants to fill: memory that grows has a limit instead."""

    def __init__(self) -> None:
        self._driver = _HostVmmWithLimit()

    def backend(self, nbytes: int, *, device: Any, alignment: int) -> Backend:
        torch_backend = backends.load("torch")
        return VirtualTorchBackend(
            self._driver, nbytes, alignment, lambda owner: torch_backend.adopt_numpy(_numpy_bytes(owner))
        )

    def fill(self, left_nbytes: int) -> None:
        self._driver.limit = self._driver.held + left_nbytes

    def empty(self) -> None:
        self._driver.limit = None


def _full_device(probe: Probe) -> None:
    device = probe.device
    need_bindings(device)
    room: _Room = _HostRoom() if device.is_fake else _CudaRoom(device)
    nbytes = 8 * MIB if probe.quick else 256 * MIB
    with Arena(4096, backend="torch", device=device.name) as arena:  # loads the kernels that look at data
        _expect_filled(probe, [arena.alloc(1000, "uint8", fill=1)], "at once")
    before = used_nbytes(device)
    capacity = 2 * _MOST_REGIONS * nbytes
    arena = Arena(capacity, backend=room.backend, device=device.name, name="growing")
    try:
        _run_out(probe, arena, room, nbytes)
    finally:
        room.empty()
        arena.close()
    del arena
    expect_given_back(probe, "left over after closing", before, "closing the arena")


def _run_out(probe: Probe, arena: Arena, room: _Room, nbytes: int) -> None:
    regions = [arena.alloc(nbytes, "uint8", fill=1, label="1")]
    room.fill(4 * nbytes)
    error: OutOfMemoryError | None = None
    while error is None and len(regions) < _MOST_REGIONS:
        number = len(regions) + 1
        stats, used = arena.stats, _used_now(probe.device)
        error = _refused(
            lambda number=number: regions.append(arena.alloc(nbytes, "uint8", fill=number, label=str(number)))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        )
    probe.expect(
        error is not None, f"{len(regions)} x {nbytes} bytes were found where {4 * nbytes} were left"
    )
    assert error is not None, "expected just now"
    left = _used_now(probe.device) - used
    after = arena.stats
    probe.figure("regions before the device was full", len(regions), "regions")
    probe.figure("left over by the failure", left, "bytes")
    probe.expect(len(regions) > 1, f"not one of {nbytes} bytes was found where {4 * nbytes} were left")
    limit = getattr(error, "limit", None)
    probe.expect(limit == "memory", f"the error says that the limit is {limit!r}, and it was the memory")
    probe.expect(
        (after.used, after.top, after.committed) == (stats.used, stats.top, stats.committed),
        f"the failure changed the arena: {stats.committed} bytes were committed before and {after.committed} after it, "
        f"{stats.used} used before and {after.used} after it",
    )
    probe.expect(left <= slack_nbytes(probe.device), f"the failure left {left} bytes of the device taken")
    _expect_filled(probe, regions, "when the device was full")
    room.empty()
    for number in range(len(regions) + 1, len(regions) + 7):
        regions.append(arena.alloc(nbytes, "uint8", fill=number, label=str(number)))
    _expect_filled(probe, regions, "when memory was free again")
    probe.figure("regions when memory was free again", len(regions), "regions")


def _used_now(device: Device) -> int:
    """Return the used bytes, without emptying torch's cache: kernels need what it holds."""
    device.synchronize()
    memory = device.memory()
    assert memory is not None, "used_nbytes has counted it"
    return memory.used_nbytes


def _expect_filled(probe: Probe, regions: list[Any], when: str) -> None:
    """Fail unless every byte of each region is the region's number, from 1 on."""
    for number, region in enumerate(regions, 1):
        array = region.array
        found = int(array.min()), int(array.max())
        probe.expect(
            found == (number, number),
            f"region {number} was filled with {number}, and holds bytes from {found[0]} to {found[1]} {when}",
        )


# -- a cache that is full ---------------------------------------------------------------------------------------------------


def _full_cache(probe: Probe) -> None:
    model = _small_model(probe)

    def fill() -> None:
        _fill_kv_cache(probe)
        if model is not None:
            _fill_models_cache(probe, model)

    fill()  # cuBLAS takes a workspace and keeps it, and kernels are loaded
    before = used_nbytes(probe.device)
    fill()
    expect_given_back(probe, "left over", before, "the caches are gone")


def _small_model(probe: Probe) -> Any:
    """Return a model with random weights, or None where transformers is missing."""
    from gpuarena.bench import _models

    try:
        made = _models.random_models(probe.device, torch.float32, 2, _models.TINY)
    except ImportError as error:
        probe.figure("with a model", f"not measured: {error}")
        return None
    return made.by_attention["sdpa"]


def _fill_kv_cache(probe: Probe) -> None:
    where, n_layers, n_heads, dim = probe.device.torch_device, 2, 8, 128
    n_tokens = 64 if probe.quick else 32768  # 512 MiB, so that it would be seen if it stayed
    spec = KVSpec.uniform(layers=n_layers, kv_heads=n_heads, head_dim=dim, dtype="float32")
    # Our own buffer, so that every byte can be looked at, of free slots too.
    buffer = torch.zeros(spec.arena_nbytes(1, n_tokens) + 256, dtype=torch.uint8, device=where)
    cache = KVCache(Arena.from_buffer(buffer), spec, batch=1, max_tokens=n_tokens)
    generator = torch.Generator(where).manual_seed(0)
    new = torch.randn(1, n_heads, n_tokens - 2, dim, generator=generator, device=where)
    for layer in range(n_layers):
        cache.append(layer, new, new)
    kept = buffer.clone()
    error = _refused(lambda: cache.append(0, new[:, :, :3], new[:, :, :3]))
    probe.expect(
        isinstance(error, CapacityError), f"3 tokens were appended where there is room for 2: {error!r}"
    )
    probe.expect(torch.equal(buffer, kept), "a cache that is full was written to before it raised")
    probe.expect(
        cache.length == n_tokens - 2, f"a cache that is full counts {cache.length} of {n_tokens - 2} tokens"
    )
    for layer in range(n_layers):
        keys, _ = cache.append(layer, new[:, :, :2], new[:, :, :2])
        probe.expect(
            torch.equal(keys, torch.cat([new, new[:, :, :2]], dim=2)),
            "a cache that was full goes on with wrong keys",
        )
    probe.figure("tokens in the cache that was full", cache.length, f"of {n_tokens}")


def _fill_models_cache(probe: Probe, model: Any) -> None:
    from gpuarena_transformers import ArenaCache, cache_argument
    from transformers import DynamicCache

    where, prompt, capacity = probe.device.torch_device, 5, 8
    buffer = torch.zeros(4 * MIB, dtype=torch.uint8, device=where)
    ours = ArenaCache(model.config, 1, capacity, arena=Arena.from_buffer(buffer))
    theirs = DynamicCache(config=model.config)

    def step(cache: Any, tokens: list[int]) -> torch.Tensor:
        ids = torch.tensor([tokens], device=where)
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=ids, use_cache=True, **{cache_argument(): cache}).logits
        return logits[:, -1].float()

    def expect_same(one: torch.Tensor, other: torch.Tensor, when: str) -> float:
        difference = float((one - other).abs().max() / other.std())
        probe.expect(
            difference <= _TOLERANCE,
            f"logits differ by {difference:.3g} standard deviations from those of a DynamicCache {when}",
        )
        return difference

    first = [*range(1, prompt + 1)]
    expect_same(step(ours, first), step(theirs, first), "with room in the cache")
    for token in range(prompt + 1, capacity):
        expect_same(step(ours, [token]), step(theirs, [token]), "with room in the cache")
    step(ours, [capacity])  # the last that fits; another one comes in its place below
    kept = buffer.clone()
    error = _refused(lambda: step(ours, [9]))
    probe.expect(isinstance(error, CapacityError), f"a model went on with a cache that is full: {error!r}")
    probe.expect(torch.equal(buffer, kept), "a step with a cache that is full wrote to it before it raised")
    probe.expect(
        ours.get_seq_length() == capacity, f"a cache of {capacity} tokens counts {ours.get_seq_length()}"
    )
    ours.truncate(capacity - 1)
    difference = expect_same(step(ours, [77]), step(theirs, [77]), "after the cache was full")
    probe.figure("with a model", difference, "standard deviations of the logits")
