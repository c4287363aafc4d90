"""``attn_implementation="gpuarena"`` against plain attention in float64 and each model's own attention."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from families import MLA  # noqa: E402 - after the skips
from gpuarena_transformers import attention  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402 - after the skip
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention  # noqa: E402

attention.register()

#: Logits of the models below are of the order of 1, and float32 rounding moves them by 1e-5 at most; a wrong
#: mask, scale or head moves them by more than 1e-2.
LOGITS_TOLERANCE = 1e-4
#: Outputs are means of standard normal values. A bfloat16 has 8 significant bits, and the kernels round
#: the weights as well as the output.
OUTPUT_TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 6e-2}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


# --------------------------------------------------------------------------------------- the function alone


def plain_attention(query, key, value, mask, *, scale, softcap=None, sinks=None):
    """softmax(Q K^T * scale + mask) V in float64: [batch, n_queries, q_heads, value_dim]."""
    group = query.shape[1] // key.shape[1]
    key = key.double().repeat_interleave(group, dim=1)
    value = value.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("bhqd,bhkd->bhqk", query.double(), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        hidden = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask
        scores = scores + hidden.double()
    weights = scores.exp()
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp().view(1, -1, 1, 1)
    return torch.einsum("bhqk,bhkd->bqhd", weights / total, value)


class Attention(torch.nn.Module):
    """The part of an attention module that attention functions read."""

    def __init__(self, group):
        super().__init__()
        self.num_key_value_groups = group
        self.is_causal = True
        self.eval()


@dataclass
class Call:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scale: float

    @property
    def group(self):
        return self.query.shape[1] // self.key.shape[1]

    @property
    def visible(self):
        """The mask, spelled out: the future is hidden from several queries without one."""
        n_queries, n_keys = self.query.shape[2], self.key.shape[2]
        if self.mask is None and n_queries > 1:
            return torch.ones(n_queries, n_keys, dtype=torch.bool).tril()
        return self.mask


def masks(draw, kind, *, batch, q_heads, n_queries, n_keys, dtype):
    """Draw a mask in which every query sees the last key."""
    batch = draw(st.sampled_from(sorted({1, batch})))
    if kind == "left padding":
        lengths = torch.randint(1, n_keys + 1, (batch, 1, 1, 1))
        return (torch.arange(n_keys) >= n_keys - lengths).expand(batch, 1, n_queries, n_keys)
    heads = draw(st.sampled_from([1, q_heads]))
    visible = torch.rand(batch, heads, n_queries, n_keys) < 0.6
    visible[..., -1] = True
    if kind == "bool":
        return visible
    return torch.randn(visible.shape).masked_fill(~visible, torch.finfo(dtype).min).to(dtype)


#: Strategies for the integers that a call is made of.
ONE_TOKEN = {
    "n_queries": st.just(1),
    "kv_heads": st.integers(1, 3),
    "group": st.integers(2, 5),
    "dims": st.tuples(st.integers(1, 20), st.integers(1, 20)),
}
ANY = ONE_TOKEN | {"n_queries": st.integers(1, 4), "group": st.integers(1, 4)}
#: 4 query heads on 2 key/value heads of dimension 8, as the modules of Gemma 2 and GPT-OSS below have.
OWN_MODULE = ANY | {"kv_heads": st.just(2), "group": st.just(2), "dims": st.just((8, 8))}


@st.composite
def calls(draw, *, n_queries, kv_heads, group, dims):
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    batch, n_queries, kv_heads, group = draw(st.integers(1, 3)), draw(n_queries), draw(kv_heads), draw(group)
    key_dim, value_dim = draw(dims)
    kind = draw(st.sampled_from([None, "bool", "float", "left padding"]))
    n_keys = n_queries if kind is None and n_queries > 1 else draw(st.integers(n_queries, 40))

    def stored(dim):  # the filled part of a longer buffer, as a cache returns it
        if draw(st.booleans()):
            return torch.randn(batch, kv_heads, n_keys + 3, dim, dtype=dtype)[:, :, :n_keys]
        return torch.randn(batch, n_keys + 3, kv_heads, dim, dtype=dtype).transpose(1, 2)[:, :, :n_keys]

    mask = None
    if kind is not None:
        mask = masks(
            draw, kind, batch=batch, q_heads=kv_heads * group, n_queries=n_queries, n_keys=n_keys, dtype=dtype
        )
    query = torch.randn(batch, n_queries, kv_heads * group, key_dim, dtype=dtype).transpose(1, 2)
    return Call(
        query, stored(key_dim), stored(value_dim), mask, draw(st.sampled_from([0.1, 0.5, key_dim**-0.5]))
    )


def check(call, output, **extra):
    expected = plain_attention(call.query, call.key, call.value, call.visible, scale=call.scale, **extra)
    assert output.shape == expected.shape
    assert output.is_contiguous()
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=OUTPUT_TOLERANCE[call.query.dtype])


@settings(deadline=None, max_examples=150)
@given(calls(**ONE_TOKEN))
def test_one_token_of_grouped_heads_is_plain_attention(call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "sdpa_attention_forward", None)  # the fold, and nothing else
        output, weights = attention.gpuarena_attention_forward(
            Attention(call.group), call.query, call.key, call.value, call.mask, scaling=call.scale
        )
    assert weights is None
    check(call, output)


@settings(deadline=None, max_examples=60)
@given(calls(**ANY))
def test_any_number_of_tokens_is_plain_attention(call):
    output, _ = attention.gpuarena_attention_forward(
        Attention(call.group), call.query, call.key, call.value, call.mask, scaling=call.scale
    )
    check(call, output)


def test_the_scale_defaults_to_the_root_of_the_key_dim():
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 8)
    output, _ = attention.gpuarena_attention_forward(Attention(2), query, key, value, None)
    torch.testing.assert_close(
        output.double(), plain_attention(query, key, value, None, scale=0.25), rtol=0, atol=5e-6
    )


def config_of(class_name, **changes):
    common = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    common.update(changes)
    return getattr(transformers, class_name)(**{k: v for k, v in common.items() if v is not None})


@settings(deadline=None, max_examples=60)
@given(calls(**OWN_MODULE), st.sampled_from([0.3, 2.0]))
def test_soft_cap_is_plain_attention_with_capped_scores(call, softcap):
    module = Gemma2Attention(config_of("Gemma2Config", head_dim=8), layer_idx=0).eval()
    output, _ = attention.gpuarena_attention_forward(
        module,
        call.query,
        call.key,
        call.value,
        call.mask,
        scaling=call.scale,
        softcap=softcap,
        sliding_window=8,
    )
    check(call, output, softcap=softcap)


@settings(deadline=None, max_examples=60)
@given(calls(**OWN_MODULE))
def test_sinks_are_one_more_score_without_a_value(call):
    module = GptOssAttention(config_of("GptOssConfig", head_dim=8), layer_idx=0).eval()
    module.sinks = torch.nn.Parameter(torch.randn(4), requires_grad=False)
    module.to(call.query.dtype)
    output, _ = attention.gpuarena_attention_forward(
        module, call.query, call.key, call.value, call.mask, scaling=call.scale, s_aux=module.sinks
    )
    check(call, output, sinks=module.sinks)


def test_the_eager_path_knows_the_default_scale():
    torch.manual_seed(0)
    module = GptOssAttention(config_of("GptOssConfig", head_dim=8), layer_idx=0).eval()
    module.sinks = torch.nn.Parameter(torch.randn(4), requires_grad=False)
    query, key, value = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    output, _ = attention.gpuarena_attention_forward(module, query, key, value, None, s_aux=module.sinks)
    expected = plain_attention(query, key, value, None, scale=0.25, sinks=module.sinks)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=5e-6)


def test_a_bidirectional_module_on_the_eager_path_sees_the_future():
    torch.manual_seed(0)
    module = Gemma2Attention(config_of("Gemma2Config", head_dim=8), layer_idx=0).eval()
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    expected = plain_attention(query, key, value, None, scale=0.5, softcap=1.0)
    output, _ = attention.gpuarena_attention_forward(
        module, query, key, value, None, scaling=0.5, is_causal=False, softcap=1.0
    )
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=5e-6)
    module.is_causal = False
    output, _ = attention.gpuarena_attention_forward(
        module, query, key, value, None, scaling=0.5, softcap=1.0
    )
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=5e-6)


@settings(deadline=None, max_examples=40)
@given(calls(**ANY), st.integers(0, 2**32 - 1))
def test_selected_keys_narrow_the_mask(call, seed):
    batch, n_queries, n_keys = call.query.shape[0], call.query.shape[2], call.key.shape[2]
    torch.manual_seed(seed)
    # The last key, or with a causal mask the query's own, is selected: no query is left without any.
    own = (
        torch.arange(n_queries)
        if call.mask is None and n_queries > 1
        else torch.full((n_queries,), n_keys - 1)
    )
    indices = torch.cat(
        [torch.randint(0, n_keys, (batch, n_queries, 2)), own.expand(batch, n_queries)[..., None]], -1
    )
    output, _ = attention.gpuarena_attention_forward(
        Attention(call.group),
        call.query,
        call.key,
        call.value,
        call.mask,
        scaling=call.scale,
        indices=indices.to(torch.int32),
    )
    selected = torch.stack([(indices == k).any(dim=-1) for k in range(n_keys)], dim=-1)[:, None]
    visible = torch.ones(n_queries, n_keys, dtype=torch.bool) if call.visible is None else call.visible
    if visible.dtype == torch.bool:
        call.mask = visible & selected
    else:
        call.mask = torch.where(selected, visible, torch.finfo(visible.dtype).min)
    check(call, output)


# --------------------------------------------------------------------------------------------- who is asked


def grouped_call(**changes):
    torch.manual_seed(0)
    call = {
        "module": Attention(2),
        "query": torch.randn(2, 4, 1, 8),
        "key": torch.randn(2, 2, 9, 8),
        "value": torch.randn(2, 2, 9, 8),
        "attention_mask": None,
        "scaling": 0.3,
    }
    call.update(changes)
    return call


DELEGATED = {
    "training": {"module": Attention(2).train()},
    "dropout": {"dropout": 0.5},
    "output_attentions": {"output_attentions": True},
    "position_bias": {"position_bias": torch.zeros(1, 4, 1, 9)},
    "several queries": {"query": torch.randn(2, 4, 3, 8)},
    "ungrouped heads": {"module": Attention(1), "query": torch.randn(2, 2, 1, 8)},
    "mask without four dimensions": {"attention_mask": torch.ones(1, 9, dtype=torch.bool)},
}


@pytest.mark.parametrize("changes", DELEGATED.values(), ids=DELEGATED.keys())
def test_stock_sdpa_gets_what_is_not_folded_unchanged(monkeypatch, changes):
    calls_seen = []

    def stock(*args, **kwargs):
        calls_seen.append((args, kwargs))
        return "output", None

    monkeypatch.setattr(attention, "sdpa_attention_forward", stock)
    call = grouped_call(**changes)
    assert attention.gpuarena_attention_forward(**call, is_causal=True, sliding_window=8) == ("output", None)
    [(args, kwargs)] = calls_seen
    positional = [call.pop(name) for name in ("module", "query", "key", "value", "attention_mask")]
    assert all(given is expected for given, expected in zip(args, positional, strict=True))
    assert kwargs == {"dropout": 0.0, "is_causal": True, "sliding_window": 8, **call}


def test_the_set_of_device_types_is_read_at_each_call(monkeypatch):
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *args, **kwargs: ("stock", None))
    assert attention.gpuarena_attention_forward(**grouped_call())[0] is not None
    monkeypatch.setattr(attention, "FOLD_DEVICE_TYPES", set())
    assert attention.gpuarena_attention_forward(**grouped_call()) == ("stock", None)
    attention.FOLD_DEVICE_TYPES.add("meta")
    on_meta = {name: grouped_call()[name].to("meta") for name in ("query", "key", "value")}
    # Meta tensors hold no values: this would fail if a value decided anything, which on a GPU is a wait.
    on_meta["attention_mask"] = torch.ones(2, 4, 1, 9, dtype=torch.bool, device="meta")
    assert attention.gpuarena_attention_forward(**grouped_call(**on_meta))[0].shape == (2, 1, 4, 8)


def test_cuda_is_left_to_stock_sdpa():
    assert {"cpu"} == attention.FOLD_DEVICE_TYPES


@pytest.mark.parametrize(
    "extra", [{"softcap": 5.0}, {"s_aux": torch.zeros(4)}, {"sinks": torch.zeros(2, 4, 1, 1)}]
)
def test_a_model_without_an_eager_function_is_refused_by_name(extra):
    with pytest.raises(
        attention.UnsupportedAttentionError, match=r'Attention needs .*attn_implementation="eager"'
    ) as e:
        attention.gpuarena_attention_forward(**grouped_call(), **extra)
    assert isinstance(e.value, ValueError)
    assert e.value.model == "Attention"
    assert e.value.needs in ("a soft cap of the attention scores", "attention sinks")


def test_keys_selected_in_blocks_are_refused():
    with pytest.raises(attention.UnsupportedAttentionError, match=r'blocks.*attn_implementation="sdpa"'):
        attention.gpuarena_attention_forward(**grouped_call(), block_indices=torch.zeros(2, 2, 1, 1))


def test_a_subclass_elsewhere_uses_the_eager_function_of_its_base():
    class MyAttention(GptOssAttention):
        pass

    config = config_of("GptOssConfig", head_dim=8)
    base, own = GptOssAttention(config, layer_idx=0).eval(), MyAttention(config, layer_idx=0).eval()
    own.load_state_dict(base.state_dict())
    outputs = [
        attention.gpuarena_attention_forward(**grouped_call(module=module), s_aux=module.sinks)[0]
        for module in (base, own)
    ]
    assert torch.equal(*outputs)


def test_registering_again_changes_nothing():
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    attention.register()
    assert (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping) == before
    assert AttentionInterface()["gpuarena"] is attention.gpuarena_attention_forward
    assert AttentionMaskInterface()["gpuarena"] is attention.gpuarena_mask


# -------------------------------------------------------------------------------------- copies, compilation


def allocated_bytes(function):
    """Bytes allocated on the CPU while `function` runs, inside kernels too, whether freed or not."""
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    return sum(max(event.self_cpu_memory_usage, 0) for event in profiler.events())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask_heads", [None, 1, 8])
def test_the_fold_copies_neither_keys_nor_values(dtype, mask_heads):
    query = torch.randn(2, 1, 8, 64, dtype=dtype).transpose(1, 2)
    key, value = torch.randn(2, 2, 2, 3000, 64, dtype=dtype)[..., :2048, :]
    mask = None if mask_heads is None else torch.ones(2, mask_heads, 1, 2048, dtype=torch.bool)
    key_nbytes = key.numel() * key.element_size()

    def fold():
        attention.gpuarena_attention_forward(Attention(4), query, key, value, mask)

    def with_copy():
        attention.gpuarena_attention_forward(Attention(4), query, key.contiguous(), value, mask)

    fold()  # the first call allocates what the kernel keeps
    # The kernel converts a boolean mask to float32: 8 heads at most, against 2 heads of 64 numbers.
    assert allocated_bytes(fold) < key_nbytes / 2
    assert allocated_bytes(with_copy) >= key_nbytes  # the meter sees one copy


COMPILED = {
    "fold": (Attention(2), {}),
    "soft cap": (
        Gemma2Attention(config_of("Gemma2Config", head_dim=8), layer_idx=0).eval(),
        {"softcap": 0.5},
    ),
    "sinks": (
        GptOssAttention(config_of("GptOssConfig", head_dim=8), layer_idx=0).eval(),
        {"s_aux": torch.ones(4)},
    ),
}


@pytest.mark.parametrize(("module", "extra"), COMPILED.values(), ids=COMPILED.keys())
def test_one_graph_under_compile(module, extra):
    def attend(query, key, value, mask):
        return attention.gpuarena_attention_forward(module, query, key, value, mask, scaling=0.5, **extra)[0]

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for n_keys in (9, 10, 11):
        query, key, value = (
            torch.randn(2, 4, 1, 8),
            torch.randn(2, 2, n_keys, 8),
            torch.randn(2, 2, n_keys, 8),
        )
        for mask in (None, torch.rand(2, 1, 1, n_keys) < 0.7, torch.randn(2, 4, 1, n_keys)):
            torch.testing.assert_close(compiled(query, key, value, mask), attend(query, key, value, mask))


# --------------------------------------------------------------------------------------------- whole models

SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2
SPARSE = MLA | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
GEMMA2 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 8,
    "attn_logit_softcapping": 1.0,  # of the size of the scores; at the usual 50 a tiny model does not feel it
    "query_pre_attn_scalar": 16,
}
GPT_OSS = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MIMO_V2 = {  # keys and values of different head dims
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "v_head_dim": 12,
    "sliding_window": 8,
    "layer_types": SLIDING_AND_FULL,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
GEMMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": SLIDING_AND_FULL,
    "num_kv_shared_layers": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
}
DEEPSEEK_V4 = {  # one key/value head, a window, and compressed keys behind it
    "num_hidden_layers": 4,
    "intermediate_size": None,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "sliding_window": 8,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "sliding_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["moe"] * 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 2,
}
GPT2 = {
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "max_position_embeddings": None,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
}

#: name: (configuration class, its arguments, the model's own attention)
MODELS = {
    "llama": ("LlamaConfig", {}, "sdpa"),
    "qwen2": ("Qwen2Config", {}, "sdpa"),
    "mistral, sliding": ("MistralConfig", {"sliding_window": 8, "head_dim": 16}, "sdpa"),
    "gemma2, soft cap": ("Gemma2Config", GEMMA2, "eager"),
    "gemma3": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 8, "layer_types": SLIDING_AND_FULL},
        "sdpa",
    ),
    "gemma4, shared keys": ("Gemma4TextConfig", GEMMA4, "sdpa"),
    "gpt-oss, sinks": ("GptOssConfig", GPT_OSS, "eager"),
    "mimo-v2, sinks in half the layers": (
        "MiMoV2FlashConfig",
        MIMO_V2,
        "eager",
    ),
    "deepseek-v3": ("DeepseekV3Config", MLA, "sdpa"),
    "deepseek-v3.2, sparse": ("DeepseekV32Config", SPARSE, "sdpa"),
    "deepseek-v4, compressed with sinks": ("DeepseekV4Config", DEEPSEEK_V4, "eager"),
    "hy-v4, sparse with sinks": ("HYV4Config", SPARSE, "eager"),
    "gpt2, ungrouped": ("GPT2Config", GPT2, "sdpa"),
}


def build(name, implementation="gpuarena"):
    """A model of random weights, the same for every implementation."""
    class_name, changes, _ = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config_of(class_name, **changes), attn_implementation=implementation
    )
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):  # small or empty at the start, and then easy to miss
            torch.nn.init.normal_(parameter, mean=1.0)
    return model.eval()


def prompts(padding):
    """Three prompts of 12 tokens, beyond a window of 8: [3, 12] token ids and their mask."""
    torch.manual_seed(1)
    ids = torch.randint(3, 128, (3, 12))
    mask = torch.ones_like(ids)
    if padding == "left":
        for row, n_padding in enumerate((0, 4, 9)):
            ids[row, :n_padding] = mask[row, :n_padding] = 0
    return ids, mask


def decoded_logits(model, ids, mask, **kwargs):
    """Logits of greedy decoding: [batch, 10 steps, vocabulary]."""
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=10,
        min_new_tokens=10,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **kwargs,
    )
    return torch.stack(output.logits, dim=1)


def difference(name, ids, mask, against=None, **kwargs):
    """The largest difference of the logits of `against`, or the model's own attention, to gpuarena's."""
    own = decoded_logits(build(name, against or MODELS[name][2]), ids, mask, **kwargs)
    assert own.std() > 0.1  # flat logits would hide an error
    return (own - decoded_logits(build(name), ids, mask, **kwargs)).abs().max().item()


@pytest.mark.parametrize(
    "prompt_length", [12, 5]
)  # longer than the window of 8, and crossing it while decoding
@pytest.mark.parametrize("padding", ["left", None])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_decoding_gives_the_logits_of_the_models_own_attention(name, padding, prompt_length):
    ids, mask = prompts(padding)
    assert difference(name, ids[:, -prompt_length:], mask[:, -prompt_length:]) < LOGITS_TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma2, soft cap", "gpt-oss, sinks", "gemma4, shared keys"])
@pytest.mark.parametrize("padding", ["left", None])
def test_a_static_cache_is_not_attended_to_beyond_its_tokens(name, padding):
    ids, mask = prompts(padding)
    assert difference(name, ids, mask, cache_implementation="static") < LOGITS_TOLERANCE


@pytest.mark.parametrize("logits_to_keep", [1, 3])
def test_gemma4_may_drop_query_rows(logits_to_keep):
    ids, mask = prompts(None)
    logits = [
        build("gemma4, shared keys", implementation)(
            ids, attention_mask=mask, logits_to_keep=logits_to_keep, use_cache=True
        ).logits
        for implementation in ("sdpa", "gpuarena")
    ]
    torch.testing.assert_close(*logits, rtol=0, atol=LOGITS_TOLERANCE)


@pytest.mark.parametrize("name", ["gemma2, soft cap", "gpt-oss, sinks"])
def test_soft_caps_and_sinks_matter(monkeypatch, name):
    def without(*args, **kwargs):
        return sdpa_attention_forward(*args, **(kwargs | {"softcap": None, "s_aux": None}))

    monkeypatch.setitem(AttentionInterface._global_mapping, "without", without)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "without", attention.gpuarena_mask)
    assert difference(name, *prompts("left"), against="without") > 100 * LOGITS_TOLERANCE


def test_left_padding_is_attended_to_without_a_mask_function_of_the_name(monkeypatch):
    ids, mask = prompts("left")
    with_mask = decoded_logits(build("llama"), ids, mask)
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "gpuarena")
    without_mask = decoded_logits(build("llama"), ids, mask)
    assert (with_mask - without_mask).abs().max() > 1000 * LOGITS_TOLERANCE


def test_set_attn_implementation_switches_a_model_that_exists():
    ids, mask = prompts("left")
    model = build("qwen2", "sdpa")
    stock = decoded_logits(model, ids, mask)
    model.set_attn_implementation("gpuarena")
    with pytest.MonkeyPatch.context() as patch:
        n_folds = []
        fold = attention.scaled_dot_product
        patch.setattr(
            attention,
            "scaled_dot_product",
            lambda *args, **kwargs: n_folds.append(1) or fold(*args, **kwargs),
        )
        folded = decoded_logits(model, ids, mask)
    assert len(n_folds) == 2 * 10  # two layers; the prompt, for its padding, and nine tokens after the first
    torch.testing.assert_close(folded, stock, rtol=0, atol=LOGITS_TOLERANCE)


@pytest.mark.parametrize(
    ("class_name", "changes"),
    [
        ("BloomConfig", {"n_layer": 2, "n_head": 4}),
        ("MptConfig", {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}),
        ("XGLMConfig", {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 128}),
    ],
)
def test_models_that_do_not_look_their_attention_up_are_refused(class_name, changes):
    config = getattr(transformers, class_name)(vocab_size=128, **({"hidden_size": 64} | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="gpuarena").eval()
    ids, mask = prompts("left")
    with pytest.raises(
        attention.UnsupportedAttentionError, match=rf'{class_name} needs.*attn_implementation="eager"'
    ):
        model(ids, attention_mask=mask)


def test_a_configuration_of_an_unknown_kind_is_not_refused():
    class MyConfig(transformers.PreTrainedConfig):
        pass

    mask = attention.gpuarena_mask(
        batch_size=1,
        q_length=1,
        kv_length=3,
        q_offset=2,
        attention_mask=torch.tensor([[False, True, True]]),
        config=MyConfig(),
    )
    assert mask.tolist() == [[[[False, True, True]]]]


def test_a_model_compiles_into_one_graph():
    model = build("llama")
    ids, mask = prompts("left")
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids, attention_mask=mask, use_cache=False).logits, expected)


def test_training_gives_the_gradients_of_stock_sdpa():
    ids, mask = prompts("left")
    gradients = []
    for implementation in ("sdpa", "gpuarena"):
        model = build("llama", implementation).train()
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.equal(*gradients)
