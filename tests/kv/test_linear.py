"""What a `KVCache` promises beside its contents, which tests/properties/test_kv_machine.py compares with a model."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    BackendError,
    NotCopyableError,
)
from gpuarena.kv import KVCache, KVSpec, LayerGroup, LayerSpec

torch = pytest.importorskip("torch")

SMALL = KVSpec.uniform(layers=2, kv_heads=2, head_dim=4, dtype="float32")


def torch_cache(spec=SMALL, *, batch=1, max_tokens=16, device="cpu"):
    arena = Arena(spec.arena_nbytes(batch, max_tokens), backend="torch", device=device)
    return KVCache(arena, spec, batch=batch, max_tokens=max_tokens)


def host_cache(spec=SMALL, *, batch=1, max_tokens=16):
    return KVCache(Arena(spec.arena_nbytes(batch, max_tokens)), spec, batch=batch, max_tokens=max_tokens)


def tokens(n_tokens, *, rows=1, first=0, device="cpu"):
    """[rows, 2, n_tokens, 4], all of the numbers of a token equal to its position plus 100 times its row."""
    position = torch.arange(first, first + n_tokens, dtype=torch.float32, device=device)
    row = 100 * torch.arange(rows, dtype=torch.float32, device=device)
    return (row[:, None] + position)[:, None, :, None].expand(rows, 2, n_tokens, 4)


def step(cache, keys, values=None):
    return [
        cache.append(layer, keys, keys if values is None else values) for layer in range(len(cache.layers))
    ]


# ---------------------------------------------------------------------------------------------- memory and its addresses


def allocated_nbytes(function):
    """Bytes that `function` allocates on the CPU, inside of kernels too, freed or not."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        function()
    records = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return sum(max(record.nbytes(), 0) for record in records)


def test_the_measure_of_allocations_sees_temporaries():
    kept = torch.empty(100)
    assert allocated_nbytes(lambda: kept.copy_(torch.ones(100))) == 400
    matrix, inverse = torch.eye(64), torch.empty(64, 64)
    assert (
        allocated_nbytes(lambda: torch.linalg.inv(matrix, out=inverse)) > matrix.nbytes
    )  # inside of the kernel


@pytest.mark.parametrize("n_new", [1, 2, 4, 5, 8])
def test_append_allocates_nothing(n_new):
    cache = torch_cache(batch=3, max_tokens=64)
    new = tokens(n_new, rows=3).contiguous()
    step(cache, new)
    assert allocated_nbytes(lambda: step(cache, new)) == 0


def test_going_back_allocates_nothing():
    cache = torch_cache(batch=3, max_tokens=64)
    step(cache, tokens(3, rows=3))
    checkpoint = cache.checkpoint()
    new = tokens(2, rows=3).contiguous()

    def go_forth_and_back():
        with cache.scope():
            step(cache, new)
        step(cache, new)
        cache.rollback(checkpoint)
        cache.truncate(2)
        cache.reset()

    assert allocated_nbytes(go_forth_and_back) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moving_rows_allocates_nothing(dtype):
    spec = KVSpec([LayerSpec(2, 4, 6, dtype), LayerSpec(1, 3, 5, "float32", value_dtype=dtype)])
    cache = torch_cache(spec, batch=4, max_tokens=64)
    for layer, s in enumerate(spec.layers):
        keys = torch.ones(4, s.kv_heads, 9, s.key_dim, dtype=s.dtype.torch)
        cache.append(layer, keys, torch.ones(4, s.kv_heads, 9, s.value_dim, dtype=s.value_dtype.torch))
    rows = torch.tensor([2, 2, 0, 1])
    for order in (
        rows,
        rows.int(),
        torch.stack([rows.int(), rows.int()], dim=1)[:, 0],
    ):  # the last as beam search has it
        assert allocated_nbytes(lambda order=order: cache.reorder(order)) == 0
    few = torch.tensor([3, 0])
    assert allocated_nbytes(lambda: cache.select(few)) == 0


def test_nothing_moves_while_the_cache_lives():
    cache = torch_cache(batch=3, max_tokens=16)
    addresses = [  # keys and values lie in one region
        (layer.regions[0].address, layer.regions[0][1].address) for layer in cache.layers
    ]

    def check():
        for layer, pair in zip(cache.layers, addresses, strict=True):
            assert (layer.keys.data_ptr(), layer.values.data_ptr()) == pair

    for keys, values in step(cache, tokens(3, rows=1)):
        assert keys.data_ptr() in dict(addresses)
        assert values.data_ptr() in dict(map(reversed, addresses))
    cache.repeat(3)
    check()
    step(cache, tokens(1, rows=3))
    cache.reorder([2, 0, 1])
    check()
    cache.truncate(2)
    cache.select([1])
    check()
    cache.reset()
    step(cache, tokens(16, rows=2))
    check()


def test_a_view_shows_the_filled_tokens_and_no_more():
    cache = torch_cache(batch=2, max_tokens=8)
    for layer in cache.layers:
        for region in layer.regions:
            region.array.fill_(torch.nan)
    for n_new in (3, 1, 2):
        for keys, values in step(cache, tokens(n_new, rows=1)):
            assert keys.shape[2] == values.shape[2] == cache.length
            assert not keys.isnan().any()
            assert not values.isnan().any()
    cache.truncate(4)
    assert cache.layers[1].keys.shape == (1, 2, 4, 4)
    (keys, _), _ = step(cache, tokens(0))
    assert keys.shape == (1, 2, 4, 4)


def test_a_view_follows_the_cache():
    cache = host_cache(batch=2)
    keys, _ = step(cache, tokens(2, rows=2).numpy())[0]
    assert keys[0, 0, 0, 0] == 0
    cache.reorder([1, 0])
    assert keys[0, 0, 0, 0] == 100


@pytest.mark.parametrize("make", [host_cache, torch_cache])
def test_a_dropped_cache_gives_its_memory_back_at_once(make):
    cache = make(batch=2)
    keys = tokens(3, rows=2)
    step(cache, keys if cache.arena.backend == "torch" else keys.numpy())
    cache.reorder([1, 0])
    checkpoint = cache.checkpoint()
    arena = weakref.ref(cache.arena)
    gc.disable()  # it would find a cycle sooner or later
    try:
        del cache, checkpoint
        assert arena() is None
    finally:
        gc.enable()


def test_a_layer_works_without_the_object_that_made_it():
    layer = torch_cache(batch=2).layers[1]
    keys, _ = layer.append(tokens(2, rows=2), tokens(2, rows=2))
    assert keys[1, 0, :, 0].tolist() == [100, 101]
    with pytest.raises(CapacityError):
        layer.append(tokens(20, rows=2), tokens(20, rows=2))


def test_a_cache_that_does_not_fit_takes_nothing_of_the_arena():
    arena = Arena(SMALL.arena_nbytes(2, 16) - 1, alignment=1)
    with pytest.raises(OutOfMemoryError):
        KVCache(arena, SMALL, batch=2, max_tokens=16)
    assert (arena.stats.top, arena.stats.n_regions) == (0, 0)
    KVCache(arena, SMALL, batch=2, max_tokens=15)


def test_repeat_puts_the_copies_of_a_row_side_by_side():
    cache = torch_cache(batch=6)
    step(cache, tokens(2, rows=3))
    cache.repeat(2)
    assert cache.layers[1].values[:, 0, 1, 0].tolist() == [1, 1, 101, 101, 201, 201]


def test_rows_that_share_a_prefix_differ_from_the_first_token_behind_it():
    cache = torch_cache(batch=3)
    step(cache, tokens(2))
    before = cache.checkpoint()
    cache.repeat(2)
    step(cache, tokens(1, rows=2, first=2))
    cache.reorder([1, 0])
    assert cache.layers[0].keys[:, 0, :, 0].tolist() == [[0, 1, 102], [0, 1, 2]]
    cache.select([1, 0, 0])  # one more than have the prefix
    assert cache.layers[0].keys[:, 0, :, 0].tolist() == [[0, 1, 2], [0, 1, 102], [0, 1, 102]]
    cache.rollback(before)
    assert cache.layers[0].keys[:, 0, :, 0].tolist() == [[0, 1]]


def test_rows_share_a_prefix_only_as_far_as_it_is_kept():
    cache = torch_cache(batch=2)
    step(cache, tokens(5))
    cache.repeat(2)
    cache.truncate(2)
    step(cache, tokens(4, rows=2, first=2))
    cache.reorder([1, 0])
    assert cache.layers[0].keys[:, 1, :, 3].tolist() == [[0, 1, 102, 103, 104, 105], [0, 1, 2, 3, 4, 5]]


# ------------------------------------------------------------------------------------------------------------- autograd


def test_tensors_that_require_grad_are_refused_with_the_remedy():
    cache = torch_cache()
    new = tokens(2).clone()
    for keys, values in ((new.clone().requires_grad_(), new), (new, new.clone().requires_grad_())):
        with pytest.raises(
            AutogradError, match=r"torch\.no_grad\(\).*torch\.inference_mode\(\).*\.detach\(\)"
        ):
            cache.append(0, keys, values)
        assert cache.is_empty
        with torch.no_grad():
            cache.append(0, keys, values)
        cache.layers[0].truncate(0)
        with torch.inference_mode():
            cache.append(0, keys, values)
        cache.layers[0].truncate(0)
        seen, _ = cache.append(0, keys.detach(), values.detach())
        assert not seen.requires_grad
        cache.layers[0].truncate(0)
    cache.append(0, new, new)  # grad is enabled, and nothing requires it
    assert not cache.layers[0].regions[0].array.requires_grad


def test_a_backward_through_what_the_cache_returns_reaches_the_query():
    cache = torch_cache()
    keys, _ = cache.append(0, tokens(2), tokens(2))
    query = torch.ones(1, 2, 1, 4, requires_grad=True)
    (query @ keys.transpose(2, 3)).sum().backward()
    assert query.grad[0, 0, 0].tolist() == [1, 1, 1, 1]


MODES = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("made_in", MODES)
def test_a_cache_is_used_in_all_modes_in_turn(made_in):
    with MODES[made_in]():
        cache = torch_cache(batch=2, max_tokens=64)
        new = tokens(1, rows=2).contiguous()
        step(cache, new)
    expected = [0.0]
    for first_mode in MODES:
        for second_mode in MODES:
            for n_new in (1, 5):
                with MODES[first_mode]():
                    born_there = tokens(n_new, rows=2).contiguous()
                    step(cache, born_there)
                with MODES[second_mode]():
                    step(cache, born_there)
                    cache.reorder([0, 1])
                    (keys, values), _ = step(cache, new)
                expected += [*range(n_new), *range(n_new), 0]
                assert keys[0, 0, :, 0].tolist() == values[0, 0, :, 0].tolist() == expected
        cache.truncate(1)
        expected = [0.0]
    with MODES[made_in]():
        cache.reset()
    step(cache, tokens(1, rows=1))
    cache.repeat(2)
    assert cache.layers[0].keys.shape == (2, 2, 1, 4)


# ----------------------------------------------------------------------------------- a model written by hand, step by step


class TinyModel(torch.nn.Module):
    """Attention layers that differ in heads, dimensions and windows, with positions, so that order matters."""

    hidden, vocabulary = 12, 17
    q_heads = (4, 4, 3)
    spec = KVSpec(
        [
            LayerSpec(2, 5, 3, "float32"),
            LayerSpec(1, 4, 6, "float32", window=4),
            LayerSpec(3, 2, 2, "float32"),
        ]
    )

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(self.vocabulary, self.hidden)
        self.positions = torch.nn.Embedding(64, self.hidden)
        self.projections = torch.nn.ModuleList()
        for q_heads, layer in zip(self.q_heads, self.spec.layers, strict=True):
            widths = (
                q_heads * layer.key_dim,
                layer.kv_heads * layer.key_dim,
                layer.kv_heads * layer.value_dim,
            )
            linear = [torch.nn.Linear(self.hidden, width) for width in widths]
            self.projections.append(
                torch.nn.ModuleList([*linear, torch.nn.Linear(q_heads * layer.value_dim, self.hidden)])
            )

    def forward(self, ids, append, *, start=0):
        """Return the logits of ``ids`` ([rows, n]), which stand at the positions from `start` on."""
        n_rows, n_new = ids.shape
        at = torch.arange(start, start + n_new, device=ids.device)
        x = self.embed(ids) + self.positions(at)
        for number, (q_heads, layer) in enumerate(zip(self.q_heads, self.spec.layers, strict=True)):
            to_q, to_k, to_v, to_x = self.projections[number]
            q = to_q(x).view(n_rows, n_new, q_heads, layer.key_dim).transpose(1, 2)
            k = to_k(x).view(n_rows, n_new, layer.kv_heads, layer.key_dim).transpose(1, 2)
            v = to_v(x).view(n_rows, n_new, layer.kv_heads, layer.value_dim).transpose(1, 2)
            k, v = append(number, k, v)
            group = q_heads // layer.kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            key_at = torch.arange(start + n_new - k.shape[2], start + n_new, device=ids.device)
            visible = key_at[None, :] <= at[:, None]
            if layer.window is not None:
                visible &= key_at[None, :] > at[:, None] - layer.window
            scores = (q @ k.transpose(2, 3)).masked_fill(~visible, -torch.inf)
            out = scores.softmax(-1) @ v
            x = x + to_x(out.transpose(1, 2).reshape(n_rows, n_new, -1))
        return x @ self.embed.weight.T


def check_a_model_step_by_step(device, chunks, back, rows):
    """Fill a cache in chunks, go back, take rows in another order, go on: all logits are those of one pass."""
    torch.manual_seed(0)
    model = TinyModel().to(device)
    n_rows, n_tokens = 3, sum(chunks)
    ids = torch.randint(0, model.vocabulary, (n_rows, n_tokens), device=device)
    cache = torch_cache(model.spec, batch=4, max_tokens=2 * n_tokens, device=device)

    def run(ids, chunks):
        start = cache.length
        whole = torch.cat([seen, ids], dim=1)
        expected = model(whole, lambda number, keys, values: (keys, values))
        for chunk in chunks:
            logits = model(whole[:, start : start + chunk], cache.append, start=start)
            torch.testing.assert_close(logits, expected[:, start : start + chunk], rtol=1e-4, atol=1e-4)
            start += chunk
        return whole

    with torch.no_grad():
        seen = ids[:, :0]
        seen = run(ids, chunks)
        cache.truncate(n_tokens - back)
        cache.select(torch.tensor(rows, device=device))
        seen = seen[rows, : n_tokens - back]
        other = torch.randint(0, model.vocabulary, (len(rows), n_tokens), device=device)
        with cache.scope():
            run(other, reversed(chunks))
        run(other.flip(1), chunks)


@given(
    chunks=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    back=st.integers(0, 7),
    rows=st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
@settings(max_examples=30)
def test_a_model_written_by_hand_gives_the_logits_of_one_pass(chunks, back, rows):
    check_a_model_step_by_step("cpu", chunks, min(back, sum(chunks)), rows)


# -------------------------------------------------------------------------------------------------------------- messages


def test_a_full_cache_says_what_to_do():
    cache = torch_cache(max_tokens=4)
    step(cache, tokens(3))
    with pytest.raises(CapacityError) as caught:
        cache.append(0, tokens(2), tokens(2))
    message = str(caught.value)
    for part in (
        "3 of 4 tokens used",
        "2 more asked",
        "1 too many",
        "Nothing was written",
        "roll back or truncate",
    ):
        assert part in message
    assert "at least 5 tokens" in message
    figures = caught.value
    assert (figures.used, figures.requested, figures.capacity, figures.missing) == (3, 2, 4, 1)
    assert isinstance(caught.value, MemoryError)
    cache.append(0, tokens(1), tokens(1))


def test_what_is_wrong_with_an_append_is_said_in_figures():
    cache = torch_cache(batch=3)
    step(cache, tokens(2, rows=2))
    right = tokens(1, rows=2)
    wrong = [
        (
            tokens(1, rows=1),
            tokens(1, rows=1),
            ShapeError,
            r"1 rows given, the cache holds 2; reset\(\) .* repeats or selects rows",
        ),
        (
            right[:, :1],
            right,
            ShapeError,
            r"layer 1: keys are \[2, 1, 1, 4\], the cache holds \[rows, 2, tokens, 4\]",
        ),
        (
            right,
            right[..., :3],
            ShapeError,
            r"values are \[2, 2, 1, 3\], for these keys they must be \[2, 2, 1, 4\]",
        ),
        (right, tokens(2, rows=2), ShapeError, r"values are \[2, 2, 2, 4\]"),
        (
            right.double(),
            right,
            DTypeError,
            r"keys are torch\.float64 .* the cache holds float32 and float32",
        ),
        (right, right.half(), DTypeError, r"values torch\.float16"),
        (right, right.numpy(), ArgumentTypeError, r"values must be a torch\.Tensor, not ndarray"),
    ]
    for keys, values, error, message in wrong:
        with pytest.raises(error, match=message):
            cache.append(1, keys, values)
    cache.reset()
    with pytest.raises(ShapeError, match=r"4 rows given, the cache was made for at most 3 .*beams"):
        cache.append(1, tokens(1, rows=4), tokens(1, rows=4))
    assert (cache.rows, cache.is_empty) == (None, True)


def test_a_step_that_fails_half_way_leaves_no_checkpoint_to_be_made_and_is_undone_by_rollback():
    cache = torch_cache()
    step(cache, tokens(2))
    checkpoint = cache.checkpoint()
    cache.append(0, tokens(1), tokens(1))
    with pytest.raises(CheckpointError, match=r"layer 0 holds 3 tokens, another 2.*truncate\(2\)"):
        cache.checkpoint()
    cache.rollback(checkpoint)
    assert [layer.length for layer in cache.layers] == [2, 2]
    cache.append(0, tokens(1), tokens(1))
    cache.truncate(2)
    cache.checkpoint()


def test_why_a_checkpoint_is_dead():
    cache = torch_cache(batch=2)
    step(cache, tokens(4, rows=2))
    checkpoint = cache.checkpoint()
    cache.truncate(3)
    step(cache, tokens(2, rows=2))
    with pytest.raises(CheckpointError, match="the checkpoint at 4 tokens is dead"):
        cache.rollback(checkpoint)
    with pytest.raises(CheckpointError, match="another cache"):
        torch_cache().rollback(checkpoint)


# ------------------------------------------------------------------------------------------- bugs that were found, by name


@pytest.mark.parametrize("make", [host_cache, torch_cache])
def test_scratch_for_types_of_different_widths(make):
    """The largest region, 27 bytes of uint8, is no whole number of the float32 that pass through as well."""
    spec = KVSpec([LayerSpec(1, 9, 1, "uint8", value_dtype="float32")])
    cache = make(spec, batch=3, max_tokens=1)
    keys, values = np.arange(27, dtype=np.uint8).reshape(3, 1, 1, 9), np.ones((3, 1, 1, 1), np.float32)
    if make is torch_cache:
        keys, values = torch.from_numpy(keys), torch.from_numpy(values)
    cache.append(0, keys, values)
    cache.reorder([2, 1, 0])
    assert cache.layers[0].keys[0, 0, 0].tolist() == list(range(18, 27))


def test_scratch_on_an_arena_that_aligns_to_one_byte():
    spec = KVSpec([LayerSpec(1, 1, 1, "float64"), LayerSpec(1, 3, 3, "uint8")])
    for backend in ("host", "torch"):
        arena = Arena(4096, backend=backend, alignment=1)
        arena.alloc(1, "uint8")
        cache = KVCache(arena, spec, batch=3, max_tokens=1)
        keys = np.arange(3.0).reshape(3, 1, 1, 1)
        cache.append(0, *[torch.from_numpy(keys)] * 2 if backend == "torch" else [keys] * 2)
        cache.reorder([2, 1, 0])
        assert cache.layers[0].values.reshape(-1).tolist() == [2, 1, 0]


def test_what_append_returned_can_be_appended():
    """index_copy_ refuses a source in the memory that it writes to, if both are contiguous."""
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=1, dtype="float32")
    for make in (host_cache, torch_cache):
        cache = make(spec, max_tokens=2)
        keys = np.full((1, 1, 1, 1), 7, np.float32)
        held = cache.append(0, *[keys] * 2 if make is host_cache else [torch.from_numpy(keys)] * 2)
        keys, values = cache.append(0, *held)
        assert keys.reshape(-1).tolist() == values.reshape(-1).tolist() == [7, 7]


@pytest.mark.parametrize("make", [host_cache, torch_cache])
def test_rows_of_lists_of_different_lengths_are_a_typed_error(make):
    cache = make(batch=2)
    keys = tokens(1, rows=2)
    step(cache, keys.numpy() if make is host_cache else keys)
    with pytest.raises(ArgumentTypeError, match="rows must be row numbers"):
        cache.reorder([[0], [0, 1]])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_rows_may_be_unsigned(dtype):
    cache = torch_cache(batch=2)
    step(cache, tokens(1, rows=2))
    cache.reorder(torch.tensor([1, 0], dtype=dtype))
    assert cache.layers[1].keys[:, 0, 0, 0].tolist() == [100, 0]


def test_a_copied_cache_is_refused_by_a_typed_error():
    import copy

    cache = host_cache()
    with pytest.raises(NotCopyableError, match="KVCache"):
        copy.copy(cache)  # it would have shared its layers, and counted its rows for itself
    with pytest.raises(NotCopyableError, match="KVCache"):
        copy.deepcopy(cache)


def test_a_checkpoint_says_nothing_of_layers_that_were_added_later():
    """Rolling back to it would have shown tokens that were never written."""
    group = LayerGroup(batch=1, max_tokens=8)
    arena = Arena("64KiB")
    first = group.add(arena, SMALL.layers[0])
    keys = tokens(3).numpy()
    first.append(keys, keys)
    checkpoint = group.checkpoint()
    second = group.add(arena, SMALL.layers[0])
    second.append(keys[:, :, :1], keys[:, :, :1])
    with pytest.raises(CheckpointError, match=r"layer 1 holds 1 tokens, the checkpoint is at 3"):
        group.rollback(checkpoint)
    assert (first.length, second.length) == (3, 1)
    group.truncate(1)
    assert (first.length, second.length) == (1, 1)


def test_a_stale_cache_goes_back_as_a_whole():
    """The number of rows once raised after the lengths had been cut."""
    arena = Arena("64KiB", backend="torch")
    start = arena.checkpoint()
    cache = KVCache(arena, SMALL, batch=2, max_tokens=8)
    empty = cache.checkpoint()
    step(cache, tokens(2, rows=2))
    arena.rollback(start)
    with pytest.raises(StaleRegionError):
        step(cache, tokens(1, rows=2))
    cache.rollback(empty)
    assert (cache.length, cache.rows) == (0, None)
    cache.reset()
    with pytest.raises(StaleRegionError):
        step(cache, tokens(1, rows=1))
    assert cache.rows is None


@pytest.mark.parametrize("make", [host_cache, torch_cache])
def test_more_tokens_than_memory_is_the_arenas_own_error(make):
    """The index of all positions was once made first, and torch's RuntimeError came out."""
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=4, dtype="float32")
    arena = Arena("1MiB", backend="torch" if make is torch_cache else "host")
    with pytest.raises(OutOfMemoryError):
        KVCache(arena, spec, batch=1, max_tokens=10**14)
    assert arena.stats.used == 0


def test_what_a_newcomer_is_told():
    cache = host_cache(batch=2)
    assert repr(cache) == "KVCache(0 of 16 tokens, 0 of 2 rows, 2 layers, 4 096 bytes (4.00 KiB))"
    keys = tokens(3)
    advice = "the arena is of backend='host'; make it with backend='torch', or convert the array"
    with pytest.raises(ArgumentTypeError, match=f"keys must be a numpy.ndarray, not Tensor: {advice}"):
        cache.append(0, keys, keys)
    with pytest.raises(
        ArgumentTypeError, match=r"torch.Tensor, not ndarray: .*'torch'; make it with backend='host'"
    ):
        torch_cache().append(0, keys.numpy(), keys.numpy())
    step(cache, keys.numpy())
    assert repr(cache).startswith("KVCache(3 of 16 tokens, 1 of 2 rows")
    with pytest.raises(ArgumentTypeError, match=r"not int; truncate\(2\) cuts to that many tokens"):
        cache.rollback(2)
    with pytest.raises(ArgumentTypeError, match=r"not NoneType$"):
        cache.rollback(None)
    cache.reset()
    with pytest.raises(ShapeError, match=r"at most 2 .*; make it with batch of at least 3$"):
        step(cache, tokens(1, rows=3).numpy())


@pytest.mark.parametrize("chunks", [(1,) * 9, (3, 3, 1, 2), (12, 1, 2, 1)], ids=str)
@pytest.mark.parametrize(
    "bounds", [{}, {"window": 4}, {"window": 4, "sinks": 2}, {"window": 4, "slack": 2}, {"window": 4, "slack": 2, "sinks": 2}],
    ids=str,
)  # fmt: skip
def test_attend_sees_the_window_and_the_sinks_of_the_layer(bounds, chunks):
    spec = KVSpec([LayerSpec(2, 4, 4, "float32", **bounds)])
    cache = torch_cache(spec, batch=2)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 16, 4), torch.randn(2, 2, 16, 4), torch.randn(2, 2, 16, 4)
    at, of = torch.arange(16)[None], torch.arange(16)[:, None]
    seen = at <= of
    if bounds:
        seen &= (at > of - bounds["window"]) | (at < bounds.get("sinks", 0))
    scores = (q @ k.repeat_interleave(3, 1).mT) / 2
    wanted = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(3, 1)
    start = 0
    for n in chunks:
        new = slice(start, start + n)
        views = cache.append(0, k[:, :, new], v[:, :, new])
        found = [cache.attend(0, q[:, :, new], views)]
        if n < 12 or "slack" not in bounds:  # more than a bounded layer holds cannot be read again
            found.append(cache.attend(0, q[:, :, new]))
        for out in found:
            torch.testing.assert_close(out, wanted[:, :, new], atol=1e-5, rtol=0)
        start += n


def test_attend_refuses_what_it_cannot_take():
    with pytest.raises(BackendError, match="attend needs a torch arena"):
        host_cache().attend(0, np.ones((1, 2, 1, 4), np.float32))
    cache = torch_cache()
    step(cache, tokens(2))
    with pytest.raises(ShapeError, match=r"queries are \[1, 3, 1, 4\]"):
        cache.attend(0, torch.ones(1, 3, 1, 4))
    with pytest.raises(ArgumentError, match="holds only 2 tokens"):
        cache.attend(0, torch.ones(1, 2, 3, 4))
    with pytest.raises(DTypeError, match=r"queries are torch\.float64"):
        cache.attend(0, torch.ones(1, 2, 1, 4).double())
