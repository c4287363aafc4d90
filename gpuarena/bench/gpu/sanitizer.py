"""A program of ours under NVIDIA's compute-sanitizer, which sees every access of a kernel.

``python -m gpuarena.bench.gpu.sanitizer cuda:0`` runs the program alone. torch allocates each tensor by itself then
(PYTORCH_NO_CUDA_MEMORY_CACHING), and half of the program gives each region a buffer of its own, so that an access
behind one is seen.
"""

from __future__ import annotations

import re
import shutil
import sys
from functools import partial

import torch

from gpuarena.arena import Arena
from gpuarena.bench.device import Device, device_of
from gpuarena.bench.gpu._check import Check, NotMeasuredError, Probe
from gpuarena.bench.gpu._child import run_child
from gpuarena.debug import Debug
from gpuarena.errors import BackendError
from gpuarena.kv import KVCache, KVSpec, PagedKVCache, attend

__all__ = ["DONE", "checks", "n_errors", "program"]

MIB = 1 << 20
#: Seconds for the program under the sanitizer, which makes kernels several times slower, and their loading too.
LIMIT_S = 90.0
#: What the program prints at its end, so that one that stopped early is not taken for one without errors.
DONE = "the program ran to its end"
_SUMMARY = re.compile(r"^=+ ERROR SUMMARY: (\d+) errors?\b", re.MULTILINE)


def checks() -> list[Check]:
    """Return the checks of this module."""
    return [
        Check(f"compute-sanitizer, {tool}", partial(_run_under, tool), 40)
        for tool in ("memcheck", "initcheck")
    ]


def _run_under(tool: str, probe: Probe) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise NotMeasuredError("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    # Calls of the driver that fail are left out: libraries try them to see what a driver can do.
    options = ["--tool", tool, "--report-api-errors", "no"]
    program_of_ours = [sys.executable, "-m", "gpuarena.bench.gpu.sanitizer", probe.device.name]
    status, out, err = run_child(
        [sanitizer, *options, *program_of_ours],
        limit_s=LIMIT_S,
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    text = out + "\n" + err
    found = n_errors(text)
    if found is None:
        raise NotMeasuredError(f"compute-sanitizer ended with {status} and no summary: {_last_line(text)}")
    probe.figure("errors", found, "errors")
    probe.expect(
        found == 0, f"compute-sanitizer --tool {tool} found {found} errors, first: {_first_finding(text)}"
    )
    probe.expect(
        DONE in out, f"the program under compute-sanitizer ended early, with {status}: {_last_line(text)}"
    )


def n_errors(text: str) -> int | None:
    """Return the errors that the sanitizer's summaries add up to, one a process; None if there is none.

    >>> n_errors("========= ERROR SUMMARY: 1 error")
    1
    """
    found = [int(number) for number in _SUMMARY.findall(text)]
    return sum(found) if found else None


def _first_finding(text: str) -> str:
    """Return the first thing that the sanitizer says behind its name."""
    for line in text.splitlines():
        said = line.lstrip("= ").strip()
        if line.startswith("=====") and said and said != "COMPUTE-SANITIZER":
            return said
    return "nothing was said"


def _last_line(text: str) -> str:
    """Return the last line that is not the sanitizer's."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("=====")]
    return lines[-1] if lines else "nothing was said"


# -- the program --------------------------------------------------------------------------------------------------------


def program(device: Device) -> None:
    """Use an arena, views of it, caches on it and memory that grows, with kernels on all of them.

    Raises
    ------
    AssertionError
        The numbers are wrong.
    """
    for debug in (None, Debug(separate=True, on_live_arrays="ignore")):
        arena = Arena(8 * MIB, backend="torch", device=device.name, debug=debug or False)
        _use_regions(arena)
        _use_caches(arena)
    try:
        growing = Arena(1 << 30, backend="virtual:torch", device=device.name)
    except BackendError as error:
        print(f"no memory that grows: {error}")
    else:
        _use_regions(growing)
        growing.reset()
        growing.trim()
    device.synchronize()


def _use_regions(arena: Arena) -> None:
    # Numbers of elements that no vector of a kernel divides, so that what it does at the end is seen.
    x = arena.full((37, 101), 2, "float32")
    for number in range(3):
        with arena.scope():
            y = arena.full((37, 101), number, "float32", label="y")
            z = arena.empty((37, 101), "float32", label="z")
            torch.add(x, y, out=z)
            assert float(z.sum()) == 37 * 101 * (2 + number), "sums of whole regions"
            part = arena.from_array(z)[1:36, 3:98:5]
            assert float(part.array.sum()) == 35 * 19 * (2 + number), "a sum of a view"
            if not arena.grows:
                high = arena.full(1003, 1, "int8", side="high")
                assert int(high.sum()) == 1003, "a sum on the high end"
    mark = arena.checkpoint()
    bytes_ = arena.alloc(4096, "uint8", fill=255)
    assert int(bytes_.view("int32").array.sum()) == -1024, "a sum of another dtype"
    arena.rollback(mark)
    again = arena.zeros(1 << 12, "bfloat16")
    assert float(again.sum()) == 0, "memory that was used before"


def _use_caches(arena: Arena) -> None:
    spec = KVSpec.uniform(layers=2, kv_heads=2, head_dim=8, dtype="float32")
    with arena.scope():
        cache = KVCache(arena, spec, batch=1, max_tokens=19)
        new = arena.full((1, 2, 3, 8), 1, "float32")
        q = arena.full((1, 6, 3, 8), 1, "float32")
        for _ in range(6):
            for layer in range(2):
                keys, values = cache.append(layer, new, new)
                assert float(attend(q, keys, values).sum()) == q.numel(), "attention to ones"
        cache.truncate(4)
        keys, _ = cache.append(0, new, new)
        assert float(keys.sum()) == 7 * 16, "keys after going back"
    with arena.scope():
        pages = PagedKVCache(arena, spec, num_pages=8, page_size=4)
        one, other = pages.sequence(), pages.sequence()
        new = arena.full((2, 2, 5, 8), 1, "float32")
        q = arena.full((2, 6, 5, 8), 1, "float32")
        with pages.step([one, other], n_tokens=5) as step:
            for layer in range(2):
                step.write(layer, new, new)
                assert float(step.attend(layer, q).sum()) == q.numel(), "attention to pages of ones"


if __name__ == "__main__":
    program(device_of(sys.argv[1]))
    print(DONE)
