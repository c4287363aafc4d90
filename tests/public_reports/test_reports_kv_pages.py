"""What paged caches were reported for: prefixes that are shared, pages that are freed twice or never, fragmentation.

The oracle is a list of token ids, and a stand-in for a model in which every key depends on all ids up to its own.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from gpuarena import Arena, CapacityError  # noqa: E402
from gpuarena.errors import SequenceError  # noqa: E402
from gpuarena.kv import KVSpec  # noqa: E402
from gpuarena.kv.contiguous import ContiguousKVCache  # noqa: E402
from gpuarena.kv.paged import PagedKVCache  # noqa: E402

LAYERS, HEADS, DIM, SIZE, PAGES = 2, 2, 4, 4, 16
SPEC = KVSpec.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="float32")


def make(spec=SPEC):
    """A cache in memory that is NaN wherever nothing was written."""
    nbytes = PagedKVCache.arena_nbytes(spec, num_pages=PAGES, page_size=SIZE)
    memory = torch.full((nbytes + 512,), 0xFF, dtype=torch.uint8)
    return PagedKVCache(Arena.from_buffer(memory), spec, num_pages=PAGES, page_size=SIZE)


@pytest.fixture
def cache():
    return make()


def computed(ids, start=0):
    """[1, heads, n, dim]: what a model computes for the tokens from `start` on."""
    state, states = 1, []
    for token in ids:
        state = (state * 31 + token) % 65521
        states.append(state)
    column = torch.tensor(states[start:], dtype=torch.float32)[None, None, :, None]
    return column + torch.arange(HEADS)[None, :, None, None] / 4 + torch.arange(DIM) / 32


def compute(sequence, ids):
    """Append what the sequence lacks of `ids`."""
    new = computed(ids, sequence.length)
    for layer in range(LAYERS):
        sequence.append(layer, new + layer, -new - layer)


def holds(sequence, ids):
    wanted = computed(ids)[0]
    for layer in range(LAYERS):
        keys, values = sequence.read(layer)
        if not (torch.equal(keys, wanted + layer) and torch.equal(values, -wanted - layer)):
            return False
    return sequence.length == len(ids)


def serve(cache, ids):
    """Answer a prompt: look it up, compute the rest, publish it."""
    sequence = cache.match(ids)
    compute(sequence, ids)
    sequence.publish(ids)
    return sequence


def counted(cache, live):
    """The figures of a cache, counted anew from its live sequences."""
    users = Counter(page for sequence in live for page in sequence.pages)
    filled = {}
    for sequence in live:
        for number, page in enumerate(sequence.pages):
            filled[page] = max(filled.get(page, 0), min(SIZE, sequence.length - number * SIZE))
    stored = sum(filled.values())
    return {
        "pages_used": len(users),
        "tokens_stored": stored,
        "tokens_wasted": len(users) * SIZE - stored,
        "n_sequences": len(live),
    }


def check_figures(cache, live):
    stats = cache.stats
    assert {name: getattr(stats, name) for name in counted(cache, live)} == counted(cache, live)
    assert stats.pages_free + stats.pages_cached + stats.pages_used == PAGES
    assert cache.available == stats.pages_free + stats.pages_cached == PAGES - stats.pages_used


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------------------- prefixes


# vllm-project/vllm#11186 (and 9972), LMCache/LMCache#3322: all of a prompt is found, and no token is left to compute
@pytest.mark.parametrize("n", [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 1])
def test_vllm_project_vllm_11186_a_full_hit_leaves_a_token_to_compute(cache, n):
    ids = list(range(10, 10 + n))
    serve(cache, ids).free()
    for _ in range(2):
        again = cache.match(ids)
        assert again.length == (n - 1) // SIZE * SIZE < n
        compute(again, ids)
        assert holds(again, ids)
        again.publish(ids)


# vllm-project/vllm#43569: a hash is registered before keys and values are written, and others read what is not there
def test_vllm_project_vllm_43569_nothing_is_found_before_it_is_written(cache):
    ids = list(range(8))
    first, new = cache.sequence(), computed(ids)
    with cache.step([first], 8) as step:
        for layer in range(LAYERS):
            with pytest.raises(SequenceError, match="a step is open"):
                first.publish(ids)
            assert cache.match([*ids, 9]).length == 0
            step.write(layer, new + layer, -new - layer)
    assert cache.match([*ids, 9]).length == 0, "written, but not published"
    assert first.publish(ids) == 8
    hit = cache.match([*ids, 9])
    assert holds(hit, ids)

    def fails():
        with cache.step([hit], 4) as step:
            step.write(0, computed([*ids, 1, 2, 3, 4], 8), computed([*ids, 1, 2, 3, 4], 8))
            1 / 0

    with pytest.raises(ZeroDivisionError):  # and what fails is not published either
        fails()
    assert holds(hit, ids)
    assert cache.match([*ids, 1, 2, 3, 4, 5]).length == 8


# GeeeekExplorer/nano-vllm#163, ovg-project/kvcached#362: the hash of a block that was given to another is still found
def test_geeeekexplorer_nano_vllm_163_a_page_that_was_given_away_is_not_found(cache):
    ids = list(range(8))
    serve(cache, ids).free()
    hit = cache.match([*ids, 0])
    assert holds(hit, ids)
    hit.free()
    greedy, other = cache.sequence(), [7] * PAGES * SIZE
    compute(greedy, other)
    assert cache.match([*ids, 0]).length == 0
    assert holds(greedy, other)
    greedy.publish(other)
    greedy.free()
    hit = cache.match([*other, 0])
    assert holds(hit, other)
    assert cache.match([*ids, 0]).length == 0


# GeeeekExplorer/nano-vllm#219: of two equal prompts in one step the second reads what the first has not written yet
def test_geeeekexplorer_nano_vllm_219_two_equal_prompts_in_one_step(cache):
    ids = list(range(9))
    rows = [cache.match(ids) for _ in range(2)]
    assert [row.length for row in rows] == [0, 0]
    new = computed(ids).expand(2, -1, -1, -1)
    with cache.step(rows, 9) as step:
        assert not set(rows[0].pages) & set(rows[1].pages)
        for layer in range(LAYERS):
            step.write(layer, new + layer, -new - layer)
    assert [row.publish(ids) for row in rows] == [8, 8]
    assert rows[0].pages[:2] == rows[1].pages[:2], "one copy is enough from here on"
    assert all(holds(row, ids) for row in rows)
    compute(rows[0], [*ids, 50, 51])
    assert holds(rows[1], ids)
    check_figures(cache, rows)


# GeeeekExplorer/nano-vllm#210, #211, ROCm/ATOM#902: the counters of a sequence are stale after blocks were allocated
def test_geeeekexplorer_nano_vllm_210_the_figures_are_right_after_every_call(cache):
    numbers, live, histories = random.Random(210), [], []
    for _ in range(200):
        action = numbers.randrange(6)
        if action == 0 or not live:
            ids = [numbers.randrange(2) for _ in range(numbers.randint(1, 10))]
            if -(-len(ids) // SIZE) > cache.available:
                continue
            hit = cache.match(ids)
            assert hit.length < len(ids)
            live.append(hit)
            check_figures(cache, live)
            compute(hit, ids)
            histories.append(ids)
        else:
            which = numbers.randrange(len(live))
            sequence, ids = live[which], histories[which]
            if action == 1:
                live.append(sequence.fork())
                histories.append(list(ids))
            elif action == 2 and cache.would_fit(3, sequence):
                ids.extend(numbers.randrange(2) for _ in range(3))
                compute(sequence, ids)
            elif action == 3:
                sequence.truncate(numbers.randint(1, len(ids)))
                del ids[sequence.length :]
            elif action == 4:
                sequence.publish(ids)
            else:
                sequence.free()
                del live[which], histories[which]
        check_figures(cache, live)
        assert [sequence.length for sequence in live] == [len(ids) for ids in histories]
        assert all(holds(sequence, ids) for sequence, ids in zip(live, histories, strict=True))
    assert cache.stats.pages_hit
    assert cache.stats.pages_copied


# vllm-project/vllm#7003, #7018: in a batch with a hit the block tables of those without one are zero
@pytest.mark.parametrize("hit_first", [True, False])
def test_vllm_project_vllm_7003_a_miss_beside_a_hit_has_its_own_table(cache, hit_first):
    prompts = [[1, 2, 3, 4, 5], [9] * 6, [1, 2, 3, 4, 6, 7]]
    serve(cache, prompts[0])
    order = prompts[1:] if not hit_first else prompts[:0:-1]
    rows = [cache.match(ids) for ids in order]
    assert sorted(row.length for row in rows) == [0, 4]
    rests = [ids[row.length :] for row, ids in zip(rows, order, strict=True)]
    new = torch.cat(
        [computed(ids, row.length)[0].swapaxes(0, 1) for row, ids in zip(rows, order, strict=True)]
    )
    with cache.step(rows, [len(rest) for rest in rests]) as step:
        table, lengths = cache.block_table(rows)
        slots = cache.slot_mapping(step).tolist()
        for layer in range(LAYERS):
            step.write(layer, new + layer, -new - layer)
    assert [tuple(pages) for pages in table.tolist()] == [row.pages for row in rows]
    assert lengths.tolist() == [6, 6]
    wanted = [
        row.pages[place // SIZE] * SIZE + place % SIZE
        for row, rest in zip(rows, rests, strict=True)
        for place in range(6 - len(rest), 6)
    ]
    assert slots == wanted
    assert len({row.pages[1] for row in rows}) == 2
    assert all(holds(row, ids) for row, ids in zip(rows, order, strict=True))


# LMCache/LMCache#443: a block in the middle of a prefix is evicted, and what is behind it can never be used again
def test_lmcache_lmcache_443_a_prefix_is_evicted_from_its_end(cache):
    ids = list(range(12))
    serve(cache, ids).free()
    for n_evicted in range(4):
        hit = cache.match([*ids, 0])
        assert hit.length == 12 - n_evicted * SIZE
        assert holds(hit, ids[: hit.length])
        hit.free()
        greedy = cache.sequence()
        compute(greedy, [99] * (PAGES - 3 + n_evicted + (n_evicted < 3)) * SIZE)
        greedy.free()


# ml-explore/mlx-lm#1547: a hit in the prompt cache copies all of it, which takes seconds for a long prompt
def test_ml_explore_mlx_lm_1547_a_hit_and_a_fork_copy_nothing(cache):
    ids = list(range(15))
    first = serve(cache, ids)
    before = cache.stats
    with Operations() as operations:
        hit, fork = cache.match(ids), first.fork()
    assert operations.n == 0
    assert (hit.pages, fork.pages) == (first.pages[:3], first.pages)
    assert cache.stats.pages_used == before.pages_used
    compute(fork, [*ids, 50])
    compute(hit, [*ids[:12], 60, 61])
    assert holds(first, ids)
    assert holds(fork, [*ids, 50])
    assert holds(hit, [*ids[:12], 60, 61])
    assert cache.stats.pages_copied == 1, "the page that was half full"


# ggml-org/llama.cpp#3802, #6664: beams share a cell that each of them writes
@pytest.mark.parametrize("n_beams", [2, 4])
def test_ggml_org_llama_cpp_3802_beams_never_share_a_slot_that_they_write(cache, n_beams):
    beams, ids = [cache.sequence()], [1, 2, 3, 4, 5, 6]
    compute(beams[0], ids)
    beams += beams[0].fork(n_beams - 1)
    histories = [list(ids) for _ in beams]
    for turn in range(5):
        for beam, history in enumerate(histories):
            history.append(10 * turn + beam)
        new = torch.cat([computed(history, len(history) - 1) for history in histories])
        with cache.step(beams, 1) as step:
            slots = cache.slot_mapping(step).tolist()
            for layer in range(LAYERS):
                step.write(layer, new + layer, -new - layer)
        assert len(set(slots)) == n_beams
        assert all(holds(beam, history) for beam, history in zip(beams, histories, strict=True))
        beams[-1].free()  # the best beam takes the place of the worst
        beams[-1], histories[-1] = beams[0].fork(), list(histories[0])
        check_figures(cache, beams)


# ------------------------------------------------------------------------------------------- freed twice, never freed


# vllm-project/vllm#1556 (and 1584, 3347): a window whose blocks are shared is freed twice
def test_vllm_project_vllm_1556_windows_that_share_pages_free_each_once():
    cache = make(KVSpec.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="float32", window=5))
    ids = list(range(7))
    rows = [serve(cache, ids)]
    rows += [cache.match(ids), *rows[0].fork(2)]
    compute(rows[1], ids)
    histories = [[*ids, *range(100 * row, 100 * row + 6)] for row in range(4)]
    for row, history in zip(rows, histories, strict=True):
        compute(row, history)
    for _ in range(4):
        row, history = rows.pop(1 % len(rows)), histories.pop(1 % len(histories))
        assert holds(row, history)
        row.free()
        with pytest.raises(SequenceError, match="was freed"):
            row.free()
        check_figures(cache, rows)
        assert all(holds(*pair) for pair in zip(rows, histories, strict=True))
    everything = cache.sequence()
    compute(everything, [3] * PAGES * SIZE)
    assert sorted(everything.pages) == list(range(PAGES))


# vllm-project/vllm#42571: a block is twice in the list of free blocks, and two sequences get it
def test_vllm_project_vllm_42571_a_second_free_is_refused(cache):
    for _ in range(3):
        first = cache.sequence()
        compute(first, [1, 2, 3, 4, 5])
        second = first.fork()
        first.free()
        for call in (first.free, lambda first=first: first.truncate(0), lambda first=first: first.fork()):
            with pytest.raises(SequenceError, match="was freed"):
                call()
        assert holds(second, [1, 2, 3, 4, 5])
        second.free()
    rows = [cache.sequence() for _ in range(PAGES)]
    for number, row in enumerate(rows):
        compute(row, [number] * SIZE)
    assert sorted(row.pages[0] for row in rows) == list(range(PAGES))
    assert all(holds(row, [number] * SIZE) for number, row in enumerate(rows))


# vllm-project/vllm#46283: a request that is aborted half-way keeps its blocks for ever
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_vllm_project_vllm_46283_a_request_that_is_aborted_leaves_nothing(cache, error):
    ids = [1, 2, 3, 4, 5]
    kept = serve(cache, ids)

    def abort(rows, n_written):
        with cache.step(rows, [3, 9, 17]) as step:
            for layer in range(n_written):
                step.write(layer, torch.ones(29, HEADS, DIM), torch.ones(29, HEADS, DIM))
            raise error

    for n_written in range(LAYERS + 1):
        rows = [cache.match([*ids, number]) for number in range(3)]
        with pytest.raises(error):
            abort(rows, n_written)
        assert all(holds(row, ids[:SIZE]) for row in rows), "what was found is all that they have"
        check_figures(cache, [kept, *rows])
        for row in rows:
            row.free()
        check_figures(cache, [kept])
        assert holds(kept, ids)
        one = cache.match(ids)  # and one that goes layer by layer, and gets no further
        one.append(0, torch.ones(1, HEADS, 6, DIM), torch.ones(1, HEADS, 6, DIM))
        one.free()
        check_figures(cache, [kept])
    assert cache.stats.pages_free == PAGES - 2


# kekzl/imp#1115: one block more is in use after each request, for ever; it was cached, which the gauge did not tell
def test_kekzl_imp_1115_what_is_cached_is_told_from_what_is_held(cache):
    for number in range(60):
        ids = [number] * (number % 13 + 1)  # never a prompt that was there before
        longer = [*ids, *range(number % 5 + 1)]
        first = serve(cache, ids)
        second = first.fork()
        compute(second, longer)
        if number % 7 == 0:
            second.swap_out()
            second.swap_in()
        assert holds(first, ids)
        assert holds(second, longer)
        first.free()
        second.free()
        check_figures(cache, [])
        assert cache.stats.pages_used == cache.stats.used_nbytes == 0
    assert cache.stats.pages_cached > PAGES // 2
    everything = cache.sequence()
    compute(everything, [3] * PAGES * SIZE)
    assert cache.stats.pages_used == PAGES
    cache.reset()
    assert cache.stats.pages_free == PAGES


# sgl-project/sglang#35270 (and 11970, 6888, 105): two paths free the same tokens, or free ones are counted twice
def test_sgl_project_sglang_35270_what_is_cached_is_counted_once(cache):
    ids = list(range(8))
    first = serve(cache, ids)
    hit, fork = cache.match([*ids, 9]), first.fork()
    first.free()
    stats = cache.stats
    assert (stats.pages_used, stats.pages_cached) == (2, 0), "found and held, so not there to be evicted"
    hit.free()
    fork.truncate(4)
    stats = cache.stats
    assert (stats.pages_used, stats.pages_cached, stats.pages_free) == (1, 1, PAGES - 2)
    cache.keep(fork)
    for gone in (first, hit):
        with pytest.raises(SequenceError, match="was freed"):
            gone.free()
    check_figures(cache, [fork])
    cache.reset()
    with pytest.raises(SequenceError, match="was freed"):
        fork.free()
    assert cache.stats.pages_free == PAGES == cache.available
    with pytest.raises(CapacityError) as caught:
        compute(cache.sequence(), [0] * (PAGES * SIZE + 1))
    assert caught.value.available == PAGES


# ovg-project/kvcached#364: an allocation that fails half-way keeps what it got so far
def test_ovg_project_kvcached_364_a_step_that_does_not_fit_takes_nothing(cache):
    ids = [1, 2, 3]
    rows = [cache.sequence() for _ in range(3)]
    compute(rows[0], ids)
    cached = list(range(20, 28))
    serve(cache, cached).free()
    before, pages = cache.stats, [row.pages for row in rows]
    with pytest.raises(CapacityError) as caught, cache.step(rows, [4, 4, 60]):
        pass
    # one page more, one, and fifteen, of which fifteen are free or cached
    assert (caught.value.requested, caught.value.available, caught.value.missing) == (17, 15, 2)
    assert cache.stats == before
    assert [row.pages for row in rows] == pages
    with pytest.raises(CapacityError):
        compute(rows[0], [*ids, *[9] * 63])
    assert cache.stats == before
    assert holds(rows[0], ids)
    assert cache.match([*cached, 0]).length == 8, "nothing was evicted for it"


# ggml-org/llama.cpp#3380 (and 6603, 9201, 10873, 17982, 17527): much is free and nothing fits; defragmenting costs
def test_ggml_org_llama_cpp_3380_holes_are_reported_and_the_least_is_copied():
    spec = KVSpec.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="float32")
    nbytes = ContiguousKVCache.arena_nbytes(spec, capacity_tokens=100)
    cache = ContiguousKVCache(Arena(nbytes, backend="torch"), spec, capacity_tokens=100)
    requests = [cache.request(10) for _ in range(10)]
    contents = [list(range(number, number + 2 + number % 4)) for number in range(10)]
    for request, ids in zip(requests, contents, strict=True):
        for layer in range(LAYERS):
            request.append(layer, computed(ids) + layer, -computed(ids) - layer)
    for number in (1, 3, 5, 7):
        requests[number].free()
    with pytest.raises(CapacityError) as caught:
        cache.request(15)
    error = caught.value
    assert (error.cause, error.free, error.largest_hole) == ("fragmentation", 40, 10)
    assert "in 4 holes of at most 10" in " ".join(str(error).split())
    # Two holes become one when what lies between them moves; request 4 holds the fewest tokens.
    between = {number: len(contents[number]) for number in (2, 4, 6)}
    assert cache.compact(for_tokens=15) == min(between.values())
    bigger = cache.request(15)
    assert bigger.max_tokens == 15
    for number in (0, 2, 4, 6, 8, 9):
        for layer in range(LAYERS):
            keys, values = requests[number].read(layer, len(contents[number]))
            assert torch.equal(keys, computed(contents[number]) + layer)
            assert torch.equal(values, -computed(contents[number]) - layer)
    paged = (
        make()
    )  # and in pages there are no holes: the same comings and goings, and all that is free can be had
    rows = [paged.sequence() for _ in range(8)]
    for row in rows:
        compute(row, [1] * 2 * SIZE)
    for row in rows[::2]:
        row.free()
    last = paged.sequence()
    compute(last, [2] * 8 * SIZE)
    assert holds(last, [2] * 8 * SIZE)
