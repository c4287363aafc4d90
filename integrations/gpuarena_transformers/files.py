"""A prefilled prompt in a file: the filled part of a cache, in the safetensors format of `gpuarena.kv.state`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from gpuarena.dtypes import as_dtype
from gpuarena.errors import ArgumentError, CapacityError, ShapeError
from gpuarena.kv import KVLayer, KVSpec, LayerSpec
from gpuarena.kv.state import _transfer
from gpuarena.kv.state._pieces import Mover, Parts
from gpuarena.kv.state._reader import StateReader
from gpuarena.kv.state._saved import ROWS, SavedState, read_saved, user_metadata
from gpuarena.kv.state._writer import Progress, Tensor
from gpuarena_transformers._saved import (
    MODEL_FIELDS,
    NO_LAYER,
    CacheReader,
    CacheState,
    Place,
    known_ids,
    model_fields,
    places_of,
    tensors_beside,
    transcript_of,
)
from gpuarena_transformers.indexed import ArenaIndexedLayer
from gpuarena_transformers.layers import ArenaLayer
from gpuarena_transformers.states import ArenaStateLayer

if TYPE_CHECKING:
    from gpuarena_transformers.cache import ArenaCache

__all__ = ["load_cache", "save_cache"]

#: Called with ``(done_nbytes, total_nbytes)``.
Callback = Callable[[int, int], object]


def save_cache(
    cache: ArenaCache, path: Any, metadata: Mapping[str, str] | None = None, progress: Callback | None = None
) -> None:
    """Write what a cache holds to a file; see `ArenaCache.save`."""
    if cache.group.is_empty and cache.states.is_empty:
        raise ArgumentError("save: the cache holds no tokens; prefill a prompt first")
    cache._check_restorable()
    cache.group.checkpoint()  # raises for a step that failed half-way
    held = _held_layers(cache)
    cache.states.check_live()
    for layer in held.values():
        layer.check_live()
    beside, begun = _beside(cache)
    tensors = tuple(
        Tensor(name, as_dtype(tensor.dtype), tuple(tensor.shape)) for name, tensor in beside.items()
    )
    layers = list(held.values())
    state = CacheState(
        kind=ROWS,
        spec=KVSpec([layer.spec for layer in layers] or [NO_LAYER]),
        batch=cache.max_batch_size,
        max_tokens=max(cache.max_context_length, cache.group.length),
        rows=cache.group.rows,
        held=tuple(tuple(layer.positions) for layer in layers) or ((range(0),),),
        metadata=user_metadata(metadata),
        beside=tensors,
        own={
            "cache_layers": list(held),
            "beside": {"tensors": [(one.name, one.dtype.name, one.shape) for one in tensors], "begun": begun},
            "model": model_fields(cache),
            "transcript": transcript_of(cache),
        },
    )
    arena = layers[0].arena if layers else cache.arenas[0]
    mover = Mover(arena)
    _transfer.save(path, arena, state, _parts(state, layers, beside, mover), mover, progress)


def load_cache(cache: ArenaCache, path: Any, progress: Callback | None = None) -> None:
    """Let a cache hold what a file does; see `ArenaCache.load`."""
    report = Progress(progress)
    reader = CacheReader(path, "torch")
    with reader, ExitStack() as undo:
        reader.beside, begun = reader.value("beside", tensors_beside)
        saved = read_saved(reader, ROWS)
        _check_model(cache, reader)
        places = reader.value("cache_layers", lambda found: places_of(found, saved))
        ids, mask = reader.value("transcript", lambda found: known_ids(found, saved))
        specs = dict(zip(places, (spec for _, spec in saved.spec.owned), strict=False))
        _check_layers(cache, reader, specs)
        states = _checked_states(cache, reader, saved)
        _check_size(cache, saved)
        if cache.group.is_empty and cache.states.is_empty:
            undo.callback(cache.reset)  # of the rows that states without memory are told
        device = _take_memory(cache, specs, states)
        held = _held_layers(cache)
        cache.states.check_live()
        for layer in held.values():
            layer.check_live()
        arena = cache.arenas[0]
        _transfer.check_arena(arena, "load")
        beside = {
            tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype.torch, device=device)
            for tensor in reader.beside
        }
        _announce(cache, saved, list(held.values()))
        undo.callback(cache.reset)
        _take_over(cache, saved, list(held.values()))
        mover = Mover(arena)
        reader.fill(_parts(saved, list(held.values()), beside, mover), mover, report)
        _take_beside(cache, beside, begun, states)
        undo.pop_all()
    cache.transcript.note(ids, mask)


# -- what is written ----------------------------------------------------------------------------------------------------


def _held_layers(cache: ArenaCache) -> dict[Place, KVLayer]:
    """Return the layers of keys and values, and of indexer keys, that have memory."""
    found: dict[Place, KVLayer] = {}
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, ArenaLayer) and layer._kv is not None:
            found[number, "kv"] = layer._kv
        if isinstance(layer, ArenaIndexedLayer) and layer._indexer is not None:
            found[number, "indexer"] = layer._indexer
    return found


def _beside(cache: ArenaCache) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    """Return the tensors that are no keys and values, by name, and of each layer the states that have begun."""
    tensors: dict[str, torch.Tensor] = {}
    begun: dict[str, list[int]] = {}
    for layer in cache.states.layers:
        for (what, number), state in layer.held():
            tensors[f"states.{layer.index}.{what}.{number}"] = state.detach().contiguous()
        begun[str(layer.index)] = [number for number, goes_on in layer.has_previous_state.items() if goes_on]
    for number, layer in enumerate(cache.layers):
        positions = layer.indexer_position_ids if isinstance(layer, ArenaIndexedLayer) else None
        if positions is not None:
            tensors[f"positions.{number}"] = positions.detach().contiguous()
    return tensors, begun


def _parts(state: SavedState, layers: list[KVLayer], beside: dict[str, torch.Tensor], mover: Mover) -> Parts:
    """Return where the bytes of each tensor of a file lie; the layers are in the order of the spec."""
    planes = [[plane for _, plane in layer.filled()] for layer in layers]
    arrays = {
        tensor.name: planes[layer][plane] for tensor, (_, layer, plane) in SavedState.places(state) if planes
    }
    nothing = {tensor.name: torch.empty(0) for tensor, _ in state.places() if not planes}
    return mover.parts({**nothing, **arrays, **beside})


# -- what is read -------------------------------------------------------------------------------------------------------


def _check_model(cache: ArenaCache, reader: StateReader) -> None:
    """Raise `StateError` if the file tells of another model; where one of both tells nothing, it may be the same."""
    found, wanted = reader.value("model", lambda model: model and dict(model)), model_fields(cache)
    for name in MODEL_FIELDS:
        have, want = (found or {}).get(name), (wanted or {}).get(name)
        if have is not None and want is not None and have != want:
            raise reader.error(
                f"it is of another model: {name} is {have} there, {want} in the config of this cache",
                field=name,
                found=have,
                wanted=want,
            )


def _check_layers(cache: ArenaCache, reader: StateReader, specs: dict[Place, LayerSpec]) -> None:
    """Raise unless the file has just those layers that the cache holds keys and values of, of the same kinds."""
    has_config = cache.memory.layers is not None
    held = {place: layer.spec for place, layer in _held_layers(cache).items()}
    own = {(number, "kv") for number, layer in enumerate(cache.layers) if isinstance(layer, ArenaLayer)}
    own |= {(n, "indexer") for n, layer in enumerate(cache.layers) if isinstance(layer, ArenaIndexedLayer)}
    # A layer that a model never uses is in no file.
    if not set(specs) <= own if has_config else not set(held) <= set(specs):
        raise reader.error(
            f"it holds keys and values of layers {_shown(specs)}, the cache of {_shown(own)}",
            field="cache_layers",
            found=sorted(specs),
            wanted=sorted(own),
        )
    if has_config and (missing := set(held) - set(specs)):
        raise reader.error(f"it lacks layers {_shown(missing)}", field="cache_layers", found=sorted(specs))
    for place, spec in specs.items():
        number, what = place
        pairs: list[tuple[str, Any, Any]] = []
        if place in held:
            pairs = list(_differing(spec, held[place]))
        elif not spec.is_plain:
            pairs = [("storage", spec.storage, None)]
        elif place in own and what == "kv" and spec.window != cache.layers[number].sliding_window:
            pairs = [("window", spec.window, cache.layers[number].sliding_window)]
        for name, have, want in pairs:
            raise reader.error(
                f"layer {number}: {name} is {have} in the file, {want} in the cache; nothing was changed",
                field=name,
                found=have,
                wanted=want,
                layer=number,
            )
        cache.memory._check_first(*_like(spec, cache.memory.device or torch.device("cpu")))


def _differing(found: LayerSpec, wanted: LayerSpec) -> Iterator[tuple[str, Any, Any]]:
    names = (
        "kv_heads",
        "key_dim",
        "value_dim",
        "dtype",
        "value_dtype",
        "window",
        "sinks",
        "slack",
        "storage",
    )
    for name in names:
        have, want = getattr(found, name), getattr(wanted, name)
        if have != want:
            yield name, have, want


def _shown(places: Iterable[Place]) -> str:
    return ", ".join(str(n) if what == "kv" else f"{n} ({what})" for n, what in sorted(places)) or "none"


def _checked_states(
    cache: ArenaCache, reader: CacheReader, saved: SavedState
) -> dict[str, tuple[Any, tuple[str, int] | None, Tensor]]:
    """Return of each tensor beside keys and values its layer, the key of the state, and what it is; or raise."""
    found: dict[str, tuple[Any, tuple[str, int] | None, Tensor]] = {}
    for tensor in reader.beside:
        what, _, rest = tensor.name.partition(".")
        parts = rest.split(".")
        number = int(parts[0]) if parts[0].isdecimal() else -1
        layer = cache.layers[number] if 0 <= number < len(cache.layers) else None
        key = None
        if (
            what == "states"
            and len(parts) == 3
            and parts[2].isdecimal()
            and isinstance(layer, ArenaStateLayer)
        ):
            key = parts[1], int(parts[2])
            fits = parts[1] in ("conv", "recurrent") and key[1] < layer.number_of_states
            fits = fits and tensor.shape[:1] == (saved.rows,)
            region = layer.regions.get(key)
            fits = fits and (
                region is None or (region.shape[1:], region.dtype) == (tensor.shape[1:], tensor.dtype)
            )
        else:
            fits = what == "positions" and len(parts) == 1 and isinstance(layer, ArenaIndexedLayer)
        if not fits:
            raise reader.error(
                f"its tensor {tensor.name} {list(tensor.shape)} of {tensor.dtype} has no place in this cache",
                field=tensor.name,
                found=tensor.shape,
            )
        found[tensor.name] = layer, key, tensor
    return found


def _check_size(cache: ArenaCache, saved: SavedState) -> None:
    """Raise unless the cache has room for the rows and tokens of the file, or may grow."""
    n_tokens, n_rows = max(saved.lengths), saved.rows or 0
    if n_rows > cache.max_batch_size:
        raise ShapeError(
            f"load: {n_rows} rows are in the file, the cache was made for {cache.max_batch_size}"
        )
    capacity = cache.max_context_length
    if n_tokens > capacity and cache.memory.overflow is None:
        raise CapacityError(
            f"load: {n_tokens} tokens are in the file, the cache has room for {capacity}, {n_tokens - capacity} too "
            f"few; make it with max_context_length of at least {n_tokens}",
            used=0,
            requested=n_tokens,
            capacity=capacity,
            available=capacity,
            missing=n_tokens - capacity,
            aligned_offset=0,
            label="load",
        )


# -- what the cache then holds ------------------------------------------------------------------------------------------


def _like(spec: LayerSpec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of no tokens, as a layer with this spec gets them."""
    keys = torch.empty((1, spec.kv_heads, 0, spec.key_dim), dtype=spec.dtype.torch, device=device)
    values = torch.empty((1, spec.kv_heads, 0, spec.value_dim), dtype=spec.value_dtype.torch, device=device)
    return keys, values


def _take_memory(cache: ArenaCache, specs: dict[Place, LayerSpec], states: dict[str, Any]) -> torch.device:
    """Take the memory of layers that have none, as the first token would; return the device."""
    held = _held_layers(cache)
    missing = {place: spec for place, spec in specs.items() if place not in held}
    begun = [(layer, key, one) for layer, key, one in states.values() if key and key not in layer.regions]
    devices = cache.memory.devices
    if len(devices) > 1 and (missing or states):
        raise ArgumentError(
            "load: the model spans several devices; run it on a token first, so that each layer is on its own"
        )
    device = devices.pop() if devices else cache.memory.device or torch.get_default_device()
    if not cache.arenas and cache.memory.offload is None:  # exact, where an estimate may be too little
        sizes = [one.nbytes // one.shape[0] for _, _, one in begun]
        keys = {device: KVSpec(missing.values())} if missing else {}
        cache.memory.reserve(keys, {device: sizes} if sizes else {})
    for (number, what), spec in missing.items():
        while len(cache.layers) <= number:
            cache.layers.append(cache.layer_class_to_replicate())
        layer, pair = cache.layers[number], _like(spec, device)
        if what == "kv":
            layer.lazy_initialization(*pair)
        else:
            layer.update_indexer(pair[0][:, 0])
    for layer, key, one in begun:
        what, number = key
        state = torch.empty(one.shape, dtype=one.dtype.torch, device=device)
        layer.lazy_initialization(**{f"{what}_states": state}, state_idx=number)
    return device


def _announce(cache: ArenaCache, saved: SavedState, layers: list[KVLayer]) -> None:
    """Forget what is held, and warn before that if the arena has no room for what is to come."""
    overflow, n_tokens = cache.memory.overflow, saved.length
    if overflow is None or n_tokens <= cache.max_context_length:
        cache.reset()
        return
    overflow.announce(layers[0], n_tokens, saved.rows or 1)
    cache.reset()
    overflow.is_announced = True


def _take_over(cache: ArenaCache, saved: SavedState, layers: list[KVLayer]) -> None:
    """Let the empty layers hold tokens, whose keys and values are written next."""
    common = cache.group._common
    common.rows = saved.rows
    for layer, runs in zip(layers, saved.held, strict=False):
        layer._hold(runs)
    common.high_water = max([common.high_water, *common.lengths])


def _take_beside(
    cache: ArenaCache, tensors: dict[str, torch.Tensor], begun: dict[int, set[int]], places: dict[str, Any]
) -> None:
    """Let the layers hold the states and positions that were read."""
    states: dict[int, dict[tuple[str, int], torch.Tensor]] = {}
    for name, (layer, key, _) in places.items():
        if key is None:
            layer.indexer_position_ids = tensors[name]
        else:
            states.setdefault(layer.index, {})[key] = tensors[name]
    with torch.no_grad():
        for layer in cache.states.layers:
            numbers = begun.get(layer.index, set())
            layer.load(states.get(layer.index, {}), {n: n in numbers for n in range(layer.number_of_states)})
