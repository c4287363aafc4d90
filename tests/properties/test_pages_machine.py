"""A `PagePool` against a model that writes tokens into lists as it is told, and predicts every page that is given back.

A slot holds the salt and all tokens up to its own, since keys and values depend on the whole prefix: a page that is found
for the wrong prompt, or written while another sequence reads it, shows.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpuarena import CapacityError
from gpuarena.errors import ArgumentError, ArgumentTypeError, NotCopyableError, SequenceError
from gpuarena.kv.paged._page_tables import block_table, csr_tables, slot_mapping
from gpuarena.kv.paged._pages import PagePool

#: Few, so that prompts meet; Python gives 0 and 2**61 - 1 the same hash, and so the tuples that differ in these.
TOKENS = [0, 2**61 - 1, 5]
SALTS = [None, "adapter"]

_prompts = st.lists(st.sampled_from(TOKENS), max_size=14)
_numbers = st.integers(0, 50)


@dataclass(eq=False)
class Row:
    """What a sequence has to hold."""

    handle: Any
    salt: Any
    tokens: list = field(default_factory=list)
    pages: list = field(default_factory=list)


class PagesMachine(RuleBasedStateMachine):
    @initialize(n_pages=st.integers(1, 6) | st.integers(7, 16), page_size=st.sampled_from([1, 2, 2, 3, 4]))
    def make_pool(self, n_pages, page_size):
        self.n_pages, self.page_size = n_pages, page_size
        self.pool = PagePool(n_pages, page_size)
        self.memory = {page: [None] * page_size for page in range(n_pages)}
        self.rows: list[Row] = []
        self.freed: list[Any] = []
        self.prompts: list[tuple[Any, list]] = []  # of sequences that were freed or cut
        self.published: dict[tuple, int] = {}  # (salt, all tokens up to the end of the page) -> page
        self.unused_since: dict[int, tuple[int, int]] = {}  # cached page -> when, and the deepest first
        self.clock = self.n_hit = self.n_evicted = self.n_copied = 0

    # -- the model ----------------------------------------------------------------------------------------------

    def _used(self):
        return {page for row in self.rows for page in row.pages}

    def _free(self):
        return set(range(self.n_pages)) - self._used() - set(self.published.values())

    def _available(self):
        return self.n_pages - len(self._used())

    def _holders(self, page):
        return sum(page in row.pages for row in self.rows)

    def _settle(self):
        """Note which published pages nobody holds any more since this step."""
        self.clock += 1
        used = self._used()
        unused = {}
        for (_, tokens), page in self.published.items():
            if page not in used:
                unused[page] = self.unused_since.get(page, (self.clock, -len(tokens)))
        self.unused_since = unused

    def _unpublish(self, page):
        (key,) = [key for key, published in self.published.items() if published == page]
        del self.published[key]
        behind = [tokens for salt, tokens in self.published if salt == key[0]]
        assert not any(tokens[: len(key[1])] == key[1] for tokens in behind), "evicted before those behind it"

    def _give(self, pages, free, cached):
        """Check that these pages might be given, and void what they hold."""
        assert len(set(pages)) == len(pages)
        n_evicted = max(0, len(pages) - len(free))
        oldest = sorted(cached, key=cached.get)[:n_evicted]
        assert set(pages) - free == set(oldest)
        for page in oldest:
            self._unpublish(page)
        self.n_evicted += n_evicted

    def _whole_pages(self, tokens, limit):
        for stop in range(self.page_size, limit + 1, self.page_size):
            yield tuple(tokens[:stop])

    # -- steps --------------------------------------------------------------------------------------------------

    def _row(self, number):
        return self.rows[number % len(self.rows)]

    def _snapshot(self):
        return self.pool.stats, [(row.handle.pages, row.handle.length) for row in self.rows]

    def _expect(self, error, call, *args, **options):
        before = self._snapshot()
        with pytest.raises(error) as caught:
            call(*args, **options)
        assert self._snapshot() == before
        return caught.value

    @precondition(lambda self: len(self.rows) < 6)
    @rule(salt=st.sampled_from(SALTS))
    def start(self, salt):
        self.rows.append(Row(self.pool.sequence(salt=salt), salt))

    @precondition(lambda self: 0 < len(self.rows) < 6)
    @rule(number=_numbers)
    def compute_the_same_tokens_again(self, number):
        """As another sequence does whose prompt came before the first was published."""
        row = self._row(number)
        self.start(row.salt)
        span = self._append(self.rows[-1], list(row.tokens))
        if span:
            self._write(self.rows[-1], *span)

    def _match(self, salt, prompt):
        expected = []
        for tokens in self._whole_pages(prompt, len(prompt) - 1):
            page = self.published.get((salt, tokens))
            if page is None:
                break
            expected.append(page)
        handle = self.pool.match(iter(prompt), salt=salt)
        assert handle.pages == tuple(expected)
        assert handle.length == len(expected) * self.page_size
        self.rows.append(Row(handle, salt, prompt[: handle.length], expected))
        self.n_hit += len(expected)
        self._settle()

    @precondition(lambda self: len(self.rows) < 6)
    @rule(prompt=_prompts, salt=st.sampled_from(SALTS))
    def match_any_prompt(self, prompt, salt):
        self._match(salt, prompt)

    def _serve(self, salt, prompt):
        """Read a prompt as an engine does: what is found is not computed again."""
        self._match(salt, prompt)
        row = self.rows[-1]
        span = self._append(row, prompt[len(row.tokens) :])
        if span:
            self._write(row, *span)
            self._publish(row, len(prompt))

    @precondition(lambda self: len(self.rows) < 6)
    @rule(prompt=_prompts, salt=st.sampled_from(SALTS))
    def serve(self, prompt, salt):
        self._serve(salt, prompt)

    @precondition(lambda self: len(self.rows) < 6)
    @rule(prompt=_prompts, salt=st.sampled_from(SALTS))
    def serve_and_free(self, prompt, salt):
        self._serve(salt, prompt)
        self.free(len(self.rows) - 1)

    @precondition(lambda self: len(self.rows) < 6 and self.prompts)
    @rule(number=_numbers, rest=_prompts, n_kept=st.integers(0, 9))
    def serve_again(self, number, rest, n_kept):
        salt, prompt = self.prompts[number % len(self.prompts)]
        self._serve(salt, [*prompt[:n_kept], *rest])

    @precondition(lambda self: len(self.rows) < 6 and self.published)
    @rule(number=_numbers, rest=_prompts, other_salt=st.booleans())
    def match_what_is_published(self, number, rest, other_salt):
        salt, tokens = list(self.published)[number % len(self.published)]
        if other_salt:
            salt = SALTS[1 - SALTS.index(salt)]
        self._match(salt, [*tokens, *rest])

    @precondition(lambda self: len(self.rows) < 6 and self.published)
    @rule(number=_numbers, position=_numbers)
    def match_what_only_hashes_alike(self, number, position):
        salt, tokens = list(self.published)[number % len(self.published)]
        prompt = [*tokens, 0]
        position %= len(tokens)
        prompt[position] = {0: TOKENS[1], TOKENS[1]: 0}.get(prompt[position], prompt[position])
        assert hash(tuple(prompt)) == hash((*tokens, 0))
        self._match(salt, prompt)

    @precondition(lambda self: len(self.rows) < 6 and self.prompts)
    @rule(number=_numbers, rest=_prompts, n_cut=st.integers(0, 3))
    def match_an_old_prompt(self, number, rest, n_cut):
        salt, tokens = self.prompts[number % len(self.prompts)]
        self._match(salt, [*tokens[: max(0, len(tokens) - n_cut)], *rest])

    def _append(self, row, tokens):
        """Append, make the copy, and leave the tokens to be written; None if there is no room."""
        n, size = len(tokens), self.page_size
        start, stop = len(row.tokens), len(row.tokens) + n
        n_new = (stop + size - 1) // size - len(row.pages)
        into = row.pages[-1] if n and start % size else None
        is_shared = into is not None and self._holders(into) > 1
        is_published = into in self.published.values()
        available, free, cached = self._available(), self._free(), self.unused_since
        needed = n_new + is_shared
        assert self.pool.needed(n, row.handle) == needed
        assert self.pool.would_fit(n, row.handle) == (needed <= available)
        if needed > available:
            error = self._expect(CapacityError, row.handle.append, n)
            assert (error.used, error.requested, error.capacity) == (
                self.n_pages - available,
                needed,
                self.n_pages,
            )
            assert (error.available, error.missing, error.unit) == (available, needed - available, "pages")
            return None
        done = row.handle.append(n)
        assert (done.start, done.stop, len(done.new_pages)) == (start, stop, n_new)
        has_copy = is_shared or (is_published and n_new < available)
        assert (done.copy is not None) == has_copy
        self._give([*done.new_pages, *([done.copy.target] if has_copy else [])], free, cached)
        if has_copy:
            assert (done.copy.source, done.copy.n_tokens) == (into, start % size)
            self.memory[done.copy.target] = self.memory[into][: done.copy.n_tokens] + [None] * (
                size - done.copy.n_tokens
            )
            row.pages[-1] = done.copy.target
            self.n_copied += 1
        elif is_published:
            self._unpublish(into)
        for page in done.new_pages:
            self.memory[page] = [None] * size
        row.pages += done.new_pages
        row.tokens += tokens
        self._settle()
        return start, stop

    def _write(self, row, start, stop):
        for position in range(start, stop):
            page = row.pages[position // self.page_size]
            offset = position % self.page_size
            self.memory[page][offset] = (row.salt, tuple(row.tokens[: position + 1]))

    @precondition(lambda self: self.rows)
    @rule(number=_numbers, tokens=_prompts)
    def append(self, number, tokens):
        row = self._row(number)
        span = self._append(row, tokens)
        if span:
            self._write(row, *span)

    @precondition(lambda self: self.rows)
    @rule(tokens=st.lists(st.sampled_from(TOKENS), min_size=6, max_size=6), n=st.integers(1, 3))
    def append_to_all_and_write_later(self, tokens, n):
        spans = [
            (row, self._append(row, tokens[number : number + n])) for number, row in enumerate(self.rows)
        ]
        for row, span in spans:
            if span:
                self._write(row, *span)

    @rule(number=_numbers, data=st.data())
    def misuse(self, number, data):
        self._use_what_is_foreign()
        if self.freed:
            self._use_what_is_freed(self.freed[number % len(self.freed)])
        if self.rows:
            self._use_no_numbers(self._row(number).handle)
            self._publish_what_is_not_so(self._row(number), data)

    def _use_no_numbers(self, handle):
        for value, error in [(-1, ArgumentError), (1.0, ArgumentTypeError)]:
            for call in (handle.append, handle.truncate, lambda n: handle.slots(n, n), self.pool.would_fit):
                self._expect(error, call, value)

    @precondition(lambda self: 0 < len(self.rows) < 6)
    @rule(number=_numbers)
    def fork(self, number):
        row = self._row(number)
        self.rows.append(Row(row.handle.fork(), row.salt, list(row.tokens), list(row.pages)))

    @precondition(lambda self: 0 < len(self.rows) < 6)
    @rule(number=_numbers, token=st.sampled_from(TOKENS))
    def branch(self, number, token):
        self.fork(number)
        self.append(number, [token])
        self.append(len(self.rows) - 1, [token, token])

    @precondition(lambda self: self.rows)
    @rule(number=_numbers, n_cut=st.integers(1, 5), tokens=_prompts)
    def answer_again(self, number, n_cut, tokens):
        row = self._row(number)
        self._truncate(row, max(0, len(row.tokens) - n_cut))
        self.append(number, tokens)

    @precondition(lambda self: self.rows and self._available())
    @rule(number=_numbers, token=st.sampled_from(TOKENS), n_cut=st.integers(1, 4))
    def answer_again_in_a_full_pool(self, number, token, n_cut):
        row = self._row(number)
        n_tail = -len(row.tokens) % self.page_size
        self.append(number, [token] * n_tail)
        self.append(number, [token] * (self._available() * self.page_size))
        self._publish(row, len(row.tokens))
        self._truncate(row, max(0, len(row.tokens) - n_cut))
        self.append(number, [token] * n_cut)

    @precondition(lambda self: 0 < len(self.rows) < 5)
    @rule(number=_numbers)
    def publish_twins(self, number):
        row = self._row(number)
        self.compute_the_same_tokens_again(number)
        self.fork(len(self.rows) - 1)
        self._publish(row, len(row.tokens))
        self._publish(self.rows[-2], len(self.rows[-2].tokens))

    @precondition(lambda self: self.rows)
    @rule(number=_numbers, data=st.data())
    def truncate(self, number, data):
        row = self._row(number)
        self._expect(ArgumentError, row.handle.truncate, len(row.tokens) + 1)
        self._truncate(row, data.draw(st.integers(0, len(row.tokens))))

    def _truncate(self, row, keep):
        self.prompts.append((row.salt, list(row.tokens)))
        row.handle.truncate(keep)
        del row.tokens[keep:]
        del row.pages[(keep + self.page_size - 1) // self.page_size :]
        self._settle()

    @precondition(lambda self: self.rows)
    @rule(number=_numbers)
    def free(self, number):
        row = self.rows.pop(number % len(self.rows))
        self.prompts.append((row.salt, row.tokens))
        row.handle.free()
        self.freed.append(row.handle)
        self._settle()

    @rule()
    def free_all(self):
        while self.rows:
            self.free(0)
        assert self.pool.stats.pages_used == 0
        assert self.pool.available == self.n_pages

    def _use_what_is_freed(self, handle):
        assert (handle.is_live, handle.pages, handle.length) == (False, (), 0)
        for call in (handle.free, handle.fork):
            self._expect(SequenceError, call)
        for call in (handle.append, handle.truncate):
            self._expect(SequenceError, call, 0)
        self._expect(SequenceError, handle.publish, [])
        self._expect(SequenceError, handle.slots, 0, 0)
        self._expect(SequenceError, self.pool.would_fit, 0, handle)
        for table in (csr_tables, block_table):
            self._expect(SequenceError, table, [handle])

    def _use_what_is_foreign(self):
        pool = PagePool(1, 1)
        handle = pool.sequence()
        handle.append(1)
        self._expect(SequenceError, self.pool.needed, 1, handle)
        mixed = [*[row.handle for row in self.rows if row.tokens][:1], handle]
        for table in (csr_tables, block_table):
            if len(mixed) == 2:
                self._expect(SequenceError, table, mixed)
            self._expect(ArgumentTypeError, table, [*mixed[:1], None])
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            self._expect(NotCopyableError, call, handle)
            self._expect(NotCopyableError, call, self.pool)

    @precondition(lambda self: self.rows)
    @rule(number=_numbers, n_drafts=st.integers(0, 3) | st.just(0))
    def publish(self, number, n_drafts):
        row = self._row(number)
        self._publish(row, max(0, len(row.tokens) - n_drafts))

    def _publish(self, row, n_tokens):
        exchanged, n_published = [], 0
        for index, tokens in enumerate(self._whole_pages(row.tokens, n_tokens)):
            mine, key = row.pages[index], (row.salt, tokens)
            known = self.published.setdefault(key, mine)
            if known != mine:
                if self._holders(mine) > 1:
                    break
                row.pages[index] = known
                exchanged.append((index, known))
            n_published = len(tokens)
        done = row.handle.publish(row.tokens[:n_tokens])
        assert (done.n_tokens, done.exchanged) == (n_published, tuple(exchanged))
        self._settle()

    def _publish_what_is_not_so(self, row, data):
        token = data.draw(st.sampled_from(TOKENS))
        self._expect(ArgumentError, row.handle.publish, [*row.tokens, token])
        self._expect(ArgumentTypeError, row.handle.publish, [1.0])
        if not row.tokens:
            return
        position = data.draw(st.integers(0, len(row.tokens) - 1))
        page = row.pages[position // self.page_size]
        is_whole = (position // self.page_size + 1) * self.page_size <= len(row.tokens)
        if token != row.tokens[position] and is_whole and page in self.published.values():
            wrong = [*row.tokens[:position], token, *row.tokens[position + 1 :]]
            self._expect(ArgumentError, row.handle.publish, wrong)

    # -- what holds after every step ----------------------------------------------------------------------------

    def _read(self, slots):
        return [self.memory[slot // self.page_size][slot % self.page_size] for slot in slots]

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        if not hasattr(self, "pool"):
            return
        size = self.page_size
        for row in self.rows:
            handle, n = row.handle, len(row.tokens)
            assert (handle.is_live, handle.length, handle.pages) == (True, n, tuple(row.pages))
            contents = [(row.salt, tuple(row.tokens[:stop])) for stop in range(1, n + 1)]
            assert self._read(handle.slots(0, n)) == contents
            assert self._read(handle.slots(n // 2, n)) == contents[n // 2 :]
            with pytest.raises(ArgumentError):
                handle.slots(0, n + 1)
            with pytest.raises(ArgumentError):
                handle.slots(n + 1, n)
        handles = [row.handle for row in self.rows]
        table = block_table(handles)
        assert {len(pages) for pages in table} <= {max((len(row.pages) for row in self.rows), default=0)}
        for row, pages in zip(self.rows, table, strict=True):
            n = len(row.pages)
            assert pages == row.pages + [0] * (len(pages) - n)
        if all(row.tokens for row in self.rows):
            tables = csr_tables(handles)
            assert tables.indptr[0] == 0
            assert tables.indptr[-1] == len(tables.indices)
            for number, row in enumerate(self.rows):
                assert tables.indices[tables.indptr[number] : tables.indptr[number + 1]] == row.pages
                assert 1 <= tables.last_page_len[number] <= size
                assert (len(row.pages) - 1) * size + tables.last_page_len[number] == len(row.tokens)
        else:
            with pytest.raises(SequenceError):
                csr_tables(handles)
        parts = [(row.handle, len(row.tokens) // 3, len(row.tokens)) for row in self.rows]
        assert slot_mapping(parts) == [slot for handle, a, b in parts for slot in handle.slots(a, b)]

    @invariant()
    def the_counts_agree(self):
        if not hasattr(self, "pool"):
            return
        stats, used = self.pool.stats, self._used()
        filled = {
            (row.pages[position // self.page_size], position % self.page_size)
            for row in self.rows
            for position in range(len(row.tokens))
        }
        assert (stats.n_pages, stats.page_size) == (self.n_pages, self.page_size)
        assert stats.pages_used == len(used)
        assert stats.pages_cached == len(set(self.published.values()) - used) == len(self.unused_since)
        assert stats.pages_free == len(self._free())
        assert stats.pages_free + stats.pages_cached + stats.pages_used == self.n_pages
        assert self.pool.available == self._available()
        assert stats.n_sequences == len(self.rows)
        assert stats.tokens_stored == len(filled)
        assert stats.tokens_wasted == len(used) * self.page_size - len(filled)
        assert (stats.pages_hit, stats.pages_evicted, stats.pages_copied) == (
            self.n_hit,
            self.n_evicted,
            self.n_copied,
        )
        for n in (0, 1, self.page_size, self.page_size + 1):
            n_new = (n + self.page_size - 1) // self.page_size
            assert self.pool.needed(n) == n_new
            assert self.pool.would_fit(n) == (n_new <= self._available())


def test_a_pool_of_pages_behaves_as_the_model():
    run_state_machine_as_test(PagesMachine)
