"""A `PagedKVCache` against a model in which a sequence is a list of tokens.

What is stored for a token depends on the salt and on all tokens up to it, as keys and values do: a page that is found for
the wrong prompt, or written while another sequence holds it, shows as soon as everything is read back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpuarena import Arena, CapacityError, CheckpointError
from gpuarena.errors import ArgumentError, LayerOrderError, SequenceError, ShapeError
from gpuarena.kv import KVSpec, LayerSpec, SharedLayer
from gpuarena.kv.paged import PagedKVCache

torch = pytest.importorskip("torch")

#: Few, so that prompts meet; Python gives 0 and 2**61 - 1 the same hash.
TOKENS = [0, 2**61 - 1, 5]
SALTS = [None, "adapter"]
POISON = 0xFF  # NaN in every floating dtype

JOINT = LayerSpec(kv_heads=2, key_dim=3, value_dim=3, dtype="float32")
APART = LayerSpec(
    kv_heads=1, key_dim=3, value_dim=2, dtype="float32", value_dtype="float64", window=4, sinks=1
)
SPECS = [
    KVSpec([JOINT]),
    KVSpec([JOINT, SharedLayer(0), APART]),
    KVSpec([APART, JOINT, JOINT, SharedLayer(1)]),
]

_numbers = st.integers(0, 50)
_tokens = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=7)


class Interrupted(BaseException):
    """As KeyboardInterrupt is, no Exception."""


@dataclass(eq=False)
class Row:
    """What a sequence has to hold."""

    handle: Any
    salt: Any
    tokens: list = field(default_factory=list)
    marks: list = field(default_factory=list)  # (checkpoint, tokens then)
    dead: set = field(default_factory=set)  # checkpoints whose tokens are gone
    is_out: bool = False


class PagedMachine(RuleBasedStateMachine):
    @initialize(
        backend=st.sampled_from(["torch", "host"]),
        layout=st.sampled_from(["per-head", "HND", "NHD"]),
        spec=st.sampled_from(SPECS),
        n_pages=st.integers(3, 8) | st.integers(9, 24),
        page_size=st.sampled_from([2, 3, 4, 1]),
        first=_tokens,
    )
    def make(self, backend, layout, spec, n_pages, page_size, first):
        nbytes = PagedKVCache.arena_nbytes(spec, num_pages=n_pages, page_size=page_size)
        self.arena = Arena.from_buffer(
            torch.full((nbytes + 256,), POISON, dtype=torch.uint8)
            if backend == "torch"
            else np.full(nbytes + 256, POISON, np.uint8)
        )
        self.cache = PagedKVCache(self.arena, spec, num_pages=n_pages, page_size=page_size, layout=layout)
        self.backend, self.spec, self.n_pages, self.page_size = backend, spec, n_pages, page_size
        self.owned = [number for number, layer in enumerate(spec.layers) if isinstance(layer, LayerSpec)]
        self.rows: list[Row] = []
        self.freed: list[Any] = []
        self.published: set = set()  # (salt, tokens up to the end of a page)
        self.prompts: list = []
        self.contents: dict = {}
        self.start(None)
        if len(first) <= n_pages * page_size:
            self.append(0, first, packed=True, give_up_after=None)

    # -- the model ----------------------------------------------------------------------------------------------

    def _contents(self, layer, salt, tokens):
        """[2][len(tokens), kv_heads, dim]: the keys and values that a layer has to hold."""
        known = (layer, salt, tuple(tokens))
        if known in self.contents:
            return self.contents[known]
        layer_spec = self.spec.layers[layer]
        state, states = 7 if salt is None else 11, []
        for token in tokens:
            state = (state * 31 + token + 1) % 65521
            states.append(state)
        sides = []
        for side, dim in enumerate((layer_spec.key_dim, layer_spec.value_dim)):
            sides.append(
                np.array(
                    [
                        [
                            [state * 64 + layer * 16 + head * 8 + side * 4 + place for place in range(dim)]
                            for head in range(layer_spec.kv_heads)
                        ]
                        for state in states
                    ],
                    np.float64,
                ).reshape(len(states), layer_spec.kv_heads, dim)
            )
        self.contents[known] = sides
        return sides

    def _native(self, layer, sides):
        layer_spec = self.spec.layers[layer]
        arrays = [
            side.astype(dtype.numpy)
            for side, dtype in zip(sides, (layer_spec.dtype, layer_spec.value_dtype), strict=True)
        ]
        return [torch.from_numpy(array) for array in arrays] if self.backend == "torch" else arrays

    def _new(self, layer, batch, packed):
        """Keys and values of `batch`, a list of (row, new tokens), as step.write takes them."""
        sides = [[], []]
        for row, new in batch:
            whole = self._contents(layer, row.salt, row.tokens + new)
            for side in (0, 1):
                sides[side].append(whole[side][len(row.tokens) :])
        if packed:
            return self._native(layer, [np.concatenate(side) for side in sides])
        # [rows, n, kv_heads, dim], looked at as [rows, kv_heads, n, dim] as models do, or made so
        stacked = self._native(layer, [np.stack(side) for side in sides])
        return [side.swapaxes(1, 2) for side in stacked]

    def _row(self, number):
        return self.rows[number % len(self.rows)]

    def _in(self):
        return [row for row in self.rows if not row.is_out]

    def _holders(self, page):
        return sum(page in row.handle.pages for row in self.rows)

    def _needed(self, batch):
        """Pages that new tokens take."""
        size = self.page_size
        n, writers = 0, {}
        for row, new in batch:
            have = len(row.tokens)
            n += (have + len(new) + size - 1) // size - (have + size - 1) // size
            if have % size:
                writers.setdefault(row.handle.pages[-1], []).append(row)
        for page, rows in writers.items():
            others = self._holders(page) - len(rows)
            n += len(rows) if others else len(rows) - 1
        return n

    def _available(self):
        return self.n_pages - len({page for row in self.rows for page in row.handle.pages})

    def _snapshot(self):
        stats = self.cache.stats
        return (
            stats.pages_free,
            stats.pages_cached,
            [(row.handle.pages, row.handle.length) for row in self.rows],
        )

    def _refused(self, error, call, *args, **options):
        before = self._snapshot()
        with pytest.raises(error) as caught:
            call(*args, **options)
        assert self._snapshot() == before
        return caught.value

    # -- sequences ----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.rows) < 6)
    @rule(salt=st.sampled_from(SALTS))
    def start(self, salt):
        self.rows.append(Row(self.cache.sequence(salt=salt), salt))

    @precondition(lambda self: 0 < len(self.rows) < 6)
    @rule(number=_numbers, n=st.integers(1, 2))
    def fork(self, number, n):
        row = self._row(number)
        if row.is_out:
            self._refused(SequenceError, row.handle.fork)
            return
        before = self.cache.available
        for handle in row.handle.fork(n) if n > 1 else [row.handle.fork()]:
            self.rows.append(Row(handle, row.salt, list(row.tokens)))
        assert self.cache.available == before

    @precondition(lambda self: len(self.rows) > 2)
    @rule(number=_numbers)
    def free(self, number):
        row = self._row(number)
        self.prompts.append((row.salt, list(row.tokens)))
        row.handle.free()
        self.rows.remove(row)
        self.freed.append(row.handle)
        assert (row.handle.is_live, row.handle.length, row.handle.pages) == (False, 0, ())

    @precondition(lambda self: self.freed)
    @rule(number=_numbers)
    def use_a_freed_one(self, number):
        handle = self.freed[number % len(self.freed)]
        for call in (
            handle.free,
            handle.fork,
            handle.checkpoint,
            handle.swap_out,
            handle.swap_in,
            lambda: handle.truncate(0),
            lambda: handle.publish([]),
            lambda: handle.read(0),
            lambda: self.cache.block_table([handle]),
            lambda: self.cache.would_fit(1, handle),
            lambda: self.cache.step([handle], 1),
            lambda: self.cache.keep(handle),
        ):
            self._refused(SequenceError, call)

    @precondition(lambda self: self.rows)
    @rule(number=_numbers, cut=st.integers(-1, 8))
    def truncate(self, number, cut):
        row = self._row(number)
        if row.is_out:
            self._refused(SequenceError, row.handle.truncate, 0)
            return
        keep = len(row.tokens) - cut
        if not 0 <= keep <= len(row.tokens):
            self._refused(ArgumentError, row.handle.truncate, keep)
            return
        row.handle.truncate(keep)
        self._cut(row, keep)

    def _cut(self, row, keep):
        del row.tokens[keep:]
        row.dead.update(mark for mark, tokens in row.marks if len(tokens) > keep)

    @precondition(lambda self: self.rows)
    @rule(number=_numbers)
    def checkpoint(self, number):
        row = self._row(number)
        if not row.is_out:
            row.marks.append((row.handle.checkpoint(), list(row.tokens)))

    @precondition(lambda self: any(row.marks for row in self.rows))
    @rule(number=_numbers, which=_numbers)
    def rollback(self, number, which):
        rows = [row for row in self.rows if row.marks]
        row = rows[number % len(rows)]
        mark, tokens = row.marks[which % len(row.marks)]
        if row.is_out:
            self._refused(SequenceError, row.handle.rollback, mark)
            return
        if mark in row.dead:
            self._refused(CheckpointError, row.handle.rollback, mark)
            return
        assert row.tokens[: len(tokens)] == tokens, "the model: a live checkpoint means the tokens of then"
        row.handle.rollback(mark)
        self._cut(row, len(tokens))

    # -- prefixes -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.rows)
    @rule(number=_numbers, cut=st.integers(0, 3))
    def publish(self, number, cut):
        row = self._row(number)
        if row.is_out:
            self._refused(SequenceError, row.handle.publish, [])
            return
        tokens = row.tokens[: max(0, len(row.tokens) - cut)]
        n = row.handle.publish(iter(tokens))
        assert n % self.page_size == 0
        assert n <= len(tokens)
        for stop in range(self.page_size, n + 1, self.page_size):
            self.published.add((row.salt, tuple(tokens[:stop])))

    @precondition(lambda self: len(self.rows) < 6)
    @rule(
        number=_numbers,
        more=st.lists(st.sampled_from(TOKENS), max_size=3),
        salt=st.sampled_from(SALTS),
    )
    def match(self, number, more, salt):
        known = [(row.salt, row.tokens) for row in self.rows] + self.prompts
        prompt = list(more)
        if known:
            salt, tokens = known[number % len(known)]
            prompt = list(tokens) + more
        handle = self.cache.match(prompt, salt=salt)
        n = handle.length
        assert n % self.page_size == 0
        assert n <= max(0, len(prompt) - 1)
        for stop in range(self.page_size, n + 1, self.page_size):
            assert (salt, tuple(prompt[:stop])) in self.published
        self.rows.append(Row(handle, salt, prompt[:n]))

    @precondition(lambda self: len(self.published) > 3)
    @rule()
    def reset_prefix_cache(self):
        self.cache.reset_prefix_cache()
        self.published.clear()
        assert self.cache.stats.pages_cached == 0
        for row in self.rows:
            found = self.cache.match([*row.tokens, 0], salt=row.salt)
            assert found.length == 0
            found.free()

    # -- steps --------------------------------------------------------------------------------------------------

    def _batch(self, data, uniform):
        rows = self._in()
        chosen = data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=3, unique=True))
        n = data.draw(st.integers(1, 6))
        new = st.lists(st.sampled_from(TOKENS), min_size=n if uniform else 1, max_size=n if uniform else 6)
        return [(row, data.draw(new)) for row in chosen]

    @precondition(lambda self: self._in())
    @rule(
        data=st.data(), uniform=st.booleans(), packed=st.booleans(), order=st.randoms(use_true_random=False)
    )
    def step(self, data, uniform, packed, order):
        layers = list(self.owned)
        order.shuffle(layers)
        self._step(self._batch(data, uniform), layers, uniform, packed or not uniform)

    def _step(self, batch, layers, uniform, packed):
        counts = [len(new) for _, new in batch]
        step = self.cache.step([row.handle for row, _ in batch], counts[0] if uniform else counts)
        if self._needed(batch) > self._available():
            error = self._refused(CapacityError, step.__enter__)
            assert (error.requested, error.available) == (self._needed(batch), self._available())
            return
        with step:
            for layer in layers:
                step.write(layer, *self._new(layer, batch, packed))
            with pytest.raises(LayerOrderError):
                step.write(layers[0], *self._new(layers[0], batch, packed))
        for row, new in batch:
            row.tokens += new

    @precondition(lambda self: self._in() and len(self.rows) < 6)
    @rule(number=_numbers, n=st.integers(1, 2), new=st.data())
    def beams(self, number, n, new):
        """Fork and write one token into each at once, as beam search does."""
        rows = self._in()
        row = rows[number % len(rows)]
        forks = [Row(handle, row.salt, list(row.tokens)) for handle in row.handle.fork(n)]
        self.rows += forks
        batch = [(beam, [new.draw(st.sampled_from(TOKENS))]) for beam in (*forks, row)]
        self._step(batch, self.owned, True, False)

    @precondition(lambda self: len(self.rows) < 6)
    @rule(number=_numbers, new=_tokens, salt=st.sampled_from(SALTS))
    def serve(self, number, new, salt):
        """Look a prompt up, compute the rest of it, publish it."""
        self.match(number, new, salt)
        self._append(self.rows[-1], new, True, None)
        self.publish(len(self.rows) - 1, 0)

    @precondition(lambda self: self._in())
    @rule(
        data=st.data(),
        n_layers=st.integers(0, 3),
        how=st.sampled_from(["raise", "interrupt", "leave", "shape"]),
    )
    def step_that_fails(self, data, n_layers, how):
        batch = self._batch(data, uniform=True)
        step = self.cache.step([row.handle for row, _ in batch], len(batch[0][1]))
        if self._needed(batch) > self._available():
            self._refused(CapacityError, step.__enter__)
            return
        # an exception after the last layer takes the tokens back, too
        written = self.owned[
            : n_layers if how in ("raise", "interrupt") else min(n_layers, len(self.owned) - 1)
        ]
        errors = {
            "raise": ZeroDivisionError,
            "interrupt": Interrupted,
            "leave": LayerOrderError,
            "shape": ShapeError,
        }

        def inside():
            for layer in written:
                step.write(layer, *self._new(layer, batch, packed=False))
            for row, new in batch:
                assert row.handle.length == len(row.tokens) + len(new)
                for call in (row.handle.fork, row.handle.free, row.handle.checkpoint, row.handle.swap_out):
                    with pytest.raises(SequenceError, match="step is open"):
                        call()
            with pytest.raises(SequenceError, match="step is open"):
                self.cache.reset()
            if how == "raise":
                1 / 0
            if how == "interrupt":
                raise Interrupted
            if how == "shape":
                keys, values = self._new(self.owned[-1], batch, packed=False)
                step.write(self.owned[-1], keys[:, :, :0], values)

        with pytest.raises(errors[how]), step:
            inside()
        # the invariant sees that every layer holds what it held

    @precondition(lambda self: self._in())
    @rule(number=_numbers, new=_tokens, packed=st.booleans(), give_up_after=st.none() | st.integers(1, 2))
    def append(self, number, new, packed, give_up_after):
        rows = self._in()
        self._append(rows[number % len(rows)], new, packed, give_up_after)

    def _append(self, row, new, packed, give_up_after):
        batch = [(row, new)]
        wrong = self.owned[-1]
        if wrong != self.owned[0]:
            self._refused(LayerOrderError, row.handle.append, wrong, *self._new(wrong, batch, packed))
        if self._needed(batch) > self._available():
            first = self.owned[0]
            self._refused(CapacityError, row.handle.append, first, *self._new(first, batch, packed))
            return
        for n_done, layer in enumerate(self.owned):
            if n_done and n_done == give_up_after:
                self._refused(LayerOrderError, row.handle.fork)
                self._refused(LayerOrderError, row.handle.publish, [])
                self._refused(LayerOrderError, self.cache.step([row.handle], 1).__enter__)
                with pytest.raises(LayerOrderError):
                    row.handle.read(layer)
                row.handle.truncate(len(row.tokens))
                return
            row.handle.append(layer, *self._new(layer, batch, packed))
        row.tokens += new

    # -- host memory --------------------------------------------------------------------------------------------

    @precondition(lambda self: self._in())
    @rule(number=_numbers)
    def swap_out(self, number):
        rows = self._in()
        row = rows[number % len(rows)]
        row.handle.swap_out()
        row.is_out = True

    @precondition(lambda self: any(row.is_out for row in self.rows))
    @rule(number=_numbers)
    def swap_in(self, number):
        rows = [row for row in self.rows if row.is_out]
        row = rows[number % len(rows)]
        fits = -(-len(row.tokens) // self.page_size) <= self._available()
        try:
            before = self._snapshot()
            row.handle.swap_in()
        except CapacityError:
            assert not fits
            assert self._snapshot() == before
            return
        row.is_out = False  # pages that are still published and used by others need no room

    # -- all of them --------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.rows) > 3)
    @rule(number=_numbers)
    def keep(self, number):
        row = self._row(number)
        self.cache.keep(row.handle)
        self.freed += [other.handle for other in self.rows if other is not row]
        self.rows = [row]

    @precondition(lambda self: len(self.rows) > 4)  # or most runs would hold nothing
    @rule()
    def reset(self):
        self.cache.reset()
        self.freed += [row.handle for row in self.rows]
        self.rows = []
        self.published.clear()
        assert self.cache.stats.pages_free == self.n_pages

    # -- invariants ---------------------------------------------------------------------------------------------

    @invariant()
    def everything_reads_back(self):
        for row in self.rows:
            assert row.handle.length == len(row.tokens)
            assert row.handle.is_swapped_out == row.is_out
            if row.is_out:
                assert row.handle.pages == ()
                continue
            for layer, layer_spec in enumerate(self.spec.layers):
                owner = layer_spec.source if isinstance(layer_spec, SharedLayer) else layer
                expected = self._contents(owner, row.salt, row.tokens)
                for have, want in zip(row.handle.read(layer), expected, strict=True):
                    np.testing.assert_array_equal(np.asarray(have), want.swapaxes(0, 1))

    @invariant()
    def pages_add_up(self):
        stats = self.cache.stats
        used = {page for row in self.rows for page in row.handle.pages}
        assert stats.pages_used == len(used)
        assert stats.pages_free + stats.pages_cached + stats.pages_used == self.n_pages
        assert self.cache.available == self._available()
        assert stats.n_sequences == len(self.rows)
        assert stats.n_swapped_out == sum(row.is_out and bool(row.tokens) for row in self.rows)
        assert stats.used_nbytes == len(used) * self.page_size * self.spec.bytes_per_token

    @invariant()
    def tables_show_the_pages(self):
        rows = [row for row in self._in() if row.tokens]
        handles = [row.handle for row in rows]
        table, lengths = self.cache.block_table(handles)
        assert lengths.tolist() == [len(row.tokens) for row in rows]
        for row, pages in zip(rows, table.tolist(), strict=True):
            assert tuple(pages[: len(row.handle.pages)]) == row.handle.pages
        slots = self.cache.slot_mapping([(row.handle, 0, len(row.tokens)) for row in rows]).tolist()
        assert slots == [
            row.handle.pages[at // self.page_size] * self.page_size + at % self.page_size
            for row in rows
            for at in range(len(row.tokens))
        ]


def test_the_machine():
    run_state_machine_as_test(PagedMachine, settings=settings(stateful_step_count=30))
