"""A `LaneCache` against a model that keeps a list of tokens for each lane."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

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
    ArgumentTypeError,
    CapacityError,
    CheckpointError,
    LayerOrderError,
    ShapeError,
)
from gpuarena.kv import KVSpec, LayerSpec, SharedLayer
from gpuarena.kv.lanes import LaneCache

_LAYERS = [
    LayerSpec(2, 3, 3, "float32"),
    LayerSpec(1, 2, 4, "float32", window=3, sinks=1),
    SharedLayer(0),
    LayerSpec(2, 2, 0, "float32", window=2),
]
_OWNED = [0, 1, 3]
_MAX_TOKENS = 9


@dataclass(frozen=True)
class Token:
    """What a cache holds of one token; `identity` is new for each that is written, copied or shifted."""

    value: int
    position: int
    identity: int
    turned: int = 0


@dataclass
class Lane:
    tokens: list[Token] = field(default_factory=list)
    life: int = 0  # how often everything in it was replaced

    @property
    def next_position(self):
        return self.tokens[-1].position + 1 if self.tokens else 0


class HostKit:
    backend = "host"

    def array(self, values):
        return values

    def numbers(self, array):
        return np.array(array)


class TorchKit:
    backend = "torch"

    def __init__(self):
        self.torch = pytest.importorskip("torch")

    def array(self, values):
        return self.torch.from_numpy(values)

    def numbers(self, array):
        return array.numpy().copy()


def content(token, layer, what):
    """Return ``[kv_heads, dim]``, the keys (what 0) or values (what 1) of a token."""
    spec = _LAYERS[layer]
    heads, dim = spec.kv_heads, (spec.key_dim, spec.value_dim)[what]
    base = token.value * 64 + layer * 16 + what * 8
    made = base + 4 * np.arange(heads)[:, None] + np.arange(dim)[None]
    return (made + (token.turned if what == 0 else 0)).astype(np.float32)


def rows_of(lists, layer, what, width=None):
    """Return ``[rows, kv_heads, width, dim]``, zeros where a list is shorter."""
    spec = _LAYERS[layer]
    dim = (spec.key_dim, spec.value_dim)[what]
    width = max((len(tokens) for tokens in lists), default=0) if width is None else width
    made = np.zeros((len(lists), spec.kv_heads, width, dim), np.float32)
    for row, tokens in enumerate(lists):
        for place, token in enumerate(tokens):
            made[row, :, place] = content(token, layer, what)
    return made


class LanesMachine(RuleBasedStateMachine):
    kit_class = HostKit

    def __init__(self):
        super().__init__()
        self.kit = self.kit_class()
        self.serial = itertools.count(1)
        self.checkpoints = []

    @initialize(n_lanes=st.integers(1, 4))
    def make(self, n_lanes):
        self.memory = np.full(1 << 15, 0xFF, np.uint8)  # NaN, in float32
        self.arena = Arena.from_buffer(self.kit.array(self.memory))
        spec = KVSpec(_LAYERS)
        assert LaneCache.arena_nbytes(spec, n_lanes, _MAX_TOKENS) <= self.arena.stats.available
        self.cache = LaneCache(self.arena, spec, lanes=n_lanes, max_tokens=_MAX_TOKENS)
        self.lanes = [Lane() for _ in range(n_lanes)]
        self.address = self.address_of_lengths()
        self.high = 0

    # -- help ---------------------------------------------------------------------------------------------------

    def address_of_lengths(self):
        vector = self.cache.length_vector
        return vector.ctypes.data if self.kit.backend == "host" else vector.data_ptr()

    @property
    def some(self):
        return st.permutations(range(len(self.lanes))).flatmap(
            lambda order: st.integers(0, len(order)).map(lambda n: list(order[:n]))
        )

    def a_lane(self, data):
        return data.draw(st.integers(0, len(self.lanes) - 1), label="lane")

    def a_range(self, data, lane):
        held = len(self.lanes[lane].tokens)
        low = data.draw(st.integers(0, held), label="start")
        return low, data.draw(st.integers(low, held), label="stop")

    def refused(self, error, call):
        """Check that a call raises, and that not one byte of the arena is another."""
        before = self.memory.copy()
        with pytest.raises(error) as caught:
            call()
        assert np.array_equal(before, self.memory)
        assert str(caught.value)
        return caught.value

    def fresh(self, lane, n):
        first = self.lanes[lane].next_position
        return [Token(next(self.serial), first + i, next(self.serial)) for i in range(n)]

    def replace_all(self, lane, tokens):
        self.lanes[lane].tokens = tokens
        self.lanes[lane].life += 1

    def write(self, layer, chunks, width, **where):
        padding = Token(7777, 0, 0)
        rows = [chunk + [padding] * (width - len(chunk)) for chunk in chunks]
        keys, values = (self.kit.array(rows_of(rows, layer, what, width)) for what in (0, 1))
        return self.cache.append(layer, keys, values, **where)

    def expect(self, layer, order, pair):
        owner = 0 if layer == 2 else layer
        for what in (0, 1):
            expected = rows_of([self.lanes[lane].tokens for lane in order], owner, what)
            got = self.kit.numbers(pair[what])
            assert got.shape == expected.shape
            assert np.array_equal(got, expected)

    # -- steps --------------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        order=st.permutations(_OWNED),
        in_block=st.booleans(),
        end=st.sampled_from(["finish"] * 6 + ["abandon", "truncate", "rollback", "reset", "keep", "raise"]),
    )
    def step(self, data, order, in_block, end):
        lanes = data.draw(self.some, label="lanes")
        room = [_MAX_TOKENS - len(self.lanes[lane].tokens) for lane in lanes]
        counts = [data.draw(st.integers(0, min(free, 4)), label="count") for free in room]
        if lanes == sorted(range(len(lanes))) and data.draw(st.booleans(), label="default lanes"):
            where = {}
        else:
            where = {"lanes": lanes}
        if len(set(counts)) > 1 or not in_block or data.draw(st.booleans(), label="counts"):
            where_counts = {"n_tokens": counts}
        else:
            where_counts = {}
        width = max(counts, default=0) + (
            data.draw(st.integers(0, 2), label="padding") if where_counts else 0
        )
        chunks = [self.fresh(lane, count) for lane, count in zip(lanes, counts, strict=True)]
        stop_after = (
            len(order) if end == "finish" else data.draw(st.integers(0, len(order) - 1), label="layers")
        )
        before = [list(lane.tokens) for lane in self.lanes]
        if not in_block and stop_after == 0:
            return
        undo = {
            "abandon": self.cache.abandon,
            "truncate": lambda: self.cache.truncate(0, len(before[0])),
            "rollback": lambda: self.cache.rollback(start),
            "reset": lambda: self.cache.reset(0),
            "keep": lambda: self.cache.keep(0),
        }
        start = self.cache.checkpoint() if end == "rollback" else None

        def layers():
            for number, layer in enumerate(order[:stop_after]):
                spelled = (
                    {} if in_block and data.draw(st.booleans(), label="bare") else {**where, **where_counts}
                )
                if not in_block:
                    spelled = {**where, **where_counts}
                elif spelled == {} and any(count != width for count in counts):
                    spelled = dict(where_counts)  # only now has the chunk any padding
                pair = self.write(layer, chunks, width, **spelled)
                if number == 0:
                    for lane, chunk in zip(lanes, chunks, strict=True):
                        self.lanes[lane].tokens = self.lanes[lane].tokens + chunk
                self.expect(layer, lanes, pair)
                if number + 1 < len(order) or in_block:
                    self.check_mid_step(layer, order[number + 1 :], lanes, counts, chunks, width)

        class StopError(Exception):
            pass

        if in_block:
            block = self.cache.step(n_tokens=counts, **where)
            try:
                with block:
                    layers()
                    if end == "raise":
                        raise StopError
                    if end != "finish":
                        undo[end]()
            except StopError:
                assert end == "raise"
        else:
            layers()
            if end == "raise":
                self.cache.abandon()
            elif end != "finish":
                undo[end]()
        if end == "finish":
            self.high = max(self.high, *(len(lane.tokens) for lane in self.lanes))
        else:
            for lane, tokens in zip(self.lanes, before, strict=True):
                lane.tokens = tokens
            if end == "reset":
                self.replace_all(0, [])
            if end == "keep":
                for lane in range(1, len(self.lanes)):
                    self.replace_all(lane, [])

    def check_mid_step(self, layer, left, lanes, counts, chunks, width):
        self.check_lengths()
        here = {"lanes": lanes, "n_tokens": counts}
        self.refused(LayerOrderError, lambda: self.write(layer, chunks, width, **here))
        self.refused(LayerOrderError, self.cache.checkpoint)
        self.refused(LayerOrderError, lambda: self.cache.remove(0, 0, 0))
        self.refused(LayerOrderError, lambda: self.cache.move(0, 0))
        self.refused(LayerOrderError, self.cache.step(n_tokens=0).__enter__)
        if left:
            self.refused(LayerOrderError, lambda: self.cache.read(left[0]))
            self.refused(LayerOrderError, lambda: self.cache.packed(left[0]))
            if lanes:
                fewer = [count - 1 if count else 1 for count in counts]
                other = {"lanes": lanes, "n_tokens": fewer}
                wide = max(fewer)
                self.refused(
                    (LayerOrderError, CapacityError),
                    lambda: self.write(left[0], [[]] * len(lanes), wide, **other),
                )
        self.refused(ArgumentError, lambda: self.cache.truncate(0, -1))

    @precondition(lambda self: any(lane.tokens for lane in self.lanes))
    @rule(data=st.data())
    def append_too_much_in_one_lane(self, data):
        lanes = data.draw(self.some.filter(bool), label="lanes")
        room = [_MAX_TOKENS - len(self.lanes[lane].tokens) for lane in lanes]
        full = data.draw(st.integers(0, len(lanes) - 1), label="full")
        counts = [min(free, 1) for free in room]
        counts[full] = room[full] + 1
        width = max(counts)
        error = self.refused(
            CapacityError, lambda: self.write(0, [[]] * len(lanes), width, lanes=lanes, n_tokens=counts)
        )
        held = len(self.lanes[lanes[full]].tokens)
        assert (error.lane, error.used, error.requested, error.missing) == (
            lanes[full],
            held,
            counts[full],
            1,
        )
        self.refused(CapacityError, self.cache.step(lanes, counts).__enter__)

    @rule(data=st.data())
    def bad_arguments(self, data):
        n = len(self.lanes)
        write = self.write
        self.refused(ArgumentError, lambda: write(0, [[]], 1, lanes=[n]))
        self.refused(ArgumentError, lambda: write(0, [[]], 1, lanes=[-1]))
        self.refused(ArgumentTypeError, lambda: write(0, [[]], 1, lanes=[0.0]))
        self.refused(ArgumentTypeError, lambda: write(0, [[]], 1, lanes=0))
        self.refused(ShapeError, lambda: write(0, [[]], 1, lanes=[]))
        self.refused(ShapeError, lambda: write(0, [[]] * (n + 1), 1))
        self.refused(ShapeError, lambda: write(0, [[]], 1, n_tokens=[1, 1]))
        self.refused(ArgumentError, lambda: write(0, [[]], 1, n_tokens=[2]))
        self.refused(ArgumentError, lambda: write(0, [[]], 1, n_tokens=[-1]))
        if n > 1:
            self.refused(ArgumentError, lambda: write(0, [[]] * 2, 1, lanes=[1, 1]))
        lane = self.a_lane(data)
        held = len(self.lanes[lane].tokens)
        self.refused(ArgumentError, lambda: self.cache.truncate(lane, held + 1))
        self.refused(ArgumentError, lambda: self.cache.truncate(lane, -1))
        self.refused(ArgumentError, lambda: self.cache.truncate(n, 0))
        self.refused(ArgumentError, lambda: self.cache.remove(lane, 0, held + 1))
        self.refused(ArgumentError, lambda: self.cache.remove(lane, held + 1))
        self.refused(ArgumentError, lambda: self.cache.copy(lane, lane))
        self.refused(ArgumentError, lambda: self.cache.copy(lane, n))
        self.refused(ArgumentError, lambda: self.cache.copy(lane, (lane + 1) % n, 0, held + 1))
        self.refused(ArgumentError, lambda: self.cache.move(lane, n))
        self.refused(ArgumentError, lambda: self.cache.shift(lane, 0, None, 1))
        self.refused(ArgumentTypeError, lambda: self.cache.shift(lane, 0, None, 1, rotate=True))

    # -- cutting ------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def truncate(self, data):
        lane = self.a_lane(data)
        keep = data.draw(st.integers(0, len(self.lanes[lane].tokens)), label="keep")
        self.cache.truncate(lane, keep)
        del self.lanes[lane].tokens[keep:]

    def grow(self, data):
        """Append to some lanes, and do no more: what the other rules need tokens for."""
        lanes = data.draw(self.some, label="lanes")
        room = [min(_MAX_TOKENS - len(self.lanes[lane].tokens), 3) for lane in lanes]
        counts = [data.draw(st.integers(min(1, free), free), label="count") for free in room]
        chunks = [self.fresh(lane, count) for lane, count in zip(lanes, counts, strict=True)]
        for layer in _OWNED:
            self.write(layer, chunks, max(counts, default=0), lanes=lanes, n_tokens=counts)
        for lane, new in zip(lanes, chunks, strict=True):
            self.lanes[lane].tokens = self.lanes[lane].tokens + new
        self.high = max(self.high, *(len(lane.tokens) for lane in self.lanes))

    # Several times, so that a run has more than one such rule to every one that takes tokens away.
    grow_once = rule(data=st.data())(grow)
    grow_again = rule(data=st.data())(grow)
    grow_more = rule(data=st.data())(grow)

    @precondition(lambda self: sum(len(lane.tokens) for lane in self.lanes) > _MAX_TOKENS)
    @rule(lane=st.none() | st.integers(0, 3))
    def reset(self, lane):
        if lane is not None:
            lane %= len(self.lanes)
        self.cache.reset(lane)
        for number in range(len(self.lanes)) if lane is None else [lane]:
            self.replace_all(number, [])

    @precondition(lambda self: sum(len(lane.tokens) for lane in self.lanes) > _MAX_TOKENS)
    @rule(data=st.data())
    def keep(self, data):
        lane = self.a_lane(data)
        self.cache.keep(lane)
        for number in range(len(self.lanes)):
            if number != lane:
                self.replace_all(number, [])

    @rule(data=st.data(), everything=st.booleans())
    def checkpoint(self, data, everything):
        lane = None if everything else self.a_lane(data)
        made = self.cache.checkpoint(lane)
        lanes = range(len(self.lanes)) if lane is None else [lane]
        assert made.lengths == {number: len(self.lanes[number].tokens) for number in lanes}
        held = {number: (self.lanes[number].life, list(self.lanes[number].tokens)) for number in lanes}
        self.checkpoints.append((made, held))

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def rollback(self, data):
        made, held = data.draw(st.sampled_from(self.checkpoints), label="checkpoint")
        lives = all(
            self.lanes[lane].life == life and self.lanes[lane].tokens[: len(tokens)] == tokens
            for lane, (life, tokens) in held.items()
        )
        if lives:
            self.cache.rollback(made)
            for lane, (_, tokens) in held.items():
                self.lanes[lane].tokens = list(tokens)
        else:
            self.refused(CheckpointError, lambda: self.cache.rollback(made))

    @rule(data=st.data(), everything=st.booleans(), fails=st.booleans())
    def scope(self, data, everything, fails):
        lane = self.a_lane(data)
        before = [list(other.tokens) for other in self.lanes]
        n = 1 if len(self.lanes[lane].tokens) < _MAX_TOKENS else 0
        chunk = self.fresh(lane, n)
        try:
            with self.cache.scope(None if everything else lane):
                for layer in _OWNED:
                    self.write(layer, [chunk], n, lanes=[lane])
                    if fails:
                        raise KeyError("rotate")
                assert self.cache.lengths[lane] == len(before[lane]) + n
                self.high = max(self.high, *self.cache.lengths)
        except KeyError:
            assert fails
        assert self.cache.lengths == tuple(map(len, before))

    # -- moving -------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def remove(self, data):
        lane = self.a_lane(data)
        low, high = self.a_range(data, lane)
        self.cache.remove(lane, low, high)
        del self.lanes[lane].tokens[low:high]

    @precondition(lambda self: len(self.lanes) > 1)
    @rule(data=st.data(), whole=st.booleans())
    def copy(self, data, whole):
        source = self.a_lane(data)
        target = (source + data.draw(st.integers(1, len(self.lanes) - 1), label="target")) % len(self.lanes)
        low, high = (0, None) if whole else self.a_range(data, source)
        self.cache.copy(source, target, low, high)
        copies = [replace(token, identity=next(self.serial)) for token in self.lanes[source].tokens[low:high]]
        self.replace_all(target, copies)

    @rule(data=st.data())
    def move(self, data):
        source, target = self.a_lane(data), self.a_lane(data)
        self.cache.move(source, target)
        if source != target:
            tokens = self.lanes[source].tokens
            self.replace_all(source, [])
            self.replace_all(target, tokens)

    @rule(data=st.data(), delta=st.integers(-6, 6), turn=st.sampled_from(["no", "yes", "fail"]))
    def shift(self, data, delta, turn):
        lane = self.a_lane(data)
        low, high = self.a_range(data, lane)
        tokens = self.lanes[lane].tokens
        moved = [
            replace(
                token,
                position=token.position + delta,
                turned=token.turned + (0 if turn == "no" else delta),
                identity=next(self.serial),
            )
            if low <= place < high and delta
            else token
            for place, token in enumerate(tokens)
        ]
        positions = [token.position for token in moved]
        fits = all(position >= 0 for position in positions) and positions == sorted(set(positions))
        asked = []

        def rotate(layer, keys, by):
            assert by == delta
            asked.append(layer)
            assert tuple(keys.shape) == (1, _LAYERS[layer].kv_heads, high - low, _LAYERS[layer].key_dim)
            keys += by
            if turn == "fail" and layer == _OWNED[-1]:
                raise KeyError("rotate")

        def call():
            self.cache.shift(lane, low, high, delta, rotate=False if turn == "no" else rotate)

        if not fits:
            self.refused(ArgumentError, call)
            assert not asked
        elif turn == "fail" and low < high and delta:
            self.refused(KeyError, call)
        else:
            call()
            assert asked == (_OWNED if turn != "no" and low < high and delta else [])
            self.lanes[lane].tokens = moved

    # -- reading ------------------------------------------------------------------------------------------------

    @rule(data=st.data(), layer=st.integers(0, 3))
    def read(self, data, layer):
        lanes = data.draw(self.some, label="lanes")
        self.expect(layer, lanes, self.cache.read(layer, lanes))

    @rule(data=st.data(), layer=st.integers(0, 3))
    def packed(self, data, layer):
        lanes = data.draw(self.some, label="lanes")
        owner = 0 if layer == 2 else layer
        sums = self.kit.numbers(self.cache.cu_seqlens(lanes))
        lengths = [len(self.lanes[lane].tokens) for lane in lanes]
        assert sums.dtype == np.int32
        assert sums.tolist() == [0, *itertools.accumulate(lengths)]
        pair = self.cache.packed(layer, lanes)
        for what in (0, 1):
            got = self.kit.numbers(pair[what])
            assert got.shape[0] == sum(lengths)
            expected = [content(token, owner, what) for lane in lanes for token in self.lanes[lane].tokens]
            assert all(np.array_equal(*both) for both in zip(got, expected, strict=True))

    @rule(data=st.data(), layer=st.none() | st.integers(0, 3), ragged=st.booleans())
    def mask(self, data, layer, ragged):
        lanes = data.draw(self.some, label="lanes")
        if ragged:
            n_tokens = [data.draw(st.integers(0, 4), label="queries") for _ in lanes]
            width = max(n_tokens, default=0)
        else:
            n_tokens = width = data.draw(st.integers(0, 4), label="queries")
        mask = self.kit.numbers(self.cache.mask(n_tokens, lanes, layer))
        lengths = [len(self.lanes[lane].tokens) for lane in lanes]
        assert mask.dtype == bool
        assert mask.shape == (len(lanes), 1, width, max(lengths, default=0))
        owner = None if layer is None else _LAYERS[0 if layer == 2 else layer]
        for row, held in enumerate(lengths):
            n = n_tokens[row] if ragged else width
            for query, key in itertools.product(range(mask.shape[2]), range(mask.shape[3])):
                place = held - n + query  # of the query, in its lane
                may = query < n and 0 <= key <= place
                if may and owner is not None and owner.window is not None:
                    may = place - key < owner.window or key < owner.sinks
                assert mask[row, 0, query, key] == may

    @invariant()
    def everything_is_as_in_the_model(self):
        if not hasattr(self, "cache"):
            return
        self.check_lengths()
        everyone = range(len(self.lanes))
        for layer in range(4):
            self.expect(layer, everyone, self.cache.read(layer))
        stats = self.cache.stats
        lengths = [len(lane.tokens) for lane in self.lanes]
        assert (stats.n_lanes, stats.n_tokens, stats.longest) == (len(lengths), sum(lengths), max(lengths))
        assert stats.n_active == sum(map(bool, lengths))
        assert stats.used_nbytes == sum(lengths) * self.cache.spec.bytes_per_token
        assert stats.high_water_tokens == self.high

    def check_lengths(self):
        lengths = [len(lane.tokens) for lane in self.lanes]
        assert self.cache.lengths == tuple(lengths)
        vector = self.kit.numbers(self.cache.length_vector)
        assert vector.dtype == np.int32
        assert vector.tolist() == lengths
        assert self.address_of_lengths() == self.address
        for number, lane in enumerate(self.lanes):
            assert self.cache.positions(number).tolist() == [token.position for token in lane.tokens]
            assert self.cache.next_position(number) == lane.next_position


class TorchLanesMachine(LanesMachine):
    kit_class = TorchKit


@pytest.mark.parametrize("machine", [LanesMachine, TorchLanesMachine], ids=["host", "torch"])
def test_lanes_hold_what_the_model_holds(machine):
    current = settings()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(10, current.max_examples // 2),
            stateful_step_count=min(30, current.stateful_step_count),
        ),
    )
