"""`generate` of encoder-decoders with an `ArenaEncoderDecoderCache`, by logits, and what the cache does by itself."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, ENCODER_DECODER, MODES, N_NEW, N_TOKENS, assert_same, generate  # noqa: E402
from gpuarena_transformers import ArenaCache, ArenaEncoderDecoderCache, encoder_decoder  # noqa: E402
from transformers import DynamicCache, EncoderDecoderCache  # noqa: E402

from gpuarena import (  # noqa: E402
    Arena,
    CapacityError,
    CheckpointError,
    OutOfMemoryError,
    ShapeError,
)
from gpuarena.errors import ArgumentError, ArgumentTypeError, NotCopyableError  # noqa: E402

#: The encoder of whisper has a fixed length, and its generate none of the other forms of input.
WAYS = [
    "greedy",
    "sample",
    "sample, two sequences each",
    "beam",
    "beam, two sequences each",
    "beam-sample",
    "draft model",
    "draft model, sample",
    "prompt lookup",
    "left padding",
    "left padding, beam",
    "embeddings",
]
OF_WHISPER = [
    way for way in WAYS if "padding" not in way and way not in ("embeddings", "beam, two sequences each")
]
N_SOURCE = 32


def make(name, rows=1, n_tokens=N_TOKENS, n_source=N_SOURCE, **options):
    return ArenaEncoderDecoderCache(families.model(name).config, rows, n_tokens, n_source, **options)


def both(cache):
    return cache.self_attention_cache, cache.cross_attention_cache


def assert_in_one_arena(cache):
    (arena,) = cache.arenas
    assert cache.arena is arena
    for half in both(cache):
        assert half.group.layers
        assert {id(layer.arena) for layer in half.group.layers} == {id(arena)}
        for layer in half.layers:
            start = layer.keys.data_ptr() - arena.address
            assert 0 <= start < arena.capacity


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, way) for name in ENCODER_DECODER for way in (OF_WHISPER if name == "whisper" else WAYS)],
)
def test_logits_are_those_of_dynamic_caches(name, mode):
    cache = make(name, MODES[mode].rows)
    outputs = generate(families.model(name), MODES[mode].arguments(name), cache)
    assert_same(outputs, families.reference(name, mode))
    assert_in_one_arena(cache)
    if name != "whisper":  # whose generate returns a copy
        assert getattr(outputs, CACHE) is cache


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_a_cache_that_was_measured(name):
    model = families.model(name)
    model.model.train() if hasattr(model, "model") else model.encoder.train()
    in_training = [module.training for module in model.modules()]
    cache = ArenaEncoderDecoderCache.for_model(model, N_TOKENS, max_source_length=N_SOURCE, max_batch_size=6)
    assert [module.training for module in model.modules()] == in_training
    model.eval()
    (arena,) = cache.arenas
    assert_same(generate(model, MODES["beam"].arguments(name), cache), families.reference(name, "beam"))
    assert_in_one_arena(cache)
    assert arena.stats.available < arena.capacity // 16  # only what alignment may take


@pytest.mark.parametrize("attention", ["eager", "sdpa", "gpuarena"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_attention_implementations(name, attention):
    model = families.model(name, attention)
    outputs = generate(model, MODES["beam"].arguments(name), make(name, 6))
    assert_same(outputs, families.reference(name, "beam"))


def test_a_prompt_of_the_decoder_is_read_in_chunks():
    model = families.model("t5gemma")
    start = torch.cat([torch.full((2, 1), 2), families.prompt()["input_ids"]], dim=1)
    arguments = families.prompt() | {"decoder_input_ids": start, "prefill_chunk_size": 4}
    assert_same(generate(model, arguments, make("t5gemma", 2)), generate(model, arguments))


def test_a_decoder_of_more_layers_than_its_encoder():
    """By `num_hidden_layers` T5 tells those of the encoder."""
    torch.manual_seed(0)
    config = families.config("t5", num_layers=1, num_decoder_layers=3)
    model = transformers.T5ForConditionalGeneration(config).eval()
    expected = generate(model, families.prompt() | {"use_cache": False})
    for cache in (
        ArenaEncoderDecoderCache(config, 2, N_TOKENS, N_SOURCE),
        ArenaEncoderDecoderCache.for_model(model, N_TOKENS, max_source_length=N_SOURCE, max_batch_size=2),
    ):
        assert_same(generate(model, families.prompt(), cache), expected)
        assert len(cache) == 3
        assert_in_one_arena(cache)


# --------------------------------------------------------------------------------------------------------------- sources


def other_source(name):
    if name == "whisper":
        return {"input_features": families.source()["input_features"].flip(0, 2)}
    return {key: tensor.flip(1)[:, :7] for key, tensor in families.prompt().items()}


@pytest.mark.parametrize("name", ["t5", "bart", "whisper", "t5gemma"])
def test_another_source_after_a_reset(name):
    model = families.model(name)
    expected = generate(model, other_source(name))
    cache = make(name, 6)
    generate(model, MODES["beam"].arguments(name), cache)
    (arena,) = cache.arenas
    cache.reset()
    assert not any(cache.is_updated.values())
    assert [half.get_seq_length() for half in both(cache)] == [0, 0]
    assert_same(generate(model, other_source(name), cache), expected)
    assert cache.arenas == [arena]
    # That the answer depends on the source at all, and that nobody else clears it.
    stale = make(name, 6)
    generate(model, MODES["greedy"].arguments(name), stale)
    stale.truncate(0)
    wrong = generate(model, other_source(name) | {"attention_mask": None}, stale)
    assert (wrong.logits[0] - expected.logits[0]).abs().max() > families.TOLERANCE


def steps(model, source, n_steps, cache):
    """Return the logits of decoder steps with a cache, each a token."""
    ids = families.prompt("two")["input_ids"][:1]
    with torch.no_grad():
        return [
            model(**source, decoder_input_ids=ids[:, step : step + 1], **{CACHE: cache}).logits
            for step in n_steps
        ]


def whole(model, source, n_tokens):
    """Return the logits of the last token of a decoder that reads all at once, without a cache."""
    ids = families.prompt("two")["input_ids"][:1, :n_tokens]
    with torch.no_grad():
        return model(**source, decoder_input_ids=ids, use_cache=False).logits[:, -1:]


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=families.TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_one_source_is_read_once_and_answered_again(name):
    model, source = families.model(name), families.prompt("one")
    cache = make(name)
    steps(model, source, range(2), cache)
    start = cache.checkpoint()
    assert start.n_tokens == 2
    for _ in range(2):
        with cache.scope() as inside:
            assert inside.n_tokens == 2
            assert_close(steps(model, source, range(2, 5), cache)[-1], whole(model, source, 5))
        assert [half.get_seq_length() for half in both(cache)] == [2, 9]
    assert all(cache.is_updated.values())
    assert_close(steps(model, source, range(2, 3), cache)[-1], whole(model, source, 3))
    cache.rollback(start)
    with pytest.raises(KeyError), cache.scope():  # noqa: PT012
        steps(model, source, range(2, 4), cache)
        raise KeyError
    assert cache.get_seq_length() == 2


def test_a_checkpoint_of_before_the_source_forgets_it():
    model = families.model("t5")
    sources = [families.prompt("one"), families.prompt("repeating")]
    cache = make("t5")
    empty = cache.checkpoint()
    for source in sources * 2:
        assert_close(steps(model, source, range(3), cache)[-1], whole(model, source, 3))
        assert cache.cross_attention_cache.get_seq_length() == source["input_ids"].shape[1]
        cache.rollback(empty)
        assert not any(cache.is_updated.values())
        assert cache.stats.used_nbytes == 0


def test_a_checkpoint_whose_source_is_gone_leaves_everything():
    model, source = families.model("t5"), families.prompt("one")
    cache = make("t5", 2)
    steps(model, source, range(2), cache)
    start = cache.checkpoint()
    cache.cross_attention_cache.reset()
    for layer in range(2):
        cache.is_updated[layer] = False
    steps(model, families.prompt("repeating"), range(2, 3), cache)
    with pytest.raises(CheckpointError, match="source of 9 positions that the cache then held is gone"):
        cache.rollback(start)
    assert [half.get_seq_length() for half in both(cache)] == [3, 12]
    cache.reset()
    with pytest.raises(CheckpointError):
        cache.rollback(start)
    with pytest.raises(CheckpointError, match="another cache"):
        cache.rollback(make("t5").checkpoint())
    with pytest.raises(ArgumentTypeError, match=r"EncoderDecoderCheckpoint, not \w+Checkpoint"):
        cache.rollback(start.self_attention)
    for refused in (start, cache):
        with pytest.raises(NotCopyableError):
            pickle.dumps(refused)


@pytest.mark.parametrize("method", ["crop", "truncate"])
def test_tokens_are_dropped_and_the_source_stays(method):
    model, source = families.model("bart"), families.prompt("one")
    cache = make("bart")
    steps(model, source, range(5), cache)
    with pytest.raises(ArgumentError, match="holds only 5 tokens"):
        cache.crop(-6) if method == "crop" else cache.truncate(6)
    cache.crop(-3) if method == "crop" else cache.truncate(2)
    assert [half.get_seq_length() for half in both(cache)] == [2, 9]
    assert_close(steps(model, source, range(2, 4), cache)[-1], whole(model, source, 4))


# ------------------------------------------------------------------------------------------------------------------ rows


def test_beams_move_in_place_in_both_caches():
    orders = []

    class Watched(ArenaEncoderDecoderCache):
        def reorder_cache(self, beam_idx):
            super().reorder_cache(beam_idx)
            orders.append(beam_idx.tolist())
            addresses.append(
                [
                    tensor.data_ptr()
                    for half in both(self)
                    for layer in half.layers
                    for tensor in (layer.keys, layer.values)
                ]
            )

    addresses = []
    model = families.model("bart")
    cache = Watched(model.config, 6, N_TOKENS, N_SOURCE)
    generate(model, MODES["beam"].arguments("bart"), cache)
    assert any(order != sorted(order) for order in orders)
    assert all(found == addresses[0] for found in addresses)


def test_rows_of_both_caches_are_repeated_and_selected():
    model, source = families.model("t5"), families.prompt("one")
    cache = make("t5", 3)
    expected = steps(model, source, range(3), cache)[-1]
    cache.truncate(2)
    cache.batch_repeat_interleave(3)
    assert [half.batch_size for half in both(cache)] == [3, 3]
    with torch.no_grad():
        three = {key: tensor.repeat(3, 1) for key, tensor in source.items()}
        token = families.prompt()["input_ids"][:1, 2:3].repeat(3, 1)
        logits = model(**three, decoder_input_ids=token, **{CACHE: cache}).logits
    assert_close(logits, expected.repeat(3, 1, 1))
    cache.batch_select_indices(torch.tensor([2]))
    assert [half.batch_size for half in both(cache)] == [1, 1]
    assert_close(steps(model, source, range(3, 4), cache)[-1], whole(model, source, 4))
    with pytest.raises(ShapeError, match="4 rows asked, the cache was made for 1 to 3"):
        cache.batch_repeat_interleave(4)


@pytest.mark.parametrize("name", ["t5", "t5gemma"])
def test_a_deep_copy_goes_on_by_itself(name):
    model, source = families.model(name), families.prompt("one")
    for cache in (
        make(name),
        ArenaEncoderDecoderCache.for_model(model, N_TOKENS, max_source_length=N_SOURCE),
    ):
        steps(model, source, range(2), cache)
        other = copy.deepcopy(cache)
        steps(model, source, range(3, 5), cache)  # of which the copy knows nothing
        assert_close(steps(model, source, range(2, 4), other)[-1], whole(model, source, 4))
        assert_in_one_arena(other)
        assert other.arena is not cache.arena
        assert (other.max_batch_size, other.max_context_length, other.max_source_length) == (
            1,
            N_TOKENS,
            N_SOURCE,
        )
    empty = copy.deepcopy(make(name))
    assert empty.arenas == []
    assert_close(steps(model, source, range(1), empty)[-1], whole(model, source, 1))


# -------------------------------------------------------------------------------------------------------------- capacity


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_a_source_that_is_too_long_is_refused_and_shorter_ones_are_taken(name):
    model = families.model(name)
    arguments = MODES["greedy"].arguments(name)
    n_source = 30 if name == "whisper" else 9
    cache = make(name, 2, n_source=n_source - 1)
    start = cache.checkpoint()
    with pytest.raises(CapacityError, match=rf"at least {n_source} tokens \(max_source_length\)") as caught:
        generate(model, arguments, cache)
    assert caught.value.missing == 1
    cache.rollback(start)
    assert not any(cache.is_updated.values())
    if name == "t5":
        shorter = {key: tensor[:, :8] for key, tensor in arguments.items()}
        assert_same(generate(model, shorter, cache), generate(model, shorter))


def test_a_target_that_is_too_long_stops_before_it_writes():
    model = families.model("bart")
    cache = make("bart", 2, n_tokens=4)
    with pytest.raises(CapacityError, match=r"4 of 4 tokens used.*\(max_context_length\)"):
        generate(model, families.prompt(), cache)
    assert [half.get_seq_length() for half in both(cache)] == [4, 9]
    cache.reset()
    assert_same(
        generate(model, families.prompt(), cache, n_new=4), generate(model, families.prompt(), n_new=4)
    )
    cache.reset()
    with pytest.raises(ShapeError, match="6 rows given, the cache was made for at most 2"):
        generate(model, MODES["beam"].arguments("bart"), cache)


def test_both_caches_take_a_given_arena():
    model = families.model("t5")
    arena = Arena("1MiB", backend="torch")
    cache = make("t5", 2, arena=arena)
    assert_same(generate(model, families.prompt(), cache), families.reference("t5", "greedy"))
    assert cache.arenas == [arena]
    assert_in_one_arena(cache)
    used = arena.stats.used
    # Enough for either, not for both: known at the first layer.
    small = Arena(used * 3 // 4, backend="torch")
    cache = make("t5", 2, arena=small)
    with pytest.raises(OutOfMemoryError, match="give a larger arena or a smaller max_context_length"):
        generate(model, families.prompt(), cache)
    assert small.stats.used == 0
    exact = Arena(used + 4096, backend="torch")
    cache = make("t5", 2, arena=exact)
    assert_same(generate(model, families.prompt(), cache), families.reference("t5", "greedy"))


def test_stats_count_both_caches():
    model = families.model("t5")
    cache = make("t5", 2)
    assert cache.stats.reserved_nbytes == 0
    generate(model, families.prompt(), cache, n_new=4)
    # 2 layers, keys and values, 2 rows, 4 heads of 16, 4 bytes each
    assert cache.stats.used_nbytes == (4 + 9) * 2 * 2 * 2 * 4 * 16 * 4
    assert cache.stats.reserved_nbytes == (N_TOKENS + N_SOURCE) * 2 * 2 * 2 * 4 * 16 * 4
    assert (cache.stats.n_tokens, cache.stats.n_rows) == (4, 2)
    assert repr(cache) == (
        f"ArenaEncoderDecoderCache(4 of {N_TOKENS} tokens, a source of 9 of {N_SOURCE}, 2 of 2 rows, 2 layers)"
    )


# ------------------------------------------------------------------------------------------------------- the constructor


def test_lengths_are_by_default_what_the_config_declares():
    def lengths(name):
        cache = ArenaEncoderDecoderCache(families.config(name))
        return cache.max_batch_size, cache.max_context_length, cache.max_source_length

    assert lengths("whisper") == (1, 64, 30)
    assert lengths("bart") == (1, 128, 128)
    assert lengths("t5gemma") == (1, 256, 256)
    with pytest.raises(ArgumentError, match="max_context_length: the config declares no maximum"):
        ArenaEncoderDecoderCache(families.config("t5"), 1)
    with pytest.raises(ArgumentError, match="max_source_length: the config declares no maximum"):
        ArenaEncoderDecoderCache(families.config("t5"), 1, 16)
    assert ArenaEncoderDecoderCache(families.config("t5"), 1, 16, 8).get_max_length() == 16


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 8, 8), ArgumentError, "max_batch_size must be at least 1"),
        ((1, 0, 8), ArgumentError, "max_context_length must be at least 1"),
        ((1, 8, 0), ArgumentError, "max_source_length must be at least 1"),
        ((1, 8, 8.0), ArgumentTypeError, "max_source_length must be an integer"),
        ((1, 8, 8, "nowhere"), ArgumentError, "nowhere"),
    ],
)
def test_arguments_that_can_never_be_right(arguments, error, message):
    with pytest.raises(error, match=message):
        ArenaEncoderDecoderCache(families.config("t5"), *arguments)


def test_each_kind_of_model_is_told_of_its_class():
    with pytest.raises(ArgumentError, match="LlamaConfig is no config of an encoder-decoder; use ArenaCache"):
        ArenaEncoderDecoderCache(families.config("llama"), 1, 8, 8)
    with pytest.raises(ArgumentError, match="Use ArenaEncoderDecoderCache"):
        ArenaCache(families.config("t5"), 1, 8)


def test_it_is_what_transformers_asks_for():
    cache = make("t5")
    assert isinstance(cache, EncoderDecoderCache)
    for half in both(cache):
        assert isinstance(half, DynamicCache)
    assert not cache.is_compileable
    assert cache.is_croppable
    assert cache.arena is None
    with pytest.raises(ArgumentTypeError, match="cannot be replaced by a DynamicCache"):
        cache.cross_attention_cache = DynamicCache()


def test_measuring_chooses_a_length_that_fits_beside_the_source(monkeypatch):
    model = families.model("t5")
    per_token = 2 * 2 * 4 * 16 * 4
    free = per_token * (N_SOURCE + 100)
    monkeypatch.setattr(encoder_decoder, "free_nbytes", lambda device: free)
    cache = ArenaEncoderDecoderCache.for_model(model, "auto", 1.0, max_source_length=N_SOURCE)
    assert 80 <= cache.max_context_length <= 100
    assert cache.arena.capacity <= free
    half = ArenaEncoderDecoderCache.for_model(model, "auto", 0.75, max_source_length=N_SOURCE)
    assert half.max_context_length < 0.75 * cache.max_context_length
    monkeypatch.setattr(encoder_decoder, "free_nbytes", lambda device: 1 << 40)
    assert ArenaEncoderDecoderCache.for_model(families.model("bart")).max_context_length == 128
    monkeypatch.setattr(encoder_decoder, "free_nbytes", lambda device: per_token)
    with pytest.raises(ArgumentError, match="no memory free for even one token beside a source of 32"):
        ArenaEncoderDecoderCache.for_model(model, max_source_length=N_SOURCE)
    with pytest.raises(ArgumentError, match="number of tokens or"):
        ArenaEncoderDecoderCache.for_model(model, "all", max_source_length=8)
    with pytest.raises(ArgumentError, match="memory_fraction must be above 0"):
        ArenaEncoderDecoderCache.for_model(model, memory_fraction=0, max_source_length=8)


def test_one_object_serves_one_way_after_the_other():
    model = families.model("t5")
    cache = make("t5", 6)
    arenas = None
    for mode in ("greedy", "beam", "draft model", "left padding, beam", "sample", "prompt lookup"):
        assert_same(generate(model, MODES[mode].arguments("t5"), cache), families.reference("t5", mode))
        assert arenas in (None, cache.arenas)
        arenas = list(cache.arenas)
        cache.reset()
    assert cache.stats.high_water_tokens >= N_NEW
