"""What a `ContiguousKVCache` promises beside its contents, which tests/properties/test_contiguous_machine.py models."""

from __future__ import annotations

import copy
import doctest
import gc
import pickle
import random
import subprocess
import sys
import weakref

import numpy as np
import pytest

from gpuarena import Arena
from gpuarena.errors import (
    ArgumentError,
    ArgumentTypeError,
    AutogradError,
    CapacityError,
    DeviceMismatchError,
    DTypeError,
    LayerOrderError,
    NotCopyableError,
    OutOfMemoryError,
    SequenceError,
    ShapeError,
    StaleRegionError,
)
from gpuarena.kv.contiguous import ContiguousKVCache, _layers
from gpuarena.kv.contiguous import cache as contiguous_cache
from gpuarena.kv.spec import KVSpec, LayerSpec, SharedLayer

POLICIES = ["first_fit", "best_fit", "buddy"]
SMALL = KVSpec.uniform(layers=2, kv_heads=2, head_dim=4, dtype="float32")
policies = pytest.mark.parametrize("policy", POLICIES)


def made(spec=SMALL, *, capacity=16, policy="first_fit", backend="host"):
    nbytes = ContiguousKVCache.arena_nbytes(spec, capacity_tokens=capacity)
    return ContiguousKVCache(Arena(nbytes, backend=backend), spec, capacity_tokens=capacity, policy=policy)


def tokens(first, n, *, heads=2, dim=4):
    """[1, heads, n, dim], all numbers of a token alike."""
    return np.broadcast_to(np.arange(first, first + n, dtype=np.float32)[:, None], (1, heads, n, dim)).copy()


def step(request, first, n, n_layers=2):
    k = tokens(first, n)
    return [request.append(layer, k + layer, -k - layer) for layer in range(n_layers)]


def held(request, layer=0):
    """The tokens of a request, read back from the first number of each."""
    keys, values = request.read(layer, request.length)
    found = np.asarray(keys)[0, 0, :, 0] - layer
    np.testing.assert_array_equal(np.asarray(keys), -np.asarray(values))
    return found.tolist()


def test_the_examples_run():
    results = doctest.testmod(contiguous_cache)
    assert results.attempted
    assert not results.failed


def test_it_needs_no_array_library_that_is_not_used():
    code = "import sys, gpuarena.kv.contiguous; sys.exit(bool({'torch', 'cupy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- memory -------------------------------------------------------------------------------------------------------

MIXED = KVSpec(
    [
        LayerSpec(2, 4, 4, "float32"),
        LayerSpec(1, 6, 2, "bfloat16"),
        SharedLayer(1),
        LayerSpec(1, 8, 0, "float16"),
        LayerSpec(3, 2, 2, "float32", value_dtype="float16"),
    ]
)


@pytest.mark.parametrize("alignment", [1, 16, 256, 1024])
@pytest.mark.parametrize("capacity", [1, 7, 300])
@pytest.mark.parametrize("spec", [SMALL, MIXED])
def test_the_arena_has_to_be_as_large_as_it_says(spec, capacity, alignment):
    nbytes = ContiguousKVCache.arena_nbytes(spec, capacity_tokens=capacity, alignment=alignment)
    arena = Arena(nbytes, alignment=alignment)
    cache = ContiguousKVCache(arena, spec, capacity_tokens=capacity)
    stats = cache.stats
    assert stats.reserved_nbytes + stats.scratch_nbytes == arena.stats.used <= nbytes
    assert stats.reserved_nbytes == spec.nbytes(1, capacity)


def test_keys_and_values_lie_together_where_they_are_alike():
    arena = Arena("1MiB")
    ContiguousKVCache(arena, MIXED, capacity_tokens=10)
    assert arena.by_label() == {
        "layer0.pairs": 2 * 2 * 10 * 4 * 4,
        "layer1.keys": 10 * 6 * 2,
        "layer1.values": 10 * 2 * 2,
        "layer3.keys": 10 * 8 * 2,
        "layer3.values": 0,
        "layer4.keys": 3 * 10 * 2 * 4,
        "layer4.values": 3 * 10 * 2 * 2,
        "scratch": 10 * 2 * 2 * 4 * 4,
    }


@pytest.mark.parametrize("missing", [1, 300, 4096])
def test_all_memory_is_taken_or_none(missing):
    spec = KVSpec.uniform(layers=4, kv_heads=2, head_dim=16, dtype="float32")
    nbytes = ContiguousKVCache.arena_nbytes(spec, capacity_tokens=64)
    arena = Arena(nbytes - missing)
    with pytest.raises(OutOfMemoryError):
        ContiguousKVCache(arena, spec, capacity_tokens=64)
    assert (arena.stats.used, arena.stats.top) == (0, 0)


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_no_memory_is_taken_later(backend):
    if backend == "torch":
        torch = pytest.importorskip("torch")
    cache = made(capacity=64, backend=backend)
    before = cache.arena.stats.n_allocs_total
    requests = [cache.request(8) for _ in range(8)]
    for request in requests:
        k = tokens(0, 8)
        for layer in range(2):
            k_given = torch.from_numpy(k) if backend == "torch" else k
            request.append(layer, k_given, k_given)
    for request in requests[::2]:
        request.free()
    cache.compact()
    assert cache.arena.stats.n_allocs_total == before


def test_the_tokens_of_one_head_are_one_run_of_bytes():
    cache = made(capacity=32)
    cache.request(5)
    request = cache.request(10)
    (keys, values), _ = step(request, 0, 7)
    for array in (keys, values):
        assert array.shape == (1, 2, 7, 4)
        assert all(array[0, head].flags.c_contiguous for head in range(2))
    assert keys.strides[1] == 32 * 4 * 4
    first = keys.__array_interface__["data"][0]
    assert step(request, 7, 2)[0][0].__array_interface__["data"][0] == first
    assert (first - cache.arena.address) == 5 * 4 * 4


def test_views_are_in_place():
    cache = made()
    request = cache.request(4)
    (keys, _), _ = step(request, 1, 2)
    keys[0, 1, 1, 3] = 99
    assert request.read(0, 2)[0][0, 1, 1, 3] == 99


def test_nothing_keeps_the_memory_of_a_cache_that_was_dropped():
    cache = made()
    request = cache.request(4)
    dropped = weakref.ref(cache._scratch)
    gc.disable()
    try:
        del cache, request
        assert dropped() is None
    finally:
        gc.enable()


def test_a_rolled_back_arena_makes_it_stale():
    arena = Arena("1MiB")
    start = arena.checkpoint()
    cache = ContiguousKVCache(arena, SMALL, capacity_tokens=16)
    other = cache.request(2)
    request = cache.request(4)
    step(request, 0, 2)
    other.free()
    arena.rollback(start)
    assert not request.is_live
    for call in (
        lambda: step(request, 2, 1),
        lambda: request.read(0),
        cache.compact,
        lambda: cache.compact(for_tokens=12),
    ):
        with pytest.raises(StaleRegionError):
            call()
    assert (request.length, request.start, cache.stats.n_copied_total) == (2, 2, 0)


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (LayerSpec(1, 4, 4, "float32", window=8, slack=4), "layer 1 has slack=4"),
        (LayerSpec(1, 4, 4, "float32", storage="int8"), "layer 1 has storage='int8'"),
    ],
)
def test_a_kind_of_layer_that_it_does_not_have_is_named(layer, message):
    spec = KVSpec([LayerSpec(1, 4, 4, "float32"), layer])
    arena = Arena("1MiB")
    with pytest.raises(ArgumentError, match=message):
        ContiguousKVCache(arena, spec, capacity_tokens=16)
    with pytest.raises(ArgumentError, match="or use KVCache"):
        ContiguousKVCache.arena_nbytes(spec, capacity_tokens=16)
    assert arena.stats.used == 0


def test_arguments_that_can_never_be_right():
    arena = Arena("1MiB")
    with pytest.raises(ArgumentError, match="'first_fit', 'best_fit', 'buddy', not 'worst_fit'"):
        ContiguousKVCache(arena, SMALL, capacity_tokens=4, policy="worst_fit")
    with pytest.raises(ArgumentTypeError, match="policy must be a str, not list"):
        ContiguousKVCache(arena, SMALL, capacity_tokens=4, policy=["buddy"])
    with pytest.raises(ArgumentTypeError, match="spec must be a KVSpec, not list"):
        ContiguousKVCache(arena, [], capacity_tokens=4)
    for value, error in ((0, ArgumentError), (2.0, ArgumentTypeError), (None, ArgumentTypeError)):
        with pytest.raises(error, match="capacity_tokens"):
            ContiguousKVCache(arena, SMALL, capacity_tokens=value)
    assert arena.stats.used == 0
    cache = made()
    request = cache.request(4)
    for value, error in (
        (0, ArgumentError),
        (-1, ArgumentError),
        (2.0, ArgumentTypeError),
        (True, ArgumentTypeError),
    ):
        for call in (
            cache.request,
            cache.would_fit,
            cache.diagnose,
            lambda n: cache.compact(for_tokens=n),
            request.grow,
        ):
            with pytest.raises(error):
                call(value)
    for value, error in ((-1, ArgumentError), (1.0, ArgumentTypeError)):
        for call in (request.truncate, lambda n: request.read(0, n), lambda n: request.read(n)):
            with pytest.raises(error):
                call(value)
    assert cache.occupancy.free == 12


def test_arrays_that_do_not_match_are_refused_before_anything_is_written():
    cache = made()
    request = cache.request(8)
    step(request, 1, 2)
    k = tokens(5, 2)
    for keys, values, error, message in [
        (k[0], k[0], ShapeError, r"keys are \[2, 2, 4\], a request takes \[1, 2, tokens, 4\]"),
        (k.repeat(2, 0), k.repeat(2, 0), ShapeError, r"keys are \[2, 2, 2, 4\]"),
        (k[:, :1], k, ShapeError, "keys are"),
        (k[..., :3], k, ShapeError, "keys are"),
        (
            k,
            k[:, :, :1],
            ShapeError,
            r"values are \[1, 2, 1, 4\], for these keys they must be \[1, 2, 2, 4\]",
        ),
        (k, k.astype(np.float64), DTypeError, "values float64, the cache holds float32"),
        (k.tolist(), k, ArgumentTypeError, "keys must be a numpy.ndarray, not list"),
        (k, None, ArgumentTypeError, "values must be a numpy.ndarray, not NoneType"),
    ]:
        with pytest.raises(error, match=message):
            request.append(0, keys, values)
    with pytest.raises(ArgumentError, match="layer 2: the spec has layers 0 to 1"):
        request.append(2, k, k)
    assert (held(request), cache.occupancy.used) == ([1, 2], 2)


def test_a_shared_layer_reads_its_owner():
    layer = LayerSpec(2, 4, 4, "float32", window=3)
    cache = made(KVSpec([layer, SharedLayer(0), layer, SharedLayer(2)]))
    request = cache.request(8)
    k = tokens(0, 5)
    with pytest.raises(
        ArgumentError, match=r"layer 1 owns nothing to append to: it reads layer 0; read\(1\)"
    ):
        request.append(1, k, k)
    keys, _ = request.append(0, k, k)
    np.testing.assert_array_equal(request.read(1, 5)[0], keys)
    with pytest.raises(ArgumentError, match=r"read\(3, 1\): layer 2 holds only 0 tokens"):
        request.read(3)
    request.append(2, k + 1, k + 1)
    np.testing.assert_array_equal(request.read(3, 5)[0], k + 1)
    np.testing.assert_array_equal(request.read(3)[0], (k + 1)[:, :, 2:])


def test_a_window_shows_the_last_tokens_and_with_sinks_all():
    near, far = LayerSpec(2, 4, 4, "float32", window=3), LayerSpec(2, 4, 4, "float32", window=3, sinks=1)
    cache = made(KVSpec([near, far]))
    cache.request(2)
    request = cache.request(8)
    step(request, 0, 5)
    (near_keys, _), (far_keys, _) = step(request, 5, 2)
    assert near_keys[0, 0, :, 0].tolist() == [3, 4, 5, 6]
    assert far_keys[0, 0, :, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    request.truncate(2)
    assert step(request, 2, 1)[0][0][0, 0, :, 0].tolist() == [0, 1, 2]
    assert request.read(0)[0].shape == (1, 2, 3, 4)
    assert request.read(0, 0)[0].shape == (1, 2, 2, 4)


# -- steps --------------------------------------------------------------------------------------------------------


def test_a_step_writes_each_layer_once_in_order():
    cache = made(KVSpec.uniform(layers=3, kv_heads=2, head_dim=4, dtype="float32"))
    request, other = cache.request(8), cache.request(8)
    k = tokens(0, 2)
    with pytest.raises(LayerOrderError, match="layer 1 is written before layer 0, which is due"):
        request.append(1, k, k)
    request.append(0, k, k)
    with pytest.raises(
        LayerOrderError, match=r"layer 0 was written in this step already, which lacks layer 1.*truncate\(0\)"
    ) as caught:
        request.append(0, k, k)
    assert caught.value.layer == 0
    with pytest.raises(LayerOrderError, match="layer 2 is written before layer 1"):
        request.append(2, k, k)
    with pytest.raises(ShapeError, match="layer 1: 1 tokens given, but this step has 2 in the layers before"):
        request.append(1, k[:, :, :1], k[:, :, :1])
    other.append(0, k, k)  # the requests of a batch go through a layer together
    request.append(1, k, k)
    assert request.length == 0
    request.append(2, k, k)
    assert (request.length, other.length) == (2, 0)


def test_an_unfinished_step_is_dropped_by_truncate():
    cache = made()
    request = cache.request(8)
    step(request, 1, 3)
    step(request, 7, 2, n_layers=1)
    assert (request.length, cache.occupancy.used) == (3, 5)
    request.truncate(3)
    assert (request.length, cache.occupancy.used) == (3, 3)
    step(request, 4, 1)
    assert held(request) == held(request, 1) == [1, 2, 3, 4]


def test_no_tokens_are_a_step_too():
    cache = made()
    request = cache.request(1)
    assert step(request, 0, 0)[0][0].shape == (1, 2, 0, 4)
    step(request, 5, 1)
    step(request, 0, 0)
    assert held(request) == [5]


@policies
def test_a_full_request_says_how_much_is_too_much(policy):
    cache = made(policy=policy, capacity=16)
    request = cache.request(5)
    step(request, 0, 4)
    with pytest.raises(
        CapacityError, match=r"4 of 5 tokens used, 3 more asked, 2 too many.*grow\(7\)"
    ) as caught:
        step(request, 4, 3)
    error = caught.value
    assert (error.used, error.requested, error.capacity, error.available) == (4, 3, 5, 1)
    assert (error.free, error.largest_hole, error.missing, error.unit) == (1, 1, 2, "tokens")
    with pytest.raises(CapacityError, match="it can grow to 16 tokens where it lies"):
        step(request, 4, 20)
    with pytest.raises(CapacityError, match="1 too many"):
        step(request, 4, 2)
    request.grow(7)
    step(request, 4, 3)
    assert (held(request), request.max_tokens) == ([0, 1, 2, 3, 4, 5, 6], 7)


# -- growth and ends ----------------------------------------------------------------------------------------------


def test_growth_needs_the_slots_behind():
    cache = made(capacity=12)
    request, behind = cache.request(4), cache.request(4)
    step(request, 0, 4)
    with pytest.raises(
        CapacityError, match="cannot grow in place from 4 to 6 slots, since 0 of the 2"
    ) as caught:
        request.grow(6)
    assert caught.value.cause == "fragmentation"
    with pytest.raises(ArgumentError, match=r"grow\(3\): the request has 4 tokens reserved already"):
        request.grow(3)
    request.grow(4)
    behind.free()
    request.grow(6)
    step(request, 4, 2)
    assert (held(request), cache.occupancy.free) == ([0, 1, 2, 3, 4, 5], 6)
    assert cache.stats.high_water_slots == 8
    request.grow(12)
    assert (cache.occupancy.free, cache.stats.high_water_slots) == (0, 12)


def test_a_buddy_request_grows_inside_of_its_block_for_nothing():
    cache = made(policy="buddy")
    request = cache.request(3)
    cache.request(3)
    request.grow(4)
    assert (request.max_tokens, cache.occupancy.reserved) == (4, 8)
    with pytest.raises(CapacityError):
        request.grow(5)
    assert request.max_tokens == 4


def test_slots_are_given_back_once():
    cache = made()
    request, other = cache.request(4), cache.request(4)
    request.free()
    again = cache.request(4)
    assert (again.start, request.start) == (0, 0)
    with pytest.raises(SequenceError, match=r"free: the request at slot 0 gave its slots back by free\(\)"):
        request.free()
    with pytest.raises(SequenceError, match="append: "):
        step(request, 0, 1)
    assert again.is_live
    assert not request.is_live
    cache.reset()
    with pytest.raises(SequenceError, match=r"gave its slots back by reset\(\)"):
        other.free()
    assert cache.occupancy.free == 16
    assert (cache.stats.n_requests, cache.stats.n_requests_total) == (0, 3)


def test_handles_cannot_be_copied():
    cache = made()
    request = cache.request(4)
    for handle in (cache, request):
        with pytest.raises(NotCopyableError):
            pickle.dumps(handle)
        with pytest.raises(NotCopyableError):
            copy.copy(handle)
    step(request, 0, 1)
    assert repr(request) == "<Request at slot 0: 1 of 4 tokens>"
    request.free()
    assert repr(request) == "<Request freed by free(): 1 of 4 tokens>"


# -- fragmentation ------------------------------------------------------------------------------------------------


def test_forty_percent_are_free_and_long_requests_are_refused():
    cache = made(capacity=1000)
    requests = [cache.request(100) for _ in range(10)]
    for number, request in enumerate(requests):
        step(request, 1000 * number, 90)
    for request in requests[1:9:2]:
        request.free()
    assert cache.occupancy.free == 400
    assert [cache.would_fit(n) for n in (100, 101, 150, 400)] == [True, False, False, False]
    with pytest.raises(CapacityError) as caught:
        cache.request(150)
    error = caught.value
    assert (error.free, error.largest_hole, error.cause, error.requested) == (400, 100, "fragmentation", 150)
    assert str(error) == (
        "A request of 150 tokens does not fit although 400 of 1000 slots (40 %) are free, in 4 holes of at most 100. Of "
        "the 600 reserved slots, 60 hold no token; without them 460 would be free. The holes at 100 and 300 would be "
        "one that is long enough without the allocation at 200. The request fits after a compaction that moves 1 "
        "allocation and copies 90 tokens, or once any one of the allocations at 0, 200, 400, 600 and 800 ends. A "
        "request of at most 100 tokens fits now. In pages of 16 tokens it would fit: the tokens held and the request "
        "take 46 of 62 pages. Nothing was changed"
    )
    assert str(cache.diagnose(150)) == error.diagnosis.text
    assert pickle.loads(pickle.dumps(error)).diagnosis == error.diagnosis
    short = cache.request(100)  # a short one is served
    short.free()
    with pytest.raises(CapacityError) as caught:
        cache.request(401)
    assert caught.value.cause == "memory"
    assert (cache.stats.n_refused_fragmentation, cache.stats.n_refused_memory) == (1, 1)
    assert cache.compact(for_tokens=150) == 90
    assert requests[2].start == 100
    long = cache.request(150)
    assert long.start == 200
    step(long, 70_000, 150)
    for number in (0, 2, 4, 6, 8, 9):
        expected = [float(1000 * number + position) for position in range(90)]
        assert held(requests[number]) == held(requests[number], 1) == expected


def test_random_traffic_refuses_the_long_ones():
    """The share of refused requests by length, where a request that does not fit is rejected."""
    draw, cache = random.Random(3), made(capacity=2048)
    ends, refused, asked = {}, {"short": 0, "long": 0}, {"short": 0, "long": 0}
    n_free = []
    for now in range(3000):
        for request in ends.pop(now, ()):
            request.free()
        kind = "long" if draw.random() < 0.25 else "short"
        n = draw.randint(400, 600) if kind == "long" else draw.randint(20, 100)
        asked[kind] += 1
        fits, n_total = cache.would_fit(n), cache.occupancy.free
        try:
            request = cache.request(n)
        except CapacityError as error:
            assert not fits
            refused[kind] += 1
            if error.cause == "fragmentation":
                n_free.append(n_total)
        else:
            assert fits
            ends.setdefault(now + draw.randint(5, 25), []).append(request)
    assert refused["long"] / asked["long"] > 10 * max(refused["short"], 1) / asked["short"]
    assert max(n_free) >= 0.4 * 2048  # free when a request was refused for fragmentation
    assert cache.stats.n_refused_fragmentation == len(n_free) > 50


@pytest.mark.parametrize("n_staged", [1, 2, 5, 256])
@pytest.mark.parametrize("distance", [1, 2, 3, 7, 20, 30])
@pytest.mark.parametrize("backend", ["host", "torch"])
def test_a_request_slides_over_itself(backend, distance, n_staged, monkeypatch):
    if backend == "torch":
        torch = pytest.importorskip("torch")
    monkeypatch.setattr(_layers, "_SCRATCH_TOKENS", n_staged)
    spec = KVSpec([LayerSpec(2, 4, 4, "float32"), LayerSpec(2, 4, 4, "float32", value_dtype="float64")])
    cache = made(spec, capacity=64, backend=backend)
    below, request, above = cache.request(distance), cache.request(20), cache.request(3)

    def given(first, n, layer):
        k = tokens(first, n)
        pair = (k, -k.astype(np.float64 if layer else np.float32))
        return map(torch.from_numpy, pair) if backend == "torch" else pair

    for first, n, one in ((100, 18, request), (500, 3, above)):
        for layer in range(2):
            one.append(layer, *given(first, n, layer))
    request.append(0, *given(118, 2, 0))  # a step that is under way moves too
    below.free()
    assert cache.compact() == 20 + 3
    request.append(1, *given(118, 2, 1))
    assert (request.start, above.start) == (0, 20)
    for layer in range(2):
        for one, first, n in ((request, 100, 20), (above, 500, 3)):
            keys, values = map(np.asarray, one.read(layer, n))
            np.testing.assert_array_equal(keys, tokens(first, n))
            np.testing.assert_array_equal(values, -tokens(first, n))


class Backwards:
    """Array operations on lists, whose copies run from the last token to the first, which spoils what overlaps."""

    def __init__(self):
        self.n_copies = 0

    def tokens(self, buffer, start, stop):
        return Piece(self, buffer, start, stop)


class Piece:
    def __init__(self, ops, buffer, start, stop):
        assert 0 <= start <= stop <= buffer.shape[2]
        self.ops, self.buffer, self.start, self.stop = ops, buffer, start, stop

    def __setitem__(self, key, other):
        assert key is Ellipsis
        assert self.stop - self.start == other.stop - other.start
        for position in reversed(range(self.stop - self.start)):
            self.buffer.slots[self.start + position] = other.buffer.slots[other.start + position]
        self.ops.n_copies += 1


class Slots:
    def __init__(self, slots):
        self.slots, self.shape = slots, (1, 1, len(slots), 1)


@pytest.mark.parametrize("n_staged", [1, 2, 5, 40])
def test_no_copy_overlaps_itself_and_there_are_few(n_staged):
    for start in range(41):
        for n_tokens in range(41 - start):
            for to in range(start + 1):
                if to == start and n_tokens:
                    continue
                ops, buffer = Backwards(), Slots(list(range(40)))
                _layers.copy_tokens(ops, buffer, Slots([None] * n_staged), start, to, n_tokens)
                expected = list(range(40))
                expected[to : to + n_tokens] = range(start, start + n_tokens)
                assert buffer.slots == expected
                assert ops.n_copies <= 2 * -(-n_tokens // min(n_staged, max(n_tokens, 1)))


@policies
def test_compaction_of_what_is_compact_copies_nothing(policy):
    cache = made(policy=policy)
    assert cache.compact() == cache.compact(for_tokens=16) == 0
    request = cache.request(8)
    step(request, 0, 8)
    assert cache.compact() == cache.compact(for_tokens=8) == 0
    cache.request(8)
    assert cache.compact() == 0
    with pytest.raises(CapacityError, match=r"for lack of memory.*Nothing was changed") as caught:
        cache.compact(for_tokens=4)
    assert (caught.value.free, caught.value.missing) == (0, 4)
    with pytest.raises(CapacityError, match="can never fit"):
        cache.compact(for_tokens=17)
    assert cache.stats.n_moved_total == 0


def test_of_two_compactions_the_one_that_copies_less_is_made():
    cache = made(capacity=60)
    requests = [cache.request(n) for n in (10, 1, 1, 10, 1, 10, 15, 12)]
    for request in requests:
        step(request, 0, request.max_tokens)
    for number in (0, 3, 5, 7):
        requests[number].free()
    assert [len(cache.diagnose(21).fewest_moves.moves), cache.diagnose(21).fewest_moves.n_tokens] == [1, 15]
    assert cache.compact(for_tokens=21) == 3
    assert (cache.stats.n_moved_total, cache.request(21).start) == (3, 3)


def test_a_buddy_cache_makes_room_for_the_longest_block():
    cache = made(policy="buddy", capacity=32)
    requests = [cache.request(4) for _ in range(8)]
    for number, request in enumerate(requests):
        step(request, 10 * number, 3)
    for number in (0, 2, 5, 7):
        requests[number].free()
    assert cache.occupancy.largest_hole == 4
    assert cache.compact() == 2 * 3
    assert cache.occupancy.largest_hole == 16
    for number in (1, 3, 4, 6):
        assert held(requests[number]) == [10 * number, 10 * number + 1, 10 * number + 2]


def test_where_not_even_that_much_can_be_had_a_buddy_cache_settles_for_less():
    cache = made(policy="buddy", capacity=16)
    requests = [cache.request(1) for _ in range(16)]
    requests[3].free()
    assert cache.compact() == 0  # one slot is the longest that there is
    requests[9].free()
    requests[14].free()
    step(requests[2], 7, 1)
    assert cache.occupancy.free == 3
    cache.compact()
    assert cache.occupancy.largest_hole == 2
    assert held(requests[2]) == [7]


# -- torch --------------------------------------------------------------------------------------------------------


def test_torch_tensors_of_both_modes():
    torch = pytest.importorskip("torch")
    cache = made(backend="torch", capacity=16)
    with torch.inference_mode():
        first, request = cache.request(3), cache.request(8)
        k = torch.from_numpy(tokens(1, 6))
        for layer in range(2):
            request.append(layer, k + layer, -k - layer)
        first.free()
        cache.compact()
    k = torch.from_numpy(tokens(7, 2))
    for layer in range(2):
        request.append(layer, k + layer, -k - layer)
    first = cache.request(3)
    request.free()
    first.free()
    request = cache.request(2)
    gap, last = cache.request(1), cache.request(4)
    gap.free()
    for layer in range(2):
        last.append(layer, k + layer, -k - layer)
    assert cache.compact() == 2
    assert held(last) == held(last, 1) == [7, 8]
    grad = torch.zeros(1, 2, 1, 4, requires_grad=True)
    with pytest.raises(AutogradError):
        last.append(0, grad, grad)
    with torch.no_grad():
        keys, _ = last.append(0, grad, grad)
    assert not keys.requires_grad


def test_tensors_from_elsewhere_are_refused():
    torch = pytest.importorskip("torch")
    request = made(backend="torch").request(4)
    k = torch.zeros(1, 2, 1, 4)
    with pytest.raises(DeviceMismatchError, match="keys are on meta"):
        request.append(0, k.to("meta"), k)
    with pytest.raises(ArgumentTypeError, match=r"values must be a torch.Tensor"):
        request.append(0, k, k.numpy())
    assert request.length == 0
    keys, _ = request.append(0, k + 1, k)
    request.append(1, keys, keys)  # what lies in the cache itself can be appended
    assert torch.equal(request.read(1)[0], k + 1)


def test_bfloat16_is_moved_as_it_is():
    torch = pytest.importorskip("torch")
    cache = made(MIXED, backend="torch", capacity=40)
    first, request = cache.request(7), cache.request(30)
    given = {}
    for index, layer in MIXED.owned:
        shape = (1, layer.kv_heads, 30)
        given[index] = [
            torch.randn(*shape, layer.key_dim).to(layer.dtype.torch),
            torch.randn(*shape, layer.value_dim).to(layer.value_dtype.torch),
        ]
        request.append(index, *given[index])
    first.free()
    assert cache.compact() == 30
    for index, pair in given.items():
        for got, expected in zip(request.read(index, 30), pair, strict=True):
            assert torch.equal(got, expected)


def test_attention_reads_the_views_as_they_are():
    torch = pytest.importorskip("torch")
    attend = torch.nn.functional.scaled_dot_product_attention
    cache = made(backend="torch", capacity=32)
    cache.request(5)
    request = cache.request(20)
    k, v, q = (torch.randn(1, 2, n, 4) for n in (17, 17, 1))
    keys, values = request.append(0, k, v)
    torch.testing.assert_close(attend(q, keys, values), attend(q, k, v))
