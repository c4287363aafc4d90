from __future__ import annotations

import os
import subprocess
import sys

import pytest


def modules_after(code):
    """Which of the big libraries are loaded after `code` in a new interpreter."""
    code += "\nimport sys\nprint(*({'torch', 'cupy', 'transformers', 'hypothesis'} & sys.modules.keys()))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_library_loads_no_framework():
    assert modules_after("import gpuarena, gpuarena.errors, gpuarena.stats, gpuarena.backends") == set()


def test_using_a_host_arena_loads_no_framework():
    code = """
import pickle, copy, numpy as np, gpuarena
with gpuarena.Arena("1MiB") as arena:
    x = arena.alloc((4, 4), "bfloat16", fill=1)
    x[1:, ::2] = np.ones((3, 2))
    with arena.scope("step"):
        y = arena.from_array(x)
        y[0] = [1, 2, 3, 4]
    try: y.array
    except gpuarena.StaleRegionError: pass
    try: copy.copy(x)
    except gpuarena.ArenaError: pass
    try: x.__dlpack__()
    except BufferError: pass
    try: arena.alloc(2**40, "float64")
    except gpuarena.OutOfMemoryError: pass
    np.asarray(x); np.from_dlpack(arena.alloc(4, "float32")); x.view("uint8").as_numpy()
    gpuarena.Arena.from_buffer(bytearray(1024)).alloc(4, "complex64", fill=1j)
    repr((arena, x, y, arena.stats, arena.by_label(), arena.checkpoint()))
"""
    assert modules_after(code) == set()


def test_asking_for_a_backend_loads_its_library_and_no_other():
    pytest.importorskip("torch")
    assert modules_after(
        "import gpuarena; gpuarena.Arena(64, backend='torch').alloc(4, 'float32', fill=0)"
    ) == {"torch"}
