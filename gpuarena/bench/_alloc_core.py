"""What belongs to an arena and to no library: buffers of a step, logs, going back, memory of Python, imports.

Accesses, logs and rollbacks are made again and again on purpose: each is of one thing that a loop meets in every step.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from gpuarena import Arena
from gpuarena.bench import harness
from gpuarena.bench._alloc_arrays import N_IN_SCOPE, N
from gpuarena.bench._collect import Maker
from gpuarena.bench.device import Device
from gpuarena.bench.harness import Group, Variant, WrongDataError

__all__ = ["core_groups"]


def core_groups(device: Device, rounds: int, quick: bool) -> Iterator[Maker]:
    """Return the groups; those of imports only on a CPU, where processes need no device."""
    yield "buffers of a step", partial(_frame, device, rounds)
    yield "a log of a step", partial(_recording, rounds)
    yield "positions", partial(_positions, rounds)
    yield "rollback, per region dropped", partial(_drops, min(rounds, 9), quick)
    yield "Python memory per live region", partial(_overhead, 1000 if quick else 20000)
    if not device.is_gpu:
        yield "import", partial(_imports, 1 if quick else 11)


def _group(
    title: str,
    bodies: Mapping[str, Callable[[], object]],
    reference: str,
    rounds: int,
    n: int,
    synchronize: Callable[[], object] = lambda: None,
) -> Group:
    variants = {name: Variant(body, n) for name, body in bodies.items()}
    return harness.group(title, variants, reference, rounds=rounds, warmup=2, synchronize=synchronize)


class _Plain:
    q: Any


def _frame(device: Device, rounds: int, title: str) -> Group:
    arena = Arena("1MiB", backend="torch", device=device.name)
    frame = arena.frame(q=((8, 16), "float32"))
    region = arena.alloc((8, 16), "float32")
    plain = _Plain()
    plain.q = region.array
    n = range(N * 10)

    def attribute() -> None:
        for _ in n:
            plain.q  # noqa: B018 - the access is what is timed

    def of_frame() -> None:
        for _ in n:
            frame.q  # noqa: B018 - the access is what is timed

    def of_region() -> None:
        for _ in n:
            region.array  # noqa: B018 - the access is what is timed

    bodies = {
        "attribute of a plain object": attribute,
        "frame.q": of_frame,
        "region.array, made before (checked)": of_region,
    }
    return _group(title, bodies, "attribute of a plain object", rounds, N * 10, device.synchronize)


def _recording(rounds: int, title: str) -> Group:
    with tempfile.TemporaryDirectory() as folder:
        return _group(title, _logs(Path(folder)), "nothing recorded", rounds, N)


def _logs(folder: Path) -> dict[str, Callable[[], object]]:
    """Time allocations and rollbacks with a log; opening it and closing its file are in the time."""
    shapes = [(8, 16 * (i + 1)) for i in range(N_IN_SCOPE)]
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
                for _ in range(N // N_IN_SCOPE):
                    with arena.scope():
                        for shape in shapes:
                            arena.alloc(shape, "float32")

        variants[name] = body
    with arena.record() as trace:
        body(sites=None)
    n_allocs = sum(event.kind == "alloc" for event in trace.events)
    if n_allocs != N_IN_SCOPE * (N // N_IN_SCOPE):
        raise WrongDataError(f"{n_allocs} allocations were recorded, of {N}")
    return variants


def _positions(rounds: int, title: str) -> Group:
    variants: dict[str, Callable[[], object]] = {}
    for n_live in (1, 1000, 100_000):
        arena = Arena("64MiB", alignment=1)
        for _ in range(n_live):
            arena.alloc(1, "uint8")

        def body(arena: Arena = arena) -> None:
            for _ in range(N):
                arena.rollback(arena.checkpoint())

        variants[f"checkpoint + rollback, {n_live} region{'s' if n_live > 1 else ''} live"] = body
    arena = Arena("1MiB")

    def scope() -> None:
        for _ in range(N):
            with arena.scope():
                pass

    variants["an empty scope"] = scope
    return _group(title, variants, "checkpoint + rollback, 1 region live", rounds, N)


def _drops(rounds: int, quick: bool, title: str) -> Group:
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
            partial(drop, n), n * max(1, 1000 // n), seconds=lambda taken: float(taken)
        )
        for n in sizes
    }
    return harness.group(title, variants, next(iter(variants)), rounds=rounds)


def _overhead(n: int, title: str) -> Group:
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
    return {"title": title, "reference": None, "rows": rows}


def _imports(rounds: int, title: str) -> Group:
    """Time imports, each in a process of its own, which measures itself."""

    def seconds_of(program: str) -> float:
        code = f"import time; a = time.perf_counter(); {program}; print(time.perf_counter() - a)"
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        return float(done.stdout)

    variants = {
        program: Variant(partial(seconds_of, program), seconds=lambda taken: float(taken))
        for program in ("import numpy", "import numpy, ml_dtypes", "import gpuarena")
    }
    return harness.group(title, variants, "import numpy", rounds=rounds)
