"""Taking the memory of a cache as a whole, or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from gpuarena import _bump, _messages
from gpuarena.arena import Arena
from gpuarena.errors import OutOfMemoryError
from gpuarena.kv.spec import SCRATCH_ALIGNMENT

__all__ = ["taken_whole"]


@contextlib.contextmanager
def taken_whole(arena: Arena, label: str, nbytes: Callable[[], int]) -> Iterator[None]:
    """Give back what the block took of `arena` if it raises.

    `nbytes` returns what the whole block takes at most. Where memory is missing the error counts that, since a reader
    who makes room for the one region that did not fit would only come to the next.
    """
    start = arena.checkpoint()
    try:
        yield
    except OutOfMemoryError as error:
        arena.rollback(start)
        align = max(arena.alignment, SCRATCH_ALIGNMENT)
        whole, offset = nbytes(), _bump.align_up(arena._low.top, align)
        if type(error) is not OutOfMemoryError or offset + whole <= arena._high.top:
            raise  # something else than room in the arena is missing
        raise _messages.out_of_memory(arena, arena._low, whole, offset, label, align) from error
    except BaseException:
        arena.rollback(start)
        raise
