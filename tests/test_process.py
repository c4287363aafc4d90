from __future__ import annotations

import itertools
import os
import textwrap

import pytest
from process_kit import run_named

# The end of a process, and of everything else. Forks are in test_fork.py.

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the cases run in forked processes")

# -- exit -------------------------------------------------------------------------------------------------------

MADE = """
arena = Arena(1 << 16, {options})
scope = arena.scope("open").__enter__()
checkpoint = arena.checkpoint()
things = dict(
    region=arena.alloc((4, 4), "float32", fill=1, label="region"),
    array=arena.empty(4, "float32"),
    view=arena.alloc((4, 4), "float32")[1:, ::2].array,
    numpy=arena.alloc(4, "float32", fill=1).as_numpy()[1:],
    child=arena.child(1024),
    frame=arena.frame(q=(4, "float32")),
    steps=FrameArenas(2, 512, arena=arena),
    spilled=None,
)
things["inner"] = things["child"].alloc(4, "float32", fill=2).array
things["grandchild"] = things["child"].child(128).frame(x=(4, "float32"))
"""
ENDS = {
    "nothing done": "",
    "arena first": "del arena",
    "arena last": "things.clear(); del checkpoint, scope",
    "closed": "arena.close()",
    "cycle": "things['self'] = things; things['arena'] = arena; del arena, things, scope, checkpoint",
    "kept by a builtin": "import builtins; builtins.kept = (arena, things)",
    "running": "profile = arena.profile().__enter__(); trace = arena.record().__enter__()",
    "pinned": "pin = arena.pin('graph').__enter__(); arena.alloc(4, 'uint8'); pin.__exit__(None, None, None)",
    "used at exit": "import atexit; atexit.register(lambda: things['view'].sum() + arena.stats.used + len(repr(arena)))",
    "generator": textwrap.dedent("""
        def generate():
            with arena.scope("generator"), arena.profile():
                while True:
                    yield arena.alloc(4, "uint8")
        generator = generate()
        next(generator)
    """),
    "thread": textwrap.dedent("""
        import threading, time
        def loop():
            while True:
                try:
                    with arena.scope():
                        arena.alloc(4, "uint8", fill=1)
                except ArenaError:
                    return
                time.sleep(1e-3)
        arena.rollback(checkpoint)
        things.clear()
        threading.Thread(target=loop, daemon=True).start()
        time.sleep(0.01)
    """),
}
OPTIONS = {
    "host": "",
    "debug": "debug=Debug(on_live_arrays='ignore')",
    "separate": "debug=Debug(separate=True, on_live_arrays='ignore')",
    "torch": "backend='torch'",
    "torch debug": "backend='torch', debug=Debug(on_live_arrays='ignore')",
    "device": "backend=FakeDevice()",
    "virtual": "backend='virtual'",
    "virtual torch": "backend='virtual:torch'",
}
FEW = ["nothing done", "cycle"]  # an exit with torch takes a second
EXITS = [
    (options, end)
    for options, end in itertools.product(OPTIONS, ENDS)
    if options in ("host", "debug") or end in FEW or (end == "closed" and "torch" not in options)
]


@pytest.fixture(scope="module")
def exits():
    return run_named({case: MADE.format(options=OPTIONS[case[0]]) + ENDS[case[1]] for case in EXITS})


@pytest.mark.parametrize(("options", "end"), EXITS)
def test_a_process_ends_quietly_whatever_is_still_alive(exits, options, end):
    assert exits[options, end] == (0, "")


# -- memory -----------------------------------------------------------------------------------------------------

LEAK = """
import gc, weakref
gc.collect()
gc.disable()
refs = []
def use():
    arena = Arena(1 << 16, {options})
    with arena.record() as trace, arena.profile() as profile:
        checkpoint = arena.checkpoint()
        with arena.scope("step"), arena.scratch(conflicts=[{conflicts}]) as tmp:
            region = tmp.alloc((4, 4), "float32", fill=1)
            region[1:, ::2].array
            region.as_numpy()
        child = arena.child(1024)
        inner = child.child(128)
        frame = inner.frame(x=(4, "float32"))
        frame.x
        arena.rollback(checkpoint)
        steps = FrameArenas(2, 512, arena=arena)
        steps.advance().alloc(4, "uint8")
        for call in (lambda: region.array, lambda: frame.x, lambda: arena.alloc(1 << 20, "uint8"), lambda: inner.alloc(1, "uint8")):
            try:
                call()
            except ArenaError:
                pass
        with arena.pin() as pin:
            pass
        pin.release()
        try:
            with arena.scope():
                raise KeyError
        except KeyError:
            pass
        start = arena.checkpoint()
        region = arena.alloc(4, "uint8")
        spilled = arena.spill(start)
        spilled.restore()
    {close}
    refs.extend(map(weakref.ref, (arena, region, child, inner, frame, trace, profile, steps, spilled, arena._backend)))
use()
left = [ref() for ref in refs if ref() is not None]
print([type(thing).__name__ for thing in left] or "well", flush=True)
os._exit(0)
"""
LEAKS = {
    (options, close): LEAK.format(
        options=OPTIONS[options], close=close or "pass", conflicts="" if "virtual" in options else "arena"
    )
    for options in OPTIONS
    for close in ("", "arena.close()")
}


@pytest.fixture(scope="module")
def leaks():
    return run_named(LEAKS)


@pytest.mark.parametrize("close", ["", "arena.close()"], ids=["left", "closed"])
@pytest.mark.parametrize("options", OPTIONS)
def test_everything_is_freed_by_reference_counting_alone(leaks, options, close):
    assert leaks[options, close] == (0, "well\n")
