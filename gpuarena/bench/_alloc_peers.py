"""Ways to get arrays and to give them back, all timed by one loop: ours, plain ones, and the pools of other libraries."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from gpuarena import Arena
from gpuarena.bench import harness
from gpuarena.bench._labels import reason
from gpuarena.bench.device import Device
from gpuarena.bench.harness import Group, Variant, WrongDataError

__all__ = [
    "ITEMSIZE",
    "Peer",
    "Shape",
    "Workspace",
    "arena_peers",
    "check_peer",
    "cupy_async",
    "cupy_default",
    "cupy_span",
    "gpu_peers",
    "made",
    "peer_group",
    "torch_empty",
]

Shape = tuple[int, int]

#: Bytes of the float32 that all of them hold.
ITEMSIZE = 4


def tensor_span(tensor: Any) -> tuple[int, int]:
    """Return the address and the bytes of a torch tensor."""
    return tensor.data_ptr(), tensor.nbytes


@dataclass(frozen=True)
class Peer:
    """One way to get arrays of float32."""

    allocate: Callable[[Shape], Any]
    """Returns an array; dropping it frees it, or the end of the scope does. A function of Python for all of them, so
    that each pays for one call more than a user does."""
    scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """Around the allocations of a step."""
    span: Callable[[Any], tuple[int, int]] | None = tensor_span
    """Takes address and bytes from what `allocate` returned; None of a floor, which allocates nothing."""
    used_nbytes: Callable[[], int] | None = None
    """Bytes given out at present, as the allocator rounds them; None where nobody counts."""


# -- the loop -----------------------------------------------------------------------------------------------------


def step(peer: Peer, shapes: Iterable[Shape]) -> None:
    """Allocate and drop one array after the other."""
    allocate = peer.allocate
    with peer.scope():
        for shape in shapes:
            allocate(shape)


def step_holding(peer: Peer, shapes: Iterable[Shape]) -> None:
    """Allocate all arrays, and drop them together."""
    allocate = peer.allocate
    with peer.scope():
        held = [allocate(shape) for shape in shapes]
        del held


class _Body:
    """Does some steps with a peer; each takes the next list of shapes, going on where the last call stopped."""

    def __init__(self, peer: Peer, lists: Sequence[Sequence[Shape]], n_steps: int, holds: bool) -> None:
        self._peer = peer
        self._turn = itertools.cycle(lists)
        self._n_steps = n_steps
        self._step = step_holding if holds else step

    def __call__(self) -> None:
        do, peer, turn = self._step, self._peer, self._turn
        for _ in range(self._n_steps):
            do(peer, next(turn))


@dataclass
class _Guard:
    """Calls a body until it fails, so that a peer that breaks half-way does not take the group with it."""

    body: Callable[[], None]
    why: str = field(default="", init=False)

    def __call__(self) -> None:
        if self.why:
            return
        try:
            self.body()
        except Exception as error:
            self.why = reason(error)


def peer_group(
    title: str,
    needed: Mapping[str, Peer],
    others: Mapping[str, Callable[[], Peer]],
    reference: str,
    *,
    lists: Sequence[Sequence[Shape]],
    n_steps: int = 1,
    holds: bool = False,
    rounds: int,
    synchronize: Callable[[], object],
) -> Group:
    """Check and time peers, each allocation with its freeing; one of `others` that fails is named as not measured.

    Parameters
    ----------
    needed : dict
        Peers without which there is no group.
    others : dict
        Functions that make peers which may be missing here.
    lists : list of lists of shapes
        A step takes one list; the next step takes the next list. All have the same length.
    n_steps : int
        Steps in a sample.
    holds : bool
        Whether all arrays of a step live until its end. If so, the bytes that they take are a figure as well.
    """
    found, missing = made(others, lists[0])
    for name, peer in needed.items():
        check_peer(name, peer, lists[0])
    guards = {name: _Guard(_Body(peer, lists, n_steps, holds)) for name, peer in found.items()}
    bodies: dict[str, Callable[[], None]] = {
        **{name: _Body(peer, lists, n_steps, holds) for name, peer in needed.items()},
        **guards,
    }
    peers = {**needed, **found}
    variants = {
        name: Variant(
            body,
            n_steps * len(lists[0]),
            figures=used_figures(peers[name], lists[0]) if holds else {},
        )
        for name, body in bodies.items()
    }
    group = harness.group(title, variants, reference, rounds=rounds, warmup=2, synchronize=synchronize)
    for name, guard in guards.items():
        if guard.why:
            del group["rows"][name]
            missing[name] = guard.why
    return {**group, "not_measured": missing} if missing else group


def made(
    makers: Mapping[str, Callable[[], Peer]], shapes: Sequence[Shape]
) -> tuple[dict[str, Peer], dict[str, str]]:
    """Return the peers that could be made and are right, and why the others are not."""
    found: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    for name, make in makers.items():
        try:
            peer = make()
            check_peer(name, peer, shapes)
        except Exception as error:  # a library may be missing, broken or too old, each in its own way
            missing[name] = reason(error)
        else:
            found[name] = peer
    return found, missing


def check_peer(name: str, peer: Peer, shapes: Iterable[Shape]) -> None:
    """Allocate arrays and look at the memory that they get.

    Raises
    ------
    WrongDataError
        An array has too few bytes, or two that live at the same time share some.
    """
    if peer.span is None:
        return
    with peer.scope():
        held = [(peer.allocate(shape), shape) for shape in shapes]
        spans = []
        for array, shape in held:
            address, nbytes = peer.span(array)
            if nbytes < ITEMSIZE * shape[0] * shape[1]:
                raise WrongDataError(f"{name!r} gave {nbytes} bytes for {list(shape)} of float32")
            spans.append((address, address + nbytes))
        spans.sort()
        for (_, stop), (start, _) in itertools.pairwise(spans):
            if start < stop:
                raise WrongDataError(f"{name!r} gave the bytes at {start:#x} to two arrays at once")
        del held, array


def used_figures(peer: Peer, shapes: Iterable[Shape]) -> dict[str, float]:
    """Return the bytes that a step takes, where the allocator counts them."""
    if peer.used_nbytes is None:
        return {}
    try:
        with peer.scope():
            before = peer.used_nbytes()
            held = [peer.allocate(shape) for shape in shapes]
            nbytes = peer.used_nbytes() - before
            del held
    except Exception:  # some pools count only with newer drivers
        return {}
    return {"peak_nbytes": nbytes}


# -- ours, and by hand --------------------------------------------------------------------------------------------


def arena_peers(
    arena: Arena, dtype: Any, span: Callable[[Any], tuple[int, int]] = tensor_span
) -> tuple[Peer, Peer, Peer]:
    """Return ``arena.empty``, ``arena.alloc(...).array`` and ``arena.alloc`` alone."""

    def used() -> int:
        return arena.stats.top

    return (
        Peer(lambda shape: arena.empty(shape, dtype), arena.scope, span, used),
        Peer(lambda shape: arena.alloc(shape, dtype).array, arena.scope, span, used),
        Peer(lambda shape: arena.alloc(shape, dtype), arena.scope, lambda region: span(region.array), used),
    )


class Workspace:
    """One buffer of bytes, cut by hand: each array begins at the next multiple of 256."""

    def __init__(self, buffer: Any, dtype: Any) -> None:
        self._buffer = buffer
        self._dtype = dtype
        self._at = 0

    def __enter__(self) -> None:
        self._at = 0

    def __exit__(self, *error: object) -> None:
        self._at = 0

    def peer(self) -> Peer:
        """Return it as one."""
        return Peer(self._allocate, lambda: self, used_nbytes=lambda: self._at)

    def _allocate(self, shape: Shape) -> Any:
        rows, columns = shape
        start = self._at
        stop = start + rows * columns * ITEMSIZE
        self._at = (stop + 255) & -256
        return self._buffer[start:stop].view(self._dtype).view(rows, columns)


# -- the pools of torch, CuPy and RMM -----------------------------------------------------------------------------


def gpu_peers(device: Device, nbytes: int) -> dict[str, Callable[[], Peer]]:
    """Return what makes the peers that only a GPU has, none on a CPU; pools that are made at once get `nbytes`."""
    if not device.is_gpu:
        return {}
    return {
        "torch.empty in a MemPool": functools.partial(mem_pool, device),
        "CuPy, default pool": cupy_default,
        "CuPy, MemoryAsyncPool": cupy_async,
        "RMM, PoolMemoryResource (bytes, no array)": functools.partial(rmm_pool, device, nbytes),
        "RMM, ArenaMemoryResource (bytes, no array)": functools.partial(rmm_arena, device, nbytes),
    }


def torch_empty(device: Device) -> Peer:
    """Return ``torch.empty``: the caching allocator on a GPU, malloc on a CPU."""
    return Peer(_torch_allocate(device), used_nbytes=_torch_counter(device))


def _torch_allocate(device: Device) -> Callable[[Shape], Any]:
    import torch

    empty, dtype, where = torch.empty, torch.float32, device.torch_device
    return lambda shape: empty(shape, dtype=dtype, device=where)


def _torch_counter(device: Device) -> Callable[[], int] | None:
    if device.memory() is None:
        return None

    def used() -> int:
        memory = device.memory()
        assert memory is not None, "a device that counts goes on counting"
        return memory.allocated_nbytes

    return used


def mem_pool(device: Device) -> Peer:
    """Return ``torch.empty`` inside ``torch.cuda.use_mem_pool``, which a step enters once."""
    import torch

    if device.is_fake:
        return torch_empty(device)
    pool = torch.cuda.MemPool()
    return Peer(
        _torch_allocate(device),
        lambda: torch.cuda.use_mem_pool(pool, device.torch_device),
        used_nbytes=_torch_counter(device),
    )


def cupy_span(array: Any) -> tuple[int, int]:
    """Return the address and the bytes of a CuPy array."""
    return array.data.ptr, array.nbytes


def cupy_default() -> Peer:
    """Return ``cupy.empty`` with the allocator that CuPy has from the start, a `cupy.cuda.MemoryPool`."""
    import cupy

    pool = cupy.get_default_memory_pool()
    return Peer(lambda shape: cupy.empty(shape, "float32"), span=cupy_span, used_nbytes=pool.used_bytes)


def cupy_async() -> Peer:
    """Return ``cupy.empty`` with the driver's own stream-ordered pool."""
    import cupy

    pool = cupy.cuda.MemoryAsyncPool()
    return Peer(
        lambda shape: cupy.empty(shape, "float32"),
        lambda: cupy.cuda.using_allocator(pool.malloc),
        cupy_span,
        pool.used_bytes,
    )


def rmm_pool(device: Device, nbytes: int) -> Peer:
    """Return ``rmm.DeviceBuffer`` from a coalescing best-fit pool."""
    import rmm.mr

    return _rmm_peer(rmm.mr.PoolMemoryResource(_rmm_upstream(device), initial_pool_size=nbytes))


def rmm_arena(device: Device, nbytes: int) -> Peer:
    """Return ``rmm.DeviceBuffer`` from RMM's arenas, which are free lists of superblocks and no stacks."""
    import rmm.mr

    return _rmm_peer(rmm.mr.ArenaMemoryResource(_rmm_upstream(device), arena_size=nbytes))


def _rmm_peer(resource: Any) -> Peer:
    import rmm

    make = rmm.DeviceBuffer

    def allocate(shape: Shape) -> Any:
        return make(size=shape[0] * shape[1] * ITEMSIZE, mr=resource)

    return Peer(allocate, span=lambda buffer: (buffer.ptr, buffer.size))


def _rmm_upstream(device: Device) -> Any:
    """Return where a pool takes its memory from; without a driver from the host, by way of callbacks."""
    import rmm.mr

    if not device.is_fake:
        return rmm.mr.CudaMemoryResource()
    memory = _HostMemory()
    return rmm.mr.CallbackMemoryResource(memory.allocate, memory.free)


class _HostMemory:
    """Host memory behind RMM's callbacks, aligned as its pools expect."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}

    def allocate(self, nbytes: int, stream: Any) -> int:
        """Return an address."""
        import numpy as np

        buffer = np.empty(nbytes + 256, np.uint8)
        address = (buffer.ctypes.data + 255) & -256
        self._held[address] = buffer
        return address

    def free(self, address: int, nbytes: int, stream: Any) -> None:
        """Forget an address."""
        del self._held[address]
