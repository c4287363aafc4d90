"""Tiny models of several families, with random weights in float32, and ways of generating with them.

Tests compare logits and not tokens alone: with weights of this size a wrong slot or a wrong mask moves logits by more
than 0.05, and greedy tokens often by nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from family_configs import ENCODER_DECODER, L4, MLA, TEXT, VISION, WINDOW, C
from gpuarena_transformers import cache_argument
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

__all__ = [
    "CACHE",
    "CONFIGS",
    "ENCODER_DECODER",
    "FAMILIES",
    "L4",
    "MLA",
    "MODES",
    "N_NEW",
    "N_TOKENS",
    "TEXT",
    "TOLERANCE",
    "VISION",
    "WINDOW",
    "C",
]

#: Name of the cache argument of this transformers.
CACHE = cache_argument()
#: float32 rounding moves these logits by 1e-5 at most, over all kernels.
TOLERANCE = 1e-3

#: name -> config class and its arguments.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = TEXT | ENCODER_DECODER | VISION
#: Those that every way of generating is tested with.
FAMILIES = ["llama", "qwen2", "mistral", "gemma2", "gemma3", "gpt-oss", "deepseek-v3", "gpt2"]


def config(name: str, **changes: Any) -> Any:
    """Return a new config; skip the test where this transformers has no such family."""
    class_name, arguments = CONFIGS[name]
    try:
        config_class = getattr(transformers, class_name)
    except AttributeError:
        pytest.skip(f"transformers {transformers.__version__} has no {class_name}")
    return config_class(**arguments | changes)


def _build(name: str, config: Any, **options: Any) -> Any:
    """Return a model with new weights."""
    factory: Any = AutoModelForCausalLM
    if name == "whisper":
        factory = AutoModelForSpeechSeq2Seq
    elif name in ENCODER_DECODER:
        factory = AutoModelForSeq2SeqLM
    elif name in VISION:
        factory = AutoModelForImageTextToText
    model = factory.from_config(config, **options).eval()
    if name == "gemma3-vl":  # it begins with zeros, and pictures that all look the same
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return model


@functools.cache
def model(name: str, attention: str | None = None) -> Any:
    """Return the model of a family; the weights are the same for each `attention`."""
    if name == "gemma2" and attention is None:
        attention = "eager"  # SDPA drops its soft cap without a word, up to transformers 5.20
    torch.manual_seed(len(name))
    options = {} if attention is None else {"attn_implementation": attention}
    return _build(name, config(name), **options)


@functools.cache
def draft(name: str) -> Any:
    """Return a model that proposes four tokens at a time, often the right ones.

    It has the weights of the family's model, a little changed, and windows that are never full: up to transformers
    5.17 the `DynamicCache` of a draft model fails behind one.
    """
    windows = ("sliding_window", "attention_chunk_size", "local_attention")
    changes = {key: 256 for key in windows if CONFIGS[name][1].get(key)}
    assistant = _build(name, config(name, **changes))
    torch.manual_seed(7)
    with torch.no_grad():
        for own, others in zip(assistant.parameters(), model(name).parameters(), strict=True):
            own.copy_(others + 0.01 * torch.randn_like(others))
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


@dataclass(frozen=True)
class Mode:
    """A way of generating: the prompts, and options of `generate`."""

    prompt: str = "two"
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = 2
    """Rows that the cache holds at most."""

    def arguments(self, name: str) -> dict[str, Any]:
        """Return the arguments of `generate` but the cache."""
        found = (source(self.prompt) if name == "whisper" else prompt(self.prompt)) | self.options
        if found.get("assistant_model") == "draft":
            found["assistant_model"] = draft(name)
        if self.prompt == "embeds":
            embeddings = model(name).get_input_embeddings().weight
            found["inputs_embeds"] = torch.nn.functional.embedding(
                found.pop("input_ids"), embeddings
            ).detach()
        return found


def prompt(kind: str = "two") -> dict[str, torch.Tensor]:
    """Return input_ids and attention_mask: ``"one"`` or ``"two"`` rows, ``"padded"`` ones, or one that repeats."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 128, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    if kind == "one":
        ids, mask = ids[:1], mask[:1]
    elif kind == "repeating":
        ids = ids[:1, :4].repeat(1, 3)
        mask = torch.ones_like(ids)
    elif kind == "padded":
        mask[0, :4] = 0
        ids = ids.where(mask == 1, 0)
    return {"input_ids": ids, "attention_mask": mask}


def source(kind: str = "two") -> dict[str, torch.Tensor]:
    """Return what whisper listens to: 60 frames of 16 frequencies, of one row or two."""
    frames = torch.randn(2, 16, 60, generator=torch.Generator().manual_seed(5))
    return {"input_features": frames[:1] if kind in ("one", "repeating") else frames}


MODES = {
    "greedy": Mode(),
    "sample": Mode(options={"do_sample": True}),
    "sample, two sequences each": Mode(options={"do_sample": True, "num_return_sequences": 2}, rows=4),
    "beam": Mode(options={"num_beams": 3}, rows=6),
    "beam, two sequences each": Mode(options={"num_beams": 3, "num_return_sequences": 2}, rows=6),
    "beam-sample": Mode(options={"num_beams": 3, "do_sample": True}, rows=6),
    "draft model": Mode("one", {"assistant_model": "draft"}, rows=1),
    "draft model, sample": Mode("one", {"assistant_model": "draft", "do_sample": True}, rows=1),
    "prompt lookup": Mode("repeating", {"prompt_lookup_num_tokens": 3}, rows=1),
    "prefill in chunks": Mode(options={"prefill_chunk_size": 4}),
    "left padding": Mode("padded"),
    "left padding, beam": Mode("padded", {"num_beams": 3}, rows=6),
    "left padding, prefill in chunks": Mode("padded", {"prefill_chunk_size": 4}),
    "embeddings": Mode("embeds"),
    "guidance": Mode(options={"guidance_scale": 1.5}),
}
N_NEW = 10
#: Tokens that the cache has to hold: the longest prompt, all new tokens but the last, and what prompt lookup adds.
N_TOKENS = 12 + N_NEW - 1 + 3


def generate(model: Any, arguments: dict[str, Any], cache: Any = None, *, n_new: int = N_NEW) -> Any:
    """Return what `generate` does with logits, after the same seed each time."""
    torch.manual_seed(11)
    options = {"do_sample": False} | arguments
    if cache is not None:
        options[CACHE] = cache
    return model.generate(
        **options,
        max_new_tokens=n_new,
        min_new_tokens=n_new,
        output_logits=True,
        return_dict_in_generate=True,
    )


@functools.cache
def reference(name: str, mode: str) -> Any:
    """Return what a family generates with transformers' own cache and attention."""
    return generate(model(name), MODES[mode].arguments(name))


def assert_same(outputs: Any, expected: Any) -> None:
    """Compare logits, then tokens."""
    assert len(outputs.logits) == len(expected.logits) > 0
    for step, (found, wanted) in enumerate(zip(outputs.logits, expected.logits, strict=True)):
        difference = (found - wanted).abs().max().item()
        assert difference < TOLERANCE, f"logits of step {step} are off by {difference}"
    assert torch.equal(outputs.sequences, expected.sequences)
