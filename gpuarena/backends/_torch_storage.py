"""A torch storage that cannot be copied or moved by accident.

Many tensors share the storage of an arena. torch pickles, deep-copies and shares whole storages, so saving a small
tensor would silently write all of the arena, and moving one to shared memory would move the arena's address.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch

from gpuarena.errors import NotCopyableError

#: Frames between `torch.save` and the question how long a storage is.
_DEPTH = 4


class ArenaStorage(torch.UntypedStorage):
    """The storage of an arena, for all tensors and views on it."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotCopyableError(
            "this tensor lies in an arena, and torch would copy, save or move the storage of the whole arena; use "
            "tensor.clone() first, which holds the tensor's own bytes only"
        )

    __deepcopy__ = _refuse
    __reduce__ = _refuse
    __reduce_ex__ = _refuse
    clone = _refuse
    resize_ = _refuse
    share_memory_ = _refuse
    # What torch.multiprocessing calls to send a tensor to another process.
    _share_fd_cpu_ = _refuse
    _share_filename_cpu_ = _refuse
    _share_cuda_ = _refuse

    def nbytes(self) -> int:
        """Return the bytes of the arena; refuse when `torch.save` asks, which has no hook of its own."""
        frame = sys._getframe(1)
        for _ in range(_DEPTH):
            if frame.f_globals.get("__name__") == "torch.serialization":
                self._refuse()
            if frame.f_back is None:
                break
            frame = frame.f_back
        return super().nbytes()


def guard(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Make a storage that belongs to an arena alone an `ArenaStorage`, in place; return it.

    Its class is changed because torch hands out the same Python object for all tensors of a storage, and has no
    way to make one of another class over memory that exists.
    """
    storage.__class__ = ArenaStorage
    return storage
