"""Attention over pages against attention over whole tensors, and against torch's own paged attention."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuarena import Arena, CapacityError, DTypeError, ShapeError, StaleRegionError
from gpuarena.errors import (
    ArgumentError,
    ArgumentTypeError,
    AutogradError,
    LayerOrderError,
    SequenceError,
)
from gpuarena.kv import KVSpec, LayerSpec, SharedLayer
from gpuarena.kv.paged import PagedKVCache

torch = pytest.importorskip("torch")

LAYOUTS = ["per-head", "HND", "NHD"]
KV_HEADS, Q_HEADS, DIM = 2, 6, 4
LAYERS = {
    "full": LayerSpec(KV_HEADS, DIM, DIM, "float32"),
    "window": LayerSpec(KV_HEADS, DIM, DIM, "float32", window=5),
    "sinks": LayerSpec(KV_HEADS, DIM, DIM, "float32", window=4, sinks=3),
    "apart": LayerSpec(KV_HEADS, DIM, 3, "float32"),
}


def poisoned_cache(spec, *, num_pages=32, page_size=4, layout="per-head", gather_tokens=None):
    """A cache whose memory is NaN wherever nothing was written."""
    nbytes = PagedKVCache.arena_nbytes(
        spec, num_pages=num_pages, page_size=page_size, gather_tokens=gather_tokens
    )
    arena = Arena.from_buffer(torch.full((nbytes + 256,), 0xFF, dtype=torch.uint8))
    return PagedKVCache(
        arena, spec, num_pages=num_pages, page_size=page_size, layout=layout, gather_tokens=gather_tokens
    )


def whole(length, spec, seed):
    torch.manual_seed(seed)
    return torch.randn(1, KV_HEADS, length, DIM), torch.randn(1, KV_HEADS, length, spec.value_dim)


def fill(cache, sequence, keys, values):
    """Write tokens in pieces, so that pages of sequences lie between each other."""
    for layer in cache._core.owned:
        sequence.append(layer, keys, values)


def grow(cache, contents, pieces=(3, 1, 2)):
    """Return a sequence for each (keys, values), all grown in turns."""
    sequences = [cache.sequence() for _ in contents]
    turn = 0
    while any(s.length < k.shape[2] for s, (k, _) in zip(sequences, contents, strict=True)):
        n = pieces[turn % len(pieces)]
        turn += 1
        for sequence, (keys, values) in zip(sequences, contents, strict=True):
            start = sequence.length
            if start < keys.shape[2]:
                fill(cache, sequence, keys[:, :, start : start + n], values[:, :, start : start + n])
    return sequences


def expected(q, keys, values, spec, scale=None):
    """[q_heads, n, value_dim]: attention of the last n tokens over whole tensors, heads repeated, masked."""
    n, length = q.shape[1], keys.shape[2]
    at, of = torch.arange(length)[None, :], torch.arange(length - n, length)[:, None]
    mask = at <= of
    if spec.window is not None:
        mask &= (at > of - spec.window) | (at < spec.sinks)
    k, v = (
        keys[0].repeat_interleave(Q_HEADS // KV_HEADS, 0),
        values[0].repeat_interleave(Q_HEADS // KV_HEADS, 0),
    )
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)


def close(got, want):
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------ against whole tensors


@settings(max_examples=60)
@given(
    layout=st.sampled_from(LAYOUTS),
    kind=st.sampled_from(sorted(LAYERS)),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4) | st.integers(1, 20).map(lambda n: [n] * 3),
    n=st.integers(1, 6),
    page_size=st.sampled_from([1, 2, 4, 8]),
    gather_pages=st.integers(0, 8),
    scale=st.none() | st.just(0.3),
)
def test_attend_is_attention_over_the_whole_tensors(layout, kind, lengths, n, page_size, gather_pages, scale):
    spec = LAYERS[kind]
    n = min(n, *lengths)
    pages = sum(-(-length // page_size) for length in lengths)
    needed = max(-(-length // page_size) for length in lengths)
    cache = poisoned_cache(
        KVSpec([spec]),
        num_pages=pages,
        page_size=page_size,
        layout=layout,
        gather_tokens=(needed + gather_pages) * page_size if gather_pages else None,
    )
    contents = [whole(length, spec, seed) for seed, length in enumerate(lengths)]
    sequences = grow(cache, contents)
    q = torch.randn(len(lengths), Q_HEADS, n, DIM)
    for _ in range(2):  # the second from the plan of the first
        out = cache.attend(0, q, sequences, scale=scale)
        for row, (keys, values) in enumerate(contents):
            close(out[row], expected(q[row], keys, values, spec, scale))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", sorted(LAYERS))
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_lengths_at_the_borders_of_pages(layout, kind, length):
    spec = LAYERS[kind]
    cache = poisoned_cache(KVSpec([spec]), layout=layout)
    contents = [whole(length, spec, 1)]
    sequences = grow(cache, contents)
    for n in range(1, length + 1):
        q = torch.randn(1, Q_HEADS, n, DIM)
        close(cache.attend(0, q, sequences)[0], expected(q[0], *contents[0], spec))


def test_many_queries_are_not_folded(monkeypatch):
    from gpuarena.kv import attention

    monkeypatch.setattr(attention, "FOLD_MAX_QUERIES", 2)
    spec = LAYERS["full"]
    cache = poisoned_cache(KVSpec([spec]))
    contents = [whole(9, spec, 1), whole(7, spec, 2)]
    sequences = grow(cache, contents)
    q = torch.randn(2, Q_HEADS, 3, DIM)
    out = cache.attend(0, q, sequences)
    for row in range(2):
        close(out[row], expected(q[row], *contents[row], spec))


def test_a_window_gathers_its_own_pages_only():
    spec = LayerSpec(KV_HEADS, DIM, DIM, "float32", window=5, sinks=1)
    cache = poisoned_cache(KVSpec([spec]), gather_tokens=12)  # 1 page of the sink and 2 of the window
    contents = [whole(40, spec, 1)]
    sequences = grow(cache, contents)
    q = torch.randn(1, Q_HEADS, 1, DIM)
    close(cache.attend(0, q, sequences)[0], expected(q[0], *contents[0], spec))
    with pytest.raises(CapacityError, match="takes 16 tokens of scratch, there are 12: 4 too few") as caught:
        cache.attend(0, torch.randn(1, Q_HEADS, 5, DIM), sequences)
    assert (caught.value.unit, caught.value.missing, caught.value.requested) == ("tokens", 4, 16)


def test_one_sequence_given_twice_and_no_sequences():
    spec = LAYERS["full"]
    cache = poisoned_cache(KVSpec([spec]))
    contents = [whole(6, spec, 1)]
    (sequence,) = grow(cache, contents)
    q = torch.randn(2, Q_HEADS, 1, DIM)
    out = cache.attend(0, q, [sequence, sequence])
    for row in range(2):
        close(out[row], expected(q[row], *contents[0], spec))
    assert cache.attend(0, q[:0], []).shape == (0, Q_HEADS, 1, DIM)


def test_shared_layers_read_what_their_owner_holds():
    own = LAYERS["full"]
    cache = poisoned_cache(KVSpec([own, LAYERS["window"], SharedLayer(0)]))
    contents = [whole(9, own, 3)]
    sequences = grow(cache, contents)
    q = torch.randn(1, Q_HEADS, 1, DIM)
    assert torch.equal(cache.attend(2, q, sequences), cache.attend(0, q, sequences))
    assert not torch.equal(cache.attend(2, q, sequences), cache.attend(1, q, sequences))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_of_different_heads_share_a_plan(layout):
    specs = [LayerSpec(heads, DIM, DIM, "float32") for heads in (1, 2, 3)]
    cache = poisoned_cache(KVSpec(specs), layout=layout)
    sequence = cache.sequence()
    contents = [torch.randn(1, spec.kv_heads, 9, DIM) for spec in specs]
    for layer, keys in enumerate(contents):
        sequence.append(layer, keys, keys)
    q = torch.randn(1, 6, 1, DIM)
    for layer, keys in enumerate(contents):
        repeated = keys.repeat_interleave(6 // keys.shape[1], 1)
        want = torch.nn.functional.scaled_dot_product_attention(q, repeated, repeated)
        close(cache.attend(layer, q, [sequence]), want)


def test_a_plan_does_not_outlive_a_change_of_pages():
    spec = LAYERS["full"]
    cache = poisoned_cache(KVSpec([spec]))
    q = torch.randn(1, Q_HEADS, 1, DIM)
    for seed in range(4):  # the handle is dropped each time, and its id is used again
        contents = [whole(5, spec, seed)]
        (sequence,) = grow(cache, contents)
        close(cache.attend(0, q, [sequence])[0], expected(q[0], *contents[0], spec))
        fork = sequence.fork()
        sequence.truncate(4)
        more = torch.randn(1, KV_HEADS, 1, DIM)
        fill(cache, sequence, more, more)
        keys, values = (torch.cat([side[:, :, :4], more], 2) for side in contents[0])
        close(cache.attend(0, q, [sequence])[0], expected(q[0], keys, values, spec))
        close(cache.attend(0, q, [fork])[0], expected(q[0], *contents[0], spec))
        del sequence, fork


def test_after_swapping_attention_finds_the_new_pages():
    spec = LAYERS["full"]
    cache = poisoned_cache(KVSpec([spec]), num_pages=4)
    contents = [whole(6, spec, 1)]
    (sequence,) = grow(cache, contents)
    q = torch.randn(1, Q_HEADS, 1, DIM)
    cache.attend(0, q, [sequence])
    sequence.swap_out()
    grow(cache, [whole(7, spec, 2)])
    sequence.swap_in()
    assert sequence.pages == (2, 3)
    close(cache.attend(0, q, [sequence])[0], expected(q[0], *contents[0], spec))


# ---------------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_step_attends_from_its_new_tokens(layout, packed):
    spec = LAYERS["full"]
    cache = poisoned_cache(KVSpec([spec, spec]), layout=layout)
    contents = [whole(length + 2, spec, length) for length in (5, 8)]
    sequences = grow(cache, [(k[:, :, :-2], v[:, :, :-2]) for k, v in contents])
    q = torch.randn(2, Q_HEADS, 2, DIM)
    new = [torch.cat([side[:, :, -2:] for side in sides]) for sides in zip(*contents, strict=True)]
    if packed:
        new = [side.transpose(1, 2).flatten(0, 1) for side in new]
    with cache.step(sequences, 2) as step:
        with pytest.raises(LayerOrderError, match="layer 0 is read before"):
            step.attend(0, q)
        with pytest.raises(LayerOrderError, match="layer 0 is read before"):
            cache.attend(0, q, sequences)
        step.write(0, *new)
        out = step.attend(0, q.transpose(1, 2).flatten(0, 1)) if packed else step.attend(0, q)
        with pytest.raises(LayerOrderError, match="layer 1 is read before"):
            step.attend(1, q)
        step.write(1, *new)
    for row in range(2):
        mine = out[2 * row : 2 * row + 2].transpose(0, 1) if packed else out[row]
        close(mine, expected(q[row], *contents[row], spec))


@pytest.mark.parametrize("kind", sorted(LAYERS))
def test_a_ragged_step(kind):
    spec = LAYERS[kind]
    cache = poisoned_cache(KVSpec([spec]))
    counts = [3, 1, 4]
    contents = [whole(2 + n, spec, n) for n in counts]
    sequences = grow(cache, [(k[:, :, :2], v[:, :, :2]) for k, v in contents])
    keys, values = (
        torch.cat([side[0, :, 2:].transpose(0, 1) for side in sides]) for sides in zip(*contents, strict=True)
    )
    q = torch.randn(8, Q_HEADS, DIM)
    with cache.step(sequences, counts) as step:
        step.write(0, keys, values)
        out = step.attend(0, q, scale=0.7)
    assert out.shape == (8, Q_HEADS, spec.value_dim)
    first = 0
    for (k, v), n in zip(contents, counts, strict=True):
        mine = slice(first, first + n)
        close(out[mine].transpose(0, 1), expected(q[mine].transpose(0, 1), k, v, spec, 0.7))
        first += n


def test_forks_attend_to_their_own_tokens():
    spec = LAYERS["full"]
    cache = poisoned_cache(KVSpec([spec]))
    prompt = whole(6, spec, 0)
    (first,) = grow(cache, [prompt])
    beams = [first, *first.fork(2)]
    new = torch.randn(3, KV_HEADS, 1, DIM)
    q = torch.randn(3, Q_HEADS, 1, DIM)
    with cache.step(beams, 1) as step:
        step.write(0, new, new)
        out = step.attend(0, q)
    for row in range(3):
        keys, values = (torch.cat([side, new[row : row + 1]], 2) for side in prompt)
        close(out[row], expected(q[row], keys, values, spec))


@pytest.mark.parametrize("mode", ["inference first", "inference later", "no_grad"])
def test_inference_mode_and_normal_mode_mix(mode):
    spec = LAYERS["full"]
    context = torch.no_grad() if mode == "no_grad" else torch.inference_mode(mode == "inference first")
    with context:
        cache = poisoned_cache(KVSpec([spec]))
        contents = [whole(5, spec, 1)]
        (sequence,) = grow(cache, contents)
        other = cache.sequence()
        fill(cache, other, *whole(3, spec, 2))
        q = torch.randn(2, Q_HEADS, 1, DIM)
        before = cache.attend(0, q, [sequence, other]).clone()
    with torch.inference_mode(mode == "inference later"):
        q = torch.randn(2, Q_HEADS, 1, DIM).copy_(q)
        close(cache.attend(0, q, [sequence, other]), before.clone())
        more = torch.zeros(1, KV_HEADS, 1, DIM)
        fork = sequence.fork()
        fill(cache, fork, more, more)
        close(cache.attend(0, q, [sequence, other]), before.clone())


# ------------------------------------------------------------------------------- torch's own paged attention, and ours


def quiet_flex(*args, **options):
    from torch.nn.attention.flex_attention import flex_attention

    with warnings.catch_warnings():  # it warns that it was not compiled
        warnings.simplefilter("ignore")
        return flex_attention(*args, **options)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("lengths", [(5, 12), (8, 8), (4, 1 + 15)])
def test_against_torch_paged_attention(n, lengths):
    experimental = pytest.importorskip("torch.nn.attention.experimental._paged_attention")
    from torch.nn.attention.flex_attention import create_block_mask

    size, n_pages, spec = 4, 16, LAYERS["full"]
    contents = [whole(length, spec, length) for length in lengths]
    oracle = experimental.PagedAttention(n_pages, size, len(lengths), device="cpu")
    k_pool = torch.zeros(1, KV_HEADS, n_pages * size, DIM)
    v_pool = torch.zeros_like(k_pool)
    for row, (keys, values) in enumerate(contents):
        index = torch.tensor([row])
        oracle.reserve(index, torch.tensor([lengths[row]]))
        oracle.assign(index, torch.arange(lengths[row])[None], keys, values, k_pool, v_pool)
    first = torch.tensor(lengths) - n

    def causal(b, h, query, key):
        return key <= first[b] + query

    longest = max(-(-length // size) for length in lengths) * size
    logical = create_block_mask(causal, len(lengths), None, n, longest, device="cpu", BLOCK_SIZE=(128, size))
    mask = oracle.convert_logical_block_mask(logical, kv_len=torch.tensor(lengths))
    q = torch.randn(len(lengths), Q_HEADS, n, DIM)
    want = quiet_flex(q, k_pool, v_pool, block_mask=mask, enable_gqa=True)
    for layout in LAYOUTS:
        cache = poisoned_cache(KVSpec([spec]), layout=layout)
        close(cache.attend(0, q, grow(cache, contents)), want)


@pytest.mark.parametrize("layout", ["per-head", "NHD"])
@pytest.mark.parametrize("kind", ["full", "window", "sinks"])
@pytest.mark.parametrize("n", [1, 3])
def test_flex_attend_is_attend(layout, kind, n):
    spec = LAYERS[kind]
    cache = poisoned_cache(KVSpec([spec]), layout=layout, num_pages=8)
    for pages in (cache.keys(0), cache.values(0)):
        pages.zero_()  # uncompiled it multiplies hidden values by 0, and 0 times NaN is NaN
    contents = [whole(length, spec, length) for length in (9, 4, 11)]
    sequences = grow(cache, contents)
    q = torch.randn(3, Q_HEADS, n, DIM)
    close(cache.flex_attend(0, q, sequences, 0.3, kernel=quiet_flex), cache.attend(0, q, sequences, 0.3))
    assert cache.flex_attend(0, q[:0], [], kernel=quiet_flex).shape == (0, Q_HEADS, n, DIM)


def test_flex_attend_of_a_layout_it_cannot_read():
    cache = poisoned_cache(KVSpec([LAYERS["full"]]), layout="HND")
    (sequence,) = grow(cache, [whole(2, LAYERS["full"], 1)])
    with pytest.raises(ArgumentError, match="needs the layout 'per-head' or 'NHD'"):
        cache.flex_attend(0, torch.ones(1, Q_HEADS, 1, DIM), [sequence])


# --------------------------------------------------------------------------------------------------------------- memory


def allocated_nbytes(function):
    """Bytes that `function` allocates on the CPU, inside of kernels too, freed or not."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        function()
    records = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return sum(max(record.nbytes(), 0) for record in records)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attend_allocates_nothing_of_the_size_of_the_keys(layout):
    spec = LayerSpec(KV_HEADS, 64, 64, "float32")
    cache = poisoned_cache(KVSpec([spec]), num_pages=64, page_size=16, layout=layout)
    sequences = []
    for length in (500, 400):
        sequence = cache.sequence()
        new = torch.randn(1, KV_HEADS, length, 64)
        fill(cache, sequence, new, new)
        sequences.append(sequence)
    q = torch.randn(2, Q_HEADS, 1, 64)
    cache.attend(0, q, sequences)
    gathered = 2 * 512 * KV_HEADS * 64 * 4 * 2
    assert allocated_nbytes(lambda: cache.attend(0, q, sequences)) < gathered / 20


def test_writing_one_token_a_sequence_allocates_nothing():
    spec = LAYERS["full"]
    cache = poisoned_cache(KVSpec([spec]))
    sequences = grow(cache, [whole(4, spec, 1), whole(5, spec, 2)])
    new = torch.randn(2, 1, KV_HEADS, DIM).transpose(1, 2)
    with cache.step(sequences, 1) as step:
        step._slots.index(cache._core.layers[0], 2)  # that is made once, for all layers
        assert allocated_nbytes(lambda: step.write(0, new, new)) == 0


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("q", "error", "message"),
    [
        (lambda q: q[:1], ShapeError, r"has to be \[2 sequences"),
        (lambda q: q[:, :5], ShapeError, "a multiple of 2 heads"),
        (lambda q: q[..., :3], ShapeError, "layer 0: q is"),
        (lambda q: q[0], ShapeError, "layer 0: q is"),
        (lambda q: q.double(), DTypeError, "takes one dtype"),
        (lambda q: q.numpy(), ArgumentTypeError, "q must be a torch.Tensor"),
        (lambda q: q.expand(2, 6, 4, 4), ShapeError, "4 queries for a sequence of 3 tokens"),
        (lambda q: q[:, :, :0], ShapeError, "0 queries"),
        (lambda q: q.clone().requires_grad_(), AutogradError, "q require grad"),
    ],
)
@pytest.mark.parametrize("flex", [False, True])
def test_what_is_no_query(q, error, message, flex):
    spec = LAYERS["full"]
    cache = poisoned_cache(KVSpec([spec]))
    sequences = grow(cache, [whole(5, spec, 1), whole(3, spec, 2)])
    call = cache.flex_attend if flex else cache.attend
    with pytest.raises(error, match=message):
        call(0, q(torch.randn(2, Q_HEADS, 1, DIM)), sequences)


def test_attention_that_cannot_be():
    spec = KVSpec(
        [
            LayerSpec(KV_HEADS, DIM, 0, "float32"),
            LayerSpec(KV_HEADS, DIM, DIM, "float32", value_dtype="float64"),
        ]
    )
    cache = poisoned_cache(spec)
    sequence = cache.sequence()
    sequence.append(0, torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 0))
    sequence.append(1, torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4, dtype=torch.float64))
    q = torch.ones(1, Q_HEADS, 1, DIM)
    with pytest.raises(ArgumentError, match="layer 0 has no values"):
        cache.attend(0, q, [sequence])
    with pytest.raises(DTypeError, match="values of float64"):
        cache.attend(1, q, [sequence])
    with pytest.raises(ArgumentError, match="layer 2"):
        cache.attend(2, q, [sequence])
    with pytest.raises(SequenceError, match="another cache"):
        poisoned_cache(spec).attend(0, q, [sequence])
    with pytest.raises(ArgumentTypeError, match="list of sequences"):
        cache.attend(0, q, 7)


def test_without_scratch_there_is_no_attend():
    spec = LAYERS["full"]
    cache = poisoned_cache(KVSpec([spec]), gather_tokens=0)
    (sequence,) = grow(cache, [whole(2, spec, 1)])
    assert cache.stats.scratch_nbytes == 0
    with pytest.raises(ArgumentError, match="make the cache with gather_tokens"):
        cache.attend(0, torch.ones(1, Q_HEADS, 1, DIM), [sequence])


def test_attend_after_a_rollback_of_the_arena():
    spec = LAYERS["full"]
    arena = Arena("1MiB", backend="torch", device="cpu")
    start = arena.checkpoint()
    cache = PagedKVCache(arena, KVSpec([spec]), num_pages=4)
    (sequence,) = grow(cache, [whole(2, spec, 1)])
    arena.rollback(start)
    q = torch.ones(1, Q_HEADS, 1, DIM)
    for call in (lambda: cache.attend(0, q, [sequence]), lambda: cache.flex_attend(0, q, [sequence])):
        with pytest.raises(StaleRegionError):
            call()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, Q_HEADS, 1, DIM), "the step has 2 sequences"),
        ((2, Q_HEADS, 2, DIM), "each sequence gets 1 tokens"),
        ((3, Q_HEADS, DIM), "the step has 2 new tokens"),
        ((2, DIM), "it has to be"),
    ],
)
def test_queries_that_are_not_of_the_step(shape, message):
    spec = LAYERS["full"]
    cache = poisoned_cache(KVSpec([spec]))
    sequences = grow(cache, [whole(5, spec, 1), whole(3, spec, 2)])
    new = torch.ones(2, KV_HEADS, 1, DIM)
    with cache.step(sequences, 1) as step:
        step.write(0, new, new)
        with pytest.raises(ShapeError, match=message):
            step.attend(0, torch.ones(shape))
