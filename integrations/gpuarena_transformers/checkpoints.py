"""What an `ArenaCache` goes back to."""

from __future__ import annotations

from gpuarena.kv import KVCheckpoint
from gpuarena_transformers.state_group import StateCopy

__all__ = ["CacheCheckpoint"]


class CacheCheckpoint(KVCheckpoint):
    """A length of the cache, and copies of its states, made by `ArenaCache.checkpoint`.

    Attributes
    ----------
    n_tokens : int
        Tokens a row; 0 where only states are held, since those count none.
    n_rows : int or None
        Rows in use.
    states : StateCopy
        Ordinary tensors, freed with the checkpoint. Keys and values are not copied.
    """

    __slots__ = ("states",)

    def __init__(self, mark: KVCheckpoint, states: StateCopy) -> None:
        super().__init__(mark._group, mark._slot, mark._serial, mark.n_tokens, mark.n_rows)
        self.states = states

    @property
    def nbytes(self) -> int:
        """Bytes of the copies: 0 for a cache without states."""
        return self.states.nbytes

    def __repr__(self) -> str:
        return f"CacheCheckpoint(n_tokens={self.n_tokens}, nbytes={self.nbytes})"
