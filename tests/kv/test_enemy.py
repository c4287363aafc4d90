"""What an enemy does to the linear cache: wrong types, memory of the cache as input, errors half-way."""

from __future__ import annotations

import contextlib
import gc
import itertools
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from interrupt_kit import interrupt, interrupted

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from gpuarena import Arena  # noqa: E402
from gpuarena.errors import ArenaError, ArgumentError, CheckpointError, StaleRegionError  # noqa: E402
from gpuarena.kv import (  # noqa: E402
    ContiguousKVCache,
    KVCache,
    KVSpec,
    LaneCache,
    LayerSpec,
    PagedKVCache,
)


def torch_arena() -> Arena:
    return Arena("1MiB", backend="torch", device="cpu")


def arena_of_ff() -> Arena:
    """Return an empty arena whose memory is NaN in every dtype of floats."""
    arena = torch_arena()
    with arena.scope():
        arena.alloc(arena.capacity, "uint8", fill=0xFF)
    return arena


def spec_of(layers: int = 2, heads: int = 2, **options: Any) -> KVSpec:
    return KVSpec([LayerSpec(heads, 4, 4, "float32", **options) for _ in range(layers)])


def ramp(first: int, n: int, rows: int = 1, heads: int = 2) -> Any:
    """Return keys ``[rows, heads, n, 4]`` that say of which token they are."""
    return torch.arange(first, first + n).float()[None, None, :, None].expand(rows, heads, n, 4).contiguous()


def noise(n: int, rows: int = 1, heads: int = 2) -> Any:
    return torch.randn(rows, heads, n, 4)


def linear(n: int = 0, *, rows: int = 1, layers: int = 2, **options: Any) -> KVCache:
    cache = KVCache(torch_arena(), spec_of(layers, **options), batch=4, max_tokens=64)
    for layer in range(layers if n else 0):
        cache.append(layer, ramp(0, n, rows), ramp(0, n, rows))
    return cache


# -- memory of the cache itself as input -------------------------------------------------------------------------

Append = Callable[[Any, Any], tuple[Any, Any]]
Handle = tuple[Append, Callable[[int], None]]


def full_handle() -> Handle:
    cache = linear(layers=1)
    return lambda k, v: cache.append(0, k, v), cache.truncate


def host_handle() -> Handle:
    cache = KVCache(Arena("1MiB"), spec_of(1), batch=1, max_tokens=64)

    def append(k: Any, v: Any) -> tuple[Any, Any]:
        k, v = (x if isinstance(x, np.ndarray) else x.numpy() for x in (k, v))
        return cache.append(0, k, v)

    return append, cache.truncate


def records_handle() -> Handle:
    cache = KVCache(torch_arena(), spec_of(1), batch=1, max_tokens=64, layout="token-major")
    return lambda k, v: cache.append(0, k, v), cache.truncate


def window_handle() -> Handle:
    cache = linear(layers=1, window=8, slack=8)
    return lambda k, v: cache.append(0, k, v), cache.truncate


def quantized_handle() -> Handle:
    cache = linear(layers=1, storage="int8")
    return lambda k, v: cache.append(0, k, v), cache.truncate


def ring_handle() -> Handle:
    arena = Arena("16MiB", backend="virtual:torch")
    cache = KVCache(arena, spec_of(1, window=8, slack=8), batch=1, max_tokens=64, rings=True)
    return lambda k, v: cache.append(0, k, v), cache.truncate


@pytest.mark.parametrize(
    "handle",
    [
        pytest.param(full_handle, id="full"),
        pytest.param(host_handle, id="host"),
        pytest.param(records_handle, id="records"),
        pytest.param(window_handle, id="window"),
        pytest.param(quantized_handle, id="quantized"),
        pytest.param(ring_handle, id="ring"),
    ],
)
def test_old_keys_and_values_can_be_appended_in_exchange(handle: Callable[[], Handle]) -> None:
    append, truncate = handle()
    keys, values = append(ramp(0, 4), -ramp(0, 4))
    keys_before, values_before = np.array(keys.tolist()), np.array(values.tolist())
    truncate(0)
    keys, values = append(values, keys)
    np.testing.assert_array_equal(keys.tolist(), values_before)
    np.testing.assert_array_equal(values.tolist(), keys_before)


@pytest.mark.parametrize(
    "handle",
    [
        pytest.param(full_handle, id="full"),
        pytest.param(records_handle, id="records"),
        pytest.param(window_handle, id="window"),
        pytest.param(host_handle, id="host"),
        pytest.param(ring_handle, id="ring"),
    ],
)
def test_old_tokens_can_be_appended_where_they_overlap_their_new_place(handle: Callable[[], Handle]) -> None:
    append, truncate = handle()
    keys, values = append(noise(8), noise(8))
    wanted = np.array(keys.tolist())[:, :, 1:7]
    truncate(2)
    keys, _ = append(keys[:, :, 1:7], values[:, :, 1:7])
    np.testing.assert_array_equal(np.array(keys.tolist())[:, :, 2:], wanted)


def test_overlapping_tokens_of_one_head_raise_nothing_untyped() -> None:
    cache = KVCache(torch_arena(), spec_of(1, heads=1), batch=1, max_tokens=64)
    keys, values = cache.append(0, noise(20, heads=1), noise(20, heads=1))
    wanted = keys[:, :, 3:13].clone()
    cache.truncate(5)
    try:
        keys, _ = cache.append(0, keys[:, :, 3:13], values[:, :, 3:13])
    except ArenaError:
        return
    assert torch.equal(keys[:, :, 5:], wanted)


# -- memory that is no longer the cache's, or never was written --------------------------------------------------


def test_write_at_leaves_memory_alone_that_was_given_back() -> None:
    arena = torch_arena()
    start = arena.checkpoint()
    cache = KVCache(arena, spec_of(1), batch=1, max_tokens=16)
    cache.advance(2)
    cache.buffers(0)
    arena.rollback(start)
    mine = arena.alloc(1000, "float32", fill=0)
    with pytest.raises(StaleRegionError):
        cache.write_at(0, torch.tensor([0, 1]), ramp(1, 2), ramp(1, 2))
    assert not mine.array.any()


def test_a_nan_of_a_sequence_that_was_reset_does_not_reach_the_next() -> None:
    cache = linear(layers=1)
    cache.buffers(0)  # clears all slots, once
    bad = torch.full((1, 2, 8, 4), float("nan"))
    cache.append(0, bad, bad)
    cache.reset()
    cache.advance(1, rows=1)
    cache.buffers(0)
    keys, values = cache.write_at(0, torch.tensor([0]), noise(1), noise(1))
    mask = cache.mask_at(0, torch.tensor([0]), 64)
    assert torch.isfinite(scaled_dot_product_attention(noise(1), keys, values, mask)).all()


# -- rows, steps and checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "host"])
def test_rollback_to_more_rows_shows_their_tokens_after_a_window_moved(backend: str) -> None:
    arena = torch_arena() if backend == "torch" else Arena("1MiB")
    cache = KVCache(arena, spec_of(1, window=4, slack=4), batch=4, max_tokens=64)

    def append(first: int, n: int, rows: int) -> Any:
        new = ramp(first, n, rows) if backend == "torch" else ramp(first, n, rows).numpy()
        return cache.append(0, new, new)[0]

    append(0, 8, 1)
    cache.repeat(4)
    four = cache.checkpoint()
    cache.select([0])
    append(8, 1, 1)
    cache.rollback(four)
    keys = append(8, 1, 4)
    assert keys[:, 0, :, 0].tolist() == [[5, 6, 7, 8]] * 4


def _truncate(cache: KVCache, mark: Any) -> None:
    cache.truncate(5)


def _reset(cache: KVCache, mark: Any) -> None:
    cache.reset()


def _rollback(cache: KVCache, mark: Any) -> None:
    cache.rollback(mark)


@pytest.mark.parametrize("cut", [_truncate, _reset, _rollback])
def test_a_failed_step_that_cut_first_leaves_all_layers_at_one_length(cut: Callable[..., None]) -> None:
    cache = linear(5)
    mark = cache.checkpoint()
    for layer in range(2):
        cache.append(layer, ramp(5, 5), ramp(5, 5))
    with contextlib.suppress(KeyError), cache.step():
        cut(cache, mark)
        cache.append(0, ramp(5, 3), ramp(5, 3))
        raise KeyError
    assert len({layer.length for layer in cache.layers}) == 1


def test_a_failed_step_takes_a_repeat_back() -> None:
    cache = linear(5)
    with contextlib.suppress(KeyError), cache.step():
        cache.repeat(4)
        cache.append(0, ramp(5, 1, 4), ramp(5, 1, 4))
        raise KeyError
    assert (cache.length, cache.rows) == (5, 1)


def test_a_linear_step_that_is_over_takes_nothing_back() -> None:
    cache = linear(3)
    step = cache.step()
    step.__enter__()
    step.__exit__(None, None, None)
    for layer in range(2):
        cache.append(layer, ramp(3, 3), ramp(3, 3))
    error = KeyError()
    step.__exit__(KeyError, error, None)
    assert cache.length == 6


@pytest.mark.parametrize(
    "left",
    [
        pytest.param(lambda: linear().scope(), id="scope"),
    ],
)
def test_leaving_what_was_not_entered_raises_nothing_untyped(left: Callable[[], Any]) -> None:
    context = left()
    try:
        context.__exit__(None, None, None)
    except ArenaError:
        pass


# -- modes and devices of torch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "virtual:torch"])
def test_records_take_tokens_inside_and_outside_of_inference_mode(backend: str) -> None:
    arena = torch_arena() if backend == "torch" else Arena("16MiB", backend=backend)
    cache = KVCache(arena, spec_of(), batch=1, max_tokens=16, layout="token-major")
    with torch.inference_mode():
        for layer in range(2):
            cache.append(layer, ramp(0, 2), ramp(0, 2))
    for layer in range(2):
        keys, _ = cache.append(layer, ramp(2, 1), ramp(2, 1))
        assert keys[0, 0, :, 0].tolist() == [0, 1, 2]


def test_reorder_works_whatever_the_default_device_is() -> None:
    cache = linear(3, rows=2)
    with torch.device("meta"):
        cache.reorder([1, 0])


def test_a_tensor_of_another_layout_does_not_end_the_process() -> None:
    program = (
        "import torch\n"
        "from gpuarena import Arena\n"
        "from gpuarena.errors import ArenaError\n"
        "from gpuarena.kv import KVCache, KVSpec\n"
        "spec = KVSpec.uniform(layers=1, kv_heads=2, head_dim=4, dtype='float32')\n"
        "cache = KVCache(Arena('1MiB', backend='torch', device='cpu'), spec, batch=1, max_tokens=8)\n"
        "new = torch.ones(1, 2, 1, 4).to_mkldnn()\n"
        "try:\n"
        "    cache.append(0, new, new)\n"
        "except ArenaError:\n"
        "    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def nested() -> Any:
    return torch.nested.nested_tensor([torch.ones(2, 1, 4)])


@pytest.mark.filterwarnings("ignore")  # nested tensors may change, says torch
@pytest.mark.parametrize(
    "new",
    [
        pytest.param(lambda: torch.ones(1, 2, 1, 4).to_sparse(), id="sparse"),
        pytest.param(nested, id="nested"),
    ],
)
def test_tensors_that_are_not_strided_are_refused(new: Callable[[], Any]) -> None:
    cache = linear(3)
    with pytest.raises(ArenaError):
        cache.append(0, new(), new())
    assert cache.length == 3


# -- numbers that are none ----------------------------------------------------------------------------------------

ODD_NUMBERS = [
    pytest.param(lambda: np.array([1, 2]), id="array of two"),
    pytest.param(lambda: np.array(1.5), id="array of a float"),
    pytest.param(lambda: torch.tensor(1.5), id="tensor of a float"),
    pytest.param(lambda: torch.tensor([1, 2]), id="tensor of two"),
]


@pytest.mark.parametrize("number", ODD_NUMBERS)
def test_what_is_no_single_integer_raises_a_typed_error(number: Callable[[], Any]) -> None:
    with pytest.raises(ArenaError):
        linear(5).truncate(number())


def test_a_tensor_of_a_bool_is_no_number() -> None:
    with pytest.raises(ArenaError):
        linear(5).truncate(torch.tensor(True))


def test_a_bool_is_no_layer() -> None:
    with pytest.raises(ArenaError):
        linear(5).append(True, ramp(5, 1), ramp(5, 1))


def _windowed(**options: Any) -> KVCache:
    return linear(3, layers=1, **options)


def _lanes() -> LaneCache:
    return LaneCache(torch_arena(), spec_of(1), lanes=2, max_tokens=8)


def _pages() -> tuple[PagedKVCache, Any]:
    cache = PagedKVCache(torch_arena(), spec_of(1), num_pages=4, page_size=4)
    sequence = cache.sequence()
    sequence.append(0, noise(3), noise(3))
    return cache, sequence


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: KVCache(None, spec_of(), batch=1, max_tokens=8), id="KVCache arena"),
        pytest.param(lambda: KVCache(torch_arena(), None, batch=1, max_tokens=8), id="KVCache spec"),
        pytest.param(lambda: KVSpec(3), id="KVSpec"),
        pytest.param(lambda: KVCache(torch_arena(), spec_of(), batch=2**62, max_tokens=8), id="batch 2**62"),
        pytest.param(lambda: KVCache(torch_arena(), spec_of(), batch=2**70, max_tokens=8), id="batch 2**70"),
        pytest.param(lambda: _windowed(window=2**70).mask(0, 2), id="mask of a window of 2**70"),
        pytest.param(lambda: _windowed(window=2, sinks=2**70).mask(0, 2), id="mask of 2**70 sinks"),
        pytest.param(lambda: linear(3).mask_at(0, torch.tensor([0]), 2**62), id="mask_at of 2**62 slots"),
        pytest.param(lambda: linear(3).mask_at(0, torch.tensor([0]), -1), id="mask_at of -1 slots"),
        pytest.param(lambda: linear(3).mask_at(0, [0], 4), id="mask_at of a list"),
        pytest.param(lambda: _host_cache().reorder({0: 1}), id="reorder by a dict"),
        pytest.param(lambda: _host_cache().reorder(torch.empty(1, device="meta")), id="reorder of no memory"),
    ],
)
def test_bad_input_raises_a_typed_error(call: Callable[[], Any]) -> None:
    try:
        call()
    except ArenaError:
        pass


def _host_cache() -> KVCache:
    cache = KVCache(Arena("1MiB"), spec_of(1), batch=2, max_tokens=8)
    cache.append(0, np.ones((1, 2, 1, 4), np.float32), np.ones((1, 2, 1, 4), np.float32))
    return cache


def test_write_at_takes_or_refuses_tokens_of_the_cache() -> None:
    cache = KVCache(torch_arena(), spec_of(1), batch=1, max_tokens=16)
    cache.append(0, ramp(0, 4), -ramp(0, 4))
    keys, values = cache.buffers(0)
    try:
        cache.write_at(0, torch.tensor([0, 1]), values[:, :, 2:4], keys[:, :, 0:2])
    except ArenaError:
        return
    assert values[0, 0, :2, 0].tolist() == [0, 1]


def test_repeat_looks_at_its_number_first() -> None:
    cache = linear(3)
    tracemalloc.start()
    try:
        with pytest.raises(ArenaError):
            cache.repeat(200_000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_rows_may_be_an_array_that_runs_backwards() -> None:
    linear(3, rows=4).reorder(np.arange(4)[::-1])


def test_no_rows_are_too_few_rows() -> None:
    with pytest.raises(ArenaError, match="0 rows"):
        linear(3).select([])


# -- interrupts ---------------------------------------------------------------------------------------------------


def _one_step(cache: KVCache) -> None:
    with cache.step():
        for layer in range(2):
            cache.append(layer, ramp(cache.layers[layer].length, 1), ramp(cache.layers[layer].length, 1))


def _shown(cache: KVCache) -> Any:
    """Return the lengths, and whether every token that is shown is the one that it should be."""
    right = all(
        layer.keys[0, 0, :, 0].tolist() == [float(token) for run in layer.positions for token in run]
        and torch.equal(layer.keys, layer.values)
        for layer in cache.layers
    )
    return [layer.length for layer in cache.layers], right


def _rows_of(cache: KVCache) -> Any:
    return [(layer.length, layer.keys.tolist(), layer.values.tolist()) for layer in cache.layers]


def _two_rows() -> KVCache:
    cache = linear()
    new = torch.cat([ramp(0, 5), -ramp(0, 5)])
    for layer in range(2):
        cache.append(layer, new, new)
    return cache


def test_an_interrupt_in_a_step_leaves_the_cache_before_or_behind_it() -> None:
    assert interrupted(lambda: linear(7), _one_step, _shown) == []


@pytest.mark.parametrize(
    ("make", "call"),
    [
        pytest.param(lambda: linear(8, window=4, slack=4), _one_step, id="window step"),
        pytest.param(_two_rows, lambda cache: cache.reorder([1, 0]), id="reorder"),
        pytest.param(lambda: linear(7), lambda cache: cache.truncate(3), id="truncate"),
        pytest.param(lambda: linear(7), lambda cache: cache.advance(2), id="advance"),
    ],
)
def test_a_reset_puts_right_what_an_interrupt_left_half_done(
    make: Callable[[], Any], call: Callable[[Any], Any]
) -> None:
    for at in itertools.count(1):
        cache = make()
        if not interrupt(call, cache, at):
            break
        cache.reset()
        for _ in range(3):
            _one_step(cache)
        assert _shown(cache) == ([3, 3], True)
    assert at > 5


# -- what held up -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "host"])
@pytest.mark.parametrize("end", ["close", "reset", "rollback", "spill"])
def test_a_cache_whose_arena_is_gone_says_so(backend: str, end: str) -> None:
    arena = torch_arena() if backend == "torch" else Arena("1MiB")
    start = arena.checkpoint()
    new = noise(3) if backend == "torch" else noise(3).numpy()
    cache = KVCache(
        arena, KVSpec([*spec_of().layers, *spec_of(1, window=3, slack=3).layers]), batch=2, max_tokens=8
    )
    lanes = LaneCache(arena, spec_of(1), lanes=2, max_tokens=8)
    pages = PagedKVCache(arena, spec_of(1), num_pages=4, page_size=4)
    request = ContiguousKVCache(arena, spec_of(1), capacity_tokens=8).request(8)
    sequence = pages.sequence()
    for layer in range(3):
        cache.append(layer, new, new)
    lanes.append(0, new, new)
    sequence.append(0, new, new)
    request.append(0, new, new)
    {"close": arena.close, "reset": arena.reset, "rollback": lambda: arena.rollback(start)}.get(
        end, lambda: arena.spill(start)
    )()
    for call in (
        *(lambda n=n: cache.append(n, new, new) for n in range(3)),
        *(lambda n=n: cache.read(n) for n in range(3)),
        lambda: cache.reorder([0]),
        lambda: cache.repeat(2),
        lambda: cache.advance(1),
        lambda: lanes.append(0, new, new),
        lambda: lanes.read(0),
        lambda: lanes.reset(),
        lambda: lanes.copy(0, 1),
        lambda: sequence.append(0, new, new),
        lambda: sequence.read(0),
        lambda: sequence.swap_out(),
        lambda: request.append(0, new, new),
        lambda: request.read(0),
    ):
        with pytest.raises((StaleRegionError, ArgumentError)):
            call()


def test_nothing_of_a_lane_or_a_page_shows_what_lay_in_the_memory() -> None:
    spec = spec_of(1, window=3, sinks=1)
    lanes = LaneCache(arena_of_ff(), spec, lanes=3, max_tokens=16)
    padded = noise(4, 3)
    padded[1, :, 2:] = padded[2, :, 1:] = float("nan")
    lanes.append(0, padded, padded, n_tokens=[4, 2, 1])
    lanes.truncate(0, 3)
    for rows in (None, [2, 0]):
        assert torch.isfinite(lanes.attend(0, noise(1, 3 if rows is None else 2), lanes=rows)).all()
    pages = PagedKVCache(arena_of_ff(), spec, num_pages=8, page_size=4)
    sequences = [pages.sequence() for _ in range(3)]
    with pages.step(sequences, [5, 1, 2]) as step:
        step.write(0, torch.randn(8, 2, 4), torch.randn(8, 2, 4))
        assert torch.isfinite(step.attend(0, torch.randn(8, 4, 4))).all()
    cache = KVCache(arena_of_ff(), spec_of(1), batch=3, max_tokens=16)
    cache.append(0, noise(3, 2), noise(3, 2))
    assert all(torch.isfinite(side).all() for side in (*cache.read_bucket(0, 8), *cache.buffers(0)))


def test_two_threads_with_caches_of_their_own_on_one_arena() -> None:
    arena = Arena("4MiB", backend="torch", device="cpu")
    caches = [KVCache(arena, spec_of(), batch=1, max_tokens=128) for _ in range(2)]
    pools = [PagedKVCache(arena, spec_of(), num_pages=32, page_size=4) for _ in range(2)]
    wrong: list[Any] = []

    def work(number: int) -> None:
        try:
            sequence = pools[number].sequence()
            for token in range(100):
                new = ramp(1000 * number + token, 1)
                with caches[number].step(), pools[number].step([sequence], 1) as step:
                    for layer in range(2):
                        keys, _ = caches[number].append(layer, new, new)
                        step.write(layer, new, new)
            wanted = [float(1000 * number + token) for token in range(100)]
            assert keys[0, 0, :, 0].tolist() == sequence.read(1)[0][0, :, 0].tolist() == wanted
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_many_steps_forks_and_rollbacks_leave_nothing_behind() -> None:
    cache, (pages, base), lanes = linear(3), _pages(), _lanes()
    new = noise(1)

    def cycle() -> None:
        with cache.scope(), cache.step():
            for layer in range(2):
                cache.append(layer, new, new)
        fork = base.fork()
        fork.append(0, new, new)
        fork.rollback(fork.checkpoint())
        fork.swap_out()
        fork.swap_in()
        fork.free()
        pages.match(range(9), salt=object()).free()
        with lanes.scope(), lanes.step([0], 1):
            lanes.append(0, new, new)

    for _ in range(50):
        cycle()
    gc.collect()
    n_objects = len(gc.get_objects())
    for _ in range(80):
        cycle()
    gc.collect()
    assert len(gc.get_objects()) - n_objects < 50
    assert pages.stats.pages_used == 1


def test_handles_of_other_caches_are_refused() -> None:
    mine, other = linear(3), linear(3)
    with pytest.raises(CheckpointError):
        mine.rollback(other.checkpoint())
    pages, sequence = _pages()
    foreign = _pages()[1]
    for call in (
        lambda: pages.step([foreign], 1),
        lambda: pages.keep(foreign),
        lambda: pages.would_fit(1, foreign),
        lambda: pages.attend(0, noise(1), [foreign]),
        lambda: pages.block_table([foreign]),
        lambda: sequence.rollback(foreign.checkpoint()),
    ):
        with pytest.raises(ArenaError):
            call()
    assert sequence.length == foreign.length == 3
