"""The bookkeeping of pages, and what paged caches were publicly reported for.

The tests of reports are named by the repository and the number of the issue or pull request.
"""

from __future__ import annotations

import copy
import pickle

import pytest

from gpuarena.errors import (
    ArgumentError,
    ArgumentTypeError,
    CapacityError,
    NotCopyableError,
    OutOfMemoryError,
    SequenceError,
)
from gpuarena.kv.paged._page_lists import Append, PageCopy
from gpuarena.kv.paged._page_states import PageStates
from gpuarena.kv.paged._page_tables import block_table, csr_tables, slot_mapping
from gpuarena.kv.paged._pages import PagePool
from gpuarena.kv.paged._prefixes import PrefixIndex


def filled(pool, tokens, salt=None):
    """Return a sequence whose tokens were computed and published."""
    sequence = pool.sequence(salt=salt)
    sequence.append(len(tokens))
    sequence.publish(tokens)
    return sequence


def counts(pool):
    stats = pool.stats
    return stats.pages_free, stats.pages_cached, stats.pages_used


# ------------------------------------------------------------------------------------------------- growing and forking


def test_a_sequence_takes_pages_as_it_grows():
    pool = PagePool(8, page_size=4)
    sequence = pool.sequence()
    assert sequence.append(3) == Append(0, 3, (0,), None)
    assert sequence.append(1) == Append(3, 4, (), None)
    assert sequence.append(6) == Append(4, 10, (1, 2), None)
    assert (sequence.length, sequence.pages, counts(pool)) == (10, (0, 1, 2), (5, 0, 3))


def test_the_writer_of_a_shared_page_gets_a_copy_and_the_last_one_writes_in_place():
    pool = PagePool(8, page_size=4)
    a = pool.sequence()
    a.append(6)
    b, c = a.fork(), a.fork()
    assert counts(pool) == (6, 0, 2)
    assert b.append(1).copy == PageCopy(source=1, target=2, n_tokens=2)
    assert a.append(1).copy == PageCopy(source=1, target=3, n_tokens=2)
    assert c.append(1).copy is None
    assert (a.pages, b.pages, c.pages, pool.stats.pages_copied) == ((0, 3), (0, 2), (0, 1), 2)


def test_a_fork_at_the_border_of_a_page_copies_nothing():
    pool = PagePool(8, page_size=4)
    a = pool.sequence()
    a.append(8)
    b = a.fork()
    assert (a.append(1).copy, b.append(1).copy) == (None, None)


def test_a_cut_into_a_published_page_keeps_it_for_others():
    pool = PagePool(4, page_size=2)
    a = filled(pool, [1, 2, 3, 4])
    a.truncate(3)
    assert a.append(1).copy == PageCopy(source=1, target=2, n_tokens=1)
    assert pool.match([1, 2, 3, 4, 5]).pages == (0, 1)


def test_a_lone_sequence_can_always_use_all_pages():
    pool = PagePool(2, page_size=2)
    a = filled(pool, [1, 2, 3, 4])
    a.truncate(3)
    assert (pool.needed(1, a), pool.would_fit(1, a)) == (0, True)
    assert a.append(1) == Append(3, 4, (), None)  # no page for a copy: it is no longer found
    assert pool.match([1, 2, 3, 4, 5]).pages == (0,)


def test_a_page_that_stops_being_published_outlives_those_behind_it():
    pool = PagePool(3, page_size=2)
    a = filled(pool, [1, 2, 3, 4, 5, 6])
    a.truncate(1)
    assert a.append(5) == Append(1, 6, (2, 1), None)
    assert a.pages == (0, 2, 1)
    assert pool.stats.pages_evicted == 2
    assert pool.match([1, 2, 3, 4, 5, 6]).length == 0


def test_a_copy_is_preferred_to_forgetting_what_is_published():
    pool = PagePool(3, page_size=2)
    a = filled(pool, [1, 2, 3, 4])
    a.truncate(1)
    assert a.append(1).copy == PageCopy(source=0, target=2, n_tokens=1)
    assert pool.match([1, 2, 3, 4, 9]).pages == (0, 1)


# -------------------------------------------------------------------------------------------------------------- prefixes


def test_prompts_whose_hashes_collide_do_not_meet():
    big = 2**61 - 1  # the modulus of Python's hash of integers
    assert hash((0, 0)) == hash((big, big))
    pool = PagePool(8, page_size=2)
    filled(pool, [0, 0, 7, 7])
    assert pool.match([big, big, 7, 7, 1]).length == 0


def test_equal_pages_behind_different_pages_do_not_meet():
    pool = PagePool(8, page_size=2)
    filled(pool, [1, 2, 3, 4])
    assert pool.match([5, 6, 3, 4, 9]).length == 0
    assert pool.match([3, 4, 9]).length == 0


def test_prompts_of_different_salts_do_not_meet():
    pool = PagePool(8, page_size=2)
    filled(pool, [1, 2], salt="adapter").free()
    assert [pool.match([1, 2, 3], salt=salt).length for salt in ("adapter", None, "other")] == [2, 0, 0]
    fork = pool.match([1, 2, 3], salt="adapter").fork()
    fork.append(2)
    fork.publish([1, 2, 3, 4])
    assert pool.match([1, 2, 3, 4, 5], salt="adapter").length == 4


def test_an_empty_prompt_matches_nothing():
    pool = PagePool(8, page_size=2)
    assert [pool.match(prompt).length for prompt in ([], [1])] == [0, 0]


def test_an_equal_page_is_exchanged_unless_forks_share_it():
    pool = PagePool(8, page_size=2)
    a = filled(pool, [1, 2])
    b = pool.sequence()
    b.append(4)
    c = b.fork()
    assert (b.publish([1, 2, 3, 4]).n_tokens, b.pages) == (0, (1, 2))
    c.free()
    done = b.publish([1, 2, 3, 4])
    assert (done.n_tokens, done.exchanged, b.pages) == (4, ((0, 0),), (0, 2))
    assert counts(pool) == (6, 0, 2)
    a.free()
    assert pool.match([1, 2, 3, 4, 5]).pages == (0, 2)


def test_other_tokens_than_those_published_are_refused():
    pool = PagePool(8, page_size=2)
    a = filled(pool, [1, 2, 3, 4])
    for tokens in ([1, 9, 3, 4], [3, 4]):
        with pytest.raises(ArgumentError, match="published with other token ids"):
            a.publish(tokens)
    assert pool.match([3, 4, 5]).length == 0


def test_the_longest_unused_page_goes_first():
    pool = PagePool(3, page_size=1)
    for token in (1, 2, 3):
        filled(pool, [token]).free()
    pool.match([1, 0]).free()  # 1 is used again, so that 2 is the oldest
    pool.sequence().append(1)
    assert [pool.match([token, 0]).length for token in (1, 2, 3)] == [1, 0, 1]


# ---------------------------------------------------------------------------------------------------- errors and figures


def test_errors_have_figures():
    pool = PagePool(4, page_size=2)
    pool.sequence().append(6)
    with pytest.raises(
        CapacityError, match=r"append\(3\) needs 2 pages of 2 tokens; .*: 1 too few"
    ) as caught:
        pool.sequence().append(3)
    error = caught.value
    assert isinstance(error, OutOfMemoryError)
    assert (error.used, error.requested, error.capacity, error.available, error.missing) == (3, 2, 4, 1, 1)
    assert error.unit == "pages"
    assert pickle.loads(pickle.dumps(error)).unit == "pages"
    assert CapacityError("of a linear cache").unit == "tokens"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0, 1), ArgumentError),
        ((1, 0), ArgumentError),
        ((2**31, 1), ArgumentError),
        ((1.0, 1), ArgumentTypeError),
        ((1, True), ArgumentTypeError),
        ((None, 1), ArgumentTypeError),
    ],
)
def test_pools_that_cannot_be(arguments, error):
    with pytest.raises(error):
        PagePool(*arguments)


def test_what_is_no_token_and_no_salt():
    pool = PagePool(1, page_size=1)
    for tokens in ([1.0], "text", [None], 7):
        with pytest.raises(ArgumentTypeError, match="token ids"):
            pool.match(tokens)
    for call in (pool.sequence, lambda salt: pool.match([1], salt=salt)):
        with pytest.raises(ArgumentTypeError, match="salt"):
            call(salt=[])
    with pytest.raises(ArgumentTypeError, match="Sequence is wanted"):
        pool.needed(1, "sequence")
    assert pool.stats.n_sequences == 0


def test_token_ids_and_counts_may_be_integers_of_a_library():
    numpy = pytest.importorskip("numpy")
    pool = PagePool(8, page_size=2)
    a = pool.sequence()
    assert type(a.append(numpy.int64(4)).stop) is int
    a.publish(numpy.arange(4))
    assert pool.match([0, 1, 2, 3, 4]).length == 4
    assert {type(slot) for slot in a.slots(numpy.int64(0), numpy.int64(4))} == {int}
    a.truncate(numpy.int64(1))
    assert type(a.length) is int


def test_figures_of_shared_tokens_count_once():
    pool = PagePool(8, page_size=4)
    a = pool.sequence()
    a.append(6)
    b = a.fork()
    b.truncate(5)
    stats = pool.stats
    assert (stats.n_sequences, stats.tokens_stored, stats.tokens_wasted) == (2, 6, 2)
    a.free()
    stats = pool.stats
    assert (stats.n_sequences, stats.tokens_stored, stats.tokens_wasted) == (1, 5, 3)
    c = b.fork()
    c.append(3)
    d = c.fork()
    d.truncate(7)  # the last page is full for one and not for the other
    b.free()
    stats = pool.stats
    assert (stats.n_sequences, stats.tokens_stored, stats.tokens_wasted) == (2, 8, 0)


def test_a_sequence_says_what_it_is():
    pool = PagePool(8, page_size=4)
    a = pool.sequence()
    a.append(5)
    assert repr(a) == "PageList(length=5, pages=[0, 1])"
    a.free()
    assert (repr(a), a.is_live) == ("PageList(freed)", False)


def test_our_own_mistakes_are_seen():
    index = PrefixIndex()
    first = index.add(None, None, 0, (1,))
    index.add(None, first, 1, (2,))
    for call in (
        lambda: index.remove(0),
        lambda: index.add(None, None, 2, (1,)),
        lambda: index.add(None, None, 1, (3,)),
    ):
        with pytest.raises(AssertionError):
            call()
    states = PageStates(1)
    states.release(states.take())
    with pytest.raises(AssertionError):
        states.release(0)
    states.take()
    with pytest.raises(AssertionError):
        states.take()


def test_the_index_keeps_nothing_of_what_was_removed():
    pool = PagePool(1, page_size=1)
    for salt in range(100):
        filled(pool, [1], salt=salt).free()
    assert len(pool._states.index._roots) == 1


# ------------------------------------------------------------------------------------------------ reports: page borders


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_nano_vllm_240_lengths_at_the_borders_of_pages(size):
    pool = PagePool(8, page_size=size)
    for n in sorted({size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1} - {0}):
        sequence = pool.sequence()
        assert pool.needed(n) == pool.needed(n, sequence) == (n + size - 1) // size
        for _ in range(n):  # one at a time
            new_pages = sequence.append(1).new_pages
            assert len(new_pages) == ((sequence.length - 1) % size == 0)
        at_once = pool.sequence()
        at_once.append(n)
        assert len(at_once.pages) == len(sequence.pages) == (n + size - 1) // size
        tables = csr_tables([sequence])
        assert (len(tables.indices) - 1) * size + tables.last_page_len[0] == n
        sequence.free()
        at_once.free()


def test_flashinfer_320_the_last_page_has_one_to_page_size_tokens():
    pool = PagePool(64, page_size=4)
    rows = [pool.sequence() for _ in range(8)]
    for n, row in enumerate(rows, start=1):
        row.append(n)
    tables = csr_tables(rows)
    assert tables.last_page_len == [1, 2, 3, 4, 1, 2, 3, 4]
    assert tables.indptr == [0, 1, 2, 3, 4, 6, 8, 10, 12]
    assert tables.indices == list(range(12))


def test_flashinfer_353_no_tokens():
    pool = PagePool(1, page_size=4)
    sequence = pool.sequence()
    assert sequence.append(0) == Append(0, 0, (), None)
    assert (sequence.pages, sequence.slots(0, 0), pool.available) == ((), [], 1)
    with pytest.raises(SequenceError, match="row 0 is an empty sequence"):
        csr_tables([sequence])
    assert block_table([sequence]) == [[]]
    sequence.append(2)
    other = sequence.fork()
    assert other.append(0) == Append(2, 2, (), None), "nothing is written, so nothing is copied"


def test_mlx_lm_798_no_rows():
    assert csr_tables([]) == csr_tables(iter(()))
    assert (csr_tables([]).indptr, csr_tables([]).indices, csr_tables([]).last_page_len) == ([0], [], [])
    assert (block_table([]), slot_mapping([])) == ([], [])


def test_flash_attention_2711_lengths_never_exceed_the_pages_of_the_table():
    pool = PagePool(8, page_size=4)
    rows = [pool.sequence() for _ in range(3)]
    for n, row in zip((9, 1, 4), rows, strict=True):
        row.append(n)
    table = block_table(rows)
    assert table == [[0, 1, 2], [3, 0, 0], [4, 0, 0]]
    assert all(
        row.length <= len(row.pages) * 4 <= len(pages) * 4 for row, pages in zip(rows, table, strict=True)
    )


def test_vllm_50427_slots_beyond_32_bits():
    pool = PagePool(3, page_size=2**31)
    pool.sequence().append(2**31 * 2)
    sequence = pool.sequence()
    sequence.append(2**31)
    assert sequence.slots(2**31 - 1, 2**31) == [3 * 2**31 - 1]


# ------------------------------------------------------------------------------------------------- reports: prefix reuse


def test_vllm_11186_a_full_hit_leaves_a_token_to_compute():
    pool = PagePool(8, page_size=4)
    filled(pool, list(range(8)))
    assert [pool.match(range(n)).length for n in (4, 5, 8, 9)] == [0, 4, 4, 8]


def test_vllm_43569_nothing_is_found_before_it_is_published():
    pool = PagePool(8, page_size=4)
    a = pool.sequence()
    a.append(8)
    assert pool.match(range(9)).length == 0
    a.publish(range(4))  # the first page was written
    assert pool.match(range(9)).length == 4
    with pytest.raises(ArgumentError, match="only what was written can be published"):
        a.publish(range(9))


def test_nano_vllm_219_two_equal_prompts_in_one_step():
    pool = PagePool(8, page_size=2)
    rows = [pool.match([1, 2, 3, 4, 5]) for _ in range(2)]
    assert [row.length for row in rows] == [0, 0]
    for row in rows:
        row.append(5)
    assert not set(rows[0].pages) & set(rows[1].pages)
    for row in rows:
        row.publish([1, 2, 3, 4, 5])
    assert rows[0].pages[:2] == rows[1].pages[:2]
    for row in rows:
        row.free()
    assert counts(pool) == (6, 2, 0)


def test_nano_vllm_163_a_page_given_to_another_is_not_found_any_more():
    pool = PagePool(2, page_size=2)
    filled(pool, [1, 2, 3, 4]).free()
    other = pool.sequence()
    other.append(2)
    assert other.pages == (1,)
    assert pool.match([1, 2, 3, 4, 5]).pages == (0,)
    other.publish([7, 7])
    assert [pool.match(prompt).pages for prompt in ([7, 7, 3, 4, 5], [1, 2, 3, 4, 5])] == [(1,), (0,)]


def test_nano_vllm_210_counters_follow_every_step():
    pool = PagePool(4, page_size=2)
    a = filled(pool, [1, 2, 3])
    assert counts(pool) == (2, 0, 2)
    a.free()
    assert counts(pool) == (3, 1, 0)
    b = pool.match([1, 2, 3])
    assert (counts(pool), pool.stats.pages_hit) == ((3, 0, 1), 1)
    b.append(6)
    assert (counts(pool), pool.available) == ((0, 0, 4), 0)


def test_vllm_7003_a_miss_beside_a_hit_has_its_own_table():
    pool = PagePool(8, page_size=2)
    filled(pool, [1, 2, 3, 4])
    rows = [pool.match([9, 9, 9]), pool.match([1, 2, 3])]
    for row in rows:
        row.append(3 - row.length)
    assert block_table(rows) == [[2, 3], [0, 4]]


def test_lmcache_443_leaves_are_evicted_first():
    pool = PagePool(4, page_size=1)
    a = filled(pool, [1, 2, 3])
    b = pool.match([1, 2, 9])
    b.append(1)
    b.publish([1, 2, 9])
    a.free()
    b.free()
    taker, found = pool.sequence(), []
    for _ in range(4):
        hits = [pool.match([*prompt, 0]) for prompt in ([1, 2, 3], [1, 2, 9])]
        found.append([hit.length for hit in hits])
        for hit in hits:
            hit.free()
        taker.append(1)
    assert found == [[3, 3], [2, 3], [2, 2], [1, 1]]
    assert pool.match([1, 0]).length == 0


def test_sglang_35694_drafts_are_not_published():
    pool = PagePool(8, page_size=2)
    a = pool.sequence()
    a.append(4)
    assert a.publish([1, 2, 3]).n_tokens == 2  # the fourth token is a draft
    assert pool.match([1, 2, 3, 4, 5]).length == 2


def test_mlx_lm_1547_a_hit_copies_nothing():
    pool = PagePool(1000, page_size=16)
    a = filled(pool, range(16_000 - 16))
    hit = pool.match(range(16_000))
    assert (hit.length, pool.stats.pages_copied, pool.available) == (15_984, 0, 1)
    assert pool.stats.pages_hit == 999
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotCopyableError, match=r"fork\(\) shares"):
            call(a)


# ----------------------------------------------------------------------------------- reports: copy on write and rollback


@pytest.mark.parametrize("n_beams", [2, 4])
def test_xllm_1984_beams_never_share_a_slot_they_write(n_beams):
    pool = PagePool(16, page_size=4)
    prompt = pool.sequence()
    prompt.append(6)
    beams = [prompt, *(prompt.fork() for _ in range(n_beams - 1))]
    for beam in beams:
        beam.append(1)
    written = [beam.slots(6, 7)[0] for beam in beams]
    assert len(set(written)) == n_beams
    assert len({beam.pages[0] for beam in beams}) == 1


def test_mlx_lm_1528_a_negative_cut_is_refused():
    pool = PagePool(4, page_size=2)
    a = pool.sequence()
    a.append(3)
    for n in (-1, 4):
        with pytest.raises(ArgumentError):
            a.truncate(n)
    with pytest.raises(ArgumentError):
        a.append(-1)
    assert (a.length, a.pages) == (3, (0, 1))


@pytest.mark.parametrize("n_kept", range(9))
def test_mlx_lm_1486_cutting_and_appending_is_as_never_having_appended(n_kept):
    pool, straight = PagePool(8, page_size=3), PagePool(8, page_size=3)
    a, b = pool.sequence(), straight.sequence()
    a.append(8)
    a.truncate(n_kept)
    b.append(n_kept)
    assert pool.stats == straight.stats
    assert a.append(5) == b.append(5)
    assert (a.pages, pool.stats) == (b.pages, straight.stats)


# ------------------------------------------------------------------------------------------ reports: leaks, double frees


def test_vllm_42571_a_second_free_is_refused():
    pool = PagePool(4, page_size=2)
    a = pool.sequence()
    a.append(3)
    a.free()
    with pytest.raises(SequenceError, match="was freed"):
        a.free()
    b = pool.sequence()
    b.append(8)
    assert sorted(b.pages) == [0, 1, 2, 3], "no page is free twice"


def test_vllm_1584_shared_pages_are_given_back_once():
    pool = PagePool(4, page_size=2)
    a = pool.sequence()
    a.append(3)
    b = a.fork()
    a.free()
    assert counts(pool) == (2, 0, 2)
    b.truncate(1)
    assert counts(pool) == (3, 0, 1)
    b.free()
    assert counts(pool) == (4, 0, 0)


def test_vllm_46283_nothing_is_held_once_all_sequences_are_freed():
    pool = PagePool(8, page_size=2)
    aborted = pool.match([1, 2, 3])
    try:
        aborted.append(3)
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        aborted.free()
    stats = pool.stats
    assert (stats.pages_used, stats.n_sequences, stats.tokens_stored, stats.tokens_wasted) == (0, 0, 0, 0)


def test_imp_1115_no_page_is_lost_from_request_to_request():
    pool = PagePool(16, page_size=4)
    for n in range(200):
        prompt = [n % 3] * (n % 13 + 1)
        a = pool.match(prompt)
        a.append(len(prompt) - a.length)
        b = a.fork()
        b.append(n % 5)
        a.publish(prompt)
        b.truncate(b.length // 2)
        a.free()
        b.free()
        assert pool.available == 16


def test_kvcached_364_an_append_that_does_not_fit_takes_nothing():
    pool = PagePool(4, page_size=2)
    filled(pool, [1, 2]).free()
    a = pool.sequence()
    a.append(3)
    b = a.fork()
    before = pool.stats
    for n in (2, 100):
        with pytest.raises(CapacityError):
            b.append(2 * n)
    assert pool.stats == before
    assert (b.pages, b.length) == (a.pages, 3)
    assert pool.match([1, 2, 3]).length == 2


def test_sglang_35270_a_page_is_either_cached_or_used():
    pool = PagePool(4, page_size=2)
    a = filled(pool, [1, 2])
    hits = [pool.match([1, 2, 3]) for _ in range(3)]
    assert counts(pool) == (3, 0, 1)
    a.free()
    for hit in hits[:2]:
        hit.free()
    assert counts(pool) == (3, 0, 1)
    hits[2].free()
    assert counts(pool) == (3, 1, 0)


def test_onnxruntime_32391_page_numbers_are_of_the_pool():
    pool, other = PagePool(2, page_size=2), PagePool(9, page_size=2)
    a, b = pool.sequence(), other.sequence()
    a.append(1)
    b.append(1)
    for call in (lambda: csr_tables([a, b]), lambda: block_table([a, b])):
        with pytest.raises(SequenceError, match="of another pool"):
            call()
    with pytest.raises(SequenceError, match="of another pool"):
        slot_mapping([(a, 0, 1), (b, 0, 1)])
    with pytest.raises(ArgumentError, match=r"slots\(0, 2\): the sequence holds 1 tokens"):
        slot_mapping([(a, 0, 2)])
