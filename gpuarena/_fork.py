"""What becomes of arenas in a forked child.

Memory of the host is the child's own copy, and stays usable; a device's is out of reach, and must not be freed there.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuarena.arena import Arena

_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
_unreachable: list[Any] = []  # never freed: the child must not call the device's library


def register(arena: Arena) -> None:
    """Remember an arena, in case the process forks."""
    _arenas.add(arena)


def _after_in_child() -> None:
    locks: dict[int, Any] = {}
    for arena in list(_arenas):
        # The thread that may have held the lock does not exist here; a child arena shares its parent's lock.
        arena._lock = locks.setdefault(id(arena._lock), threading.RLock())
        for hook in arena._hooks:
            hook.forked()
        if not arena._closed and not arena._backend.survives_fork:
            _unreachable.append((arena._backend, list(arena._low.arrays), list(arena._high.arrays)))
            arena._forked = True
            if arena._dependents is not None:
                arena._dependents.let_go()
            arena._hooks, arena._drop_hooks = [], []  # none of them may touch the device
            arena._close(None)


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_after_in_child)
