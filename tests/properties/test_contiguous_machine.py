"""The contiguous cache against a list of tokens a request, and a list that names the owner of each slot."""

from __future__ import annotations

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

from gpuarena import Arena
from gpuarena.errors import (
    ArgumentError,
    CapacityError,
    DTypeError,
    LayerOrderError,
    SequenceError,
    ShapeError,
)
from gpuarena.kv.contiguous import ContiguousKVCache, _layers
from gpuarena.kv.spec import KVSpec, LayerSpec, SharedLayer

#: kv_heads, key_dim, value_dim, dtype of keys, dtype of values, window, sinks; a number is a shared layer.
LAYERS = [
    (2, 3, 3, "float32", "float32", None, 0),  # one region of pairs
    0,
    (1, 2, 4, "float32", "float64", 3, 0),
    (3, 2, 2, "float64", "float64", 2, 0),
    2,
    (1, 5, 0, "float32", "float32", None, 0),
    (1, 2, 2, "float32", "float32", 2, 1),
]
OWN = [index for index, layer in enumerate(LAYERS) if not isinstance(layer, int)]


def made_spec():
    return KVSpec(
        SharedLayer(layer)
        if isinstance(layer, int)
        else LayerSpec(*layer[:4], value_dtype=layer[4], window=layer[5], sinks=layer[6])
        for layer in LAYERS
    )


def contents(layer, tokens):
    """What layer `layer` holds for `tokens`: keys and values ``[1, kv_heads, len(tokens), dim]``, as NumPy arrays."""
    heads, key_dim, value_dim, key_dtype, value_dtype, *_ = LAYERS[layer]
    made = []
    for kind, (dim, dtype) in enumerate(((key_dim, key_dtype), (value_dim, value_dtype))):
        token = np.array(tokens, dtype).reshape(1, 1, -1, 1)
        head, element = np.arange(heads).reshape(1, -1, 1, 1), np.arange(dim)
        made.append((((token * 10 + layer) * 10 + head) * 10 + element + kind * 0.5).astype(dtype))
    return made


class ContiguousMachine(RuleBasedStateMachine):
    backend = "host"
    policy = "first_fit"

    @initialize(
        capacity=st.integers(6, 40),
        pieces=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=8),
    )
    def start(self, capacity, pieces):
        spec = made_spec()
        nbytes = ContiguousKVCache.arena_nbytes(spec, capacity_tokens=capacity)
        self.capacity = capacity
        self.arena = Arena(nbytes, backend=self.backend)
        self.cache = ContiguousKVCache(self.arena, spec, capacity_tokens=capacity, policy=self.policy)
        self.live = []  # [request, tokens that all layers have, tokens of the step, layers of it, the most tokens]
        self.n_tokens = self.n_total = self.n_copied = 0
        self.dead = []
        for max_tokens, n in pieces:
            self.request(max_tokens)
            if self.live and self.live[-1][1] == []:
                self.write(self.live[-1], min(n, self.live[-1][4]), len(OWN))

    # -- the model ------------------------------------------------------------------------------------------------

    def rounded(self, n):
        if self.policy == "buddy":
            return next(2**order for order in range(9) if 2**order >= n)
        return n

    def owners(self, entries):
        """Whose each slot is; None for a free one."""
        owner = [None] * self.capacity
        for entry in entries:
            for slot in range(entry[0].start, entry[0].start + self.rounded(entry[4])):
                assert owner[slot] is None, "two requests share a slot"
                owner[slot] = entry
        return owner

    def free_slots(self):
        return [owner is None for owner in self.owners(self.live)]

    def places(self, n):
        """``(length of the hole around it, start)`` of each place that a request of `n` could have."""
        free, length = self.free_slots(), self.rounded(n)
        found = []
        for start in range(self.capacity - length + 1):
            if all(free[start : start + length]):
                if self.policy == "buddy":
                    if start % length == 0:
                        size = length
                        while start // (2 * size) * 2 * size + 2 * size <= self.capacity and all(
                            free[start // (2 * size) * 2 * size :][: 2 * size]
                        ):
                            size *= 2
                        found.append((size, start))
                else:
                    low = start
                    while low and free[low - 1]:
                        low -= 1
                    high = start + length
                    while high < self.capacity and free[high]:
                        high += 1
                    found.append((high - low, start))
        return found

    def expected_place(self, n):
        places = self.places(n)
        if not places:
            return None
        return min(start for _, start in places) if self.policy == "first_fit" else min(places)[1]

    def n_free(self):
        return sum(self.free_slots())

    def largest(self):
        lengths = [length for length, _ in self.places(1)]
        return max(lengths, default=0)

    def given(self, array):
        if self.backend == "torch":
            import torch

            return torch.from_numpy(array)
        return array

    def seen(self, layer, tokens, n):
        """What queries of the last `n` of `tokens` may see in a layer of its own."""
        window, sinks = LAYERS[layer][5:]
        if window is None or sinks:
            return tokens
        return tokens[max(0, len(tokens) - n - window + 1) :]

    def compare(self, arrays, layer, tokens):
        for got, expected in zip(arrays, contents(layer, tokens), strict=True):
            assert tuple(got.shape) == expected.shape
            np.testing.assert_array_equal(np.asarray(got), expected, strict=True)

    def pick(self, data):
        return data.draw(st.sampled_from(self.live), "request")

    # -- requests -------------------------------------------------------------------------------------------------

    @rule(max_tokens=st.integers(1, 6) | st.integers(1, 42))
    def request(self, max_tokens):
        expected = self.expected_place(max_tokens)
        n_free, largest = self.n_free(), self.largest()
        assert self.cache.would_fit(max_tokens) == (expected is not None)
        if expected is None:
            with pytest.raises(CapacityError) as caught:
                self.cache.request(max_tokens)
            error = caught.value
            assert (error.requested, error.free, error.largest_hole) == (max_tokens, n_free, largest)
            assert error.cause == ("memory" if max_tokens > n_free else "fragmentation")
            assert str(error).startswith(f"A request of {max_tokens} token")
            return
        request = self.cache.request(max_tokens)
        assert (request.start, request.length, request.max_tokens) == (expected, 0, max_tokens)
        self.live.append([request, [], [], 0, max_tokens])
        self.n_total += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        entry = self.pick(data)
        entry[0].free()
        self.live.remove(entry)
        self.dead.append(entry[0])

    @rule()
    def reset(self):
        self.cache.reset()
        self.dead += [entry[0] for entry in self.live]
        self.live = []

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def use_what_is_dead(self, data):
        request = data.draw(st.sampled_from(self.dead), "dead")
        assert not request.is_live
        keys, values = map(self.given, contents(0, [1]))
        for call in (
            request.free,
            lambda: request.append(0, keys, values),
            lambda: request.read(0),
            lambda: request.truncate(0),
            lambda: request.grow(50),
        ):
            with pytest.raises(SequenceError):
                call()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def grow(self, data):
        entry = self.pick(data)
        request, max_tokens = entry[0], entry[4]
        wanted = data.draw(st.integers(max(1, max_tokens - 1), max_tokens + 8), "max_tokens")
        length, start = self.rounded(wanted), request.start
        if wanted < max_tokens:
            with pytest.raises(ArgumentError):
                request.grow(wanted)
            return
        room = [owner is None or owner is entry for owner in self.owners(self.live)][start : start + length]
        fits = len(room) == length and all(room) and (self.policy != "buddy" or start % length == 0)
        if fits:
            request.grow(wanted)
            entry[4] = wanted
        else:
            with pytest.raises(CapacityError):
                request.grow(wanted)
        assert (request.max_tokens, request.start) == (entry[4], start)

    # -- tokens ---------------------------------------------------------------------------------------------------

    def write(self, entry, n, until):
        """Write a step, or go on with one, up to `until` layers."""
        request, done, step, n_written, _ = entry
        if n_written == 0:
            step = [self.n_tokens + position for position in range(n)]
            self.n_tokens += n
        for layer in OWN[n_written:until]:
            views = request.append(layer, *map(self.given, contents(layer, step)))
            self.compare(views, layer, self.seen(layer, done + step, len(step)))
        if until == len(OWN):
            entry[1:4] = [done + step, [], 0]
        else:
            entry[1:4] = [done, step, until]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def append(self, data):
        entry = self.pick(data)
        _, done, _, n_written, max_tokens = entry
        n = data.draw(st.integers(0, max_tokens - len(done)), "n")
        whole = data.draw(st.booleans(), "whole")
        until = len(OWN) if whole else data.draw(st.integers(n_written + 1, len(OWN)), "until")
        self.write(entry, n, until)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def append_wrongly(self, data):
        entry = self.pick(data)
        request, done, step, n_written, max_tokens = entry
        due = OWN[n_written]
        other = data.draw(st.sampled_from([layer for layer in OWN if layer != due]), "other")
        n = len(step) if n_written else 1
        with pytest.raises(LayerOrderError) as caught:
            request.append(other, *map(self.given, contents(other, [7] * n)))
        assert caught.value.layer == other
        with pytest.raises(ArgumentError):
            request.append(1, *map(self.given, contents(0, [7])))
        keys, values = contents(due, [7] * n)
        for wrong in ((keys[0], values), (keys, values[:, :, :0]), (keys[..., :1], values)):
            if wrong[0].shape != keys.shape or wrong[1].shape != values.shape:
                with pytest.raises(ShapeError):
                    request.append(due, *map(self.given, wrong))
        with pytest.raises(DTypeError):
            request.append(due, self.given(keys.astype(np.float16)), self.given(values))
        if n_written:
            with pytest.raises(ShapeError):
                request.append(due, *map(self.given, contents(due, [7] * (n + 1))))
        else:
            with pytest.raises(CapacityError) as caught:
                request.append(due, *map(self.given, contents(due, [7] * (max_tokens - len(done) + 1))))
            assert (caught.value.used, caught.value.missing) == (len(done), 1)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data):
        entry = self.pick(data)
        n_tokens = data.draw(st.integers(0, len(entry[1]) + 1), "n_tokens")
        if n_tokens > len(entry[1]):
            with pytest.raises(ArgumentError):
                entry[0].truncate(n_tokens)
        else:
            entry[0].truncate(n_tokens)
            entry[1:4] = [entry[1][:n_tokens], [], 0]

    # -- compaction -----------------------------------------------------------------------------------------------

    def moved(self, before, n_copied):
        held = [len(entry[1]) + len(entry[2]) for entry in self.live]
        starts = [entry[0].start for entry in self.live]
        assert n_copied == sum(n for n, old, new in zip(held, before, starts, strict=True) if old != new)
        self.n_copied += n_copied

    @rule()
    def compact(self):
        before = [entry[0].start for entry in self.live]
        possible = self.largest()
        self.moved(before, self.cache.compact())
        assert self.largest() >= possible
        if self.policy != "buddy":
            assert self.largest() == self.n_free()

    @rule(data=st.data())
    def compact_for(self, data):
        n_free = self.n_free()
        n = data.draw(st.sampled_from([max(n_free, 1), n_free + 1]) | st.integers(1, self.capacity), "n")
        before = [entry[0].start for entry in self.live]
        fits, advice = bool(self.places(n)), self.cache.diagnose(n)
        assert advice.fits == fits
        if not fits and advice.least_copy is None:
            assert self.policy == "buddy" or n > n_free
            with pytest.raises(CapacityError) as caught:
                self.cache.compact(for_tokens=n)
            assert (caught.value.requested, caught.value.free) == (n, n_free)
            assert caught.value.cause == ("memory" if n > n_free else "fragmentation")
            assert [entry[0].start for entry in self.live] == before
            return
        n_copied = self.cache.compact(for_tokens=n)
        self.moved(before, n_copied)
        if fits:
            assert [entry[0].start for entry in self.live] == before
        else:
            assert n_copied == advice.least_copy.n_tokens
        assert self.places(n)

    # -- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def every_token_is_where_it_was_put(self):
        if not hasattr(self, "cache"):
            return
        for request, done, step, n_written, max_tokens in self.live:
            assert (request.is_live, request.length, request.max_tokens) == (True, len(done), max_tokens)
            for turn, layer in enumerate(OWN):
                tokens = done + step if turn < n_written else done
                for reader in [layer, *(index for index, shared in enumerate(LAYERS) if shared == layer)]:
                    self.compare(request.read(reader, len(tokens)), layer, tokens)
                    for n in (0, 1):
                        if n <= len(tokens):
                            self.compare(request.read(reader, n), layer, self.seen(layer, tokens, n))
                with pytest.raises(ArgumentError):
                    request.read(layer, len(tokens) + 1)

    @invariant()
    def the_figures_are_counted(self):
        if not hasattr(self, "cache"):
            return
        free, figures = self.free_slots(), self.cache.occupancy
        n_used = sum(len(done) + len(step) for _, done, step, _, _ in self.live)
        assert (figures.capacity, figures.free, figures.used) == (self.capacity, sum(free), n_used)
        assert figures.reserved == sum(self.rounded(entry[4]) for entry in self.live)
        assert figures.largest_hole == self.largest()
        stats = self.cache.stats
        per_token = self.cache.spec.bytes_per_token
        assert (stats.n_requests, stats.n_requests_total) == (len(self.live), self.n_total)
        assert stats.n_copied_total == self.n_copied
        assert stats.used_nbytes == per_token * sum(len(entry[1]) for entry in self.live)
        assert stats.high_water_slots >= figures.reserved


@pytest.mark.parametrize(
    ("backend", "policy", "n_staged"),
    [
        ("host", "first_fit", 1),
        ("host", "best_fit", 256),
        ("host", "buddy", 3),
        ("torch", "first_fit", 3),
        ("torch", "best_fit", 1),
        ("torch", "buddy", 256),
    ],
)
def test_the_cache_is_as_lists_of_tokens(backend, policy, n_staged, monkeypatch):
    if backend == "torch":
        pytest.importorskip("torch")
    monkeypatch.setattr(_layers, "_SCRATCH_TOKENS", n_staged)
    name = f"{backend}_{policy}_{n_staged}"
    machine = type(name, (ContiguousMachine,), {"backend": backend, "policy": policy})
    n_examples = max(
        15, settings.default.max_examples // 5
    )  # each step reads every token of every layer back
    run_state_machine_as_test(machine, settings=settings(max_examples=n_examples, stateful_step_count=30))
