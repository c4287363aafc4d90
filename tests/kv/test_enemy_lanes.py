"""What an enemy does to lanes and to `attend`: wrong types, memory of the cache as input, interrupts half-way."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from interrupt_kit import interrupt

torch = pytest.importorskip("torch")

from gpuarena import Arena  # noqa: E402
from gpuarena.errors import (  # noqa: E402
    ArenaError,
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    DeviceMismatchError,
    DTypeError,
    LayerOrderError,
    NotCopyableError,
    ShapeError,
    StaleRegionError,
)
from gpuarena.kv import KVSpec, LaneCache, LayerSpec, attend  # noqa: E402
from gpuarena.kv._ops import TorchOps  # noqa: E402
from gpuarena.kv.attention import causal_mask  # noqa: E402


def arena_of(backend: str = "torch") -> Arena:
    return Arena("1MiB", backend=backend, device="cpu") if backend == "torch" else Arena("1MiB")


def spec_of(layers: int = 2, heads: int = 2, value_dim: int = 4, **options: Any) -> KVSpec:
    return KVSpec([LayerSpec(heads, 4, value_dim, "float32", **options) for _ in range(layers)])


def lanes_of(layers: int = 1, *, lanes: int = 3, backend: str = "torch", **options: Any) -> LaneCache:
    return LaneCache(arena_of(backend), spec_of(layers, **options), lanes=lanes, max_tokens=16)


def ramp(first: int, n: int, rows: int = 1, heads: int = 2) -> Any:
    """Return keys ``[rows, heads, n, 4]`` that say of which token they are."""
    return torch.arange(first, first + n).float()[None, None, :, None].expand(rows, heads, n, 4).contiguous()


def noise(n: int, rows: int = 1, heads: int = 2, backend: str = "torch") -> Any:
    made = torch.randn(rows, heads, n, 4)
    return made if backend == "torch" else made.numpy()


def numbers(array: Any) -> Any:
    return np.array(array.tolist(), np.float32)


# -- memory of the cache itself as input -------------------------------------------------------------------------

BACKENDS = pytest.mark.parametrize("backend", ["torch", "host"])


@BACKENDS
@pytest.mark.parametrize("dim", [4, 3])  # of equal dims, keys and values share a region
@pytest.mark.parametrize("n", [1, 4])
def test_old_keys_and_values_can_be_appended_in_exchange(backend: str, dim: int, n: int) -> None:
    cache = lanes_of(backend=backend, value_dim=dim)
    keys, values = cache.append(0, noise(n, 2, backend=backend), noise(n, 2, backend=backend)[..., :dim])
    keys, values = keys[..., :dim], values
    before = numbers(keys), numbers(values)
    cache.truncate(0, 0)
    cache.truncate(1, 0)
    if dim == 4:
        keys, values = cache.append(0, values, keys)
        np.testing.assert_array_equal(numbers(keys), before[1])
        np.testing.assert_array_equal(numbers(values), before[0])
    else:
        _, values = cache.append(0, noise(n, 2, backend=backend), keys)
        np.testing.assert_array_equal(numbers(values), before[0])


@BACKENDS
@pytest.mark.parametrize("heads", [1, 2])
def test_old_tokens_can_be_appended_where_they_overlap_their_new_place(backend: str, heads: int) -> None:
    cache = lanes_of(heads=heads, backend=backend)
    keys, values = cache.append(0, noise(8, 1, heads, backend), noise(8, 1, heads, backend))
    wanted = numbers(keys)[:, :, 1:7], numbers(values)[:, :, 1:7]
    cache.truncate(0, 2)
    keys, values = cache.append(0, keys[:, :, 1:7], values[:, :, 1:7])
    np.testing.assert_array_equal(numbers(keys)[:, :, 2:], wanted[0])
    np.testing.assert_array_equal(numbers(values)[:, :, 2:], wanted[1])


@BACKENDS
@pytest.mark.parametrize("counts", [[2, 2], [3, 1], [1, 1]])
def test_lanes_can_be_appended_to_each_other_in_exchange(backend: str, counts: list[int]) -> None:
    cache = lanes_of(backend=backend)
    keys, values = cache.append(0, noise(3, 2, backend=backend), noise(3, 2, backend=backend))
    wanted = numbers(keys), numbers(values)
    cache.reset()
    cache.append(0, keys, values, lanes=[1, 0], n_tokens=counts)
    for row, (lane, count) in enumerate(zip([1, 0], counts, strict=True)):
        keys, values = cache.read(0, [lane])
        np.testing.assert_array_equal(numbers(keys)[0, :, :count], wanted[0][row, :, :count])
        np.testing.assert_array_equal(numbers(values)[0, :, :count], wanted[1][row, :, :count])


@BACKENDS
def test_tokens_in_the_scratch_can_be_appended(backend: str) -> None:
    cache = lanes_of(backend=backend)
    cache.append(0, noise(3, 3, backend=backend), noise(3, 3, backend=backend))
    keys, values = cache.read(0, [2, 0])
    wanted = numbers(keys), numbers(values)
    keys, values = cache.append(0, values, keys, lanes=[0, 1])
    np.testing.assert_array_equal(numbers(keys)[:, :, 3:], wanted[1])
    np.testing.assert_array_equal(numbers(values)[:, :, 3:], wanted[0])


def test_tokens_from_elsewhere_are_not_copied_first(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = lanes_of()
    monkeypatch.delattr(TorchOps, "apart")
    keys, _ = cache.append(0, ramp(0, 3), ramp(0, 3))
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2]


# -- scopes, steps and functions that are called -----------------------------------------------------------------


@pytest.mark.parametrize("make", [LaneCache.scope, LaneCache.step])
def test_what_was_not_entered_cannot_be_left(make: Callable[..., Any]) -> None:
    cache = lanes_of()
    cache.append(0, ramp(0, 2), ramp(0, 2))
    with pytest.raises(CheckpointError, match="never entered"):
        make(cache).__exit__(None, None, None)
    assert cache.lengths == (2, 0, 0)


def test_a_scope_that_was_left_takes_no_later_tokens() -> None:
    cache = lanes_of()
    with (scope := cache.scope()):
        pass
    cache.append(0, ramp(0, 2), ramp(0, 2))
    with pytest.raises(CheckpointError, match="left before"):
        scope.__exit__(None, None, None)
    assert cache.lengths == (2, 0, 0)


def test_a_step_that_is_over_takes_no_later_tokens() -> None:
    cache = lanes_of()
    with cache.step([0]) as step:
        cache.append(0, ramp(0, 1), ramp(0, 1))
    cache.append(0, ramp(1, 2), ramp(1, 2))
    step.__exit__(KeyError, KeyError(), None)
    assert cache.lengths == (3, 0, 0)


def test_a_step_that_could_not_be_entered_can_be_entered_again() -> None:
    cache = lanes_of()
    for at in itertools.count(1):
        step = cache.step([0])
        if not interrupt(lambda step: step.__enter__(), step, at):
            break
        assert cache.lengths == tuple(cache.length_vector.tolist()) == (0, 0, 0)
        with step:
            cache.append(0, ramp(0, 1), ramp(0, 1))
        assert cache.lengths == (1, 0, 0)
        cache.reset()
    assert at > 20


@pytest.mark.parametrize("make", [LaneCache.scope, LaneCache.step, LaneCache.checkpoint, lambda cache: cache])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_handle_can_be_copied(make: Callable[..., Any], duplicate: Callable[..., Any]) -> None:
    with pytest.raises(NotCopyableError):
        duplicate(make(lanes_of()))


CHANGES = {
    "append": lambda cache, mark: cache.append(0, ramp(0, 2), ramp(0, 2), lanes=[0]),
    "step": lambda cache, mark: cache.step([0]).__enter__(),
    "truncate": lambda cache, mark: cache.truncate(0, 1),
    "reset": lambda cache, mark: cache.reset(0),
    "keep": lambda cache, mark: cache.keep(1),
    "rollback": lambda cache, mark: cache.rollback(mark),
    "remove": lambda cache, mark: cache.remove(0, 0, 2),
    "copy": lambda cache, mark: cache.copy(1, 0),
    "move": lambda cache, mark: cache.move(0, 1),
    "shift": lambda cache, mark: cache.shift(0, 4, 5, 1, rotate=False),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("catches", [False, True])
def test_a_rotate_cannot_change_the_cache(change: str, at: int, catches: bool) -> None:
    cache = lanes_of(2)
    for layer in range(2):
        cache.append(layer, ramp(0, 5, 2), ramp(0, 5, 2), n_tokens=[5, 2])
    mark = cache.checkpoint()

    def rotate(layer: int, keys: Any, delta: int) -> None:
        keys += 100
        if layer == at:
            try:
                CHANGES[change](cache, mark)
            except ArenaError:
                if not catches:
                    raise

    if catches:
        cache.shift(0, 1, 5, 3, rotate=rotate)
    else:
        with pytest.raises(LayerOrderError, match="turning the keys") as caught:
            cache.shift(0, 1, 5, 3, rotate=rotate)
        assert caught.value.layer == at
    assert cache.lengths == tuple(cache.length_vector.tolist()) == (5, 2, 0)
    assert cache.positions(0).tolist() == ([0, 4, 5, 6, 7] if catches else [0, 1, 2, 3, 4])
    for layer in range(2):
        wanted = [0, 101, 102, 103, 104] if catches else [0, 1, 2, 3, 4]
        assert cache.read(layer)[0][0, 0, :, 0].tolist() == wanted
    cache.truncate(0, 1)  # the lock is gone
    assert cache.lengths == (1, 2, 0)


def test_a_rotate_that_gives_the_memory_away_changes_nothing_of_the_next() -> None:
    arena = arena_of()
    start = arena.checkpoint()
    cache = LaneCache(arena, spec_of(1), lanes=2, max_tokens=16)
    cache.append(0, ramp(0, 5), ramp(0, 5))
    taken = []

    def rotate(layer: int, keys: Any, delta: int) -> None:
        arena.rollback(start)
        taken.append(arena.alloc(1000, "float32", fill=0))

    with pytest.raises(StaleRegionError):
        cache.shift(0, 0, 5, 3, rotate=rotate)
    assert not taken[0].array.any()


# -- what is no lane, number or tensor ---------------------------------------------------------------------------


def on_meta(*shape: int) -> Any:
    return torch.empty(*shape, device="meta", dtype=torch.int64)


def nested(*shape: int) -> Any:
    return torch.nested.nested_tensor([torch.ones(shape)])


@pytest.mark.filterwarnings("ignore")  # nested and sparse tensors may change, says torch
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (ArgumentTypeError, lambda c: LaneCache(None, spec_of(), lanes=1, max_tokens=8)),
        (ArgumentTypeError, lambda c: LaneCache(arena_of(), None, lanes=1, max_tokens=8)),
        (ArgumentTypeError, lambda c: LaneCache.arena_nbytes(None, 1, 8)),
        (ArgumentError, lambda c: LaneCache(arena_of(), spec_of(), lanes=2**62, max_tokens=8)),
        (ArgumentError, lambda c: c.mask(2**62)),
        (ArgumentError, lambda c: c.mask(17)),
        (ArgumentError, lambda c: c.mask([1, 2**70])),
        (ArgumentTypeError, lambda c: c.mask(on_meta(1))),
        (ArgumentTypeError, lambda c: c.mask(lanes=on_meta(1))),
        (ArgumentTypeError, lambda c: c.read(0, on_meta(1))),
        (ArgumentTypeError, lambda c: c.read(0, torch.tensor(1))),
        (ArgumentTypeError, lambda c: c.read(0, torch.tensor([[1]]))),
        (ArgumentTypeError, lambda c: c.read(0, torch.tensor([1.0]))),
        (ArgumentTypeError, lambda c: c.read(0, torch.tensor([True]))),
        (ArgumentTypeError, lambda c: c.read(0, nested(1))),
        (ArgumentTypeError, lambda c: c.read(0, torch.tensor([1]).to_sparse())),
        (ArgumentError, lambda c: c.read(0, [2**70])),
        (ArgumentTypeError, lambda c: c.packed(0, on_meta(2))),
        (ArgumentTypeError, lambda c: c.cu_seqlens(on_meta(2))),
        (ArgumentTypeError, lambda c: c.step(on_meta(2))),
        (ArgumentTypeError, lambda c: c.step([0], on_meta(1))),
        (ArgumentTypeError, lambda c: c.step([0], torch.tensor(1.5))),
        (ArgumentTypeError, lambda c: c.append(0, noise(1), noise(1), lanes=on_meta(1))),
        (ArgumentTypeError, lambda c: c.append(0, noise(1), noise(1), n_tokens=on_meta(1))),
        (ArgumentTypeError, lambda c: c.append(0, noise(1).to_sparse(), noise(1))),
        (ArgumentTypeError, lambda c: c.append(0, noise(1), noise(1).to_mkldnn())),
        (ArgumentTypeError, lambda c: c.append(0, nested(2, 1, 4), nested(2, 1, 4))),
        (DeviceMismatchError, lambda c: c.append(0, noise(1).to("meta"), noise(1))),
        (ArgumentTypeError, lambda c: c.attend(0, noise(1).to_sparse())),
        (ArgumentTypeError, lambda c: c.attend(0, noise(1), scale="x")),
        (ArgumentTypeError, lambda c: c.attend(0, noise(1), lanes=on_meta(1))),
        (ArgumentTypeError, lambda c: c.truncate(on_meta(1), 0)),
        (ArgumentTypeError, lambda c: c.truncate(0, np.array([0, 1]))),
        (ArgumentTypeError, lambda c: c.reset(torch.tensor([0, 1]))),
        (ArgumentError, lambda c: c.truncate(0, 2**70)),
        (ArgumentError, lambda c: c.shift(0, 0, 2**70, 1, rotate=False)),
        (ArgumentError, lambda c: c.shift(0, 0, None, 2**70, rotate=False)),
    ],
)
def test_bad_input_raises_a_typed_error(kind: type[Exception], call: Callable[..., Any]) -> None:
    cache = lanes_of()
    cache.append(0, ramp(0, 3), ramp(0, 3))
    with pytest.raises(kind) as caught:
        call(cache)
    assert isinstance(caught.value, ArenaError)
    assert (cache.lengths, cache.read(0)[0][0, 0, :, 0].tolist()) == ((3, 0, 0), [0, 1, 2])


@BACKENDS
@pytest.mark.parametrize("window", [5, 16, 2**62])
@pytest.mark.parametrize("sinks", [0, 1, 2**62])
def test_a_window_as_wide_as_the_lane_is_none(backend: str, window: int, sinks: int) -> None:
    cache = lanes_of(backend=backend, window=window, sinks=sinks)
    cache.append(0, noise(5, 2, backend=backend), noise(5, 2, backend=backend), n_tokens=[5, 2])
    np.testing.assert_array_equal(numbers(cache.mask(3, layer=0)), numbers(cache.mask(3)))
    if backend == "torch":
        q, (keys, values) = noise(1), cache.read(0, [0])
        torch.testing.assert_close(cache.attend(0, q), attend(q, keys, values))


def test_all_tokens_may_be_sinks() -> None:
    cache = lanes_of(window=1, sinks=2**62)
    cache.append(0, ramp(0, 4), ramp(0, 4))
    assert cache.mask(2, [0], layer=0)[0, 0].tolist() == [[True, True, True, False], [True] * 4]


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_lanes_of_no_floats_are_not_attended_to(dtype: str) -> None:
    cache = LaneCache(arena_of(), KVSpec([LayerSpec(2, 4, 4, dtype)]), lanes=1, max_tokens=8)
    new = torch.zeros(1, 2, 1, 4).to(getattr(torch, dtype))
    cache.append(0, new, new)
    with pytest.raises(DTypeError, match="attention takes"):
        cache.attend(0, new)


# -- attention ---------------------------------------------------------------------------------------------------

Q, KV = torch.ones(2, 6, 2, 8), torch.ones(2, 2, 5, 8)
MASK = torch.ones(2, 1, 2, 5, dtype=torch.bool)


def cast(dtype: Any) -> Any:
    return attend(Q.to(dtype), KV.to(dtype), KV.to(dtype))


@pytest.mark.filterwarnings("ignore")  # nested and sparse tensors may change, says torch
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (ArgumentTypeError, lambda: attend(Q, KV, KV, scale="x")),  # type: ignore[arg-type]
        (ArgumentTypeError, lambda: attend(Q, KV, KV, scale=True)),
        (ArgumentTypeError, lambda: attend(Q, KV, KV, scale=1j)),  # type: ignore[arg-type]
        (ArgumentError, lambda: attend(Q, KV, KV, scale=10**400)),
        (ArgumentTypeError, lambda: attend(Q, KV, KV, lengths=5)),  # type: ignore[arg-type]
        (ArgumentTypeError, lambda: attend(Q, KV, KV, lengths="55")),  # type: ignore[arg-type]
        (ArgumentTypeError, lambda: attend(Q, KV, KV, lengths=[5.0, 5.0])),  # type: ignore[list-item]
        (ArgumentTypeError, lambda: attend(Q, KV, KV, lengths=np.array(5))),  # type: ignore[arg-type]
        (ArgumentTypeError, lambda: attend(Q, KV, KV, lengths=torch.tensor([5j, 5j]))),
        (ArgumentTypeError, lambda: attend(Q, KV, KV, lengths=torch.tensor([5, 5]).to_sparse())),
        (DeviceMismatchError, lambda: attend(Q, KV, KV, lengths=on_meta(2))),
        (ShapeError, lambda: attend(Q, KV, KV, lengths=[2**70, 5])),
        (ShapeError, lambda: attend(Q, KV, KV, lengths=[1, 5])),
        (ShapeError, lambda: attend(Q, KV, KV, lengths=torch.tensor([5, 6]))),
        (ShapeError, lambda: attend(Q, KV, KV, lengths=torch.tensor(5))),
        (ShapeError, lambda: attend(Q, KV, KV, lengths=torch.tensor([[5], [5]]))),
        (ShapeError, lambda: attend(Q, KV, KV, lengths=[])),
        (ArgumentError, lambda: attend(Q, KV, KV, window=-(2**70))),
        (DeviceMismatchError, lambda: attend(Q.to("meta"), KV, KV)),
        (DeviceMismatchError, lambda: attend(Q, KV.to("meta"), KV)),
        (DeviceMismatchError, lambda: attend(Q, KV, KV.to("meta"))),
        (DeviceMismatchError, lambda: attend(Q, KV, KV, mask=MASK.to("meta"))),
        (ArgumentTypeError, lambda: attend(Q, KV, KV, mask=MASK.to_sparse())),
        (ArgumentTypeError, lambda: attend(Q.to_sparse(), KV, KV)),
        (ArgumentTypeError, lambda: attend(Q, KV.to_mkldnn(), KV)),
        (ArgumentTypeError, lambda: attend(Q, KV, nested(2, 5, 8))),
        (DTypeError, lambda: cast(torch.int32)),
        (DTypeError, lambda: cast(torch.bool)),
        (DTypeError, lambda: cast(torch.complex64)),
        (DTypeError, lambda: cast(torch.float8_e4m3fn)),
    ],
)
def test_bad_input_to_attend_raises_a_typed_error(kind: type[Exception], call: Callable[..., Any]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, ArenaError)


@pytest.mark.parametrize("lengths", [None, [4, 5]])
@pytest.mark.parametrize("window", [5, 2**63 - 1, 2**63, 2**70])
def test_a_window_as_wide_as_the_tokens_is_none(window: int, lengths: Any) -> None:
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    wanted = attend(q, k, v, lengths=lengths)
    for sinks in (0, 1, 2**70):
        torch.testing.assert_close(attend(q, k, v, window=window, sinks=sinks, lengths=lengths), wanted)
    torch.testing.assert_close(attend(q, k, v, window=1, sinks=2**70, lengths=lengths), wanted)


@pytest.mark.parametrize("n", [1, 2])
def test_a_window_of_one_token_less_hides_the_first(n: int) -> None:
    q, k = torch.randn(2, 4, n, 8), torch.randn(2, 2, 5, 8)
    seen = torch.ones(1, 1, n, 5, dtype=torch.bool)
    seen[..., -1, 0] = False
    torch.testing.assert_close(attend(q, k, k, window=4), attend(q, k, k, mask=seen))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_mask_takes_any_window(dtype: Any) -> None:
    queries, keys = torch.tensor([[3]], dtype=dtype), torch.arange(5, dtype=dtype)[None]
    for window in (4, 2**40, 2**62 - 1, 2**62, 2**70):
        assert causal_mask(queries, keys, window)[0, 0, 0].tolist() == [True] * 4 + [False]
    assert causal_mask(queries, keys, 1, 2**70)[0, 0, 0].tolist() == [True] * 4 + [False]


@pytest.mark.parametrize("scale", [2, np.float32(2), np.float64(2), np.int64(2)])
def test_a_scale_may_be_any_real_number(scale: Any) -> None:
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    torch.testing.assert_close(attend(q, k, k, scale=scale), attend(q, k, k, scale=2.0))


# -- interrupts --------------------------------------------------------------------------------------------------


def some_lanes() -> LaneCache:
    cache = lanes_of(2)
    for layer in range(2):
        cache.append(layer, ramp(0, 5, 3), ramp(0, 5, 3), n_tokens=[5, 2, 0])
    return cache


def shown(cache: LaneCache) -> Any:
    """Return all that can be seen of a cache."""
    if (step := cache._table.step) is not None and len(step.written) < 2:
        pytest.fail("a step is under way that lacks a layer")
    tables = [cache.lengths, tuple(cache.length_vector.tolist())]
    positions = [cache.positions(lane).tolist() for lane in range(3)]
    return tables, positions, [[side.tolist() for side in cache.read(layer, range(3))] for layer in range(2)]


def one_step(cache: LaneCache) -> None:
    with cache.step(lanes=[0, 1]):
        for layer in range(2):
            cache.append(layer, ramp(9, 1, 2), ramp(9, 1, 2))


def failing_step(cache: LaneCache) -> None:
    try:
        with cache.step(lanes=[0, 1]):
            cache.append(0, ramp(9, 1, 2), ramp(9, 1, 2))
            raise KeyError
    except KeyError:
        pass


def turn(cache: LaneCache) -> None:
    cache.shift(0, 1, None, 3, rotate=lambda layer, keys, delta: keys.add_(delta))


def back(cache: LaneCache) -> None:
    mark = cache.checkpoint()
    for layer in range(2):
        cache.append(layer, ramp(9, 1, 2), ramp(9, 1, 2))
    cache.rollback(mark)


@pytest.mark.parametrize(
    ("call", "between"),
    [
        pytest.param(one_step, None, id="step"),
        pytest.param(lambda c: c.truncate(0, 2), None, id="truncate"),
        pytest.param(lambda c: c.reset(), None, id="reset"),
        pytest.param(lambda c: c.reset(0), None, id="reset one"),
        pytest.param(lambda c: c.keep(1), None, id="keep"),
        pytest.param(turn, None, id="shift"),
        pytest.param(lambda c: c.remove(0, 1, 3), lambda c: c.truncate(0, 1), id="remove"),
        pytest.param(lambda c: c.copy(0, 1), lambda c: c.reset(1), id="copy"),
        pytest.param(lambda c: c.move(0, 1), lambda c: c.reset(1), id="move"),
    ],
)
def test_an_interrupt_anywhere_leaves_the_cache_before_or_behind_the_call(
    call: Callable[[Any], Any], between: Callable[[Any], Any] | None
) -> None:
    fine = []
    for change in (lambda cache: None, call, *([between] if between else [])):
        change(cache := some_lanes())
        fine.append(shown(cache))
    found = []
    for at in itertools.count(1):
        cache = some_lanes()
        where = interrupt(call, cache, at)
        if not where:
            break
        if shown(cache) not in fine:
            found.append(where)
        cache.abandon()  # and goes on working
        cache.reset()
        for layer in range(2):
            keys, _ = cache.append(layer, ramp(3, 2, 2), ramp(3, 2, 2), n_tokens=[2, 1])
            assert keys[:, 0, :, 0].tolist() == [[3, 4], [3, 0]]
        assert cache.length_vector.tolist() == [2, 1, 0]
    assert at > 5
    assert found == []


def test_an_interrupt_of_tokens_out_of_a_block_can_be_abandoned() -> None:
    before = shown(some_lanes())
    for at in itertools.count(1):
        cache = some_lanes()
        if not interrupt(lambda c: c.append(0, ramp(9, 1, 2), ramp(9, 1, 2)), cache, at):
            break
        cache.abandon()
        assert shown(cache) == before
    assert at > 5


@pytest.mark.parametrize("call", [failing_step, back])
def test_an_interrupt_of_what_is_taken_back_leaves_tokens_that_are_whole(call: Callable[[Any], Any]) -> None:
    for at in itertools.count(1):
        cache = some_lanes()
        if not interrupt(call, cache, at):
            break
        cache.abandon()
        for lane, length in enumerate((5, 2)):
            assert cache.lengths[lane] in (length, length + (call is back))
            assert cache.positions(lane).tolist() == list(range(cache.lengths[lane]))
            for layer in range(2):
                tokens = cache.read(layer, [lane])[0][0, 0, :, 0].tolist()
                assert tokens == [*range(length), 9][: cache.lengths[lane]]
        assert tuple(cache.length_vector.tolist()) == cache.lengths
    assert at > 5
