"""A `KVCache` against a model that keeps, for each layer and row, a list of token numbers."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field, replace
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

from gpuarena import (
    Arena,
    CapacityError,
    CheckpointError,
    DeviceMismatchError,
    DTypeError,
    ShapeError,
    StaleRegionError,
)
from gpuarena.errors import ArgumentError, ArgumentTypeError, NotCopyableError
from gpuarena.kv import KVCache, KVSpec, LayerSpec

_UNUSED = 0xA5  # what the memory holds where nothing was written


# -------------------------------------------------------------------------------- how to make and read native arrays


class HostLibrary:
    """NumPy arrays on a host arena."""

    dtypes = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "complex64")

    def buffer(self, nbytes):
        return np.full(nbytes, _UNUSED, np.uint8)

    def array(self, values, dtype):
        from gpuarena import as_dtype

        return values.astype(as_dtype(dtype).numpy)

    def numbers(self, array):
        """Return an array as int64 on the host."""
        return np.asarray(array).real.astype(np.int64)

    def raw(self, buffer):
        return np.array(buffer)

    def address(self, array):
        return array.ctypes.data

    def rows(self, numbers):
        """Return row numbers in the forms that are taken."""
        return [numbers, tuple(numbers), np.array(numbers), np.array(numbers, np.uint16)]

    def of_other_type(self, array):
        return [self.numbers(array).tolist(), None, 1.0, memoryview(b"bytes")]

    def elsewhere(self, array):
        """Return arrays of the library on other devices."""
        return []


class TorchLibrary:
    """Tensors on a torch arena."""

    dtypes = HostLibrary.dtypes

    def __init__(self, device="cpu"):
        import torch

        self.torch = torch
        self.device = device

    def buffer(self, nbytes):
        return self.torch.full((nbytes,), _UNUSED, dtype=self.torch.uint8, device=self.device)

    def array(self, values, dtype):
        return self.torch.from_numpy(values).to(self.device, getattr(self.torch, dtype))

    def numbers(self, array):
        array = array.real if array.is_complex() else array
        return array.to("cpu", self.torch.int64).numpy()

    def raw(self, buffer):
        return buffer.cpu().numpy().copy()

    def address(self, array):
        return array.data_ptr()

    def rows(self, numbers):
        tensor = self.torch.tensor(numbers)
        return [numbers, np.array(numbers), tensor.to(self.device), tensor.to(self.device, self.torch.int32)]

    def of_other_type(self, array):
        host = self.numbers(array)
        return [host, host.astype(np.float32), host.tolist(), None, 1.0]

    def elsewhere(self, array):
        return [array.to("meta"), *([] if self.device == "cpu" else [array.cpu()])]


class CupyLibrary(HostLibrary):
    """CuPy arrays on a cupy arena."""

    dtypes = ("float32", "float16", "float64", "int8", "uint8", "complex64")

    def __init__(self):
        import cupy

        self.cupy = cupy

    def buffer(self, nbytes):
        return self.cupy.full(nbytes, _UNUSED, self.cupy.uint8)

    def array(self, values, dtype):
        return self.cupy.asarray(values).astype(dtype)

    def numbers(self, array):
        return array.get().real.astype(np.int64)

    def raw(self, buffer):
        return buffer.get()

    def address(self, array):
        return array.data.ptr

    def of_other_type(self, array):
        return [array.get(), array.get().tolist(), None, 1.0]


# ------------------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class Shape:
    """What a layer is made for."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: str
    value_dtype: str
    window: int | None


@dataclass
class Saved:
    """What a checkpoint should bring back."""

    checkpoint: Any
    n_rows: int | None
    tokens: list[list[list[int]]]
    is_alive: bool = True

    @property
    def n_tokens(self):
        return max((len(row) for layer in self.tokens for row in layer), default=0)


@dataclass
class Model:
    """Layer -> row -> the numbers of its tokens. Each token that is appended has a number of its own."""

    tokens: list[list[list[int]]]
    n_rows: int | None = None
    saved: list[Saved] = field(default_factory=list)
    n_shared: int = 0  # tokens that all rows have had in common since there was one row only
    high_water: int = 0
    lengths: list[int] = field(default_factory=list)

    @property
    def length(self):
        return min(self.lengths)

    @property
    def is_even(self):
        return len(set(self.lengths)) == 1

    def cut(self, layer, n_tokens):
        self.tokens[layer] = [row[:n_tokens] for row in self.tokens[layer]]
        self.lengths[layer] = n_tokens
        self.n_shared = min(self.n_shared, n_tokens)
        self.kill_above(n_tokens)

    def kill_above(self, n_tokens):
        for saved in self.saved:
            saved.is_alive &= saved.n_tokens <= n_tokens

    def move(self, rows):
        self.kill_above(self.n_shared)
        self.tokens = [[list(layer[row]) for row in rows] for layer in self.tokens]
        self.n_rows = len(rows)

    def restore(self, saved):
        self.kill_above(saved.n_tokens)
        self.tokens = copy.deepcopy(saved.tokens)
        self.n_rows = saved.n_rows
        self.lengths = [saved.n_tokens] * len(self.lengths)
        self.n_shared = min(self.n_shared, saved.n_tokens)


def contents(tokens, heads, dim, *, factor, modulus):
    """Return what the tokens numbered ``tokens`` ([rows, n]) hold: [rows, heads, n, dim] of small integers."""
    numbers = np.asarray(tokens, np.int64)[:, None, :, None] * factor
    return (
        numbers + 5 * np.arange(heads)[None, :, None, None] + 3 * np.arange(dim)[None, None, None, :]
    ) % modulus


def as_table(rows):
    """Return lists of token numbers, one a row, as an array [rows, n], also when there are none."""
    return np.array(rows, np.int64).reshape(len(rows), len(rows[0]) if rows else 0)


# ---------------------------------------------------------------------------------------------------------- the machine

_numbers = st.integers(0, 2**31)
_dims = st.integers(1, 4)


class KVMachine(RuleBasedStateMachine):
    """Random calls on a cache, each followed by a comparison with the model."""

    stride: int | None = None
    """Bytes from a token to the next; None where they lie one behind the other."""

    def __init__(self, library):
        super().__init__()
        self.library = library
        self.next_token = 0
        self.scopes: list[tuple[Any, Saved]] = []
        self.dead: list[tuple[KVCache, list[Shape]]] = []

    @initialize(data=st.data(), batch=st.integers(1, 6), max_tokens=st.integers(1, 12))
    def start(self, data, batch, max_tokens):
        dtypes = st.sampled_from(self.library.dtypes)
        windows = st.none() | st.integers(1, 6)
        shapes = st.builds(Shape, st.integers(1, 3), _dims, _dims, dtypes, dtypes, windows)
        self.shapes = data.draw(st.lists(shapes, min_size=1, max_size=3))
        self.batch, self.max_tokens = batch, max_tokens
        self.spec = KVSpec(
            LayerSpec(s.heads, s.key_dim, s.value_dim, s.dtype, s.window, s.value_dtype) for s in self.shapes
        )
        self._make_arena()
        self.before = self.arena.checkpoint()
        self._make_cache()

    def _make_arena(self):
        nbytes = self.spec.arena_nbytes(self.batch, self.max_tokens)
        self.memory = self.library.buffer(nbytes + 512)  # the alignment before, and some room behind
        self.arena = Arena.from_buffer(self.memory)

    def _make_cache(self):
        self.cache = KVCache(self.arena, self.spec, batch=self.batch, max_tokens=self.max_tokens)
        n_layers = len(self.shapes)
        self.model = Model([[] for _ in range(n_layers)], lengths=[0] * n_layers)
        self.scopes.clear()
        self._find_memory()

    def _find_memory(self):
        self.addresses = [self._addresses(layer) for layer in self.cache.layers]
        base = self.library.address(self.memory)
        inside = np.zeros(len(self._raw()), bool)
        for layer in self.cache.layers:
            for region in layer.regions:
                inside[region.address - base : region.address - base + region.nbytes] = True
        last = self.cache.layers[-1].regions[-1]
        scratch_stop = self.arena.address + self.arena.stats.top - base
        inside[last.address - base + last.nbytes : scratch_stop] = True
        self.outside = ~inside

    # -- helpers ------------------------------------------------------------------------------------------------

    def _n_slots(self):
        """Tokens that memory was taken for."""
        return self.max_tokens

    def _addresses(self, layer):
        """Where keys and values begin: a region each, or the halves of one."""
        first, last = layer.regions[0], layer.regions[-1]
        return first.address, last.address + (last.nbytes // 2 if first is last else 0)

    def _raw(self):
        return self.library.raw(self.memory)

    def _expect(self, errors, call, *args):
        """Call what must raise, and change nothing."""
        before, state = self._raw(), self._state()
        with pytest.raises(errors) as caught:
            call(*args)
        assert self._state() == state, "a call that raised changed the cache"
        assert np.array_equal(self._raw(), before), "a call that raised changed the memory"
        return caught.value

    def _state(self):
        cache = self.cache
        return [layer.length for layer in cache.layers], cache.rows, cache.stats

    def _one_of(self, data, choices):
        return choices[data.draw(st.integers(0, len(choices) - 1))]  # sampled_from would compare arrays

    def _new_tokens(self, n_rows, n_tokens):
        first = self.next_token
        self.next_token += n_rows * n_tokens
        return np.arange(first, self.next_token).reshape(n_rows, n_tokens)

    def _arrays(self, shape, tokens, *, strided=False):
        pair = []
        for dim, dtype, factor, modulus in (
            (shape.key_dim, shape.dtype, 11, 113),
            (shape.value_dim, shape.value_dtype, 17, 127),
        ):
            values = contents(tokens, shape.heads, dim, factor=factor, modulus=modulus)
            if strided:  # [rows, n, heads, dim] seen as [rows, heads, n, dim], as models make them
                array = self.library.array(np.ascontiguousarray(values.transpose(0, 2, 1, 3)), dtype)
                pair.append(array.swapaxes(1, 2))
            else:
                pair.append(self.library.array(values, dtype))
        return pair

    def _check(self, array, layer, which, table):
        """Compare a native array with the contents of the tokens of ``table`` ([rows, n])."""
        shape = self.shapes[layer]
        dim = (shape.key_dim, shape.value_dim)[which]
        factor, modulus = ((11, 113), (17, 127))[which]
        wanted = contents(table, shape.heads, dim, factor=factor, modulus=modulus)
        assert tuple(array.shape) == wanted.shape
        found = self.library.numbers(array)
        assert np.array_equal(found, wanted), f"layer {layer}, {('keys', 'values')[which]}"

    def _n_rows_of_append(self, data):
        """Return how many rows an append may have: those in use, or any while nothing is held."""
        return data.draw(st.integers(1, self.batch)) if not any(self.model.lengths) else self.model.n_rows

    def _append(self, layer, n_rows, n_new, *, strided=False):
        """Append to one layer, or see it refused; return whether it was written."""
        model, shape = self.model, self.shapes[layer]
        start = model.lengths[layer]
        tokens = self._new_tokens(n_rows, n_new)
        arrays = self._arrays(shape, tokens, strided=strided)
        if start + n_new > self.max_tokens:
            error = self._expect(CapacityError, self.cache.append, layer, *arrays)
            missing = start + n_new - self.max_tokens
            assert (error.used, error.requested, error.capacity) == (start, n_new, self.max_tokens)
            assert (error.available, error.missing) == (self.max_tokens - start, missing)
            return False
        views = self.cache.append(layer, *arrays)
        self._note(layer, tokens)
        self._check_views(layer, n_new, views)
        return True

    def _note(self, layer, tokens):
        model = self.model
        if model.n_rows != len(tokens):
            assert not any(model.lengths), "the machine itself keeps the rows"
            model.n_rows = len(tokens)
            model.tokens = [[[] for _ in tokens] for _ in model.tokens]
        for row, new in zip(model.tokens[layer], tokens.tolist(), strict=True):
            row.extend(new)
        model.lengths[layer] += tokens.shape[1]
        model.high_water = max(model.high_water, model.lengths[layer])

    def _check_views(self, layer, n_new, views):
        """The views show what the last query may see, and lie where the layer lies."""
        shape, table = self.shapes[layer], as_table(self.model.tokens[layer])
        n_seen = table.shape[1] if shape.window is None else min(shape.window - 1 + n_new, table.shape[1])
        low = table.shape[1] - n_seen
        for which, (view, dim, base) in enumerate(
            zip(views, (shape.key_dim, shape.value_dim), self.addresses[layer], strict=True)
        ):
            self._check(view, layer, which, table[:, low:])
            if n_seen:
                dtype = self.spec.layers[layer].dtype if which == 0 else self.spec.layers[layer].value_dtype
                stride = dim * dtype.itemsize if self.stride is None else self.stride
                assert self.library.address(view) == base + low * stride

    # -- appending ----------------------------------------------------------------------------------------------

    @rule(data=st.data(), n_new=st.integers(0, 5), strided=st.booleans())
    def step(self, data, n_new, strided):
        n_rows = self._n_rows_of_append(data)
        for layer in range(len(self.shapes)):
            if not self._append(layer, n_rows, n_new, strided=strided):
                break

    @rule(data=st.data(), spare=st.sampled_from([-1, 0, 1]))
    def step_to_the_brim(self, data, spare):
        n_new = self.max_tokens - self.model.lengths[0] - spare
        if n_new >= 0:
            self.step(data, n_new, False)

    @rule(data=st.data(), layer=_numbers, n_new=st.integers(0, 3))
    def append_to_one_layer(self, data, layer, n_new):
        self._append(layer % len(self.shapes), self._n_rows_of_append(data), n_new)

    @precondition(lambda self: not self.model.is_even)
    @rule()
    def finish_the_step(self):
        longest = max(self.model.lengths)
        for layer, length in enumerate(self.model.lengths):
            self._append(layer, self.model.n_rows, longest - length)

    @precondition(lambda self: self.model.n_rows)
    @rule(layer=_numbers, start=st.integers(0, 5), n_new=st.integers(0, 6))
    def append_what_is_held(self, layer, start, n_new):
        layer %= len(self.shapes)
        table = as_table(self.model.tokens[layer])[:, start : start + n_new]
        if self.model.lengths[layer] + table.shape[1] > self.max_tokens:
            return
        held = self.cache.layers[layer]
        views = self.cache.append(
            layer, held.keys[:, :, start : start + n_new], held.values[:, :, start : start + n_new]
        )
        self._note(layer, table)
        self._check_views(layer, table.shape[1], views)

    @rule(
        data=st.data(),
        layer=_numbers,
        kind=st.sampled_from(
            [
                "rows",
                "heads",
                "heads of values",
                "key_dim",
                "value_dim",
                "tokens",
                "dtype",
                "ndim",
                "type",
                "device",
            ]
        ),
        n_new=st.integers(0, 3),
    )
    def append_what_does_not_fit(self, data, layer, kind, n_new):
        layer %= len(self.shapes)
        shape = self.shapes[layer]
        n_rows = self._n_rows_of_append(data)
        tokens = np.zeros((n_rows, n_new), np.int64)
        keys, values = self._arrays(shape, tokens)
        wrong: Any = ShapeError
        if kind == "rows":
            counts = {0, self.batch + 1}
            if any(self.model.lengths):
                counts |= {n_rows - 1, n_rows + 1}
            tokens = np.zeros((data.draw(st.sampled_from(sorted(counts))), n_new), np.int64)
            keys, values = self._arrays(shape, tokens)
        elif kind in ("heads", "key_dim", "value_dim"):
            other = replace(shape, **{kind: getattr(shape, kind) + data.draw(st.sampled_from([-1, 1]))})
            keys, values = self._arrays(other, tokens)
        elif kind == "heads of values":
            values = self._arrays(replace(shape, heads=shape.heads + 1), tokens)[1]
        elif kind == "tokens":
            values = self._arrays(shape, np.zeros((n_rows, n_new + 1), np.int64))[1]
        elif kind == "ndim":
            pairs = [(keys[0], values), (keys, values[0]), (keys[None], values)]
            keys, values = self._one_of(data, pairs)
        elif kind == "dtype":
            wrong = DTypeError
            which = data.draw(st.sampled_from(["dtype", "value_dtype"]))
            dtypes = [dtype for dtype in self.library.dtypes if dtype != getattr(shape, which)]
            keys, values = self._arrays(replace(shape, **{which: data.draw(st.sampled_from(dtypes))}), tokens)
        else:
            wrong = ArgumentTypeError if kind == "type" else DeviceMismatchError
            make = self.library.of_other_type if kind == "type" else self.library.elsewhere
            pairs = [(other, values) for other in make(keys)] + [(keys, other) for other in make(values)]
            if not pairs:
                return
            keys, values = self._one_of(data, pairs)
        self._expect(wrong, self.cache.append, layer, keys, values)

    # -- going back ---------------------------------------------------------------------------------------------

    def _save(self, checkpoint):
        model = self.model
        assert checkpoint.n_tokens == model.length
        saved = Saved(checkpoint, model.n_rows, copy.deepcopy(model.tokens))
        model.saved.append(saved)
        return saved

    @rule()
    def checkpoint(self):
        if self.model.is_even:
            self._save(self.cache.checkpoint())
        else:
            self._expect(CheckpointError, self.cache.checkpoint)

    @precondition(lambda self: self.model.saved)
    @rule(number=_numbers)
    def rollback(self, number):
        saved = self.model.saved[number % len(self.model.saved)]
        if saved.is_alive:
            self.cache.rollback(saved.checkpoint)
            self.model.restore(saved)
        else:
            self._expect(CheckpointError, self.cache.rollback, saved.checkpoint)

    @rule()
    def roll_back_to_what_is_no_checkpoint_of_this_cache(self):
        other = KVCache(Arena(65536), self.spec, batch=self.batch, max_tokens=self.max_tokens)
        self._expect(CheckpointError, self.cache.rollback, other.checkpoint())
        for wrong in (None, 0, self.arena.checkpoint()):
            self._expect(ArgumentTypeError, self.cache.rollback, wrong)

    @rule(n_tokens=st.integers(-1, 13))
    def truncate(self, n_tokens):
        if 0 <= n_tokens <= self.model.length:
            self.cache.truncate(n_tokens)
            for layer in range(len(self.shapes)):
                self.model.cut(layer, n_tokens)
        else:
            self._expect(ArgumentError, self.cache.truncate, n_tokens)

    @rule(layer=_numbers, n_tokens=st.integers(-1, 13))
    def truncate_one_layer(self, layer, n_tokens):
        layer %= len(self.shapes)
        if 0 <= n_tokens <= self.model.lengths[layer]:
            self.cache.layers[layer].truncate(n_tokens)
            self.model.cut(layer, n_tokens)
        else:
            self._expect(ArgumentError, self.cache.layers[layer].truncate, n_tokens)

    @rule(n_tokens=st.sampled_from([None, 1.0, True, "1"]))
    def truncate_to_no_number(self, n_tokens):
        self._expect(ArgumentTypeError, self.cache.truncate, n_tokens)

    @rule()
    def reset(self):
        self.cache.reset()
        self._forget()

    def _forget(self):
        for layer in range(len(self.shapes)):
            self.model.cut(layer, 0)
        self.model.kill_above(-1)
        self.model.n_rows = None
        self.model.tokens = [[] for _ in self.shapes]

    @rule()
    def open_scope(self):
        scope = self.cache.scope()
        if self.model.is_even:
            self.scopes.append((scope, self._save(scope.__enter__())))
            self._expect(CheckpointError, scope.__enter__)
        else:
            self._expect(CheckpointError, scope.__enter__)

    @precondition(lambda self: self.scopes)
    @rule(number=_numbers, exception=st.none() | st.just(KeyError("passes")))
    def close_scope(self, number, exception):
        scope, saved = self.scopes.pop(number % len(self.scopes))
        leave = (None if exception is None else KeyError, exception, None)
        if saved.is_alive:
            assert not scope.__exit__(*leave), "exceptions pass"
            self.model.restore(saved)
        elif exception is None:
            self._expect(CheckpointError, scope.__exit__, *leave)
        else:
            assert not scope.__exit__(*leave), "exceptions pass"

    # -- rows ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.n_rows)
    @rule(data=st.data())
    def reorder(self, data):
        n_rows = self.model.n_rows
        rows = data.draw(st.lists(st.integers(0, n_rows - 1), min_size=n_rows, max_size=n_rows))
        self.cache.reorder(self._one_of(data, self.library.rows(rows)))
        self.model.move(rows)

    @precondition(lambda self: self.model.n_rows)
    @rule(data=st.data())
    def select(self, data):
        rows = data.draw(st.lists(st.integers(0, self.model.n_rows - 1), min_size=1, max_size=self.batch))
        self.cache.select(self._one_of(data, self.library.rows(rows)))
        self.model.move(rows)

    @rule(n=st.integers(1, 4))
    def repeat(self, n):
        model = self.model
        if model.n_rows is None:
            self.cache.repeat(n)  # of nothing
        elif model.n_rows * n > self.batch:
            self._expect(ShapeError, self.cache.repeat, n)
        else:
            self.cache.repeat(n)
            if model.n_rows == 1:
                model.n_shared = max(
                    model.lengths
                )  # what was held before is the same in all rows: no checkpoint dies
                model.move([0] * n)
                model.n_shared = model.length
            else:
                model.move([row for row in range(model.n_rows) for _ in range(n)])

    @precondition(lambda self: self.model.n_rows and self.batch > 1)
    @rule(data=st.data())
    def fan_out(self, data):
        """Go on in several rows from one or two of them: chance alone seldom leads there."""
        rows = data.draw(st.lists(st.integers(0, self.model.n_rows - 1), min_size=1, max_size=2))
        self.cache.select(rows)
        self.model.move(rows)
        self.repeat(data.draw(st.integers(2, self.batch)))

    @precondition(lambda self: self.model.n_shared and self.model.n_rows > 1)
    @rule(data=st.data(), n_new=st.integers(1, 3))
    def cut_into_what_all_rows_share(self, data, n_new):
        self.truncate(data.draw(st.integers(0, self.model.n_shared - 1)))
        if not any(self.model.lengths):
            return  # the next append decides the rows anew
        self.step(data, n_new, False)
        self.reorder(data)

    @precondition(lambda self: self.model.n_rows)
    @rule(data=st.data())
    def move_rows_that_are_none(self, data):
        n_rows = self.model.n_rows
        no_rows: list[Any] = [
            [0.0] * n_rows,
            [True] * n_rows,
            [[0]] * n_rows,
            [[0], [0, 0]],
            0,
            None,
            "0",
            object(),
        ]
        for rows in no_rows:
            self._expect(ArgumentTypeError, self.cache.reorder, rows)
            self._expect(ArgumentTypeError, self.cache.select, rows)
        for rows in ([-1] * n_rows, [n_rows] * n_rows, [0] * (n_rows + 1)):
            self._expect(ShapeError, self.cache.reorder, rows)
        for rows in ([-1], [n_rows], [0] * (self.batch + 1)):
            self._expect(ShapeError, self.cache.select, rows)
        self._expect((ShapeError, ArgumentTypeError), self.cache.select, [])
        for n in (0, -1):
            self._expect(ArgumentError, self.cache.repeat, n)
        for no_number in (1.0, True, None):
            self._expect(ArgumentTypeError, self.cache.repeat, no_number)

    # -- as a whole ---------------------------------------------------------------------------------------------

    @rule()
    def copy(self):
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            self._expect(NotCopyableError, make, self.cache)
            self._expect(NotCopyableError, make, self.cache.layers[0])

    @rule(of_arena=st.booleans())
    def roll_the_arena_back_under_the_cache(self, of_arena):
        if of_arena:
            self.arena.rollback(self.before)
        else:
            self.arena.reset()
            self.before = self.arena.checkpoint()
        self._check_stale(self.cache, self.model)
        stale, model = self.cache, self.model
        self._make_cache()
        self._check_stale(stale, model)  # also when its bytes belong to another one

    def _check_stale(self, cache, model):
        before, lengths = self._raw(), list(model.lengths)
        n_rows = model.n_rows or 1
        for layer, shape in enumerate(self.shapes):
            for n_new in range(min(2, self.max_tokens - model.lengths[layer] + 1)):
                with pytest.raises(StaleRegionError):
                    cache.append(layer, *self._arrays(shape, np.zeros((n_rows, n_new), np.int64)))
            with pytest.raises(StaleRegionError):
                cache.layers[layer].keys
            with pytest.raises(StaleRegionError):
                cache.layers[layer].values
        if self.batch > 1 and model.n_rows:
            with pytest.raises(StaleRegionError):
                cache.reorder(list(range(n_rows)))
        assert [layer.length for layer in cache.layers] == lengths
        assert cache.rows == model.n_rows
        assert np.array_equal(self._raw(), before)

    @invariant()
    def agrees_with_the_model(self):
        if not hasattr(self, "model"):
            return
        cache, model = self.cache, self.model
        n_rows = self.batch if model.n_rows is None else model.n_rows
        assert [layer.length for layer in cache.layers] == model.lengths
        assert (cache.length, cache.is_empty, cache.rows) == (
            model.length,
            not any(model.lengths),
            model.n_rows,
        )
        for number, layer in enumerate(cache.layers):
            table = as_table(model.tokens[number] or [[]] * n_rows)
            self._check(layer.keys, number, 0, table)
            self._check(layer.values, number, 1, table)
        sizes = [
            s.heads * (s.key_dim * k.dtype.itemsize + s.value_dim * k.value_dtype.itemsize)
            for s, k in zip(self.shapes, self.spec.layers, strict=True)
        ]
        stats = cache.stats
        assert (stats.n_tokens, stats.n_rows) == (model.length, model.n_rows or 0)
        assert stats.high_water_tokens == model.high_water
        assert stats.bytes_per_token == sum(sizes)
        assert stats.reserved_nbytes == sum(sizes) * self.batch * self._n_slots()
        held = sum(size * length for size, length in zip(sizes, model.lengths, strict=True))
        assert stats.used_nbytes == held * (model.n_rows or 0)
        assert (stats.scratch_nbytes > 0) == (self.batch > 1)
        assert np.all(self._raw()[self.outside] == _UNUSED), "bytes outside of the cache were written"


def run_kv_machine(library, machine=KVMachine, **options):
    """Run the machine on a library; `options` are of Hypothesis."""
    options = settings(settings.default, **{"deadline": None} | options)
    run_state_machine_as_test(lambda: machine(library), settings=options)


def test_a_cache_of_numpy_arrays_behaves_as_the_model():
    run_kv_machine(HostLibrary())


def test_a_cache_of_tensors_behaves_as_the_model():
    pytest.importorskip("torch")
    run_kv_machine(TorchLibrary("cpu"))
