"""Configurations of tiny models, one for each family that keeps its cache in a way of its own.

Names of classes and not the classes: a version of transformers may lack some.
"""

from __future__ import annotations

from typing import Any

WINDOW = 8
IDS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}  # never ends early
SMALL = IDS | {"vocab_size": 128, "hidden_size": 64, "initializer_range": 0.1}
C = SMALL | {
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
L3 = C | {"num_hidden_layers": 3}
L4 = C | {"num_hidden_layers": 4}
EACH_HEAD = C | {"num_key_value_heads": 4}
ALTERNATING = ["sliding_attention", "full_attention"] * 2

# -- attention that compresses keys and values into one head of latents

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
MLA = _LATENT | {"q_lora_rank": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
INDEXED = MLA | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 16}

# -- states beside keys and values

MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
MAMBA2 = MAMBA | {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_chunk_size": 8}
DELTA = {
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}

# -- mixtures of experts

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

GEMMA3N = L4 | {
    "intermediate_size": [128] * 4,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ALTERNATING,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.0] * 4,
    "altup_num_inputs": 2,
}
GEMMA4 = L4 | {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": ALTERNATING,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
}
GPT2 = IDS | {
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.1,
}
FALCON = SMALL | {"num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}

#: name -> config class and its arguments, for models of text alone.
TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    # -- all keys and values of all tokens, in the same number of heads in each layer
    "llama": ("LlamaConfig", C),
    "qwen2": ("Qwen2Config", C),
    "qwen3": ("Qwen3Config", C | {"head_dim": 32}),
    "phi": ("PhiConfig", EACH_HEAD),
    "phi3": ("Phi3Config", C),
    "gemma": ("GemmaConfig", C | {"num_key_value_heads": 1, "head_dim": 32}),
    "glm4": ("Glm4Config", C | {"head_dim": 16}),
    "stablelm": ("StableLmConfig", C),
    "cohere": ("CohereConfig", C | {"logit_scale": 1.0}),
    "granite": ("GraniteConfig", C),
    "olmo2": ("Olmo2Config", C),
    "nemotron": ("NemotronConfig", C),
    "smollm3": ("SmolLM3Config", L4),  # its last layer has no positions
    "ernie4.5": ("Ernie4_5Config", C | {"head_dim": 16}),
    "hunyuan": ("HunYuanDenseV1Config", C | {"head_dim": 16}),
    "seed-oss": ("SeedOssConfig", C | {"head_dim": 16}),
    "apertus": ("ApertusConfig", C),
    "arcee": ("ArceeConfig", C),
    "helium": ("HeliumConfig", C | {"head_dim": 16}),
    "bitnet": ("BitNetConfig", C),
    "persimmon": ("PersimmonConfig", {k: v for k, v in C.items() if k != "num_key_value_heads"}),
    "diffllama": ("DiffLlamaConfig", C),  # repeats the values that it has read from the cache
    "nanochat": ("NanoChatConfig", C),
    "doge": ("DogeConfig", C | {"keep_window_size": 2048}),
    "gpt2": ("GPT2Config", GPT2),
    "gpt-bigcode": ("GPTBigCodeConfig", GPT2 | {"multi_query": True}),
    "gptj": ("GPTJConfig", GPT2 | {"rotary_dim": 8}),
    "codegen": ("CodeGenConfig", GPT2 | {"rotary_dim": 8}),
    "gpt-neo": (
        "GPTNeoConfig",
        SMALL
        | {
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 128,
            "max_position_embeddings": 256,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,  # kept by a mask of its own, the cache holds everything
        },
    ),
    "neox": ("GPTNeoXConfig", EACH_HEAD),
    "opt": (
        "OPTConfig",
        IDS
        | {
            "vocab_size": 128,
            "hidden_size": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 64,
            "init_std": 0.1,
        },
    ),
    "bloom": ("BloomConfig", SMALL | {"n_layer": 2, "n_head": 4}),
    "mpt": (
        "MptConfig",
        IDS
        | {
            "vocab_size": 128,
            "d_model": 64,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 256,
            "use_cache": True,
            "initializer_range": 0.1,
        },
    ),
    "falcon-mqa": (
        "FalconConfig",
        FALCON | {"multi_query": True, "new_decoder_architecture": False, "parallel_attn": True},
    ),
    "falcon-gqa": ("FalconConfig", FALCON | {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon-alibi": (
        "FalconConfig",
        FALCON | {"alibi": True, "multi_query": False, "new_decoder_architecture": False},
    ),
    "biogpt": ("BioGptConfig", EACH_HEAD),
    "xglm": (
        "XGLMConfig",
        IDS
        | {
            "vocab_size": 128,
            "d_model": 64,
            "ffn_dim": 128,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 256,
            "init_std": 0.1,
        },
    ),
    "ctrl": ("CTRLConfig", GPT2 | {"dff": 128}),
    # -- the same with experts
    "mixtral": ("MixtralConfig", C | LOCAL_EXPERTS),
    "qwen2-moe": ("Qwen2MoeConfig", C | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3-moe": ("Qwen3MoeConfig", C | EXPERTS | {"head_dim": 16}),
    "olmoe": ("OlmoeConfig", C | EXPERTS),
    "phimoe": ("PhimoeConfig", C | LOCAL_EXPERTS),
    "granite-moe": ("GraniteMoeConfig", C | LOCAL_EXPERTS),
    "jetmoe": ("JetMoeConfig", C | LOCAL_EXPERTS | {"kv_channels": 16, "num_key_value_heads": 2}),
    "minimax-m2": ("MiniMaxM2Config", C | LOCAL_EXPERTS | {"head_dim": 16, "rotary_dim": 8}),
    "glm4-moe": (
        "Glm4MoeConfig",
        C
        | {
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "dots1": (
        "Dots1Config",
        C
        | {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "head_dim": 16,
        },
    ),
    # -- a window on all layers, or on some
    "mistral": ("MistralConfig", C | {"sliding_window": WINDOW, "head_dim": 16}),
    "starcoder2": ("Starcoder2Config", C | {"sliding_window": WINDOW}),
    "qwen2-sliding": (
        "Qwen2Config",
        L4 | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "gemma2": ("Gemma2Config", L4 | {"head_dim": 16, "sliding_window": WINDOW}),
    "vaultgemma": ("VaultGemmaConfig", L4 | {"head_dim": 16, "sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3TextConfig",
        L3
        | {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gpt-oss": ("GptOssConfig", C | LOCAL_EXPERTS | {"head_dim": 16, "sliding_window": WINDOW}),
    "cohere2": (
        "Cohere2Config",
        L4 | {"sliding_window": WINDOW, "sliding_window_pattern": 2, "logit_scale": 1.0},
    ),
    "olmo3": ("Olmo3Config", L4 | {"sliding_window": WINDOW}),
    "exaone4": ("Exaone4Config", L4 | {"sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "ministral": (
        "MinistralConfig",
        L4 | {"sliding_window": WINDOW, "layer_types": ALTERNATING, "head_dim": 16},
    ),
    "modernbert": (
        "ModernBertDecoderConfig",
        {k: v for k, v in L3.items() if k != "num_key_value_heads"}
        | {"local_attention": WINDOW, "global_attn_every_n_layers": 3},
    ),
    "llama4": (
        "Llama4TextConfig",
        L4
        | {
            "head_dim": 16,
            "attention_chunk_size": WINDOW,
            "num_local_experts": 2,
            "intermediate_size_mlp": 128,
            "no_rope_layers": [1, 1, 1, 0],
            "moe_layers": [],
        },
    ),
    # -- keys and values of different widths
    "deepseek-v2": (
        "DeepseekV2Config",
        # head_dim has to be that of the part with positions
        C | _LATENT | {"head_dim": 8, "q_lora_rank": None, "n_routed_experts": 4},
    ),
    "deepseek-v3": ("DeepseekV3Config", C | MLA),
    "longcat": (
        "LongcatFlashConfig",
        SMALL
        | {
            "num_hidden_layers": 2,
            "num_layers": 1,  # of which each caches twice
            "num_attention_heads": 4,
            "ffn_hidden_size": 128,
            "expert_ffn_hidden_size": 32,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "head_dim": 8,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "max_position_embeddings": 256,
        },
    ),
    # -- layers of different sizes: 2 heads of 16 in those with a window, 2 of 32 in the others
    "gemma4": ("Gemma4TextConfig", GEMMA4 | {"num_global_key_value_heads": 2}),
    # -- layers that read the cache of others
    "gemma4-shared": (
        "Gemma4TextConfig",
        GEMMA4 | {"num_global_key_value_heads": 1, "num_kv_shared_layers": 2},
    ),
    "gemma3n": ("Gemma3nTextConfig", GEMMA3N),
    # -- indices of a sparse attention beside keys and values
    "deepseek-v3.2": ("DeepseekV32Config", C | INDEXED),
    "glm-moe-dsa": ("GlmMoeDsaConfig", C | INDEXED | {"n_group": 1, "topk_group": 1}),
    "deepseek-v4": ("DeepseekV4Config", {k: v for k, v in C.items() if k != "num_key_value_heads"}),
    # -- convolution states
    "lfm2": (
        "Lfm2Config",
        C | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    ),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        C | EXPERTS | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "num_dense_layers": 1},
    ),
    # -- recurrent states, in layers of their own
    "bamba": ("BambaConfig", L3 | MAMBA2 | {"attn_layer_indices": [1]}),
    "jamba": (
        "JambaConfig",
        L4
        | MAMBA
        | {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        L3
        | MAMBA2
        | {
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 32,
        },
    ),
    "qwen3-next": ("Qwen3NextConfig", L4 | DELTA | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3.5": ("Qwen3_5TextConfig", L4 | DELTA),
    "nemotron-h": (
        "NemotronHConfig",
        {k: v for k, v in C.items() if k != "num_hidden_layers"}
        | {
            "head_dim": 16,
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 8,
            "expand": 1,
        },
    ),
    "recurrent-gemma": (
        "RecurrentGemmaConfig",
        L3 | {"head_dim": 16, "lru_width": 64, "attention_window_size": WINDOW, "conv1d_width": 4},
    ),
    # -- recurrent states and keys and values in one layer
    "zamba": (
        "ZambaConfig",
        L4
        | MAMBA
        | {
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "mamba_dt_rank": 8,
            "n_mamba_heads": 2,
            "use_mamba_kernels": False,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        L4
        | MAMBA
        | {
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
            "mamba_ngroups": 1,
            "n_mamba_heads": 4,
            "mamba_headdim": 32,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": False,
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "use_mem_rope": True,
        },
    ),
    "falcon-h1": ("FalconH1Config", C | MAMBA2 | {"head_dim": 16, "mamba_d_ssm": 64, "mamba_d_head": 16}),
    # -- recurrent states alone
    "mamba": (
        "MambaConfig",
        SMALL | {"num_hidden_layers": 2, "state_size": 8, "conv_kernel": 4, "expand": 2},
    ),
    "falcon-mamba": (
        "FalconMambaConfig",
        SMALL | {"num_hidden_layers": 2, "state_size": 8, "conv_kernel": 4, "expand": 2},
    ),
    "mamba2": (
        "Mamba2Config",
        SMALL
        | {
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 1,
            "expand": 2,
            "conv_kernel": 4,
            "chunk_size": 8,
        },
    ),
}

SEQ2SEQ = IDS | {"vocab_size": 128, "decoder_start_token_id": 2}
BART = SEQ2SEQ | {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,  # not as many as the encoder
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
    "forced_eos_token_id": None,
    "init_std": 0.2,
}
T5 = SEQ2SEQ | {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "initializer_factor": 2.0,
}
_GEMMA_PART = C | {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention"],
}

#: The same for models that read a source with an encoder.
ENCODER_DECODER: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5Config", T5),
    "umt5": ("UMT5Config", T5),
    "bart": ("BartConfig", BART),
    "marian": ("MarianConfig", BART | {"decoder_vocab_size": 128}),
    "pegasus": ("PegasusConfig", BART),
    "mbart": ("MBartConfig", BART),
    "whisper": (
        "WhisperConfig",
        BART
        | {
            "num_mel_bins": 16,
            "max_source_positions": 30,  # of 60 frames
            "max_target_positions": 64,
            "decoder_start_token_id": 3,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "t5gemma": (
        "T5GemmaConfig",
        SEQ2SEQ
        | {
            "encoder": _GEMMA_PART,
            "decoder": _GEMMA_PART | {"cross_attention_hidden_size": 64},
            "initializer_range": 0.1,
        },
    ),
}

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_WINDOWS = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
IMAGE_TOKEN = 5

#: The same for models that look at pictures, of 4 patches.
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": (
        "LlavaConfig",
        {
            "text_config": C | {"model_type": "llama"},
            "vision_config": _VISION
            | {"model_type": "clip_vision_model", "num_hidden_layers": 2, "projection_dim": 32},
            "image_token_id": IMAGE_TOKEN,
            "vision_feature_select_strategy": "default",
            "vision_feature_layer": -1,
        },
    ),
    "gemma3-vl": (
        "Gemma3Config",
        {
            "text_config": L3 | _WINDOWS | {"model_type": "gemma3_text"},
            "vision_config": _VISION | {"model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
            "image_token_id": IMAGE_TOKEN,
            "boi_token_id": 6,
            "eoi_token_id": 7,
            "initializer_range": 0.1,
        },
    ),
    "paligemma": (
        "PaliGemmaConfig",
        {
            "text_config": C | {"model_type": "gemma", "head_dim": 16},
            "vision_config": _VISION | {"model_type": "siglip_vision_model"},
            "projection_dim": 64,
            "image_token_id": IMAGE_TOKEN,
        },
    ),
    "qwen2-vl": (
        "Qwen2VLConfig",
        {
            "text_config": C
            | {
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
            },
            "vision_config": {
                "depth": 1,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 2,
                "patch_size": 4,
                "spatial_merge_size": 1,
                "temporal_patch_size": 1,
            },
            "image_token_id": IMAGE_TOKEN,
            "video_token_id": 6,
            "vision_start_token_id": 7,
            "vision_end_token_id": 8,
        },
    ),
    "mllama": (
        "MllamaConfig",
        {
            "text_config": L3
            | {
                "cross_attention_layers": [1],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_global_layers": 1,
                "attention_heads": 2,
                "image_size": 16,
                "patch_size": 8,
                "vision_output_dim": 64,
                "intermediate_layers_indices": [0],
                "max_num_tiles": 1,
                "supported_aspect_ratios": [[1, 1]],
            },
            "image_token_index": IMAGE_TOKEN,
        },
    ),
}
