from __future__ import annotations

import subprocess
import sys

import pytest

from gpuarena import Arena
from gpuarena.errors import ArenaClosedError, LiveArraysError

# `Arena.trim` gives memory back to the system: an array that still shows it would end the process.

SCRIPT = """
import os, sys
import numpy as np
import torch
from gpuarena import Arena
from gpuarena.errors import LiveArraysError

def run(backend, make):
    arena = Arena("4MiB", backend=backend)
    checkpoint = arena.checkpoint()
    region = arena.alloc(1 << 21, "uint8", fill=7)
    kept = eval(make, dict(globals(), arena=arena, region=region))
    arena.rollback(checkpoint)
    del region
    try:
        arena.trim()
    except LiveArraysError:
        return "refused"
    return f"given back, and read {int(kept[1 << 20])}"  # ends the process if the page is gone

for line in sys.stdin:
    backend, make = line.rstrip().split(" ", 1)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            print(run(backend, make), flush=True)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print("ended by signal", os.WTERMSIG(status))
"""

CASES = [
    ("virtual", "region.array"),
    ("virtual", "region[10:].array[10:]"),
    ("virtual", "region.as_torch()[10:]"),
    ("virtual", "memoryview(region.array)"),
    ("virtual", "np.from_dlpack(region)"),
    ("virtual:torch", "region.array"),
    ("virtual:torch", "region.as_numpy()"),
    ("virtual:torch", "torch.no_grad()(lambda: region.array[10:])()"),
    ("virtual:torch", "torch.inference_mode()(lambda: region.array[10:])()"),
    ("virtual:torch", "np.from_dlpack(region.array)"),
    ("virtual", "np.asarray(region)"),
    ("virtual", "(region.array, region.extend((1 << 21) + 1))[0]"),
    ("virtual:torch", "np.asarray(region)"),
    ("virtual:torch", "region.array.numpy()"),
    ("virtual:torch", "region.array.detach()"),
    ("virtual:torch", "region.array.data"),
    ("virtual:torch", "region.array.view(torch.int8)"),
    ("virtual:torch", "region.view('int8').array"),
]


@pytest.fixture(scope="module")
def outcomes():
    pytest.importorskip("torch")
    cases = CASES
    lines = "".join(f"{backend} {make}\n" for backend, make in cases)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=lines, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    return dict(zip(cases, done.stdout.splitlines(), strict=True))


@pytest.mark.skipif(sys.platform == "win32", reason="the cases run in forked processes")
@pytest.mark.parametrize("case", CASES, ids=[" ".join(case) for case in CASES])
def test_trim_refuses_while_an_array_of_a_dropped_region_is_kept(outcomes, case):
    assert outcomes[case] == "refused"


@pytest.fixture
def arena():
    return Arena("4MiB", backend="virtual")


def test_trim_gives_back_what_lies_above_the_pointer(arena):
    assert arena.stats.committed < 1 << 20
    kept = arena.alloc(1 << 16, "uint8", fill=3)
    with arena.scope():
        arena.alloc(1 << 21, "uint8", fill=7)
    before = arena.stats.committed
    assert before >= (1 << 21) + (1 << 16)
    freed = arena.trim()
    assert freed == before - arena.stats.committed > 0
    assert arena.stats.committed >= 1 << 16
    assert arena.trim() == 0
    assert (kept.array == 3).all()
    assert (arena.alloc(1 << 21, "uint8", fill=8).array == 8).all()


def test_trim_spares_what_is_live(arena):
    region = arena.alloc(1 << 21, "uint8", fill=7)
    array = region.array
    arena.trim()
    assert (array == 7).all()


def test_a_refused_trim_names_the_labels_and_changes_nothing(arena):
    with arena.scope():
        kept = arena.empty(1 << 20, "uint8", label="logits")
    before = arena.stats
    with pytest.raises(LiveArraysError, match="'logits'") as caught:
        arena.trim()
    assert caught.value.labels == ["logits"]
    assert arena.stats == before
    kept[-1] = 1
    del kept
    assert arena.trim() > 0


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda child: [child], id="ended by the rollback"),
        pytest.param(lambda child: child.close(), id="closed before"),
        pytest.param(lambda child: None, id="nobody has the child"),
    ],
)
def test_an_array_of_a_child_that_ended_is_refused_too(arena, end):
    with arena.scope():
        child = arena.child("1MiB", name="child")
        array = child.empty(1 << 19, "uint8", label="inner")
        held = end(child)
        del child
    with pytest.raises(LiveArraysError, match="'inner'"):
        arena.trim()
    array[-1] = 1
    del held


def test_other_arenas_have_nothing_to_give_back():
    arena = Arena(1 << 20)
    assert arena.trim() == 0
    assert arena.stats.committed == arena.capacity
    arena.close()
    with pytest.raises(ArenaClosedError, match="trim"):
        arena.trim()
