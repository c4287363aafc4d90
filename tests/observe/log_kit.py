"""Random programs of calls that leave events in a log."""

from __future__ import annotations

import contextlib

from hypothesis import strategies as st

from gpuarena.errors import ArenaError

#: What a program does to an arena; each step has all the arguments, and takes what it needs of them.
KINDS = [
    "alloc", "alloc", "alloc", "alloc", "extend", "checkpoint", "rollback", "reset", "frame", "pin", "fail",
    "open", "open", "rewind", "leave", "leave", "leave outer", "raise", "spill", "restore",
]  # fmt: skip
CAPACITY = 2048


def programs(kinds=KINDS, max_size=30):
    return st.lists(
        st.tuples(
            st.sampled_from(kinds),
            st.sampled_from(["low", "high"]),
            st.integers(0, 60),
            st.sampled_from(["uint8", "float32", "int64"]),
            st.sampled_from([None, 8, 64]),
            st.none() | st.text(max_size=3),
        ),
        max_size=max_size,
    )


class Runner:
    """Runs programs on an arena, one after the other."""

    def __init__(self, arena):
        self.arena = arena
        self.checkpoints = {"low": [], "high": []}
        self.scopes = []
        self.spills = []
        self.last = None

    def run(self, program, after=lambda: None):
        for step in program:
            with contextlib.suppress(ArenaError):  # refused, which changes nothing
                self.step(*step)
            after()

    def step(self, kind, side, n, dtype, align, label):
        arena = self.arena
        if kind == "alloc":
            self.last = arena.alloc(n, dtype, align=align, side=side, label=label)
        elif kind == "fail":
            arena.alloc(n + 1000, dtype, align=align, side=side, label=label)
        elif kind == "extend" and self.last is not None:
            self.last = self.last.extend(n + 1)
        elif kind == "checkpoint":
            self.checkpoints[side].append(arena.checkpoint(side))
        elif kind == "rollback" and self.checkpoints[side]:
            arena.rollback(self.checkpoints[side].pop())
        elif kind == "reset":
            arena.reset()
        elif kind == "frame":
            arena.frame({"x": (n, dtype), "y": (n * 10, dtype)}, side=side)
        elif kind == "pin":
            with arena.pin() as pin, arena.scope(label, side=side):
                arena.alloc(n, dtype, side=side)
            pin.release()
        elif kind == "open":
            self.scopes.append(arena.scope(label, side=side).__enter__())
        elif kind == "rewind" and self.scopes:
            arena.rollback(self.scopes[-1]._checkpoint)
        elif kind == "leave" and self.scopes:
            self.scopes.pop().__exit__(None, None, None)
        elif kind == "leave outer" and self.scopes:
            self.scopes.pop(0).__exit__(None, None, None)
        elif kind == "raise" and self.scopes:
            error = KeyError()
            self.scopes.pop().__exit__(KeyError, error, None)
        elif kind == "spill" and self.checkpoints[side]:
            self.spills.append(arena.spill(self.checkpoints[side][-1]))
        elif kind == "restore" and self.spills:
            self.spills.pop().restore()
