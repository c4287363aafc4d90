"""Models that look at pictures, and others that ask a cache more than a decoder does, by logits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, MODES, N_TOKENS, VISION, assert_same, generate  # noqa: E402
from family_configs import IMAGE_TOKEN  # noqa: E402
from gpuarena_transformers import ArenaCache, ArenaEncoderDecoderCache  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from gpuarena import CheckpointError  # noqa: E402
from gpuarena.errors import ArgumentError  # noqa: E402

#: Those that are shown pictures here; the others read text alone.
LOOKING = ["llava", "gemma3-vl", "paligemma"]
WAYS = ["greedy", "sample, two sequences each", "beam", "draft model", "prompt lookup", "left padding, beam"]


def pictures(name, kind="two"):
    """Return a prompt with a picture of 4 patches in each row, behind padding if there is any."""
    found = families.prompt(kind)
    ids = found["input_ids"]
    ids[(ids > 0) & (ids < 10)] += 10  # no other special tokens
    if name in LOOKING:
        ids[:, 4:8] = IMAGE_TOKEN
        found["pixel_values"] = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))[
            : len(ids)
        ]
    if name == "gemma3-vl":
        found["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    if name == "paligemma":
        found["token_type_ids"] = torch.zeros_like(ids)
    return found


def arguments(name, mode):
    way = MODES[mode]
    found = pictures(name, way.prompt) | way.options
    if found.get("assistant_model"):
        found["assistant_model"] = families.draft(name)
    return found


@pytest.mark.parametrize(
    ("name", "mode"),
    # Prompt lookup would propose the tokens of a picture, of which there is none.
    [(name, way) for name in VISION for way in WAYS if name not in LOOKING or way != "prompt lookup"],
)
def test_logits_are_those_of_a_dynamic_cache(name, mode):
    model = families.model(name)
    given = arguments(name, mode)
    expected = generate(model, given)
    for cache in (
        ArenaCache(model.config, MODES[mode].rows, N_TOKENS),
        ArenaCache.for_model(model, N_TOKENS, max_batch_size=MODES[mode].rows),
    ):
        assert_same(generate(model, given, cache), expected)
        assert len(cache.arenas) == 1


@pytest.mark.parametrize("name", LOOKING)
def test_pictures_do_matter(name):
    """Otherwise the comparison above would be one of text."""
    model, given = families.model(name), pictures(name)
    logits = generate(model, given, n_new=1).logits[0]
    other = generate(model, given | {"pixel_values": -given["pixel_values"]}, n_new=1).logits[0]
    assert (logits - other).abs().max() > families.TOLERANCE


@pytest.mark.parametrize("name", LOOKING)
def test_a_cache_that_was_reset_is_new_to_the_model(name):
    """PaliGemma sees a whole prompt from both sides in the first step, which it tells by ``is_initialized``."""
    model, given = families.model(name), pictures(name)
    expected = generate(model, given)
    cache = ArenaCache.for_model(model, N_TOKENS, max_batch_size=2)
    start = cache.checkpoint()
    for clear in (lambda: None, lambda: cache.rollback(start), lambda: cache.truncate(0), cache.reset):
        clear()
        assert not cache.is_initialized
        assert_same(generate(model, given, cache), expected)
        assert cache.is_initialized


@pytest.mark.parametrize("name", ["llava", "gemma3-vl"])
def test_a_picture_is_seen_once_and_asked_about_again(name):
    model, given = families.model(name), pictures(name, "one")
    questions = [families.prompt()["input_ids"][:1, start : start + 3] for start in (0, 4)]
    cache = ArenaCache(model.config, 1, 32)
    with torch.no_grad():
        model(**given, **{CACHE: cache})
    n_seen = cache.get_seq_length()
    for question in questions * 2:
        ids = torch.cat([given["input_ids"], question], dim=1)
        whole = given | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "token_type_ids" in given:
            whole["token_type_ids"] = (ids == IMAGE_TOKEN).long()
        with torch.no_grad():
            expected = model(**whole, use_cache=False).logits[:, n_seen:]
            with cache.scope():
                mask = torch.ones(1, n_seen + 3, dtype=torch.long)
                found = model(input_ids=question, attention_mask=mask, **{CACHE: cache}).logits
        torch.testing.assert_close(found, expected, atol=families.TOLERANCE, rtol=0)
        assert cache.get_seq_length() == n_seen


def test_pictures_in_layers_of_their_own():
    """Mllama keeps a picture in the layers that look at it, and so another length than in those of the text."""
    model, given = families.model("mllama"), pictures("mllama", "one")
    given["input_ids"][:, 0] = IMAGE_TOKEN
    given |= {
        "pixel_values": torch.randn(1, 1, 1, 3, 16, 16, generator=torch.Generator().manual_seed(1)),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 9, 1, 1, dtype=torch.long),
    }
    for num_beams in (1, 3):
        cache = ArenaCache(model.config, num_beams, N_TOKENS)
        options = given | {"num_beams": num_beams}
        expected = generate(model, options)
        for _ in range(2):
            assert_same(generate(model, options, cache), expected)
            lengths = [layer.get_seq_length() for layer in cache.layers]
            assert lengths == [18, 5, 18]  # 4 patches and one for all of them
            # By one number of tokens nothing can be said of both.
            for method, n_tokens in (("crop", -2), ("crop", 0), ("truncate", 4)):
                with pytest.raises(ArgumentError, match="layer 2 holds 18 tokens and layer 1 5"):
                    getattr(cache, method)(n_tokens)
            with pytest.raises(CheckpointError):
                cache.checkpoint()
            assert [layer.get_seq_length() for layer in cache.layers] == lengths
            cache.reset()
        assert len(cache.arenas) == 1


# ------------------------------------------------------------------------------- text that looks at an encoder by itself


@pytest.fixture(scope="module")
def blip():
    torch.manual_seed(0)
    config = transformers.BlipTextConfig(
        vocab_size=128,
        hidden_size=64,
        encoder_hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        is_decoder=True,
        hidden_dropout=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
        bos_token_id=1,
        sep_token_id=2,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.models.blip.modeling_blip_text.BlipTextLMHeadModel(config).eval()


@pytest.mark.parametrize("kind", ["wrapped by the model", "both caches"])
def test_a_decoder_that_wraps_what_it_is_given(blip, kind):
    """BLIP wraps an instance of `DynamicCache` in an `EncoderDecoderCache`, and takes anything else for the whole."""
    ids = families.prompt()["input_ids"]
    patches = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))

    def answers(cache):
        found = []
        with torch.no_grad():
            for step in range(0, 9, 3):
                outputs = blip(
                    input_ids=ids[:, step : step + 3],
                    attention_mask=torch.ones(2, step + 3, dtype=torch.long),
                    encoder_hidden_states=patches,
                    is_decoder=True,
                    use_cache=True,
                    **{CACHE: cache},
                )
                found.append(outputs.logits)
                cache = getattr(outputs, CACHE)
        return torch.cat(found, dim=1)

    if kind == "both caches":
        cache = ArenaEncoderDecoderCache(blip.config, 2, 16, 8)
    else:
        cache = ArenaCache(None, 2, 16)
    expected = answers(DynamicCache())
    torch.testing.assert_close(answers(cache), expected, atol=families.TOLERANCE, rtol=0)
    assert cache.get_seq_length() == 9
    assert len(cache.arenas) == 1
