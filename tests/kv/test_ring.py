from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

torch = pytest.importorskip("torch")

from gpuarena import Arena, errors  # noqa: E402
from gpuarena.backends import mirrored  # noqa: E402
from gpuarena.backends._vmm_host import SharedHostVmm  # noqa: E402
from gpuarena.kv import KVCache, KVSpec, LayerSpec, group  # noqa: E402
from gpuarena.kv.ring import RingLayer, ring_layout  # noqa: E402
from gpuarena.kv.window import WindowLayer  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent.parent / "backends"))
from vmm_doubles import CheckedVmm  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

G = 64 << 10  # the granule of the host
W, SLACK, N = 5, 3, 8  # window, slack, and slots: a slot of 8 KiB makes them just one granule
HEADS, DIM = 2, 512
SPEC = LayerSpec(HEADS, DIM, DIM, "float32", window=W, slack=SLACK)
MANY = 1000


@pytest.fixture(params=["host", "torch"])
def library(request):
    return request.param


@pytest.fixture(autouse=True)
def _all_layers_are_rings(monkeypatch):
    monkeypatch.setattr(group, "layer_kind", lambda spec: RingLayer)


def native(array, library):
    return torch.from_numpy(np.ascontiguousarray(array)) if library == "torch" else array


def host(array):
    return array.numpy() if isinstance(array, torch.Tensor) else array


def address(array):
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data


def byte_strides(array):
    if isinstance(array, torch.Tensor):
        return tuple(stride * array.element_size() for stride in array.stride())
    return array.strides


class Cache:
    """One ring in a group, and beside it a list of all that it was given: one ``[rows, heads, dim]`` a token."""

    def __init__(self, library="host", spec=SPEC, *, batch=1, max_tokens=MANY, arena=None):
        self.library = library
        self.arena = arena or Arena("8MiB", backend=library)
        self.group = group.LayerGroup(batch=batch, max_tokens=max_tokens)
        self.layer = self.group.add(self.arena, spec)
        self.spec = spec
        self.tokens: list[tuple[np.ndarray, np.ndarray]] = []
        self.rng = np.random.default_rng(0)

    def fresh(self, n, rows=1):
        """``n`` new tokens, each of its own content."""
        shapes = ((rows, self.spec.kv_heads, dim) for dim in (self.spec.key_dim, self.spec.value_dim))
        dims = list(shapes)
        return [tuple(self.rng.random(shape, np.float32) for shape in dims) for _ in range(n)]

    def arrays(self, tokens, rows=1):
        both = []
        for which, dim in enumerate((self.spec.key_dim, self.spec.value_dim)):
            stacked = np.zeros((rows, self.spec.kv_heads, len(tokens), dim), np.float32)
            for at, token in enumerate(tokens):
                stacked[:, :, at] = token[which]
            both.append(native(stacked, self.library))
        return both

    def append(self, n, rows=1):
        new = self.fresh(n, rows)
        shown = self.layer.append(*self.arrays(new, rows))
        self.tokens += new
        return shown

    def assert_shows(self, shown, start, stop):
        """What is shown are the tokens from start to stop, as the list has them."""
        for which, array in enumerate(shown):
            expected = [token[which] for token in self.tokens[start:stop]]
            assert array.shape[2] == len(expected)
            for at, token in enumerate(expected):
                np.testing.assert_array_equal(host(array)[:, :, at], token)


# -- how large it is ----------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(1, 3000), st.sampled_from([256, 1024, 4096]))
@settings(max_examples=50)
def test_a_ring_is_the_smallest_of_whole_granules(need, slot_nbytes, granule):
    slots, nbytes = ring_layout(need, slot_nbytes, granule)
    assert slots >= need
    assert nbytes >= slot_nbytes
    assert nbytes % 16 == 0
    assert slots * nbytes % granule == 0
    least = -(-slot_nbytes // 16) * 16
    for other in range(least, least + granule, 16):  # every length of a slot, and slots one after the other
        n = next(n for n in range(need, need + granule) if n * other % granule == 0)
        assert slots * nbytes <= n * other


@pytest.mark.parametrize(
    ("heads", "dim", "window", "slack", "slots"),
    [
        (8, 128, 4096, 512, 4608),  # Mistral 7B: 4 KiB a token, 18 MiB
        (1, 256, 512, 512, 2048),  # Gemma 3 1B: 1 KiB a token, 2 MiB for 1
        (8, 64, 128, 896, 1024),  # gpt-oss: 2 KiB a token, 2 MiB
    ],
)
def test_rounding_up_for_models_on_a_cuda_device(heads, dim, window, slack, slots):
    assert ring_layout(window + slack, heads * dim * 2 * 2, 2 << 20) == (slots, heads * dim * 4)


def test_slots_are_rounded_up_to_the_granule(library):
    cache = Cache(library)
    assert (cache.layer.n_kept, cache.layer.n_slots, cache.layer.slot_nbytes) == (N, N, G // N)
    assert cache.layer.reserved_nbytes == G
    wider = Cache(library, LayerSpec(HEADS, DIM, DIM, "float32", window=W, slack=SLACK + 1))
    assert (wider.layer.n_kept, wider.layer.n_slots) == (N + 1, 2 * N)
    few = Cache(library, max_tokens=3)
    assert (few.layer.n_kept, few.layer.n_slots) == (3, N)
    assert cache.arena.stats.used == 0, "the memory is beside the arena"


# -- appending ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", range(1, SLACK + 2))
@pytest.mark.parametrize("first", [0, 1, W - 2, W - 1, W, W + 1, N - 1, N, N + 1, 2 * N, 5 * N + 3])
def test_every_view_is_one_ascending_piece_of_the_right_tokens(library, chunk, first):
    cache = Cache(library)
    if first:
        shown = cache.append(first)
        cache.assert_shows(shown, 0, first)
    base, slot = cache.layer._base, G // N
    while len(cache.tokens) < first + 3 * N:
        start = len(cache.tokens)
        stop = start + chunk
        if stop - max(0, start - W + 1) > N:
            break
        shown = cache.append(chunk)
        low = max(0, start - W + 1)
        cache.assert_shows(shown, low, stop)
        for array, offset in zip(shown, (0, slot // 2), strict=True):
            assert byte_strides(array) == (HEADS * DIM * 4, DIM * 4, slot, 4)
            assert address(array) == base + offset + low % N * slot
        assert cache.layer.length == stop
        assert cache.group.high_water == stop
    assert len(cache.tokens) > first


@pytest.mark.parametrize(
    "n_tokens", [W - 1, W, W + 1, 2 * W, N - 1, N, N + 1, 2 * N - 1, 2 * N, 2 * N + 1, 10 * N]
)
def test_a_chunk_is_as_good_as_its_tokens_one_by_one(library, n_tokens):  # mlx-lm#1914
    whole, single = Cache(library), Cache(library)
    new = whole.fresh(n_tokens)
    shown = whole.layer.append(*whole.arrays(new))
    for token in new:
        single.layer.append(*single.arrays([token]))
    whole.tokens, single.tokens = list(new), list(new)
    whole.assert_shows(shown, 0, n_tokens)
    held = max(0, n_tokens - N)
    for cache in (whole, single):
        assert (cache.layer.held_from, cache.layer.n_held) == (held, n_tokens - held)
        cache.assert_shows((cache.layer.keys, cache.layer.values), held, n_tokens)
        more = cache.append(1)
        cache.assert_shows(more, max(0, n_tokens - W + 1), n_tokens + 1)


def test_every_token_is_written_once_and_never_moved(library, monkeypatch):
    cache = Cache(library)
    ops, written = cache.layer._ops, []
    whole = type(ops).write

    def write(self, k, v, start, keys, values):
        written.append((start, keys.shape[2]))
        whole(self, k, v, start, keys, values)

    monkeypatch.setattr(type(ops), "write", write)
    monkeypatch.setattr(type(ops), "move", None)
    places = {}
    for chunk in (1, 4, 2, 3, 1, 1, 4, 4, 4, 1, 3):
        low = max(0, len(cache.tokens) - W + 1)
        keys, _ = cache.append(chunk)
        for at in range(keys.shape[2]):
            place = (address(keys[:, :, at:]) - cache.layer._base) % G
            assert places.setdefault(low + at, place) == place
    assert sum(n for _, n in written) == len(cache.tokens) == 28
    assert written[:4] == [(0, 1), (1, 4), (5, 2), (7, 3)]


@pytest.mark.parametrize("excess", [1, 2])
@pytest.mark.parametrize("start", [1, W - 2, W - 1, W, W + 1, N - 1, N, 2 * N + 1])
def test_too_many_at_once_are_refused_and_nothing_changes(library, start, excess):
    cache = Cache(library)
    cache.append(start)
    low = max(0, start - W + 1)
    room = N - (start - low)
    assert room >= SLACK + 1
    n_new = room + excess
    new = cache.fresh(n_new)
    with pytest.raises(errors.CapacityError, match=f"layer 0: {n_new} tokens at once .*{room} do") as caught:
        cache.layer.append(*cache.arrays(new))
    error = caught.value
    assert (error.requested, error.available, error.missing, error.capacity) == (n_new, room, excess, N)
    assert cache.layer.length == start
    cache.assert_shows((cache.layer.keys, cache.layer.values), max(0, start - N), start)
    shown = cache.append(room)
    cache.assert_shows(shown, low, start + room)


def test_a_full_cache_is_told(library):
    cache = Cache(library, max_tokens=2 * N)
    cache.append(N)
    cache.append(SLACK + 1)
    with pytest.raises(
        errors.CapacityError, match="the cache is full: 12 of 16 tokens used, 5 more asked, 1 too many"
    ):
        cache.append(5)
    cache.assert_shows(cache.append(4), 12 - W + 1, 16)
    with pytest.raises(errors.CapacityError, match="full"):
        cache.append(1)
    with pytest.raises(errors.CapacityError, match="full"):
        Cache(library, max_tokens=N).append(N + 1)


def test_no_tokens_at_all_show_the_window_before(library):
    cache = Cache(library)
    assert [array.shape for array in cache.append(0)] == [(1, HEADS, 0, DIM)] * 2
    cache.append(2 * N + 1)
    cache.assert_shows(cache.append(0), 2 * N + 1 - W + 1, 2 * N + 1)


@pytest.mark.parametrize("length", [5, 6, 7, 8, 13])
@pytest.mark.parametrize("n", range(1, SLACK + 2))
def test_what_is_in_the_ring_can_be_appended_again(library, length, n):
    for first in range(max(0, length - N), length - n + 1):
        cache = Cache(library)
        cache.append(length)
        at = slice(first - cache.layer.held_from, first - cache.layer.held_from + n)
        again = (cache.layer.keys[:, :, at], cache.layer.values[:, :, at])
        cache.tokens += cache.tokens[first : first + n]
        cache.assert_shows(cache.layer.append(*again), max(0, length - W + 1), length + n)


def test_a_prompt_out_of_the_ring_itself_comes_back_as_it_was(library):
    cache = Cache(library, LayerSpec(HEADS, DIM, DIM, "float32", window=1, slack=2))
    for _ in range(5):
        cache.append(2)
    shown = cache.layer._views(4, 10)  # over the border, and more than the layer promises to hold
    cache.group.reset()
    del cache.tokens[:4]
    cache.assert_shows(cache.layer.append(*shown), 0, 6)
    cache.assert_shows((cache.layer.keys, cache.layer.values), 3, 6)


# -- cutting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [W - 1, W, N - 1, N, N + 1, 2 * N, 3 * N + 2])
def test_a_cut_is_exact_as_long_as_the_window_is_held(library, n_tokens):
    held = max(0, n_tokens - N)
    for keep in range(n_tokens + 1):
        cache = Cache(library)
        cache.append(n_tokens)
        if keep in (0, n_tokens) or held == 0 or keep - W + 1 >= held:
            cache.layer.truncate(keep)
            del cache.tokens[keep:]
            for chunk in (1, SLACK + 1, 2, SLACK + 1, SLACK + 1):
                start = len(cache.tokens)
                cache.assert_shows(cache.append(chunk), max(0, start - W + 1), start + chunk)
        else:
            with pytest.raises(errors.ArgumentError, match=f"enough for lengths of {held + W - 1} or more"):
                cache.layer.truncate(keep)
            assert cache.layer.length == n_tokens
            cache.assert_shows((cache.layer.keys, cache.layer.values), held, n_tokens)


def test_a_rollback_past_what_is_held_raises_and_changes_nothing(library):
    cache = Cache(library)
    cache.append(W)
    early = cache.group.checkpoint()
    cache.append(SLACK)
    late = cache.group.checkpoint()
    cache.append(SLACK)
    with pytest.raises(errors.CheckpointError, match=f"rollback to {W} tokens: .*holds tokens 3 to 10"):
        cache.group.rollback(early)
    assert cache.layer.length == 11
    cache.group.rollback(late)
    del cache.tokens[W + SLACK :]
    assert (cache.layer.length, cache.layer.held_from, cache.layer.n_held) == (8, 3, 5)
    cache.assert_shows(cache.layer.read(), 3, 8)
    with pytest.raises(errors.CheckpointError):
        cache.group.rollback(early)  # the tokens that were cut off have overwritten the first
    cache.group.reset()
    cache.tokens = []
    assert (cache.layer.length, cache.layer.held_from) == (0, 0)
    cache.assert_shows(cache.append(N), 0, N)


def test_tokens_that_were_cut_off_do_not_come_back_when_others_follow(library):
    cache = Cache(library)
    cache.append(N)
    cache.append(SLACK)  # overwrites tokens 0 to 2
    cache.group.truncate(W + 2)
    del cache.tokens[W + 2 :]
    cache.append(1)
    assert cache.layer.held_from == SLACK
    cache.assert_shows((cache.layer.keys, cache.layer.values), SLACK, W + 3)
    with pytest.raises(errors.ArgumentError):
        cache.group.truncate(W + 1)


def test_the_last_tokens_are_read_with_their_windows(library):
    cache = Cache(library)
    cache.append(2 * N)
    for n in range(SLACK + 2):
        cache.assert_shows(cache.layer.read(n), 2 * N - n - W + 1, 2 * N)
    with pytest.raises(errors.ArgumentError, match=f"last {SLACK + 1} tokens only"):
        cache.layer.read(SLACK + 2)
    assert np.asarray(cache.layer.mask(3)).astype(int).tolist() == [
        [1, 1, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 1, 1],
    ]
    assert cache.layer.positions == [range(0), range(N, 2 * N)]


def test_it_takes_over_runs_that_another_layer_held(library):
    cache = Cache(library)
    source = Cache(library)
    source.append(N + 2)
    source.group.truncate(N + 1)
    del source.tokens[N + 1 :]
    cache.group._common.rows = 1
    cache.layer._hold(source.layer.positions)
    for (name, mine), (other, theirs) in zip(cache.layer.filled(), source.layer.filled(), strict=True):
        assert name == other
        mine[...] = theirs
    cache.tokens = source.tokens
    assert (cache.layer.length, cache.layer.held_from) == (N + 1, 2)
    cache.assert_shows((cache.layer.keys, cache.layer.values), 2, N + 1)
    cache.assert_shows(cache.append(2), N + 1 - W + 1, N + 3)
    early = Cache(library)
    early.group._common.rows = 1
    early.layer._hold([range(3)])
    assert (early.layer.length, early.layer.held_from) == (3, 0)


@pytest.mark.parametrize(
    "kinds", [(RingLayer, RingLayer), (RingLayer, WindowLayer), (WindowLayer, RingLayer)]
)
def test_a_file_holds_it_as_it_holds_a_window(library, kinds, monkeypatch, tmp_path):
    spec = KVSpec([SPEC, LayerSpec(HEADS, DIM, 3, "float32", window=4, slack=2)])
    path = tmp_path / "cache.safetensors"
    x = np.random.default_rng(0).random((1, HEADS, 40, DIM), np.float32)

    def append(cache, at):
        arrays = [native(x[:, :, at : at + 1], library) for _ in range(3)]
        return [*cache.append(0, *arrays[:2]), *cache.append(1, arrays[2], arrays[2][..., :3])]

    monkeypatch.setattr(group, "layer_kind", lambda spec: kinds[0])
    cache = KVCache(Arena("8MiB", backend=library), spec, batch=1, max_tokens=40)
    for at in range(2 * N + 3):
        append(cache, at)
    cache.save(path)
    monkeypatch.setattr(group, "layer_kind", lambda spec: kinds[1])
    loaded = KVCache.load(path, Arena("8MiB", backend=library))
    assert [type(layer) for layer in loaded.layers] == [kinds[1]] * 2
    for mine, theirs in zip(cache.layers, loaded.layers, strict=True):
        assert mine.positions == theirs.positions
        np.testing.assert_array_equal(host(mine.keys), host(theirs.keys))
        np.testing.assert_array_equal(host(mine.values), host(theirs.values))
    for at in range(2 * N + 3, 40):
        for mine, theirs in zip(append(cache, at), append(loaded, at), strict=True):
            np.testing.assert_array_equal(host(mine), host(theirs))


# -- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [3, N, N + 3, 2 * N + 5])
def test_rows_change_places_across_the_border(library, n_tokens):
    spec = LayerSpec(1, 96, 64, "float32", window=30, slack=34)
    cache = Cache(library, spec, batch=3)
    slots = cache.layer.n_slots
    length = n_tokens * slots // N
    for start in range(0, length, 16):
        cache.append(min(16, length - start), rows=3)
    held = cache.layer.held_from
    for rows in ([2, 0, 1], [1, 1, 0], [0, 1, 2]):
        cache.group.reorder(rows)
        cache.tokens = [(k[rows], v[rows]) for k, v in cache.tokens]
        cache.assert_shows((cache.layer.keys, cache.layer.values), held, length)
    cache.group.select([1])
    cache.tokens = [(k[[1]], v[[1]]) for k, v in cache.tokens]
    cache.assert_shows(cache.append(2), max(0, length - 29), length + 2)
    cache.group.repeat(3)
    cache.tokens = [(k[[0, 0, 0]], v[[0, 0, 0]]) for k, v in cache.tokens]
    cache.append(1, rows=3)
    cache.group.reorder([1, 0, 2])  # only what the rows do not share moves
    k, v = cache.tokens[-1]
    cache.tokens[-1] = (k[[1, 0, 2]], v[[1, 0, 2]])
    cache.assert_shows((cache.layer.keys, cache.layer.values), cache.layer.held_from, length + 3)


def test_fewer_rows_than_there_could_be(library):
    spec = LayerSpec(1, 512, 512, "float32", window=3, slack=1)
    cache = Cache(library, spec, batch=4)
    for _ in range(9):
        cache.append(1, rows=2)
    cache.assert_shows((cache.layer.keys, cache.layer.values), 5, 9)
    assert cache.layer.keys.shape == (2, 1, 4, 512)
    with pytest.raises(errors.ShapeError, match="3 rows given"):
        cache.append(1, rows=3)
    cache.group.reset()
    cache.tokens = []
    assert cache.layer.keys.shape == (4, 1, 0, 512)
    cache.assert_shows(cache.append(4, rows=4), 0, 4)


# -- kinds of layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "dtype", "value_dtype"),
    [
        (96, 32, "float32", "float32"),
        (3, 5, "float16", "float64"),
        (7, 1, "uint8", "float32"),
        (64, 0, "float32", None),
    ],
)
def test_keys_and_values_of_different_kinds(library, key_dim, value_dim, dtype, value_dtype):
    spec = LayerSpec(2, key_dim, value_dim, dtype, window=4, slack=2, value_dtype=value_dtype)
    cache = Cache(library, spec, max_tokens=10_000)
    n_slots = cache.layer.n_slots
    assert cache.layer.slot_nbytes % 16 == 0
    rng = np.random.default_rng(1)
    length = 2 * n_slots + 7
    k = rng.integers(0, 100, (1, 2, length, key_dim)).astype(dtype)
    v = rng.integers(0, 100, (1, 2, length, value_dim)).astype(value_dtype or dtype)
    start = n_slots - 10
    cache.layer.append(*(native(array[:, :, :start], library) for array in (k, v)))
    for at in range(start, n_slots + 20, 3):
        shown = cache.layer.append(*(native(array[:, :, at : at + 3], library) for array in (k, v)))
        for found, whole in zip(shown, (k, v), strict=True):
            assert host(found).dtype == whole.dtype
            np.testing.assert_array_equal(host(found), whole[:, :, at - 3 : at + 3])


def test_bfloat16():
    cache = Cache("torch", LayerSpec(1, 64, 64, "bfloat16", window=4, slack=2))
    x = torch.randn(1, 1, 900, 64).bfloat16()
    cache.layer.append(x[:, :, :500], x[:, :, :500])
    for at in range(500, 900):
        keys, values = cache.layer.append(x[:, :, at : at + 1], -x[:, :, at : at + 1])
    assert torch.equal(keys, x[:, :, -4:])
    assert torch.equal(values, -x[:, :, -4:])


def test_attention_over_the_ring_is_attention_over_the_window():
    cache = Cache("torch")
    x = torch.randn(3, 1, HEADS, 40, DIM)
    q, k, v = x
    distance = torch.arange(40)[:, None] - torch.arange(40)[None]
    band = (distance >= 0) & (distance < W)
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=band)
    at = 0
    for n in (1, 4, 3, 4, 1, 1, 4, 2, 4, 4, 4, 4, 4):
        keys, values = cache.layer.append(k[:, :, at : at + n], v[:, :, at : at + n])
        mask = cache.layer.mask(n)
        part = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, at : at + n], keys, values, attn_mask=mask
        )
        torch.testing.assert_close(part, whole[:, :, at : at + n])
        at += n
    assert at == 40


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 4}, {"window": 4, "slack": 2, "sinks": 1}, {"window": 4, "storage": "int8"}],
)
def test_layers_that_are_no_ring_are_refused(library, options):
    arena = Arena("1MiB", backend=library)
    with pytest.raises(errors.ArgumentError, match="a ring holds a window with slack"):
        Cache(library, LayerSpec(2, 32, 32, "float32", **options), arena=arena)
    assert arena.stats.n_regions == 0


# -- lifetime -----------------------------------------------------------------------------------------------------


@pytest.fixture
def driver(monkeypatch):
    checked = CheckedVmm(G, host=SharedHostVmm())
    monkeypatch.setattr(mirrored, "SharedHostVmm", lambda: checked)
    return checked


def test_the_memory_goes_with_the_layer_and_the_last_view(library, driver):
    cache = Cache(library)
    shown = cache.append(N)
    assert driver.used == G
    tokens = cache.tokens
    del cache
    gc.collect()
    assert driver.used == G
    assert float(shown[0].sum()) == pytest.approx(float(sum(k.sum() for k, _ in tokens)), rel=1e-4)
    del shown
    gc.collect()
    assert driver.is_empty()


def test_no_cycle_keeps_the_memory(library, driver):
    gc.collect()
    gc.disable()
    try:
        cache = Cache(library)
        cache.append(N)
        del cache
        assert driver.is_empty()
    finally:
        gc.enable()


@pytest.mark.parametrize("at", range(2, 11))  # the first asks for the granule, which no driver refuses
def test_a_ring_that_cannot_be_made_leaves_nothing(library, driver, at):
    arena = Arena("1MiB", backend=library)
    driver.fail(at=at, out_of_memory=at % 2 == 0)
    with pytest.raises(errors.OutOfMemoryError if at % 2 == 0 else errors.BackendError, match="on demand"):
        Cache(library, arena=arena)
    assert driver.is_empty()
    assert (arena.stats.n_regions, arena.stats.top) == (0, 0)


@pytest.mark.parametrize("how", ["rollback", "close"])
def test_a_ring_ends_with_its_arena(library, how):
    arena = Arena("8MiB", backend=library)
    before = arena.checkpoint()
    cache = Cache(library, arena=arena)
    cache.append(2)
    if how == "rollback":
        arena.rollback(before)
    else:
        arena.close()
    for use in (
        lambda: cache.append(1),
        lambda: cache.layer.keys,
        lambda: cache.layer.values,
        cache.layer.read,
    ):
        with pytest.raises(errors.StaleRegionError):
            use()
    assert cache.layer.length == 2


def test_a_forked_child_cannot_use_it():
    code = """
import os
import numpy as np
from gpuarena import Arena, errors
from gpuarena.kv import LayerSpec, group
from gpuarena.kv.ring import RingLayer
group.layer_kind = lambda spec: RingLayer
caches = group.LayerGroup(batch=1, max_tokens=100)
layer = caches.add(Arena("1MiB"), LayerSpec(2, 64, 64, "float32", window=4, slack=4))
k = np.ones((1, 2, 3, 64), np.float32)
layer.append(k, k)
child = os.fork()
if not child:
    for use in (lambda: layer.append(2 * k, k), lambda: layer.keys):
        try:
            use()
        except errors.ForkedError:
            pass
        else:
            os._exit(1)
    os._exit(0)
print(os.waitpid(child, 0)[1], layer.length, layer.keys.sum() == k.sum())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("0 3 True\n", "")


def test_it_can_be_filled_in_and_out_of_inference_mode():
    cache = Cache("torch")
    with torch.inference_mode():
        cache.append(3)
    cache.append(2)
    with torch.inference_mode():
        cache.append(1)
    cache.assert_shows(cache.append(2), 2, 8)
    k = torch.zeros(1, HEADS, 1, DIM, requires_grad=True)
    with pytest.raises(errors.AutogradError):
        cache.layer.append(k, k)
    with torch.no_grad():
        keys, _ = cache.layer.append(k, k)
    assert not keys.requires_grad


def test_an_error_in_what_is_given_changes_nothing(library):
    cache = Cache(library)
    cache.append(N + 1)
    good = cache.arrays(cache.fresh(1))
    wide = cache.arrays(cache.fresh(2))
    for keys, values, error in (
        (good[0], wide[1], errors.ShapeError),
        (good[0][0], good[1][0], errors.ShapeError),
        (good[0], [1], errors.ArgumentTypeError),
        (good[0], good[1] > 1, errors.DTypeError),
    ):
        with pytest.raises(error):
            cache.layer.append(keys, values)
    cache.assert_shows((cache.layer.keys, cache.layer.values), 1, N + 1)


# -- all of it at random ------------------------------------------------------------------------------------------


class RingMachine(RuleBasedStateMachine):
    """A ring against a list of tokens and a list of which slot holds what."""

    library = "host"

    @initialize(window=st.integers(1, 9), slack=st.integers(1, 9))
    def make(self, window, slack):
        # 8 KiB a slot and 8 or 16 of them, or 16 of 4 KiB and so on: the granule decides
        spec = LayerSpec(1, 512, 512, "float32", window=window, slack=slack)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "layer_kind", lambda spec: RingLayer)
            self.cache = Cache(self.library, spec, max_tokens=150)
        self.n_kept = window + slack
        self.window = window
        self.kept: list[int | None] = [
            None
        ] * self.n_kept  # the token in each place, the last one written there
        self.marks: list[tuple[object, int]] = []

    @property
    def length(self):
        return len(self.cache.tokens)

    def is_held(self, token):
        return self.kept[token % self.n_kept] == token

    def can_cut(self, n):
        if n in (0, self.length):
            return True
        # With a window of 1 no token before n is needed, but n may not lie before all that is held.
        needed = range(max(0, n - self.window + 1), n) if self.window > 1 else [n]
        return all(self.is_held(t) for t in needed)

    def cut(self, n):
        del self.cache.tokens[n:]
        if n == 0:
            self.kept = [None] * self.n_kept
        self.marks = [mark for mark in self.marks if mark[1] <= n]

    @rule(n=st.integers(0, 25))
    def append(self, n):
        start = self.length
        low = max(0, start - self.window + 1)
        fits = start + n <= 150 and (start + n - low <= self.n_kept or start == 0)
        if not fits:
            with pytest.raises(errors.CapacityError):
                self.cache.append(n)
            return
        shown = self.cache.append(n)
        for token in range(start, start + n):
            self.kept[token % self.n_kept] = token
        self.cache.assert_shows(shown, low, start + n)
        strides = byte_strides(shown[0])
        assert strides[2] > 0

    @rule(n=st.integers(1, 3), times=st.integers(1, 12))
    def append_often(self, n, times):
        for _ in range(times):
            self.append(n)

    @rule(data=st.data())
    def truncate(self, data):
        n = data.draw(st.integers(max(0, self.length - self.n_kept - 1), self.length))
        if self.can_cut(n):
            self.cache.group.truncate(n)
            self.cut(n)
        else:
            with pytest.raises(errors.ArgumentError, match="holds tokens"):
                self.cache.group.truncate(n)

    @rule()
    def checkpoint(self):
        self.marks.append((self.cache.group.checkpoint(), self.length))

    @rule(data=st.data())
    def rollback(self, data):
        if self.marks:
            mark, n = data.draw(st.sampled_from(self.marks))
            if self.can_cut(n):
                self.cache.group.rollback(mark)
                self.cut(n)
            else:
                with pytest.raises(errors.CheckpointError):
                    self.cache.group.rollback(mark)

    @rule()
    def reset(self):
        self.cache.group.reset()
        self.cut(0)
        self.marks = []

    @rule(data=st.data())
    def read(self, data):
        n = data.draw(st.integers(0, min(self.length, self.n_kept + 1)))
        low = max(0, self.length - n - self.window + 1)
        if n == 0 or all(self.is_held(t) for t in range(low, self.length)):
            self.cache.assert_shows(self.cache.layer.read(n), low, self.length)
        else:
            with pytest.raises(errors.ArgumentError):
                self.cache.layer.read(n)

    @invariant()
    def all_that_is_held_is_shown(self):
        if hasattr(self, "window"):
            layer, low = self.cache.layer, self.length
            while low and self.is_held(low - 1):
                low -= 1
            assert (layer.length, layer.held_from, layer.n_held) == (self.length, low, self.length - low)
            self.cache.assert_shows((layer.keys, layer.values), low, self.length)


@pytest.mark.parametrize("name", ["host", "torch"])
def test_random_programs(name):
    machine = type(f"RingMachineOf{name}", (RingMachine,), {"library": name})
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=30))
