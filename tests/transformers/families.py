"""Tiny models of several families, with random weights in float32, and ways of generating with them.

Tests compare logits and not tokens alone: with weights of this size a wrong slot or a wrong mask moves logits by more
than 0.05, and greedy tokens often by nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from gpuarena_transformers import cache_argument
from transformers import AutoModelForCausalLM

#: Name of the cache argument of this transformers.
CACHE = cache_argument()
#: float32 rounding moves these logits by 1e-5 at most, over all kernels.
TOLERANCE = 1e-3

C = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,  # never ends early
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
L4 = C | {"num_hidden_layers": 4}
WINDOW = 8

MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
GPT2 = {
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.1,
}
GEMMA4 = L4 | {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
}

#: name -> config class and its arguments.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", C),
    "qwen2": ("Qwen2Config", C),
    "mistral": ("MistralConfig", C | {"sliding_window": WINDOW, "head_dim": 16}),
    "gemma2": ("Gemma2Config", L4 | {"head_dim": 16, "sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3TextConfig",
        C
        | {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        C | {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek-v3": ("DeepseekV3Config", C | MLA),
    "gpt2": ("GPT2Config", GPT2 | {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}),
    # Layers of different sizes: 2 heads of 16 in those with a window, 2 of 32 in the others.
    "gemma4": ("Gemma4TextConfig", GEMMA4 | {"num_global_key_value_heads": 2}),
    # Its last two layers read the cache of others.
    "gemma4-shared": (
        "Gemma4TextConfig",
        GEMMA4 | {"num_global_key_value_heads": 1, "num_kv_shared_layers": 2},
    ),
    # Convolution states beside the keys and values.
    "lfm2": (
        "Lfm2Config",
        C | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    ),
    # Recurrent states beside the keys and values.
    "bamba": (
        "BambaConfig",
        C
        | {
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 8,
        },
    ),
}
#: Those that every way of generating is tested with.
FAMILIES = ["llama", "qwen2", "mistral", "gemma2", "gemma3", "gpt-oss", "deepseek-v3", "gpt2"]


def config(name: str, **changes: Any) -> Any:
    """Return a new config."""
    class_name, arguments = CONFIGS[name]
    return getattr(transformers, class_name)(**arguments | changes)


@functools.cache
def model(name: str, attention: str | None = None) -> Any:
    """Return the model of a family; the weights are the same for each `attention`."""
    if name == "gemma2" and attention is None:
        attention = "eager"  # SDPA drops its soft cap without a word, up to transformers 5.20
    torch.manual_seed(len(name))
    options = {} if attention is None else {"attn_implementation": attention}
    return AutoModelForCausalLM.from_config(config(name), **options).eval()


@functools.cache
def draft(name: str) -> Any:
    """Return a model that proposes four tokens at a time, often the right ones.

    It has the weights of the family's model, a little changed, and no windows: up to transformers 5.17 the
    `DynamicCache` of a draft model fails behind one.
    """
    changes: dict[str, Any] = {"sliding_window": None} if name == "mistral" else {}
    if "sliding_attention" in (getattr(config(name), "layer_types", None) or ()):
        changes["layer_types"] = ["full_attention"] * config(name).num_hidden_layers
    assistant = AutoModelForCausalLM.from_config(config(name, **changes)).eval()
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
        found = prompt(self.prompt) | self.options
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
