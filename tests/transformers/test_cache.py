"""What transformers asks of a cache, and what `ArenaCache` promises beside what `generate` returns."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import re
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
import gpuarena_transformers  # noqa: E402
from families import CACHE, MODES, N_TOKENS, assert_same, generate  # noqa: E402
from gpuarena_transformers import ArenaCache, ArenaLayer, StaticLinearKVCache  # noqa: E402
from gpuarena_transformers import cache as cache_module  # noqa: E402
from gpuarena_transformers.sizing import free_nbytes  # noqa: E402
from transformers import DynamicCache, EncoderDecoderCache, StaticCache, T5Config, T5ForConditionalGeneration  # noqa: E402
from transformers.cache_utils import (  # noqa: E402
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
)

from gpuarena import (  # noqa: E402
    Arena,
    CheckpointError,
    DeviceMismatchError,
    DTypeError,
    OutOfMemoryError,
    ShapeError,
    StaleRegionError,
)
from gpuarena.errors import ArgumentError, ArgumentTypeError, NotCopyableError  # noqa: E402
from gpuarena.kv import KVSpec  # noqa: E402


def states(n_new, *, rows=1, heads=2, dim=16, dtype=torch.float32, generator=None):
    return torch.randn(rows, heads, n_new, dim, generator=generator).to(dtype)


def fill(cache, n_new, *, rows=1, **kind):
    """Append to each layer; return what it was given and what came back."""
    given_and_seen = []
    for index in range(len(cache.layers)):
        pair = states(n_new, rows=rows, **kind), states(n_new, rows=rows, **kind)
        given_and_seen.append((pair, cache.update(*pair, index)))
    return given_and_seen


def forward(name, cache, n_tokens=6, rows=1):
    """Run a model; return its logits."""
    ids = families.prompt("repeating")["input_ids"][:, :n_tokens].repeat(rows, 1)
    with torch.no_grad():
        return families.model(name)(input_ids=ids, **{CACHE: cache}).logits


def llama_spec():
    return KVSpec.uniform(layers=2, kv_heads=2, head_dim=16, dtype="float32")


# ------------------------------------------------------------------------------------------------------- the constructor


def test_the_arguments_of_the_original_by_position_and_by_name():
    config = families.config("llama")
    by_position = StaticLinearKVCache(config, 2, 32, "cpu", torch.float32)
    by_name = StaticLinearKVCache(
        config=config, max_batch_size=2, max_context_length=32, device="cpu", dtype=torch.float32
    )
    for cache in (by_position, by_name):
        assert (cache.max_batch_size, cache.max_context_length, cache.get_max_length()) == (2, 32, 32)
        generate(families.model("llama"), families.prompt(), cache)
        assert cache.layers[1].keys.shape == (2, 2, 18, 16)
    assert StaticLinearKVCache is ArenaCache


@pytest.mark.parametrize("dtype", ["float32", "torch.float32", torch.float32])
def test_a_dtype_may_be_a_text(dtype):
    forward("llama", ArenaCache(families.config("llama"), 1, 8, dtype=dtype))


def test_the_capacity_is_by_default_what_the_config_declares():
    assert ArenaCache(families.config("llama")).max_context_length == 256
    assert ArenaCache(families.config("gpt2")).max_context_length == 256
    with pytest.raises(ArgumentError, match="give the capacity in tokens"):
        ArenaCache()
    with pytest.raises(ArgumentError, match="give the capacity in tokens"):
        ArenaCache(transformers.BloomConfig(n_layer=1))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_batch_size": 0}, ArgumentError, "max_batch_size must be at least 1"),
        ({"max_batch_size": 1.0}, ArgumentTypeError, "max_batch_size must be an integer"),
        ({"max_context_length": 0}, ArgumentError, "max_context_length must be at least 1"),
        ({"max_context_length": "8"}, ArgumentTypeError, "max_context_length must be an integer"),
        ({"dtype": "float31"}, DTypeError, "float31"),
        ({"device": "nowhere"}, ArgumentError, "nowhere"),
        ({"device": 1.5}, ArgumentError, "1.5"),
    ],
)
def test_arguments_that_can_never_be_right(arguments, error, message):
    with pytest.raises(error, match=message):
        ArenaCache(families.config("llama"), **{"max_batch_size": 1, "max_context_length": 8} | arguments)


def test_tensors_that_disagree_with_what_was_asked_are_refused_before_memory_is_taken():
    config = families.config("llama")
    with pytest.raises(DeviceMismatchError, match="keys are on cpu, the cache was made for meta"):
        forward("llama", cache := ArenaCache(config, 1, 8, device="meta"))
    assert cache.arenas == []
    with pytest.raises(DeviceMismatchError, match="cuda:1"):
        forward("llama", ArenaCache(config, 1, 8, device="cuda:1"))
    with pytest.raises(
        DTypeError, match=r"values are torch\.float32, the cache was made for torch\.bfloat16"
    ):
        forward("llama", cache := ArenaCache(config, 1, 8, dtype="bfloat16"))
    assert cache.arenas == []
    cache = ArenaCache(config, 1, 8, dtype=torch.float32)
    with pytest.raises(DTypeError, match=r"keys are torch\.bfloat16"):
        cache.update(states(1, dtype=torch.bfloat16), states(1), 0)
    for wrong in (states(1)[0], states(1).numpy(), None):
        with pytest.raises(ArgumentTypeError, match=r"\[batch, kv_heads, tokens, dim\]"):
            cache.update(wrong, states(1), 0)
    assert cache.arenas == []
    forward("llama", cache)
    with pytest.raises(DTypeError, match="layer 0"):
        cache.update(states(1, dtype=torch.bfloat16), states(1), 0)


def test_keys_may_stay_in_float32():
    """As those of GPT-J do, which are rotated in float32."""
    config = transformers.GPTJConfig(
        vocab_size=128, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=256
    )
    torch.manual_seed(0)
    model = transformers.GPTJForCausalLM(config).eval().to(torch.bfloat16)
    cache = ArenaCache(config, 1, 32, dtype="bfloat16")
    ids = families.prompt("one")["input_ids"]
    with torch.no_grad():
        found = model(input_ids=ids, **{CACHE: cache}).logits
        expected = model(input_ids=ids, **{CACHE: (dynamic := DynamicCache(config=config))}).logits
    assert torch.equal(found, expected)
    assert cache.layers[0].values.dtype == torch.bfloat16
    assert cache.layers[0].keys.dtype == dynamic.layers[0].keys.dtype


def test_a_layer_type_that_this_transformers_does_not_cache(monkeypatch):
    monkeypatch.setattr(cache_module, "get_layer_types_and_kwargs", lambda config: (["astral"], [{}]))
    with pytest.raises(ArgumentError, match="layer 0 is of type 'astral'"):
        ArenaCache(families.config("llama"), 1, 8)


# ---------------------------------------------------------------------------------------------- the contract of a `Cache`


def test_what_kind_of_object_it_is():
    cache = ArenaCache(families.config("gemma3"), 1, 8)
    assert isinstance(cache, Cache)
    assert isinstance(cache, DynamicCache)  # what EncoderDecoderCache asks for
    assert not isinstance(cache, (StaticCache, torch.nn.Module))
    assert not hasattr(cache, "to")  # accelerate would call it
    cache._is_user_defined = True  # as generate does
    assert len(cache) == 3
    assert [type(layer) for layer in cache.layers] == [ArenaLayer] * 3
    assert cache.is_sliding == [True, True, False]
    assert cache.is_linear == [False] * 3
    assert not cache.is_compileable
    assert cache.is_croppable
    assert repr(cache) == "ArenaCache(0 of 8 tokens, 0 of 1 rows, 3 layers)"
    assert repr(cache.layers[0]) == "ArenaLayer(0 of 8 tokens, window=8)"


def test_transformers_own_caches_are_left_as_they_are():
    for mapping in (DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING):
        assert {cls.__module__.split(".")[0] for cls in mapping.values()} == {"transformers"}
    assert ArenaLayer._layer_type is None


def test_before_the_first_token():
    for cache in (ArenaCache(None, 2, 8), ArenaCache(families.config("gemma3"), 2, 8)):
        assert cache.arena is None
        assert cache.get_seq_length() == cache.get_query_offset() == 0
        assert cache.get_max_length() == cache.get_max_cache_shape() == 8
        assert cache.get_mask_sizes(3, 0) == (3, 0)
        assert cache.batch_size == -1
        assert not cache.is_initialized
        assert cache.stats.reserved_nbytes == 0
        cache.activate_past_recording()
        cache.crop(0)
        cache.reset()
        cache.reorder_cache(torch.tensor([0]))  # of nothing
        for layer in cache.layers:
            assert not hasattr(layer, "batch_size")
            assert not hasattr(layer, "device")
            assert layer.keys is layer.values is None
            assert layer.get_max_length() == layer.get_max_cache_shape() == 8
            assert layer.get_seq_length() == 0
            layer.reset()
            layer.crop(0)


def test_it_is_initialized_only_while_it_holds_tokens():
    """PaliGemma, Molmo 2 and HRM-Text take an initialized cache for a running conversation."""
    cache = ArenaCache(families.config("gemma3"), 2, 8)
    fill(cache, 3, rows=2)
    assert cache.is_initialized
    assert cache.batch_size == cache.layers[2].batch_size == 2
    assert cache.layers[0].device == torch.device("cpu")
    start = cache.layers[0].keys.data_ptr()
    for empty in (lambda: cache.crop(-3), cache.reset, lambda: cache.truncate(0)):
        empty()
        assert not cache.is_initialized
        assert cache.get_seq_length() == 0
        assert cache.layers[0].keys.shape[2] == 0
        fill(cache, 3, rows=2)
        assert cache.layers[0].keys.data_ptr() == start  # the memory stays
    with cache.scope():
        fill(cache, 1, rows=2)
    assert cache.is_initialized
    for layer in cache.layers:
        layer.reset()
    assert not cache.is_initialized


def test_early_initialization_takes_the_memory_and_holds_no_tokens():
    cache = ArenaCache(families.config("gemma3"), 2, 8)
    cache.early_initialization(2, [2, 2, 1], [16, 16, 32], torch.float32, torch.device("cpu"))
    assert not cache.is_initialized
    assert [layer.keys.shape[1:] for layer in cache.layers] == [(2, 0, 16), (2, 0, 16), (1, 0, 32)]
    arena, used = cache.arena, cache.arena.stats.used
    assert used == cache.stats.reserved_nbytes + cache.stats.scratch_nbytes > 0
    for index, heads, dim in ((0, 2, 16), (1, 2, 16), (2, 1, 32)):
        cache.update(states(3, heads=heads, dim=dim), states(3, heads=heads, dim=dim), index)
    assert cache.is_initialized
    assert (cache.arenas, arena.stats.used) == ([arena], used)
    with pytest.raises(
        ShapeError, match=r"layer 2: keys are \[1, 2, 1, 16\], the cache holds \[rows, 1, tokens, 32\]"
    ):
        cache.update(states(1), states(1), 2)


def test_update_takes_what_any_version_gives_besides():
    cache = ArenaCache(families.config("llama"), 1, 8)
    cache.update(states(1), states(1), 0, {"cache_position": torch.tensor([0])})
    cache.update(states(1), states(1), 0, kwargs={"cu_seq_lens_q": None})
    assert cache.layers[0].get_seq_length() == 2


def test_crop_takes_what_any_version_gives():
    cache = ArenaCache(families.config("gemma3"), 1, 16)
    fill(cache, 12)
    for remove, left in ((-2, 10), (0, 10), (torch.tensor(-3), 7), (torch.tensor(0), 7), (-7, 0)):
        cache.crop(remove)
        assert [layer.get_seq_length() for layer in cache.layers] == [left] * 3
    fill(cache, 4)
    for wrong, message in (
        (2, "minus the number"),
        (-5, "holds only 4"),
        (torch.tensor(1), "minus the number"),
    ):
        with pytest.raises(ArgumentError, match=message):
            cache.crop(wrong)
    for wrong, message in ((5, r"truncate\(5\): the cache holds only 4"), (-1, "at least 0")):
        with pytest.raises(ArgumentError, match=message):
            cache.truncate(wrong)
    with pytest.raises(ArgumentTypeError):
        cache.truncate(1.0)
    assert cache.get_seq_length() == 4
    cache.layers[0].crop(-1)
    with pytest.raises(ArgumentError):
        cache.layers[0].crop(-4)
    assert [layer.get_seq_length() for layer in cache.layers] == [3, 4, 4]


def test_what_a_step_that_failed_left_is_cut():
    """Cropping by 0 tokens once left the first layers longer than the others."""
    cache = ArenaCache(families.config("gemma3"), 1, 16)
    fill(cache, 4)
    for repair in (lambda: cache.truncate(4), lambda: cache.crop(0)):
        cache.update(states(1), states(1), 0)
        with pytest.raises(CheckpointError, match=r"truncate\(4\)"):
            cache.checkpoint()
        repair()
        assert [layer.get_seq_length() for layer in cache.layers] == [4] * 3
        cache.checkpoint()


def test_rows_are_moved_on_the_cache_and_not_on_one_layer():
    cache = ArenaCache(families.config("llama"), 2, 8)
    fill(cache, 2, rows=2)
    for method, argument in (
        ("reorder_cache", torch.tensor([1, 0])),
        ("batch_repeat_interleave", 2),
        ("batch_select_indices", torch.tensor([0])),
    ):
        with pytest.raises(ArgumentError, match=f"call {method} on the cache"):
            getattr(cache.layers[0], method)(argument)
    with pytest.raises(ShapeError, match="the cache was made for 1 to 2"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(ShapeError, match="the cache holds rows 0 to 1"):
        cache.reorder_cache(torch.tensor([0, 2]))
    for mask in (torch.tensor([True]), torch.tensor([True, False, False])):
        with pytest.raises(ShapeError, match="the cache holds 2"):
            cache.batch_select_indices(mask)


def test_keys_and_values_are_views_that_are_not_replaced():
    cache = ArenaCache(families.config("llama"), 1, 8)
    fill(cache, 2)
    layer = cache.layers[0]
    layer.keys = layer.values = None  # as CacheLayerMixin does
    layer.is_initialized = False
    assert layer.is_initialized
    with pytest.raises(AttributeError, match="views of its arena"):
        layer.keys = states(2)
    with pytest.raises(AttributeError, match="views of its arena"):
        layer.values = states(2)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", None])
@given(data=st.data())
@settings(max_examples=25)
def test_it_does_what_a_dynamic_cache_does(name, data):
    """What comes back, its length as announced, and the positions: for any calls that both know."""
    config = None if name is None else families.config(name)
    cache = ArenaCache(config, 6, 40)
    dynamic = DynamicCache(config=config)
    n_layers = 2 if config is None else config.num_hidden_layers
    # A DynamicCache forgets what is behind its windows, and cannot go back then.
    keeps_all = name in (None, "llama")
    calls = ["update", "update", "reorder", "repeat", "select", *(["crop"] if keeps_all else [])]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    rows, length = data.draw(st.integers(1, 3)), 0
    for call in ["update", *data.draw(st.lists(st.sampled_from(calls), max_size=12))]:
        if call == "update":
            n_new = data.draw(st.integers(1, min(7, 40 - length))) if length < 40 else 0
            for index in range(n_layers if n_new else 0):
                announced = cache.get_mask_sizes(n_new, index)
                pair = [
                    states(n_new, rows=rows, heads=h, dim=d, generator=generator) for h, d in ((2, 4), (2, 3))
                ]
                seen = cache.update(*pair, index)
                assert seen[0].shape[2] == seen[1].shape[2] == announced[0]
                if index < len(dynamic.layers) and dynamic.layers[index].is_initialized:
                    assert announced == dynamic.get_mask_sizes(n_new, index)
                else:
                    assert announced == (n_new, 0)
                for found, wanted in zip(seen, dynamic.update(*pair, index), strict=True):
                    assert torch.equal(found, wanted)
            length += n_new
        elif call == "reorder":
            order = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows)))
            cache.reorder_cache(order)
            dynamic.reorder_cache(order)
        elif call == "repeat" and rows <= 3:
            rows *= 2
            cache.batch_repeat_interleave(2)
            dynamic.batch_repeat_interleave(2)
        elif call == "select":
            chosen = torch.tensor(
                data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows, unique=True))
            )
            if data.draw(st.booleans()):
                chosen = torch.zeros(rows, dtype=torch.bool).index_fill(0, chosen, True)
            cache.batch_select_indices(chosen)
            dynamic.batch_select_indices(chosen)
            rows = len(cache.layers[0].keys)
        elif call == "crop":
            remove = data.draw(st.integers(0, length - 1))
            cache.crop(-remove)
            dynamic.crop(-remove)
            length -= remove
        assert cache.get_seq_length() == dynamic.get_seq_length() == length
        assert type(cache.get_seq_length()) is int
        assert cache.get_query_offset() == length
        assert cache.batch_size == rows
        for index, layer in enumerate(dynamic.layers):
            n_kept = layer.keys.shape[2]
            assert torch.equal(cache.layers[index].keys[:, :, length - n_kept :], layer.keys)
            assert torch.equal(cache.layers[index].values[:, :, length - n_kept :], layer.values)


# ------------------------------------------------------------------------------------------------------------- the memory


def test_one_arena_of_the_exact_size_is_taken_at_the_first_token():
    for name, rows in (("llama", 1), ("llama", 3), ("gemma3", 2), ("deepseek-v3", 2)):
        cache = ArenaCache(families.config(name), rows, 16)
        forward(name, cache)
        (arena,) = cache.arenas
        assert arena is cache.arena
        assert arena.capacity - arena.stats.top < 256
        assert cache.layers[0].keys.data_ptr() == arena.address
        assert cache.stats.reserved_nbytes + cache.stats.scratch_nbytes == arena.stats.used


def test_memory_is_given_back_when_the_cache_is_dropped():
    gc.collect()
    gc.disable()  # it would find a cycle sooner or later
    try:
        for config in (families.config("gemma3"), None):
            cache = ArenaCache(config, 6, N_TOKENS)
            outputs = generate(families.model("gemma3"), MODES["beam"].arguments("gemma3"), cache)
            logits, arena = outputs.logits, weakref.ref(cache.arena)
            del cache, outputs  # which hold the cache as well
            assert arena() is None
            assert logits
    finally:
        gc.enable()


def test_a_layer_without_its_cache_says_so():
    layer = ArenaCache(families.config("llama"), 1, 8).layers[0]
    with pytest.raises(ArgumentError, match="the ArenaCache of this layer is gone"):
        layer.update(states(1), states(1))


def allocated_nbytes_inside(methods, function):
    """Bytes allocated on the CPU while one of `methods` (class, name) runs, in `function`; freed or not."""
    with pytest.MonkeyPatch.context() as patch:
        for cls, name in methods:
            original = getattr(cls, name)

            @functools.wraps(original)
            def watched(self, *args, _original=original, **kwargs):
                is_prefill = _original.__name__ == "update" and args[0].shape[2] > 1
                with torch.profiler.record_function("elsewhere" if is_prefill else "watched"):
                    return _original(self, *args, **kwargs)

            patch.setattr(cls, name, watched)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            function()
    events = profiler.profiler.kineto_results.events()
    spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == "watched"]
    taken = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]" and e.nbytes() > 0]
    return len(spans), sum(
        nbytes for time, nbytes in taken if any(start <= time <= stop for start, stop in spans)
    )


@pytest.mark.parametrize("mode", ["greedy", "beam"])
def test_a_decode_step_allocates_nothing_in_the_cache(mode):
    model = families.model("gemma3")
    arguments = MODES[mode].arguments("gemma3")
    cache = ArenaCache(model.config, MODES[mode].rows, N_TOKENS)
    methods = [(ArenaCache, "update"), (ArenaCache, "reorder_cache")]
    n_calls, nbytes = allocated_nbytes_inside(methods, lambda: generate(model, arguments, cache))
    n_steps = families.N_NEW - 1
    assert n_calls >= n_steps * 3 + (n_steps if mode == "beam" else 0)
    assert nbytes == 0
    methods = [(DynamicCache, "update"), (DynamicCache, "reorder_cache")]
    _, nbytes = allocated_nbytes_inside(
        methods, lambda: generate(model, arguments, DynamicCache(config=model.config))
    )
    assert nbytes > 10_000  # the measure does see what there is


def test_an_arena_that_is_given_holds_the_cache():
    nbytes = llama_spec().arena_nbytes(2, 24)
    for config in (families.config("llama"), None):
        arena = Arena(nbytes, backend="torch")
        cache = ArenaCache(config, 2, 24, arena=arena)
        assert cache.arena is arena
        assert_same(
            generate(families.model("llama"), families.prompt(), cache), families.reference("llama", "greedy")
        )
        assert cache.arenas == [arena]
        assert arena.stats.used == nbytes


@pytest.mark.parametrize("n_given", [16_383, 100])
def test_an_arena_that_is_too_small_is_refused_before_anything_is_taken(n_given):
    """One that had no room for the first layer was once left aside, and another made in its place."""
    nbytes = llama_spec().arena_nbytes(1, 32)
    arena = Arena(n_given, backend="torch")
    cache = ArenaCache(families.config("llama"), 1, 32, arena=arena)
    with pytest.raises(
        OutOfMemoryError, match=r"needs 16384 bytes \(layers: 2, rows: 1, tokens: 32\)"
    ) as caught:
        forward("llama", cache)
    assert (caught.value.requested, caught.value.capacity) == (nbytes, arena.capacity)
    assert caught.value.missing == nbytes - arena.capacity
    assert (arena.stats.used, cache.arenas, cache.get_seq_length()) == (0, [arena], 0)


def test_what_an_arena_aligns_is_counted_before_anything_is_taken():
    """Its alignment, and a bump pointer that stands askew, were once left out of the account."""
    nbytes = llama_spec().arena_nbytes(1, 32)
    arena = Arena(nbytes + 200, backend="torch")
    arena.alloc(100, "uint8")
    with pytest.raises(OutOfMemoryError):
        forward("llama", ArenaCache(families.config("llama"), 1, 32, arena=arena))
    assert arena.stats.used == 100
    arena = Arena(nbytes + 256, backend="torch")
    arena.alloc(100, "uint8")
    forward("llama", ArenaCache(families.config("llama"), 1, 32, arena=arena))
    arena = Arena(2 * 8192, backend="torch", alignment=16384)  # 8192 bytes a region, on every second place
    with pytest.raises(OutOfMemoryError, match="needs 24576 bytes"):
        forward("llama", ArenaCache(families.config("llama"), 1, 32, arena=arena))
    assert arena.stats.used == 0


def test_an_arena_that_cannot_be_the_right_one():
    with pytest.raises(ArgumentTypeError, match="must be a torch arena, not one of backend 'host'"):
        ArenaCache(families.config("llama"), 1, 8, arena=Arena("1MiB"))
    arena = Arena("1MiB", backend="torch")
    arena.device = "cuda:0"  # as if there were one
    with pytest.raises(DeviceMismatchError, match="the model is on cpu, the arena given on cuda:0"):
        forward("llama", ArenaCache(families.config("llama"), 1, 8, arena=arena))
    assert arena.stats.used == 0


def test_an_arena_rolled_back_under_the_cache_is_noticed():
    arena = Arena("1MiB", backend="torch")
    start = arena.checkpoint()
    cache = ArenaCache(families.config("llama"), 1, 8, arena=arena)
    forward("llama", cache, 3)
    arena.rollback(start)
    with pytest.raises(StaleRegionError):
        forward("llama", cache, 1)
    with pytest.raises(StaleRegionError):
        cache.layers[0].keys


def test_layers_larger_than_the_first_go_to_a_second_arena_with_one_warning():
    cache = ArenaCache(families.config("gemma4"), 6, N_TOKENS)
    with pytest.warns(UserWarning, match="a second one holds the rest") as caught:
        outputs = generate(families.model("gemma4"), MODES["beam"].arguments("gemma4"), cache)
    assert len([warning for warning in caught if "second" in str(warning.message)]) == 1
    assert_same(outputs, families.reference("gemma4", "beam"))
    assert len(cache.arenas) == 2
    cache.reset()
    assert_same(
        generate(families.model("gemma4"), MODES["beam"].arguments("gemma4"), cache),
        families.reference("gemma4", "beam"),
    )
    assert len(cache.arenas) == 2


def test_layers_larger_than_an_arena_that_is_given_warn_as_well():
    arena = Arena(
        llama_spec().arena_nbytes(1, 16) // 2, backend="torch"
    )  # one layer; no config tells of more
    cache = ArenaCache(None, 1, 16, arena=arena)
    with pytest.warns(UserWarning, match="layer 1 needs 256 bytes a token"):
        found = forward("llama", cache)
    assert torch.equal(found, forward("llama", DynamicCache()))
    assert len(cache.arenas) == 2


# ------------------------------------------------------------------------------------------------- measured on the model


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma4", "gemma4-shared", "deepseek-v3", "gpt2", "lfm2"])
def test_for_model_takes_one_arena_of_the_exact_size(name, rows):
    """The scratch once grew with the layers, and the last of them went to a second arena."""
    model = families.model(name)
    cache = ArenaCache.for_model(model, 32, max_batch_size=rows)
    (arena,) = cache.arenas
    assert arena.stats.used == cache.stats.scratch_nbytes
    assert (cache.max_batch_size, cache.max_context_length) == (rows, 32)
    with torch.no_grad():
        found = model(input_ids=torch.arange(3, 9).repeat(rows, 1), **{CACHE: cache}).logits
        expected = model(input_ids=torch.arange(3, 9).repeat(rows, 1)).logits
    torch.testing.assert_close(found, expected, atol=families.TOLERANCE, rtol=0)
    assert cache.arenas == [arena]
    assert 0 <= arena.capacity - arena.stats.top < 256


def test_for_model_leaves_the_model_as_it_was():
    """A part of it that was in evaluation mode was once put in training mode with the whole."""
    model = copy.deepcopy(families.model("llama")).train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    ArenaCache.for_model(model, 8)
    assert [module.training for module in model.modules()] == before
    assert len(set(before)) == 2


def test_for_model_auto_is_the_maximum_of_the_model_or_what_fits(monkeypatch):
    model = families.model("llama")
    assert ArenaCache.for_model(model).max_context_length == 256
    assert ArenaCache.for_model(model, "auto").max_context_length == 256
    for free, fraction, rows in ((100_000, 0.9, 1), (100_000, 0.5, 1), (40_000, 1.0, 2)):
        monkeypatch.setattr(cache_module, "free_nbytes", lambda device, free=free: free)
        cache = ArenaCache.for_model(model, "auto", fraction, max_batch_size=rows, measure_prefill=False)
        spec = llama_spec()
        assert cache.arena.capacity <= free * fraction < spec.arena_nbytes(rows, cache.max_context_length + 1)
        forward("llama", cache, rows=rows)
        assert len(cache.arenas) == 1
    monkeypatch.setattr(cache_module, "free_nbytes", lambda device: 100)
    with pytest.raises(ArgumentError, match="no memory free for even one token"):
        ArenaCache.for_model(model)
    with pytest.raises(ArgumentError, match='a number of tokens or "auto"'):
        ArenaCache.for_model(model, "all")
    for fraction in (0, 1.1, -0.5):
        with pytest.raises(ArgumentError, match="memory_fraction must be above 0"):
            ArenaCache.for_model(model, memory_fraction=fraction)


def test_what_the_memory_of_a_device_is():
    assert free_nbytes(torch.device("cpu")) > 2**20
    with pytest.raises(ArgumentError, match="free memory on meta is unknown; give max_context_length"):
        free_nbytes(torch.device("meta"))


def test_for_model_on_a_model_that_caches_no_keys():
    config = transformers.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=1, state_size=4)
    cache = ArenaCache.for_model(transformers.MambaForCausalLM(config), 8)
    assert cache.arena.capacity >= 4 * 64 * (4 + 4) == cache.sizing.layout.state_nbytes


# ------------------------------------------------------------------------------------------------------- encoder-decoders


def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=128,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=None,
    )
    return T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_what_is_said_of_encoder_decoders_is_what_works(num_beams):
    model = t5()
    for make in (lambda: ArenaCache(model.config, 2, 16), lambda: ArenaCache.for_model(model, 16)):
        with pytest.raises(ArgumentError, match="T5Config is an encoder-decoder") as caught:
            make()
    (remedy,) = re.findall(r"EncoderDecoderCache\(.*\)", str(caught.value))
    names = {"max_batch_size": 2 * num_beams, "max_context_length": 16}
    names |= {cls.__name__: cls for cls in (EncoderDecoderCache, ArenaCache, DynamicCache)}
    cache = eval(remedy, names)
    arguments = families.prompt() | {"num_beams": num_beams}
    outputs = generate(model, arguments, cache)
    assert_same(outputs, generate(model, arguments))
    own = cache.self_attention_cache
    assert own.get_seq_length() == families.N_NEW
    own.reset()
    assert_same(generate(model, arguments, EncoderDecoderCache(own, DynamicCache())), outputs)


# ---------------------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("name", ["llama", "gemma4", "gemma4-shared", "lfm2", "bamba"])
def test_a_deep_copy_goes_on_by_itself(name):
    """Layers that differ in size once cost a copy a warning and a second arena; recurrent ones had none at all."""
    model = families.model(name)
    ids = families.prompt()["input_ids"]
    cache = ArenaCache.for_model(model, 32, max_batch_size=2)
    # One by one behind the first five, since recurrent layers start anew with several tokens.
    pieces = [ids[:, :5], *ids[:, 5:].split(1, dim=1)]
    with torch.no_grad():
        dynamic = DynamicCache(config=model.config)
        expected = [model(input_ids=piece, **{CACHE: dynamic}).logits for piece in pieces]
        found = [model(input_ids=piece, **{CACHE: cache}).logits for piece in pieces[:2]]
        other = copy.deepcopy(cache)
        model(input_ids=ids[:, :1], **{CACHE: cache})  # of which the copy knows nothing
        found += [model(input_ids=piece, **{CACHE: other}).logits for piece in pieces[2:]]
    for logits, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(logits, wanted, atol=families.TOLERANCE, rtol=0)
    assert len(other.arenas) == 1
    assert other.arena is not cache.arena
    assert (other.max_batch_size, other.max_context_length) == (2, 32)


def test_a_deep_copy_of_an_empty_cache_is_empty():
    cache = ArenaCache(families.config("llama"), 2, 8)
    assert copy.deepcopy(cache).batch_size == -1
    fill(cache, 3, rows=1)
    cache.reset()
    other = copy.deepcopy(cache)
    assert (other.batch_size, other.get_seq_length(), other.is_initialized) == (-1, 0, False)
    fill(other, 8, rows=2)


def test_pickling_is_refused():
    cache = ArenaCache(families.config("llama"), 1, 8)
    fill(cache, 1)
    for make in (pickle.dumps, copy.copy):
        with pytest.raises(NotCopyableError, match="ArenaCache cannot be pickled or copied"):
            make(cache)


# ---------------------------------------------------------------------------------- layers that lie outside of the arena


def test_states_outside_of_the_arena_make_no_checkpoints_and_a_copy_is_the_remedy():
    model = families.model("deepseek-v4")
    cache = ArenaCache(model.config, 1, 32)
    forward("deepseek-v4", cache)
    for call in (cache.checkpoint, cache.scope):
        with pytest.raises(
            CheckpointError, match=r"layer \d is a Deepseek\w+Cache, whose state.*copy\.deepcopy"
        ):
            call()
    cache.reset()
    assert torch.equal(
        forward("deepseek-v4", cache), forward("deepseek-v4", DynamicCache(config=model.config))
    )


def test_a_cache_whose_shared_layers_hold_nothing_makes_checkpoints():
    cache = ArenaCache(families.config("gemma4-shared"), 1, 32)
    before = forward("gemma4-shared", cache)
    cache.truncate(5)
    with cache.scope():
        forward("gemma4-shared", cache)
    cache.reset()
    assert torch.equal(forward("gemma4-shared", cache), before)


def test_an_order_of_rows_that_is_refused_leaves_states_as_they_are():
    """They were once put in the new order before it was looked at."""
    cache = ArenaCache(families.config("lfm2"), 2, 32)
    model = families.model("lfm2")
    with torch.no_grad():
        model(input_ids=families.prompt()["input_ids"], **{CACHE: cache})
    (layer,) = [layer for layer in cache.layers if not isinstance(layer, ArenaLayer)]
    before = layer.conv_states[0].clone()
    with pytest.raises(ShapeError):
        cache.reorder_cache(torch.tensor([1, 0, 1]))
    assert torch.equal(layer.conv_states[0], before)


def test_the_package_names_what_it_exports():
    assert set(gpuarena_transformers.__all__) >= {
        "ArenaCache",
        "ArenaLayer",
        "StaticLinearKVCache",
        "cache_argument",
    }
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    assert ("cache" if version >= (5, 24) else "past_key_values") == CACHE
