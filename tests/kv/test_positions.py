"""Writes at given positions, whole buffers, buckets: the cache as compiled code and captured graphs see it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch._dynamo
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuarena import Arena, CapacityError, DeviceMismatchError, DTypeError, ShapeError, StaleRegionError
from gpuarena.errors import ArgumentError, ArgumentTypeError, AutogradError, LayerOrderError
from gpuarena.kv import KVCache, KVSpec, LayerSpec, SharedLayer

BACKENDS = ("host", "torch")
MLA = LayerSpec(kv_heads=1, key_dim=512, value_dim=64, dtype="float32")
MIXED = KVSpec(
    [
        LayerSpec(2, 4, 4, "float32"),
        LayerSpec(1, 3, 5, "float32", window=3),
        LayerSpec(2, 4, 0, "float32"),
        LayerSpec(1, 2, 2, "float32", window=3, sinks=2),
    ]
)


def make(spec=MIXED, *, backend="torch", batch=2, max_tokens=16, layout="head-major"):
    """Return a cache over memory that is NaN, and that memory."""
    nbytes = spec.arena_nbytes(batch, max_tokens, layout=layout)
    memory = np.full(nbytes + 512, 0xFF, np.uint8)
    arena = Arena.from_buffer(memory if backend == "host" else torch.from_numpy(memory))
    return KVCache(arena, spec, batch=batch, max_tokens=max_tokens, layout=layout), memory


def at(cache, *positions):
    numbers = np.array(positions, np.int64)
    return torch.from_numpy(numbers) if cache.arena.backend == "torch" else numbers


def new(cache, layer, *numbers, rows=2):
    """Keys and values: each token has its number in all places, 100 more in the next row; values are negative."""
    spec = cache.spec.layers[layer]
    token = (
        np.array(numbers, np.float32)[:, None] + 100 * np.arange(rows, dtype=np.float32)[:, None, None, None]
    )
    arrays = [
        sign * np.broadcast_to(token, (rows, spec.kv_heads, len(numbers), dim))
        for sign, dim in ((1, spec.key_dim), (-1, spec.value_dim))
    ]
    return [torch.from_numpy(array) for array in arrays] if cache.arena.backend == "torch" else arrays


def numbers_of(array, row=0):
    """The numbers of the tokens of one row, after a look at whether each has it in all places."""
    numpy = array.numpy() if isinstance(array, torch.Tensor) else array
    if not numpy.shape[-1]:
        return None
    assert (numpy == numpy[:, :1, :, :1]).all(), "NaN, or the numbers of another token"
    return numpy[row, 0, :, 0].tolist()


# ---------------------------------------------------------------------------------------------------- equal to append


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["head-major", "token-major"])
@given(
    chunks=st.lists(st.integers(0, 4), max_size=6),
    writes=st.lists(st.booleans(), min_size=6, max_size=6),
    back=st.integers(0, 3),
)
@settings(max_examples=15)
def test_writing_at_positions_is_appending(backend, layout, chunks, writes, back):
    """In turn: what one has written the other goes on from."""
    one, _ = make(backend=backend, layout=layout)
    two, _ = make(backend=backend, layout=layout)
    for n_new, at_positions in zip(chunks, writes, strict=False):
        if one.length + n_new > 16:
            break
        numbers = range(one.length, one.length + n_new)
        if at_positions:
            start = one.advance(n_new)
            assert start == two.length
        for layer in range(4):
            if at_positions:
                buffers = one.buffers(layer)
                keys, values = one.write_at(layer, at(one, *numbers), *new(one, layer, *numbers))
                for left, right in zip(buffers, (keys, values), strict=True):
                    assert left is right
                assert keys.shape[2] == values.shape[2] == 16
            else:
                one.append(layer, *new(one, layer, *numbers))
            two.append(layer, *new(two, layer, *numbers))
        for cache in (one, two):
            cache.truncate(max(0, cache.length - back))
        for layer in range(4):
            for left, right in (
                (one.layers[layer].keys, two.layers[layer].keys),
                (one.layers[layer].values, two.layers[layer].values),
            ):
                assert left.tolist() == right.tolist()
    assert (one.length, one.rows, one.high_water) == (two.length, two.rows, two.high_water)


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_may_come_in_any_order(backend):
    cache, _ = make(backend=backend)
    cache.advance(4)
    cache.buffers(0)
    keys, _ = cache.write_at(0, at(cache, 3, 0, 2, 1), *new(cache, 0, 3, 0, 2, 1))
    assert numbers_of(keys, 1) == [100, 101, 102, 103, *[0] * 12] or numbers_of(keys)[:4] == [0, 1, 2, 3]
    assert numbers_of(cache.layers[0].keys) == [0, 1, 2, 3]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["head-major", "token-major"])
def test_buffers_stay_where_they_are(backend, layout):
    cache, _ = make(backend=backend, layout=layout)

    def address(array):
        return array.data_ptr() if backend == "torch" else array.__array_interface__["data"][0]

    before = [[address(array) for array in cache.buffers(layer)] for layer in range(4)]
    for step in range(16):
        cache.advance(1)
        for layer in range(4):
            views = cache.write_at(layer, at(cache, step), *new(cache, layer, step))
            assert [address(array) for array in views] == before[layer]
    assert [[address(array) for array in cache.buffers(layer)] for layer in range(4)] == before
    assert all(array.shape[2] == 16 for array in cache.buffers(3))


# ----------------------------------------------------------------------------------------- slots that hold no token are 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["head-major", "token-major"])
@given(data=st.data())
@settings(max_examples=30)
def test_no_slot_ever_shows_what_lay_in_the_memory(backend, layout, data):
    """The memory is NaN. Whatever is done, buffers and buckets are finite, and the tokens are there."""
    cache, _ = make(KVSpec([LayerSpec(1, 2, 1, "float32")] * 2), backend=backend, batch=3, layout=layout)
    tokens: list[list[int]] = []  # a list a row
    for number in range(data.draw(st.integers(1, 12))):
        n_rows = len(tokens) or data.draw(st.integers(1, 3))
        room = 16 - cache.length
        action = data.draw(
            st.sampled_from(
                [
                    "append",
                    "advance",
                    "fail",
                    "fail uneven",
                    "cut",
                    "reset",
                    "rows",
                    "repeat",
                    "look",
                    "bucket",
                ]
            )
        )
        if action in ("append", "advance", "fail", "fail uneven"):
            n_new = data.draw(st.integers(0, min(room, 5)))
            tokens = tokens or [[] for _ in range(n_rows)]
            start = cache.length
            more = [10 * number + i for i in range(n_new)]
        if action == "append":
            for layer in (0, 1):
                cache.append(layer, *new(cache, layer, *more, rows=n_rows))
            tokens = [row + [token + 100 * i for token in more] for i, row in enumerate(tokens)]
        elif action == "advance":
            assert cache.advance(n_new, rows=n_rows) == start
            for layer in (0, 1):
                cache.buffers(layer)
                cache.write_at(
                    layer, at(cache, *range(start, start + n_new)), *new(cache, layer, *more, rows=n_rows)
                )
            tokens = [row + [token + 100 * i for token in more] for i, row in enumerate(tokens)]
        elif action == "fail":  # counted, never written
            cache.advance(n_new, rows=n_rows)
            cache.truncate(start)
        elif action == "fail uneven":
            cache.advance(n_new, rows=n_rows)
            cache.buffers(0)
            cache.write_at(0, at(cache, *range(start, start + n_new)), *new(cache, 0, *more, rows=n_rows))
            cache.truncate(start)
        elif action == "cut":
            n_tokens = data.draw(st.integers(0, cache.length))
            cache.truncate(n_tokens)
            tokens = [row[:n_tokens] for row in tokens]
        elif action == "reset":
            cache.reset()
            tokens = []
        elif action == "rows" and tokens:
            rows = data.draw(st.lists(st.integers(0, cache.rows - 1), min_size=1, max_size=3))
            cache.select(rows)
            tokens = [tokens[row] for row in rows]
        elif action == "repeat" and len(tokens) == 1:
            cache.repeat(3)
            tokens = [list(tokens[0]) for _ in range(3)]
        if action == "bucket":
            n_slots = data.draw(st.integers(0, 16))
            shown = [cache.read_bucket(layer, n_slots) for layer in (0, 1)]
        elif action == "look":
            shown = [cache.buffers(layer) for layer in (0, 1)]
        else:
            continue
        if cache.length == 0:
            tokens = []
        for arrays in shown:
            for sign, array in zip((1, -1), arrays, strict=True):
                numpy = np.asarray(array.numpy() if backend == "torch" else array)
                assert not np.isnan(numpy).any()
                n = min(cache.length, numpy.shape[2])
                wanted = sign * np.array([row[:n] for row in tokens], np.float32).reshape(len(tokens), n)
                assert np.array_equal(numpy[: len(tokens), 0, :n, 0], wanted)
    for layer in (0, 1):
        for array in cache.buffers(layer):
            assert not np.isnan(np.asarray(array.numpy() if backend == "torch" else array)).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_slots_of_a_new_cache_are_0(backend):
    cache, _ = make(backend=backend)
    for layer in range(4):
        for array in cache.buffers(layer):
            assert tuple(array.shape[:3:2]) == (2, 16)
            assert not array.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_were_never_used_are_0(backend):
    cache, _ = make(backend=backend)
    for layer in range(4):
        cache.append(layer, *new(cache, layer, 1, 2, 3, rows=1))
        cache.buffers(layer)
    cache.reset()
    cache.advance(1, rows=2)
    for layer in range(4):
        for array in cache.buffers(layer):
            numbers = numbers_of(array, 1)
            assert numbers is None or not any(numbers)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("looks_first", [True, False])
def test_slots_that_were_counted_and_never_written_are_0(backend, looks_first):
    """They counted as written, so that the NaN in them was shown when the step had failed and was taken back."""
    cache, _ = make(backend=backend)
    cache.advance(3)
    if looks_first:
        cache.buffers(0)
    cache.truncate(0)  # as a step does when it fails
    for layer in range(4):
        for array in cache.buffers(layer):
            assert not array.any()


# ------------------------------------------------------------------------------------------------------------- advance


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_cache_is_found_before_anything_is_written(backend):
    cache, memory = make(backend=backend)
    cache.advance(14)
    for layer in range(4):
        cache.buffers(layer)
    before = memory.copy()
    with pytest.raises(CapacityError, match="14 of 16 tokens used, 3 more asked, 1 too many") as caught:
        cache.advance(3)
    error = caught.value
    assert (error.used, error.requested, error.capacity, error.available, error.missing) == (14, 3, 16, 2, 1)
    assert np.array_equal(memory, before)
    assert (cache.length, cache.high_water) == (14, 14)
    assert cache.advance(2) == 14
    assert cache.advance(0) == 16


def test_what_advance_refuses():
    cache, memory = make(backend="host")
    before = memory.copy()
    for n_tokens, error in (
        (-1, ArgumentError),
        (1.0, ArgumentTypeError),
        (True, ArgumentTypeError),
        (None, ArgumentTypeError),
    ):
        with pytest.raises(error):
            cache.advance(n_tokens)
    for rows, wrong in ((0, ArgumentError), (3, ShapeError), ("2", ArgumentTypeError)):
        with pytest.raises(wrong):
            cache.advance(1, rows=rows)
    assert (cache.length, cache.rows) == (0, None)
    assert np.array_equal(memory, before)
    assert cache.advance(1, rows=1) == 0
    with pytest.raises(ShapeError, match="2 rows given, the cache holds 1"):
        cache.advance(1, rows=2)
    cache.append(2, *new(cache, 2, 5, rows=1))
    with pytest.raises(LayerOrderError, match=r"layer 2 holds 2 tokens, another 1.*truncate\(1\)") as caught:
        cache.advance(1)
    assert caught.value.layer == 2
    assert [layer.length for layer in cache.layers] == [1, 1, 2, 1]
    cache.truncate(1)
    assert cache.advance(1) == 1
    assert cache.rows == 1


def test_the_rows_of_advance():
    cache, _ = make(batch=2)
    cache.advance(1)
    assert cache.rows == 2
    cache.truncate(0)
    cache.advance(1, rows=1)
    assert cache.rows == 1
    cache.repeat(2)
    cache.advance(1)
    assert cache.rows == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bounded_layer_has_no_positions(backend):
    spec = KVSpec([LayerSpec(1, 2, 2, "float32"), LayerSpec(1, 2, 2, "float32", window=3, slack=2)])
    cache, memory = make(spec, backend=backend)
    before = memory.copy()
    calls = [
        lambda: cache.advance(1),
        lambda: cache.buffers(1),
        lambda: cache.read_bucket(1, 4),
        lambda: cache.write_at(1, at(cache, 0), *new(cache, 1, 0)),
        lambda: cache.mask_at(1, at(cache, 0), 4),  # it gave a mask as if slots were positions
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match="layer 1 has no slot of its own for each token"):
            call()
    assert np.array_equal(memory, before)
    assert (cache.length, cache.rows) == (0, None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stale_cache_is_found_by_advance_and_by_reads(backend):
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=4, dtype="float32")
    arena = Arena("64KiB", backend=backend)
    start = arena.checkpoint()
    cache = KVCache(arena, spec, batch=1, max_tokens=8)
    arena.rollback(start)
    other = arena.alloc(512, "uint8", fill=7)
    for call in (lambda: cache.advance(1), lambda: cache.buffers(0), lambda: cache.read_bucket(0, 2)):
        with pytest.raises(StaleRegionError):
            call()
    assert np.all(np.asarray(other.array) == 7)
    assert (cache.length, cache.rows) == (0, None)


# ------------------------------------------------------------------------------------------------- what write_at refuses


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_wrong_with_a_write_is_found_before_it(backend):
    """NumPy would have broadcast and cast, and have taken -1 for the last slot; torch raises errors of its own."""
    cache, memory = make(backend=backend)
    cache.advance(3)
    for layer in range(4):
        cache.buffers(layer)
    before = memory.copy()
    k, v = new(cache, 0, 0, 1)
    wide = (lambda array: array.double()) if backend == "torch" else (lambda array: array.astype(np.float64))
    foreign = np.array([0, 1]) if backend == "torch" else torch.tensor([0, 1])
    good = at(cache, 0, 1)
    wrong = [
        (good, k[:1], v[:1], ShapeError),
        (good, k[:, :1], v[:, :1], ShapeError),
        (good, k[..., :1], v, ShapeError),
        (good, k, v[..., :1], ShapeError),
        (good, k[0], v[0], ShapeError),
        (good, k, v[:, :, :1], ShapeError),
        (good, wide(k), v, DTypeError),
        (good, k, wide(v), DTypeError),
        (good, k.tolist(), v, ArgumentTypeError),
        (good[:1], k, v, ShapeError),
        (good[None], k, v, ShapeError),
        (at(cache, 0, 1, 2), k, v, ShapeError),
        (at(cache, 0, 1, 2), k[:, :, :1], v[:, :, :1], ShapeError),
        (at(cache, 0, -1), k, v, ArgumentError),
        (at(cache, 0, 16), k, v, ArgumentError),
        (at(cache, 2**40, 0), k, v, ArgumentError),
        (wide(good), k, v, ArgumentTypeError),
        ([0, 1], k, v, ArgumentTypeError),
        (0, k, v, ArgumentTypeError),
        (foreign, k, v, ArgumentTypeError),
    ]
    for positions, keys, values, error in wrong:
        with pytest.raises(error):
            cache.write_at(0, positions, keys, values)
        assert np.array_equal(memory, before)
    for layer, error in (
        (-1, ArgumentError),
        (4, ArgumentError),
        (1.0, ArgumentTypeError),
        (None, ArgumentTypeError),
    ):
        with pytest.raises(error):
            cache.write_at(layer, good, k, v)
    assert np.array_equal(memory, before)
    cache.write_at(0, good, k, v)


def test_positions_and_tensors_elsewhere():
    cache, memory = make()
    cache.advance(1)
    cache.buffers(0)
    before = memory.copy()
    k, v = new(cache, 0, 0)
    for positions, keys in ((at(cache, 0).to("meta"), k), (at(cache, 0), k.to("meta"))):
        with pytest.raises(DeviceMismatchError):
            cache.write_at(0, positions, keys, v)
    with pytest.raises(
        ArgumentTypeError, match=r"positions must be a torch\.Tensor of int64, not torch\.int32"
    ):
        cache.write_at(0, at(cache, 0).int(), k, v)
    assert np.array_equal(memory, before)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_write_that_requires_grad_is_refused(layer):
    """In a layer with two regions the whole cache became part of the autograd graph."""
    cache, memory = make()
    cache.advance(1)
    cache.buffers(layer)
    before = memory.copy()
    k, v = new(cache, layer, 7)
    for keys, values in ((k.clone().requires_grad_(), v), (k, v.clone().requires_grad_())):
        with pytest.raises(AutogradError, match=r"torch\.no_grad\(\)"):
            cache.write_at(layer, at(cache, 0), keys, values)
        assert np.array_equal(memory, before)
        with torch.no_grad():
            shown, _ = cache.write_at(layer, at(cache, 0), keys, values)
        assert not shown.requires_grad
        memory[:] = before


@pytest.mark.parametrize("backend", BACKENDS)
def test_buffers_come_before_writes_and_after_a_change_of_rows(backend):
    cache, memory = make(backend=backend)
    cache.advance(1, rows=1)
    with pytest.raises(ArgumentError, match=r"write_at: call buffers\(0\) first"):
        cache.write_at(0, at(cache, 0), *new(cache, 0, 0, rows=1))
    cache.buffers(0)
    cache.write_at(0, at(cache, 0), *new(cache, 0, 0, rows=1))
    cache.repeat(2)
    cache.advance(1)
    before = memory.copy()
    for rows in (1, 2):
        with pytest.raises((ArgumentError, ShapeError)):
            cache.write_at(0, at(cache, 1), *new(cache, 0, 1, rows=rows))
        assert np.array_equal(memory, before)
    cache.buffers(0)
    keys, _ = cache.write_at(0, at(cache, 1), *new(cache, 0, 1))
    assert keys.shape[0] == 2
    assert numbers_of(cache.layers[0].keys, 1) == [0, 101]


# ------------------------------------------------------------------------------------------------------ buckets and masks


@given(n_tokens=st.integers(0, 1000), least=st.integers(1, 2000))
def test_a_bucket_holds_the_tokens_and_is_one_of_few(n_tokens, least):
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=1, dtype="uint8")
    cache = KVCache(Arena(4096), spec, batch=1, max_tokens=1000)
    bucket = cache.bucket(n_tokens, least=least)
    assert min(n_tokens, 1000) <= bucket <= 1000
    assert bucket == min(least, 1000) or bucket == 1000 or bucket & (bucket - 1) == 0
    assert bucket < 2 * max(n_tokens, least)


def test_there_are_log_2_buckets():
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=1, dtype="uint8")
    cache = KVCache(Arena(8192), spec, batch=1, max_tokens=4096)
    buckets = {cache.bucket(n_tokens) for n_tokens in range(4097)}
    assert buckets == {64, 128, 256, 512, 1024, 2048, 4096}
    assert [cache.bucket(n) for n in (63, 64, 65, 128, 129, 4095, 4096)] == [
        64,
        64,
        128,
        128,
        256,
        4096,
        4096,
    ]
    assert [cache.bucket(n, least=1) for n in range(6)] == [1, 1, 2, 4, 4, 8]
    assert cache.bucket() == 64
    cache.advance(65)
    assert cache.bucket() == 128
    for n_tokens, error in ((4097, ArgumentError), (-1, ArgumentError), (1.5, ArgumentTypeError)):
        with pytest.raises(error):
            cache.bucket(n_tokens)
    with pytest.raises(ArgumentError):
        cache.bucket(1, least=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bucket_read_shows_the_first_slots(backend):
    cache, _ = make(backend=backend)
    for layer in range(4):
        cache.append(layer, *new(cache, layer, 0, 1, 2, 3, 4))
    for n_slots in (0, 1, 5, 8, 16):
        for layer in range(4):
            keys, values = cache.read_bucket(layer, n_slots)
            assert keys.shape[2] == values.shape[2] == n_slots
            assert numbers_of(keys) == [*range(5), *[0] * 16][:n_slots]
    for n_slots, error in ((17, ArgumentError), (-1, ArgumentError), (1.0, ArgumentTypeError)):
        with pytest.raises(error):
            cache.read_bucket(0, n_slots)
    with pytest.raises(ArgumentError):
        cache.read_bucket(4, 1)
    with pytest.raises(ArgumentTypeError):
        cache.read_bucket("0", 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", range(4))
def test_a_mask_at_positions_is_the_band(backend, layer):
    cache, _ = make(backend=backend)
    spec = MIXED.layers[layer]
    positions = [0, 1, 2, 3, 4, 9, 15, 7]
    mask = cache.mask_at(layer, at(cache, *positions), 16)
    assert mask.tolist() == [
        [
            key <= query and (spec.window is None or query - key < spec.window or key < spec.sinks)
            for key in range(16)
        ]
        for query in positions
    ]
    assert tuple(cache.mask_at(layer, at(cache), 16).shape) == (0, 16)


@pytest.mark.parametrize("layer", range(4))
def test_attention_over_a_bucket_is_attention_over_the_tokens(layer):
    torch.manual_seed(layer)
    spec = LayerSpec(2, 8, 8, "float32", *((None, 5, 5)[layer % 3],), sinks=(0, 0, 2)[layer % 3])
    cache, _ = make(KVSpec([spec]), max_tokens=40)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    k, v = torch.randn(2, 2, 2, 40, 8)
    done = 0
    for n_new in (7, 1, 1, 5, 1, 12, 1):
        start = cache.advance(n_new)
        positions = torch.arange(start, start + n_new)
        cache.buffers(0)
        q = torch.randn(2, 2, n_new, 8)
        done += n_new
        full = cache.write_at(0, positions, k[:, :, start:done], v[:, :, start:done])
        n_slots = cache.bucket(least=4)
        bucket = cache.read_bucket(0, n_slots)
        seen = torch.arange(done)[None] <= positions[:, None]
        if spec.window:
            near = (positions[:, None] - torch.arange(done)[None] < spec.window) | (
                torch.arange(done) < spec.sinks
            )
            seen &= near
        wanted = sdpa(q, k[:, :, :done], v[:, :, :done], attn_mask=seen)
        for shown in (full, bucket):
            mask = cache.mask_at(0, positions, shown[0].shape[2])
            torch.testing.assert_close(sdpa(q, *shown, attn_mask=mask), wanted, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- modes


@pytest.mark.parametrize("made_in", ["grad", "no_grad", "inference_mode"])
def test_writes_in_all_modes_in_turn(made_in):
    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with modes[made_in]():
        cache, _ = make(max_tokens=64)
        for layer in range(4):
            cache.buffers(layer)
    step = 0
    for first in modes.values():
        for second in modes.values():
            with first():
                start = cache.advance(1)
                arrays = [new(cache, layer, step) for layer in range(4)]
                positions = at(cache, start)
            with second():
                for layer in range(4):
                    cache.write_at(layer, positions, *arrays[layer])
                cache.mask_at(0, positions, 64)
                cache.read_bucket(0, cache.bucket())
            step += 1
    assert numbers_of(cache.layers[3].values) == [-float(n) for n in range(step)]
    assert not cache.buffers(1)[0].requires_grad


# ------------------------------------------------------------------------------------------------------------ compiled

compiled = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting(graphs, inner=None):
    """Return a backend that notes each graph."""
    if inner is not None:
        from torch._dynamo.backends.registry import lookup_backend

        inner = lookup_backend(inner)

    def compile_graph(graph, inputs):
        graphs.append(graph)
        return graph.forward if inner is None else inner(graph, inputs)

    return compile_graph


COMPILED = KVSpec(
    [
        LayerSpec(2, 8, 8, "float32"),
        LayerSpec(2, 8, 8, "float32", window=5),
        LayerSpec(2, 8, 4, "float32", window=5, sinks=2),
        LayerSpec(2, 8, 0, "float32"),
    ]
)


def model_step(cache, q, keys, values, positions):
    """One step of a model of attention layers; the last has no values of its own and takes its keys."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    out = []
    for layer in range(4):
        k, v = cache.write_at(layer, positions, keys[layer], values[layer])
        out.append(sdpa(q, k, v if layer < 3 else k, attn_mask=cache.mask_at(layer, positions, k.shape[2])))
    return out


def plain_step(whole, q, positions, n_keys):
    sdpa = torch.nn.functional.scaled_dot_product_attention
    out = []
    for layer, spec in enumerate(COMPILED.layers):
        k, v = whole[layer]
        at_k = torch.arange(n_keys)
        seen = at_k[None] <= positions[:, None]
        if spec.window:
            seen &= (positions[:, None] - at_k[None] < spec.window) | (at_k < spec.sinks)[None]
        out.append(sdpa(q, k, v if layer < 3 else k, attn_mask=seen))
    return out


@compiled
@pytest.mark.parametrize("inner", [None, "aot_eager"])
def test_sixty_steps_are_one_graph(fresh_dynamo, inner):
    torch.manual_seed(0)
    cache, memory = make(COMPILED, max_tokens=64)
    for layer in range(4):
        cache.buffers(layer)
    graphs: list[object] = []
    step = torch.compile(model_step, backend=counting(graphs, inner), fullgraph=True)
    whole = [
        (torch.empty(2, 2, 0, spec.key_dim), torch.empty(2, 2, 0, spec.value_dim)) for spec in COMPILED.layers
    ]
    with torch.no_grad():
        for _ in range(60):
            start = cache.advance(1)
            positions = torch.tensor([start])
            q = torch.randn(2, 2, 1, 8)
            keys = [torch.randn(2, 2, 1, spec.key_dim) for spec in COMPILED.layers]
            values = [torch.randn(2, 2, 1, spec.value_dim) for spec in COMPILED.layers]
            found = step(cache, q, keys, values, positions)
            whole = [
                (torch.cat([k, new_k], 2), torch.cat([v, new_v], 2))
                for (k, v), new_k, new_v in zip(whole, keys, values, strict=True)
            ]
            for left, right in zip(found, plain_step(whole, q, positions, start + 1), strict=True):
                torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
        assert len(graphs) == 1
        # an exception of the host passes through, and nothing is compiled anew when the cache goes back
        before = memory.copy()
        with pytest.raises(CapacityError):
            cache.advance(5)
        assert np.array_equal(memory, before)
        cache.truncate(7)
        step(cache, q, keys, values, torch.tensor([cache.advance(1)]))
        cache.reset()
        step(cache, q, keys, values, torch.tensor([cache.advance(1)]))
        assert len(graphs) == 1
    assert cache.layers[0].keys[..., 0, :].equal(keys[0][..., 0, :])


@compiled
def test_with_buckets_there_are_at_most_log_2_graphs(fresh_dynamo):
    cache, _ = make(COMPILED, max_tokens=256)
    for layer in range(4):
        cache.buffers(layer)
    graphs: list[object] = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    @torch.compile(backend=counting(graphs), fullgraph=True, dynamic=False)
    def attend(q, k, v, mask):
        return sdpa(q, k, v, attn_mask=mask)

    torch.manual_seed(0)
    all_k, all_v = torch.randn(2, 2, 2, 256, 8)
    with torch.inference_mode():
        while cache.length < 256:
            n_new = min(1 if cache.length % 2 else 3, 256 - cache.length)
            start = cache.advance(n_new)
            stop = start + n_new
            cache.write_at(0, torch.arange(start, stop), all_k[:, :, start:stop], all_v[:, :, start:stop])
            positions = torch.tensor([stop - 1])
            n_slots = cache.bucket(least=16)
            q = torch.randn(2, 2, 1, 8)
            found = attend(q, *cache.read_bucket(0, n_slots), cache.mask_at(0, positions, n_slots))
            wanted = sdpa(q, all_k[:, :, :stop], all_v[:, :, :stop])
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert 1 < len(graphs) <= 5  # 16, 32, 64, 128, 256


@compiled
def test_a_compiled_write_that_cannot_be_is_refused(fresh_dynamo):
    """While it is compiled, since shapes and dtypes are known then."""
    cache, memory = make()
    cache.advance(2)
    cache.buffers(0)
    before = memory.copy()
    k, v = new(cache, 0, 0)

    @torch.compile(backend="eager")
    def write(positions, k, v):
        return cache.write_at(0, positions, k, v)[0].sum()

    with pytest.raises(DTypeError):
        write(at(cache, 0), k.double(), v)
    assert np.array_equal(memory, before)


# ---------------------------------------------------------------------------------------- keys and values as one array


PAIRS = KVSpec(
    [
        LayerSpec(2, 4, 4, "float32"),
        LayerSpec(1, 3, 3, "float32", window=2),
        LayerSpec(1, 3, 3, "float32", window=2, sinks=1),
    ]
)


def pair(cache, layer, *numbers, rows=2):
    arrays = new(cache, layer, *numbers, rows=rows)
    return torch.stack(arrays) if cache.arena.backend == "torch" else np.stack(arrays)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["head-major", "token-major"])
@given(chunks=st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=8), rows=st.integers(1, 2))
@settings(max_examples=15)
def test_a_pair_is_appended_as_keys_and_values_are(backend, layout, chunks, rows):
    one, _ = make(PAIRS, backend=backend, layout=layout)
    two, _ = make(PAIRS, backend=backend, layout=layout)
    for n_new, as_pair in chunks:
        numbers = range(one.length, one.length + n_new)
        for layer in range(3):
            apart = new(one, layer, *numbers, rows=rows)
            write, arrays = two.layers[layer].append, apart
            if as_pair:
                write, arrays = two.layers[layer].append_pair, [pair(two, layer, *numbers, rows=rows)]
            if one.layers[layer].length + n_new > 16:
                errors = [refusal(one.layers[layer].append, *apart), refusal(write, *arrays)]
                assert errors[0] == errors[1]
                assert one.layers[layer].length == two.layers[layer].length
                return
            for a, b in zip(one.append(layer, *apart), write(*arrays), strict=True):
                assert tuple(a.shape) == tuple(b.shape)
                assert numbers_of(a, rows - 1) == numbers_of(b, rows - 1)
    assert (one.length, one.rows, one.high_water) == (two.length, two.rows, two.high_water)
    assert raw(one) == raw(two)


def refusal(call, *arrays):
    with pytest.raises(CapacityError) as caught:
        call(*arrays)
    return str(caught.value), vars(caught.value)


def raw(cache):
    """The bytes of all tokens that are held."""
    views = [view for layer in cache.layers for view in (layer.keys, layer.values)]
    return [np.asarray(view).tobytes() for view in views]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pair_is_written_into_one_region(backend):
    cache, _ = make(PAIRS, backend=backend)
    assert [len(layer.regions) for layer in cache.layers] == [1, 1, 1]
    assert cache.layers[0].regions[0].shape == (2, 2, 2, 16, 4)
    cache.layers[0].append_pair(pair(cache, 0, 5, 6))
    array = cache.layers[0].regions[0].array
    assert array[:, 1, 0, :2, 0].tolist() == [[105, 106], [-105, -106]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pair_that_is_refused(backend):
    cache, memory = make(KVSpec([*PAIRS.layers, LayerSpec(1, 3, 5, "float32")]), backend=backend)
    layer = cache.layers[0]
    layer.append_pair(pair(cache, 0, 1, 2))
    before = memory.copy()
    right = pair(cache, 0, 3)
    wide = right.double() if backend == "torch" else right.astype(np.float64)
    wrong = [
        (right[0], ShapeError),
        (right[:1], ShapeError),
        (right[..., :3], ShapeError),
        (right[:, :, :1], ShapeError),
        (right[:, :1], ShapeError),
        (right[None], ShapeError),
        (wide, DTypeError),
        (right.tolist(), ArgumentTypeError),
        (None, ArgumentTypeError),
        (pair(cache, 0, *range(15)), CapacityError),
    ]
    for both, error in wrong:
        with pytest.raises(error):
            layer.append_pair(both)
        assert np.array_equal(memory, before)
        assert layer.length == 2
    with pytest.raises(ArgumentError, match="append_pair: keys and values of layer 3 differ in dim or dtype"):
        cache.layers[3].append_pair(right)


def test_a_pair_and_autograd_and_modes():
    cache, memory = make(PAIRS)
    layer = cache.layers[0]
    both = pair(cache, 0, 3).requires_grad_()
    before = memory.copy()
    with pytest.raises(AutogradError, match=r"pairs require grad.*pairs\.detach\(\)"):
        layer.append_pair(both)
    assert np.array_equal(memory, before)
    for mode in (torch.no_grad, torch.inference_mode):
        for n_new in (1, 5):  # the two ways of writing
            with mode():
                layer.append_pair(pair(cache, 0, *range(n_new)).requires_grad_(mode is torch.no_grad))
            layer.append_pair(pair(cache, 0, 7))
            assert not layer.keys.requires_grad
            assert numbers_of(layer.keys) == [*range(n_new), 7]
            layer.truncate(0)


def test_a_pair_that_is_held_can_be_appended():
    for backend in BACKENDS:
        cache, _ = make(PAIRS, backend=backend)
        layer = cache.layers[0]
        layer.append_pair(pair(cache, 0, 3, 4))
        layer.append_pair(layer.regions[0].array[:, :, :, :2])
        assert numbers_of(layer.keys, 1) == [103, 104, 103, 104]


@pytest.mark.parametrize("backend", BACKENDS)
def test_pairs_of_another_number_of_rows(backend):
    cache, _ = make(PAIRS, backend=backend)
    layer = cache.layers[0]
    for rows in (1, 2, 1):
        cache.reset()
        layer.append_pair(pair(cache, 0, 5, 6, rows=rows))
        assert layer.keys.shape[0] == rows
        assert numbers_of(layer.keys, rows - 1) == [100 * rows - 95, 100 * rows - 94]
    cache.truncate(0)
    layer.append_pair(pair(cache, 0, 7, rows=1))
    cache.layers[0].truncate(1)
    assert numbers_of(layer.values) == [-7]


def test_a_stale_pair():
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=4, dtype="float32")
    arena = Arena("64KiB")
    start = arena.checkpoint()
    cache = KVCache(arena, spec, batch=1, max_tokens=8)
    arena.rollback(start)
    with pytest.raises(StaleRegionError):
        cache.layers[0].append_pair(np.ones((2, 1, 1, 1, 4), np.float32))


# ------------------------------------------------------------------------------------------------- values of no width


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "layer", [LayerSpec(1, 4, 0, "float32"), LayerSpec(1, 4, 0, "float32", 3, slack=2), MLA]
)
def test_no_values_and_mla_in_all_operations(backend, layer):
    cache, _ = make(KVSpec([layer, layer]), backend=backend, batch=4, max_tokens=32)
    shape = (2, 1, 6, layer.value_dim)
    for number in (0, 1):
        _, values = cache.append(number, *new(cache, number, *range(6)))
        assert tuple(values.shape) == shape
    cache.reorder([1, 0])
    cache.repeat(2)
    cache.select([3, 0])
    cache.truncate(5)
    with cache.scope():
        for number in (0, 1):
            cache.append(number, *new(cache, number, 5))
    with cache.step():
        for number in (0, 1):
            keys, values = cache.append(number, *new(cache, number, 5))
    assert numbers_of(keys, 0)[-2:] == [4, 5]
    assert numbers_of(keys, 1)[-2:] == [104, 105]
    assert values.shape[-1] == layer.value_dim
    assert cache.layers[0].values.shape[-1] == layer.value_dim
    spec = layer.bytes_per_token
    assert spec == 4 * (layer.key_dim + layer.value_dim)
    assert cache.stats.used_nbytes == 2 * 2 * spec * cache.layers[0].n_held
    if layer.slack is None:
        start = cache.advance(2)
        for number in (0, 1):
            cache.buffers(number)
            keys, values = cache.write_at(number, at(cache, start, start + 1), *new(cache, number, 6, 7))
            assert tuple(values.shape) == (2, 1, 32, layer.value_dim)
            assert numbers_of(keys, 1)[4:8] == [104, 105, 106, 107]
            _, values = cache.read_bucket(number, 8)
            assert tuple(values.shape) == (2, 1, 8, layer.value_dim)
    cache.reset()
    assert cache.rows is None


# ----------------------------------------------------------------------------------------- layers that share, at positions


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shared_layer_shows_the_buffers_of_its_owner_and_is_not_written(backend):
    cache, memory = make(KVSpec([LayerSpec(1, 2, 2, "float32", window=3), SharedLayer(0)]), backend=backend)
    cache.advance(1)
    own, shared = cache.buffers(0), cache.buffers(1)
    assert all(left is right for left, right in zip(own, shared, strict=True))
    before = memory.copy()
    with pytest.raises(LayerOrderError, match="layer 1 shares what layer 0 holds") as caught:
        cache.write_at(1, at(cache, 0), *new(cache, 0, 0))
    assert caught.value.layer == 1
    assert np.array_equal(memory, before)
    cache.write_at(0, at(cache, 0), *new(cache, 0, 7))
    assert numbers_of(cache.read_bucket(1, 1)[0]) == [7]
    assert cache.mask_at(1, at(cache, 4), 6).tolist() == [[False, False, True, True, True, False]]
