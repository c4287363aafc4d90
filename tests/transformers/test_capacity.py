"""What `capacity_for` says is enough, and nothing less is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, MODES  # noqa: E402
from gpuarena_transformers import ArenaCache, Capacity, capacity_for, generate_from  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

from gpuarena.errors import ArgumentError, ArgumentTypeError, CapacityError, ShapeError  # noqa: E402

GENERATED = {"input_ids", "inputs_embeds", "attention_mask"}


def needed(mode, n_new):
    """Return the arguments of a way of generating, and what `capacity_for` says of it."""
    arguments = {"do_sample": False} | MODES[mode].arguments("llama") | {"max_new_tokens": n_new}
    inputs = arguments.get("input_ids", arguments.get("inputs_embeds"))
    options = {name: value for name, value in arguments.items() if name not in GENERATED}
    return arguments, capacity_for(
        families.model("llama"), inputs.shape[1], batch_size=inputs.shape[0], **options
    )


@pytest.mark.parametrize("n_new", [1, 2, 7])
@pytest.mark.parametrize("mode", MODES)
def test_every_way_of_generating_fits_exactly(mode, n_new):
    arguments, (n_tokens, n_rows) = needed(mode, n_new)
    model = families.model("llama")
    torch.manual_seed(0)
    wanted = model.generate(**arguments)
    torch.manual_seed(0)
    cache = ArenaCache(model.config, n_rows, n_tokens)
    assert torch.equal(model.generate(**arguments, **{CACHE: cache}), wanted)
    cache = ArenaCache(model.config, n_rows, n_tokens)
    assert generate_from(model, cache, **arguments).shape == wanted.shape

    # Prompt lookup draws less than the most at times, but not before its last two tokens.
    if mode != "prompt lookup" or n_new <= 2:
        assert cache.stats.high_water_tokens == n_tokens
        with pytest.raises(CapacityError):
            model.generate(**arguments, **{CACHE: ArenaCache(model.config, n_rows, n_tokens - 1)})
    with pytest.raises(CapacityError, match=f"may need {n_tokens} tokens"):
        generate_from(model, ArenaCache(model.config, n_rows, n_tokens - 1), **arguments)
    if n_rows > 1:
        with pytest.raises(ShapeError):
            model.generate(**arguments, **{CACHE: ArenaCache(model.config, n_rows - 1, n_tokens)})
        with pytest.raises(ShapeError, match=f"{n_rows} rows"):
            generate_from(model, ArenaCache(model.config, n_rows - 1, n_tokens), **arguments)


@pytest.mark.parametrize(
    ("options", "capacity"),
    [
        ({}, (29, 1)),  # twenty tokens are the default
        ({"max_new_tokens": 1}, (10, 1)),
        ({"max_length": 50}, (49, 1)),
        ({"max_length": 50, "max_new_tokens": 5}, (14, 1)),
        ({"max_new_tokens": 5, "num_beams": 4, "batch_size": 3}, (14, 12)),
        ({"max_new_tokens": 5, "num_beams": 4, "num_return_sequences": 2}, (14, 4)),
        ({"max_new_tokens": 5, "num_return_sequences": 2, "do_sample": True, "batch_size": 3}, (14, 6)),
        ({"max_new_tokens": 5, "prompt_lookup_num_tokens": 4}, (17, 1)),
        ({"max_new_tokens": 1, "prompt_lookup_num_tokens": 4}, (10, 1)),
        ({"max_new_tokens": 5, "prompt_lookup_num_tokens": 400}, (25, 1)),  # no more than there is to repeat
        ({"max_new_tokens": 5, "prompt_lookup_num_tokens": 4, "num_beams": 2}, (14, 2)),  # beams look nothing up
        ({"max_new_tokens": 5, "assistant_early_exit": 1, "prompt_lookup_num_tokens": 4}, (14, 1)),
        ({"max_new_tokens": 5, "assistant_model": object()}, (14, 1)),
        ({"max_new_tokens": 5, "assistant_model": 1, "tokenizer": 1, "assistant_tokenizer": 1}, (15, 1)),
        ({"max_new_tokens": 5, "streamer": object(), "pixel_values": None}, (14, 1)),
    ],
)  # fmt: skip
def test_formulas(options, capacity):
    assert capacity_for(None, 10, **options) == Capacity(*capacity)
    config = GenerationConfig(**{name: value for name, value in options.items() if name.startswith("max_")})
    assert capacity_for(config, 10, **options) == capacity
    assert config.num_beams is None  # and the config is as it was


def test_a_model_brings_its_own_configuration():
    model = families.model("llama")
    assert capacity_for(model, 10).max_context_length == 29
    assert capacity_for(model, 250).max_context_length == 255  # its max_position_embeddings is 256

    class Predicts:
        generation_config = GenerationConfig(max_new_tokens=5)
        config = families.config("llama", num_mtp_layers=3)

    assert capacity_for(Predicts(), 10, use_mtp=True) == (17, 1)
    assert capacity_for(Predicts(), 10, use_mtp=True, max_new_tokens=1) == (10, 1)


def test_what_makes_no_sense():
    with pytest.raises(ArgumentError, match="max_length is 10 tokens, and the input has 10"):
        capacity_for(None, 10, max_length=10)
    with pytest.raises(ArgumentError, match="input_length"):
        capacity_for(None, 0)
    with pytest.raises(ArgumentError, match="batch_size"):
        capacity_for(None, 1, batch_size=0)
    with pytest.raises(ArgumentError, match="max_new_tokens"):
        capacity_for(None, 1, max_new_tokens=0)
    with pytest.raises(ArgumentTypeError, match="must be a GenerationConfig"):
        capacity_for("greedy", 1)
    with pytest.raises(ArgumentError, match="num_mtp_layers"):
        capacity_for(GenerationConfig(use_mtp=True), 10)
