"""What ``on_full="fallback"`` promises: the same as a `DynamicCache`, also when the arena is full."""

from __future__ import annotations

import copy
import warnings

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, MODES, assert_same, generate  # noqa: E402
from gpuarena_transformers import ArenaCache  # noqa: E402
from gpuarena_transformers.overflow import CacheOverflowWarning, CacheStats  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from gpuarena import CapacityError, CheckpointError, DTypeError, ShapeError  # noqa: E402
from gpuarena.errors import ArgumentError, AutogradError, StaleRegionError  # noqa: E402

WINDOW = families.config("gemma3").sliding_window
#: Of the three layers of this config the first two have a window.
CONFIG = families.config("gemma3")
OVER = pytest.warns(CacheOverflowWarning, match="the cache is full")


def states(n_new, *, rows=1, heads=1, dim=4, generator=None):
    return torch.randn(rows, heads, n_new, dim, generator=generator)


def fill(cache, n_new, *, rows=1):
    """Append to each layer; return what was given."""
    given = []
    for index in range(len(cache.layers)):
        given.append((states(n_new, rows=rows), states(n_new, rows=rows)))
        cache.update(*given[-1], index)
    return given


def joined(*parts):
    """Return the keys and values of each layer, of what `fill` returned."""
    return [
        tuple(torch.cat(kind, dim=2) for kind in zip(*layer, strict=True))
        for layer in zip(*parts, strict=True)
    ]


def assert_holds(cache, wanted):
    for layer, (keys, values) in zip(cache.layers, wanted, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


def is_in_arena(tensor, cache):
    return cache.arena.address <= tensor.data_ptr() < cache.arena.address + cache.arena.capacity


# ------------------------------------------------------------------------------------------------------------ generating


@pytest.mark.parametrize(
    ("name", "mode", "capacity"),
    [
        *(("gemma3", mode, 12) for mode in ("greedy", "beam", "draft model", "left padding, beam")),
        ("gemma3", "prefill in chunks", 6),  # in the middle of a chunk
        ("gemma3", "greedy", 4),  # the first forward
        ("llama", "prompt lookup", 14),
        ("llama", "beam", 9),  # the prompt just fits
        ("mistral", "draft model", 12),
        ("deepseek-v3", "beam", 12),  # values narrower than keys
        ("gpt2", "left padding", 13),
        ("bamba", "greedy", 12),  # recurrent states, which are never full
        ("deepseek-v3.2", "beam", 12),  # keys of an indexer
    ],
)
def test_logits_are_those_of_a_dynamic_cache(name, mode, capacity):
    model = families.model(name)
    cache = ArenaCache(model.config, MODES[mode].rows, capacity, on_full="fallback")
    with OVER as caught:
        outputs = generate(model, MODES[mode].arguments(name), cache)
    assert len(caught) == 1
    assert_same(outputs, families.reference(name, mode))
    assert cache.get_seq_length() > capacity
    assert cache.stats.overflow_nbytes > 0


def test_several_turns_over_the_boundary_and_back():
    model = families.model("gemma3")
    ids = families.prompt("one")["input_ids"]
    cache = ArenaCache(model.config, 1, 16, on_full="fallback")
    first = generate(model, {"input_ids": ids}, cache, n_new=4)
    with OVER:
        second = generate(model, {"input_ids": torch.cat([first.sequences, ids[:, :3]], 1)}, cache, n_new=4)
    assert_same(second, generate(model, {"input_ids": torch.cat([first.sequences, ids[:, :3]], 1)}, n_new=4))
    cache.truncate(9)  # another answer to the first prompt
    assert cache.stats.overflow_nbytes == 0
    again = torch.cat([ids, ids[:, 3:5]], dim=1)
    assert_same(
        generate(model, {"input_ids": again}, cache, n_new=4), generate(model, {"input_ids": again}, n_new=4)
    )
    assert is_in_arena(cache.layers[0].keys, cache)


def test_scopes_that_overflow_come_back_to_the_prompt():
    model = families.model("llama")
    ids = families.prompt("repeating")["input_ids"]
    cache = ArenaCache(model.config, 3, 14, on_full="fallback")
    with torch.no_grad():
        model(input_ids=ids, **{CACHE: cache})
    address = cache.layers[0].keys.data_ptr()
    prompt = {"input_ids": torch.cat([ids, ids[:, :2]], dim=1)}
    with OVER as caught:
        for num_beams in (1, 3, 1):
            with cache.scope():
                if num_beams > 1:
                    cache.batch_repeat_interleave(num_beams)
                found = generate(model, prompt | {"num_beams": num_beams}, cache, n_new=5)
            assert_same(found, generate(model, prompt | {"num_beams": num_beams}, n_new=5))
            assert cache.get_seq_length() == 12
            assert cache.layers[0].keys.data_ptr() == address
    assert len(caught) == 1


# ----------------------------------------------------------------------------------------------------------- the warning


def test_the_warning_tells_tokens_capacity_and_bytes():
    cache = ArenaCache(CONFIG, 2, 8, on_full="fallback")
    fill(cache, 7, rows=2)
    with OVER as caught:
        fill(cache, 3, rows=2)
    (warning,) = [one.message for one in caught]
    nbytes = sum(2 * kind.numel() * 4 for layer in cache.layers for kind in (layer.keys,))
    assert (warning.n_tokens, warning.capacity, warning.nbytes) == (10, 8, nbytes)
    for figure in (10, 8, nbytes, 2):
        assert str(figure) in str(warning)
    assert cache.stats.overflow_nbytes == nbytes
    fill(cache, 1, rows=2)  # without another one
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.truncate(8)
        fill(cache, 1, rows=2)
    cache.reset()
    fill(cache, 8, rows=1)
    with OVER:  # of the next conversation
        fill(cache, 1, rows=1)


def test_a_warning_that_is_an_error_has_changed_nothing():
    cache = ArenaCache(CONFIG, 1, 8, on_full="fallback")
    first = fill(cache, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CacheOverflowWarning):
            fill(cache, 1)
    assert_holds(cache, first)
    assert cache.stats.overflow_nbytes == 0
    second = fill(cache, 1)
    assert_holds(cache, joined(first, second))


def test_what_may_be_asked_when_it_is_full():
    for wrong in ("grow", None, True):
        with pytest.raises(ArgumentError, match='on_full is "raise" or "fallback"'):
            ArenaCache(CONFIG, 1, 8, on_full=wrong)
    cache = ArenaCache(CONFIG, 1, 8)
    assert cache.on_full == "raise"
    fill(cache, 8)
    with pytest.raises(CapacityError):
        fill(cache, 1)
    cache = ArenaCache.for_model(families.model("llama"), 8, on_full="fallback")
    assert cache.on_full == "fallback"
    with OVER, torch.no_grad():
        families.model("llama")(input_ids=families.prompt("one")["input_ids"], **{CACHE: cache})
    assert len(cache.arenas) == 1


# ----------------------------------------------------------------------------------------------------- there and back again


@pytest.mark.filterwarnings("ignore:the cache is full")
def test_going_back_is_exact_also_when_rows_have_moved():
    cache = ArenaCache(CONFIG, 3, 8, on_full="fallback")
    first, second = fill(cache, 6, rows=3), fill(cache, 5, rows=3)
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    wanted = [tuple(kind[order] for kind in layer) for layer in joined(first, second)]
    assert_holds(cache, wanted)
    cache.crop(-4)
    assert_holds(cache, [tuple(kind[:, :, :7] for kind in layer) for layer in wanted])
    assert all(is_in_arena(layer.keys, cache) for layer in cache.layers)
    third = fill(cache, 3, rows=3)
    wanted = joined([tuple(kind[:, :, :7] for kind in layer) for layer in wanted], third)
    assert_holds(cache, wanted)
    cache.batch_select_indices(torch.tensor([1]))
    cache.truncate(2)
    assert_holds(cache, [tuple(kind[1:2, :, :2] for kind in layer) for layer in wanted])


@pytest.mark.filterwarnings("ignore:the cache is full")
def test_a_checkpoint_beyond_the_capacity():
    cache = ArenaCache(CONFIG, 2, 4, on_full="fallback")
    first = fill(cache, 6)
    checkpoint = cache.checkpoint()
    cache.batch_repeat_interleave(2)
    fill(cache, 2, rows=2)
    cache.rollback(checkpoint)
    assert cache.batch_size == 1
    assert_holds(cache, first)
    second = fill(cache, 1)
    assert_holds(cache, joined(first, second))
    assert cache.layers[0].update(states(1), states(1))[0].shape[0] == 1


@pytest.mark.filterwarnings("ignore:the cache is full")
def test_reset_frees_the_tensors_and_goes_back_to_the_arena():
    cache = ArenaCache(CONFIG, 2, 8, on_full="fallback")
    fill(cache, 3)
    address = cache.layers[0].keys.data_ptr()
    fill(cache, 20)
    assert not is_in_arena(cache.layers[0].keys, cache)
    stats = cache.stats
    assert isinstance(stats, CacheStats)
    assert stats.n_tokens == stats.high_water_tokens == 23
    assert stats.overflow_nbytes == 3 * 2 * 23 * 4 * 4
    cache.reset()
    assert cache.stats.overflow_nbytes == 0
    assert cache.batch_size == -1
    both = fill(cache, 8, rows=2)
    assert cache.layers[0].keys.data_ptr() == address
    assert_holds(cache, both)
    assert cache.stats.overflow_nbytes == 0


def test_an_ordinary_cache_has_no_bytes_outside_of_the_arena():
    cache = ArenaCache(CONFIG, 1, 8)
    fill(cache, 8)
    assert cache.stats.overflow_nbytes == 0
    assert cache.stats.used_nbytes == cache.group.stats.used_nbytes


@pytest.mark.filterwarnings("ignore:the cache is full")
@pytest.mark.parametrize("n_tokens", [6, 11])
def test_a_deep_copy_goes_on_by_itself(n_tokens):
    cache = ArenaCache(CONFIG, 2, 8, on_full="fallback")
    first = fill(cache, n_tokens, rows=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if n_tokens > 8 else "ignore")  # it was said of the original
        other = copy.deepcopy(cache)
    fill(cache, 1, rows=2)
    assert_holds(other, first)
    second = fill(other, 3, rows=2)
    assert_holds(other, joined(first, second))
    assert other.stats.overflow_nbytes > 0


# ------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.filterwarnings("ignore:the cache is full")
def test_errors_beyond_the_capacity_change_nothing():
    cache = ArenaCache(CONFIG, 2, 4, on_full="fallback")
    first = fill(cache, 6)
    layer = cache.layers[0]
    for wrong, error in (
        ((states(1, rows=3), states(1, rows=3)), ShapeError),
        ((states(1, rows=2), states(1, rows=2)), ShapeError),
        ((states(1, dim=5), states(1)), ShapeError),
        ((states(1).double(), states(1)), DTypeError),
        ((states(1).requires_grad_(), states(1)), AutogradError),
    ):
        with pytest.raises(error):
            layer.update(*wrong)
    for call in (lambda: cache.batch_repeat_interleave(3), lambda: cache.reorder_cache(torch.tensor([1]))):
        with pytest.raises(ShapeError):
            call()
    for call in (lambda: cache.truncate(7), lambda: cache.crop(-7)):
        with pytest.raises(ArgumentError):
            call()
    assert_holds(cache, first)
    with pytest.raises(ShapeError, match="3 rows given"):
        fill(ArenaCache(CONFIG, 2, 4, on_full="fallback"), 6, rows=3)


@pytest.mark.filterwarnings("ignore:the cache is full")
def test_all_modes_of_torch_take_turns():
    cache = ArenaCache(CONFIG, 1, 4, on_full="fallback")
    parts = []
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            parts.append(fill(cache, 2))
    with torch.inference_mode():
        cache.crop(-7)
    assert_holds(cache, [tuple(kind[:, :, :3] for kind in layer) for layer in joined(*parts)])
    fill(cache, 1)
    with torch.no_grad():
        fill(cache, 1)


@pytest.mark.filterwarnings("ignore:the cache is full")
def test_an_arena_that_was_rolled_back_is_not_written():
    from gpuarena import Arena

    arena = Arena("1MiB", backend="torch")
    start = arena.checkpoint()
    cache = ArenaCache(CONFIG, 1, 4, arena=arena, on_full="fallback")
    first = fill(cache, 6)
    arena.rollback(start)
    other = arena.alloc((1000,), "float32", fill=7.0)
    cache.truncate(3)  # stays outside
    assert_holds(cache, [tuple(kind[:, :, :3] for kind in layer) for layer in first])
    assert bool((other.array == 7).all())
    cache.reset()
    with pytest.raises(StaleRegionError):
        fill(cache, 1)


# ----------------------------------------------------------------------------------------------------- any calls in any order


class AroundTheCapacity(RuleBasedStateMachine):
    """An `ArenaCache` of 6 tokens and 4 rows against a `DynamicCache`, which keeps all and knows no windows."""

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = ArenaCache(CONFIG, 4, 6, on_full="fallback")
        self.oracle = DynamicCache()
        self.checkpoints = []  # the handle, a copy of the oracle, and whether it was cut and moved
        self.rows = 1
        self.length = 0

    def moved(self):
        for entry in self.checkpoints:
            entry["moved"] = True

    def cut(self, n_tokens):
        self.length = n_tokens
        for entry in self.checkpoints:
            entry["cut"] |= entry["length"] > n_tokens

    @rule(n_new=st.integers(1, 5), rows=st.integers(1, 4))
    def append(self, n_new, rows):
        if self.length == 0:
            self.rows = rows
        for index, layer in enumerate(self.cache.layers):
            pair = [states(n_new, rows=self.rows, generator=self.generator) for _ in range(2)]
            announced = self.cache.get_mask_sizes(n_new, index)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CacheOverflowWarning)
                seen = self.cache.update(*pair, index)
            low = max(self.length - WINDOW + 1, 0) if layer.is_sliding else 0
            assert announced == (self.length + n_new - low, low)
            for found, wanted in zip(seen, self.oracle.update(*pair, index), strict=True):
                assert torch.equal(found, wanted[:, :, low:])
        self.length += n_new

    @precondition(lambda self: self.length > 0)
    @rule(data=st.data())
    def crop(self, data):
        # A DynamicCache of transformers 5.17 cannot be cropped to nothing and go on.
        n_removed = data.draw(st.integers(0, self.length - 1))
        self.cache.crop(-n_removed)
        if n_removed:
            self.oracle.crop(-n_removed)
        self.cut(self.length - n_removed)

    @rule()
    def checkpoint(self):
        handle = self.cache.checkpoint()
        entry = {
            "handle": handle,
            "oracle": copy.deepcopy(self.oracle),
            "rows": self.rows,
            "length": self.length,
        }
        self.checkpoints.append(entry | {"cut": False, "moved": False})

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def rollback(self, data):
        entry = data.draw(st.sampled_from(self.checkpoints))
        try:
            self.cache.rollback(entry["handle"])
        except CheckpointError:
            assert entry["cut"] or entry["moved"]
            self.checkpoints.remove(entry)
            return
        assert not entry["cut"]
        self.oracle = copy.deepcopy(entry["oracle"])
        self.rows = entry["rows"]
        self.cut(entry["length"])

    @precondition(lambda self: self.length > 0)
    @rule(data=st.data())
    def reorder(self, data):
        rows = st.lists(st.integers(0, self.rows - 1), min_size=self.rows, max_size=self.rows)
        order = torch.tensor(data.draw(rows))
        self.cache.reorder_cache(order)
        self.oracle.reorder_cache(order)
        self.moved()

    @precondition(lambda self: self.length > 0)
    @rule(data=st.data())
    def repeat(self, data):
        n = data.draw(st.integers(1, 4 // self.rows))
        if self.rows > 1:  # a checkpoint of a single row stays
            self.moved()
        self.cache.batch_repeat_interleave(n)
        self.oracle.batch_repeat_interleave(n)
        self.rows *= n

    @precondition(lambda self: self.length > 0)
    @rule(data=st.data())
    def select(self, data):
        chosen = torch.tensor(data.draw(st.lists(st.integers(0, self.rows - 1), min_size=1, max_size=4)))
        self.cache.batch_select_indices(chosen)
        self.oracle.batch_select_indices(chosen)
        self.rows = len(chosen)
        self.moved()

    @rule()
    def reset(self):
        self.cache.reset()
        self.oracle = DynamicCache()
        self.cut(-1)
        self.length = 0

    @invariant()
    def both_hold_the_same(self):
        assert self.cache.get_seq_length() == self.length
        if self.length == 0:
            return
        assert self.cache.batch_size == self.rows
        for layer, other in zip(self.cache.layers, self.oracle.layers, strict=True):
            assert torch.equal(layer.keys, other.keys)
            assert torch.equal(layer.values, other.values)
        assert (self.cache.stats.overflow_nbytes > 0) == (self.length > 6)
        if self.length <= 6:
            assert is_in_arena(self.cache.layers[0].keys, self.cache)


TestAroundTheCapacity = AroundTheCapacity.TestCase
TestAroundTheCapacity.settings = settings(stateful_step_count=25)
