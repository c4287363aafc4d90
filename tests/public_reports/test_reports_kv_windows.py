"""What KV caches were reported for around sliding windows: the step at which the window is full, wraps and rewinds.

The oracle is a list of positions: token p carries the number p, and a query at p sees the sinks and the last `WINDOW`.
"""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")

from gpuarena import Arena  # noqa: E402
from gpuarena.errors import ArgumentError, CapacityError, CheckpointError, ShapeError  # noqa: E402
from gpuarena.kv import KVCache, KVSpec, LayerSpec  # noqa: E402
from gpuarena.kv.lanes import LaneCache  # noqa: E402
from gpuarena.kv.paged import PagedKVCache  # noqa: E402

HEADS, DIM = 2, 4
RING_DIM = 512  # a token takes 8 KiB, so that a granule of 64 KiB has eight slots
WINDOW, SLACK, SINKS = 5, 3, 2
MAX_TOKENS = 64
OPTIONS = {
    "history": {},
    "history with sinks": {"sinks": SINKS},
    "bounded": {"slack": SLACK},
    "bounded with sinks": {"slack": SLACK, "sinks": SINKS},
    "ring": {"slack": SLACK},
}
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"))
    if kind == "ring"
    else kind
    for kind in OPTIONS
]
BOUNDED = [kind for kind in KINDS if kind not in ("history", "history with sinks")]


def spec_of(kind):
    dim = RING_DIM if kind == "ring" else DIM
    return LayerSpec(HEADS, dim, dim, "float32", window=WINDOW, **OPTIONS[kind])


def make(kind, *others):
    spec = KVSpec([spec_of(kind), *others])
    nbytes = 2 * spec.arena_nbytes(1, MAX_TOKENS)
    if kind == "ring":
        return KVCache(
            Arena(nbytes, backend="virtual:torch"), spec, batch=1, max_tokens=MAX_TOKENS, rings=True
        )
    memory = torch.full((nbytes + 512,), 0xFF, dtype=torch.uint8)  # NaN wherever nothing was written
    return KVCache(Arena.from_buffer(memory), spec, batch=1, max_tokens=MAX_TOKENS)


def tokens(*numbers, heads=HEADS, dim=DIM):
    """[1, heads, n, dim], each token its number, and an eighth more in the second head."""
    column = torch.tensor(numbers, dtype=torch.float32)[None, None, :, None]
    return (column + torch.arange(heads)[None, :, None, None] / 8).expand(1, heads, -1, dim).contiguous()


def append(cache, *numbers):
    """Append to every layer; return what the first one gives back."""
    pairs = []
    for layer, spec in enumerate(cache.spec.layers):
        new = tokens(*numbers, heads=spec.kv_heads, dim=spec.key_dim)
        pairs.append(cache.append(layer, new, -new))
    return pairs[0]


def numbers_of(pair):
    """The numbers of the tokens, after a look at every element."""
    keys, values = pair
    found = keys[0, 0, :, 0].tolist()
    assert torch.equal(keys, tokens(*found, heads=keys.shape[1], dim=keys.shape[3]))
    assert torch.equal(values, -keys)
    return [int(number) for number in found]


def seen(cache, pair, n_tokens=1, layer=0):
    """The numbers that each of the last queries sees, of those in `pair`."""
    numbers = numbers_of(pair)
    mask = cache.mask(layer, n_tokens)
    assert mask.shape == (n_tokens, len(numbers))
    return [[number for number, may in zip(numbers, row, strict=True) if may] for row in mask.tolist()]


def visible(history, position, kind):
    """The oracle: what the query at `position` sees."""
    sinks = OPTIONS[kind].get("sinks", 0)
    return [
        number
        for place, number in enumerate(history[: position + 1])
        if place < sinks or place > position - WINDOW
    ]


def check(cache, history, kind, n_tokens=1):
    wanted = [visible(history, p, kind) for p in range(len(history) - n_tokens, len(history))]
    assert seen(cache, cache.read(0, n_tokens), n_tokens) == wanted


# huggingface/transformers#37574: the update is wrong in the very step in which the length reaches the window
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_prompt", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 1])
def test_huggingface_transformers_37574_every_length_around_the_window(kind, n_prompt):
    cache = make(kind)
    history = list(range(n_prompt))
    pair = append(cache, *history)
    assert seen(cache, pair, n_prompt) == [visible(history, p, kind) for p in range(n_prompt)]
    for number in range(n_prompt, n_prompt + 2 * (WINDOW + SLACK) + 1):
        history.append(number)
        pair = append(cache, number)
        assert seen(cache, pair) == [visible(history, number, kind)]
        if not OPTIONS[kind].get("sinks"):
            assert numbers_of(pair) == visible(history, number, kind), "no more than the window is shown"
        check(cache, history, kind)


# huggingface/transformers#47708: the place of a token is off by one where a window of pages wraps around
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_huggingface_transformers_47708_a_ring_wraps_at_the_right_slot():
    n_slots, slot_nbytes = WINDOW + SLACK, HEADS * 2 * RING_DIM * 4
    cache = make("ring")
    base = append(cache, 0)[0].data_ptr()
    history = [0]
    for n_new in (1, 2, 3, 4, 1, 4, 3, 2, 4, 4, 1, 1, 4):
        new = range(len(history), len(history) + n_new)
        history.extend(new)
        keys, values = append(cache, *new)
        first = max(0, new[0] - WINDOW + 1)
        assert keys.data_ptr() == base + first % n_slots * slot_nbytes
        assert numbers_of((keys, values)) == history[first:]


# ml-explore/mlx-lm#1914: an update of several tokens never evicts
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [(4, 4, 4, 4, 4), (5, 1, 3, 2, 4, 4), (1, 4, 4, 4, 4, 3), (13, 4, 3)])
def test_ml_explore_mlx_lm_1914_several_tokens_at_once_are_as_one_by_one(kind, chunks):
    at_once, one_by_one = make(kind), make(kind)
    history = []
    for n_new in chunks:
        new = range(len(history), len(history) + n_new)
        history.extend(new)
        pair = append(at_once, *new)
        assert seen(at_once, pair, n_new) == [visible(history, p, kind) for p in new]
        for number in new:
            append(one_by_one, number)
        check(at_once, history, kind)
        check(one_by_one, history, kind)
        if "slack" in OPTIONS[kind]:
            most = OPTIONS[kind].get("sinks", 0) + WINDOW + SLACK
            n_held = at_once.layers[0].keys.shape[2]
            assert n_held <= most
            assert n_held == min(len(history), most) or len(history) > n_new, "the end of a prompt is held"
            assert n_held >= min(len(history), WINDOW)


# ml-explore/mlx-lm#1776: trimming a window that has wrapped around gives a negative index
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [WINDOW + SLACK, 2 * WINDOW + SLACK, 27])
def test_ml_explore_mlx_lm_1776_a_cut_after_wrapping_is_exact_or_refused(kind, length):
    n_refused = 0
    for keep in range(length + 1):
        cache = make(kind)
        history = []
        for number in range(length):
            append(cache, number)
            history.append(number)
        try:
            cache.truncate(keep)
        except ArgumentError:
            n_refused += 1
            assert "slack" in OPTIONS[kind]
            check(cache, history, kind)  # and nothing has changed
            keep = length
        del history[keep:]
        assert cache.length == keep
        for number in range(100, 100 + WINDOW + SLACK):
            history.append(number)
            append(cache, number)
            check(cache, history, kind)
    if "slack" in OPTIONS[kind]:
        assert n_refused <= length - 1, "the last length and none at all can always be kept"


# ml-explore/mlx-swift-lm#424: once wrapped the cache cannot be trimmed, and a rejected draft stays without a word
@pytest.mark.parametrize("kind", BOUNDED)
def test_ml_explore_mlx_swift_lm_424_a_draft_is_taken_back_or_the_refusal_is_loud(kind):
    cache = make(kind)
    history = list(range(2 * WINDOW))
    append(cache, *history)
    for _ in range(4):  # drafts of up to slack + 1 tokens that come at once always go back
        mark = cache.checkpoint()
        append(cache, *range(90, 90 + SLACK + 1))
        cache.rollback(mark)
        assert cache.length == len(history)
        history.append(len(history))
        assert seen(cache, append(cache, history[-1])) == [visible(history, history[-1], kind)]
    mark = cache.checkpoint()
    for number in range(WINDOW + SLACK):
        append(cache, number + 200)
    history.extend(range(200, 200 + WINDOW + SLACK))
    with pytest.raises(CheckpointError, match="bounded window"):
        cache.rollback(mark)
    assert cache.length == len(history)
    check(cache, history, kind)


# microsoft/onnxruntime-genai#2334: a rewind to tokens that the window has given up goes through
@pytest.mark.parametrize("kind", BOUNDED)
def test_microsoft_onnxruntime_genai_2334_a_rewind_to_what_is_gone_changes_no_layer(kind):
    cache = make(kind, LayerSpec(1, 4, 4, "float32"))
    history = list(range(30))
    for number in history:
        append(cache, number)
    floor = cache.layers[0].floor
    assert (
        30 - WINDOW - SLACK <= floor - WINDOW + 1 <= 30 - WINDOW + 1
    )  # whole windows are held from there on
    for keep in (1, WINDOW, floor - 1):
        with pytest.raises(ArgumentError, match="bounded window"):
            cache.truncate(keep)
        assert [layer.length for layer in cache.layers] == [30, 30]
    check(cache, history, kind)
    assert numbers_of(cache.read(1)) == history
    cache.truncate(floor)
    assert numbers_of(cache.read(1)) == history[:floor]
    assert seen(cache, append(cache, floor)) == [visible(history, floor, kind)]


# ollama/ollama#14912: after wrapping, what is put together or trimmed comes in the order of the slots
@pytest.mark.parametrize("kind", KINDS)
def test_ollama_ollama_14912_the_order_is_that_of_the_tokens(kind):
    cache = make(kind)
    for length in range(1, 31):
        append(cache, length - 1)
        layer = cache.layers[0]
        held = [number for run in layer.positions for number in run]
        assert held == sorted(held)
        assert held[-min(WINDOW, length) :] == list(range(length))[-WINDOW:]
        assert numbers_of((layer.keys, layer.values)) == held
    nbytes = 2 * cache.spec.arena_nbytes(1, MAX_TOKENS)
    copy = cache.copy_to(Arena(nbytes, backend="torch"))
    history = list(range(30))
    for number in (70, 71, 72, 73, 74, 75, 76, 77, 78):
        history.append(number)
        assert seen(copy, append(copy, number)) == [visible(history, len(history) - 1, kind)]


# tenstorrent/tt-metal#45193: absolute positions on a table of the window's length write into block 0, another user's
def test_tenstorrent_tt_metal_45193_no_position_leads_into_a_page_of_another():
    size, spec = 4, KVSpec([LayerSpec(1, 4, 4, "float32", window=8)])
    nbytes = PagedKVCache.arena_nbytes(spec, num_pages=16, page_size=size)
    cache = PagedKVCache(Arena(nbytes, backend="torch"), spec, num_pages=16, page_size=size)
    victim, writer = cache.sequence(), cache.sequence()
    victim.append(0, tokens(*range(8), heads=1, dim=4), -tokens(*range(8), heads=1, dim=4))
    assert 0 in victim.pages
    for position in range(40):
        new = tokens(100 + position, heads=1, dim=4)
        with cache.step([writer], 1) as step:
            (slot,) = cache.slot_mapping(step).tolist()
            step.write(0, new, -new)
        assert slot == writer.pages[position // size] * size + position % size
        assert slot // size not in victim.pages
        n_pages = position // size + 1
        if n_pages > 2:  # a table that only has room for the window
            with pytest.raises(ShapeError, match="width is 2") as caught:
                cache.block_table([writer], width=2)
            assert (caught.value.needed, caught.value.width) == (n_pages, 2)
    assert victim.read(0)[0][0, :, 0].tolist() == list(range(8))
    assert writer.read(0)[0][0, :, 0].tolist() == list(range(100, 140))
    q = torch.ones(1, 1, 1, 4)
    scores = tokens(*range(132, 140), heads=1, dim=4)[0, 0] @ q[0, 0, 0] * 0.01
    wanted = torch.softmax(scores, 0) @ -tokens(*range(132, 140), heads=1, dim=4)[0, 0]
    torch.testing.assert_close(cache.attend(0, q, [writer], 0.01)[0, 0, 0], wanted)


# Blaizzy/mlx-vlm#2031, ml-explore/mlx-lm#1673: trimming counts from the allocated width, and valid tokens are dropped
@pytest.mark.parametrize("backend", ["torch", "virtual:torch"])
def test_blaizzy_mlx_vlm_2031_a_cut_counts_tokens_and_not_slots(backend):
    if backend != "torch" and sys.platform != "linux":
        pytest.skip("needs Linux")
    spec = KVSpec([LayerSpec(1, 4, 4, "float32")])
    for length in (3, 255, 256, 257):  # slots come in larger numbers
        cache = KVCache(Arena("8MiB", backend=backend), spec, batch=1, max_tokens=1024)
        append(cache, *range(length))
        cache.truncate(length - 2)
        assert numbers_of(cache.read(0)) == list(range(length - 2))
        lanes = LaneCache(Arena("8MiB", backend=backend), spec, lanes=2, max_tokens=1024)
        for lane, n in enumerate((length, 400)):
            lanes.append(
                0, tokens(*range(n), heads=1, dim=4), -tokens(*range(n), heads=1, dim=4), lanes=[lane]
            )
        lanes.truncate(0, length - 2)
        keys, values = lanes.read(0, [0])
        assert numbers_of((keys, values)) == list(range(length - 2))
        assert lanes.lengths == (length - 2, 400)


# ml-explore/mlx-lm#1673: the same in a window, whose slots are fewer than its tokens
@pytest.mark.parametrize("kind", BOUNDED)
def test_ml_explore_mlx_lm_1673_a_cut_in_a_window_counts_tokens_and_not_slots(kind):
    cache = make(kind)
    history = list(range(4 * WINDOW))
    append(cache, *history)
    with pytest.raises(CapacityError):  # more than fits beside the window is refused before anything moves
        append(cache, *range(SLACK + 2))
    check(cache, history, kind)
    keep = len(history) - SLACK
    cache.truncate(keep)
    assert cache.length == keep
    assert seen(cache, append(cache, keep)) == [visible(history, keep, kind)]
