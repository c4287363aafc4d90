"""What a `PagedKVCache` promises beside its contents, which tests/properties/test_paged_machine.py compares with a model."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest

from gpuarena import (
    Arena,
    CapacityError,
    CheckpointError,
    DTypeError,
    OutOfMemoryError,
    ShapeError,
    StaleRegionError,
)
from gpuarena.errors import (
    ArgumentError,
    ArgumentTypeError,
    AutogradError,
    DeviceMismatchError,
    LayerOrderError,
    NotCopyableError,
    SequenceError,
)
from gpuarena.kv import KVSpec, LayerSpec, SharedLayer
from gpuarena.kv.paged import BlockTable, FlashInferTables, PagedKVCache

torch = pytest.importorskip("torch")

SMALL = KVSpec.uniform(layers=2, kv_heads=2, head_dim=4, dtype="float32")
LAYOUTS = ["per-head", "HND", "NHD"]


def torch_cache(spec=SMALL, *, num_pages=8, page_size=4, **options):
    nbytes = PagedKVCache.arena_nbytes(spec, num_pages=num_pages, page_size=page_size)
    arena = Arena(nbytes, backend="torch", device="cpu")
    return PagedKVCache(arena, spec, num_pages=num_pages, page_size=page_size, **options)


def host_cache(spec=SMALL, *, num_pages=8, page_size=4, **options):
    return PagedKVCache(Arena("1MiB"), spec, num_pages=num_pages, page_size=page_size, **options)


def tokens(n_tokens, *, rows=1, first=0):
    """[rows, 2, n_tokens, 4], all of the numbers of a token equal to its position plus 100 times its row."""
    position = torch.arange(first, first + n_tokens, dtype=torch.float32)
    row = 100 * torch.arange(rows, dtype=torch.float32)
    return (row[:, None] + position)[:, None, :, None].expand(rows, 2, n_tokens, 4)


def append(sequence, new):
    for layer in range(2):
        sequence.append(layer, new, new)


def filled(cache, n_tokens, *, first=0):
    sequence = cache.sequence()
    if n_tokens:
        append(sequence, tokens(n_tokens, first=first))
    return sequence


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def held(sequence, layer=1):
    """The tokens of a sequence, as numbers; the same in keys, values and heads."""
    keys, values = sequence.read(layer)
    assert torch.equal(keys, values)
    assert torch.equal(keys, keys[:1, :, :1].expand_as(keys))
    return keys[0, :, 0].int().tolist()


# --------------------------------------------------------------------------------------------------------- construction


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("alignment", [1, 64, 256])
@pytest.mark.parametrize("gather_tokens", [None, 0, 8])
def test_the_arena_needs_what_arena_nbytes_says(layout, alignment, gather_tokens):
    spec = KVSpec(
        [
            LayerSpec(1, 3, 5, "float16", value_dtype="float64"),
            LayerSpec(3, 7, 7, "int8"),
            SharedLayer(0),
            LayerSpec(2, 4, 0, "float32"),
        ]
    )
    sizes = {"num_pages": 5, "page_size": 2, "gather_tokens": gather_tokens}
    nbytes = PagedKVCache.arena_nbytes(spec, **sizes, alignment=alignment)
    arena = Arena(nbytes, backend="torch", device="cpu", alignment=alignment)
    cache = PagedKVCache(arena, spec, layout=layout, **sizes)
    assert arena.stats.top <= nbytes
    assert cache.stats.reserved_nbytes == 10 * spec.bytes_per_token
    assert arena.stats.used == cache.stats.reserved_nbytes + cache.stats.scratch_nbytes


def test_all_memory_is_taken_or_none():
    nbytes = PagedKVCache.arena_nbytes(SMALL, num_pages=8, page_size=4)
    arena = Arena(nbytes - 256, backend="torch", device="cpu")  # one alignment less
    with pytest.raises(OutOfMemoryError):
        PagedKVCache(arena, SMALL, num_pages=8, page_size=4)
    assert arena.stats.used == 0
    PagedKVCache(arena, SMALL, num_pages=8, page_size=4, gather_tokens=16)


@pytest.mark.parametrize(
    ("layout", "shape"), [("per-head", (2, 8, 4, 5)), ("HND", (8, 2, 4, 5)), ("NHD", (8, 4, 2, 5))]
)
@pytest.mark.parametrize("make", [torch_cache, host_cache])
def test_layouts(make, layout, shape):
    spec = KVSpec([LayerSpec(2, 5, 5, "float32"), LayerSpec(2, 5, 3, "float32"), SharedLayer(0)])
    cache = make(spec, layout=layout)
    a = cache.sequence()
    new = [np.arange(2 * 6 * dim, dtype=np.float32).reshape(1, 2, 6, dim) for dim in (5, 3)]
    if make is torch_cache:
        new = [torch.from_numpy(array) for array in new]
    a.append(0, new[0], new[0])
    a.append(1, *new)
    for layer, (keys, values) in enumerate([(new[0], new[0]), (new[0], new[1])]):
        k_pages, v_pages = cache.keys(layer), cache.values(layer)
        assert tuple(k_pages.shape) == shape
        assert tuple(v_pages.shape) == (*shape[:3], values.shape[3])
        for head in range(2):
            for at in range(6):
                page, offset = a.pages[at // 4], at % 4
                where = {
                    "per-head": (head, page, offset),
                    "HND": (page, head, offset),
                    "NHD": (page, offset, head),
                }
                assert (k_pages[where[layout]] == keys[0, head, at]).all()
                assert (v_pages[where[layout]] == values[0, head, at]).all()
    for side in (cache.keys, cache.values):
        assert np.asarray(side(2)).ctypes.data == np.asarray(side(0)).ctypes.data


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_pages": 0}, ArgumentError, "num_pages must be at least 1"),
        ({"num_pages": 2.0}, ArgumentTypeError, "num_pages must be an integer"),
        ({"page_size": 0}, ArgumentError, "page_size"),
        ({"num_pages": 2**31}, ArgumentError, "int32"),
        ({"layout": "NDH"}, ArgumentError, "layout 'NDH': it is one of 'per-head', 'HND', 'NHD'"),
        ({"layout": []}, ArgumentError, "layout"),
        ({"gather_tokens": 6}, ArgumentError, "no multiple of the page size 4"),
        ({"gather_tokens": -4}, ArgumentError, "gather_tokens"),
        ({"spec": "spec"}, ArgumentTypeError, "must be a KVSpec"),
        (
            {"spec": KVSpec([LayerSpec(1, 4, 4, "float32", window=4, slack=2)])},
            ArgumentError,
            "layer 0 has slack=2, which a paged cache cannot do",
        ),
        (
            {"spec": KVSpec([SMALL.layers[0], LayerSpec(1, 32, 32, "float32", storage="int8")])},
            ArgumentError,
            "layer 1 has storage='int8'",
        ),
    ],
)
def test_caches_that_cannot_be(options, error, message):
    options = {"spec": SMALL, "num_pages": 2, "page_size": 4, **options}
    arena = Arena("1MiB", backend="torch", device="cpu")
    with pytest.raises(error, match=message):
        PagedKVCache(arena, options.pop("spec"), **options)
    assert arena.stats.used == 0


def test_host_arenas_have_no_attend():
    with pytest.raises(ArgumentError, match=r"attend is torch's"):
        host_cache(gather_tokens=4)
    cache = host_cache()
    a = cache.sequence()
    new = tokens(3).numpy()
    append(a, new)
    for call in (cache.attend, cache.flex_attend):
        with pytest.raises(ArgumentError, match="needs a torch arena, not one of host"):
            call(0, new, [a])


def test_a_cache_and_its_handles_cannot_be_copied():
    cache = torch_cache()
    a = filled(cache, 2)
    for thing in (cache, a, a.checkpoint(), cache.step([a], 1)):
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(NotCopyableError):
                call(thing)


def test_dropping_a_cache_drops_its_memory_at_once():
    cache = torch_cache()
    a, b = filled(cache, 3), filled(cache, 5)
    with cache.step([a, b], 1) as step:
        for layer in (0, 1):
            step.write(layer, tokens(1, rows=2), tokens(1, rows=2))
    cache.attend(0, torch.ones(2, 2, 1, 4), [a, b])
    gone = weakref.ref(cache._core)
    gc.disable()
    try:
        del cache, a, b, step
        assert gone() is None
    finally:
        gc.enable()


def test_they_say_what_they_are():
    cache = torch_cache()
    a = filled(cache, 5)
    step = cache.step([a], 2)
    assert repr(cache) == "<PagedKVCache of 8 pages of 4 tokens, 6 available>"
    assert repr(a) == "<sequence of 5 tokens, pages [0, 1]>"
    assert repr(step) == "<step of 2 tokens of 1 sequences, new>"
    assert repr(a.checkpoint()) == "SequenceCheckpoint(n_tokens=5)"
    a.swap_out()
    assert repr(a) == "<sequence of 5 tokens, swapped out>"
    a.free()
    assert repr(a) == "<sequence, freed>"


# ---------------------------------------------------------------------------------------------------------------- steps


def test_a_step_takes_pages_for_all_or_for_none():
    cache = torch_cache(num_pages=4)
    cache.reset_prefix_cache()
    cached = filled(cache, 4)
    cached.publish([9, 9, 9, 9])
    cached.free()
    a, b = filled(cache, 3), filled(cache, 4)
    before = cache.stats
    step = cache.step([a, b], [2, 5])
    with pytest.raises(
        CapacityError, match=r"7 more tokens of 2 sequences needs 3 pages of 4 tokens; .*: 1 too few"
    ) as caught:
        step.__enter__()
    error = caught.value
    assert (error.unit, error.requested, error.available, error.missing) == ("pages", 3, 2, 1)
    assert cache.stats == before
    assert (a.length, b.length) == (3, 4)
    assert cache.match([9, 9, 9, 9, 1]).length == 4, "what was cached is cached still"


def test_sharers_of_a_page_in_one_step():
    cache = torch_cache(num_pages=3)
    a = filled(cache, 2)
    b, c = a.fork(2)
    with cache.step([a, b, c], 1) as step:  # two copies; the last one has the page to itself
        for layer in (0, 1):
            step.write(layer, tokens(1, rows=3), tokens(1, rows=3))
    assert [held(s) for s in (a, b, c)] == [[0, 1, 0], [0, 1, 100], [0, 1, 200]]
    assert cache.stats.pages_copied == 2
    assert not cache.would_fit(2, a)


def test_copies_of_pages_that_others_outside_the_step_share_count_too():
    cache = torch_cache(num_pages=3)
    a, c = filled(cache, 2), filled(cache, 3)
    b, d = a.fork(), c.fork()
    before = cache.stats
    with pytest.raises(CapacityError, match="needs 2 pages") as caught:
        cache.step([a, c], 1).__enter__()
    assert (caught.value.missing, cache.stats) == (1, before)
    assert [s.length for s in (a, b, c, d)] == [2, 2, 3, 3]
    assert (a.pages, c.pages) == (b.pages, d.pages)


def test_an_open_step_forbids_what_would_take_its_pages():
    cache = torch_cache()
    a, b = filled(cache, 3), filled(cache, 2)
    mark = a.checkpoint()

    def inside():
        assert (a.length, a.pages) == (5, (0, 2))
        for call in (
            a.free,
            a.fork,
            a.checkpoint,
            a.swap_out,
            lambda: a.truncate(0),
            lambda: a.publish([]),
            lambda: a.rollback(mark),
            lambda: a.append(0, tokens(1), tokens(1)),
            lambda: cache.step([b, a], 1).__enter__(),
            lambda: cache.keep(b),
            cache.reset,
        ):
            with pytest.raises(SequenceError, match=r"a step is open"):
                call()
        assert (b.length, b.is_live) == (2, True)
        b.append(0, tokens(1), tokens(1))
        b.append(1, tokens(1), tokens(1))
        1 / 0

    with pytest.raises(ZeroDivisionError), cache.step([a], 2):
        inside()
    assert (a.length, a.pages, b.length) == (3, (0,), 3)
    a.rollback(mark)


def test_two_steps_of_different_sequences_may_be_open():
    cache = torch_cache()
    a, b = filled(cache, 1), filled(cache, 1)
    with cache.step([a], 1) as outer, cache.step([b], 2) as inner:
        for layer in (0, 1):
            outer.write(layer, tokens(1, first=7), tokens(1, first=7))
            inner.write(layer, tokens(2, first=8), tokens(2, first=8))
    assert (held(a), held(b)) == ([0, 7], [0, 8, 9])


def test_a_step_is_entered_once_and_used_inside():
    cache = torch_cache()
    a = filled(cache, 1)
    step = cache.step([a], 1)
    for call in (
        lambda: step.write(0, tokens(1), tokens(1)),
        lambda: step.attend(0, tokens(1)),
        lambda: cache.slot_mapping(step),
    ):
        with pytest.raises(SequenceError, match="this step is new"):
            call()
    with step:
        for layer in (1, 0):
            step.write(layer, tokens(1), tokens(1))
    with pytest.raises(SequenceError, match="this step is closed"):
        step.write(0, tokens(1), tokens(1))
    with pytest.raises(SequenceError, match="entered before"):
        step.__enter__()
    assert a.length == 2


def test_leaving_a_step_before_all_layers_are_written():
    cache = torch_cache()
    a = filled(cache, 3)
    with (
        pytest.raises(LayerOrderError, match=r"left before layers 1 were written") as caught,
        cache.step([a], 2) as step,
    ):
        step.write(0, tokens(2), tokens(2))
    assert caught.value.layer == 1
    assert (held(a, 0), held(a, 1), a.pages) == ([0, 1, 2], [0, 1, 2], (0,))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("n_written", [0, 1, 2])
def test_an_exception_takes_the_tokens_back_whatever_was_written(error, n_written):
    cache = torch_cache()
    a, b = filled(cache, 3), filled(cache, 4)

    def fails():
        with cache.step([a, b], 2) as step:
            for layer in range(n_written):
                step.write(layer, tokens(2, rows=2), tokens(2, rows=2))
            raise error

    with pytest.raises(error):
        fails()
    for layer in (0, 1):
        assert (held(a, layer), held(b, layer)) == ([0, 1, 2], [0, 1, 2, 3])
    assert cache.stats.pages_used == 2


def test_a_layer_is_written_once_in_a_step():
    cache = torch_cache()
    a = filled(cache, 1)
    with cache.step([a], 1) as step:
        step.write(1, tokens(1), tokens(1))
        with pytest.raises(LayerOrderError, match="layer 1 was written before") as caught:
            step.write(1, tokens(1, first=5), tokens(1, first=5))
        step.write(0, tokens(1), tokens(1))
    assert caught.value.layer == 1
    assert held(a) == [0, 0]


def test_a_copy_that_is_interrupted_is_finished(monkeypatch):
    cache = torch_cache()
    a = filled(cache, 3)
    b, c = a.fork(2)
    ops, n_calls = cache._core.ops, []
    original = ops.copy

    def interrupted(target, source):
        n_calls.append(1)
        if len(n_calls) == 2:
            raise KeyboardInterrupt
        original(target, source)

    monkeypatch.setattr(ops, "copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.step([b, c], 1).__enter__()
    assert [held(s, layer) for s in (a, b, c) for layer in (0, 1)] == [[0, 1, 2]] * 6
    n_calls[:] = [1] * 0
    with pytest.raises(KeyboardInterrupt):
        append(a.fork(), tokens(1))
    assert [held(s, layer) for s in (a, b, c) for layer in (0, 1)] == [[0, 1, 2]] * 6
    append(b, tokens(1))


def test_a_step_of_no_sequences():
    cache = torch_cache()
    with cache.step([], 3) as step:
        for layer in (0, 1):
            step.write(layer, tokens(3)[:0], tokens(3)[:0])
        assert step.attend(0, torch.ones(0, 4, 3, 4)).shape == (0, 4, 3, 4)
        assert step.attend(0, torch.ones(0, 4, 4)).shape == (0, 4, 4)
    with cache.step([], []) as step:
        for layer in (0, 1):
            step.write(layer, torch.ones(0, 2, 4), torch.ones(0, 2, 4))


@pytest.mark.parametrize(
    ("sequences", "n_tokens", "error", "message"),
    [
        (lambda a, b: [a, b], 0, ArgumentError, "n_tokens must be at least 1, not 0"),
        (lambda a, b: [a, b], [1, 0], ArgumentError, "n_tokens must be at least 1, not 0"),
        (lambda a, b: [a, b], -1, ArgumentError, "n_tokens"),
        (lambda a, b: [a, b], 1.0, ArgumentTypeError, "n_tokens must be an integer"),
        (lambda a, b: [a, b], [1], ShapeError, "1 numbers for 2 sequences"),
        (lambda a, b: [a, a], 1, SequenceError, "given twice"),
        (lambda a, b: [a, None], 1, ArgumentTypeError, "a Sequence is wanted, not NoneType"),
        (lambda a, b: a, 1, ArgumentTypeError, "a list of sequences is wanted"),
        (lambda a, b: [torch_cache().sequence()], 1, SequenceError, "of another cache"),
    ],
)
def test_steps_that_cannot_be(sequences, n_tokens, error, message):
    cache = torch_cache()
    a, b = filled(cache, 3), filled(cache, 5)
    with pytest.raises(error, match=message):
        cache.step(sequences(a, b), n_tokens)


def test_numbers_of_tokens_may_come_from_an_array():
    cache = torch_cache()
    a, b = cache.sequence(), cache.sequence()
    for n_tokens in (np.array([2, 1]), torch.tensor([2, 1]), iter([2, 1])):
        with cache.step([a, b], n_tokens) as step:
            for layer in (0, 1):
                step.write(layer, torch.ones(3, 2, 4), torch.ones(3, 2, 4))
    with cache.step([a, b], np.int64(1)) as step:
        for layer in (0, 1):
            step.write(layer, tokens(1, rows=2), tokens(1, rows=2))
    assert (a.length, b.length) == (7, 4)


BAD_WRITES = [
    (lambda k: (k, None), ArgumentTypeError, "values are missing"),
    (lambda k: (None, k), ArgumentTypeError, "keys are missing"),
    (lambda k: (k.numpy(), k), ArgumentTypeError, "keys must be a torch.Tensor"),
    (lambda k: (k, k.double()), DTypeError, "values torch.float64, the cache holds float32"),
    (lambda k: (k.half(), k.half()), DTypeError, "keys are torch.float16"),
    (lambda k: (k.to("meta"), k.to("meta")), DeviceMismatchError, "keys are on meta, the cache is on cpu"),
    (lambda k: (k[:, :1], k[:, :1]), ShapeError, "the cache takes"),
    (lambda k: (k[..., :3], k), ShapeError, "the cache takes"),
    (lambda k: (k, k[..., :3]), ShapeError, "values are"),
    (lambda k: (k, k[:, :, :1]), ShapeError, "values are"),
    (lambda k: (k[0, 0], k[0, 0]), ShapeError, "the cache takes"),
    (lambda k: (k.clone().requires_grad_(), k), AutogradError, "keys require grad"),
    (lambda k: (k, k.clone().requires_grad_()), AutogradError, "values require grad"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_WRITES)
def test_writes_that_cannot_be(change, error, message):
    cache = torch_cache()
    a = filled(cache, 3)
    before = [bits(cache.keys(layer)).clone() for layer in (0, 1)]  # NaN where nothing was written
    with pytest.raises(error, match=message):
        a.append(0, *change(tokens(2)))
    assert (a.length, a.pages) == (3, (0,))
    with cache.step([a], 2) as step:
        with pytest.raises(error, match=message):
            step.write(0, *change(tokens(2)))
        assert all(torch.equal(bits(cache.keys(layer)), before[layer]) for layer in (0, 1))
        for layer in (0, 1):
            step.write(layer, tokens(2, first=3), tokens(2, first=3))
    assert held(a) == held(a, 0) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 2, 1, 4), "the step has 2 sequences"),
        ((2, 2, 2, 4), "each sequence gets 1 tokens"),
        ((3, 2, 4), "the step has 2 new tokens"),
    ],
)
def test_rows_that_are_not_those_of_the_step(shape, message):
    cache = torch_cache()
    a, b = filled(cache, 3), filled(cache, 5)
    with cache.step([a, b], 1) as step:
        with pytest.raises(ShapeError, match=message):
            step.write(0, torch.ones(shape), torch.ones(shape))
        for layer in (0, 1):
            step.write(layer, tokens(1, rows=2), tokens(1, rows=2))
    message = r"the sequences get \[1, 2\] tokens; give \[3, heads, dim\]"
    with pytest.raises(ShapeError, match=message), cache.step([a, b], [1, 2]) as step:
        step.write(0, tokens(2, rows=2), tokens(2, rows=2))


def test_layers_that_own_nothing_are_not_written():
    cache = torch_cache(KVSpec([*SMALL.layers, SharedLayer(0)]))
    a = filled(cache, 2)
    with cache.step([a], 1) as step:
        with pytest.raises(
            ArgumentError, match="layer 2 shares the keys and values of layer 0; write that one"
        ):
            step.write(2, tokens(1), tokens(1))
        for layer in (3, -1):
            with pytest.raises(ArgumentError, match="layer"):
                step.write(layer, tokens(1), tokens(1))
        for layer in (0, 1):
            step.write(layer, tokens(1), tokens(1))
    with pytest.raises(ArgumentError, match="layer 2 shares"):
        a.append(2, tokens(1), tokens(1))


def test_tensors_that_require_grad_are_written_without_grad_mode():
    cache = torch_cache()
    a = cache.sequence()
    with torch.no_grad():
        append(a, tokens(3).clone().requires_grad_())
    assert held(a) == [0, 1, 2]
    assert not cache.keys(0).requires_grad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_lies_in_the_pages_can_be_written(layout):
    cache = torch_cache(layout=layout)
    filled(cache, 1, first=7)
    b = cache.sequence()
    where = {"per-head": np.s_[:, 0, :1], "HND": np.s_[0, :, :1], "NHD": np.s_[0, :1]}[layout]
    mine = cache.keys(0)[where]
    mine = (mine.transpose(0, 1) if layout == "NHD" else mine)[None]  # [1, 2, 1, 4]
    append(b, mine)
    assert held(b) == [7]


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "int8", "complex64", "float64"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_can_be_held(dtype, layout):
    spec = KVSpec([LayerSpec(2, 4, 3, dtype)])
    cache = torch_cache(spec, layout=layout)
    a = cache.sequence()
    kind = getattr(torch, dtype)
    keys = torch.arange(2 * 6 * 4).reshape(1, 2, 6, 4).remainder(8).float().to(kind)
    values = torch.arange(2 * 6 * 3).reshape(1, 2, 6, 3).remainder(8).float().to(kind)
    a.append(0, keys, values)
    b = a.fork()
    b.append(0, keys[:, :, :1], values[:, :, :1])
    b.swap_out()
    b.swap_in()
    got = b.read(0)
    assert (got[0].dtype, got[1].dtype) == (kind, kind)
    for have, want in zip(got, (keys, values), strict=True):
        assert torch.equal(bits(have[:, :6]), bits(want[0]))
        assert torch.equal(bits(have[:, 6:]), bits(want[0, :, :1]))


def test_values_of_no_dim():
    cache = torch_cache(KVSpec([LayerSpec(1, 6, 0, "float32")]))
    a = cache.sequence()
    a.append(0, torch.ones(1, 1, 5, 6), torch.ones(1, 1, 5, 0))
    b = a.fork()
    b.append(0, torch.ones(1, 1, 1, 6), torch.ones(1, 1, 1, 0))
    b.swap_out()
    b.swap_in()
    keys, values = b.read(0)
    assert (keys.shape, values.shape) == ((1, 6, 6), (1, 6, 0))


# --------------------------------------------------------------------------------------------------- a sequence by itself


def test_the_layers_of_an_append_come_in_order():
    cache = torch_cache()
    a = filled(cache, 3)
    with pytest.raises(LayerOrderError, match="layer 1 given, layer 0 is next") as caught:
        a.append(1, tokens(2), tokens(2))
    assert (caught.value.layer, a.length) == (1, 3)
    a.append(0, tokens(2, first=3), tokens(2, first=3))
    assert a.length == 5
    with pytest.raises(LayerOrderError, match="layer 0 given, layer 1 is next"):
        a.append(0, tokens(2), tokens(2))
    with pytest.raises(ShapeError, match="1 tokens given, layer 0 got 2"):
        a.append(1, tokens(1), tokens(1))
    for call in (
        a.fork,
        a.checkpoint,
        a.swap_out,
        lambda: a.publish([]),
        lambda: a.truncate(4),
        lambda: held(a, 1),
    ):
        with pytest.raises(LayerOrderError) as caught:
            call()
        assert caught.value.layer == 1
    with pytest.raises(LayerOrderError, match=r"truncate\(3\) to give the new tokens up"):
        cache.step([a], 1).__enter__()
    assert held(a, 0) == [0, 1, 2, 3, 4]
    a.append(1, tokens(2, first=3), tokens(2, first=3))
    assert held(a, 1) == [0, 1, 2, 3, 4]


def test_an_append_that_is_given_up():
    cache = torch_cache()
    a = filled(cache, 3)
    for keep in (3, 1):
        a.append(0, tokens(4), tokens(4))
        a.truncate(keep)
        assert (held(a, 0), held(a, 1)) == (list(range(keep)),) * 2
    a.append(0, tokens(4), tokens(4))
    a.free()
    assert cache.stats.pages_free == 8


def test_appends_of_several_rows_or_of_none():
    cache = torch_cache()
    a = cache.sequence()
    with pytest.raises(ShapeError, match="append takes one row"):
        a.append(0, tokens(1, rows=2), tokens(1, rows=2))
    for new in (tokens(1)[:, :, :0], torch.ones(0, 2, 4)):
        with pytest.raises(ArgumentError, match="are no tokens"):
            a.append(0, new, new)
    append(a, torch.arange(3.0)[:, None, None].expand(3, 2, 4))  # [tokens, kv_heads, dim]
    assert held(a) == [0, 1, 2]


def test_checkpoints_mean_the_tokens_of_then():
    cache = torch_cache()
    a = filled(cache, 3)
    at_3 = a.checkpoint()
    append(a, tokens(3, first=3))
    at_6 = a.checkpoint()
    a.rollback(at_3)
    assert held(a) == [0, 1, 2]
    append(a, tokens(3, first=13))
    with pytest.raises(CheckpointError, match="the checkpoint at 6 tokens is dead"):
        a.rollback(at_6)
    assert held(a) == [0, 1, 2, 13, 14, 15]
    a.rollback(at_3)
    a.rollback(at_3)
    a.truncate(2)
    append(a, tokens(1, first=9))
    with pytest.raises(CheckpointError, match="dead"):
        a.rollback(at_3)
    with pytest.raises(CheckpointError, match="another sequence"):
        a.fork().rollback(at_3)
    with pytest.raises(ArgumentTypeError, match="takes a SequenceCheckpoint, not int"):
        a.rollback(3)
    for _ in range(1000):
        a.rollback(a.checkpoint())
    assert len(a._marks) == 1


def test_forks():
    cache = torch_cache()
    a = filled(cache, 5)
    assert a.fork(0) == []
    forks = a.fork(3)
    assert [fork.pages for fork in forks] == [a.pages] * 3
    assert (cache.available, cache.stats.pages_copied) == (6, 0)
    with pytest.raises(ArgumentError):
        a.fork(-1)


def test_reset_keep_and_the_prefix_cache():
    cache = torch_cache()
    prompt = [1, 2, 3, 4, 5]
    a, b, c = filled(cache, 5), filled(cache, 6), filled(cache, 3)
    assert a.publish(prompt) == 4
    b.swap_out()
    cache.keep(b)
    assert (a.is_live, b.is_live, c.is_live) == (False, True, False)
    assert (cache.stats.pages_cached, cache.stats.n_swapped_out, cache.stats.pages_used) == (1, 1, 0)
    with pytest.raises(SequenceError, match="was freed"):
        cache.keep(a)
    with pytest.raises(ArgumentTypeError):
        cache.keep(None)
    hit = cache.match(prompt)
    assert held(hit) == [0, 1, 2, 3]
    cache.reset_prefix_cache()
    assert cache.match(prompt).length == 0
    assert held(hit) == [0, 1, 2, 3]
    hit.publish([1, 2, 3, 4])  # anew
    assert cache.match(prompt).pages == hit.pages
    cache.reset()
    assert (hit.is_live, b.is_live) == (False, False)
    assert (cache.stats.pages_free, cache.stats.n_sequences, cache.match(prompt).length) == (8, 0, 0)


def test_figures():
    cache = torch_cache()
    a = filled(cache, 6)
    a.fork()
    stats = cache.stats
    assert (stats.bytes_per_token, stats.page_nbytes, stats.reserved_nbytes) == (128, 512, 4096)
    assert (stats.used_nbytes, stats.tokens_stored, stats.tokens_wasted, stats.n_sequences) == (1024, 6, 2, 2)
    assert stats.scratch_nbytes >= 32 * 64
    with pytest.raises(AttributeError):
        stats.n_pages = 7


def test_would_fit():
    cache = torch_cache(num_pages=2)
    a = filled(cache, 3)
    assert [cache.would_fit(n) for n in (0, 4, 5)] == [True, True, False]
    assert [cache.would_fit(n, a) for n in (0, 1, 5, 6)] == [True, True, True, False]
    a.fork()
    assert [cache.would_fit(n, a) for n in (1, 2)] == [True, False]
    for n, error in ((-1, ArgumentError), (1.0, ArgumentTypeError)):
        with pytest.raises(error):
            cache.would_fit(n, a)
    with pytest.raises(SequenceError, match="another cache"):
        cache.would_fit(1, torch_cache().sequence())


# ----------------------------------------------------------------------------------------------------------- host memory


@pytest.mark.parametrize("where", [None, "host", "torch"])
def test_swapping(where):
    cache = torch_cache(num_pages=3)
    a = filled(cache, 6)
    arena = where and Arena("64KiB", backend=where, device="cpu" if where == "torch" else None)
    mark = a.checkpoint()
    assert a.swap_out(arena) == 1024
    assert (a.length, a.pages, a.is_swapped_out, cache.available) == (6, (), True, 3)
    for call in (
        a.fork,
        a.checkpoint,
        a.swap_out,
        lambda: held(a),
        lambda: a.truncate(0),
        lambda: a.publish([]),
    ):
        with pytest.raises(SequenceError, match="is swapped out"):
            call()
    other = filled(cache, 5, first=50)
    with pytest.raises(CapacityError, match=r"swap_in\(\) needs 2 pages of 4 tokens; .*: 1 too few"):
        a.swap_in()
    other.truncate(4)
    a.swap_in()
    assert (held(a, 0), held(a, 1), held(other)) == ([0, 1, 2, 3, 4, 5],) * 2 + ([50, 51, 52, 53],)
    assert not set(a.pages) & set(other.pages)
    with pytest.raises(SequenceError, match="is not swapped out"):
        a.swap_in()
    a.rollback(mark)


def test_what_is_published_still_is_shared_again():
    cache = torch_cache(num_pages=4)
    a = filled(cache, 10)
    a.publish(range(10))
    b = a.fork()
    b_pages = b.pages
    b.swap_out()
    assert a.pages == b_pages
    cache.keys(0)[:, a.pages[0]] = 77  # what is shared is not copied back
    b.swap_in()
    assert b.pages[:2] == a.pages[:2]
    assert b.pages[2] != a.pages[2]
    assert held(a, 1) == held(b, 1) == list(range(10))
    assert cache.stats.pages_used == 4
    with pytest.raises(CapacityError):
        append(b.fork(), tokens(1))


def test_a_page_that_is_published_anew_is_not_what_was_swapped_out():
    cache = torch_cache(num_pages=2)
    a = filled(cache, 4)
    a.publish(range(4))
    a.swap_out()
    other = filled(cache, 8, first=50)  # takes the cached page, too
    other.publish(range(50, 58))
    other.free()
    a.swap_in()
    assert held(a, 0) == held(a, 1) == [0, 1, 2, 3]


def test_a_cached_page_counts_when_swapping_in():
    cache = torch_cache(num_pages=2)
    a = filled(cache, 5)
    a.publish(range(4))
    a.swap_out()
    assert (cache.stats.pages_cached, cache.available) == (1, 2)
    other = filled(cache, 1)
    assert cache.stats.pages_cached == 1
    with pytest.raises(CapacityError):
        a.swap_in()
    assert (cache.stats.pages_cached, cache.available) == (1, 1)
    assert cache.match(range(5)).pages == (0,)
    cache.keep(other)
    cache.reset_prefix_cache()
    b = filled(cache, 4, first=9)
    b.publish(range(4))  # the same token ids, another page
    other.free()
    b.swap_out()
    b.swap_in()
    assert held(b) == [9, 10, 11, 12]


def test_swapping_that_fails_changes_nothing(monkeypatch):
    cache = torch_cache()
    a = filled(cache, 6)
    small = Arena(1000, backend="torch", device="cpu")
    with pytest.raises(OutOfMemoryError):
        a.swap_out(small)
    for arena, error in (("host", ArgumentTypeError), (7, ArgumentTypeError)):
        with pytest.raises(error, match="takes an Arena"):
            a.swap_out(arena)
    ops = cache._core.ops
    host = Arena("64KiB")
    with monkeypatch.context() as patch:
        patch.setattr(ops, "to_host", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            a.swap_out(host)
    assert (a.pages, a.is_swapped_out, host.stats.used) == ((0, 1), False, 0)
    start = host.checkpoint()
    a.swap_out(host)
    with monkeypatch.context() as patch:
        patch.setattr(ops, "from_host", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            a.swap_in()
    assert (a.is_swapped_out, cache.available, a.length) == (True, 8, 6)
    a.swap_in()
    assert held(a) == [0, 1, 2, 3, 4, 5]
    a.swap_out(host)
    host.rollback(start)
    with pytest.raises(StaleRegionError):
        a.swap_in()
    assert (a.is_swapped_out, cache.available) == (True, 8)
    a.free()


def test_an_empty_sequence_can_be_swapped():
    cache = torch_cache()
    a = cache.sequence()
    assert a.swap_out() == 0
    a.swap_in()
    append(a, tokens(1))
    assert held(a) == [0]


# --------------------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("make", [torch_cache, host_cache])
def test_tables(make):
    cache = make()
    a, b = cache.sequence(), cache.sequence()
    for sequence, n in ((a, 6), (b, 4)):
        new = tokens(n) if make is torch_cache else tokens(n).numpy()
        append(sequence, new)
    csr = cache.flashinfer_tables([b, a])
    assert [table.tolist() for table in csr] == [[0, 1, 3], [2, 0, 1], [4, 2]]
    dense = cache.block_table([b, a])
    assert [table.tolist() for table in dense] == [[[2, 0], [0, 1]], [4, 6]]
    assert cache.block_table([b], width=3).block_table.tolist() == [[2, 0, 0]]
    assert {str(table.dtype).removeprefix("torch.") for table in (*csr, *dense)} == {"int32"}
    slots = cache.slot_mapping([(a, 3, 6), (b, 0, 1)])
    assert (slots.tolist(), str(slots.dtype).removeprefix("torch.")) == ([3, 4, 5, 8], "int64")
    empty = cache.sequence()
    dense = cache.block_table([empty, b])
    assert [table.tolist() for table in dense] == [[[0], [2]], [0, 4]]
    with pytest.raises(SequenceError, match="row 1 is an empty sequence"):
        cache.flashinfer_tables([a, empty])
    assert [table.tolist() for table in cache.flashinfer_tables([])] == [[0], [], []]
    assert [table.tolist() for table in cache.block_table([])] == [[], []]


def test_tables_in_a_step_show_the_new_tokens():
    cache = torch_cache()
    a, b = filled(cache, 3), filled(cache, 4)
    with cache.step([b, a], [1, 2]) as step:
        assert cache.slot_mapping(step).tolist() == [8, 3, 12]
        assert cache.flashinfer_tables([a, b]).kv_last_page_len.tolist() == [1, 1]
        with pytest.raises(SequenceError, match="another cache"):
            torch_cache().slot_mapping(step)
        for layer in (0, 1):
            step.write(layer, torch.ones(3, 2, 4), torch.ones(3, 2, 4))


@pytest.mark.parametrize("make", [torch_cache, host_cache])
def test_tables_at_addresses_that_stay(make):
    cache = make()
    a = cache.sequence()
    append(a, tokens(5) if make is torch_cache else tokens(5).numpy())

    def buffer(shape, dtype):
        return (
            torch.full(shape, 9, dtype=getattr(torch, dtype))
            if make is torch_cache
            else np.full(shape, 9, dtype)
        )

    csr = FlashInferTables(buffer((4,), "int32"), buffer((6,), "int32"), buffer((3,), "int32"))
    assert cache.flashinfer_tables([a], out=csr).kv_indices is csr.kv_indices
    assert [table.tolist() for table in csr] == [[0, 2, 0, 0], [0, 1, 0, 0, 0, 0], [1, 0, 0]]
    dense = BlockTable(buffer((2, 3), "int32"), buffer((2,), "int32"))
    assert cache.block_table([a], out=dense).cache_seqlens is dense.cache_seqlens
    assert [table.tolist() for table in dense] == [[[0, 1, 0], [0, 0, 0]], [5, 0]]
    slots = buffer((3,), "int64")
    assert cache.slot_mapping([(a, 4, 5)], out=slots) is slots
    assert slots.tolist() == [4, 0, 0]
    for out, error in (
        (BlockTable(dense.block_table, buffer((0,), "int32")), ShapeError),
        (BlockTable(dense.block_table, buffer((2, 1), "int32")), ShapeError),
        (BlockTable(dense.block_table, buffer((2,), "int64")), DTypeError),
        (BlockTable(dense.block_table, [0, 0]), DeviceMismatchError),
    ):
        with pytest.raises(error, match="block_table: out"):
            cache.block_table([a.fork()], out=out)
    assert [table.tolist() for table in dense] == [[[0, 1, 0], [0, 0, 0]], [5, 0]], "unchanged on error"


def test_tables_that_cannot_be():
    cache = torch_cache()
    a = filled(cache, 6)
    with pytest.raises(ShapeError, match="a sequence of 6 tokens has 2 pages, width is 1") as caught:
        cache.block_table([a], width=1)
    assert (caught.value.needed, caught.value.width) == (2, 1)
    for start, stop in ((0, 7), (-1, 2), (3, 2)):
        with pytest.raises(ArgumentError):
            cache.slot_mapping([(a, start, stop)])
    for ranges in ([a], [(a, 1)], [(a, 0.0, 1)]):
        with pytest.raises(ArgumentTypeError):
            cache.slot_mapping(ranges)
    other = torch_cache().sequence()
    gone = a.fork()
    gone.free()
    out = a.fork()
    out.swap_out()
    for bad, message in ((other, "another cache"), (gone, "was freed"), (out, "is swapped out")):
        for call in (
            lambda bad=bad: cache.block_table([a, bad]),
            lambda bad=bad: cache.flashinfer_tables([a, bad]),
            lambda bad=bad: cache.slot_mapping([(a, 0, 1), (bad, 0, 0)]),
        ):
            with pytest.raises(SequenceError, match=message):
                call()


# ------------------------------------------------------------------------------------------- the arena below the cache


@pytest.mark.parametrize("make", [torch_cache, host_cache])
@pytest.mark.parametrize("gather_tokens", [None, 0])
def test_a_cache_is_stale_after_a_rollback_of_its_arena(make, gather_tokens):
    cache = make(gather_tokens=gather_tokens)
    a = cache.sequence()
    new = tokens(3) if make is torch_cache else tokens(3).numpy()
    append(a, new)

    def rolled_back():
        with cache.step([a], 3) as step:
            cache.arena.reset()
            step.write(0, new, new)

    with pytest.raises(StaleRegionError):
        rolled_back()
    assert a.length == 3
    for call in (
        lambda: a.append(0, new, new),
        lambda: a.read(0),
        lambda: cache.keys(0),
        lambda: cache.values(0),
        a.swap_out,
        cache.step([a], 1).__enter__,
    ):
        with pytest.raises(StaleRegionError):
            call()
    assert a.length == 3
    a.free()


def test_a_page_can_begin_beyond_32_bits():
    from gpuarena.kv.paged._storage import LAYOUTS, Geometry

    for layout in LAYOUTS:
        geometry = Geometry(layout, kv_heads=2, n_pages=2**31 - 1, page_size=16)
        rows = geometry.rows(np.array([2**31 - 2]), np.array([15]))
        assert rows[0, 1] == geometry.n_rows - 1


@pytest.mark.parametrize(
    "dtype", ["uint16", "uint32", "uint64", "int8", "bool", "float8_e4m3fn", "complex64"]
)
def test_every_dtype_that_torch_stores_can_be_appended(dtype):
    """index_copy_ knows no wide unsigned integers."""
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=2, dtype=dtype)
    cache = PagedKVCache(Arena("1MiB", backend="torch", device="cpu"), spec, num_pages=4, page_size=2)
    sequence = cache.sequence()
    new = torch.ones(1, 1, 3, 2).to(getattr(torch, dtype))
    sequence.append(0, new, new)
    keys, values = sequence.read(0)
    assert keys.tolist() == values.tolist() == new[0].tolist()
