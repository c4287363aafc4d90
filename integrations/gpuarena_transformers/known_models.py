"""Configs of some public models, by name: what `gpuarena size` knows without any file.

Of each only what its cache and its number of weights follow from. The numbers of weights are those that their
makers published, and the tests compare them with what the configs give.
"""

from __future__ import annotations

import difflib
from typing import Any

from gpuarena.errors import ArgumentError

__all__ = ["KNOWN_MODELS", "known_config"]

_TIED = {"tie_word_embeddings": True}


def _dense(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, longest: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": longest,
        "tie_word_embeddings": False,
    }


_GPT_OSS = {"head_dim": 64, "sliding_window": 128, "num_experts_per_tok": 4}

#: name -> class of the config, its arguments, and the number of weights.
KNOWN_MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "deepseek-v3": (
        "DeepseekV3Config",
        _dense(7168, 61, 128, 128, 18432, 129280, 163840)
        | {
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
        },
        671_026_404_352,
    ),
    "falcon-7b": (
        "FalconConfig",
        {
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "vocab_size": 65024,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "new_decoder_architecture": False,
            "max_position_embeddings": 2048,
        },
        6_921_720_704,
    ),
    "gemma-2-2b": (
        "Gemma2Config",
        _dense(2304, 26, 8, 4, 9216, 256000, 8192) | {"head_dim": 256, "sliding_window": 4096} | _TIED,
        2_614_341_888,
    ),
    "gemma-2-9b": (
        "Gemma2Config",
        _dense(3584, 42, 16, 8, 14336, 256000, 8192) | {"head_dim": 256, "sliding_window": 4096} | _TIED,
        9_241_705_984,
    ),
    "gemma-3-1b": (
        "Gemma3TextConfig",
        _dense(1152, 26, 4, 1, 6912, 262144, 32768) | {"head_dim": 256, "sliding_window": 512} | _TIED,
        999_885_952,
    ),
    "gpt-oss-20b": (
        "GptOssConfig",
        _dense(2880, 24, 64, 8, 2880, 201088, 131072) | _GPT_OSS | {"num_local_experts": 32},
        20_914_757_184,
    ),
    "gpt-oss-120b": (
        "GptOssConfig",
        _dense(2880, 36, 64, 8, 2880, 201088, 131072) | _GPT_OSS | {"num_local_experts": 128},
        116_829_156_672,
    ),
    "gpt2": ("GPT2Config", {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}, 124_439_808),
    "llama-2-7b": ("LlamaConfig", _dense(4096, 32, 32, 32, 11008, 32000, 4096), 6_738_415_616),
    "llama-3.1-8b": ("LlamaConfig", _dense(4096, 32, 32, 8, 14336, 128256, 131072), 8_030_261_248),
    "llama-3.1-70b": ("LlamaConfig", _dense(8192, 80, 64, 8, 28672, 128256, 131072), 70_553_706_496),
    "llama-3.2-1b": ("LlamaConfig", _dense(2048, 16, 32, 8, 8192, 128256, 131072) | _TIED, 1_235_814_400),
    "llama-3.2-3b": ("LlamaConfig", _dense(3072, 28, 24, 8, 8192, 128256, 131072) | _TIED, 3_212_749_824),
    "mistral-7b-v0.1": (
        "MistralConfig",
        _dense(4096, 32, 32, 8, 14336, 32000, 32768) | {"sliding_window": 4096},
        7_241_732_096,
    ),
    "mistral-7b-v0.3": (
        "MistralConfig",
        _dense(4096, 32, 32, 8, 14336, 32768, 32768) | {"sliding_window": None},
        7_248_023_552,
    ),
    "mixtral-8x7b": (
        "MixtralConfig",
        _dense(4096, 32, 32, 8, 14336, 32000, 32768)
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        46_702_792_704,
    ),
    "phi-3-mini": ("Phi3Config", _dense(3072, 32, 32, 32, 8192, 32064, 4096), 3_821_079_552),
    "phi-4": ("Phi3Config", _dense(5120, 40, 40, 10, 17920, 100352, 16384), 14_659_507_200),
    "qwen2.5-0.5b": ("Qwen2Config", _dense(896, 24, 14, 2, 4864, 151936, 32768) | _TIED, 494_032_768),
    "qwen2.5-1.5b": ("Qwen2Config", _dense(1536, 28, 12, 2, 8960, 151936, 32768) | _TIED, 1_543_714_304),
    "qwen2.5-3b": ("Qwen2Config", _dense(2048, 36, 16, 2, 11008, 151936, 32768) | _TIED, 3_085_938_688),
    "qwen2.5-7b": ("Qwen2Config", _dense(3584, 28, 28, 4, 18944, 152064, 32768), 7_615_616_512),
    "qwen2.5-72b": ("Qwen2Config", _dense(8192, 80, 64, 8, 29568, 152064, 32768), 72_706_203_648),
    "qwen3-0.6b": (
        "Qwen3Config",
        _dense(1024, 28, 16, 8, 3072, 151936, 40960) | {"head_dim": 128} | _TIED,
        596_049_920,
    ),
    "qwen3-8b": (
        "Qwen3Config",
        _dense(4096, 36, 32, 8, 12288, 151936, 40960) | {"head_dim": 128},
        8_190_735_360,
    ),
    "smollm2-135m": ("LlamaConfig", _dense(576, 30, 9, 3, 1536, 49152, 8192) | _TIED, 134_515_008),
    "smollm2-1.7b": ("LlamaConfig", _dense(2048, 24, 32, 32, 8192, 49152, 8192) | _TIED, 1_711_376_384),
}


def known_config(name: str) -> Any:
    """Return the config of a model that is built in; upper case and the owner's name are ignored.

    >>> known_config("Qwen/Qwen2.5-1.5B-Instruct").num_hidden_layers
    28

    Raises
    ------
    ArgumentError
        There is none of that name; close ones are named.
    """
    import transformers

    short = name.lower().rpartition("/")[2].removeprefix("meta-")
    for ending in ("-instruct", "-it", "-chat", "-hf"):
        short = short.removesuffix(ending)
    if short not in KNOWN_MODELS:
        close = difflib.get_close_matches(short, KNOWN_MODELS, n=3, cutoff=0.5)
        hint = f"close are {', '.join(close)}" if close else f"there are {', '.join(KNOWN_MODELS)}"
        raise ArgumentError(
            f"{name!r} is no folder, no file, and no model that is built in; {hint}. Give the config.json or the "
            f".gguf file of any other model"
        )
    kind, arguments, _ = KNOWN_MODELS[short]
    return getattr(transformers, kind)(**arguments)
