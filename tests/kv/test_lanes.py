"""Lanes one property at a time; tests/properties/test_lanes_machine.py has the model."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import Arena
from gpuarena.errors import (
    ArgumentError,
    ArgumentTypeError,
    AutogradError,
    BackendError,
    CapacityError,
    CheckpointError,
    DeviceMismatchError,
    DTypeError,
    LayerOrderError,
    NotCopyableError,
    OutOfMemoryError,
    ShapeError,
    StaleRegionError,
)
from gpuarena.kv import KVSpec, LayerSpec, SharedLayer
from gpuarena.kv.lanes import LaneCache

torch = pytest.importorskip("torch")

_SPEC = KVSpec.uniform(layers=2, kv_heads=2, head_dim=4, dtype="float32")


def make(backend="torch", spec=_SPEC, *, lanes=3, max_tokens=16, **options):
    return LaneCache(Arena("1MiB", backend=backend, **options), spec, lanes=lanes, max_tokens=max_tokens)


def chunk(*rows, heads=2, dim=4):
    """Return ``[rows, heads, n, dim]`` whose tokens are filled with the given numbers."""
    numbers = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), 1, -1, 1)
    return numbers.expand(-1, heads, -1, dim).contiguous()


def feed(cache, *rows, **where):
    """Append to all layers of `_SPEC`; the values are the negative keys."""
    for layer in range(2):
        pair = cache.append(layer, chunk(*rows), -chunk(*rows), **where)
    return pair


def held(cache, lane):
    """Return the numbers that a lane holds, after checking that all layers, heads and elements agree."""
    found = []
    for layer in range(2):
        keys, values = cache.read(layer, [lane])
        assert torch.equal(keys, -values)
        assert torch.equal(keys, keys[:, :1, :, :1].expand_as(keys))
        found.append(keys[0, 0, :, 0].tolist())
    assert found[0] == found[1]
    return found[0]


# -------------------------------------------------------------------------------------------- symptoms of public reports


def test_per_row_rollback_when_rows_accept_different_counts():  # Blaizzy/mlx-vlm PR 1155
    cache = make()
    feed(cache, [1, 2, 3], [4, 5, 6])
    feed(cache, [10, 11, 12], [13, 14, 15])  # drafts, of which row 0 keeps one and row 1 none
    cache.truncate(0, 4)
    cache.truncate(1, 3)
    feed(cache, [20], [21])
    assert held(cache, 0) == [1, 2, 3, 10, 20]
    assert held(cache, 1) == [4, 5, 6, 21]
    assert cache.positions(0).tolist() == [0, 1, 2, 3, 4]
    assert cache.length_vector.tolist() == [5, 4, 0]


def test_append_position_from_offset_max_after_filter_overwrites_live_kv():  # jundot/omlx 2172
    cache = make()
    feed(cache, [1, 2, 3, 4, 5], [6, 7, 0, 0, 0], [8, 9, 10, 0, 0], n_tokens=[5, 2, 3])
    cache.reset(0)  # the longest row leaves the batch
    feed(cache, [11], [12], lanes=[1, 2])
    assert held(cache, 1) == [6, 7, 11]
    assert held(cache, 2) == [8, 9, 10, 12]


def test_filter_to_zero_rows_crashes():  # ml-explore/mlx-lm 798
    cache = make()
    none = torch.zeros(0, 2, 1, 4)
    for layer in range(2):
        keys, values = cache.append(layer, none, none, lanes=[])
        assert tuple(keys.shape) == tuple(values.shape) == (0, 2, 0, 4)
    with cache.step(lanes=[]):
        for layer in range(2):
            cache.append(layer, none, none)
    assert cache.lengths == (0, 0, 0)
    assert tuple(cache.attend(0, none, lanes=[]).shape) == (0, 2, 1, 4)
    assert tuple(cache.mask(lanes=[]).shape) == (0, 1, 1, 0)
    assert cache.cu_seqlens([]).tolist() == [0]
    assert tuple(cache.packed(0)[0].shape) == (0, 2, 4)
    assert tuple(cache.read(0)[0].shape) == (3, 2, 0, 4)


def test_rewind_negative_grows_the_cache():  # ml-explore/mlx-lm PR 1528
    cache = make()
    feed(cache, [1, 2])
    for n_tokens in (-1, 3, -(2**40)):
        with pytest.raises(ArgumentError):
            cache.truncate(0, n_tokens)
    assert held(cache, 0) == [1, 2]


def test_layers_trim_different_amounts():  # ml-explore/mlx-lm PR 1502
    cache = make()
    feed(cache, [1, 2, 3], [4, 5, 6])
    cache.append(0, chunk([7], [8]), -chunk([7], [8]))  # and layer 1 never comes
    cache.truncate(0, 2)
    assert held(cache, 0) == [1, 2]
    assert held(cache, 1) == [4, 5, 6]
    feed(cache, [9], [10])
    assert held(cache, 0) == [1, 2, 9]


def test_padding_of_a_chunk_is_lost_or_counted():  # unslothai/unsloth 3699
    cache = make()
    feed(cache, [1, 2, 3], [4, 99, 99], n_tokens=[3, 1])
    assert held(cache, 1) == [4]
    assert cache.next_position(1) == 1
    assert cache.read(0)[0][1, 0, :, 0].tolist() == [4, 0, 0]
    assert cache.mask([3, 1])[1, 0].tolist() == [[True, False, False], [False] * 3, [False] * 3]


def test_a_cache_demands_the_exact_batch():  # huggingface/transformers 42454
    cache = make(lanes=3)
    feed(cache, [1], [2])
    feed(cache, [3])
    assert cache.lengths == (2, 1, 0)
    with pytest.raises(ShapeError, match="4 rows given, the cache has 3 lanes"):
        feed(cache, [1], [2], [3], [4])
    assert cache.lengths == (2, 1, 0)


def test_a_batch_of_caches_is_mixed_up():  # rasbt/reasoning-from-scratch 33
    cache = make()
    feed(cache, [1, 2], [3, 4], [5, 6], lanes=[2, 0, 1])
    keys, _ = feed(cache, [7], [8], lanes=[1, 2])
    assert keys[:, 0, :, 0].tolist() == [[5, 6, 7], [1, 2, 8]]
    keys, _ = feed(cache, [9], [10], lanes=[2, 0])  # not consecutive: gathered
    assert keys[:, 0, :, 0].tolist() == [[1, 2, 8, 9], [3, 4, 10, 0]]


def test_a_zero_length_sequence():  # Dao-AILab/flash-attention PR 2470
    cache = make()
    feed(cache, [1], [0], n_tokens=[1, 0])
    out = cache.attend(0, torch.ones(3, 2, 1, 4))
    assert torch.equal(out[1:], torch.zeros(2, 2, 1, 4))
    assert torch.equal(out[0], torch.full((2, 1, 4), -1.0))
    empty = torch.zeros(3, 2, 0, 4)
    assert tuple(cache.append(0, empty, empty)[0].shape) == (3, 2, 1, 4)
    assert cache.lengths == (1, 0, 0)


def test_rollback_then_append_is_as_if_never_appended():  # ml-explore/mlx-lm PR 1486
    caches = make(), make()
    for cache in caches:
        feed(cache, [1, 2, 3], [4, 5, 6])
    mark = caches[0].checkpoint()
    feed(caches[0], [7, 8], [9, 0], n_tokens=[2, 1])
    caches[0].rollback(mark)
    outs = []
    for cache in caches:
        feed(cache, [20], [21])
        outs.append(cache.attend(1, torch.ones(2, 4, 1, 4)))
    assert torch.equal(*outs)
    assert torch.equal(caches[0].length_vector, caches[1].length_vector)


@pytest.mark.parametrize("lanes", [[0, 1], [1, 0]], ids=["views", "gathered"])
def test_a_nan_that_was_cut_away_reaches_no_other_token(lanes):
    cache = make(lanes=2)
    feed(cache, [1, 2, 3, 4], [5, float("nan"), float("inf"), float("nan")])
    cache.truncate(1, 1)
    out = cache.attend(0, torch.ones(2, 2, 1, 4), lanes=lanes)
    assert torch.isfinite(out).all()
    keys, values = cache.read(1, lanes)
    assert torch.isfinite(keys).all()
    assert torch.isfinite(values).all()


# --------------------------------------------------------------------------------------------------------------- attention


def plain_attention(q, keys, values, window, sinks, scale):
    """Attention of the last tokens of one sequence, in loops: ``q [heads, n, dim]``, ``keys [kv_heads, held, dim]``."""
    heads, n, dim = q.shape
    held = keys.shape[1]
    out = torch.zeros(heads, n, values.shape[2])
    for head in range(heads):
        group = head // (heads // keys.shape[0])
        for i in range(n):
            place = held - n + i
            seen = [
                j
                for j in range(held)
                if j <= place and (window is None or j < sinks or j >= place - window + 1)
            ]
            if seen:
                scores = keys[group, seen] @ q[head, i] * (dim**-0.5 if scale is None else scale)
                out[head, i] = torch.softmax(scores, 0) @ values[group, seen]
    return out


@given(data=st.data(), groups=st.sampled_from([1, 3]), scale=st.sampled_from([None, 0.3]))
def test_attention_is_that_of_each_sequence_alone(data, groups, scale):
    layers = [LayerSpec(2, 4, 4, "float32"), LayerSpec(1, 4, 6, "float32", window=3, sinks=1), SharedLayer(1)]
    layers += [LayerSpec(1, 4, 4, "float32", window=2)]
    cache = make(spec=KVSpec(layers), lanes=4)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    history = [
        None
        if isinstance(spec, SharedLayer)
        else [[torch.zeros(spec.kv_heads, 0, d) for d in (spec.key_dim, spec.value_dim)] for _ in range(4)]
        for spec in layers
    ]
    for _ in range(data.draw(st.integers(1, 3))):
        lanes = data.draw(st.permutations(range(4)))[: data.draw(st.integers(1, 4))]
        if data.draw(st.booleans()):
            lanes = sorted(lanes)
        width = data.draw(st.integers(1, 3))
        counts = [data.draw(st.integers(0, width)) for _ in lanes]
        for layer, spec in enumerate(layers):
            where = {"lanes": lanes, "n_tokens": counts}
            owner = 1 if layer == 2 else layer
            own = layers[owner]
            if layer != 2:
                shape = (len(lanes), spec.kv_heads, width)
                new = [torch.randn(*shape, d, generator=generator) for d in (spec.key_dim, spec.value_dim)]
                cache.append(layer, *new, **where)
                for row, lane in enumerate(lanes):
                    history[layer][lane] = [
                        torch.cat([old, x[row, :, : counts[row]]], 1)
                        for old, x in zip(history[layer][lane], new, strict=True)
                    ]
            q = torch.randn(len(lanes), own.kv_heads * groups, width, 4, generator=generator)
            out = cache.attend(layer, q, scale=scale, **where)
            for row, lane in enumerate(lanes):
                n = counts[row]
                expected = torch.zeros(own.kv_heads * groups, width, own.value_dim)
                expected[:, :n] = plain_attention(
                    q[row, :, :n], *history[owner][lane], own.window, own.sinks, scale
                )
                torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-5)


def test_attention_defaults_to_the_lanes_of_the_step():
    cache = make()
    feed(cache, [1, 2, 3], lanes=[2])
    with cache.step([2, 0], [2, 1]):
        mask = cache.mask()
        assert tuple(mask.shape) == (2, 1, 2, 5)
        assert mask[1, 0].tolist() == [[True, False, False, False, False], [False] * 5]
        for layer in range(2):
            cache.append(layer, chunk([4, 5], [6, 99]), chunk([4, 5], [6, 99]))
            out = cache.attend(layer, torch.zeros(2, 2, 2, 4))  # the mean of what is seen
        assert cache.cu_seqlens().tolist() == [0, 5, 6]
        assert cache.packed(1)[0][:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6]
        assert cache.read(1)[0][:, 0, :, 0].tolist() == [[1, 2, 3, 4, 5], [6, 0, 0, 0, 0]]
    assert cache.mask().shape[0] == 3
    sums = torch.tensor([[-1 - 2 - 3 + 4, -1 - 2 - 3 + 4 + 5], [6, 0]])
    torch.testing.assert_close(out[:, 0, :, 0], sums / torch.tensor([[4, 5], [1, 1]]))


def test_attention_refuses_what_it_cannot_do():
    cache = make()
    feed(cache, [1], [2], [3])
    q = torch.ones(3, 2, 1, 4)
    with pytest.raises(ArgumentTypeError):
        cache.attend(0, q.numpy())
    with pytest.raises(DTypeError):
        cache.attend(0, q.half())
    for shape in [(3, 2, 4), (3, 2, 1, 5), (3, 3, 1, 4), (3, 0, 1, 4), (4, 2, 1, 4)]:
        with pytest.raises(ShapeError):
            cache.attend(0, torch.ones(shape))
    with pytest.raises(ShapeError):
        cache.attend(0, q, lanes=[0, 1])
    with pytest.raises(ShapeError):
        cache.attend(0, q, n_tokens=[1, 1])
    with pytest.raises(ArgumentError):
        cache.attend(2, q)
    with pytest.raises(AutogradError):
        cache.attend(0, q.requires_grad_())
    with pytest.raises(DeviceMismatchError):
        cache.attend(0, torch.ones(3, 2, 1, 4, device="meta"))
    mixed = make(spec=KVSpec([LayerSpec(2, 4, 4, "float32", value_dtype="bfloat16")]))
    with pytest.raises(DTypeError):
        mixed.attend(0, torch.ones(3, 2, 1, 4))
    with pytest.raises(BackendError, match="read"):
        make("host").attend(0, np.ones((3, 2, 1, 4), np.float32))


def test_keys_with_rotary_embeddings_are_right_after_a_shift():
    def turned(x, positions):
        angles = positions[:, None] * torch.tensor([1.0, 0.1])  # [tokens, dim / 2]
        low, high = x[..., :2], x[..., 2:]
        return torch.cat(
            [low * angles.cos() - high * angles.sin(), low * angles.sin() + high * angles.cos()], -1
        )

    cache = make()
    raw = torch.randn(1, 2, 10, 4)
    for layer in range(2):
        cache.append(layer, turned(raw, torch.arange(10)), raw, lanes=[1])
    cache.remove(1, 2, 6)
    assert cache.positions(1).tolist() == [0, 1, 6, 7, 8, 9]

    def rotate(layer, keys, delta):
        keys.copy_(turned(keys, torch.full((keys.shape[2],), delta)))

    cache.shift(1, 2, None, -4, rotate=rotate)
    assert cache.positions(1).tolist() == list(range(6))
    assert cache.next_position(1) == 6
    left = raw[:, :, [0, 1, 6, 7, 8, 9]]
    for layer in range(2):
        keys, values = cache.read(layer, [1])
        torch.testing.assert_close(keys, turned(left, torch.arange(6)))
        assert torch.equal(values, left)


@pytest.mark.parametrize("at", [0, 1])
def test_a_function_that_fails_has_rotated_no_layer(at):
    cache = make()
    feed(cache, [1, 2, 3])
    mark = cache.checkpoint()

    def rotate(layer, keys, delta):
        keys += delta
        if layer == at:
            raise KeyError

    with pytest.raises(KeyError):
        cache.shift(0, 1, None, 5, rotate=rotate)
    assert (held(cache, 0), cache.positions(0).tolist()) == ([1, 2, 3], [0, 1, 2])
    cache.rollback(mark)


def test_a_function_that_rotates_ties_the_cache_into_no_graph():
    cache = make()
    feed(cache, [1, 2])
    factor = torch.ones((), requires_grad=True)
    cache.shift(0, 0, None, 1, rotate=lambda layer, keys, delta: keys.mul_(factor))
    assert not cache.read(0)[0].requires_grad
    with pytest.raises(ArgumentError, match="positions go up to"):
        cache.shift(0, 0, None, 2**70, rotate=False)
    with pytest.raises(ArgumentTypeError):
        cache.shift(0, 0, None, 1.0, rotate=False)
    assert cache.positions(0).tolist() == [1, 2]


# ------------------------------------------------------------------------------------------------------------------ steps


def test_an_exception_in_the_block_takes_the_whole_step_back():
    cache = make()
    feed(cache, [1, 2], [3, 4])

    def step():
        with cache.step(lanes=[0, 1]):
            for layer in range(2):
                cache.append(layer, chunk([5], [6]), -chunk([5], [6]))
            raise KeyError  # after the last layer

    with pytest.raises(KeyError):
        step()
    assert cache.lengths == (2, 2, 0)
    assert cache.length_vector.tolist() == [2, 2, 0]
    feed(cache, [7], [8])
    assert held(cache, 0) == [1, 2, 7]


def test_a_block_that_leaves_out_a_layer_is_abandoned():
    cache = make()

    def step():
        with cache.step([1], 2):
            assert cache.lengths == (0, 2, 0)
            cache.append(0, chunk([1, 2]), -chunk([1, 2]))

    with pytest.raises(LayerOrderError, match=r"layers \[1\] unwritten") as caught:
        step()
    assert caught.value.layer == 1
    assert cache.lengths == (0, 0, 0)
    assert cache.length_vector.tolist() == [0, 0, 0]


def test_a_step_is_made_once():
    cache = make()
    step = cache.step(n_tokens=0)
    with pytest.raises(LayerOrderError), step:
        pass
    with pytest.raises(LayerOrderError, match="made before"), step:
        pass
    full = cache.step(n_tokens=17)
    with pytest.raises(CapacityError), full:
        pass
    assert (full.lanes, full.counts) == ((0, 1, 2), (17, 17, 17))


@pytest.mark.parametrize("n_tokens", [1, np.int32(1), [1, 1, 1], (1, 1, 1), np.ones(3, np.int64), torch.ones(3, dtype=torch.int8), torch.tensor(1), range(1, 2)])  # fmt: skip
def test_numbers_of_tokens_come_in_many_forms(n_tokens):
    cache = make()
    rows = 1 if isinstance(n_tokens, range) else 3
    with cache.step(n_tokens=n_tokens) as step:
        for layer in range(2):
            cache.append(layer, chunk(*[[5]] * rows), -chunk(*[[5]] * rows))
    assert step.counts == (1,) * rows
    assert sum(cache.lengths) == rows
    assert cache.mask(n_tokens).shape[0] == rows


@pytest.mark.parametrize("n_tokens", [1.0, True, "1", [1.0], [True], np.ones(3), None, object()])
def test_numbers_of_tokens_that_are_none(n_tokens):
    with pytest.raises(ArgumentTypeError):
        make().step(n_tokens=n_tokens)
    with pytest.raises(ArgumentError):
        make().step(n_tokens=-1)
    with pytest.raises(ShapeError):
        make().step([0], [1, 1])
    with pytest.raises(ShapeError):
        make().step(n_tokens=[1] * 4)


def test_a_step_that_is_abandoned_in_its_block_ends_there():
    cache = make()
    with cache.step([0]):
        cache.append(0, chunk([1]), -chunk([1]))
        cache.abandon()
        feed(cache, [2], lanes=[1])
    assert cache.lengths == (0, 1, 0)
    cache.abandon()  # nothing to do
    assert cache.lengths == (0, 1, 0)


def test_all_layers_of_a_step_are_the_same_in_lanes_and_numbers():
    cache = make()
    cache.append(0, chunk([1], [2]), -chunk([1], [2]))
    for rows, where in [(1, {}), (2, {"lanes": [1, 0]}), (2, {"n_tokens": [1, 0]}), (3, {})]:
        with pytest.raises(LayerOrderError, match="under way has"):
            cache.append(1, *[chunk(*[[3]] * rows)] * 2, **where)
    with pytest.raises(LayerOrderError, match=r"layer 0 is written already.*layers \[1\] are not") as caught:
        cache.append(0, chunk([1], [2]), -chunk([1], [2]))
    assert caught.value.layer == 0
    cache.append(1, chunk([1], [2]), -chunk([1], [2]))
    assert held(cache, 1) == [2]


# ------------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    "kill",
    [
        lambda cache: cache.truncate(0, 1),
        lambda cache: cache.remove(0, 0, 1),
        lambda cache: cache.shift(0, 1, None, 1, rotate=False),
        lambda cache: cache.reset(0),
        lambda cache: cache.reset(),
        lambda cache: cache.keep(1),
        lambda cache: cache.copy(1, 0),
        lambda cache: cache.move(1, 0),
        lambda cache: cache.move(0, 2),
    ],
)
def test_checkpoints_die_with_their_tokens(kill):
    cache = make()
    feed(cache, [1, 2], [3, 4])
    marks = cache.checkpoint(0), cache.checkpoint()
    kill(cache)
    while cache.lengths[0] < 2:
        feed(cache, [9])
    cache.checkpoint()  # at the same length, of other tokens
    before = cache.lengths
    for mark in marks:
        with pytest.raises(CheckpointError, match="lane 0 at 2 tokens is dead"):
            cache.rollback(mark)
    assert cache.lengths == before


def test_checkpoints_of_an_empty_lane_die_when_it_is_replaced():
    for kill in (lambda c: c.reset(0), lambda c: c.copy(1, 0), lambda c: c.move(1, 0), lambda c: c.keep(1)):
        cache = make()
        mark = cache.checkpoint(0)
        feed(cache, [1], lanes=[1])
        kill(cache)
        with pytest.raises(CheckpointError):
            cache.rollback(mark)


def test_checkpoints_survive_what_happens_behind_them_and_in_other_lanes():
    cache = make()
    feed(cache, [1, 2, 3], [4, 5, 6])
    cache.truncate(0, 2)
    mark = cache.checkpoint(0)
    feed(cache, [7, 8, 9])
    cache.remove(0, 2, 4)
    cache.shift(0, 2, None, 3, rotate=False)
    cache.reset(1)
    cache.copy(0, 2)
    cache.rollback(mark)
    cache.rollback(mark)
    assert held(cache, 0) == [1, 2]
    assert held(cache, 2) == [1, 2, 9]
    assert cache.lengths == (2, 0, 3)
    assert mark.lengths == {0: 2}
    assert repr(mark) == "LaneCheckpoint(lengths={0: 2})"


def test_checkpoints_are_values_that_leave_nothing_behind():
    cache = make()
    feed(cache, [1, 2])
    for _ in range(100):
        cache.rollback(cache.checkpoint())
    assert len(cache._table._marks[0]) == 1  # there is no public figure of it


def test_a_rollback_of_all_lanes_is_for_all_or_none():
    cache = make()
    feed(cache, [1], [2])
    mark = cache.checkpoint()
    feed(cache, [3], [4])
    cache.truncate(1, 0)
    with pytest.raises(CheckpointError, match="lane 1"):
        cache.rollback(mark)
    assert cache.lengths == (2, 0, 0)


def test_a_rollback_takes_a_checkpoint_of_this_cache():
    cache = make()
    with pytest.raises(CheckpointError, match="another cache"):
        cache.rollback(make().checkpoint())
    with pytest.raises(ArgumentTypeError):
        cache.rollback(0)
    with pytest.raises(ArgumentError):
        cache.checkpoint(3)
    with pytest.raises(ArgumentError):
        cache.scope(3)


def test_positions_go_with_their_tokens_and_keep_their_order():
    cache = make()
    feed(cache, [1, 2, 3, 4])
    cache.copy(0, 2, 1, 3)
    assert (held(cache, 2), cache.positions(2).tolist()) == ([2, 3], [1, 2])
    cache.move(2, 1)
    assert (held(cache, 1), cache.positions(1).tolist(), cache.next_position(1)) == ([2, 3], [1, 2], 3)
    for start, stop, delta in [(0, 1, 1), (1, 2, -1), (1, 3, 1), (0, None, -1), (0, 1, -1)]:
        with pytest.raises(ArgumentError, match="would come to position"):
            cache.shift(0, start, stop, delta, rotate=False)
    cache.shift(0, 3, None, 4, rotate=False)
    cache.shift(0, 1, 3, 4, rotate=False)
    assert cache.positions(0).tolist() == [0, 5, 6, 7]


def test_what_a_step_has_added_cannot_be_kept():
    cache = make()
    feed(cache, [1, 2])
    with cache.step([0, 1], 3):
        cache.append(0, chunk([3, 4, 5], [6, 7, 8]), chunk([3, 4, 5], [6, 7, 8]))
        for lane, n_tokens in [(0, 3), (0, 5), (1, 1)]:
            with pytest.raises(ArgumentError):
                cache.truncate(lane, n_tokens)
        assert cache.lengths == (5, 3, 0)
        cache.truncate(0, 2)
    assert cache.lengths == (2, 0, 0)


@pytest.mark.parametrize("backend", ["host", "torch"])
@pytest.mark.parametrize("lanes", [[0, 1], [1, 0]], ids=["views", "gathered"])
def test_behind_the_length_of_a_lane_there_are_zeros(backend, lanes):
    cache = make(backend, lanes=2)

    def new(lane, n):
        k = torch.full((1, 2, n, 4), 7.0)
        for layer in range(2):
            cache.append(layer, *([k, k] if backend == "torch" else [k.numpy(), k.numpy()]), lanes=[lane])

    def check(length):
        assert cache.lengths == (length, 6)
        for layer in range(2):
            for array in cache.read(layer, lanes):
                row = np.array(array.tolist()).reshape(array.shape)[lanes.index(0)]
                assert (row[:, :length] == 7).all()
                assert not row[:, length:].any()

    new(1, 6)
    check(0)
    new(0, 5)
    cache.truncate(0, 1)
    new(0, 1)  # less than was cut
    check(2)
    cache.truncate(0, 1)
    check(1)
    new(0, 1)
    check(2)
    new(0, 1)
    check(3)
    cache.copy(1, 0, 0, 5)
    cache.truncate(0, 2)
    check(2)
    new(0, 2)
    cache.remove(0, 0, 3)
    check(1)


def test_scopes():
    cache = make()
    feed(cache, [1, 2], [3, 4])
    with cache.scope(0) as mark:
        feed(cache, [5], [6])
        assert mark.lengths == {0: 2}
    assert cache.lengths == (2, 3, 0)
    scope = cache.scope()
    with scope:
        feed(cache, [7], [8], [9])
        cache.append(0, chunk([1]), chunk([1]))  # a step that is not finished
    assert cache.lengths == (2, 3, 0)
    with pytest.raises(CheckpointError), scope:
        pass
    with pytest.raises(CheckpointError), cache.scope(0):
        cache.reset(0)

    def fails():
        with cache.scope(0):
            cache.reset(0)
            raise KeyError

    with pytest.raises(KeyError):
        fails()


# ------------------------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_a_cache_takes_what_it_says(backend):
    spec = KVSpec([LayerSpec(2, 3, 5, "float16"), LayerSpec(3, 4, 4, "float32"), SharedLayer(0)])
    nbytes = LaneCache.arena_nbytes(spec, 3, 7)
    arena = Arena(nbytes, backend=backend)
    cache = LaneCache(arena, spec, lanes=3, max_tokens=7)
    assert cache.stats.reserved_nbytes == spec.nbytes(3, 7)
    assert nbytes - arena.stats.top < 256 * 8
    small = Arena(arena.stats.top - 1, backend=backend)
    with pytest.raises(OutOfMemoryError):
        LaneCache(small, spec, lanes=3, max_tokens=7)
    assert small.stats.used == 0
    before = arena.stats.used
    kind = torch.zeros if backend == "torch" else np.zeros
    types = ("float16", "float32") if backend == "host" else (torch.float16, torch.float32)
    for _ in range(2):
        cache.append(
            0, kind((3, 2, 1, 3), dtype=types[0]), kind((3, 2, 1, 5), dtype=types[0]), lanes=[2, 0, 1]
        )
        cache.append(
            1, kind((3, 3, 1, 4), dtype=types[1]), kind((3, 3, 1, 4), dtype=types[1]), lanes=[2, 0, 1]
        )
    assert arena.stats.used == before


def test_views_show_the_arena_and_addresses_stay():
    cache = make()
    start, stop = cache.arena.address, cache.arena.address + cache.arena.capacity
    first = feed(cache, [1], [2])
    vector, sums = cache.length_vector, cache.cu_seqlens()
    again = feed(cache, [3], [4])
    assert [x.data_ptr() for x in first] == [x.data_ptr() for x in again]
    assert vector.data_ptr() == cache.length_vector.data_ptr()
    assert sums.data_ptr() == cache.cu_seqlens([1]).data_ptr()
    assert vector.tolist() == [2, 2, 0]
    for array in (*again, vector, sums, *cache.packed(0), *cache.read(0, [1, 0])):
        assert start <= array.data_ptr() < stop
    assert first[0].data_ptr() != cache.read(1, [1, 0])[0].data_ptr()


def test_bounds_of_a_cache():
    arena = Arena("1MiB")
    for options, error in [
        ({"lanes": 0, "max_tokens": 1}, ArgumentError),
        ({"lanes": 1, "max_tokens": 0}, ArgumentError),
        ({"lanes": 1.0, "max_tokens": 1}, ArgumentTypeError),
        ({"lanes": 2**16, "max_tokens": 2**15}, ArgumentError),
    ]:
        with pytest.raises(error):
            LaneCache(arena, _SPEC, **options)
    with pytest.raises(ArgumentTypeError):
        LaneCache(arena, "spec", lanes=1, max_tokens=1)
    for what, layer in [
        ("slack=2", LayerSpec(1, 4, 4, "float32", window=4, slack=2)),
        ("storage='int8'", LayerSpec(1, 4, 4, "float32", storage="int8")),
    ]:
        with pytest.raises(ArgumentError, match=f"layer 1 has {what}"):
            LaneCache(arena, KVSpec([LayerSpec(1, 4, 4, "float32"), layer]), lanes=1, max_tokens=1)
    assert arena.stats.used == 0


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_a_cache_whose_arena_was_rolled_back_is_stale(backend):
    arena = Arena("1MiB", backend=backend)
    start = arena.checkpoint()
    cache = LaneCache(arena, _SPEC, lanes=3, max_tokens=16)
    k = torch.ones(2, 2, 2, 4) if backend == "torch" else np.ones((2, 2, 2, 4), np.float32)
    for layer in range(2):
        cache.append(layer, k, k)
    mark = cache.checkpoint()
    step = cache.step()
    arena.rollback(start)
    calls = [
        lambda: cache.append(0, k, k),
        lambda: cache.read(0),
        lambda: cache.packed(0),
        lambda: cache.mask(),
        lambda: cache.cu_seqlens(),
        lambda: cache.length_vector,
        lambda: cache.truncate(0, 1),
        lambda: cache.rollback(mark),
        lambda: cache.reset(),
        lambda: cache.reset(1),
        lambda: cache.keep(0),
        lambda: cache.abandon(),
        lambda: cache.remove(0, 0, 1),
        lambda: cache.copy(0, 1),
        lambda: cache.move(0, 1),
        lambda: cache.shift(0, 0, None, 1, rotate=False),
        step.__enter__,
    ]
    if backend == "torch":
        calls.append(lambda: cache.attend(0, k))
    for call in calls:
        with pytest.raises(StaleRegionError):
            call()
    assert cache.lengths == (2, 2, 0)
    assert cache.stats.n_tokens == 4
    assert cache.positions(0).tolist() == [0, 1]


def test_an_arena_that_goes_within_a_step_hides_no_error():
    arena = Arena("1MiB", backend="torch")
    start = arena.checkpoint()
    cache = LaneCache(arena, _SPEC, lanes=3, max_tokens=16)

    def step():
        with cache.step():
            arena.rollback(start)
            raise KeyError

    with pytest.raises(KeyError):
        step()
    assert cache.lengths == (0, 0, 0)


def test_an_arena_that_goes_within_a_scope_hides_no_error():
    def scope(error):
        arena = Arena("1MiB", backend="torch")
        start = arena.checkpoint()
        with LaneCache(arena, _SPEC, lanes=3, max_tokens=16).scope():
            arena.rollback(start)
            if error is not None:
                raise error

    with pytest.raises(KeyError):
        scope(KeyError)
    with pytest.raises(StaleRegionError):
        scope(None)


def test_a_shared_layer_reads_what_its_owner_holds():
    cache = make(spec=KVSpec([LayerSpec(2, 4, 4, "float32"), SharedLayer(0)]))
    with pytest.raises(ArgumentError, match="layer 1 shares the keys and values of layer 0"):
        cache.append(1, chunk([1]), chunk([1]))
    cache.append(0, chunk([1, 2]), chunk([1, 2]))
    assert cache.lengths[0] == 2  # the step has one layer, and is over
    cache.checkpoint()
    for name in ("read", "packed"):
        own, shared = (getattr(cache, name)(layer)[0] for layer in (0, 1))
        assert own.data_ptr() == shared.data_ptr()
        assert own.shape == shared.shape
    for layer in (2, -1):
        with pytest.raises(ArgumentError):
            cache.read(layer)
        with pytest.raises(ArgumentError):
            cache.mask(layer=layer)
        with pytest.raises(ArgumentError):
            cache.append(layer, chunk([1]), chunk([1]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float64", "int8", "complex64"])
def test_dtypes(dtype):
    cache = make(spec=KVSpec([LayerSpec(2, 4, 4, dtype), LayerSpec(2, 4, 2, "float32", value_dtype=dtype)]))
    one = getattr(torch, dtype)
    for values in ([3, 4], [5, 6], [7, 8]):
        lanes = [2, 0] if values == [5, 6] else [1, 2]
        new = chunk(*[[value] for value in values])
        cache.append(0, new.to(one), (new + 1).to(one), lanes=lanes)
        cache.append(1, new, (new + 1)[..., :2].to(one), lanes=lanes)
    cache.remove(2, 1, 2)
    for layer in range(2):
        for what in range(2):
            for read in (cache.read(layer), cache.read(layer, [1, 0, 2])):
                numbers = read[what].to(torch.complex64).real[:, 0, :, 0]
                order = [1, 0, 2] if read[0].data_ptr() != cache.read(layer)[0].data_ptr() else [0, 1, 2]
                expected = {0: [6, 0], 1: [3, 7], 2: [4, 8]}
                for row, lane in enumerate(order):
                    assert numbers[row].tolist() == [x + what if x else 0 for x in expected[lane]]


def test_tokens_one_by_one_in_lanes_of_different_lengths():
    cache = make()
    feed(cache, [1, 2], [3, 0], n_tokens=[2, 1])
    for number in (10, 20, 30):
        feed(cache, [number], [number + 1])
    feed(cache, [40], [41], lanes=[1, 2])
    feed(cache, [50], [51], lanes=[2, 1])
    assert held(cache, 0) == [1, 2, 10, 20, 30]
    assert held(cache, 1) == [3, 11, 21, 31, 40, 51]
    assert held(cache, 2) == [41, 50]


def test_values_that_are_wider_than_keys_are_gathered():
    cache = make(spec=KVSpec([LayerSpec(1, 3, 2, "int8", value_dtype="float64")]))
    keys = torch.arange(9, dtype=torch.int8).reshape(3, 1, 1, 3)
    values = torch.arange(6, dtype=torch.float64).reshape(3, 1, 1, 2)
    cache.append(0, keys, values)
    for order in ([1, 0], [2, 0, 1]):
        for x, y in zip((keys, values), cache.read(0, order), strict=True):
            assert torch.equal(y, x[order])
        for x, y in zip((keys, values), cache.packed(0, order), strict=True):
            assert torch.equal(y, x[order][:, :, 0])


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_in_debug_mode_nothing_is_reported(backend):
    cache = make(backend, debug=True)
    k = torch.ones(2, 2, 3, 4) if backend == "torch" else np.ones((2, 2, 3, 4), np.float32)
    for lanes in ([0, 1], [1, 0]):
        for layer in range(2):
            cache.append(layer, k, k, lanes=lanes, n_tokens=[3, 2])
    cache.remove(0, 1, 2)
    cache.copy(0, 2)
    cache.arena.check()
    assert cache.lengths == (4, 5, 4)
    cache.arena.close()


def test_what_does_not_fit_is_refused_before_anything_is_written():
    cache = make()
    feed(cache, [1], [2])
    k = chunk([3], [4])
    before = cache.arena.stats
    for keys, values, error in [
        (k.numpy(), k, ArgumentTypeError),
        (k, None, ArgumentTypeError),
        (k.half(), k, DTypeError),
        (k, k.double(), DTypeError),
        (k[0], k[0], ShapeError),
        (k[:, :1], k[:, :1], ShapeError),
        (k[..., :3], k, ShapeError),
        (k, k[..., :3], ShapeError),
        (k, k[:1], ShapeError),
        (k.to("meta"), k, DeviceMismatchError),
        (k.clone().requires_grad_(), k, AutogradError),
        (k, k.clone().requires_grad_(), AutogradError),
    ]:
        with pytest.raises(error):
            cache.append(0, keys, values)
    with pytest.raises(ArgumentTypeError):
        cache.append(0.0, k, k)
    with pytest.raises(DTypeError, match="keys are float64"):
        make("host").append(0, np.ones((1, 2, 1, 4)), np.ones((1, 2, 1, 4)))
    assert (held(cache, 0), held(cache, 1)) == ([1], [2])
    assert cache.arena.stats == before


@pytest.mark.parametrize("lanes", [[0, 1], [1, 0]], ids=["views", "gathered"])
@pytest.mark.parametrize("n_tokens", [[3, 3], [3, 2]], ids=["even", "uneven"])
def test_what_the_cache_returned_can_be_appended(n_tokens, lanes):
    cache = make(lanes=2, spec=KVSpec([LayerSpec(2, 4, 4, "float32")]))
    cache.append(0, chunk([1, 2, 3], [4, 5, 6]), chunk([1, 2, 3], [4, 5, 6]), n_tokens=n_tokens)
    keys, values = cache.read(0, lanes)
    cache.append(0, keys[:, :, :1], values[:, :, :1], lanes=lanes)
    for array in cache.read(0):
        assert array[0, :, :4, 0].tolist() == [[1, 2, 3, 1]] * 2
        assert array[1, :, : n_tokens[1] + 1, 0].tolist() == [[*[4, 5, 6][: n_tokens[1]], 4]] * 2


def test_tensors_that_require_grad_while_it_is_off():
    cache = make()
    for lanes in ([0, 1], [1, 2], [2, 0]):
        with torch.no_grad():
            k = chunk([1], [1]).requires_grad_()
            for layer in range(2):
                pair = cache.append(layer, k, k, lanes=lanes)
    assert not any(array.requires_grad for array in pair)
    assert not cache.read(0)[0].requires_grad


def test_inference_mode_and_what_comes_after():
    cache = make()
    with torch.inference_mode():
        feed(cache, [1, 2], [3, 99], n_tokens=[2, 1])
        feed(cache, [4], [5], lanes=[1, 0])
        vector = cache.length_vector
        cache.attend(0, torch.ones(3, 2, 1, 4))
        cache.packed(0)
    feed(cache, [6], [7])
    cache.truncate(0, 3)
    cache.remove(1, 0, 1)
    cache.copy(0, 2)
    assert held(cache, 0) == [1, 2, 5]
    assert held(cache, 1) == [4, 7]
    assert vector.tolist() == [3, 2, 3]


def test_heads_that_are_a_transposed_view():
    cache = make()
    new = torch.arange(3 * 2 * 2 * 4, dtype=torch.float32).reshape(3, 2, 2, 4)  # [rows, tokens, heads, dim]
    for n_tokens in ([2, 1, 2], [1, 1, 1]):
        for layer in range(2):
            keys, values = cache.append(layer, new.transpose(1, 2), -new.transpose(1, 2), n_tokens=n_tokens)
    expected = torch.cat([new[0], new[0, :1]]).transpose(0, 1)
    assert torch.equal(keys[0], expected)
    assert torch.equal(values[0], -expected)
    assert torch.equal(keys[1, :, :2], torch.cat([new[1, :1], new[1, :1]]).transpose(0, 1))


def test_figures():
    cache = make()
    feed(cache, [1, 2, 3], [4, 0, 0], n_tokens=[3, 1])
    cache.truncate(0, 2)
    with cache.step(n_tokens=5):
        cache.abandon()
    stats = cache.stats
    assert (stats.n_lanes, stats.n_active, stats.n_tokens, stats.longest) == (3, 2, 3, 2)
    assert stats.high_water_tokens == 3
    assert (stats.bytes_per_token, stats.used_nbytes) == (128, 384)
    assert stats.reserved_nbytes == 128 * 3 * 16
    assert stats.scratch_nbytes == 64 * 3 * 16
    assert repr(cache) == "LaneCache(lanes=3, max_tokens=16, lengths=[2, 1, 0])"
    cache.reset()
    assert cache.stats.high_water_tokens == 3


def test_handles_cannot_be_copied():
    cache = make()
    for handle in (cache, cache.checkpoint()):
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(NotCopyableError):
                way(handle)


def test_a_host_cache_needs_no_torch():
    code = (
        "import sys, numpy as np; from gpuarena import Arena; from gpuarena.kv import KVSpec;"
        "from gpuarena.kv.lanes import LaneCache;"
        "c = LaneCache(Arena(65536), KVSpec.uniform(layers=1, kv_heads=1, head_dim=4, dtype='float32'), lanes=2, max_tokens=4);"
        "c.append(0, np.ones((1, 1, 1, 4), 'f'), np.ones((1, 1, 1, 4), 'f'), lanes=[1]); c.mask();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_argument_that_there_is_not_is_told_of_the_class():
    with pytest.raises(
        TypeError, match=r"LaneCache\.__init__\(\) got an unexpected keyword argument 'batch'"
    ):
        LaneCache(Arena("1MiB"), _SPEC, lanes=1, max_tokens=16, batch=2)
