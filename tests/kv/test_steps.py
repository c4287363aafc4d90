"""Steps of a model: an exception at any layer leaves all layers as they were."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from gpuarena import Arena, CapacityError, CheckpointError
from gpuarena.errors import ArgumentError, LayerOrderError
from gpuarena.kv import KVCache, KVSpec, LayerGroup, LayerSpec, SharedLayer

torch = pytest.importorskip("torch")

SPEC = KVSpec(
    [
        LayerSpec(2, 4, 4, "float32"),
        LayerSpec(1, 4, 2, "float32", window=3),
        SharedLayer(0),
        LayerSpec(1, 4, 4, "float32", window=3, slack=2, sinks=1),
        LayerSpec(2, 2, 2, "float32", window=4, slack=1),
        SharedLayer(3),
    ]
)
OWNED = [number for number, _ in SPEC.owned]


def make(backend, *, batch=2, max_tokens=64):
    arena = Arena(SPEC.arena_nbytes(batch, max_tokens), backend=backend)
    return KVCache(arena, SPEC, batch=batch, max_tokens=max_tokens)


def append(cache, layer, first, n_new=1, *, rows=2):
    spec = cache.spec.layers[layer]
    numbers = first + np.arange(n_new, dtype=np.float32)[:, None] + 1000 * layer
    arrays = [
        np.broadcast_to(numbers, (rows, spec.kv_heads, n_new, dim)) for dim in (spec.key_dim, spec.value_dim)
    ]
    if cache.arena.backend == "torch":
        arrays = [torch.from_numpy(array.copy()) for array in arrays]
    return cache.append(layer, *arrays)


@contextmanager
def failing(cache, error, match=None):
    """A step that raises."""
    with pytest.raises(error, match=match) as caught, cache.step():
        yield caught


def contents(cache):
    """What the next query would see in each layer, and how many tokens there are."""
    seen = []
    for number in OWNED:
        layer, spec = cache.layers[number], SPEC.layers[number]
        low = 0 if spec.window is None else layer.length - spec.window + 1
        held = [at for run in layer.positions for at in run]
        slots = [slot for slot, at in enumerate(held) if at >= low or at < spec.sinks]
        seen.append((layer.length, layer.keys[:, :, slots].tolist(), layer.values[:, :, slots].tolist()))
    return seen, cache.length, cache.rows, cache.is_empty


@pytest.mark.parametrize("backend", ["host", "torch"])
@pytest.mark.parametrize("n_new", [0, 1, 2])
@pytest.mark.parametrize("n_before", [0, 1, 2, 3, 4, 5, 6, 7, 11])
@pytest.mark.parametrize("n_done", range(len(OWNED) + 1))
def test_an_exception_between_layers_leaves_them_all_as_they_were(backend, n_before, n_done, n_new):
    cache = make(backend)
    for at in range(n_before):
        with cache.step():
            for layer in OWNED:
                append(cache, layer, at)
    before = contents(cache)
    with failing(cache, KeyError, "between"):
        for layer in OWNED[:n_done]:
            append(cache, layer, 500, n_new)
        raise KeyError("between")
    assert contents(cache) == before
    for at in range(n_before, n_before + 6):
        shown = [append(cache, layer, at)[0] for layer in OWNED]
    for layer, keys in zip(OWNED, shown, strict=True):
        spec = SPEC.layers[layer]
        low = 0 if spec.window is None else max(0, n_before + 6 - spec.window)
        wanted = [1000 * layer + at for at in range(low, n_before + 6)]
        assert keys[1, -1, -len(wanted) :, 0].tolist() == wanted


@pytest.mark.parametrize("n_done", range(1, len(OWNED)))
@pytest.mark.parametrize("backend", ["host", "torch"])
def test_an_uneven_step_is_taken_back_and_says_which_layer_is_behind(backend, n_done):
    cache = make(backend)
    with cache.step():
        for layer in OWNED:
            append(cache, layer, 0, 3)
    before = contents(cache)
    behind = OWNED[n_done]
    said = rf"left layer {behind} at 3 tokens and another at 4.*back where"
    with failing(cache, LayerOrderError, said) as caught:
        for layer in OWNED[:n_done]:
            append(cache, layer, 3)
    assert caught.value.layer == behind, "the number in the spec, which counts shared layers"
    assert contents(cache) == before


def test_a_layer_that_is_given_two_tokens_is_uneven():
    cache = make("host")
    with failing(cache, LayerOrderError, "append to each layer once"):
        for layer in OWNED:
            append(cache, layer, 0, 2 if layer == 1 else 1)
    assert (cache.is_empty, cache.rows) == (True, None)


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_the_first_step_of_an_empty_cache_decides_nothing_if_it_fails(backend):
    cache = make(backend)
    for n_new in (1, 30):  # the second is more than the bounded layers have slots
        with failing(cache, ZeroDivisionError):
            for layer in OWNED[:-1]:
                append(cache, layer, 0, n_new, rows=2)
            raise ZeroDivisionError
        assert (cache.is_empty, cache.rows) == (True, None)
        assert [cache.layers[layer].n_held for layer in OWNED] == [0] * len(OWNED)
    with cache.step():
        for layer in OWNED:
            append(cache, layer, 0, 30, rows=1)
    assert (cache.length, cache.rows) == (30, 1)


def test_a_step_that_fails_leaves_the_rows_of_an_empty_cache_alone():
    cache = make("host")
    for layer in OWNED:
        append(cache, layer, 0, 0, rows=1)  # nothing is held, of one row
    with failing(cache, KeyError):
        append(cache, 0, 0, rows=2)
        raise KeyError
    assert cache.rows == 1


def test_a_full_cache_is_found_at_the_layer_and_the_step_taken_back():
    cache = make("host", max_tokens=5)
    for layer in OWNED:
        append(cache, layer, 0, 4)
    before = contents(cache)
    with failing(cache, CapacityError):
        append(cache, 0, 4)
        append(cache, 1, 4, 2)
    assert contents(cache) == before


def test_a_step_inside_of_a_scope_and_of_a_step():
    cache = make("torch")
    with cache.step():
        for layer in OWNED:
            append(cache, layer, 0)
    before = contents(cache)
    with cache.scope() as start:
        with cache.step():
            for layer in OWNED:
                append(cache, layer, 1)
        inside = contents(cache)
        with failing(cache, KeyError):
            append(cache, 0, 2)
            raise KeyError
        assert contents(cache) == inside
        with failing(cache, KeyError):
            with failing(cache, LayerOrderError):
                append(cache, 0, 2)
            for layer in OWNED:
                append(cache, layer, 2)
            raise KeyError
        assert contents(cache) == inside
    assert contents(cache) == before
    cache.rollback(start)


def test_checkpoints_below_the_step_survive_it_and_those_in_it_die():
    cache = make("host")
    for layer in OWNED:
        append(cache, layer, 0, 2)
    below = cache.checkpoint()
    with failing(cache, KeyError):
        for layer in OWNED:
            append(cache, layer, 2)
        inside = cache.checkpoint()
        raise KeyError
    with pytest.raises(CheckpointError, match="the checkpoint at 3 tokens is dead"):
        cache.rollback(inside)
    cache.rollback(below)
    assert cache.length == 2


def test_a_step_in_which_the_cache_was_cut_keeps_what_is_left():
    cache = make("host")
    for layer in OWNED:
        append(cache, layer, 0, 3)
    with failing(cache, KeyError):
        cache.reset()
        raise KeyError
    assert cache.is_empty
    with cache.step():
        for layer in OWNED:
            append(cache, layer, 0, 3)
    with failing(cache, KeyError):
        cache.truncate(1)
        append(cache, 0, 7)
        raise KeyError
    assert cache.length == 1


def test_what_was_uneven_before_the_step_is_as_uneven_after_it():
    cache = make("host")
    append(cache, 0, 0)
    with failing(cache, KeyError):
        for layer in OWNED[1:]:
            append(cache, layer, 0)
        raise KeyError
    assert [cache.layers[layer].length for layer in OWNED] == [1, 0, 0, 0]
    with cache.step():  # finishes it
        for layer in OWNED[1:]:
            append(cache, layer, 0)
    assert cache.length == 1


def test_advance_is_taken_back_too():
    spec = KVSpec.uniform(layers=3, kv_heads=1, head_dim=2, dtype="float32")
    cache = KVCache(Arena("64KiB"), spec, batch=2, max_tokens=8)
    with failing(cache, KeyError):
        assert cache.advance(3) == 0
        raise KeyError
    assert (cache.length, cache.rows) == (0, None)


def test_a_layer_added_in_a_step_that_fails_is_empty():
    group = LayerGroup(batch=1, max_tokens=8)
    arena = Arena("64KiB")
    keys = np.ones((1, 1, 2, 4), np.float32)
    spec = LayerSpec(1, 4, 4, "float32")
    group.add(arena, spec).append(keys, keys)
    with failing(group, KeyError):
        group.layers[0].append(keys, keys)
        group.add(arena, spec).append(keys, keys)
        raise KeyError
    assert [layer.length for layer in group.layers] == [2, 0]


# ------------------------------------------------------------------------------------------- bugs that were found, by name


def window_pair(n_tokens):
    layer = LayerSpec(1, 1, 1, "float32", window=3, slack=1)
    spec = KVSpec([layer, layer])
    cache = KVCache(Arena(spec.arena_nbytes(1, 32)), spec, batch=1, max_tokens=32)
    for at in range(n_tokens):
        for number in (0, 1):
            append(cache, number, at, rows=1)
    return cache


def test_several_appends_in_a_step_may_move_a_window_too_far_to_be_taken_back():
    """The layer was cut to where the step began, with nothing of the window before it, and went on as if there were."""
    cache = window_pair(4)
    with failing(cache, KeyError) as caught:
        append(cache, 0, 4, 2, rows=1)
        append(cache, 0, 6, 2, rows=1)
        raise KeyError
    [note] = caught.value.__notes__
    assert "could not be taken back: layer 0 has a bounded window of 3 tokens" in note
    assert [layer.length for layer in cache.layers] == [8, 4], "nothing is taken back"
    append(cache, 1, 4, 2, rows=1)
    append(cache, 1, 6, 2, rows=1)
    assert cache.layers[0].keys[0, 0, :, 0].tolist() == [4, 5, 6, 7]


def test_an_uneven_step_that_cannot_be_taken_back_says_so():
    cache = window_pair(4)
    with failing(cache, LayerOrderError, "It could not be taken back: layer 0 has a bounded"):
        append(cache, 0, 4, 2, rows=1)
        append(cache, 0, 6, 2, rows=1)
    assert [layer.length for layer in cache.layers] == [8, 4]


def test_several_appends_in_a_step_are_taken_back_as_long_as_they_can_be():
    cache = window_pair(3)
    with failing(cache, KeyError) as caught:
        append(cache, 0, 3, rows=1)  # into the slack
        append(cache, 0, 4, rows=1)  # moves, to what a query of this token sees
        raise KeyError
    assert hasattr(caught.value, "__notes__")
    cache = window_pair(2)
    with failing(cache, KeyError) as caught:
        append(cache, 0, 2, rows=1)
        append(cache, 0, 3, rows=1)
        raise KeyError
    assert not hasattr(caught.value, "__notes__")
    assert [layer.length for layer in cache.layers] == [2, 2]


def test_a_step_is_entered_once():
    """The inner entry of the same step once made the outer one forget where it began."""
    cache = make("host")
    step = cache.step()
    step.__enter__()
    append(cache, 0, 0)
    with pytest.raises(CheckpointError, match="entered before"):
        step.__enter__()
    assert not step.__exit__(KeyError, KeyError(), None), "the exception passes"
    assert cache.is_empty
    with pytest.raises(CheckpointError, match=r"make another with cache\.step"):
        step.__enter__()


def test_a_step_costs_nothing_of_the_arena():
    cache = make("host")
    used = cache.arena.stats
    with cache.step():
        for layer in OWNED:
            append(cache, layer, 0)
    assert cache.arena.stats == used


def test_truncate_below_the_floor_in_a_step_is_refused_as_elsewhere():
    cache = window_pair(9)
    with failing(cache, ArgumentError, "bounded window"):
        cache.truncate(2)
    assert cache.length == 9


def test_a_checkpoint_tells_whether_it_is_live():
    cache, other = make("host"), make("host")
    for layer in OWNED:
        append(cache, layer, 0, 3)
    checkpoint = cache.checkpoint()
    assert cache.is_live(checkpoint)
    assert not other.is_live(checkpoint)
    cache.rollback(checkpoint)
    assert cache.is_live(checkpoint)  # it stays usable
    cache.truncate(2)
    assert not cache.is_live(checkpoint)
    for layer in OWNED:
        append(cache, layer, 2)
    assert not cache.is_live(checkpoint)  # other tokens, though as many
    assert cache.is_live(cache.checkpoint())
