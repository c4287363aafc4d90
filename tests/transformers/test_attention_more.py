"""``attn_implementation="gpuarena"`` for several queries, soft caps and sinks: who computes, how exactly, in what memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from gpuarena_transformers import (  # noqa: E402
    _scores,
    attention,
    cache_argument,
)
from transformers.models.gemma2 import modeling_gemma2 as gemma2  # noqa: E402
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss  # noqa: E402

from gpuarena.bench.memory import AllocationMeter  # noqa: E402 - after the skips
from gpuarena.kv import attention as kv_attention  # noqa: E402

attention.register()

#: Largest difference to float64 of means of standard normal values; bfloat16 and float16 round the output itself.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@dataclass
class Call:
    query: torch.Tensor  # [batch, q_heads, n, key_dim]
    key: torch.Tensor  # [batch, kv_heads, n_keys, key_dim]
    value: torch.Tensor  # [batch, kv_heads, n_keys, value_dim]
    mask: torch.Tensor | None
    scale: float
    is_causal: bool = False

    @property
    def tensors(self):
        return self.query, self.key, self.value

    @property
    def group(self):
        return self.query.shape[1] // self.key.shape[1]


def exact(call, *, softcap=None, sinks=None):
    """The formula in float64, head by head: [batch, n, q_heads, value_dim]."""
    batch, q_heads, n, _ = call.query.shape
    n_keys = call.key.shape[2]
    added = torch.zeros(batch, q_heads, n, n_keys, dtype=torch.float64)
    if call.mask is not None:
        whole = call.mask.expand(batch, q_heads, n, n_keys)
        added = torch.where(whole, 0.0, -torch.inf) if whole.dtype == torch.bool else whole.double()
    if call.is_causal:
        future = torch.arange(n_keys)[None] > torch.arange(n)[:, None]
        added = added.masked_fill(future, -torch.inf)
    out = torch.empty(batch, n, q_heads, call.value.shape[3], dtype=torch.float64)
    for head in range(q_heads):
        key, value = (t[:, head // call.group].double() for t in (call.key, call.value))
        scores = call.query[:, head].double() @ key.mT * call.scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + added[:, head]
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].double().expand(batch, n, 1)], dim=-1)
        out[:, :, head] = torch.softmax(scores, dim=-1)[..., :n_keys] @ value
    return out


KINDS = ["none", "causal", "left padding", "window", "random", "random by head", "additive", "by key alone"]


def mask_of(kind, batch, q_heads, n, n_keys, dtype):
    """A mask in which every query sees at least one key."""
    at, of = torch.arange(n_keys), torch.arange(n_keys - n, n_keys)[:, None]
    if kind == "none":
        return None
    if kind in ("causal", "left padding", "window"):
        seen = (at <= of).expand(batch, 1, n, n_keys).clone()
        if kind == "left padding":
            seen &= at >= torch.randint(0, n_keys - n + 1, (batch, 1, 1, 1))
        if kind == "window":
            seen &= at > of - 3
        return seen
    if kind == "by key alone":
        seen = torch.rand(batch, 1, 1, n_keys) < 0.6
    else:
        heads = q_heads if kind == "random by head" else 1
        seen = torch.rand(1, heads, n, n_keys) < 0.6
    seen[..., 0] = True
    if kind == "additive":
        return torch.randn(seen.shape).masked_fill(~seen, torch.finfo(dtype).min).to(dtype)
    return seen


@st.composite
def calls(draw, dtypes=(torch.float32, torch.bfloat16)):
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(dtypes))
    batch, kv_heads, size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(2, 5))
    n = draw(st.integers(1, 12))
    n_keys = draw(st.integers(n, 40))
    key_dim = draw(st.integers(1, 20))
    value_dim = draw(st.one_of(st.just(key_dim), st.integers(1, 20)))
    mask = mask_of(draw(st.sampled_from(KINDS)), batch, kv_heads * size, n, n_keys, dtype)

    def stored(dim):  # the filled part of a longer buffer, head-major or token-major
        if draw(st.booleans()):
            return torch.randn(batch, kv_heads, n_keys + 3, dim, dtype=dtype)[:, :, :n_keys]
        return torch.randn(batch, n_keys + 3, kv_heads, dim, dtype=dtype).transpose(1, 2)[:, :, :n_keys]

    query = torch.randn(batch, n, kv_heads * size, key_dim, dtype=dtype).transpose(1, 2)
    return Call(query, stored(key_dim), stored(value_dim), mask, draw(st.sampled_from([0.1, 0.5, 1.0])))


def close(output, expected, dtype):
    assert output.shape == expected.shape
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=TOLERANCE[dtype])


class Attention(torch.nn.Module):
    """What attention functions read of a module; not causal."""

    def __init__(self, group, is_causal=False):
        super().__init__()
        self.num_key_value_groups = group
        self.is_causal = is_causal
        self.eval()


# ------------------------------------------------------------------------------------- several queries


@settings(deadline=None, max_examples=120)
@given(calls(), st.sampled_from([0, 12, 192]))
def test_several_queries_folded_or_not_are_plain_attention(call, fold_max):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_attention, "FOLD_MAX_QUERIES", fold_max)
        patch.setattr(attention, "sdpa_attention_forward", None)  # nothing of this is left to it
        output, weights = attention.gpuarena_attention_forward(
            Attention(call.group), *call.tensors, call.mask, scaling=call.scale
        )
    assert weights is None
    assert output.is_contiguous()
    close(output, exact(call), call.query.dtype)


def spied(patch):
    """Record query shape, whether keys are where they were, and enable_gqa of every call of torch's SDPA."""
    seen = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, *args, **kwargs):
        seen.append((tuple(query.shape), key.data_ptr(), kwargs.get("enable_gqa", False)))
        return original(query, key, value, *args, **kwargs)

    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return seen


@pytest.mark.parametrize(
    ("n", "shape", "enable_gqa"),
    [
        (1, (1, 2, 6, 8), False),
        (5, (1, 2, 30, 8), False),
        (32, (1, 2, 192, 8), False),
        (33, (1, 12, 33, 8), True),
    ],
)
def test_a_few_queries_are_folded_and_many_are_not(monkeypatch, n, shape, enable_gqa):
    query, key = torch.randn(1, 12, n, 8), torch.randn(1, 2, 64, 8)
    mask = mask_of("causal", 1, 12, n, 64, torch.float32)
    seen = spied(monkeypatch)
    attention.gpuarena_attention_forward(Attention(6), query, key, key, mask)
    assert seen == [(shape, key.data_ptr(), enable_gqa)]


@pytest.mark.parametrize("heads", [1, 4])
def test_a_mask_of_keys_alone_is_for_all_queries(heads):
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 9, 8)
    mask = torch.rand(2, heads, 1, 9) < 0.6
    mask[..., 0] = True
    output, _ = attention.gpuarena_attention_forward(Attention(2), query, key, key, mask, scaling=0.5)
    close(output, exact(Call(query, key, key, mask, 0.5)), torch.float32)


def test_a_causal_prompt_without_a_mask_is_left_to_stock_sdpa(monkeypatch):
    seen = []
    monkeypatch.setattr(
        attention, "sdpa_attention_forward", lambda *args, **kwargs: (seen.append(kwargs), None)
    )
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    attention.gpuarena_attention_forward(Attention(2, is_causal=True), query, key, key, None)
    attention.gpuarena_attention_forward(Attention(2), query, key, key, None, is_causal=True)
    assert len(seen) == 2
    output, _ = attention.gpuarena_attention_forward(
        Attention(2, is_causal=True), query, key, key, None, is_causal=False
    )
    close(output, exact(Call(query, key, key, None, 8**-0.5)), torch.float32)
    assert len(seen) == 2


def test_one_query_batch_for_all_rows():
    query, key = torch.randn(1, 4, 3, 8), torch.randn(2, 2, 9, 8)
    output, _ = attention.gpuarena_attention_forward(Attention(2), query, key, key, None, scaling=0.5)
    close(output, exact(Call(query.expand(2, -1, -1, -1), key, key, None, 0.5)), torch.float32)


def test_a_prompt_with_a_mask_copies_no_keys():
    query, key, value = torch.randn(1, 12, 64, 64), *torch.randn(2, 1, 2, 2048, 64)
    mask = mask_of("causal", 1, 12, 64, 2048, torch.float32)
    peaks = []
    for function in (attention.gpuarena_attention_forward, attention.sdpa_attention_forward):
        with torch.inference_mode(), AllocationMeter() as meter:
            function(Attention(6), query, key, value, mask)
        peaks.append(meter.peak_nbytes)
    assert peaks[0] < key.nbytes  # the output, and what the kernel keeps of the softmax
    assert peaks[1] > 2 * 6 * key.nbytes  # keys and values for each query head


@pytest.mark.parametrize("n", [3, 33])
def test_gradients_in_evaluation_are_those_of_stock_sdpa(n):
    query, key, value = (
        torch.randn(shape, requires_grad=True) for shape in ((2, 12, n, 8), (2, 2, 40, 8), (2, 2, 40, 8))
    )
    mask = mask_of("causal", 2, 12, n, 40, torch.float32)
    found = []
    for function in (attention.gpuarena_attention_forward, attention.sdpa_attention_forward):
        output, _ = function(Attention(6), query, key, value, mask)
        found.append(torch.autograd.grad(output.square().sum(), (query, key, value)))
    for ours, stock in zip(*found, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------ soft caps and sinks


@settings(deadline=None, max_examples=150)
@given(
    calls(dtypes=(torch.float32, torch.bfloat16, torch.float16)),
    st.sampled_from([None, 0.3, 50.0]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 3, 1024]),
    st.sampled_from([1, 200, 2**22]),
)
def test_scores_by_parts_are_the_formula(call, softcap, with_sinks, is_causal, keys_at_once, scores_at_once):
    if is_causal and call.mask is not None:
        call.mask[..., 0] = (
            True if call.mask.dtype == torch.bool else 0.0
        )  # the first query sees the first key
    call.is_causal = is_causal
    sinks = torch.randn(call.query.shape[1]).to(call.query.dtype) if with_sinks else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_scores, "_KEYS_AT_ONCE", keys_at_once)
        patch.setattr(_scores, "_SCORES_AT_ONCE", scores_at_once)
        output = _scores.attend_by_scores(
            *call.tensors, call.mask, scale=call.scale, softcap=softcap, sinks=sinks, is_causal=is_causal
        )
    assert output.is_contiguous()
    close(output, exact(call, softcap=softcap, sinks=sinks), call.query.dtype)


def gemma(group=2):
    config = gemma2.Gemma2Config(
        hidden_size=16, num_attention_heads=2 * group, num_key_value_heads=2, head_dim=8
    )
    return gemma2.Gemma2Attention(config, layer_idx=0).eval(), gemma2.eager_attention_forward


def oss(group=2, dtype=torch.float32):
    config = gpt_oss.GptOssConfig(
        hidden_size=16, num_attention_heads=2 * group, num_key_value_heads=2, head_dim=8
    )
    module = gpt_oss.GptOssAttention(config, layer_idx=0).eval()
    module.sinks = torch.nn.Parameter(torch.randn(2 * group).to(dtype), requires_grad=False)
    return module, gpt_oss.eager_attention_forward


def case(n=3, n_keys=40, dtype=torch.float32, kind="left padding"):
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, n, 8).to(dtype), torch.randn(2, 2, n_keys, 8).to(dtype)
    value = torch.randn(2, 2, n_keys, 8).to(dtype)
    return Call(query, key, value, mask_of(kind, 2, 4, n, n_keys, dtype), 0.5)


def added(mask, dtype):
    return (
        None
        if mask is None
        else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    )


def needs(name, dtype=torch.float32):
    if name == "soft cap":
        return *gemma(), {"softcap": 2.0}
    module, eager = oss(dtype=dtype)
    return module, eager, {"s_aux": module.sinks}


@pytest.mark.parametrize("name", ["soft cap", "sinks"])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("kind", ["none", "left padding"])
def test_float32_is_the_models_own_eager_function(name, n, kind):
    module, eager, extra = needs(name)
    call = case(n=n, kind=kind)
    expected, _ = eager(module, *call.tensors, added(call.mask, torch.float32), scaling=0.5, **extra)
    output, weights = attention.gpuarena_attention_forward(
        module, *call.tensors, call.mask, scaling=0.5, is_causal=False, **extra
    )
    assert weights is None
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["soft cap", "sinks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_no_less_exact_than_the_models_own_eager_function(name, dtype):
    module, eager, extra = needs(name, dtype)
    call = case(n=7, n_keys=300, dtype=dtype)
    expected = exact(call, softcap=extra.get("softcap"), sinks=extra.get("s_aux"))
    own, _ = eager(module, *call.tensors, added(call.mask, dtype), scaling=0.5, **extra)
    ours, _ = attention.gpuarena_attention_forward(module, *call.tensors, call.mask, scaling=0.5, **extra)
    errors = [(output.double() - expected).abs() for output in (ours, own)]
    assert errors[0].max() <= errors[1].max()
    assert errors[0].mean() < 0.7 * errors[1].mean()


def test_a_query_that_sees_nothing_gives_zeros_with_a_sink_and_the_mean_without():
    call = case(n=2, n_keys=6, kind="causal")
    call.mask[0, :, 0] = False
    module, _, extra = needs("sinks")
    output, _ = attention.gpuarena_attention_forward(module, *call.tensors, call.mask, scaling=0.5, **extra)
    assert torch.equal(output[0, 0], torch.zeros(4, 8))
    module, _, extra = needs("soft cap")
    output, _ = attention.gpuarena_attention_forward(module, *call.tensors, call.mask, scaling=0.5, **extra)
    mean = call.value[0].mean(dim=1).repeat_interleave(2, dim=0)
    torch.testing.assert_close(output[0, 0], mean, rtol=0, atol=1e-5)


def test_scores_of_any_size_do_not_overflow():
    call = case(dtype=torch.float16)
    call.query, call.key = call.query * 100, call.key * 100
    module, _, extra = needs("sinks", torch.float16)
    output, _ = attention.gpuarena_attention_forward(module, *call.tensors, call.mask, scaling=0.5, **extra)
    close(output, exact(call, sinks=module.sinks), torch.float16)


def configured(module):
    module.config.output_attentions = True
    return {}


OWN = {
    "training": lambda module: module.train() and {},
    "dropout": lambda module: {"dropout": 0.5},
    "output_attentions": lambda module: {"output_attentions": True},
    "output_attentions of the configuration": configured,
    "position_bias": lambda module: {"position_bias": torch.zeros(1, 4, 3, 40)},
    "another device type": lambda module: {},
    "sinks of another shape": lambda module: {"s_aux": torch.zeros(1, 4)},
    "both": lambda module: {"softcap": 2.0, "s_aux": torch.zeros(4)},
    "sinks from hidden states": lambda module: {"s_aux": None, "sinks": torch.zeros(2, 4, 3, 1)},
}


@pytest.mark.parametrize("change", OWN)
def test_the_models_own_eager_function_gets_the_rest(monkeypatch, change):
    module, _ = oss()
    seen = []

    def own(module, query, key, value, mask, **kwargs):
        seen.append((mask, kwargs))
        return "output", "weights"

    monkeypatch.setattr(gpt_oss, "eager_attention_forward", own)
    if change == "another device type":
        monkeypatch.setattr(attention, "FOLD_DEVICE_TYPES", set())
    call = case()
    extra = {"s_aux": module.sinks} | OWN[change](module)
    result = attention.gpuarena_attention_forward(module, *call.tensors, call.mask, scaling=0.5, **extra)
    assert result == ("output", "weights")
    [(mask, kwargs)] = seen
    assert torch.equal(mask, added(call.mask, torch.float32))
    assert kwargs == {"dropout": 0.0, "scaling": 0.5, **extra}


def test_heads_that_share_no_keys_are_left_to_the_models_own_eager_function(monkeypatch):
    module, _ = gemma(group=1)
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8)
    monkeypatch.setattr(gemma2, "eager_attention_forward", lambda *args, **kwargs: ("output", "weights"))
    found = attention.gpuarena_attention_forward(module, query, key, key, None, scaling=0.5, softcap=2.0)
    assert found == ("output", "weights")


@pytest.mark.parametrize("name", ["soft cap", "sinks"])
def test_gradients_of_scores_are_those_of_the_models_own_eager_function(monkeypatch, name):
    monkeypatch.setattr(_scores, "_KEYS_AT_ONCE", 16)
    module, eager, extra = needs(name)
    call = case(n=5)
    inputs = [tensor.requires_grad_() for tensor in call.tensors]
    inputs += [module.sinks.requires_grad_()] if name == "sinks" else []
    own, _ = eager(module, *call.tensors, added(call.mask, torch.float32), scaling=0.5, **extra)
    ours, _ = attention.gpuarena_attention_forward(module, *call.tensors, call.mask, scaling=0.5, **extra)
    for one, other in zip(
        torch.autograd.grad(ours.square().sum(), inputs),
        torch.autograd.grad(own.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["soft cap", "sinks"])
def test_a_long_prompt_holds_the_scores_of_a_block_of_queries(monkeypatch, name):
    monkeypatch.setattr(_scores, "_SCORES_AT_ONCE", 2**14)
    module, eager, extra = needs(name)
    query, key = torch.randn(1, 4, 512, 8), torch.randn(1, 2, 512, 8)
    peaks = []
    for function in (attention.gpuarena_attention_forward, eager):
        with torch.inference_mode(), AllocationMeter() as meter:
            function(module, query, key, key, None, scaling=0.5, **extra)
        peaks.append(meter.peak_nbytes)
    scores_nbytes = 4 * 512 * 512 * 4
    assert peaks[1] > scores_nbytes
    assert peaks[0] < scores_nbytes / 4


def test_a_static_cache_under_a_causal_prompt_is_not_seen_beyond_it():
    module, _, extra = needs("sinks")
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    key[:, :, 3:], value[:, :, 3:] = 1e3, 1e3
    output, _ = attention.gpuarena_attention_forward(module, query, key, value, None, scaling=0.5, **extra)
    expected = exact(Call(query, key, value, None, 0.5, is_causal=True), sinks=module.sinks)
    close(output, expected, torch.float32)


# ---------------------------------------------------------------------------------------------- whole models

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "sliding_window": 8,
}
GEMMA2 = {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "qwen2": (transformers.Qwen2Config, {}, "sdpa"),
    "gemma2": (gemma2.Gemma2Config, GEMMA2, "eager"),
    "gpt-oss": (gpt_oss.GptOssConfig, GPT_OSS, "eager"),
}


def model(name, implementation):
    config, changes, _ = MODELS[name]
    torch.manual_seed(0)
    found = transformers.AutoModelForCausalLM.from_config(
        config(**COMMON, **changes), attn_implementation=implementation
    )
    for parameter_name, parameter in found.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, mean=1.0)
    return found.eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_in_chunks_and_a_verification_give_the_logits_of_the_models_own_attention(name):
    from gpuarena_transformers import ArenaCache

    torch.manual_seed(1)
    ids = torch.randint(3, 64, (2, 30))
    seen = torch.ones_like(ids)
    seen[1, :4] = 0
    logits = []
    for implementation in (MODELS[name][2], "gpuarena"):
        one = model(name, implementation)
        cache = ArenaCache(one.config, max_batch_size=2, max_context_length=40)
        parts, at = [], 0
        with torch.no_grad():
            for n in (12, 5, 1, 4, 8):  # chunks of a prompt, a step, drafts to verify
                part = one(
                    ids[:, at : at + n],
                    attention_mask=seen[:, : at + n],
                    use_cache=True,
                    **{cache_argument(): cache},
                )
                parts.append(part.logits)
                at += n
        logits.append(torch.cat(parts, dim=1)[seen.bool()])
    assert logits[0].std() > 0.1
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_attentions_can_still_be_asked_for(name):
    ids = torch.randint(3, 64, (1, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own, ours = (
            model(name, implementation)(ids, output_attentions=True, use_cache=False).attentions
            for implementation in ("eager", "gpuarena")
        )
    for one, other in zip(own, ours, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
