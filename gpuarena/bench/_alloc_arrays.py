"""Arrays of torch, CuPy and NumPy: what an allocation costs together with its freeing.

Three kinds of steps. In the first no shape comes twice, so that nothing that remembers a request can help: neither
the arena's memory of the last request at a slot nor a pool's free block of the right size. In the second the same
few shapes come again and again, as the steps of a loop do; there such memories are the point. In the third the
arrays of a step are alive together and are dropped together.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from gpuarena import Arena
from gpuarena.bench._alloc_peers import (
    Peer,
    Shape,
    Workspace,
    arena_peers,
    cupy_async,
    cupy_default,
    cupy_span,
    gpu_peers,
    made,
    peer_group,
    torch_empty,
)
from gpuarena.bench._collect import Maker, not_measured
from gpuarena.bench._labels import reason
from gpuarena.bench.device import Device
from gpuarena.bench.harness import Group

__all__ = ["N_IN_SCOPE", "N", "array_groups", "numpy_groups"]

#: Allocations timed together; a single one is too short for the clock.
N = 200
#: Allocations in a scope that repeats itself.
N_IN_SCOPE = 8
#: Of the arenas, and of pools that are made at once.
_CAPACITY_NBYTES = 256 << 20
#: What the largest list of `new_shapes` takes, 107 MiB, and some.
_WORKSPACE_NBYTES = 128 << 20


def new_shapes() -> list[list[Shape]]:
    """Return lists of shapes, none of which holds a shape of another: a list a step is a list of new shapes."""
    return [[(8 + i % 7, 16 + i + N * number) for i in range(N)] for number in range(64)]


def repeated_shapes() -> list[list[Shape]]:
    """Return the one list of a scope that repeats itself."""
    return [[(8, 16 * (i + 1)) for i in range(N_IN_SCOPE)]]


def step_shapes(n_tokens: int = 8) -> list[list[Shape]]:
    """Return the temporaries of one layer of Qwen2.5-1.5B for a few tokens, from a row of numbers to the MLP's."""
    hidden, kv, wide, heads, context = 1536, 256, 8960, 12, 512
    return [
        [
            (1, n_tokens),  # positions
            (n_tokens, hidden),  # normalised
            (n_tokens, hidden),  # queries
            (n_tokens, kv),  # keys
            (n_tokens, kv),  # values
            (heads * n_tokens, context),  # scores
            (n_tokens, hidden),  # attended
            (n_tokens, wide),  # gate
            (n_tokens, wide),  # up
            (n_tokens, hidden),  # down
            (n_tokens, 1),  # scales
        ]
    ]


# -- torch and CuPy -----------------------------------------------------------------------------------------------


def array_groups(device: Device, rounds: int) -> Iterator[Maker]:
    """Return the groups of torch, and on a GPU those of CuPy."""
    yield "torch arrays, each time a new shape", partial(_torch_new, device, rounds)
    repeated = f"{N_IN_SCOPE} of the same shapes again and again"
    yield f"torch arrays, {repeated}", partial(_torch_repeated, device, rounds)
    held = f"{len(step_shapes()[0])} of mixed sizes held together, again and again"
    yield f"torch arrays, {held}", partial(_torch_held, device, rounds)
    if device.is_gpu:
        yield "CuPy arrays, each time a new shape", partial(_cupy_new, device, rounds)
        yield f"CuPy arrays, {repeated}", partial(_cupy_repeated, device, rounds)


def _torch_new(device: Device, rounds: int, title: str) -> Group:
    import torch

    dtype, where = torch.float32, device.torch_device
    arena = Arena(_CAPACITY_NBYTES, backend="torch", device=device.name)
    typed = torch.empty(1 << 24, dtype=dtype, device=where)
    empty, alloc, _ = arena_peers(arena, dtype)

    def strided(shape: Shape) -> Any:
        return torch.as_strided(typed, shape, (shape[1], 1), 64)

    def strided_data(shape: Shape) -> Any:
        return torch.as_strided(typed, shape, (shape[1], 1), 64).data

    needed = {
        "torch.empty": torch_empty(device),
        "as_strided alone (the floor of any view)": Peer(strided, span=None),
        "as_strided(...).data (with a version counter of its own)": Peer(strided_data, span=None),
        "a buffer sliced by hand": _workspace(device).peer(),
        "arena.empty": empty,
        "arena.alloc(...).array": alloc,
    }
    return peer_group(
        title,
        needed,
        gpu_peers(device, _CAPACITY_NBYTES),
        "torch.empty",
        lists=new_shapes(),
        rounds=rounds,
        synchronize=device.synchronize,
    )


def _workspace(device: Device) -> Workspace:
    import torch

    buffer = torch.empty(_WORKSPACE_NBYTES, dtype=torch.uint8, device=device.torch_device)
    return Workspace(buffer, torch.float32)


def _torch_repeated(device: Device, rounds: int, title: str) -> Group:
    import torch

    dtype = torch.float32
    empty, alloc, alone = arena_peers(Arena(_CAPACITY_NBYTES, backend="torch", device=device.name), dtype)
    prototype = torch.empty(8, 16, dtype=dtype, device=device.torch_device)
    needed = {
        "torch.empty": torch_empty(device),
        "tensor.data alone (the floor)": Peer(lambda shape: prototype.data, span=None),
        "a buffer sliced by hand": _workspace(device).peer(),
        "scope + arena.empty": empty,
        "scope + arena.alloc(...).array": alloc,
        "scope + arena.alloc, no array": alone,
    }
    return peer_group(
        title,
        needed,
        gpu_peers(device, _CAPACITY_NBYTES),
        "torch.empty",
        lists=repeated_shapes(),
        n_steps=N // N_IN_SCOPE,
        rounds=rounds,
        synchronize=device.synchronize,
    )


def _torch_held(device: Device, rounds: int, title: str) -> Group:
    import torch

    empty, alloc, _ = arena_peers(Arena(_CAPACITY_NBYTES, backend="torch", device=device.name), torch.float32)
    needed = {
        "torch.empty": torch_empty(device),
        "a buffer sliced by hand": _workspace(device).peer(),
        "scope + arena.empty": empty,
        "scope + arena.alloc(...).array": alloc,
    }
    lists = step_shapes()
    return peer_group(
        title,
        needed,
        gpu_peers(device, _CAPACITY_NBYTES),
        "torch.empty",
        lists=lists,
        n_steps=N // len(lists[0]),
        holds=True,
        rounds=rounds,
        synchronize=device.synchronize,
    )


def _cupy_new(device: Device, rounds: int, title: str) -> Group:
    return _cupy_group(device, rounds, title, new_shapes(), 1, "arena")


def _cupy_repeated(device: Device, rounds: int, title: str) -> Group:
    return _cupy_group(device, rounds, title, repeated_shapes(), N // N_IN_SCOPE, "scope + arena")


def _cupy_group(
    device: Device, rounds: int, title: str, lists: list[list[Shape]], n_steps: int, ours: str
) -> Group:
    try:
        arena = _cupy_arena(device)
    except Exception as error:  # CuPy may be missing, or unable to use the device
        return not_measured(title, {"CuPy": reason(error)})
    empty, alloc, _ = arena_peers(arena, np.dtype("float32"), cupy_span)
    found, missing = made({"cupy.empty": cupy_default}, lists[0])
    if missing:
        return not_measured(title, missing)
    return peer_group(
        title,
        {**found, f"{ours}.empty": empty, f"{ours}.alloc(...).array": alloc},
        {"cupy.empty, MemoryAsyncPool": cupy_async},
        "cupy.empty",
        lists=lists,
        n_steps=n_steps,
        rounds=rounds,
        synchronize=device.synchronize,
    )


def _cupy_arena(device: Device) -> Arena:
    """Return an arena of CuPy arrays; without a driver they lie in host memory, where nobody may look into them."""
    if not device.is_fake:
        return Arena(_CAPACITY_NBYTES, backend="cupy", device=device.name)

    def on_host(nbytes: int, *, device: Any = None, alignment: int = 256) -> Any:
        from gpuarena.backends.cupy import CupyBackend

        memory = np.empty(nbytes + alignment, np.uint8)
        start = -memory.ctypes.data % alignment
        return CupyBackend.adopt_pointer(memory.ctypes.data + start, nbytes, memory, 0)

    return Arena(_CAPACITY_NBYTES, backend=on_host)


# -- NumPy --------------------------------------------------------------------------------------------------------


def numpy_groups(rounds: int) -> Iterator[Maker]:
    """Return the group of NumPy's arrays, which are on the host."""
    yield "NumPy arrays, each time a new shape", partial(_numpy_new, rounds)


def _numpy_new(rounds: int, title: str) -> Group:
    buffer = np.empty(1 << 26, np.uint8)
    empty, alloc, _ = arena_peers(Arena(_CAPACITY_NBYTES), "float32", _numpy_span)
    needed = {
        "numpy.empty": Peer(lambda shape: np.empty(shape, np.float32), span=_numpy_span),
        "numpy.ndarray(buffer=...) (the floor)": Peer(
            lambda shape: np.ndarray(shape, np.float32, buffer, 256), span=None
        ),
        "arena.empty": empty,
        "arena.alloc(...).array": alloc,
    }
    return peer_group(
        title, needed, {}, "numpy.empty", lists=new_shapes(), rounds=rounds, synchronize=lambda: None
    )


def _numpy_span(array: Any) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes
