"""Random lives of a cache whose layers hold states, keys and values, both, or indexer keys, filled by hand.

The oracle keeps a list of plain tensors for each row, and copies of all of them for each checkpoint.
"""

from __future__ import annotations

import copy

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from gpuarena_transformers import ArenaCache  # noqa: E402 - after the skips
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING  # noqa: E402

from gpuarena import Arena, CapacityError, CheckpointError, ShapeError, StaleRegionError  # noqa: E402
from gpuarena.errors import ArgumentError, ArgumentTypeError, AutogradError, DeviceMismatchError  # noqa: E402

BATCH, CAPACITY, KERNEL, CHANNELS, HEADS, DIM = 4, 12, 3, 2, 2, 3
INDEXED = (
    "indexed_attention" if "indexed_attention" in DYNAMIC_LAYER_TYPE_MAPPING else "deepseek_sparse_attention"
)
TYPES = ("linear_attention", "full_attention", "hybrid", INDEXED, "conv")


def config(layer_types):
    found = transformers.LlamaConfig(num_hidden_layers=len(layer_types), hidden_size=8, num_attention_heads=2)
    found.layer_types = list(layer_types)
    return found


class Oracle:
    """What each row holds: for each layer a dict of tensors."""

    def __init__(self, layer_types):
        self.layer_types = layer_types
        self.rows = None  # of {(layer, what): tensor}

    def copy(self):
        return None if self.rows is None else [dict(row) for row in self.rows]

    def append(self, new):
        """`new` is ``{(layer, what): [rows, ...]}``."""
        if self.rows is None:
            self.rows = [{} for _ in next(iter(new.values()))]
        for number, row in enumerate(self.rows):
            for key, tensor in new.items():
                if key[1] == "recurrent":
                    row[key] = tensor[number].clone()
                    continue
                axis = -1 if key[1] == "conv" else -2
                past = row.get(key)
                if key[1] == "conv" and past is None:
                    past = torch.zeros(CHANNELS, KERNEL)
                whole = tensor[number] if past is None else torch.cat([past, tensor[number]], dim=axis)
                row[key] = (whole[..., whole.shape[-1] - KERNEL :] if key[1] == "conv" else whole).clone()

    @property
    def n_tokens(self):
        return (
            0
            if not self.rows
            else max((t.shape[-2] for (_, w), t in self.rows[0].items() if w == "keys"), default=0)
        )


class Lives(RuleBasedStateMachine):
    layer_types = TYPES

    @initialize(data=st.data())
    def start(self, data):
        self.cache = ArenaCache(config(self.layer_types), BATCH, CAPACITY)
        self.oracle = Oracle(self.layer_types)
        self.checkpoints = []  # [checkpoint, contents, whether it surely lives]
        self.addresses = {}
        self.n_rows = 1
        self.seed = 0
        self.is_torn = False

    def random(self, *shape):
        self.seed += 1
        return torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed))

    def step(self, n_new, n_rows, write_through):
        """Give every layer new tokens, as a model does; return what they were."""
        cache, new = self.cache, {}
        for index, kind in enumerate(self.layer_types):
            if kind in ("linear_attention", "hybrid", "conv"):
                new[index, "conv"] = self.random(n_rows, CHANNELS, n_new)
                held = cache.layers[index].conv_states[0]
                if write_through and held is not None and cache.has_previous_state(index):
                    # As the kernels of single tokens do, which know no cache.
                    held.copy_(torch.cat([held, new[index, "conv"]], dim=-1)[..., -KERNEL:])
                else:
                    past = [row[index, "conv"] for row in self.oracle.rows] if self.oracle.rows else []
                    full = cache.update_conv_state(new[index, "conv"], index, conv_kernel_size=KERNEL)
                    wanted = (
                        torch.cat([torch.stack(past), new[index, "conv"]], dim=-1)
                        if past
                        else new[index, "conv"]
                    )
                    assert torch.equal(full[..., full.shape[-1] - wanted.shape[-1] :], wanted)
            if kind in ("linear_attention", "hybrid"):
                new[index, "recurrent"] = self.random(n_rows, HEADS, DIM)
                held = cache.layers[index].recurrent_states[0]
                if write_through and held is not None:
                    held.copy_(new[index, "recurrent"])
                else:
                    cache.update_recurrent_state(new[index, "recurrent"], index)
            if kind == INDEXED:
                new[index, "indexer"] = self.random(n_rows, n_new, DIM)
                seen = cache.update_indexer(new[index, "indexer"], index)
                assert torch.equal(seen[:, seen.shape[1] - n_new :], new[index, "indexer"])
            if kind in ("full_attention", "hybrid", INDEXED):
                new[index, "keys"] = self.random(n_rows, HEADS, n_new, DIM)
                new[index, "values"] = self.random(n_rows, HEADS, n_new, DIM)
                cache.update(new[index, "keys"], new[index, "values"], index)
        return new

    @rule(n_new=st.integers(1, 4), n_rows=st.integers(1, BATCH), write_through=st.booleans())
    def append(self, n_new, n_rows, write_through):
        if self.oracle.rows is not None:
            n_rows = len(self.oracle.rows)
        if self.is_torn:
            with pytest.raises(CheckpointError, match="a step failed"):
                self.step(1, n_rows, False)
            return
        if self.holds_tokens and self.oracle.n_tokens + n_new > CAPACITY:
            with pytest.raises(CapacityError):
                self.step(n_new, n_rows, False)
            self.is_torn = self.oracle.rows is not None
            return
        new = self.step(n_new, n_rows, write_through and n_new == 1)
        self.oracle.append(new)

    @property
    def holds_tokens(self):
        return bool({"full_attention", "hybrid", INDEXED} & set(self.layer_types))

    @precondition(lambda self: self.oracle.rows is not None and len(self.oracle.rows) > 1)
    @rule(step=st.sampled_from([1, 2]))
    def another_number_of_rows(self, step):
        if not self.is_torn:
            with pytest.raises(ShapeError, match="rows given, the cache holds"):
                self.step(1, len(self.oracle.rows) - step or BATCH + 1, False)

    @rule()
    def checkpoint(self):
        if self.is_torn:
            with pytest.raises(CheckpointError, match="a step failed"):
                self.cache.checkpoint()
            return
        checkpoint = self.cache.checkpoint()
        assert checkpoint.n_tokens == self.oracle.n_tokens
        states = sum(
            tensor.numel() * 4
            for row in self.oracle.rows or []
            for (_, what), tensor in row.items()
            if what in ("conv", "recurrent")
        )
        assert checkpoint.nbytes == states
        self.checkpoints.append([checkpoint, self.oracle.copy(), True])

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def rollback(self, data):
        number = data.draw(st.integers(0, len(self.checkpoints) - 1))
        checkpoint, rows, surely_lives = self.checkpoints[number]
        try:
            self.cache.rollback(checkpoint)
        except CheckpointError:
            assert not surely_lives
            return
        self.oracle.rows = [dict(row) for row in rows] if rows else None
        self.is_torn = False
        for other in self.checkpoints:
            other[2] &= other[0].n_tokens <= checkpoint.n_tokens

    @precondition(lambda self: self.oracle.rows and not self.is_torn)
    @rule(write_through=st.booleans())
    def there_and_back(self, write_through):
        if self.oracle.n_tokens < CAPACITY:
            with self.cache.scope():
                self.step(1, len(self.oracle.rows), write_through)
                if len(self.oracle.rows) == 1:
                    self.cache.batch_repeat_interleave(2)

    def nothing_surely_lives(self):
        for other in self.checkpoints:
            other[2] = False

    @precondition(lambda self: self.oracle.rows and not self.is_torn)
    @rule(data=st.data())
    def reorder(self, data):
        rows = self.oracle.rows
        order = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=len(rows), max_size=len(rows)))
        self.cache.reorder_cache(torch.tensor(order))
        self.oracle.rows = [dict(rows[number]) for number in order]
        self.nothing_surely_lives()

    @precondition(lambda self: self.oracle.rows and not self.is_torn)
    @rule(data=st.data())
    def select(self, data):
        rows = self.oracle.rows
        kept = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=BATCH))
        self.cache.batch_select_indices(torch.tensor(kept))
        self.oracle.rows = [dict(rows[number]) for number in kept]
        self.nothing_surely_lives()

    @precondition(lambda self: self.oracle.rows and not self.is_torn)
    @rule(n=st.integers(1, BATCH))
    def repeat(self, n):
        rows = self.oracle.rows
        if len(rows) * n > BATCH:
            with pytest.raises(ShapeError):
                self.cache.batch_repeat_interleave(n)
            return
        self.cache.batch_repeat_interleave(n)
        if len(rows) > 1:  # otherwise checkpoints live
            self.nothing_surely_lives()
        self.oracle.rows = [dict(row) for row in rows for _ in range(n)]

    @rule()
    def reset(self):
        self.cache.reset()
        self.oracle.rows, self.is_torn = None, False
        self.nothing_surely_lives()

    @precondition(lambda self: self.holds_tokens)
    @rule(n_removed=st.integers(0, CAPACITY))
    def crop(self, n_removed):
        n_tokens = self.oracle.n_tokens
        if n_tokens and n_removed == n_tokens:
            self.cache.truncate(0)
            self.oracle.rows, self.is_torn = None, False
            self.nothing_surely_lives()
        elif n_removed or self.is_torn:
            with pytest.raises(ArgumentError):
                self.cache.crop(-n_removed)
        else:
            self.cache.crop(0)

    @precondition(lambda self: not self.is_torn)
    @rule(goes_on=st.booleans())
    def deep_copy(self, goes_on):
        other = copy.deepcopy(self.cache)
        if goes_on:
            self.cache = other
            self.checkpoints, self.addresses = [], {}

    @invariant()
    def holds_what_the_oracle_holds(self):
        rows, cache = self.oracle.rows, self.cache
        assert cache.batch_size == (len(rows) if rows else -1) or not rows
        if not self.is_torn:
            for index, kind in enumerate(self.layer_types):
                layer = cache.layers[index]
                found = {
                    "conv": layer.conv_states[0] if hasattr(layer, "conv_states") else None,
                    "recurrent": layer.recurrent_states[0] if hasattr(layer, "conv_states") else None,
                    "keys": getattr(layer, "keys", None),
                    "values": getattr(layer, "values", None),
                    "indexer": getattr(layer, "indexer_keys", None),
                }
                for what, tensor in found.items():
                    wanted = [row.get((index, what)) for row in rows or []]
                    if not wanted or wanted[0] is None:
                        assert tensor is None or what in ("keys", "values", "indexer")
                        continue
                    assert torch.equal(tensor, torch.stack(wanted)), (index, kind, what)
        for index, layer in enumerate(cache.states.layers):
            for key, view in layer._views.items():
                assert self.addresses.setdefault((index, key), view.data_ptr()) == view.data_ptr()


class LivesOfStatesAlone(Lives):
    layer_types = ("linear_attention", "linear_attention")


TestLives = Lives.TestCase
TestLivesOfStatesAlone = LivesOfStatesAlone.TestCase


# ------------------------------------------------------------------------------------------------------ what is refused


def filled(n_rows=2, *, layer_types=("linear_attention", "full_attention"), **options):
    cache = ArenaCache(config(list(layer_types)), BATCH, CAPACITY, **options)
    cache.update_conv_state(torch.randn(n_rows, CHANNELS, 2), 0, conv_kernel_size=KERNEL)
    cache.update_recurrent_state(torch.randn(n_rows, HEADS, DIM), 0)
    if "full_attention" in layer_types:
        cache.update(*torch.randn(2, n_rows, HEADS, 2, DIM), 1)
    return cache


def test_a_step_that_is_refused_in_its_first_layer_changes_nothing():
    cache = ArenaCache(config(["full_attention", "linear_attention"]), 1, 4)
    keys = torch.randn(1, HEADS, 5, DIM)
    cache.update(keys[:, :, :4], keys[:, :, :4], 0)
    cache.update_conv_state(torch.randn(1, CHANNELS, 4), 1, conv_kernel_size=KERNEL)
    with pytest.raises(CapacityError):
        cache.update(keys[:, :, :1], keys[:, :, :1], 0)
    assert cache.checkpoint().n_tokens == 4


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.update_conv_state([[1.0]], 0), ArgumentTypeError, r"must be a tensor \[rows, ...\]"),
        (lambda c: c.update_recurrent_state(torch.ones(2), 0), ArgumentTypeError, "must be a tensor"),
        (
            lambda c: c.update_conv_state(torch.ones(2, 3, 1), 0),
            ShapeError,
            r"\[2, 3, 1\], the cache holds \[2, 2, 3\]",
        ),
        (
            lambda c: c.update_recurrent_state(torch.ones(2, 2, 1), 0),
            ShapeError,
            r"a recurrent state of \[2, 2, 1\]",
        ),
        (
            lambda c: c.update_conv_state(torch.ones(1, 2, 1), 0),
            ShapeError,
            "1 rows given, the cache holds 2",
        ),
        (
            lambda c: c.update_conv_state(torch.ones(2, 2, 1, device="meta"), 0),
            DeviceMismatchError,
            "is on meta",
        ),
        (
            lambda c: c.update_conv_state(torch.ones(2, 2, 1, requires_grad=True), 0),
            AutogradError,
            r"conv state requires grad.*torch\.no_grad",
        ),
        (lambda c: c.rollback(c.group.checkpoint()), ArgumentTypeError, "not one of its group"),
        (
            lambda c: c.layers[0].reorder_cache(torch.tensor([0])),
            ArgumentError,
            "call reorder_cache on the cache",
        ),
        (lambda c: c.layers[0].batch_repeat_interleave(2), ArgumentError, "call batch_repeat_interleave on"),
        (lambda c: c.layers[0].batch_select_indices(torch.tensor([0])), ArgumentError, "call batch_select"),
        (lambda c: c.rollback(filled().checkpoint()), CheckpointError, "belongs to another cache"),
    ],
)
def test_what_is_refused_leaves_the_states(call, error, message):
    cache = filled()
    before = [state.clone() for layer in cache.states.layers for _, state in layer.held()]
    with pytest.raises(error, match=message):
        call(cache)
    after = [state for layer in cache.states.layers for _, state in layer.held()]
    assert len(before) == len(after) == 2
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert (cache.get_seq_length(), cache.batch_size) == (2, 2)


def test_a_device_that_the_cache_was_not_made_for():
    with pytest.raises(DeviceMismatchError, match="the conv 0 state is on cpu, the cache was made for meta"):
        filled(device="meta")


def test_another_model_is_told_that_the_memory_is_of_another_shape():
    cache = filled(layer_types=["linear_attention"])
    cache.reset()
    with pytest.raises(ShapeError, match=r"a conv state of \[1, 5, 3\], the memory is for \[rows, 2, 3\]"):
        cache.update_conv_state(torch.ones(1, 5, 4), 0)
    assert cache.batch_size == -1


def test_an_arena_that_was_rolled_back_below_the_states():
    arena = Arena("64KiB", backend="torch")
    start = arena.checkpoint()
    cache = filled(arena=arena)
    checkpoint = cache.checkpoint()
    arena.rollback(start)
    for call in (
        lambda: cache.rollback(checkpoint),
        lambda: cache.update_recurrent_state(torch.ones(2, HEADS, DIM), 0),
    ):
        with pytest.raises(StaleRegionError):
            call()


def test_layers_whose_cache_is_gone():
    layer = ArenaCache(config(["linear_attention"]), 1, 4).layers[0]
    with pytest.raises(ArgumentError, match="the ArenaCache of this layer is gone"):
        layer.update_conv_state(torch.ones(1, CHANNELS, 1))


def test_states_that_are_larger_than_the_first_take_another_arena_with_a_warning():
    cache = ArenaCache(config(["linear_attention"] * 3), 1, 4)
    cache.update_conv_state(torch.ones(1, 4, 8), 0)
    with pytest.warns(
        UserWarning, match="layer 1 needs 4096 bytes for a state, more than the arena was made for"
    ):
        cache.update_conv_state(torch.ones(1, 64, 16), 1)
    cache.update_conv_state(torch.ones(1, 64, 16), 2)
    assert len(cache.arenas) == 2


def test_states_taken_in_under_inference_mode_are_written_outside():
    with torch.inference_mode():
        cache = filled()
        cache.reorder_cache(torch.tensor([1, 0]))
    with torch.no_grad():
        cache.layers[0].conv_states[0].zero_()
        cache.update_recurrent_state(torch.zeros(2, HEADS, DIM), 0)
    assert not any(state.any() for _, state in cache.layers[0].held())
    with torch.inference_mode():
        empty = ArenaCache(config(["linear_attention"]), 1, 4).checkpoint()
        inside = cache.checkpoint()
    with torch.no_grad():
        cache.layers[0].conv_states[0].fill_(1)
        cache.rollback(inside)
    assert not any(state.any() for _, state in cache.layers[0].held())
    assert empty.nbytes == 0


def test_positions_of_an_indexer_go_back_and_move_with_the_tokens():
    """Qwen 4 keeps them there."""
    cache = ArenaCache(config([INDEXED]), 2, CAPACITY)
    layer = cache.layers[0]

    def append(n_new):
        new = torch.randint(0, 99, (3, 2, n_new))
        past = layer.indexer_position_ids
        layer.indexer_position_ids = new if past is None else torch.cat([past, new], dim=-1)
        cache.update_indexer(torch.randn(2, n_new, DIM), 0)
        cache.update(*torch.randn(2, 2, HEADS, n_new, DIM), 0)
        return new

    assert layer.indexer_position_ids is None
    first = append(3)
    checkpoint = cache.checkpoint()
    assert checkpoint.nbytes == 0
    append(2)
    cache.rollback(checkpoint)
    assert torch.equal(layer.indexer_position_ids, first)
    cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(layer.indexer_position_ids, first[:, [1, 1]])
    cache.crop(-1)
    assert torch.equal(layer.indexer_position_ids, first[:, [1, 1], :2])
    assert layer.indexer_keys.shape == (2, 2, DIM)
    assert layer.is_indexer_initialized
    cache.reset()
    assert layer.indexer_position_ids is None
    assert not layer.is_indexer_initialized


def test_an_indexer_that_is_full_is_refused_before_its_layer():
    cache = ArenaCache(config([INDEXED]), 1, 2)
    with pytest.raises(CapacityError, match="0 of 2 tokens used, 3 more asked"):
        cache.update_indexer(torch.ones(1, 3, DIM), 0)
    with pytest.raises(ArgumentTypeError, match=r"\[rows, tokens, index_dim\]"):
        cache.update_indexer(torch.ones(1, 3), 0)
    assert cache.batch_size == -1
