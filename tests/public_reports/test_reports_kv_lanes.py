"""What KV caches were reported for in batches: rows of their own lengths, rows that leave, beams that change places.

The oracle is a list of numbers for each row, and attention of each row by itself in plain torch.
"""

from __future__ import annotations

import random
import sys

import pytest

torch = pytest.importorskip("torch")

from gpuarena import Arena  # noqa: E402
from gpuarena.errors import ShapeError  # noqa: E402
from gpuarena.kv import KVCache, KVSpec, LayerSpec  # noqa: E402
from gpuarena.kv.lanes import LaneCache  # noqa: E402
from gpuarena.kv.paged import PagedKVCache  # noqa: E402

LAYERS, HEADS, DIM, MAX_TOKENS = 2, 2, 8, 32
SPEC = KVSpec.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="float32")


def dirty(nbytes):
    """An arena whose memory is NaN wherever nothing was written."""
    return Arena.from_buffer(torch.full((nbytes + 512,), 0xFF, dtype=torch.uint8))


def lanes(n=3):
    nbytes = LaneCache.arena_nbytes(SPEC, n, MAX_TOKENS)
    return LaneCache(dirty(nbytes), SPEC, lanes=n, max_tokens=MAX_TOKENS)


def linear(spec=SPEC, batch=3):
    return KVCache(dirty(spec.arena_nbytes(batch, MAX_TOKENS)), spec, batch=batch, max_tokens=MAX_TOKENS)


def block(rows, layer=0, heads=HEADS, dim=DIM):
    """[rows, heads, n, dim] of numbers, with small parts that tell heads and elements apart."""
    numbers = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), 1, -1, 1) + layer
    return numbers + torch.arange(heads)[None, :, None, None] / 8 + torch.arange(dim) / 64


def padded(histories):
    """The rows of one chunk, padded on the right with a number that must never be seen."""
    width = max(map(len, histories))
    return [[*ids, *[999] * (width - len(ids))] for ids in histories]


def feed(cache, histories, **where):
    """Append a chunk to every layer of lanes; rows may be of different lengths."""
    for layer in range(LAYERS):
        new = block(padded(histories), layer)
        cache.append(layer, new, -new, n_tokens=[len(ids) for ids in histories], **where)


def check_lanes(cache, histories):
    assert cache.lengths == tuple(map(len, histories))
    assert cache.length_vector.tolist() == list(map(len, histories))
    for layer in range(LAYERS):
        for lane, ids in enumerate(histories):
            keys, values = cache.read(layer, [lane])
            assert torch.equal(keys, block([ids], layer))
            assert torch.equal(values, -block([ids], layer))


def attention(q, keys, values):
    """Causal attention of the last queries of one row in plain torch: [heads, n, dim]."""
    n, length = q.shape[1], keys.shape[1]
    scores = q @ keys.transpose(1, 2) * DIM**-0.5
    later = torch.arange(length)[None] > torch.arange(length - n, length)[:, None]
    return torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ values


# unslothai/unsloth#3699, #3795, huggingface/transformers#30670: padded rows get the positions of the longest, and garbage
def test_unslothai_unsloth_3699_a_short_row_is_computed_as_if_it_were_alone():
    torch.manual_seed(3699)
    cache, lengths = lanes(), [2, 7, 4]
    whole = torch.randn(3, HEADS, 12, DIM)
    q = torch.randn(3, HEADS, 12, DIM)
    chunk = whole[:, :, :7].clone()
    for row, n in enumerate(lengths):
        chunk[row, :, n:] = torch.nan  # padding that would spoil whatever it gets into
    for layer in range(LAYERS):
        cache.append(layer, chunk, chunk * 2, n_tokens=lengths)
    assert [cache.positions(lane).tolist() for lane in range(3)] == [list(range(n)) for n in lengths]
    for layer in range(LAYERS):
        out = cache.attend(layer, q[:, :, :7], n_tokens=lengths)
        for row, n in enumerate(lengths):
            alone = attention(q[row, :, :n], whole[row, :, :n], whole[row, :, :n] * 2)
            torch.testing.assert_close(out[row, :, :n], alone)
            assert not out[row, :, n:].any(), "padding asks nothing"
    for _ in range(4):
        assert [cache.next_position(lane) for lane in range(3)] == lengths
        new = torch.stack([whole[row, :, n : n + 1] for row, n in enumerate(lengths)])
        ask = torch.stack([q[row, :, n : n + 1] for row, n in enumerate(lengths)])
        for layer in range(LAYERS):
            cache.append(layer, new, new * 2)
        lengths = [n + 1 for n in lengths]
        mask = cache.mask()
        for row, n in enumerate(lengths):
            assert mask[row, 0, 0].tolist() == [place < n for place in range(max(lengths))]
            alone = attention(ask[row], whole[row, :, :n], whole[row, :, :n] * 2)
            for layer in range(LAYERS):
                torch.testing.assert_close(cache.attend(layer, ask)[row], alone)


# jundot/omlx#2172: after a row has left, tokens are appended behind the longest row's end, over live ones of others
def test_jundot_omlx_2172_rows_are_appended_behind_their_own_ends():
    cache = lanes()
    histories = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    feed(cache, histories)
    cache.reset(0)
    histories[0] = []
    feed(cache, [[11], [12]], lanes=[1, 2])
    histories[1].append(11)
    histories[2].append(12)
    check_lanes(cache, histories)
    cache.move(2, 0)  # the batch is made dense again
    histories[0], histories[2] = histories[2], []
    feed(cache, [[13], [14]])
    histories[0].append(13)
    histories[1].append(14)
    check_lanes(cache, histories)


# huggingface/transformers#42454 (and 42467, 42960, 32657): a static cache wants just the batch that it was made for
def test_huggingface_transformers_42454_any_batch_up_to_the_largest():
    cache = linear(batch=4)
    for n_rows in (1, 3, 4, 2):
        cache.reset()
        for layer in range(LAYERS):
            new = block([[10 * row, 10 * row + 1] for row in range(n_rows)], layer)
            keys, values = cache.append(layer, new, -new)
            assert torch.equal(keys, new)
            assert torch.equal(values, -new)
    for wrong in (5, 1, 3):  # too many, and others than the two that are held
        new = block([[7]] * wrong)
        with pytest.raises(ShapeError):
            cache.append(0, new, new)
        assert (cache.rows, [layer.length for layer in cache.layers]) == (2, [2, 2])
    for call in (lambda: cache.repeat(3), lambda: cache.select([0, 1, 1, 0, 1])):
        with pytest.raises(ShapeError, match="the cache was made for 1 to 4"):
            call()
    assert (cache.rows, cache.length) == (2, 2)
    for layer in range(LAYERS):
        new = block([[2], [12]], layer)
        assert torch.equal(cache.append(layer, new, -new)[0], block([[0, 1, 2], [10, 11, 12]], layer))
    empty = linear(batch=4)
    with pytest.raises(ShapeError, match="5 rows given"):
        empty.append(0, block([[7]] * 5), block([[7]] * 5))
    assert (empty.rows, empty.length) == (None, 0)


# ml-explore/mlx-lm#798: a batch from which all rows were filtered crashes
def test_ml_explore_mlx_lm_798_no_rows_are_a_batch_too():
    none = torch.ones(0, HEADS, 1, DIM)
    cache = lanes()
    feed(cache, [[1, 2], [3], [4]])
    with cache.step(lanes=[]):
        for layer in range(LAYERS):
            keys, values = cache.append(layer, none, none)
            assert keys.shape == values.shape == (0, HEADS, 0, DIM)
    assert cache.attend(0, none, lanes=[]).shape == (0, HEADS, 1, DIM)
    assert cache.mask(lanes=[]).shape[0] == 0
    check_lanes(cache, [[1, 2], [3], [4]])
    cache.reset()
    assert cache.read(0)[0].shape == (3, HEADS, 0, DIM)
    nbytes = PagedKVCache.arena_nbytes(SPEC, num_pages=4, page_size=4)
    paged = PagedKVCache(dirty(nbytes), SPEC, num_pages=4, page_size=4)
    with paged.step([], 1) as step:
        for layer in range(LAYERS):
            step.write(layer, none, none)
            assert step.attend(layer, none).shape == (0, HEADS, 1, DIM)
    assert paged.flashinfer_tables([]).kv_indptr.tolist() == [0]
    assert paged.available == 4


# rasbt/reasoning-from-scratch#33: the caches of the rows of a batch are mixed up
def test_rasbt_reasoning_from_scratch_33_no_row_gets_what_is_anothers():
    numbers, cache = random.Random(33), lanes(4)
    histories, count = [[] for _ in range(4)], 0
    for _ in range(40):
        rows = numbers.sample(range(4), numbers.randint(1, 4))
        rows = [row for row in rows if len(histories[row]) < MAX_TOKENS - 3]
        new = []
        for row in rows:
            ids = [count + number for number in range(numbers.randint(0, 3))]
            count += len(ids)
            histories[row] += ids
            new.append(ids)
        if rows and any(new):
            feed(cache, new, lanes=rows)
        if numbers.random() < 0.2:
            row = numbers.randrange(4)
            cache.reset(row)
            histories[row] = []
        if numbers.random() < 0.2:
            source, target = numbers.sample(range(4), 2)
            cache.copy(source, target)
            histories[target] = list(histories[source])
        check_lanes(cache, histories)
    assert count > 60


_BEAMS = {
    "full": {},
    "window": {"window": 4},
    "bounded": {"window": 4, "slack": 3},
    "bounded with sinks": {"window": 4, "slack": 3, "sinks": 2},
    "ring": {"window": 4, "slack": 3},
    "int8": {"storage": "int8"},
    "float8": {"storage": "float8_e4m3fn"},
    "int4": {"storage": "int4"},
    "growing": {},
}


# huggingface/transformers#46612, #48700, #34232: beams that change places alias each other, or quantised ones stay behind
@pytest.mark.parametrize("kind", _BEAMS)
@pytest.mark.parametrize("order", [(2, 0, 1), (1, 1, 1), (0, 2, 2), (0, 1, 2)])
def test_huggingface_transformers_46612_rows_change_places_in_every_layer(kind, order):
    if kind in ("ring", "growing"):
        if sys.platform != "linux":
            pytest.skip("needs Linux")
        layer = LayerSpec(HEADS, DIM, DIM, "float32", **_BEAMS[kind])
        spec = KVSpec([layer, layer])
        arena = Arena("2MiB", backend="virtual:torch")
        cache = KVCache(arena, spec, batch=3, max_tokens=MAX_TOKENS, rings=kind == "ring")
    else:
        layer = LayerSpec(HEADS, DIM, DIM, "float32", **_BEAMS[kind])
        cache = linear(KVSpec([layer, LayerSpec(HEADS, DIM, DIM, "float32")]))
    histories = [[100 * row + number for number in range(9)] for row in range(3)]
    for _ in range(2):
        for number in range(LAYERS):
            new = block([ids[cache.layers[number].length :] for ids in histories], number)
            cache.append(number, new, -new)
        held = [[layer.keys.clone(), layer.values.clone()] for layer in cache.layers]
        cache.reorder(list(order))
        for layer, arrays in zip(cache.layers, held, strict=True):
            assert torch.equal(layer.keys, arrays[0][list(order)])
            assert torch.equal(layer.values, arrays[1][list(order)])
        histories = [list(histories[row]) for row in order]
        for row, ids in enumerate(histories):
            ids.append(500 + row)  # each goes on by itself: no two rows are one memory
        for number in range(LAYERS):
            new = block([ids[-1:] for ids in histories], number)
            cache.append(number, new, -new)
        for number, layer in enumerate(cache.layers):
            kept = [place for run in layer.positions for place in run]
            wanted = block([[ids[place] for place in kept] for ids in histories], number)
            storage = _BEAMS[kind].get("storage") if number == 0 or kind in ("ring", "growing") else None
            # half a step of what 127 steps or 15 reach, or the 16th part
            step = {None: 0, "int8": 0.004, "float8_e4m3fn": 0.0625, "int4": 0.05}[storage]
            for array, sign in ((layer.keys, 1), (layer.values, -1)):
                limit = wanted.abs().amax(-1, keepdim=True) * step
                assert ((array - sign * wanted).abs() <= limit).all()
        for ids in histories:
            ids.extend(range(700, 702))
