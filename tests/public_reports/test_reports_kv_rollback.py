"""What KV caches were reported for when drafts are rejected and prompts are kept: rollback on every kind of cache.

The oracle is a list of numbers: each token of layer i carries its number, i more for keys, and the negative for values.
"""

from __future__ import annotations

import random
import sys

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from gpuarena import Arena  # noqa: E402
from gpuarena.errors import ArgumentError, CheckpointError  # noqa: E402
from gpuarena.kv import KVCache, KVSpec, LayerSpec, SharedLayer  # noqa: E402
from gpuarena.kv.contiguous import ContiguousKVCache  # noqa: E402
from gpuarena.kv.lanes import LaneCache  # noqa: E402
from gpuarena.kv.paged import PagedKVCache  # noqa: E402

HEADS, DIM, MAX_TOKENS = 2, 4, 64
SPEC = KVSpec.uniform(layers=2, kv_heads=HEADS, head_dim=DIM, dtype="float32")


def dirty(nbytes):
    """An arena whose memory is NaN wherever nothing was written."""
    return Arena.from_buffer(torch.full((nbytes + 512,), 0xFF, dtype=torch.uint8))


def tokens(numbers, layer=0, *, heads=HEADS, dim=DIM):
    """[1, heads, n, dim] of numbers, with small parts that tell heads and elements apart."""
    column = torch.tensor(list(numbers), dtype=torch.float32)[None, None, :, None] + layer
    head, element = torch.arange(heads)[None, :, None, None], torch.arange(dim)[None, None, None, :]
    return column + head / 8 + element / 64


class Linear:
    """One row of a `KVCache`, under the verbs that the tests use of all kinds."""

    def __init__(self, backend="torch", spec=SPEC):
        if backend == "torch":
            arena = dirty(spec.arena_nbytes(1, MAX_TOKENS))
        else:
            arena = Arena("1MiB", backend=backend)
        self.cache = KVCache(arena, spec, batch=1, max_tokens=MAX_TOKENS)
        self.truncate, self.checkpoint, self.rollback = (
            self.cache.truncate,
            self.cache.checkpoint,
            self.cache.rollback,
        )

    @property
    def length(self):
        return self.cache.length

    def feed(self, *numbers):
        for layer in range(2):
            new = tokens(numbers, layer)
            self.cache.append(layer, new, -new)

    def contents(self):
        """[heads, n, dim] of keys and of values of each layer, of its own."""
        return [
            (self.cache.layers[layer].keys[0].clone(), self.cache.layers[layer].values[0].clone())
            for layer in range(2)
        ]


class Lane(Linear):
    def __init__(self):
        self.cache = LaneCache(dirty(1 << 16), SPEC, lanes=3, max_tokens=MAX_TOKENS)
        for layer in range(2):  # neighbours, one shorter and one longer
            new = tokens(range(9), layer).expand(2, -1, -1, -1)
            self.cache.append(layer, new, -new, lanes=[0, 2], n_tokens=[1, 9])
        self.truncate = lambda n_tokens: self.cache.truncate(1, n_tokens)
        self.checkpoint, self.rollback = lambda: self.cache.checkpoint(1), self.cache.rollback

    @property
    def length(self):
        return self.cache.lengths[1]

    def feed(self, *numbers):
        for layer in range(2):
            new = tokens(numbers, layer)
            self.cache.append(layer, new, -new, lanes=[1])

    def contents(self):
        return [tuple(array[0].clone() for array in self.cache.read(layer, [1])) for layer in range(2)]


class Paged(Linear):
    def __init__(self):
        nbytes = PagedKVCache.arena_nbytes(SPEC, num_pages=20, page_size=4)
        self.cache = PagedKVCache(dirty(nbytes), SPEC, num_pages=20, page_size=4)
        self.sequence = self.cache.sequence()
        self.truncate, self.checkpoint, self.rollback = (
            self.sequence.truncate,
            self.sequence.checkpoint,
            self.sequence.rollback,
        )

    @property
    def length(self):
        return self.sequence.length

    def feed(self, *numbers):
        for layer in range(2):
            new = tokens(numbers, layer)
            self.sequence.append(layer, new, -new)

    def contents(self):
        return [self.sequence.read(layer) for layer in range(2)]


class Contiguous(Linear):
    def __init__(self):
        nbytes = ContiguousKVCache.arena_nbytes(SPEC, capacity_tokens=3 * MAX_TOKENS)
        self.cache = ContiguousKVCache(dirty(nbytes), SPEC, capacity_tokens=3 * MAX_TOKENS)
        self.cache.request(7)
        self.request = self.cache.request(MAX_TOKENS)
        self.truncate = self.request.truncate
        self.checkpoint = lambda: self.request.length
        self.rollback = self.request.truncate

    @property
    def length(self):
        return self.request.length

    def feed(self, *numbers):
        for layer in range(2):
            new = tokens(numbers, layer)
            self.request.append(layer, new, -new)

    def contents(self):
        return [tuple(array[0].clone() for array in self.request.read(layer)) for layer in range(2)]


def quantised():
    return Linear(
        spec=KVSpec.uniform(layers=2, kv_heads=HEADS, head_dim=DIM, dtype="float32", storage="int8")
    )


def bounded():
    layer = {"layers": 2, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32"}
    return Linear(spec=KVSpec.uniform(**layer, window=4, slack=MAX_TOKENS))


KINDS = {
    "full": Linear,
    "growing": lambda: Linear("virtual:torch"),
    "int8": quantised,
    "bounded window": bounded,
    "lane": Lane,
    "paged": Paged,
    "contiguous": Contiguous,
}


@pytest.fixture(params=KINDS)
def kind(request):
    if request.param == "growing" and sys.platform != "linux":
        pytest.skip("needs Linux")
    return request.param


def holds(held, numbers, kind):
    """Whether it holds just these, in all layers."""
    for layer, (keys, values) in enumerate(held.contents()):
        wanted = tokens(numbers, layer)[0]
        if kind == "int8":  # off by half a scale, which is the 127th part of a token's largest element
            limit = wanted.abs().amax(-1, keepdim=True) / 127 * 0.51
            exact = [(keys - wanted).abs().le(limit).all(), (values + wanted).abs().le(limit).all()]
        else:
            exact = [torch.equal(keys, wanted), torch.equal(values, -wanted)]
        if keys.shape != wanted.shape or values.shape != wanted.shape or not all(exact):
            return False
    return held.length == len(numbers)


class Operations(TorchDispatchMode):
    """Records what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# ml-explore/mlx-lm#1486 (and 1423, 1427): what was rejected leaves traces behind, and the next tokens are wrong
@pytest.mark.parametrize("n_kept", [0, 1, 3, 4, 5, 8])
def test_ml_explore_mlx_lm_1486_rolling_back_and_appending_is_as_never_having_appended(kind, n_kept):
    prompt, drafts, accepted = list(range(n_kept)), [90, 91, 92, 93, 94], [40, 41, 42]
    back, never = KINDS[kind](), KINDS[kind]()
    for held in (back, never):
        if n_kept:
            held.feed(*prompt)
    mark = back.checkpoint()
    for _ in range(3):
        back.feed(*drafts)
        assert holds(back, prompt + drafts, kind)
        back.rollback(mark)
    for held in (back, never):
        held.feed(*accepted)
        assert holds(held, prompt + accepted, kind)
    for one, other in zip(back.contents(), never.contents(), strict=True):
        assert all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))


# ml-explore/mlx-lm#1528: a trim by a negative number makes the cache longer
def test_ml_explore_mlx_lm_1528_a_cut_never_makes_a_cache_longer(kind):
    held = KINDS[kind]()
    held.feed(1, 2, 3, 4, 5)
    for n_tokens in (-1, -5, 6, 1000, -(2**63)):
        with pytest.raises(ArgumentError):
            held.truncate(n_tokens)
        assert holds(held, [1, 2, 3, 4, 5], kind)
    held.truncate(5)
    held.truncate(2)
    assert holds(held, [1, 2], kind)


MIXED = KVSpec(
    [
        LayerSpec(2, 4, 4, "float32"),
        LayerSpec(1, 4, 4, "float32", window=3),
        LayerSpec(1, 8, 4, "float32", window=4, slack=3),
        LayerSpec(2, 4, 4, "float32", storage="int8"),
        SharedLayer(0),
    ]
)


# ml-explore/mlx-lm#1502, #1494: layers are trimmed by different amounts, or tokens that were trimmed come back
def test_ml_explore_mlx_lm_1502_all_layers_are_cut_or_none():
    cache = KVCache(dirty(MIXED.arena_nbytes(1, 64)), MIXED, batch=1, max_tokens=64)
    history = []

    def feed(*numbers):
        history.extend(numbers)
        for layer, spec in MIXED.owned:
            keys = tokens(numbers, heads=spec.kv_heads, dim=spec.key_dim)
            cache.append(layer, keys, -keys[..., : spec.value_dim])

    def check():
        assert [layer.length for layer in cache.layers] == [len(history)] * 5
        for layer, spec in enumerate(MIXED.layers[:4]):
            held = [number for run in cache.layers[layer].positions for number in run]
            keys = cache.layers[layer].keys
            wanted = tokens([history[place] for place in held], heads=spec.kv_heads, dim=spec.key_dim)
            torch.testing.assert_close(keys, wanted, atol=0.01 if layer < 3 else 0.5, rtol=0)
            assert len(held) >= min(4, len(history))
        assert torch.equal(cache.layers[4].keys, cache.layers[0].keys)

    feed(*range(20))
    feed(90, 91, 92)
    check()
    cache.truncate(20)
    del history[20:]
    feed(20)
    check()  # not 90, which lay in its place
    feed(*(21, 22, 23))
    for n_tokens in (1, 10):  # which the bounded layer does not hold any more
        with pytest.raises(ArgumentError, match="layer 2 has a bounded window"):
            cache.truncate(n_tokens)
        check()

    def fails_after_a_layer():
        with cache.step():
            cache.append(0, tokens([99]), -tokens([99]))
            1 / 0

    with pytest.raises(ZeroDivisionError):
        fails_after_a_layer()
    check()


# lablup/mlxcel#994: after a draft two tokens too many are trimmed
def test_lablup_mlxcel_994_any_number_of_drafts_is_accepted_exactly(kind):
    random_numbers = random.Random(994)
    held, history = KINDS[kind](), [0]
    held.feed(0)
    while len(history) < 40:
        n_drafts = random_numbers.randint(1, 6)
        n_accepted = random_numbers.randint(0, n_drafts)
        drafts = [1000 + len(history) * 10 + number for number in range(n_drafts)]
        held.feed(*drafts)
        held.truncate(held.length - (n_drafts - n_accepted))
        history += drafts[:n_accepted]
        assert holds(held, history, kind)
        held.feed(len(history))  # the token that the model says instead
        history.append(len(history))
        assert holds(held, history, kind)


# lablup/mlxcel#1209: a rollback copies the whole buffer
def test_lablup_mlxcel_1209_a_rollback_copies_nothing(kind):
    held = KINDS[kind]()
    held.feed(*range(20))
    mark = held.checkpoint()
    held.feed(*range(40))
    top = held.cache.arena.stats
    with Operations() as operations:
        held.rollback(mark)
        held.truncate(19)
    # The lengths of lanes are in an array that kernels read: three numbers are written to it, whatever the tokens.
    assert len(operations.names) <= (6 if kind == "lane" else 0), operations.names
    assert held.cache.arena.stats == top
    assert holds(held, range(19), kind)


# paiml/aprender#2014: to take back a draft the cache is emptied, and the prompt is computed again
def test_paiml_aprender_2014_the_prompt_stays(kind):
    held, prompt = KINDS[kind](), list(range(11))
    held.feed(*prompt)
    mark = held.checkpoint()
    for answer in range(5):
        held.feed(*range(100, 101 + answer))
        held.rollback(mark)
        assert holds(held, prompt, kind)
    held.truncate(3)
    if kind != "contiguous":  # where it is a number
        with pytest.raises(CheckpointError):  # the tokens it stood for are gone
            held.rollback(mark)
    assert holds(held, prompt[:3], kind)


# Blaizzy/mlx-vlm#1155, #1144: rows accept different numbers of drafts, and all are rolled back alike
def test_blaizzy_mlx_vlm_1155_each_row_is_rolled_back_by_itself():
    cache = LaneCache(dirty(1 << 16), SPEC, lanes=3, max_tokens=MAX_TOKENS)
    histories = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    width = 5
    for layer in range(2):
        rows = torch.cat([tokens([*ids, *[77] * (width - len(ids))], layer) for ids in histories])
        cache.append(layer, rows, -rows, n_tokens=[len(ids) for ids in histories])
    for turn, accepted in enumerate([(0, 4, 2), (1, 1, 1), (4, 0, 3), (3, 2, 0)]):
        drafts = [[100 * turn + 10 * row + number for number in range(4)] for row in range(3)]
        before = cache.lengths
        for layer in range(2):
            rows = torch.cat([tokens(ids, layer) for ids in drafts])
            cache.append(layer, rows, -rows)
        for row, n in enumerate(accepted):
            cache.truncate(row, before[row] + n)
            histories[row] += drafts[row][:n]
        assert cache.lengths == tuple(map(len, histories))
        assert cache.length_vector.tolist() == list(cache.lengths)
        for layer in range(2):
            keys, values = cache.read(layer)
            for row, ids in enumerate(histories):
                assert torch.equal(keys[row, :, : len(ids)], tokens(ids, layer)[0])
                assert torch.equal(values[row, :, : len(ids)], -tokens(ids, layer)[0])
                assert not keys[row, :, len(ids) :].any(), "rejected drafts are not shown"


# sgl-project/sglang#35694: tokens that were only drafted get into the key of the prefix
def test_sgl_project_sglang_35694_only_tokens_that_stay_are_found():
    held = Paged()
    ids, drafts = list(range(10, 16)), [90, 91, 92]
    held.feed(*ids)
    mark = held.checkpoint()
    held.feed(*drafts)
    assert held.sequence.publish(ids) == 4  # pages of four; the second holds drafts
    for wrong in ([*ids, *drafts], [*ids, 90, 91, 92, 0]):
        hit = held.cache.match(wrong)
        assert hit.length == 4
        hit.free()
    held.rollback(mark)
    held.feed(16, 17)
    right = [*ids, 16, 17]
    assert held.sequence.publish(right) == 8
    assert held.cache.match([*ids, *drafts]).length == 4
    hit = held.cache.match([*right, 0])
    assert hit.length == 8
    assert torch.equal(hit.read(1)[0], tokens(right, 1)[0])
