"""What a file says of the cache it was written from, beside what `gpuarena.kv.state` describes.

`gpuarena.kv.state.read_state` reads what such a file says of itself. Beside the fields that are described there, its
metadata have these, as JSON:

==================  ====================================================================================
``cache_layers``    of each layer of ``spec`` its number in the cache, and ``"kv"`` or ``"indexer"``
``beside``          name, dtype and shape of each tensor that is not of ``spec``, and which states have begun
``model``           `model_type` and the sizes that the config of the decoder declares; null without a config
``transcript``      ``ids``, a list of token ids a row, and ``mask``, a text of 0 and 1 a row or null
``transformers``    the version that wrote it, for information
==================  ====================================================================================

Beside keys and values there are states, ``states.LAYER.recurrent.0`` or ``.conv.0``, and ``positions.LAYER`` of indexers.
A cache of states alone has a spec of one layer, of no tokens. `gpuarena.kv.KVCache.load` reads files without such tensors.

Weights are not looked at: a file of another model of the same type and sizes is taken. Say in the metadata whose it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

from gpuarena.dtypes import as_dtype
from gpuarena.kv import LayerSpec
from gpuarena.kv.state._reader import StateReader
from gpuarena.kv.state._saved import SavedState
from gpuarena.kv.state._writer import Tensor
from gpuarena_transformers.sizing import decoder_config

if TYPE_CHECKING:
    from gpuarena_transformers.cache import ArenaCache

__all__ = ["MODEL_FIELDS", "NO_LAYER", "CacheReader", "CacheState", "Place"]

#: What tells one model from another, of those fields that configs of all families have.
MODEL_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_MOST_ID = 2**62
#: What stands for the keys and values of a cache that holds states alone: a `KVSpec` has at least one layer.
NO_LAYER = LayerSpec(kv_heads=1, key_dim=1, value_dim=0, dtype=as_dtype("uint8"))
#: The number of a layer in the cache, and "kv" or "indexer".
Place = tuple[int, str]


@dataclass(frozen=True, kw_only=True)
class CacheState(SavedState):
    """What a file says of an `ArenaCache`."""

    own: Mapping[str, Any]
    """The fields of the metadata that are described above, but the last."""
    beside: tuple[Tensor, ...]

    def texts(self) -> dict[str, str]:
        """Return the metadata of the file."""
        own = {name: json.dumps(value, separators=(",", ":")) for name, value in self.own.items()}
        return {**super().texts(), **own, "transformers": transformers.__version__}

    def places(self) -> Iterator[tuple[Tensor, tuple[int, int, int]]]:
        """Yield each tensor of the file; see `SavedState.places`."""
        yield from super().places()
        yield from ((tensor, (-1, -1, -1)) for tensor in self.beside)


class CacheReader(StateReader):
    """A file that may have tensors beside those of its spec."""

    beside: tuple[Tensor, ...] = ()

    def check_tensors(self, wanted: Iterable[Tensor]) -> None:
        """Raise unless the file has these tensors and those beside them, and no others."""
        super().check_tensors([*wanted, *self.beside])


# -- what is written ----------------------------------------------------------------------------------------------------


def model_fields(cache: ArenaCache) -> dict[str, Any] | None:
    """Return what the config tells of the model, as far as it does."""
    if cache.config is None:
        return None
    config = decoder_config(cache.config)
    found = {name: _field(config, name) for name in MODEL_FIELDS}
    return {name: value for name, value in found.items() if isinstance(value, (int, str))}


def _field(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except (
        Exception
    ):  # a field that differs from layer to layer; the class of that error is none of all versions
        return None


def transcript_of(cache: ArenaCache) -> dict[str, Any]:
    """Return the token ids that the cache is known to hold, and the mask if there is padding."""
    held = cache.transcript
    has_padding = not bool(held.mask.all())
    mask = ["".join("01"[bit] for bit in row) for row in held.mask.tolist()] if has_padding else None
    return {"ids": held.ids.tolist(), "mask": mask}


# -- what is read -------------------------------------------------------------------------------------------------------


def tensors_beside(found: Any) -> tuple[tuple[Tensor, ...], dict[int, set[int]]]:
    """Return the tensors that are no keys and values, and which states of each layer have begun."""
    tensors = tuple(
        Tensor(str(name), as_dtype(dtype), tuple(int(n) for n in shape))
        for name, dtype, shape in found.get("tensors")
    )
    if any(min(tensor.shape, default=-1) < 0 for tensor in tensors):
        raise ValueError("a tensor has one dimension or more, none of them negative")
    begun = {int(layer): {int(number) for number in numbers} for layer, numbers in found.get("begun").items()}
    return tensors, begun


def places_of(found: Any, saved: SavedState) -> list[Place]:
    """Return the place in the cache of each layer of the spec."""
    places = [(int(number), str(what)) for number, what in found]
    if not places and saved.spec.layers == (NO_LAYER,):
        return places
    if len(places) != len(saved.held) or any(n < 0 or what not in ("kv", "indexer") for n, what in places):
        raise ValueError(f"there are {len(saved.held)} layers, each of which is kv or indexer")
    if places != sorted(set(places), key=lambda place: (place[0], place[1] != "kv")):
        raise ValueError("their numbers ascend")
    return places


def known_ids(found: Any, saved: SavedState) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, ``[rows, n]``, of no more tokens and as many rows as the file holds; states count none."""
    ids, mask = found.get("ids"), found.get("mask")
    lengths = {len(row) for row in ids}
    if len(lengths) != 1 or (saved.spec.layers != (NO_LAYER,) and max(lengths) > saved.length):
        raise ValueError(f"rows of one length are wanted, of at most {saved.length} tokens")
    (n_tokens,) = lengths
    if n_tokens and len(ids) != saved.rows:
        raise ValueError(f"{saved.rows} rows are held")
    if not all(isinstance(one, int) and 0 <= one < _MOST_ID for row in ids for one in row):
        raise ValueError("token ids are integers of at least 0")
    known = torch.tensor(ids, dtype=torch.long)
    if mask is None:
        return known, torch.ones_like(known, dtype=torch.bool)
    if [len(row) for row in mask] != [n_tokens] * len(ids) or not set("".join(mask)) <= {"0", "1"}:
        raise ValueError(f"a mask is a text of {n_tokens} 0 and 1 for each row")
    return known, torch.tensor([[bit == "1" for bit in row] for row in mask], dtype=torch.bool)
