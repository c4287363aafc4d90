"""Layers that own nothing and show what another one holds."""

from __future__ import annotations

import numpy as np
import pytest

from gpuarena import Arena
from gpuarena.errors import ArgumentError, ArgumentTypeError, LayerOrderError
from gpuarena.kv import KVCache, KVSpec, LayerSpec, SharedLayer, SharedView

FULL = LayerSpec(2, 4, 4, "float32")
LOCAL = LayerSpec(1, 3, 2, "float32", window=3)
BOUNDED = LayerSpec(1, 3, 3, "float32", window=3, slack=2, sinks=1)
SPEC = KVSpec([FULL, SharedLayer(0), LOCAL, BOUNDED, SharedLayer(3), SharedLayer(2), SharedLayer(0)])
SOURCES = {1: 0, 4: 3, 5: 2, 6: 0}


def make(backend, *, batch=3, max_tokens=32):
    nbytes = SPEC.arena_nbytes(batch, max_tokens)
    memory = np.zeros(nbytes + 256, np.uint8)
    if backend == "torch":
        torch = pytest.importorskip("torch")
        return KVCache(
            Arena.from_buffer(torch.from_numpy(memory)), SPEC, batch=batch, max_tokens=max_tokens
        ), memory
    return KVCache(Arena.from_buffer(memory), SPEC, batch=batch, max_tokens=max_tokens), memory


def arrays(cache, layer, *numbers, rows=2):
    spec = SPEC.layers[SPEC.owner(layer)]
    token = (
        np.array(numbers, np.float32)[:, None] + 100 * np.arange(rows, dtype=np.float32)[:, None, None, None]
    )
    made = [
        np.array(np.broadcast_to(token, (rows, spec.kv_heads, len(numbers), d)))
        for d in (spec.key_dim, spec.value_dim)
    ]
    if cache.arena.backend == "torch":
        import torch

        return [torch.from_numpy(array) for array in made]
    return made


def step(cache, *numbers, rows=2):
    for layer, _ in SPEC.owned:
        cache.append(layer, *arrays(cache, layer, *numbers, rows=rows))


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_a_shared_layer_reads_what_its_owner_reads(backend):
    cache, _ = make(backend)
    step(cache, 0, 1)
    for at in range(2, 12):
        step(cache, at)
        for layer, source in SOURCES.items():
            assert isinstance(cache.layers[layer], SharedView)
            for n_tokens in (0, 1, min(2, cache.length - cache.layers[source].floor)):
                for shown, own in zip(cache.read(layer, n_tokens), cache.read(source, n_tokens), strict=True):
                    assert shown.tolist() == own.tolist()
                    assert tuple(shown.shape) == tuple(own.shape)
                assert cache.mask(layer, n_tokens).tolist() == cache.mask(source, n_tokens).tolist()
                view = cache.layers[layer]
                assert view.read(n_tokens)[0].tolist() == cache.read(source, n_tokens)[0].tolist()
                assert view.mask(n_tokens).tolist() == cache.mask(source, n_tokens).tolist()
            view, own = cache.layers[layer], cache.layers[source]
            assert view.length == own.length == at + 1
            assert view.keys.tolist() == own.keys.tolist()
            assert view.values.tolist() == own.values.tolist()


@pytest.mark.parametrize("backend", ["host", "torch"])
@pytest.mark.parametrize(("layer", "source"), SOURCES.items())
def test_nothing_is_appended_to_a_shared_layer(backend, layer, source):
    cache, memory = make(backend)
    step(cache, 1, 2)
    before = memory.copy()
    said = rf"layer {layer} shares what layer {source} holds: append there, and read\({layer}\)"
    for call in (cache.append, lambda _, *new: cache.layers[layer].append(*new)):
        with pytest.raises(LayerOrderError, match=said) as caught:
            call(layer, *arrays(cache, layer, 5))
        assert caught.value.layer == layer
    assert np.array_equal(memory, before)
    assert [held.length for held in cache.layers] == [2] * 7


def test_shared_layers_take_no_bytes():
    own = KVSpec([FULL, LOCAL, BOUNDED])
    assert SPEC.bytes_per_token == own.bytes_per_token == 64 + 20 + 24
    for batch, tokens in ((1, 1), (3, 32), (2, 1000)):
        assert SPEC.nbytes(batch, tokens) == own.nbytes(batch, tokens)
        assert SPEC.arena_nbytes(batch, tokens) == own.arena_nbytes(batch, tokens)
        assert SPEC.scratch_nbytes(batch, tokens) == own.scratch_nbytes(batch, tokens)
    assert SPEC.max_tokens("1MiB", 3) == own.max_tokens("1MiB", 3)
    cache, _ = make("host")
    step(cache, 1, 2)
    stats = cache.stats
    assert stats.bytes_per_token == 108
    assert stats.used_nbytes == 108 * 2 * 2
    assert stats.reserved_nbytes == SPEC.nbytes(3, 32)
    assert cache.arena.stats.n_regions == 1 + 2 + 1 + 1, "and the scratch"


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_rows_of_a_shared_layer_are_gathered_once(backend):
    """Twice would put them back, or elsewhere."""
    cache, _ = make(backend)
    step(cache, *range(5))
    gathered = []
    for ops in cache._ops.values():

        def gather(source, rows, scratch, target, original=ops.gather_rows):
            gathered.append(tuple(target.shape))
            original(source, rows, scratch, target)

        ops.gather_rows = gather
    cache.reorder([1, 0])
    assert len(gathered) == 6, "keys and values of three layers"
    for layer in range(7):
        assert cache.layers[layer].keys[:, 0, -1, 0].tolist() == [104, 4]
    cache.select([1, 1, 0])
    for layer in range(7):
        assert cache.layers[layer].values[:, 0, -1, 0].tolist() == [4, 4, 104]


def test_a_shared_layer_goes_back_with_its_owner():
    cache, _ = make("host")
    step(cache, 0, 1)
    checkpoint = cache.checkpoint()
    with cache.scope():
        step(cache, 2)
        assert cache.layers[1].length == 3
    step(cache, 2)
    cache.rollback(checkpoint)
    assert [layer.length for layer in cache.layers] == [2] * 7
    cache.truncate(1)
    assert cache.read(6)[0][0, 0, :, 0].tolist() == [0]
    cache.reset()
    assert cache.layers[4].length == 0


def test_layers_that_there_are_not():
    cache, _ = make("host")
    step(cache, 1)
    new = arrays(cache, 0, 1)
    calls = [
        lambda layer: cache.append(layer, *new),
        cache.read,
        cache.mask,
        cache.buffers,
        lambda layer: cache.read_bucket(layer, 1),
        lambda layer: cache.mask_at(layer, np.array([0]), 1),
        lambda layer: cache.write_at(layer, np.array([0]), *new),
        SPEC.owner,
    ]
    for call in calls:
        for layer in (-1, 7, 2**70):
            with pytest.raises(ArgumentError):
                call(layer)
        for no_layer in (None, 1.0, "0", slice(0, 1), FULL):
            with pytest.raises(ArgumentTypeError):
                call(no_layer)
    assert cache.length == 1


def test_owners():
    assert [SPEC.owner(layer) for layer in range(7)] == [0, 0, 2, 3, 3, 2, 0]
    assert [number for number, _ in SPEC.owned] == [0, 2, 3]


@pytest.mark.parametrize(
    "layers",
    [
        [SharedLayer(0)],
        [SharedLayer(0), FULL],
        [FULL, SharedLayer(1)],
        [FULL, SharedLayer(2), FULL],
        [FULL, SharedLayer(0), SharedLayer(1)],
        [FULL, SharedLayer(2**70)],
    ],
)
def test_a_shared_layer_names_an_earlier_one_that_owns(layers):
    with pytest.raises(ArgumentError, match="which is no earlier layer of its own"):
        KVSpec(layers)


@pytest.mark.parametrize(
    ("source", "error"),
    [(-1, ArgumentError), (1.0, ArgumentTypeError), (True, ArgumentTypeError), (None, ArgumentTypeError)],
)
def test_a_source_is_a_number(source, error):
    with pytest.raises(error):
        SharedLayer(source)


def test_the_errors_of_layers_behind_a_shared_one_name_their_own_number():
    cache, _ = make("host")
    new = [np.ones((2, 1, 1, 9), np.float32)] * 2
    from gpuarena import CapacityError, ShapeError

    with pytest.raises(ShapeError, match="layer 2: keys are"):
        cache.append(2, *new)
    for layer, label in ((2, "layer2"), (3, "layer3")):
        with pytest.raises(CapacityError, match=f"layer {layer}: the cache is full") as caught:
            cache.append(layer, *arrays(cache, layer, *range(33)))
        assert caught.value.label == label
    assert {region.label for layer in (2, 3) for region in cache.layers[layer].regions} == {
        "layer2.keys",
        "layer2.values",
        "layer3.pairs",
    }
