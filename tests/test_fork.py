from __future__ import annotations

import os
import textwrap

import pytest
from process_kit import run_named

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")

IN_CHILD = """
import threading
child = os.fork()
if not child:
    try:
{code}
        print("well", flush=True)
    finally:
        os._exit(0)
os.waitpid(child, 0)
os._exit(0)
"""


def in_forked_child(before, code):
    return textwrap.dedent(before) + IN_CHILD.format(code=textwrap.indent(textwrap.dedent(code), " " * 8))


HELD = """
import threading
entered, leave = threading.Event(), threading.Event()
def hold():
    with arena._lock:
        entered.set()
        leave.wait()
threading.Thread(target=hold, daemon=True).start()
entered.wait()
"""
USE = """
assert child_arena.alloc(4, "uint8", fill=3).array.tolist() == [3] * 4
assert region.array.tolist() == [7] * 4
with arena.scope("in the child"):
    arena.alloc(4, "uint8", fill=1)
    arena.empty(4, "uint8")
assert frame.x.tolist() == [0] * 4
arena.rollback(checkpoint)
assert child_arena.closed
assert region.array.tolist() == [7] * 4
arena.check()
arena.close()
"""
ARENA = """
arena = Arena(1 << 16, {options})
region = arena.alloc(4, "uint8", fill=7)
checkpoint = arena.checkpoint()
child_arena = arena.child(1024)
frame = arena.frame(x=(4, "uint8"))
frame.x[...] = 0
"""
DEVICE = """
device = FakeDevice()
def factory(nbytes, *, alignment, **options):
    made = device(nbytes, alignment=alignment)
    made.survives_fork = False
    return made
arena = Arena(1 << 16, backend=factory, name="kv")
region = arena.alloc((4,), "uint8", fill=7)
part = region[1:]
checkpoint = arena.checkpoint()
array = arena.alloc(4, "uint8", fill=8, label="kept").array
child_arena = arena.child(1024)
inner = child_arena.alloc(4, "uint8", fill=1)
scope = arena.scope("open").__enter__()
high = arena.checkpoint("high")
arena.alloc(4, "uint8", side="high")
spilled = arena.spill(high)
frame = arena.frame(x=(4, "uint8"))
pin = arena.pin()
scratch = arena.scratch()
profile = arena.profile().__enter__()
trace = arena.record().__enter__()
steps = None
"""
REFUSED = """
calls = dict(
    alloc=lambda: arena.alloc(1, "uint8"), empty=lambda: arena.empty(1, "uint8"),
    zeros=lambda: arena.zeros(1, "uint8"), full=lambda: arena.full(1, 1, "uint8"),
    from_array=lambda: arena.from_array([1]), checkpoint=arena.checkpoint,
    rollback=lambda: arena.rollback(checkpoint), keep=lambda: arena.keep(checkpoint), scope=arena.scope,
    reset=arena.reset, check=arena.check, trim=arena.trim, pin=arena.pin, enter_pin=pin.__enter__,
    scratch=arena.scratch, enter_scratch=scratch.__enter__, child=lambda: arena.child(16),
    frame=lambda: arena.frame(x=(1, "uint8")), spill=lambda: arena.spill(checkpoint), restore=spilled.restore,
    with_=arena.__enter__, leave=lambda: scope.__exit__(None, None, None),
    array=lambda: region.array, slice=lambda: region[0], write=lambda: region.__setitem__(0, 1),
    numpy=region.as_numpy, dlpack=region.__dlpack__, part=lambda: part.array,
    reshape=lambda: region.reshape(2, 2), view=lambda: region.view("int8"), extend=lambda: region.extend(5),
    profile=lambda: arena.profile().__enter__(), record=lambda: arena.record().__enter__(),
    child_alloc=lambda: child_arena.alloc(1, "uint8"), child_region=lambda: inner.array,
    child_checkpoint=child_arena.checkpoint,
)
for name, call in calls.items():
    try:
        call()
    except ForkedError as error:
        assert "spawn" in str(error) and "cannot reach" in str(error), error
    else:
        print(name, "was not refused")
"""
FORKS = {
    "host, lock held by another thread": in_forked_child(ARENA.format(options="") + HELD, USE),
    "torch, lock held by another thread": in_forked_child(
        ARENA.format(options="backend='torch'") + HELD, USE
    ),
    "debug, lock held by another thread": in_forked_child(
        ARENA.format(options="debug=Debug(on_live_arrays='ignore')") + HELD, USE
    ),
    "virtual, lock held by another thread": in_forked_child(
        ARENA.format(options="backend='virtual'") + HELD, USE
    ),
    "host, lock held by the forking thread": ARENA.format(options="")
    + "with arena._lock:\n"
    + textwrap.indent(in_forked_child("", USE), "    "),
    "host, fork of a fork": in_forked_child(
        ARENA.format(options=""),
        "if not os.fork():\n" + textwrap.indent(USE, "    ") + "    os._exit(0)\nos.wait()",
    ),
    "host, the parent goes on": ARENA.format(options="")
    + "if not os.fork():\n    arena.reset()\n    region_ = arena.alloc(4, 'uint8', fill=9)\n    os._exit(0)\nos.wait()\n"
    + USE
    + "print('well')",
    "device, every call": in_forked_child(DEVICE, REFUSED),
    "device, frame": in_forked_child(
        DEVICE,
        """
        try:
            frame.x
            print("was not refused")
        except ForkedError:
            pass
        """,
    ),
    "device, close": in_forked_child(
        DEVICE,
        """
        assert arena.closed and child_arena.closed
        arena.close()
        child_arena.close()
        profile.__exit__(None, None, None)
        trace.__exit__(None, None, None)
        pin.release()
        assert not region.is_live and not inner.is_live and not frame.is_live
        assert (region.shape, region.nbytes, region.label) == ((4,), 4, None)
        assert "closed" in repr(arena) and "stale" in repr(region) and "stale" in repr(frame)
        assert arena.stats.n_regions == 0 and arena.by_label() == {}
        """,
    ),
    "device, nothing is released": in_forked_child(
        DEVICE,
        """
        assert (device.n_released, device.n_freed) == (0, 0)
        arena.close()
        del arena, region, part, array, child_arena, inner, scope, spilled, frame, pin, scratch, profile, trace
        del checkpoint, high
        import gc
        gc.collect()
        assert (device.n_released, device.n_freed) == (0, 0)
        """,
    ),
    "device, a new arena in the child": in_forked_child(
        DEVICE, "assert Arena(1024, backend=factory).alloc(4, 'uint8', fill=1).array.tolist() == [1] * 4"
    ),
    "device, the parent goes on": DEVICE
    + "if not os.fork():\n    arena.close()\n    os._exit(0)\nos.wait()\n"
    + "assert not arena.closed\nassert region.array.tolist() == [7] * 4\nassert array.tolist() == [8] * 4\n"
    + "assert inner.array.tolist() == [1] * 4\nspilled.restore()\narena.alloc(1, 'uint8')\n"
    + "profile.__exit__(None, None, None)\ntrace.__exit__(None, None, None)\narena.close()\n"
    + "assert device.n_released == 1\nprint('well')",
    "device, closed before": in_forked_child(
        DEVICE + "arena.close()\n",
        """
        try:
            arena.alloc(1, "uint8")
        except ArenaClosedError as error:
            assert "is closed" in str(error)
        arena.close()
        """,
    ),
    "device, debug": in_forked_child(
        DEVICE.replace('name="kv"', 'name="kv", debug=Debug(on_live_arrays="ignore")'),
        """
        try:
            arena.check()
        except ForkedError:
            pass
        try:
            region.array
        except ForkedError:
            pass
        arena.close()
        assert device.n_released == 0
        """,
    ),
    "device, the child ends as programs do": DEVICE + "if os.fork():\n    os.wait()\n    print('well')\n",
}


@pytest.fixture(scope="module")
def forks():
    return run_named(FORKS)


@pytest.mark.parametrize("case", FORKS)
def test_a_fork_gets_its_own_host_memory_and_no_device_memory(forks, case):
    assert forks[case] == (0, "well\n")
