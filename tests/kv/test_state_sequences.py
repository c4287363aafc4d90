"""Lanes and sequences in files: each token is a number, so that a sequence is a list of them."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuarena import Arena, CapacityError, CheckpointError, OutOfMemoryError, StaleRegionError
from gpuarena.errors import CaptureError, LayerOrderError, SequenceError, StateError
from gpuarena.kv import KVCache, KVSpec, LayerSpec, SharedLayer
from gpuarena.kv.lanes import LaneCache
from gpuarena.kv.paged import PagedKVCache
from gpuarena.kv.state import _pieces, read_state

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")

SPEC = KVSpec(
    [
        LayerSpec(2, 3, 3, "bfloat16"),
        LayerSpec(1, 2, 4, "float32", value_dtype="int16", window=3),
        SharedLayer(0),
        LayerSpec(1, 2, 0, "float8_e5m2"),
        LayerSpec(1, 2, 2, "uint8"),
    ]
)
BACKENDS = ["host", "torch"]


def arrays(numbers, layer, backend):
    """Return keys and values of tokens, ``[1, kv_heads, n, dim]``: keys are the numbers, values 1 more."""
    pair = []
    for more, dtype, dim in ((0, layer.dtype, layer.key_dim), (1, layer.value_dtype, layer.value_dim)):
        column = (np.array(numbers, np.float64) + more)[None, None, :, None]
        array = np.broadcast_to(column, (1, layer.kv_heads, len(numbers), dim)).astype(dtype.numpy)
        if backend == "torch":
            array = (
                torch.from_numpy(array.copy().view(np.uint8)).view(dtype.torch)
                if array.size
                else torch.empty(array.shape, dtype=dtype.torch)
            )
        pair.append(array)
    return pair


def numbers_of(array):
    """Return the numbers of the tokens of ``[kv_heads, n, dim]``, which all heads and elements agree on."""
    if isinstance(array, torch.Tensor):
        array = array.to(torch.float64).numpy()
    array = np.asarray(array, np.float64)
    assert (array == array[:1, :, :1]).all()
    return array[0, :, :1].ravel().tolist()


# a number that all of the dtypes have: powers of two, of which float8_e5m2 has the most
POOL = [float(2**n) for n in range(6)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("sequences") / "lanes.safetensors"


# --------------------------------------------------------------------------------------------------------------- lanes


def lane_cache(backend="host", *, lanes=3, max_tokens=12, spec=SPEC):
    return LaneCache(Arena(1 << 17, backend=backend), spec, lanes=lanes, max_tokens=max_tokens)


def feed_lane(cache, lane, numbers):
    for number, layer in cache.spec.owned:
        cache.append(number, *arrays(numbers, layer, cache.arena.backend), lanes=[lane])


def lane_contents(cache):
    """Return for each lane the numbers of its tokens, the same in all layers, and their positions."""
    found = []
    for lane, length in enumerate(cache.lengths):
        per_layer = []
        for number, layer in cache.spec.owned:
            keys, values = cache.read(number, lanes=[lane])
            per_layer.append(numbers_of(keys[0][:, :length]))
            if layer.value_dim:
                assert numbers_of(values[0][:, :length]) == [n + 1 for n in per_layer[-1]]
        assert all(one == per_layer[0] for one in per_layer)
        found.append((per_layer[0], cache.positions(lane).tolist()))
    return found


def check_zeros(cache):
    """Behind the tokens of a lane there are zeros, which attention may multiply by 0."""
    for number, _ in cache.spec.owned:
        for array in cache.read(number, lanes=range(cache.n_lanes)):
            for row, length in zip(array, cache.lengths, strict=True):
                rest = row[:, length:]
                assert not numbers_of(rest) or set(numbers_of(rest)) == {0.0}


LANE_OPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "remove", "truncate"]),
        st.integers(0, 2),
        st.lists(st.sampled_from(POOL), min_size=1, max_size=5),
        st.integers(0, 4),
        st.integers(0, 4),
    ),
    max_size=8,
)


def run_lanes(cache, ops, model):
    for kind, lane, numbers, a, b in ops:
        tokens, positions = model[lane]
        if kind == "append" and len(tokens) + len(numbers) <= cache.max_tokens:
            feed_lane(cache, lane, numbers)
            first = positions[-1] + 1 if positions else 0
            positions.extend(range(first, first + len(numbers)))
            tokens.extend(numbers)
        elif kind == "remove" and a <= b <= len(tokens):
            cache.remove(lane, a, b)
            del tokens[a:b], positions[a:b]
        elif kind == "truncate" and a <= len(tokens):
            cache.truncate(lane, a)
            del tokens[a:], positions[a:]
    return model


@settings(max_examples=60)
@given(
    ops=LANE_OPS,
    later=LANE_OPS,
    source=st.sampled_from(BACKENDS),
    target=st.sampled_from(BACKENDS),
    in_place=st.booleans(),
    limit=st.sampled_from([3, 64, 1 << 20]),
)
def test_lanes_come_back_with_their_tokens_and_positions(ops, later, source, target, in_place, limit, path):
    cache = lane_cache(source)
    model = run_lanes(cache, ops, [([], []) for _ in range(3)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pieces, "PIECE_NBYTES", limit)
        cache.save(path, metadata={"who": "lanes"})
        saved = read_state(path)
        assert (saved.lengths, saved.metadata) == (cache.lengths, {"who": "lanes"})
        if in_place:
            other = lane_cache(target, lanes=4)
            run_lanes(other, later, [([], []) for _ in range(3)])
            mark = other.checkpoint()
            other.restore(path)
            with pytest.raises(CheckpointError):
                other.rollback(mark)
            model.append(([], []))
        else:
            other = LaneCache.load(path, Arena(1 << 17, backend=target), max_tokens=13)
    assert lane_contents(other) == model
    assert np.asarray(other.length_vector).tolist() == [len(tokens) for tokens, _ in model]
    assert other.stats.high_water_tokens >= max(other.lengths)
    check_zeros(other)
    run_lanes(other, later, model)
    assert lane_contents(other) == model
    check_zeros(other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_loaded_is_zeroed_when_it_is_cut(backend, path):
    cache = lane_cache(backend)
    for lane in (0, 1):
        feed_lane(cache, lane, [1.0] * 5)
    cache.save(path)
    restored = lane_cache(backend)
    restored.restore(path)
    for one in (restored, LaneCache.load(path, Arena(1 << 17, backend=backend))):
        one.truncate(0, 2)
        check_zeros(one)


def test_a_file_of_lanes_holds_exactly_the_filled_bytes(path):
    cache = lane_cache()
    feed_lane(cache, 1, [1.0, 2.0])
    feed_lane(cache, 2, [4.0])
    cache.save(path)
    data = path.read_bytes()
    found = dict(safetensors.deserialize(data))
    assert len(found) == 3 * 4 * 2
    assert found["sequences.1.layers.0.keys"]["shape"] == [2, 2, 3]
    assert found["sequences.0.layers.0.keys"]["shape"] == [2, 0, 3]
    assert (
        bytes(found["sequences.1.layers.4.values"]["data"]) == np.array([[2, 2], [3, 3]], np.uint8).tobytes()
    )
    assert len(data) == 8 + struct.unpack("<Q", data[:8])[0] + 3 * SPEC.bytes_per_token


def test_lanes_that_do_not_fit_are_named(path):
    cache = lane_cache()
    feed_lane(cache, 2, [1.0] * 5)
    cache.save(path)
    arena = Arena(1 << 17)
    small, short = lane_cache(lanes=2), lane_cache(max_tokens=4)
    for one in (small, short):
        feed_lane(one, 0, [2.0])
    for call in (lambda: small.restore(path), lambda: LaneCache.load(path, arena, lanes=2)):
        with pytest.raises(StateError, match="3 sequences are held, the cache is for 2, 1 too few"):
            call()
    for call in (
        lambda: short.restore(path),
        lambda: LaneCache.load(path, arena, max_tokens=4),
    ):
        with pytest.raises(StateError, match="5 tokens are held, the cache is for 4, 1 too few"):
            call()
    with pytest.raises(OutOfMemoryError):
        LaneCache.load(path, Arena(200))
    other = KVSpec.uniform(layers=1, kv_heads=1, head_dim=2, dtype="uint8")
    for call in (
        lambda: lane_cache(spec=other).restore(path),
        lambda: LaneCache.load(path, arena, spec=other),
    ):
        with pytest.raises(StateError, match="layers is 5 in the file, 1"):
            call()
    assert arena.stats.used == 0
    assert [lane_contents(one)[0] for one in (small, short)] == [([2.0], [0])] * 2


def test_lanes_are_not_saved_in_the_middle_of_a_step_nor_when_stale(path):
    cache = lane_cache()
    cache.save(path)
    before = path.read_bytes()
    cache.append(0, *arrays([1.0], SPEC.layers[0], "host"))
    with pytest.raises(LayerOrderError):
        cache.save(path)
    cache.restore(path)  # which abandons the step
    assert cache.lengths == (0, 0, 0)
    cache.arena.reset()
    for call in (cache.save, cache.restore):
        with pytest.raises(StaleRegionError):
            call(path)
    assert path.read_bytes() == before


class Stop(BaseException):
    """What an interrupt from the keyboard is like."""


def stop_after(n):
    """Return a progress function that interrupts the `n`-th report."""
    reports = []

    def note(*figures):
        reports.append(figures)
        if len(reports) == n:
            raise Stop

    return note


def test_an_interrupted_restore_leaves_the_lanes_empty(path, monkeypatch):
    monkeypatch.setattr(_pieces, "PIECE_NBYTES", 16)
    cache = lane_cache()
    feed_lane(cache, 0, [1.0, 2.0, 4.0])
    cache.save(path)
    target = lane_cache()
    n = 1
    while True:
        target.reset()
        feed_lane(target, 1, [8.0])
        mark = target.checkpoint()
        try:
            target.restore(path, progress=stop_after(n))
        except Stop:
            assert target.lengths == (0, 0, 0)
            with pytest.raises(CheckpointError):
                target.rollback(mark)
            feed_lane(target, 2, [16.0])
            assert lane_contents(target)[2] == ([16.0], [0])
            check_zeros(target)
        else:
            break
        n += 1
    assert n > 10
    assert lane_contents(target)[0] == ([1.0, 2.0, 4.0], [0, 1, 2])
    arena = Arena(1 << 17)
    with pytest.raises(Stop):
        LaneCache.load(path, arena, progress=stop_after(3))
    assert arena.stats.used == 0


# --------------------------------------------------------------------------------------------------------------- pages


def paged(backend="host", *, num_pages=12, page_size=3, layout="per-head", spec=SPEC):
    arena = Arena(1 << 18, backend=backend)
    return PagedKVCache(arena, spec, num_pages=num_pages, page_size=page_size, layout=layout, gather_tokens=0)


def feed(sequence, numbers, backend):
    for number, layer in SPEC.owned:
        sequence.append(number, *arrays(numbers, layer, backend))


def contents(sequence):
    """Return the numbers of the tokens of a sequence, the same in all layers."""
    per_layer = []
    for number, layer in SPEC.owned:
        keys, values = sequence.read(number)
        per_layer.append(numbers_of(keys))
        if layer.value_dim:
            assert numbers_of(values) == [n + 1 for n in per_layer[-1]]
    assert all(one == per_layer[0] for one in per_layer)
    return per_layer[0]


@settings(max_examples=50)
@given(
    data=st.data(),
    source=st.sampled_from(BACKENDS),
    target=st.sampled_from(BACKENDS),
    layouts=st.tuples(*[st.sampled_from(["per-head", "HND", "NHD"])] * 2),
    sizes=st.tuples(*[st.integers(1, 5)] * 2),
    limit=st.sampled_from([4, 100, 1 << 20]),
)
def test_sequences_come_back_token_by_token(data, source, target, layouts, sizes, limit, path):
    cache = paged(source, num_pages=40, page_size=sizes[0], layout=layouts[0])
    model = [data.draw(st.lists(st.sampled_from(POOL), min_size=1, max_size=9))]
    sequences = [cache.sequence()]
    feed(sequences[0], model[0], source)
    for _ in range(data.draw(st.integers(0, 2))):
        of = data.draw(st.integers(0, len(model) - 1))
        keep = data.draw(st.integers(0, len(model[of])))
        more = data.draw(st.lists(st.sampled_from(POOL), max_size=4))
        sequences.append(sequences[of].fork())
        sequences[-1].truncate(keep)
        if more:
            feed(sequences[-1], more, source)
        model.append(model[of][:keep] + more)
    chosen = data.draw(st.permutations(range(len(model))))[: data.draw(st.integers(0, len(model)))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pieces, "PIECE_NBYTES", limit)
        cache.save(path, [sequences[number] for number in chosen])
        other = paged(target, num_pages=60, page_size=sizes[1], layout=layouts[1])
        kept = other.sequence()
        feed(kept, [1.0, 2.0], target)
        loaded = other.load(path)
    assert [contents(one) for one in loaded] == [model[number] for number in chosen]
    for one, number in zip(loaded, chosen, strict=True):
        feed(one, [32.0], target)
        assert contents(one) == [*model[number], 32.0]
        assert contents(sequences[number]) == model[number]
    assert contents(kept) == [1.0, 2.0]
    for one in (*loaded, kept):
        one.free()
    assert other.stats.pages_free == other.num_pages


def test_lanes_and_pages_read_each_other(path):
    cache = lane_cache()
    feed_lane(cache, 0, [1.0, 2.0])
    feed_lane(cache, 2, [4.0])
    cache.save(path)
    pages = paged("torch")
    loaded = pages.load(path)
    assert [contents(one) for one in loaded] == [[1.0, 2.0], [], [4.0]]
    feed(loaded[1], [8.0] * 4, "torch")
    pages.save(path, loaded[1:])
    back = LaneCache.load(path, Arena(1 << 17))
    assert lane_contents(back) == [([8.0] * 4, [0, 1, 2, 3]), ([4.0], [0])]
    assert (back.n_lanes, back.max_tokens) == (2, 4)
    cache.remove(0, 0, 1)
    cache.save(path)
    before = pages.stats
    with pytest.raises(StateError, match="positions of sequence 0 are no range"):
        pages.load(path)
    assert pages.stats == before


def test_too_few_pages_are_named(path):
    cache = paged()
    one = cache.sequence()
    feed(one, [1.0] * 10, "host")
    cache.save(path, [one, one.fork()])
    small = paged(num_pages=7)
    before = small.stats
    with pytest.raises(CapacityError, match="load of 20 tokens needs 8 pages of 3 tokens") as caught:
        small.load(path)
    assert caught.value.missing == 1
    assert small.stats == before


def test_an_interrupted_load_frees_its_pages(path, monkeypatch):
    monkeypatch.setattr(_pieces, "PIECE_NBYTES", 16)
    cache = paged()
    one = cache.sequence()
    feed(one, [1.0] * 10, "host")
    cache.save(path, [one])
    n = 1
    while True:
        try:
            loaded = cache.load(path, progress=stop_after(n))
        except Stop:
            assert cache.stats.pages_used == 4
            assert cache.stats.n_sequences == 1
        else:
            break
        n += 1
    assert n > 20
    assert contents(loaded[0]) == [1.0] * 10


def test_sequences_that_cannot_be_saved_are_refused(path):
    cache, other = paged(), paged()
    one = cache.sequence()
    cache.save(path, [one])
    before = path.read_bytes()
    freed = cache.sequence()
    freed.free()
    for bad in (freed, other.sequence()):
        with pytest.raises(SequenceError):
            cache.save(path, [one, bad])
    one.append(0, *arrays([1.0], SPEC.layers[0], "host"))
    with pytest.raises(LayerOrderError):
        cache.save(path, [one])
    one.truncate(0)
    cache.arena.reset()
    with pytest.raises(StaleRegionError):
        cache.save(path, [one])
    with pytest.raises(StaleRegionError):
        cache.load(path)
    assert path.read_bytes() == before
    with pytest.raises(StateError, match="layers is 5 in the file, 1"):
        paged(spec=KVSpec([LayerSpec(1, 1, 1, "uint8")])).load(path)


def test_a_salt_separates_what_is_loaded(path):
    cache = paged()
    one = cache.sequence()
    feed(one, [1.0] * 3, "host")
    cache.save(path, [one])
    (loaded,) = cache.load(path, salt="adapter")
    loaded.publish([5, 6, 7])
    assert cache.match([5, 6, 7, 8]).length == 0
    assert cache.match([5, 6, 7, 8], salt="adapter").length == 3


def test_nothing_is_done_while_a_graph_is_captured(path, monkeypatch):
    lanes, pages = lane_cache(), paged()
    lanes.save(path)
    for arena in (lanes.arena, pages.arena):
        monkeypatch.setattr(arena, "_captures", lambda: True)
    for call in (
        lambda: lanes.save(path),
        lambda: lanes.restore(path),
        lambda: LaneCache.load(path, lanes.arena),
        lambda: pages.save(path, []),
        lambda: pages.load(path),
    ):
        with pytest.raises(CaptureError):
            call()


# -------------------------------------------------------------------------------------------------------------- damage


def test_a_damaged_header_is_a_typed_error_or_harmless_to_lanes_and_pages(path):
    cache = lane_cache()
    feed_lane(cache, 1, [1.0, 2.0])
    cache.save(path)
    data = path.read_bytes()
    lanes, pages, arena = lane_cache(), paged(), Arena(1 << 17)
    feed_lane(lanes, 0, [4.0])
    random = np.random.default_rng(0)
    n_found = 0
    for place in random.integers(0, 8 + struct.unpack("<Q", data[:8])[0], 150):
        changed = bytearray(data)
        changed[place] ^= 1 << random.integers(8)
        path.write_bytes(changed)
        start = arena.checkpoint()
        try:
            other = LaneCache.load(path, arena)
        except (StateError, OutOfMemoryError):
            n_found += 1
            assert arena.stats.used == 0
        else:
            assert sum(other.lengths) == 2
        arena.rollback(start)
        try:
            made = pages.load(path)
        except StateError:
            pass
        else:
            assert sum(one.length for one in made) == 2
            for one in made:
                one.free()
        assert pages.stats.pages_free == pages.num_pages
        try:
            lanes.restore(path)
        except StateError:
            assert lane_contents(lanes)[0] == ([4.0], [0])
        else:
            lanes.reset()
            feed_lane(lanes, 0, [4.0])
    assert n_found > 100


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("kind", "rows", "kind is 'rows', wanted is 'sequences'"),
        ("held", "3", "held is '3'"),
        ("held", "[3]", "held is"),
        ("held", "[[[0]]]", "held is"),
        ("held", "[[[0, 1, 2]]]", "held is"),
        ("held", "[[[2, 3], [0, 2]]]", "runs ascend"),
        ("held", "[[[-1, 2]]]", "runs ascend"),
        ("held", f"[[[0, {2**62 + 1}]]]", "runs ascend"),
        ("held", "[[], []]", "lacks"),
        ("held", "[]", "tell of no tensor"),
        ("held", "[[[0, 1]]]", "its metadata tell of"),
        ("max_tokens", "0", "max_tokens is '0'"),
        (
            "spec",
            '[{"kv_heads":1,"key_dim":1,"value_dim":1,"dtype":"uint8","window":2,"slack":1}]',
            "neither slack",
        ),
    ],
)
def test_metadata_that_cannot_be_are_told(field, text, message, path):
    lane_cache(lanes=1).save(path)
    data = path.read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + n])
    header["__metadata__"][field] = text
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + n :])
    with pytest.raises(StateError, match=message):
        LaneCache.load(path, Arena(1 << 17))


def test_each_kind_of_file_names_the_other(path):
    spec = KVSpec([LayerSpec(1, 1, 1, "uint8")])
    cache = KVCache(Arena(4096), spec, batch=1, max_tokens=4)
    cache.save(path)
    for call in (
        lambda: LaneCache.load(path, Arena(4096)),
        lambda: paged(spec=spec).load(path),
    ):
        with pytest.raises(StateError, match="kind is 'rows', wanted is 'sequences'"):
            call()
    lane_cache(spec=spec).save(path)
    with pytest.raises(StateError, match="kind is 'sequences', wanted is 'rows'"):
        cache.restore(path)
    assert os.listdir(path.parent) == [path.name]
