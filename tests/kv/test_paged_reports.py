"""What paged caches were publicly reported for, with keys and values.

The tests are named by the repository and the number of the issue or pull request; tests/kv/test_pages.py has those that
bookkeeping alone can show.
"""

from __future__ import annotations

import pytest

from gpuarena import Arena, CapacityError
from gpuarena.errors import ArgumentError, SequenceError
from gpuarena.kv import KVSpec
from gpuarena.kv.paged import PagedKVCache

torch = pytest.importorskip("torch")

LAYERS, HEADS, DIM, SIZE = 2, 2, 4, 4
SPEC = KVSpec.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="float32")


@pytest.fixture
def cache():
    nbytes = PagedKVCache.arena_nbytes(SPEC, num_pages=16, page_size=SIZE)
    return PagedKVCache(Arena(nbytes, backend="torch", device="cpu"), SPEC, num_pages=16, page_size=SIZE)


def computed(ids, start=0):
    """[1, heads, n, dim]: what the model computes for tokens from `start` on; each depends on all before it."""
    state, states = 1, []
    for token in ids:
        state = (state * 31 + token) % 65521
        states.append(state)
    return torch.tensor(states, dtype=torch.float32)[None, None, start:, None].expand(
        1, HEADS, len(ids) - start, DIM
    )


def compute(sequence, ids):
    """Append what is missing of `ids`."""
    new = computed(ids, sequence.length)
    for layer in range(LAYERS):
        sequence.append(layer, new + layer, -new - layer)


def holds(sequence, ids):
    want = computed(ids)[0]
    for layer in range(LAYERS):
        keys, values = sequence.read(layer)
        if not (torch.equal(keys, want + layer) and torch.equal(values, -want - layer)):
            return False
    return sequence.length == len(ids)


def prompted(cache, ids):
    """Serve a prompt: look it up, compute the rest, publish."""
    sequence = cache.match(ids)
    compute(sequence, ids)
    sequence.publish(ids)
    return sequence


@pytest.mark.parametrize("n", [SIZE - 1, SIZE, SIZE + 1, 2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 1])
def test_vllm_11186_a_full_hit_leaves_a_token_to_compute(cache, n):
    ids = list(range(10, 10 + n))
    prompted(cache, ids).free()
    again = cache.match(ids)
    assert again.length == (n - 1) // SIZE * SIZE
    compute(again, ids)
    assert holds(again, ids)


def test_vllm_43569_nothing_is_found_before_it_is_written(cache):
    ids = list(range(8))
    first = cache.sequence()
    with cache.step([first], 8) as step:
        with pytest.raises(SequenceError, match="a step is open"):
            first.publish(ids)
        assert cache.match([*ids, 9]).length == 0
        for layer in range(LAYERS):
            step.write(layer, computed(ids) + layer, -computed(ids) - layer)
    assert cache.match([*ids, 9]).length == 0
    first.publish(ids)
    assert holds(cache.match([*ids, 9]), ids)


def test_nano_vllm_163_a_page_given_to_another_is_not_found_any_more(cache):
    prompted(cache, list(range(8))).free()
    greedy = cache.sequence()
    compute(greedy, [7] * 16 * SIZE)
    assert cache.match(range(9)).length == 0
    assert holds(greedy, [7] * 16 * SIZE)


@pytest.mark.parametrize("n", [0, 1, SIZE - 1, SIZE, SIZE + 1])
def test_nano_vllm_240_forks_at_the_borders_of_pages(cache, n):
    ids = list(range(SIZE, SIZE + n))
    first = cache.sequence()
    if n:
        compute(first, ids)
    second, third = first.fork(2)
    compute(second, [*ids, 50])
    compute(third, [*ids, 60, 61])
    compute(first, [*ids, 70])
    assert cache.stats.pages_copied == (2 if n % SIZE else 0)
    assert holds(first, [*ids, 70])
    assert holds(second, [*ids, 50])
    assert holds(third, [*ids, 60, 61])


def test_nano_vllm_219_two_equal_prompts_in_one_step(cache):
    ids = list(range(9))
    rows = [cache.match(ids) for _ in range(2)]
    assert [row.length for row in rows] == [0, 0]
    new = computed(ids).expand(2, HEADS, 9, DIM)
    with cache.step(rows, 9) as step:
        for layer in range(LAYERS):
            step.write(layer, new + layer, -new - layer)
    for row in rows:
        assert row.publish(ids) == 8
    assert rows[0].pages[:2] == rows[1].pages[:2]
    assert rows[0].pages[2] != rows[1].pages[2]
    assert all(holds(row, ids) for row in rows)
    compute(rows[0], [*ids, 77])
    assert holds(rows[1], ids)


def test_vllm_7003_a_miss_beside_a_hit_has_its_own_table(cache):
    prompted(cache, [1, 2, 3, 4, 5])
    rows = [cache.match(ids) for ids in ([9] * 5, [1, 2, 3, 4, 6])]
    compute(rows[0], [9] * 5)
    compute(rows[1], [1, 2, 3, 4, 6])
    table = cache.block_table(rows).block_table.tolist()
    assert [tuple(pages) for pages in table] == [row.pages for row in rows]
    assert holds(rows[0], [9] * 5)
    assert holds(rows[1], [1, 2, 3, 4, 6])


def test_sglang_35694_drafts_are_not_published(cache):
    ids = list(range(6))
    sequence = prompted(cache, ids)
    mark = sequence.checkpoint()
    compute(sequence, [*ids, 90, 91, 92])  # drafts
    assert sequence.publish(ids) == 4
    assert cache.match([*ids, 90, 91, 92]).length == 4
    sequence.rollback(mark)
    compute(sequence, [*ids, 6])
    assert holds(sequence, [*ids, 6])


def test_lmcache_443_what_is_left_of_a_prefix_is_found(cache):
    ids = list(range(12))
    prompted(cache, ids).free()
    greedy = cache.sequence()
    for n_evicted in range(4):
        hit = cache.match([*ids, 0])
        assert hit.length == max(0, 12 - n_evicted * SIZE)
        assert holds(hit, ids[: hit.length])
        hit.free()
        if n_evicted < 3:
            compute(greedy, [5] * (14 + n_evicted) * SIZE)


def test_mlx_lm_1547_a_hit_and_a_fork_copy_nothing(cache, monkeypatch):
    ids = list(range(15))
    first = prompted(cache, ids)
    monkeypatch.setattr(cache._core.ops, "copy", lambda *args: 1 / 0)
    assert cache.match(ids).length == 12
    assert first.fork().pages == first.pages


@pytest.mark.parametrize("n_beams", [2, 4])
def test_xllm_1984_beams_never_share_a_slot_they_write(cache, n_beams):
    ids = [1, 2, 3, 4, 5, 6]
    beams = [cache.sequence()]
    compute(beams[0], ids)
    beams += beams[0].fork(n_beams - 1)
    histories = [list(ids) for _ in beams]
    for turn in range(5):
        rows = []
        for beam, history in enumerate(histories):
            history.append(10 * turn + beam)
            rows.append(computed(history, len(history) - 1))
        new = torch.cat(rows)
        with cache.step(beams, 1) as step:
            for layer in range(LAYERS):
                step.write(layer, new + layer, -new - layer)
        # the best beam takes the place of the worst
        beams[-1].free()
        beams[-1], histories[-1] = beams[0].fork(), list(histories[0])
        assert all(holds(beam, history) for beam, history in zip(beams, histories, strict=True))


@pytest.mark.parametrize("n_kept", range(9))
def test_mlx_lm_1486_rolling_back_and_appending_is_as_never_having_appended(cache, n_kept):
    ids = list(range(8))
    a, b = cache.sequence(), cache.sequence()
    compute(a, ids)
    a.truncate(n_kept)
    if n_kept:
        compute(b, ids[:n_kept])
    for sequence in (a, b):
        compute(sequence, [*ids[:n_kept], 44, 45, 46])
        assert holds(sequence, [*ids[:n_kept], 44, 45, 46])


def test_mlx_lm_1502_all_layers_are_cut_or_none(cache):
    sequence = cache.sequence()
    compute(sequence, [1, 2, 3, 4, 5])

    def fails_after_the_first_layer():
        with cache.step([sequence], 3) as step:
            step.write(0, computed([9, 9, 9]), computed([9, 9, 9]))
            1 / 0

    with pytest.raises(ZeroDivisionError):
        fails_after_the_first_layer()
    assert holds(sequence, [1, 2, 3, 4, 5])
    sequence.truncate(2)
    assert holds(sequence, [1, 2])


def test_mlx_lm_1528_a_negative_cut_is_refused(cache):
    sequence = cache.sequence()
    compute(sequence, [1, 2, 3])
    for n in (-1, 4):
        with pytest.raises(ArgumentError):
            sequence.truncate(n)
    assert holds(sequence, [1, 2, 3])


def test_mlx_vlm_1155_rows_accept_different_numbers_of_drafts(cache):
    rows, histories = [cache.sequence(), cache.sequence()], [[1, 2, 3], [4, 5, 6]]
    for row, ids in zip(rows, histories, strict=True):
        compute(row, ids)
    drafts = torch.cat([computed([*ids, 7, 8, 9], 3) for ids in histories])
    with cache.step(rows, 3) as step:
        for layer in range(LAYERS):
            step.write(layer, drafts + layer, -drafts - layer)
    rows[0].truncate(4)
    rows[1].truncate(6)
    assert holds(rows[0], [1, 2, 3, 7])
    assert holds(rows[1], [4, 5, 6, 7, 8, 9])


def test_vllm_42571_a_second_free_is_refused(cache):
    a = cache.sequence()
    compute(a, [1, 2, 3, 4, 5])
    a.free()
    with pytest.raises(SequenceError, match="was freed"):
        a.free()
    b = cache.sequence()
    compute(b, list(range(16 * SIZE)))
    assert sorted(b.pages) == list(range(16))
    assert holds(b, list(range(16 * SIZE)))


def test_vllm_46283_an_aborted_step_leaks_nothing(cache):
    for error in (KeyboardInterrupt, RuntimeError):
        rows = [cache.match([1, 2, 3]) for _ in range(3)]
        with pytest.raises(error), cache.step(rows, [3, 9, 17]):
            raise error
        assert cache.stats.pages_used == 0
        for row in rows:
            row.free()
    assert (cache.stats.pages_free, cache.stats.n_sequences) == (16, 0)


def test_imp_1115_no_page_is_lost_from_request_to_request(cache):
    for n in range(60):
        ids = [n % 3] * (n % 13 + 1)
        a = prompted(cache, ids)
        b = a.fork()
        compute(b, [*ids, *range(n % 5 + 1)])
        if n % 7 == 0:
            b.swap_out()
            b.swap_in()
        assert holds(a, ids)
        assert holds(b, [*ids, *range(n % 5 + 1)])
        a.free()
        b.free()
        stats = cache.stats
        assert (stats.pages_used, stats.pages_free + stats.pages_cached) == (0, 16)


def test_kvcached_364_a_step_that_does_not_fit_takes_nothing(cache):
    rows = [cache.sequence() for _ in range(3)]
    compute(rows[0], [1, 2, 3])
    before = cache.stats
    with pytest.raises(CapacityError), cache.step(rows, [4, 4, 60]):
        pass
    assert cache.stats == before
    assert holds(rows[0], [1, 2, 3])


def test_mlx_lm_798_no_rows(cache):
    with cache.step([], 1) as step:
        for layer in range(LAYERS):
            step.write(layer, torch.ones(0, HEADS, 1, DIM), torch.ones(0, HEADS, 1, DIM))
    assert cache.flashinfer_tables([]).kv_indptr.tolist() == [0]
    assert cache.attend(0, torch.ones(0, HEADS, 1, DIM), []).shape == (0, HEADS, 1, DIM)


def test_transformers_37078_what_is_read_is_a_copy(cache):
    sequence = cache.sequence()
    compute(sequence, [1, 2, 3])
    keys, values = sequence.read(0)
    keys.zero_()
    values.zero_()
    assert holds(sequence, [1, 2, 3])


def test_pytorch_182593_another_sequence_in_reused_pages_is_not_seen(cache):
    q = torch.ones(1, 4, 1, DIM)
    compute(gone := cache.sequence(), [9] * 8)
    cache.attend(0, q, [gone])
    gone.free()
    a = cache.sequence()
    compute(a, [1])
    expected = a.read(0)[1].repeat_interleave(2, 0)  # one token has all the weight
    torch.testing.assert_close(cache.attend(0, q, [a])[0], expected)
