"""`ArenaStaticCache` where nothing is compiled: lengths, rows, buckets and errors, and `generate` by logits."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, MODES, N_TOKENS, assert_same, generate  # noqa: E402
from gpuarena_transformers import ArenaStaticCache  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers.cache_utils import (  # noqa: E402
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    DynamicCache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from gpuarena import Arena  # noqa: E402
from gpuarena.errors import (  # noqa: E402
    ArgumentError,
    AutogradError,
    CapacityError,
    CheckpointError,
    DeviceMismatchError,
    DTypeError,
    NotCopyableError,
    ShapeError,
    StaleRegionError,
)

#: One of each kind: full attention, windows on all layers, windows on some.
KINDS = ["llama", "mistral", "gemma3"]
HEADS, DIM, CAPACITY = 2, 4, 20


def small(rows=2, capacity=CAPACITY, **options):
    """Return a cache of two layers that are written by hand."""
    return ArenaStaticCache(families.config("llama"), rows, capacity, **options)


def tokens(n, start=0, rows=2, dtype=torch.float32):
    """Return keys that tell row, head and token: ``[rows, HEADS, n, DIM]``."""
    row = 1000.0 * (1 + torch.arange(rows))[:, None, None, None]
    head = 100.0 * torch.arange(HEADS)[None, :, None, None]
    return (
        (row + head + torch.arange(start, start + n)[None, None, :, None]).expand(-1, -1, -1, DIM).to(dtype)
    )


def step(cache, n=1, rows=2):
    """Append the next `n` tokens to both layers, as a model would, and return what the last one shows."""
    start = cache.stats.n_tokens
    n_slots, offset = cache.get_mask_sizes(n, 0)
    shown = (None, None)
    for layer in range(2):
        keys = tokens(n, start, rows) + 0.25 * layer
        shown = cache.update(keys, -keys, layer)
        assert shown[0].shape == shown[1].shape == (rows, HEADS, n_slots, DIM)
    assert offset == 0
    return shown


def assert_holds(cache, n, rows=2):
    """Check tokens, lengths on host and device, and that all other slots are 0."""
    assert cache.stats.n_tokens == n
    for index, layer in enumerate(cache.layers):
        expected = torch.zeros(rows, HEADS, cache.max_context_length, DIM)
        expected[:, :, :n] = tokens(n, 0, rows) + 0.25 * index
        assert torch.equal(layer.keys, expected)
        assert torch.equal(layer.values, -expected)
        assert int(layer.get_seq_length()) == int(layer.cumulative_length) == n
        assert layer.is_initialized == (n > 0)


def addresses(cache):
    return [
        tensor.data_ptr()
        for layer in cache.layers
        for tensor in (layer.keys, layer.values, layer.cumulative_length)
    ]


# -------------------------------------------------------------------------------------------------------- as upstream's


def test_it_is_what_transformers_tests_for():
    cache = ArenaStaticCache(families.config("gemma3"), 1, CAPACITY)
    assert isinstance(cache, StaticCache)
    assert cache.is_compileable
    assert cache.is_croppable
    assert all(isinstance(layer, StaticLayer) for layer in cache.layers)
    assert [isinstance(layer, StaticSlidingWindowLayer) for layer in cache.layers] == cache.is_sliding
    assert cache.is_sliding == [True, True, False]
    assert not hasattr(cache, "to")  # accelerate would call it
    for mapping in (STATIC_LAYER_TYPE_MAPPING, DYNAMIC_LAYER_TYPE_MAPPING):
        assert not any("gpuarena" in kind.__module__ for kind in mapping.values())


def test_layers_of_both_kinds_beside_each_other():
    cache = ArenaStaticCache(families.config("bamba"), 1, CAPACITY)
    assert [type(layer).__name__ for layer in cache.layers] == [
        "ArenaStaticStateLayer",
        "ArenaStaticLayer",
        "ArenaStaticStateLayer",
    ]
    with pytest.raises(CheckpointError, match="layer 0 is a ArenaStaticStateLayer"):
        cache.checkpoint()
    with pytest.raises(CheckpointError, match="layer 0"):
        cache.scope()
    with pytest.raises(ArgumentError, match="batch_select_indices: layer 0"):
        cache.batch_select_indices(torch.tensor([0]))


# ------------------------------------------------------------------------------------------------------------- generate


#: A bucket is the harder case.
ALL_MODES = [*[(mode, 4) for mode in MODES], *[(mode, None) for mode in ("greedy", "beam", "prompt lookup")]]


@pytest.mark.parametrize(("mode", "bucket"), ALL_MODES)
@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_a_dynamic_cache(name, mode, bucket):
    cache = ArenaStaticCache(families.model(name).config, MODES[mode].rows, N_TOKENS, bucket=bucket)
    outputs = generate(families.model(name), MODES[mode].arguments(name), cache)
    assert_same(outputs, families.reference(name, mode))
    assert getattr(outputs, CACHE) is cache
    assert len(cache.arenas) == 1


@pytest.mark.parametrize("mode", ["greedy", "beam"])
@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss", "gemma4-shared", "bamba", "lfm2"])
def test_logits_of_other_families(name, mode):
    cache = ArenaStaticCache(families.model(name).config, MODES[mode].rows, N_TOKENS, bucket=8)
    assert_same(
        generate(families.model(name), MODES[mode].arguments(name), cache), families.reference(name, mode)
    )


@pytest.mark.parametrize("name", [*KINDS, "bamba"])
def test_beams_move_in_place(name):
    moved = []

    class Watched(ArenaStaticCache):
        def reorder_cache(self, beam_idx):
            before = addresses(self) if name != "bamba" else states(self)
            super().reorder_cache(beam_idx)
            assert before == (addresses(self) if name != "bamba" else states(self))
            moved.append(beam_idx.tolist())

    def states(cache):
        return [state.data_ptr() for state in cache.layers[0].conv_states.values()]

    cache = Watched(families.model(name).config, 6, N_TOKENS)
    generate(families.model(name), MODES["beam"].arguments(name), cache)
    assert any(order != sorted(order) for order in moved)


@pytest.mark.parametrize("name", KINDS)
def test_a_conversation_and_then_another(name):
    model = families.model(name)
    cache, oracle = ArenaStaticCache(model.config, 2, 48, bucket=8), DynamicCache(config=model.config)
    first = families.prompt("padded")
    found, expected = generate(model, first, cache, n_new=5), generate(model, first, oracle, n_new=5)
    assert_same(found, expected)
    ids = torch.cat([found.sequences, families.prompt()["input_ids"][:, :4]], dim=1)
    mask = torch.ones_like(ids)
    mask[:, : first["attention_mask"].shape[1]] = first["attention_mask"]
    turn = {"input_ids": ids, "attention_mask": mask}
    assert_same(generate(model, turn, cache, n_new=5), generate(model, turn, oracle, n_new=5))
    where = addresses(cache)
    cache.reset()
    one = families.prompt("one")
    assert_same(generate(model, one, cache, n_new=5), generate(model, one, n_new=5))  # another number of rows
    assert addresses(cache) == where


@pytest.mark.parametrize("name", KINDS)
def test_one_prompt_with_several_answers(name):
    model = families.model(name)
    cache = ArenaStaticCache(model.config, 3, 40, bucket=8)
    prefix = families.prompt("repeating")["input_ids"]
    with torch.no_grad():
        model(input_ids=prefix, **{CACHE: cache})
    for end in families.prompt()["input_ids"]:
        ids = torch.cat([prefix, end[None, :4]], dim=1)
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with cache.scope() as start:
            assert start.n_tokens == prefix.shape[1]
            assert_same(generate(model, arguments, cache), generate(model, arguments))
    # Beams over a cache that holds one row already.
    cache.batch_repeat_interleave(3)
    beams = arguments | {"num_beams": 3}
    assert_same(generate(model, beams, cache), generate(model, beams))


def test_a_cache_that_is_too_small_says_so_before_the_step():
    model = families.model("llama")
    cache = ArenaStaticCache(model.config, 2, 12)
    with pytest.raises(
        CapacityError, match=r"12 of 12 tokens used, 1 more asked.*max_context_length"
    ) as caught:
        generate(model, families.prompt(), cache)
    assert (caught.value.used, caught.value.requested, caught.value.missing) == (12, 1, 1)
    assert {layer._kv.length for layer in cache.layers} == {12}
    cache.reset()
    assert_same(
        generate(model, families.prompt(), cache, n_new=4), generate(model, families.prompt(), n_new=4)
    )


# -------------------------------------------------------------------------------------------------------------- lengths


def test_lengths_are_copies():
    cache = small()
    assert cache.get_seq_length() == 0
    step(cache, 3)
    length = cache.get_seq_length()
    step(cache)
    assert int(length) == 3
    assert int(cache.get_seq_length()) == 4
    assert_holds(cache, 4)


@pytest.mark.parametrize("bucket", [None, 4])
def test_going_back_keeps_addresses_and_hides_what_was_there(bucket):
    cache = small(bucket=bucket)
    step(cache, 5)
    where = addresses(cache)
    start = cache.checkpoint()
    step(cache, 3)
    step(cache)
    assert_holds(cache, 9)
    cache.crop(-1)
    assert_holds(cache, 8)
    cache.crop(torch.tensor(-1))  # as transformers 5.17 does
    cache.crop(0)
    assert_holds(cache, 7)
    cache.rollback(start)
    assert_holds(cache, 5)
    with cache.scope():
        step(cache, 2)
    cache.truncate(2)
    assert_holds(cache, 2)
    with pytest.raises(CheckpointError, match="dead"):
        cache.rollback(start)
    step(cache, 6)
    assert_holds(cache, 8)
    cache.reset()
    assert_holds(cache, 0)
    assert addresses(cache) == where


def test_a_nan_that_was_taken_back_does_not_show():
    model = families.model("gemma3")
    cache = ArenaStaticCache(model.config, 2, N_TOKENS)
    generate(model, families.prompt(), cache, n_new=2)
    for layer, held in enumerate(cache.layers):
        bad = torch.full_like(held.keys[:, :, :3], torch.nan)
        cache.update(bad, bad, layer)
    cache.reset()
    assert_same(generate(model, families.prompt(), cache), families.reference("gemma3", "greedy"))


@pytest.mark.parametrize("bad", [1, -6, -100])
def test_crops_out_of_bounds_change_nothing(bad):
    cache = small()
    step(cache, 5)
    with pytest.raises(ArgumentError):
        cache.crop(bad)
    with pytest.raises(ArgumentError):
        cache.layers[0].crop(bad)
    with pytest.raises(ArgumentError):
        cache.truncate(6)
    assert_holds(cache, 5)


def test_a_step_that_fails_half_way_is_taken_back():
    cache = small()
    step(cache, 5)
    cache.update(tokens(2, 5), tokens(2, 5), 0)
    with pytest.raises(CheckpointError, match="finish the step"):
        cache.checkpoint()
    cache.crop(0)
    assert_holds(cache, 5)


def test_layers_alone():
    cache = small()
    step(cache, 5)
    layer = cache.layers[1]
    layer.crop(-2)
    assert (layer._kv.length, int(layer.cumulative_length), int(layer.get_seq_length())) == (3, 3, 3)
    layer.reset()
    assert (layer._kv.length, layer.get_seq_length(), layer.get_max_length()) == (0, 0, CAPACITY)
    assert repr(layer) == "ArenaStaticLayer(0 of 20 tokens)"
    for call in (
        lambda: layer.reorder_cache(torch.tensor([1, 0])),
        lambda: layer.batch_repeat_interleave(2),
        lambda: layer.batch_select_indices(torch.tensor([0])),
        layer.offload,
        layer.prefetch,
    ):
        with pytest.raises(ArgumentError):
            call()


# ----------------------------------------------------------------------------------------------------------------- rows


def test_rows_change_places_without_new_memory():
    cache = small(rows=4)
    step(cache, 3)
    where = addresses(cache)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    assert addresses(cache) == where
    assert cache.layers[1].keys[:, 0, 2, 0].tolist() == [1002.25, 1002.25, 2002.25, 2002.25]
    cache.reorder_cache(torch.tensor([2, 0, 3, 1]))
    assert cache.layers[1].values[:, 1, 0, 0].tolist() == [-2100.25, -1100.25, -2100.25, -1100.25]
    cache.batch_select_indices(torch.tensor([False, True, True, False]))
    assert cache.layers[0].keys.shape == (2, HEADS, CAPACITY, DIM)
    step(cache)
    held = cache.layers[0].keys[:, 0, :4, 0].tolist()
    assert held == [[1000, 1001, 1002, 1003], [2000, 2001, 2002, 2003]]
    assert addresses(cache) == where
    with pytest.raises(ShapeError):
        cache.batch_repeat_interleave(3)
    with pytest.raises(ShapeError):
        cache.batch_select_indices(torch.tensor([True]))
    with pytest.raises(ShapeError):
        cache.reorder_cache(torch.tensor([0, 2]))
    cache.reset()
    step(cache, 2, rows=4)
    assert_holds(cache, 2, rows=4)


class Watch(TorchDispatchMode):
    """Collects the operations that are run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **kwargs or {})


def test_a_step_and_a_reorder_allocate_nothing():
    cache = small(bucket=8)
    step(cache, 3)
    keys, order = tokens(1), torch.tensor([1, 0])
    with Watch() as watch:
        for _ in range(2):
            for layer in range(2):
                cache.update(keys, keys, layer)
            cache.reorder_cache(order)
            cache.crop(-1)
    views = {"slice", "narrow", "as_strided", "view", "select", "unbind", "detach", "alias", "view.dtype"}
    assert watch.names - views == {"index_copy_", "fill_", "copy_", "index_select", "zero_"}


# -------------------------------------------------------------------------------------------------------------- buckets


@pytest.mark.parametrize("bucket", [1, 3, 4, 100])
def test_attention_reads_at_most_twice_what_is_there(bucket):
    cache = small(capacity=50, bucket=bucket)
    shapes = set()
    for n in range(1, 51):
        n_slots = step(cache)[0].shape[2]
        assert n <= n_slots <= max(bucket, 2 * n)
        assert cache.n_slots == n_slots
        shapes.add(n_slots)
    assert len(shapes) <= max(1, (-(-50 // bucket) - 1).bit_length() + 1)
    assert_holds(cache, 50)


def test_a_bucket_is_shown_by_the_same_tensors_each_time():
    cache = small(bucket=4)
    first = step(cache, 3)
    second = step(cache, 3)
    assert second[0].shape[2] == 8
    assert second[0].data_ptr() == first[0].data_ptr()
    cache.crop(-4)
    assert all(now is then for now, then in zip(step(cache, 2), first, strict=True))
    assert all(now is then for now, then in zip(step(cache, 4), second, strict=True))


def test_room_that_was_asked_for():
    cache = small(bucket=2)
    cache.check_room(5)  # nothing is there yet
    step(cache, 1)
    cache.check_room(9)
    assert cache.n_slots == 16
    assert step(cache)[0].shape[2] == 16
    with pytest.raises(CapacityError) as caught:
        cache.check_room(19)
    assert caught.value.missing == 1
    assert cache.n_slots == 16
    cache.check_room()
    assert cache.n_slots == 4
    with pytest.raises(ArgumentError):
        cache.check_room(-1)
    assert cache.advance(3) == 2  # somebody else has written these
    assert (cache.stats.n_tokens, cache.get_mask_sizes(1, 0)) == (5, (8, 0))
    with pytest.raises(CapacityError):
        cache.advance(16)
    cache.truncate(4)  # the device follows the host
    assert [int(layer.cumulative_length) for layer in cache.layers] == [4, 4]
    cache.check_room(10)
    cache.crop(-1)  # what was asked for is forgotten as well
    assert cache.n_slots == 4


# --------------------------------------------------------------------------------------------------------------- errors


def test_what_does_not_fit_changes_nothing():
    cache = small()
    step(cache, 18)
    with pytest.raises(CapacityError):
        cache.get_mask_sizes(3, 0)
    with pytest.raises(CapacityError, match="18 of 20 tokens used, 3 more asked, 1 too many"):
        cache.update(tokens(3), tokens(3), 0)
    with pytest.raises(ShapeError):
        cache.update(tokens(1, rows=1), tokens(1, rows=1), 0)
    with pytest.raises(ShapeError):
        cache.update(tokens(1)[:, :1], tokens(1)[:, :1], 0)
    with pytest.raises(ShapeError):
        cache.update(tokens(1), tokens(2), 0)
    with pytest.raises(DTypeError):
        cache.update(tokens(1, dtype=torch.float64), tokens(1), 0)
    with pytest.raises(DeviceMismatchError):
        cache.update(tokens(1).to("meta"), tokens(1), 0)
    with pytest.raises(AutogradError):
        cache.update(tokens(1).clone().requires_grad_(), tokens(1), 0)
    assert_holds(cache, 18)
    cache.reset()
    with pytest.raises(ShapeError, match="at most 2"):
        cache.update(tokens(1, rows=3), tokens(1, rows=3), 0)
    step(cache, 20)
    assert_holds(cache, 20)


def test_memory_that_was_rolled_back():
    arena = Arena("1MiB", backend="torch")
    before = arena.checkpoint()
    cache = small(arena=arena)
    step(cache, 2)
    assert cache.arena is arena
    arena.rollback(before)
    for call in (
        lambda: cache.update(tokens(1), tokens(1), 0),
        lambda: cache.get_mask_sizes(1, 0),
        cache.check_room,
        cache.advance,
    ):
        with pytest.raises(StaleRegionError):
            call()


def test_arguments_that_cannot_be_right():
    llama = families.config("llama")
    with pytest.raises(ArgumentError, match=r"encoder-decoder.*use ArenaEncoderDecoderCache"):
        ArenaStaticCache(transformers.T5Config())
    with pytest.raises(ArgumentError, match="bucket"):
        ArenaStaticCache(llama, bucket=0)
    with pytest.raises(ArgumentError, match="max_batch_size"):
        ArenaStaticCache(llama, 0)
    with pytest.raises(ArgumentError, match="declares no maximum"):
        ArenaStaticCache(transformers.BloomConfig())
    with pytest.raises(DTypeError):
        small(dtype="bfloat16").update(tokens(1), tokens(1), 0)
    assert ArenaStaticCache(llama).get_max_length() == llama.max_position_embeddings


def test_keys_and_values_of_different_dtypes():
    cache = small()
    cache.update(tokens(2), tokens(2, dtype=torch.bfloat16)[..., :3], 0)
    assert (cache.layers[0].keys.dtype, cache.layers[0].values.dtype) == (torch.float32, torch.bfloat16)
    assert cache.layers[0].values.shape == (2, HEADS, CAPACITY, 3)


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("name", ["gemma3", "deepseek-v3", "gemma4"])
def test_a_cache_that_was_measured(name):
    model = families.model(name)
    cache = ArenaStaticCache.for_model(model, N_TOKENS, max_batch_size=2, bucket=8)
    where, used = addresses(cache), cache.arena.stats.used
    assert not cache.is_initialized
    assert cache.get_seq_length() == 0
    assert_same(generate(model, families.prompt(), cache), families.reference(name, "greedy"))
    assert addresses(cache) == where
    assert cache.arena.stats.used == used
    assert len(cache.arenas) == 1


def test_a_cache_that_is_as_large_as_fits():
    model = families.model("llama")
    assert ArenaStaticCache.for_model(model).max_context_length == model.config.max_position_embeddings
    with pytest.raises(ArgumentError, match="auto"):
        ArenaStaticCache.for_model(model, "all")
    with pytest.raises(ArgumentError, match="memory_fraction"):
        ArenaStaticCache.for_model(model, "auto", 0)


def test_memory_that_is_taken_early():
    cache = small()
    cache.early_initialization(2, HEADS, DIM, torch.float32, torch.device("cpu"))
    where = addresses(cache)
    assert not cache.is_initialized
    assert cache.batch_size == 2
    step(cache, 3)
    assert addresses(cache) == where
    assert_holds(cache, 3)


def test_inference_mode_and_then_not():
    with torch.inference_mode():
        cache = small()
        step(cache, 2)
    step(cache, 2)
    with torch.inference_mode():
        step(cache)
    assert_holds(cache, 5)


def test_a_copy_has_its_own_memory():
    model = families.model("gemma3")
    cache = ArenaStaticCache(model.config, 2, N_TOKENS, bucket=4)
    generate(model, families.prompt(), cache, n_new=4)
    other = copy.deepcopy(cache)
    assert (other.stats.n_tokens, other.n_slots) == (cache.stats.n_tokens, cache.n_slots)
    assert not set(addresses(other)) & set(addresses(cache))
    for one, two in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(one.keys, two.keys)
        assert torch.equal(one.values, two.values)
    with pytest.raises(NotCopyableError):
        cache.__reduce__()


def test_a_cache_that_is_dropped_leaves_no_cycle():
    cache = small()
    step(cache, 2)
    layer, watch = cache.layers[0], weakref.ref(cache.arena)
    gc.disable()
    try:
        assert repr(cache) == "ArenaStaticCache(2 of 20 tokens, 2 of 2 rows, 2 layers)"
        del cache
        with pytest.raises(ArgumentError, match="gone"):
            layer.update(tokens(1), tokens(1))
        del layer
        assert watch() is None
    finally:
        gc.enable()
