"""Windows at their edges: lengths around the window, chunks around the slack, moves counted, what can be cut.

tests/properties/test_window_machine.py tries what these single cases do not think of.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuarena import Arena, CapacityError, CheckpointError, StaleRegionError
from gpuarena.errors import ArgumentError, ArgumentTypeError, NotCopyableError
from gpuarena.kv import FullLayer, KVCache, KVSpec, LayerSpec, WindowLayer

torch = pytest.importorskip("torch")

BACKENDS = ("host", "torch")


def bounded(window=4, slack=2, **options):
    return LayerSpec(1, 1, 1, "float32", window, slack=slack, **options)


def make(*layers, backend="host", batch=1, max_tokens=64):
    """Return a cache over memory that is NaN, and that memory."""
    spec = KVSpec(layers)
    memory = np.full(spec.arena_nbytes(batch, max_tokens) + 256, 0xFF, np.uint8)
    buffer = memory if backend == "host" else torch.from_numpy(memory)
    return KVCache(Arena.from_buffer(buffer), spec, batch=batch, max_tokens=max_tokens), memory


def tokens(cache, *numbers, rows=1, dim=1):
    """[rows, 1, tokens, dim] of the numbers, 100 more in each next row."""
    row = 100 * np.arange(rows, dtype=np.float32)[:, None, None, None]
    array = row + np.array(numbers, np.float32)[:, None] * np.ones(dim, np.float32)
    return torch.from_numpy(array) if cache.arena.backend == "torch" else array


def add(cache, *numbers, layer=0, rows=1):
    """Append to one layer and return the keys that come back, as a list; the values are their negatives."""
    keys = tokens(cache, *numbers, rows=rows)
    keys, values = cache.append(layer, keys, -keys)
    assert np.array_equal(np.asarray(keys), -np.asarray(values))
    return keys.reshape(-1).tolist()


def count_moves(cache):
    """Return a list that gets the tokens of each plane that is moved."""
    moves: list[int] = []
    for ops in cache._ops.values():

        def move(buffer, source, target, n_tokens, original=ops.move):
            moves.append(n_tokens)
            original(buffer, source, target, n_tokens)

        ops.move = move
    return moves


def window_of(first, stop, window):
    return list(range(max(0, first - window + 1), stop))


# ------------------------------------------------------------------------------------------------------ what is shown


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("slack", [None, 1, 2, 5, 64])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_one_token_at_a_time_shows_the_window_at_every_length(backend, window, slack, sinks):
    cache, _ = make(bounded(window, slack, sinks=sinks), backend=backend)
    for at in range(4 * window + 8):
        shown = add(cache, at)
        mask = np.asarray(cache.mask(0)).reshape(-1)
        visible = [key for key in range(at + 1) if key > at - window or key < sinks]
        assert [int(key) for key, seen in zip(shown, mask, strict=True) if seen] == visible
        assert shown == sorted(shown)
        if not sinks:
            assert mask.all(), "without sinks one query sees all that it is shown"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_new", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 63, 64])
def test_the_first_prompt_may_have_any_length(backend, n_new):
    """W - 1, W, W + 1, as many as there are slots, more, 2 W: all of them come back, the end is held."""
    cache, _ = make(bounded(4, 2), backend=backend)
    assert add(cache, *range(n_new)) == list(range(n_new))
    layer = cache.layers[0]
    n_held = min(n_new, 6)
    assert layer.keys.reshape(-1).tolist() == list(range(n_new - n_held, n_new))
    assert (layer.length, layer.n_held, layer.held_from) == (n_new, n_held, n_new - n_held)
    if n_new < 64:
        assert add(cache, n_new) == window_of(n_new, n_new + 1, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_prompt_fills_the_sinks_and_the_end_of_the_body(backend):
    cache, _ = make(bounded(3, 2, sinks=2), backend=backend)
    add(cache, *range(20))
    layer = cache.layers[0]
    assert layer.keys.reshape(-1).tolist() == [0, 1, 15, 16, 17, 18, 19]
    assert layer.positions == [range(2), range(15, 20)]
    assert layer.floor == 17
    shown = add(cache, 20)
    assert shown == [0, 1, 18, 19, 20]
    assert cache.mask(0).tolist() == [[True] * 5]


def test_what_a_long_prompt_gives_back_is_the_prompt_itself():
    """There is nowhere else that all of it could be seen."""
    cache, _ = make(bounded(2, 1), backend="torch")
    keys = tokens(cache, *range(9))
    shown, _ = cache.append(0, keys, keys)
    assert shown.data_ptr() == keys.data_ptr()
    assert cache.mask(0, 9).shape == (9, 9)
    with pytest.raises(
        ArgumentError, match=r"read\(9\): layer 0 holds the whole window of its last 2 tokens only"
    ):
        cache.read(0, 9)
    assert cache.read(0, 2)[0].reshape(-1).tolist() == [6, 7, 8]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slack", [1, 2, 5])
def test_later_chunks_are_at_most_one_more_than_the_slack(backend, slack):
    cache, memory = make(bounded(4, slack), backend=backend)
    add(cache, *range(4 + slack))
    for n_fit in (slack + 1, slack, 1, slack + 1):
        start = cache.length
        assert add(cache, *range(start, start + n_fit)) == window_of(start, start + n_fit, 4)
        for n_new in (slack + 2, slack + 3, 30):
            before = memory.copy()
            with pytest.raises(
                CapacityError, match=rf"{n_new} tokens at once.*slack {slack}, {slack + 1} do"
            ) as caught:
                add(cache, *range(n_new))
            error = caught.value
            assert (error.requested, error.available, error.missing) == (n_new, slack + 1, n_new - slack - 1)
            assert (error.used, error.capacity, error.unit) == (3, 4 + slack, "tokens")
            assert error.label == "layer0"
            assert np.array_equal(memory, before)
            assert cache.length == start + n_fit


def test_a_chunk_behind_a_short_beginning_may_fill_what_is_free():
    cache, _ = make(bounded(4, 2, sinks=2))  # 8 slots
    add(cache, 0)
    with pytest.raises(CapacityError) as caught:
        add(cache, *range(1, 9))
    assert (caught.value.available, caught.value.missing) == (7, 1)
    add(cache, *range(1, 8))
    assert cache.layers[0].keys.reshape(-1).tolist() == list(range(8))


def test_all_of_the_capacity_comes_before_the_window():
    cache, _ = make(bounded(4, 2), max_tokens=10)
    add(cache, *range(8))
    with pytest.raises(
        CapacityError, match="the cache is full: 8 of 10 tokens used, 3 more asked, 1 too many"
    ):
        add(cache, 8, 9, 10)
    assert add(cache, 8, 9) == [5, 6, 7, 8, 9]


def test_a_window_as_long_as_the_cache_never_moves():
    for window, slack, sinks in ((16, 1, 0), (8, 8, 0), (2, 2, 30), (1, 100, 0)):
        cache, _ = make(bounded(window, slack, sinks=sinks), max_tokens=16)
        moves = count_moves(cache)
        for at in range(16):
            add(cache, at)
        assert not moves
        assert cache.layers[0].keys.reshape(-1).tolist() == list(range(16))
        assert cache.layers[0].regions[0].shape[-2] == 16
        cache.truncate(1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_appending_nothing_moves_nothing(backend):
    cache, memory = make(bounded(4, 2), backend=backend)
    moves = count_moves(cache)
    for at in range(20):
        add(cache, at)
        before, n_moves = memory.copy(), len(moves)
        assert add(cache) == window_of(at + 1, at + 1, 4)
        assert len(moves) == n_moves
        assert np.array_equal(memory, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_held_can_be_appended(backend):
    """The move puts other tokens where the views look, before they are written."""
    for n_new in (1, 2):
        cache, _ = make(bounded(3, 2), backend=backend)
        expected: list[float] = []
        add(cache, *range(5))
        expected += range(5)
        for _ in range(9):
            layer = cache.layers[0]
            keys, values = layer.keys[:, :, -n_new:], layer.values[:, :, -n_new:]
            expected += expected[-n_new:]
            keys, values = cache.append(0, keys, values)
            assert keys.reshape(-1).tolist() == expected[-2 - n_new :]
            assert values.reshape(-1).tolist() == [-key for key in expected[-2 - n_new :]]


# --------------------------------------------------------------------------------------------------- how much is moved


@given(window=st.integers(1, 12), slack=st.integers(1, 12), prompt=st.integers(0, 40))
def test_one_at_a_time_the_window_is_moved_once_in_slack_and_one_tokens(window, slack, prompt):
    cache, _ = make(bounded(window, slack), max_tokens=200)
    if prompt:
        add(cache, *range(prompt))
    moves = count_moves(cache)
    n_new = 100
    for at in range(n_new):
        add(cache, at)
    most = -(-n_new // (slack + 1)) if window > 1 else 0
    assert len(moves) <= 2 * most, "two planes a move"
    assert len(moves) >= 2 * (most - 1 - (window - 1) // (slack + 1) - 1) if window > 1 else not moves
    assert set(moves) <= {window - 1}
    written = n_new + sum(moves) / 2
    assert written <= n_new * (1 + (window - 1) / slack) + window


@given(
    window=st.integers(2, 12),
    slack=st.integers(1, 12),
    chunks=st.lists(st.integers(1, 13), min_size=1, max_size=40),
)
def test_in_pieces_the_window_is_moved_at_most_twice_as_often(window, slack, chunks):
    cache, _ = make(bounded(window, slack), max_tokens=600)
    add(cache, *range(window + slack))
    moves = count_moves(cache)
    n_new = 0
    for chunk in (min(chunk, slack + 1) for chunk in chunks):
        add(cache, *range(chunk))
        n_new += chunk
    assert len(moves) / 2 <= 1 + 2 * n_new / (slack + 2)
    assert all(n_tokens == window - 1 for n_tokens in moves)


def test_a_draft_that_is_rejected_moves_nothing_again():
    """Rollback and append in turn, as speculative decoding does, within the slack."""
    cache, _ = make(bounded(8, 4))
    add(cache, *range(12))
    moves = count_moves(cache)
    for _ in range(10):
        with cache.scope():
            add(cache, 12, 13, 14)
    assert len(moves) == 2
    assert add(cache, 12) == window_of(12, 13, 8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slack", [1, 2, 3, 7])
def test_a_move_may_overlap_itself(backend, slack):
    """The shorter the way, the smaller the pieces that can be copied at once."""
    cache, _ = make(bounded(11, slack), backend=backend, max_tokens=200)
    for at in range(100):
        assert add(cache, at) == window_of(at, at + 1, 11)


# ------------------------------------------------------------------------------------------------------- going back


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_tokens", [3, 4, 5, 6, 7, 8, 9, 12, 13])
def test_a_bounded_layer_can_be_cut_to_its_floor_and_no_further(backend, n_tokens):
    cache, memory = make(bounded(4, 2), backend=backend)
    for at in range(n_tokens):
        add(cache, at)
    layer = cache.layers[0]
    floor = layer.floor
    assert floor == (0 if layer.held_from == 0 else layer.held_from + 3)
    for keep in range(1, floor):
        before = memory.copy()
        with pytest.raises(
            ArgumentError, match=rf"truncate\({keep}\): layer 0 .* lengths of {floor} or more; .*reset"
        ):
            cache.truncate(keep)
        with pytest.raises(ArgumentError, match=rf"truncate\({keep}\)"):
            layer.truncate(keep)
        assert (layer.length, layer.n_held) == (n_tokens, min(n_tokens, layer.n_held))
        assert np.array_equal(memory, before)
    for keep in range(n_tokens, max(floor, 1) - 1, -1):
        cache.truncate(keep)
        assert layer.keys.reshape(-1).tolist() == list(range(layer.held_from, keep))
        same, _ = make(bounded(4, 2), backend=backend)
        for at in range(n_tokens):
            add(same, at)
        same.truncate(keep)
        assert add(same, keep) == window_of(keep, keep + 1, 4), "all that a query there sees is still held"
    cache.truncate(0)
    assert (layer.n_held, layer.held_from, layer.floor) == (0, 0, 0)
    assert add(cache, *range(20)) == list(range(20))


def test_as_much_as_the_slack_can_be_taken_back_just_before_a_move():
    cache, _ = make(bounded(4, 3))
    for at in range(7):
        add(cache, at)
    assert cache.layers[0].floor == 0
    add(cache, 7)  # moves
    assert cache.layers[0].floor == 7
    add(cache, 8)
    add(cache, 9)
    add(cache, 10)
    cache.truncate(7)
    assert add(cache, 7) == [4, 5, 6, 7]


def test_rollback_past_what_is_held_says_so_and_changes_nothing():
    cache, memory = make(bounded(3, 1), LayerSpec(1, 1, 1, "float32"))
    for layer in (0, 1):
        add(cache, 0, 1, 2, layer=layer)
    early = cache.checkpoint()
    for at in (3, 4):
        for layer in (0, 1):
            add(cache, at, layer=layer)
    late = cache.checkpoint()
    for layer in (0, 1):
        add(cache, 5, layer=layer)
    before = memory.copy()
    with pytest.raises(
        CheckpointError, match=r"rollback to 3 tokens: layer 0 has a bounded window of 3 tokens"
    ):
        cache.rollback(early)
    assert [layer.length for layer in cache.layers] == [6, 6], "all layers or none"
    assert np.array_equal(memory, before)
    cache.rollback(late)
    assert add(cache, 5) == [3, 4, 5]


def test_a_scope_that_cannot_go_back_says_so_unless_an_exception_passes():
    cache, _ = make(bounded(2, 1))
    add(cache, 0)
    scope = cache.scope()
    scope.__enter__()
    add(cache, 1, 2)
    add(cache, 3, 4)
    with pytest.raises(CheckpointError, match="bounded window"):
        scope.__exit__(None, None, None)
    assert cache.length == 5
    scope = cache.scope()
    scope.__enter__()
    for at in (5, 7, 9):
        add(cache, at, at + 1)
    assert not scope.__exit__(KeyError, KeyError(), None), "the exception passes"
    assert cache.length == 11
    with cache.scope():  # within the slack it can
        add(cache, 11)
    assert cache.length == 11
    assert add(cache, 11) == [10, 11]


def test_a_scope_from_the_start_can_always_go_back():
    cache, _ = make(bounded(2, 1))
    for _ in range(3):
        with cache.scope():
            add(cache, *range(30))
            add(cache, 30, 31)
        assert (cache.length, cache.rows) == (0, None)
    assert add(cache, 5) == [5]


# -------------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_before", [1, 3, 5, 6, 9, 20])
def test_rows_move_with_all_that_is_held(backend, n_before):
    cache, _ = make(bounded(3, 2, sinks=1), backend=backend, batch=4)
    add(cache, *range(n_before), rows=2)
    layer = cache.layers[0]
    held = [at for run in layer.positions for at in run]
    cache.select([1, 0, 1])
    assert layer.keys[:, 0, :, 0].tolist() == [[row + at for at in held] for row in (100, 0, 100)]
    cache.select([1])
    cache.repeat(2)
    cache.select([0, 1, 1])  # one more row than shares what is held
    assert layer.keys[:, 0, :, 0].tolist() == [held] * 3
    cache.select([1])
    cache.repeat(4)
    assert layer.keys[:, 0, :, 0].tolist() == [held] * 4
    for at in range(n_before, n_before + 7):
        add(cache, at, rows=4)
    cache.reorder([3, 2, 1, 0])
    held = [at for run in layer.positions for at in run]
    wanted = [[at + (0 if at < n_before else row) for at in held] for row in (300, 200, 100, 0)]
    assert layer.keys[:, 0, :, 0].tolist() == wanted, (
        "what was shared before the move is still the same in all"
    )
    assert layer.values[:, 0, :, 0].tolist() == [[-at for at in row] for row in wanted]


def test_another_number_of_rows_after_a_reset():
    cache, _ = make(bounded(2, 1), batch=3)
    for rows in (1, 3, 2):
        cache.reset()
        for at in range(7):
            keys = tokens(cache, at, rows=rows)
            shown, _ = cache.append(0, keys, keys)
            assert shown.shape[0] == rows
        assert shown[:, 0, :, 0].tolist() == [[row + 5, row + 6] for row in range(0, 100 * rows, 100)]


# ------------------------------------------------------------------------------------------------------- as attention


def reference(q, k, v, window, sinks):
    """Plain attention over whole tensors, the queries being of the last tokens, with a band for a mask."""
    at_q = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
    at_k = torch.arange(k.shape[2])[None]
    band = at_k <= at_q
    if window is not None:
        band &= (at_q - at_k < window) | (at_k < sinks)
    scores = (q @ k.transpose(2, 3) / k.shape[3] ** 0.5).masked_fill(~band, float("-inf"))
    return scores.softmax(-1) @ v


LAYERS = [
    LayerSpec(2, 8, 8, "float32"),
    LayerSpec(2, 8, 4, "float32", window=5),
    LayerSpec(2, 8, 8, "float32", window=5, sinks=2),
    LayerSpec(2, 8, 8, "float32", window=5, slack=3),
    LayerSpec(2, 8, 4, "float32", window=5, slack=3, sinks=2),
]


@given(prompt=st.integers(1, 20), chunks=st.lists(st.integers(1, 4), max_size=12), ask=st.integers(1, 5))
@settings(max_examples=30)
def test_attention_over_views_and_masks_is_attention_over_everything(prompt, chunks, ask):
    torch.manual_seed(prompt)
    cache, _ = make(*LAYERS, backend="torch", batch=2)
    whole = [
        (torch.empty(2, s.kv_heads, 0, s.key_dim), torch.empty(2, s.kv_heads, 0, s.value_dim)) for s in LAYERS
    ]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for n_new in [prompt, *chunks]:
        for number, spec in enumerate(LAYERS):
            keys, values = torch.randn(2, 2, n_new, 8), torch.randn(2, 2, n_new, spec.value_dim)
            whole[number] = k, v = tuple(
                torch.cat([old, new], 2) for old, new in zip(whole[number], (keys, values), strict=True)
            )
            shown = cache.append(number, keys, values)
            q = torch.randn(2, 2, n_new, 8)
            wanted = reference(q, k, v, spec.window, spec.sinks)
            found = sdpa(q, *shown, attn_mask=cache.mask(number, n_new))
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
            layer = cache.layers[number]
            n = min(ask, layer.length - layer.floor)
            if n > 0:
                q = torch.randn(2, 2, n, 8)
                found = sdpa(q, *cache.read(number, n), attn_mask=cache.mask(number, n))
                torch.testing.assert_close(
                    found, reference(q, k, v, spec.window, spec.sinks), rtol=1e-5, atol=1e-5
                )


def test_pieces_of_a_prompt_give_what_the_prompt_gives():
    torch.manual_seed(0)
    spec = LayerSpec(1, 4, 4, "float32", window=6, slack=3)
    k, v = torch.randn(2, 1, 1, 40, 4)
    for pieces in ([40], [4] * 10, [1] * 40, [13, 3, 4, 1, 4, 4, 4, 4, 3]):
        cache, _ = make(spec, backend="torch")
        at = 0
        for n in pieces:
            cache.append(0, k[:, :, at : at + n], v[:, :, at : at + n])
            at += n
        keys, values = cache.read(0)
        assert torch.equal(keys, k[:, :, -6:])
        assert torch.equal(values, v[:, :, -6:])


# --------------------------------------------------------------------------------------------------- memory and errors


def test_the_memory_is_bounded_and_counted():
    spec = KVSpec(
        [LayerSpec(2, 8, 8, "float32", 16, slack=4, sinks=2), LayerSpec(2, 8, 4, "float32", 16, slack=4)]
    )
    assert [layer.n_slots(1_000_000) for layer in spec.layers] == [22, 20]
    assert [layer.n_slots(5) for layer in spec.layers] == [5, 5]
    nbytes = spec.arena_nbytes(3, 1_000_000)
    assert nbytes == spec.arena_nbytes(3, 22)
    cache = KVCache(Arena(nbytes), spec, batch=3, max_tokens=1_000_000)
    assert isinstance(cache.layers[0], WindowLayer)
    assert [region.shape for layer in cache.layers for region in layer.regions] == [
        (2, 3, 2, 22, 8),
        (3, 2, 20, 8),
        (3, 2, 20, 4),
    ]
    zeros = np.zeros((2, 2, 500, 8), np.float32)
    cache.append(0, zeros, zeros)
    cache.append(1, zeros, zeros[..., :4])
    stats = cache.stats
    assert (stats.n_tokens, stats.high_water_tokens) == (500, 500)
    assert stats.used_nbytes == 2 * (22 * 128 + 20 * 96)
    assert stats.reserved_nbytes == spec.nbytes(3, 1_000_000) == 3 * (22 * 128 + 20 * 96)


def test_a_window_without_slack_is_a_full_layer():
    cache, _ = make(bounded(4, None))
    assert isinstance(cache.layers[0], FullLayer)
    assert cache.layers[0].floor == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stale_bounded_layer_is_never_written(backend):
    spec = KVSpec([bounded(2, 1)])
    arena = Arena("64KiB", backend=backend)
    start = arena.checkpoint()
    cache = KVCache(arena, spec, batch=2, max_tokens=32)
    add(cache, *range(9))
    arena.rollback(start)
    other = arena.alloc(4096, "uint8", fill=7)
    for numbers in ((), (9,), (9, 10)):
        with pytest.raises(StaleRegionError):
            add(cache, *numbers)
    for look in (lambda: cache.read(0), lambda: cache.layers[0].keys, lambda: cache.layers[0].values):
        with pytest.raises(StaleRegionError):
            look()
    with pytest.raises(StaleRegionError):
        cache.reorder([0])
    assert np.all(np.asarray(other.array) == 7)
    assert (cache.length, cache.rows, cache.layers[0].held_from) == (9, 1, 6)


@pytest.mark.parametrize("n_tokens", [-1, 5, 100])
def test_reads_of_what_there_is_not(n_tokens):
    cache, _ = make(bounded(4, 2), LayerSpec(1, 1, 1, "float32"))
    for layer in (0, 1):
        add(cache, 1, 2, 3, 4, layer=layer)
        for call in (cache.read, cache.mask):
            with pytest.raises(ArgumentError):
                call(layer, n_tokens)


@pytest.mark.parametrize("n_tokens", [None, 1.0, True, "1"])
def test_reads_of_no_number_of_tokens(n_tokens):
    """`mask` took 1.0 and True for the length, if that was 1."""
    cache, _ = make(bounded(4, 2), LayerSpec(1, 1, 1, "float32"))
    for layer in (0, 1):
        add(cache, 1, layer=layer)
        for call in (cache.read, cache.mask):
            with pytest.raises(ArgumentTypeError):
                call(layer, n_tokens)


def test_a_layer_is_not_copied():
    import copy

    cache, _ = make(bounded())
    with pytest.raises(NotCopyableError, match="WindowLayer"):
        copy.copy(cache.layers[0])


def test_no_reads_of_an_empty_layer():
    cache, _ = make(bounded(4, 2, sinks=1), LayerSpec(1, 1, 1, "float32", 2), backend="torch")
    for layer in (0, 1):
        keys, values = cache.read(layer, 0)
        assert keys.shape[2] == values.shape[2] == 0
        assert cache.mask(layer, 0).shape == (0, 0)
        with pytest.raises(ArgumentError):
            cache.read(layer)


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference_mode"])
def test_windows_are_written_in_all_modes_in_turn(mode):
    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with modes[mode]():
        cache, _ = make(bounded(3, 1), backend="torch", batch=2)
        add(cache, 0, rows=2)
    for at in range(1, 12):
        for other in modes.values():
            with other():
                keys, _ = cache.append(0, *[tokens(cache, at, rows=2)] * 2)
                cache.reorder([0, 1])
        assert keys[0, 0, :, 0].tolist() == [at] * 3
    assert not keys.requires_grad


def test_tensors_that_require_grad_are_refused():
    from gpuarena.errors import AutogradError

    cache, memory = make(bounded(3, 1), backend="torch")
    for at in range(4):
        add(cache, at)
    before = memory.copy()
    keys = torch.ones(1, 1, 1, 1, requires_grad=True)
    with pytest.raises(AutogradError):
        cache.append(0, keys, keys)
    assert np.array_equal(memory, before)
    with torch.no_grad():
        shown, _ = cache.append(0, keys, keys)
    assert shown.reshape(-1).tolist() == [2, 3, 1]
