"""The states of caches in files.

>>> import os, tempfile
>>> from gpuarena import Arena
>>> from gpuarena.kv import KVCache, KVSpec
>>> spec = KVSpec.uniform(layers=2, kv_heads=2, head_dim=4, dtype="float32")
>>> cache = KVCache(Arena("1MiB"), spec, batch=1, max_tokens=16)
>>> with tempfile.TemporaryDirectory() as folder:
...     path = os.path.join(folder, "prompt.safetensors")
...     cache.save(path, metadata={"model": "tiny"})
...     read_state(path).metadata
{'model': 'tiny'}

`KVCache`, `LaneCache` and `PagedKVCache` have `save` and `load`, the first two `restore` as well. A file is of the
safetensors format: ``safetensors.safe_open(path, framework="pt")`` reads it, and nothing of it is ever executed. Of a
`KVCache`, tensor ``layers.N.keys`` is ``[rows, kv_heads, n_held, dim]``, for each layer that owns keys; of lanes and
pages, ``sequences.K.layers.N.keys`` is ``[kv_heads, length, dim]``; values likewise. Quantised layers have
``key_codes``, ``key_scales`` and so on instead. The metadata are texts:

================================  ==================================================================================
``format``, ``format_version``    ``gpuarena.kv`` and ``1``
``library_version``               of the library that wrote it
``kind``, ``batch``, ``rows``,    fields of `SavedState`, the last four as JSON
``max_tokens``, ``held``
``spec``                          JSON, every field of every layer
``user.*``                        what was given to `save`
================================  ==================================================================================

A file has no checksum: a header that does not fit its data is found, keys and values that were changed are not. While a
file is read nobody may write to it, or the process may end; `save` does not, it puts a new file in its place.
"""

from __future__ import annotations

import os

from gpuarena.errors import StateError
from gpuarena.kv.state._reader import StateReader
from gpuarena.kv.state._saved import SavedState, read_saved
from gpuarena.kv.state._writer import as_path

__all__ = ["SavedState", "StateError", "read_state"]


def read_state(path: str | os.PathLike[str]) -> SavedState:
    """Return what a saved file says that it holds: spec, size, tokens, and the metadata of the user.

    The keys and values are not looked at.

    Raises
    ------
    StateError
        It is no such file, or it does not hold what it says.
    ArgumentTypeError, BackendError, OSError
        The path is none; safetensors is not installed; or the file cannot be read.
    """
    with StateReader(as_path(path)) as reader:
        return read_saved(reader)
