"""What an allocation, a rollback and a frame cost, next to what people use instead.

Every figure is per operation, and each group is timed interleaved in one process, so its ratios mean something on
a noisy machine. Requests with new shapes and requests that repeat themselves are different groups: caches of all
kinds, ours included, make the second look good.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from gpuarena import Arena
from gpuarena.bench import harness
from gpuarena.bench.environment import environment
from gpuarena.bench.harness import Group, Variant, WrongDataError

__all__ = ["WrongDataError", "run"]

#: Allocations timed together; a single one is too short for the clock.
_N = 200
#: Allocations in a scope that repeats itself.
_N_IN_SCOPE = 8
_CAPACITY = "256MiB"


def run(
    *,
    device: str = "cpu",
    rounds: int = 21,
    quick: bool = False,
    on_group: Callable[[Any], None] = lambda _: None,
) -> dict[str, Any]:
    """Time all groups; return the figures with the machine and the versions, for JSON.

    Parameters
    ----------
    device : str
        ``"cpu"`` or a CUDA device. NumPy's groups run on the CPU only.
    rounds : int
        Samples of each variant.
    quick : bool
        Few samples and few regions, to see that it runs.
    on_group : callable, optional
        Called with each group when it is done.
    """
    rounds = min(rounds, 3) if quick else rounds
    groups = []
    for group in _groups(device, rounds, quick):
        groups.append(group)
        on_group(group)
    return {"benchmark": "alloc", "environment": environment(device), "rounds": rounds, "groups": groups}


def _groups(device: str, rounds: int, quick: bool) -> Iterator[Group]:
    yield _group(
        "torch arrays, each time a new shape", _torch_new(device), "torch.empty", rounds, _N, _wait(device)
    )
    yield _group(
        f"torch arrays, {_N_IN_SCOPE} of the same shapes again and again",
        _torch_repeated(device),
        "torch.empty",
        rounds,
        _N_IN_SCOPE * (_N // _N_IN_SCOPE),
        _wait(device),
    )
    if device == "cpu":
        yield _group("NumPy arrays, each time a new shape", _numpy_new(), "numpy.empty", rounds, _N)
    yield _group("buffers of a step", _frame(device), "attribute of a plain object", rounds, _N * 10)
    with tempfile.TemporaryDirectory() as folder:
        yield _group("a log of a step", _recording(Path(folder)), "nothing recorded", rounds, _N)
    yield _group("positions", _positions(), "checkpoint + rollback, 1 region live", rounds, _N)
    yield _drops(rounds, quick)
    yield _overhead(1000 if quick else 20000)
    if device == "cpu":
        yield _imports(3 if quick else 11)


def _group(
    title: str,
    variants: Mapping[str, Callable[[], object]],
    reference: str,
    rounds: int,
    n: int,
    synchronize: Callable[[], object] = lambda: None,
) -> Group:
    found = {name: Variant(body, n) for name, body in variants.items()}
    return harness.group(title, found, reference, rounds=rounds, warmup=2, synchronize=synchronize)


def _wait(device: str) -> Callable[[], object]:
    if device == "cpu":
        return lambda: None
    import torch

    return torch.cuda.synchronize


def _shapes() -> list[list[tuple[int, int]]]:
    """Return lists of shapes, none of which holds a shape of another: a list a round is a list of new shapes."""
    return [[(8 + i % 7, 16 + i + _N * number) for i in range(_N)] for number in range(64)]


def _check(array: Any, shape: tuple[int, ...]) -> None:
    if tuple(array.shape) != shape:
        raise WrongDataError(f"asked for {shape}, got {tuple(array.shape)}")


def _torch_new(device: str) -> dict[str, Callable[[], object]]:
    import torch

    arena = Arena(_CAPACITY, backend="torch", device=device)
    dtype = torch.float32
    buffer = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    typed = torch.empty(1 << 24, dtype=dtype, device=device)
    lists = _shapes()

    def timed(body: Callable[[list[tuple[int, int]]], object]) -> Callable[[], object]:
        turn = itertools.cycle(lists)
        return lambda: body(next(turn))

    def empty(shapes: list[tuple[int, int]]) -> None:
        for shape in shapes:
            torch.empty(shape, dtype=dtype, device=device)

    def sliced(shapes: list[tuple[int, int]]) -> None:
        at = 0
        for rows, columns in shapes:
            stop = at + rows * columns * 4
            buffer[at:stop].view(dtype).view(rows, columns)
            at = (stop + 255) & -256

    def strided(shapes: list[tuple[int, int]]) -> None:
        for shape in shapes:
            torch.as_strided(typed, shape, (shape[1], 1), 64)

    def strided_data(shapes: list[tuple[int, int]]) -> None:
        for shape in shapes:
            torch.as_strided(typed, shape, (shape[1], 1), 64).data  # noqa: B018 - its making is what is timed

    def arena_empty(shapes: list[tuple[int, int]]) -> None:
        with arena.scope():
            for shape in shapes:
                arena.empty(shape, dtype)

    def alloc_array(shapes: list[tuple[int, int]]) -> None:
        with arena.scope():
            for shape in shapes:
                arena.alloc(shape, dtype).array  # noqa: B018 - its making is what is timed

    _check(arena.empty((3, 5), dtype), (3, 5))
    _check(arena.alloc((3, 5), dtype).array, (3, 5))
    arena.reset()
    return {
        "torch.empty": timed(empty),
        "as_strided alone (the floor of any view)": timed(strided),
        "as_strided(...).data (with a version counter of its own)": timed(strided_data),
        "a buffer sliced by hand": timed(sliced),
        "arena.empty": timed(arena_empty),
        "arena.alloc(...).array": timed(alloc_array),
    }


def _torch_repeated(device: str) -> dict[str, Callable[[], object]]:
    import torch

    arena = Arena(_CAPACITY, backend="torch", device=device)
    dtype = torch.float32
    shapes = [(8, 16 * (i + 1)) for i in range(_N_IN_SCOPE)]
    prototype = torch.empty(8, 16, dtype=dtype, device=device)
    repeats = range(_N // _N_IN_SCOPE)

    def empty() -> None:
        for _ in repeats:
            for shape in shapes:
                torch.empty(shape, dtype=dtype, device=device)

    def data() -> None:
        for _ in repeats:
            for _shape in shapes:
                prototype.data  # noqa: B018 - its making is what is timed

    def arena_empty() -> None:
        for _ in repeats:
            with arena.scope():
                for shape in shapes:
                    arena.empty(shape, dtype)

    def alloc_array() -> None:
        for _ in repeats:
            with arena.scope():
                for shape in shapes:
                    arena.alloc(shape, dtype).array  # noqa: B018 - its making is what is timed

    def alloc() -> None:
        for _ in repeats:
            with arena.scope():
                for shape in shapes:
                    arena.alloc(shape, dtype)

    for _ in range(3):
        with arena.scope():
            addresses = [arena.empty(shape, dtype).data_ptr() for shape in shapes]
    if len(set(addresses)) < _N_IN_SCOPE:
        raise WrongDataError("two arrays of a scope have the same address")
    return {
        "torch.empty": empty,
        "tensor.data alone (the floor)": data,
        "scope + arena.empty": arena_empty,
        "scope + arena.alloc(...).array": alloc_array,
        "scope + arena.alloc, no array": alloc,
    }


def _numpy_new() -> dict[str, Callable[[], object]]:
    arena = Arena(_CAPACITY)
    lists = _shapes()
    buffer = np.empty(1 << 26, np.uint8)
    turn = {name: itertools.cycle(lists) for name in ("empty", "view", "arena", "alloc")}

    def empty() -> None:
        for shape in next(turn["empty"]):
            np.empty(shape, np.float32)

    def view() -> None:
        for shape in next(turn["view"]):
            np.ndarray(shape, np.float32, buffer, 256)

    def arena_empty() -> None:
        with arena.scope():
            for shape in next(turn["arena"]):
                arena.empty(shape, "float32")

    def alloc_array() -> None:
        with arena.scope():
            for shape in next(turn["alloc"]):
                arena.alloc(shape, "float32").array  # noqa: B018 - its making is what is timed

    return {
        "numpy.empty": empty,
        "numpy.ndarray(buffer=...) (the floor)": view,
        "arena.empty": arena_empty,
        "arena.alloc(...).array": alloc_array,
    }


class _Plain:
    q: Any


def _frame(device: str) -> dict[str, Callable[[], object]]:
    arena = Arena("1MiB", backend="torch", device=device)
    frame = arena.frame(q=((8, 16), "float32"))
    region = arena.alloc((8, 16), "float32")
    plain = _Plain()
    plain.q = region.array
    n = range(_N * 10)

    def attribute() -> None:
        for _ in n:
            plain.q  # noqa: B018 - the access is what is timed

    def of_frame() -> None:
        for _ in n:
            frame.q  # noqa: B018 - the access is what is timed

    def of_region() -> None:
        for _ in n:
            region.array  # noqa: B018 - the access is what is timed

    return {
        "attribute of a plain object": attribute,
        "frame.q": of_frame,
        "region.array, made before (checked)": of_region,
    }


def _recording(folder: Path) -> dict[str, Callable[[], object]]:
    """Time allocations and rollbacks with a log; opening it and closing its file are in the time."""
    shapes = [(8, 16 * (i + 1)) for i in range(_N_IN_SCOPE)]
    variants: dict[str, Callable[[], object]] = {}
    for name, path, sites in (
        ("nothing recorded", None, None),
        ("recorded in memory", None, True),
        ("recorded in memory, without sites", None, False),
        ("recorded to a .jsonl file", folder / "log.jsonl", True),
        ("recorded to a .csv file", folder / "log.csv", True),
    ):
        arena = Arena("1MiB")

        def body(arena: Arena = arena, path: Path | None = path, sites: bool | None = sites) -> None:
            with contextlib.nullcontext() if sites is None else arena.record(path, sites=sites):
                for _ in range(_N // _N_IN_SCOPE):
                    with arena.scope():
                        for shape in shapes:
                            arena.alloc(shape, "float32")

        variants[name] = body
    with arena.record() as trace:
        body(sites=None)
    n_allocs = sum(event.kind == "alloc" for event in trace.events)
    if n_allocs != _N_IN_SCOPE * (_N // _N_IN_SCOPE):
        raise WrongDataError(f"{n_allocs} allocations were recorded, of {_N}")
    return variants


def _positions() -> dict[str, Callable[[], object]]:
    variants: dict[str, Callable[[], object]] = {}
    for n_live in (1, 1000, 100_000):
        arena = Arena("64MiB", alignment=1)
        for _ in range(n_live):
            arena.alloc(1, "uint8")

        def body(arena: Arena = arena) -> None:
            for _ in range(_N):
                arena.rollback(arena.checkpoint())

        variants[f"checkpoint + rollback, {n_live} region{'s' if n_live > 1 else ''} live"] = body
    arena = Arena("1MiB")

    def scope() -> None:
        for _ in range(_N):
            with arena.scope():
                pass

    variants["an empty scope"] = scope
    return variants


def _drops(rounds: int, quick: bool) -> Group:
    """Time rollbacks that drop many regions; per region it should not depend on how many."""
    arena = Arena("64MiB", alignment=1)
    sizes = (10, 100, 1000) if quick else (10, 1000, 100_000)

    def drop(n: int) -> float:
        """Return the seconds of rollbacks that drop 1000 regions or more, each `n`."""
        taken = 0.0
        for _ in range(max(1, 1000 // n)):
            start = arena.checkpoint()
            for _ in range(n):
                arena.alloc(1, "uint8")
            began = perf_counter()
            arena.rollback(start)
            taken += perf_counter() - began
        return taken

    variants = {
        f"{n} regions dropped, each": Variant(
            functools.partial(drop, n), n * max(1, 1000 // n), seconds=lambda taken: float(taken)
        )
        for n in sizes
    }
    return harness.group(
        "rollback, per region dropped", variants, next(iter(variants)), rounds=min(rounds, 9)
    )


def _overhead(n: int) -> dict[str, Any]:
    """Count the bytes of Python objects that a live region costs."""
    rows = {}
    for name in ("arena.empty, array not kept", "arena.alloc, region kept"):
        arena = Arena("64MiB", alignment=1)
        kept: list[Any] = []
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(n):
            region = arena.alloc(1, "uint8")
            if name.startswith("arena.alloc"):
                kept.append(region)
        del region
        rows[name] = {"nbytes": (tracemalloc.get_traced_memory()[0] - before) / n}
        tracemalloc.stop()
    rows["arena.alloc, region kept"]["nbytes"] -= 8.0  # the list's own reference
    return {"title": "Python memory per live region", "reference": None, "rows": rows}


def _imports(rounds: int) -> Group:
    """Time imports, each in a process of its own, which measures itself."""

    def seconds_of(program: str) -> float:
        code = f"import time; a = time.perf_counter(); {program}; print(time.perf_counter() - a)"
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        return float(done.stdout)

    variants = {
        program: Variant(functools.partial(seconds_of, program), seconds=lambda taken: float(taken))
        for program in ("import numpy", "import numpy, ml_dtypes", "import gpuarena")
    }
    return harness.group("import", variants, "import numpy", rounds=rounds)
