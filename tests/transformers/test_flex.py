"""`attn_implementation="flex_attention"` on a CPU, by the logits of the same weights without a cache and without flex.

Capacities of 32 slots, and fewer than 24 tokens: with torch 2.13 on a CPU compiled flex attention is wrong for one
query on exactly 24 keys, with any cache.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, TOLERANCE  # noqa: E402
from gpuarena_transformers import ArenaCache, ArenaStaticCache  # noqa: E402
from torch._inductor.exc import InvalidCxxCompiler  # noqa: E402

CAPACITY, N_PROMPT, N_STEPS = 32, 9, 3

pytestmark = [
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # of torch's own, as it compiles
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def text(is_padded):
    """Return ids and mask ``[2, tokens]``."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 128, (2, N_PROMPT + N_STEPS), generator=generator)
    mask = torch.ones_like(ids)
    if is_padded:
        mask[0, :4] = 0
    return ids, mask


def positions_of(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


def expected(name, is_padded):
    """Return the logits of all tokens, from one forward without any cache, with the model's ordinary attention."""
    ids, mask = text(is_padded)
    with torch.no_grad():
        model = families.model(name)
        return model(
            input_ids=ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=False
        ).logits


def assert_right(name, cache_class, is_padded):
    """A prompt and single tokens behind it, twice on one cache: logits of all that is no padding."""
    (ids, mask), model = text(is_padded), families.model(name, "flex_attention")
    assert model.config._attn_implementation == "flex_attention"
    cache = cache_class(model.config, 2, CAPACITY)
    for _ in range(2):
        found = []
        stops = [N_PROMPT, *range(N_PROMPT + 1, N_PROMPT + N_STEPS + 1)]
        for start, stop in zip([0, *stops], stops, strict=False):
            arguments = {
                "input_ids": ids[:, start:stop],
                "attention_mask": mask[:, :stop],
                "position_ids": positions_of(mask)[:, start:stop],
            }
            with torch.no_grad():
                found.append(model(**arguments, **{CACHE: cache}).logits)
        differences = (torch.cat(found, dim=1) - expected(name, is_padded)).abs().amax(-1) * mask
        assert differences.max() < TOLERANCE, f"logits are off: {differences.amax(0)}"
        assert cache.stats.n_tokens == N_PROMPT + N_STEPS
        cache.reset()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("is_padded", [False, True], ids=["", "left padding"])
@pytest.mark.parametrize("cache_class", [ArenaCache, ArenaStaticCache])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_masks_and_lengths(name, cache_class, is_padded):
    """Nothing is compiled here, so that there is time for many masks."""
    with torch.compiler.set_stance("force_eager"):
        assert_right(name, cache_class, is_padded)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache_class", [ArenaStaticCache, pytest.param(ArenaCache, marks=pytest.mark.nightly)]
)
def test_compiled_kernels(cache_class):
    try:
        assert_right("llama", cache_class, is_padded=False)
    except InvalidCxxCompiler as error:
        pytest.skip(f"inductor finds no C++ compiler: {error}")
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, InvalidCxxCompiler):
            raise
        pytest.skip(f"inductor finds no C++ compiler: {error}")
