"""What the pages of a prompt hold, from the hashes of its blocks."""

from __future__ import annotations

__all__ = ["page_keys"]


def page_keys(prefix: tuple[int, ...], prompt: int, page_size: int, block_size: int) -> list[int]:
    """Return a number for each full page of a prompt; pages of equal numbers, behind equal pages, hold the same tokens.

    It is the hash of the block that the page lies in, which stands for that block and all before it; which part of the
    block it is follows from the pages before. The last block may be partial: its hash then stands for the tokens
    that there are, and so for each page that they fill.

    >>> page_keys((7, 8), prompt=1000, page_size=256, block_size=512)
    [7, 7, 8]

    Parameters
    ----------
    prefix : tuple of int
        Hashes, for each block of the prompt, or for the first ones.
    prompt : int
        Tokens.
    page_size : int
        Tokens; divides `block_size`.
    block_size : int
        Tokens for each hash.
    """
    per_block = block_size // page_size
    n_full = min(prompt // page_size, len(prefix) * per_block)
    return [prefix[index // per_block] for index in range(n_full)]
