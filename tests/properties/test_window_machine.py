"""Caches of layers that differ in windows, sinks and slack, against a model of lists: the tokens, and which are held."""

from __future__ import annotations

import copy
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

from gpuarena import Arena, CapacityError, CheckpointError, ShapeError
from gpuarena.errors import ArgumentError, LayerOrderError
from gpuarena.kv import FullLayer, KVCache, KVSpec, LayerSpec, SharedLayer

# ------------------------------------------------------------------------------------------------------------ the model


@dataclass
class Layer:
    """One layer: what it is made for, all tokens that it was given and kept, and the positions it still holds."""

    number: int
    heads: int
    key_dim: int
    value_dim: int
    window: int | None
    sinks: int
    slack: int | None
    rows: list[list[int]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    first: int = 0
    """The first position behind the sinks that is still held, 0 while nothing was forgotten."""

    @property
    def spec(self):
        return LayerSpec(
            self.heads,
            self.key_dim,
            self.value_dim,
            "float32",
            self.window,
            sinks=self.sinks,
            slack=self.slack,
        )

    @property
    def length(self):
        return len(self.rows[0]) if self.rows else 0

    def sees(self, query, key):
        """Whether the query at one position may look at the key at another."""
        return key <= query and (self.window is None or key > query - self.window or key < self.sinks)

    def append(self, new, max_tokens):
        """Take ``new`` ([row][token]), or return what is wrong and change nothing."""
        start, n_new = self.length, len(new[0])
        added = list(range(start, start + n_new))
        if start + n_new > max_tokens:
            return "full"
        held = self.held + added
        if self.slack is not None:
            n_slots = min(max_tokens, self.sinks + self.window + self.slack)
            if start == 0 and n_new > n_slots:
                held = added[: self.sinks] + added[n_new - n_slots + self.sinks :]
            elif len(held) > n_slots:
                held = [at for at in self.held if self.sees(start, at)] + added
            if len(held) > n_slots:
                return "chunk"
        if len(held) < self.length + n_new and held != self.held + added:
            self.first = held[self.sinks]
        self.held = held
        self.rows = [row + more for row, more in zip(self.rows or [[] for _ in new], new, strict=True)]
        return None

    def can_cut(self, n_tokens):
        if n_tokens in (0, self.length) or not self.first:
            return True
        return n_tokens - self.window + 1 >= self.first

    def cut(self, n_tokens):
        self.rows = [row[:n_tokens] for row in self.rows]
        self.held = [at for at in self.held if at < n_tokens]
        if n_tokens == 0:
            self.first = 0

    def shown(self, n_queries):
        """Return the positions that views for the last queries show."""
        if self.window is None or self.sinks:
            return self.held
        return [at for at in self.held if at > self.length - n_queries - self.window]

    def can_read(self, n_queries):
        """Whether all that the last queries may see is held."""
        if n_queries > self.length:
            return False
        queries = range(self.length - n_queries, self.length)
        held = set(self.held)
        return all(key in held for q in queries for key in range(q + 1) if self.sees(q, key))

    def contents(self, which, positions):
        """[rows, heads, tokens, dim], a function of the token, layer, head and dimension."""
        tokens = np.array([[row[at] for at in positions] for row in self.rows], np.int64)
        return self.contents_of(which, tokens.reshape(len(self.rows), len(positions)))

    def contents_of(self, which, tokens):
        factor, modulus, dim = ((11, 113, self.key_dim), (17, 127, self.value_dim))[which]
        head, element = np.arange(self.heads)[:, None, None], np.arange(dim)
        numbers = tokens[:, None, :, None] * factor + 5 * head + 3 * element + 7 * self.number
        return (numbers % modulus / 64).astype(np.float32)


@dataclass
class Saved:
    """What a checkpoint should bring back."""

    checkpoint: Any
    n_tokens: int
    n_rows: int | None
    rows: list[list[list[int]]]
    is_alive: bool = True


def attention(queries, keys, values, mask):
    """softmax(q k) v; all ``[rows, heads, tokens, dim]``, the mask ``[queries, tokens]``."""
    scores = queries @ keys.swapaxes(2, 3) / np.float32(np.sqrt(keys.shape[3]))
    weights = np.where(mask, np.exp(scores - scores.max()), 0)
    return weights / weights.sum(axis=-1, keepdims=True) @ values


# ------------------------------------------------------------------------------------------------------- the libraries


class Host:
    def buffer(self, nbytes):
        return np.full(nbytes, 0xFF, np.uint8)  # a float32 of these is NaN

    def array(self, numbers):
        return np.array(numbers)

    def numpy(self, array):
        return np.array(array)


class Torch:
    def __init__(self, device="cpu"):
        import torch

        self.torch, self.device = torch, device

    def buffer(self, nbytes):
        return self.torch.full((nbytes,), 0xFF, dtype=self.torch.uint8, device=self.device)

    def array(self, numbers):
        return self.torch.tensor(numbers, device=self.device)

    def numpy(self, array):
        return array.cpu().numpy().copy()


# ---------------------------------------------------------------------------------------------------------- the machine

_numbers = st.integers(0, 2**31)


@st.composite
def layers(draw):
    window = draw(st.none() | st.integers(1, 5))
    sinks = 0 if window is None else draw(st.sampled_from([0, 0, 1, 3]))
    slack = None if window is None else draw(st.none() | st.integers(1, 4))
    key_dim = draw(st.integers(1, 3))
    value_dim = draw(st.sampled_from([0, 1, 2, key_dim, key_dim]))
    return Layer(0, draw(st.integers(1, 2)), key_dim, value_dim, window, sinks, slack)


class WindowMachine(RuleBasedStateMachine):
    """Random calls on a cache, each followed by a comparison with the model."""

    def __init__(self, library):
        super().__init__()
        self.library = library
        self.saved: list[Saved] = []
        self.scopes: list[tuple[Any, Saved]] = []
        self.n_rows: int | None = None
        self.n_shared = 0
        self.next_token = 0

    @initialize(data=st.data(), batch=st.integers(1, 4), max_tokens=st.integers(4, 28))
    def start(self, data, batch, max_tokens):
        kinds = data.draw(st.lists(layers(), min_size=1, max_size=3))
        if data.draw(st.booleans()):  # chance would seldom make the layer that this is about
            kinds[-1].window, kinds[-1].slack = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
        self.batch, self.max_tokens = batch, max_tokens
        self.layers: list[Layer] = []
        self.shared: list[tuple[int, Layer]] = []
        specs: list[Any] = []
        for layer in kinds:
            layer.number = len(specs)
            specs.append(layer.spec)
            self.layers.append(layer)
            if data.draw(st.integers(0, 3)) == 0:
                source = data.draw(st.sampled_from(self.layers))
                self.shared.append((len(specs), source))
                specs.append(SharedLayer(source.number))
        spec = KVSpec(specs)
        self.memory = self.library.buffer(spec.arena_nbytes(batch, max_tokens) + 512)
        self.cache = KVCache(Arena.from_buffer(self.memory), spec, batch=batch, max_tokens=max_tokens)

    # -- helpers ------------------------------------------------------------------------------------------------

    @property
    def length(self):
        return min(layer.length for layer in self.layers)

    @property
    def is_even(self):
        return len({layer.length for layer in self.layers}) == 1

    @property
    def is_empty(self):
        return not any(layer.length for layer in self.layers)

    def _state(self):
        cache = self.cache
        held = [
            (layer.length, layer.n_held, layer.held_from) for layer in cache.layers if hasattr(layer, "floor")
        ]
        return held, cache.rows, cache.stats, self.library.numpy(self.memory).tobytes()

    def _expect(self, errors, call, *args):
        """Call what must raise, and change nothing."""
        before = self._state()
        with pytest.raises(errors) as caught:
            call(*args)
        assert self._state() == before, "a call that raised changed the cache"
        return caught.value

    def _draw_rows(self, data):
        """How many rows an append may have: those in use, or any while nothing is held."""
        return data.draw(st.integers(1, self.batch)) if self.is_empty else self.n_rows

    def _new(self, n_rows, n_new):
        first = self.next_token
        self.next_token += n_rows * n_new
        return np.arange(first, self.next_token).reshape(n_rows, n_new)

    def _append(self, layer, n_rows, n_new, *, as_pair=False, raises=None):
        """Append to one layer, or see it refused; return whether it was written."""
        tokens = self._new(n_rows, n_new)
        numbers = [layer.contents_of(which, tokens) for which in (0, 1)]
        held = self.cache.layers[layer.number]
        start, before = layer.length, layer.held
        if self.is_empty:
            self._start_rows(n_rows)
        wrong = layer.append(tokens.tolist(), self.max_tokens)
        if as_pair and isinstance(held, FullLayer) and layer.key_dim == layer.value_dim:
            arrays = [self.library.array(np.stack(numbers))]
            call = held.append_pair
        else:
            arrays = [self.library.array(array) for array in numbers]
            call = lambda *arrays: self.cache.append(layer.number, *arrays)  # noqa: E731
        if wrong:
            if raises is not None:
                raises.update(layer=layer.number)
                call(*arrays)
            error = self._expect(CapacityError, call, *arrays)
            if wrong == "full":
                figures = (start, n_new, self.max_tokens, self.max_tokens - start)
            else:
                seen = [at for at in before if layer.sees(start, at)]
                n_slots = layer.sinks + layer.window + layer.slack
                figures = (len(seen), n_new, n_slots, n_slots - len(seen))
            assert (error.used, error.requested, error.capacity, error.available) == figures
            assert error.missing == error.requested - error.available > 0
            assert "Nothing was written" in str(error)
            return False
        self.n_rows = n_rows
        whole = len(layer.held) < layer.length and start == 0
        shown = list(range(n_new)) if whole else layer.shown(n_new)
        views = call(*arrays)
        for which, view in enumerate(views):
            wanted = layer.contents(which, shown)
            assert tuple(view.shape) == wanted.shape
            assert np.array_equal(self.library.numpy(view), wanted), f"layer {layer.number}"
        self._check_mask(layer.number, layer, n_new, shown)
        return True

    def _start_rows(self, n_rows):
        for layer in self.layers:
            layer.rows = [[] for _ in range(n_rows)]

    def _check_mask(self, number, layer, n_queries, shown):
        mask = self.library.numpy(self.cache.mask(number, n_queries))
        queries = range(layer.length - n_queries, layer.length)
        wanted = np.array([[layer.sees(q, key) for key in shown] for q in queries], bool)
        assert np.array_equal(mask, wanted.reshape(n_queries, len(shown)))

    def _kill_above(self, n_tokens):
        for saved in self.saved:
            saved.is_alive &= saved.n_tokens <= n_tokens

    def _cut(self, layers, n_tokens):
        for layer in layers:
            layer.cut(n_tokens)
        self.n_shared = min(self.n_shared, n_tokens)
        self._kill_above(n_tokens)

    # -- appending ----------------------------------------------------------------------------------------------

    @rule(data=st.data(), n_new=st.integers(0, 6), as_pair=st.booleans())
    def append(self, data, n_new, as_pair):
        n_rows = self._draw_rows(data)
        for layer in self.layers:
            if not self._append(layer, n_rows, n_new, as_pair=as_pair):
                break

    @rule(data=st.data(), n_new=st.integers(1, 28))
    def prompt(self, data, n_new):
        """The first tokens may be more than a bounded layer has slots."""
        if self.is_empty:
            self.append(data, min(n_new, self.max_tokens), False)

    @rule(data=st.data(), n_steps=st.integers(1, 8))
    def decode(self, data, n_steps):
        for _ in range(min(n_steps, self.max_tokens - max(layer.length for layer in self.layers))):
            self.append(data, 1, False)

    @rule(data=st.data(), number=_numbers, extra=st.sampled_from([0, 1, 2]))
    def append_about_as_much_as_fits(self, data, number, extra):
        layer = self.layers[number % len(self.layers)]
        if layer.slack is not None:
            self.append(data, layer.slack + extra, False)

    @rule(data=st.data(), number=_numbers, n_new=st.integers(0, 3))
    def append_to_one_layer(self, data, number, n_new):
        self._append(self.layers[number % len(self.layers)], self._draw_rows(data), n_new)

    @precondition(lambda self: self.n_rows and not self.is_empty)
    @rule(number=_numbers, back=st.integers(1, 4), n_new=st.integers(1, 3))
    def append_what_is_held(self, number, back, n_new):
        """A bounded layer moves its window before it writes, and the views then show something else."""
        layer = self.layers[number % len(self.layers)]
        slots = list(range(len(layer.held)))[-back:][:n_new]
        held = self.cache.layers[layer.number]
        after = copy.deepcopy(layer)
        after.rows = [[*row] for row in layer.rows]
        new = [[row[layer.held[slot]] for slot in slots] for row in layer.rows]
        if not slots or after.append(new, self.max_tokens):
            return
        part = slice(slots[0], slots[-1] + 1)
        self.cache.append(layer.number, held.keys[:, :, part], held.values[:, :, part])
        layer.append(new, self.max_tokens)

    @precondition(lambda self: not self.is_even)
    @rule()
    def even_out(self):
        longest = max(layer.length for layer in self.layers)
        for layer in self.layers:
            while layer.length < longest:
                assert self._append(layer, self.n_rows, 1)

    @rule(
        data=st.data(),
        chunks=st.lists(st.integers(0, 5), min_size=1, max_size=2),
        stop=st.integers(0, 7),
        is_silent=st.booleans(),
    )
    def step(self, data, chunks, stop, is_silent):
        """Append in a step, which fails at some layer, is left early, or passes."""
        n_rows = self._draw_rows(data)
        before, rows_before = [layer.length for layer in self.layers], self.n_rows
        caught: Any = None
        refused: dict[str, int] = {}
        try:
            with self.cache.step():
                done = 0
                for layer in self.layers:
                    for n_new in chunks:
                        if done == stop:
                            if is_silent:
                                break
                            raise KeyError("passes")
                        done += 1
                        self._append(layer, n_rows, n_new, raises=refused)
        except (KeyError, CapacityError, LayerOrderError) as error:
            caught = error
        if isinstance(caught, CapacityError):
            assert refused
        if caught is None:
            assert self.is_even
            return
        assert isinstance(caught, LayerOrderError) == (is_silent and not refused) or not self.is_even
        longer = [
            (layer, n_tokens)
            for layer, n_tokens in zip(self.layers, before, strict=True)
            if layer.length > n_tokens
        ]
        if not all(layer.can_cut(n_tokens) for layer, n_tokens in longer):
            told = [str(caught), *getattr(caught, "__notes__", [])]
            assert any("bounded window" in text for text in told)
            return
        for layer, n_tokens in longer:
            self._cut([layer], n_tokens)
        if not any(before):
            self.n_rows = rows_before

    # -- going back ---------------------------------------------------------------------------------------------

    def _save(self, checkpoint):
        assert checkpoint.n_tokens == self.length
        rows = copy.deepcopy([layer.rows for layer in self.layers])
        self.saved.append(Saved(checkpoint, self.length, self.n_rows, rows))
        return self.saved[-1]

    def _restore(self, saved):
        self._cut(self.layers, saved.n_tokens)
        for layer, rows in zip(self.layers, saved.rows, strict=True):
            layer.rows = copy.deepcopy(rows)
        self.n_rows = saved.n_rows

    def _can_restore(self, saved):
        return saved.is_alive and all(layer.can_cut(saved.n_tokens) for layer in self.layers)

    @rule()
    def checkpoint(self):
        if self.is_even:
            self._save(self.cache.checkpoint())
        else:
            self._expect(CheckpointError, self.cache.checkpoint)

    @precondition(lambda self: self.saved)
    @rule(number=_numbers)
    def rollback(self, number):
        saved = self.saved[-1 - number % min(len(self.saved), 4)]
        if self._can_restore(saved):
            self.cache.rollback(saved.checkpoint)
            self._restore(saved)
        else:
            self._expect(CheckpointError, self.cache.rollback, saved.checkpoint)

    @rule()
    def open_scope(self):
        if self.is_even:
            scope = self.cache.scope()
            self.scopes.append((scope, self._save(scope.__enter__())))

    @precondition(lambda self: self.scopes)
    @rule(exception=st.none() | st.just(KeyError("passes")))
    def close_scope(self, exception):
        scope, saved = self.scopes.pop()
        leave = (None if exception is None else KeyError, exception, None)
        if self._can_restore(saved):
            assert not scope.__exit__(*leave), "exceptions pass"
            self._restore(saved)
        elif exception is None:
            self._expect(CheckpointError, scope.__exit__, *leave)
        else:
            assert not scope.__exit__(*leave), "exceptions pass"

    @rule(back=st.integers(-1, 8))
    def truncate(self, back):
        self._truncate(self.length - back)

    @rule(number=_numbers, off=st.sampled_from([-1, 0, 1]))
    def truncate_to_about_the_floor(self, number, off):
        layer = self.layers[number % len(self.layers)]
        self._truncate(self.cache.layers[layer.number].floor + off)

    def _truncate(self, n_tokens):
        if 0 <= n_tokens <= self.length and all(layer.can_cut(n_tokens) for layer in self.layers):
            self.cache.truncate(n_tokens)
            self._cut(self.layers, n_tokens)
        else:
            self._expect(ArgumentError, self.cache.truncate, n_tokens)

    @rule(number=_numbers, back=st.integers(-1, 6))
    def truncate_one_layer(self, number, back):
        layer = self.layers[number % len(self.layers)]
        n_tokens = layer.length - back
        held = self.cache.layers[layer.number]
        if 0 <= n_tokens <= layer.length and layer.can_cut(n_tokens):
            held.truncate(n_tokens)
            self._cut([layer], n_tokens)
        else:
            self._expect(ArgumentError, held.truncate, n_tokens)

    @rule()
    def reset(self):
        self.cache.reset()
        self._cut(self.layers, 0)
        self._kill_above(-1)
        self.n_rows = None

    # -- rows ---------------------------------------------------------------------------------------------------

    def _move(self, rows):
        self._kill_above(self.n_shared)
        for layer in self.layers:
            layer.rows = [list(layer.rows[row]) for row in rows]
        self.n_rows = len(rows)

    @precondition(lambda self: self.n_rows)
    @rule(data=st.data(), keeps_count=st.booleans())
    def move_rows(self, data, keeps_count):
        least, most = (self.n_rows, self.n_rows) if keeps_count else (1, self.batch)
        rows = data.draw(st.lists(st.integers(0, self.n_rows - 1), min_size=least, max_size=most))
        (self.cache.reorder if keeps_count else self.cache.select)(rows)
        if self.is_empty:
            self._start_rows(self.n_rows)
        self._move(rows)

    @precondition(lambda self: self.n_rows)
    @rule(n=st.integers(1, 4))
    def repeat(self, n):
        if self.n_rows * n > self.batch:
            self._expect(ShapeError, self.cache.repeat, n)
            return
        is_single = self.n_rows == 1
        self.cache.repeat(n)
        if self.is_empty:
            self._start_rows(self.n_rows)
        if is_single:  # what was held before is the same in all rows: no checkpoint dies
            self.n_shared = self.max_tokens
        self._move([row for row in range(self.n_rows) for _ in range(n)])
        if is_single:
            self.n_shared = self.length

    # -- reading ------------------------------------------------------------------------------------------------

    @rule(number=_numbers, n_queries=st.integers(0, 6), of_all=st.booleans())
    def read(self, number, n_queries, of_all):
        numbers = [(layer.number, layer) for layer in self.layers] + self.shared
        index, layer = numbers[number % len(numbers)]
        if of_all:
            n_queries = layer.length
        if not layer.can_read(n_queries):
            self._expect(ArgumentError, self.cache.read, index, n_queries)
            if n_queries != layer.length:  # for all there may be what an append gave back
                self._expect(ArgumentError, self.cache.mask, index, n_queries)
            return
        if not layer.rows or self.n_rows is None:
            return
        shown = layer.shown(n_queries)
        keys, values = (self.library.numpy(view) for view in self.cache.read(index, n_queries))
        assert np.array_equal(keys, layer.contents(0, shown))
        assert np.array_equal(values, layer.contents(1, shown))
        self._check_mask(index, layer, n_queries, shown)
        if n_queries:
            self._check_attention(layer, n_queries, keys, values, self.cache.mask(index, n_queries))

    def _check_attention(self, layer, n_queries, keys, values, mask):
        """What the views and the mask give is attention over all tokens that ever were, with a band."""
        everything = range(layer.length)
        queries = layer.contents(0, everything)[:, :, layer.length - n_queries :] + np.float32(0.25)
        band = np.array([[layer.sees(q, key) for key in everything] for q in everything[-n_queries:]])
        wanted = attention(queries, layer.contents(0, everything), layer.contents(1, everything), band)
        found = attention(queries, keys, values, self.library.numpy(mask))
        assert np.allclose(found, wanted, rtol=1e-5, atol=1e-5)

    # -- as a whole ---------------------------------------------------------------------------------------------

    @invariant()
    def agrees_with_the_model(self):
        if not hasattr(self, "layers"):
            return
        cache = self.cache
        assert cache.rows == self.n_rows
        assert cache.length == self.length
        used = 0
        for layer in self.layers:
            held = cache.layers[layer.number]
            assert (held.length, held.n_held) == (layer.length, len(layer.held))
            assert [at for run in held.positions for at in run] == layer.held
            used += layer.heads * (layer.key_dim + layer.value_dim) * 4 * len(layer.held)
            assert held.held_from == layer.first
            if self.n_rows is None:
                continue
            rows = layer.rows if layer.length else [[] for _ in range(self.n_rows)]
            layer.rows = rows
            for which, view in enumerate((held.keys, held.values)):
                wanted = layer.contents(which, layer.held)
                assert tuple(view.shape) == wanted.shape
                assert np.array_equal(self.library.numpy(view), wanted), f"layer {layer.number}"
        for number, layer in self.shared:
            assert cache.layers[number].length == layer.length
            assert cache.layers[number].keys.shape == cache.layers[layer.number].keys.shape
        assert cache.stats.used_nbytes == used * (self.n_rows or 0)


def run_window_machine(library, **options):
    """Run the machine on a library; `options` are of Hypothesis."""
    options = settings(settings.default, **{"deadline": None} | options)
    run_state_machine_as_test(lambda: WindowMachine(library), settings=options)


def test_windows_of_numpy_arrays_behave_as_the_model():
    run_window_machine(Host())


def test_windows_of_tensors_behave_as_the_model():
    pytest.importorskip("torch")
    run_window_machine(Torch())
