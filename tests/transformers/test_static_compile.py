"""`ArenaStaticCache` under `torch.compile`: one graph, the same logits, and a host that knows the length.

Most tests trace with Dynamo and run the graph as it is, which is what decides about graph breaks and recompilation.
"""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, MODES, N_TOKENS, TOLERANCE, assert_same, generate  # noqa: E402
from gpuarena_transformers import ArenaCache, ArenaStaticCache  # noqa: E402
from gpuarena_transformers.static_layers import Slots  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from transformers import CompileConfig  # noqa: E402

from gpuarena.errors import CapacityError, ShapeError  # noqa: E402

N_PROMPT, N_STEPS = 9, 64
CAPACITY = N_PROMPT + N_STEPS + 7


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def n_reads(monkeypatch):
    """How often a length was read from the device, where a GPU would be waited for."""
    reads = []
    read = Slots._read_length
    monkeypatch.setattr(Slots, "_read_length", lambda layer: reads.append(layer) or read(layer))
    return lambda: len(reads)


@functools.cache
def text(n_rows=2):
    """Return the prompt and what follows, ``[rows, tokens]``."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, 128, (n_rows, N_PROMPT + N_STEPS), generator=generator)


@functools.cache
def expected(name):
    """Return the logits of all tokens, from one forward without any cache."""
    with torch.no_grad():
        return families.model(name)(input_ids=text(), use_cache=False).logits


def compiled(name, backend="eager", **options):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(
        families.model(name).forward, backend=counter, **{"fullgraph": True} | options
    ), counter


def read_prompt(name, cache):
    with torch.no_grad():
        families.model(name)(input_ids=text()[:, :N_PROMPT], **{CACHE: cache})


def decode(forward, name, cache, n_steps=N_STEPS, start=N_PROMPT, before=lambda: None):
    """Run compiled steps of one token, and compare each with the whole text read at once."""
    with torch.no_grad():
        for position in range(start, start + n_steps):
            before()
            logits = forward(input_ids=text()[:, position : position + 1], **{CACHE: cache}).logits
            off = (logits[:, 0] - expected(name)[:, position]).abs().max().item()
            assert off < TOLERANCE, f"logits of token {position} are off by {off}"


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma3", "gpt-oss"),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("mistral", "deepseek-v3")),
    ],
)
def test_one_graph_for_all_steps(name, n_reads):
    cache = ArenaStaticCache(families.model(name).config, 2, CAPACITY)
    read_prompt(name, cache)
    forward, counter = compiled(name)
    decode(forward, name, cache)
    assert counter.frame_count == 1
    assert n_reads() == 0
    assert cache.stats.n_tokens == N_PROMPT + N_STEPS  # after many steps nobody told it of
    assert n_reads() == len(cache.layers)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports when it is first used
def test_inductor(n_reads):
    cache = ArenaStaticCache(families.model("llama").config, 2, CAPACITY)
    read_prompt("llama", cache)
    where = [layer.keys.data_ptr() for layer in cache.layers]
    forward, counter = compiled("llama", "inductor")
    decode(forward, "llama", cache, before=cache.check_room)
    assert cache.stats.n_tokens == N_PROMPT + N_STEPS
    assert counter.frame_count == 1
    assert n_reads() == 0  # each step was told
    assert where == [layer.keys.data_ptr() for layer in cache.layers]


@pytest.mark.nightly  # four graphs: twenty seconds; test_static.py has the buckets without a compiler
def test_a_graph_for_each_bucket(n_reads):
    name = "gemma3"  # with and without windows
    cache = ArenaStaticCache(families.model(name).config, 2, CAPACITY, bucket=16)
    read_prompt(name, cache)
    forward, counter = compiled(name)
    decode(forward, name, cache, before=cache.check_room)
    assert counter.frame_count == 4  # 16, 32, 64 and all 80
    assert n_reads() == 0
    cache.truncate(30)
    assert cache.n_slots == 32
    decode(forward, name, cache, n_steps=5, start=30, before=cache.check_room)
    assert counter.frame_count == 4
    with cache.scope():
        cache.check_room(38)  # once for all of them
        decode(forward, name, cache, n_steps=38, start=35)
        assert cache.n_slots == 80
    assert (cache.stats.n_tokens, cache.n_slots) == (35, 64)
    decode(forward, name, cache, n_steps=2, start=35, before=cache.check_room)
    assert counter.frame_count == 4


def test_a_prompt_may_be_compiled_as_well():
    model = families.model("mistral")
    cache = ArenaStaticCache.for_model(model, CAPACITY, max_batch_size=2)
    forward, counter = compiled("mistral")
    with torch.no_grad():
        logits = forward(input_ids=text()[:, :N_PROMPT], **{CACHE: cache}).logits
    assert (logits - expected("mistral")[:, :N_PROMPT]).abs().max() < TOLERANCE
    assert cache.stats.n_tokens == N_PROMPT
    assert cache.is_initialized
    decode(forward, "mistral", cache, n_steps=3)
    assert counter.frame_count == 2


def test_room_is_checked_before_a_compiled_step():
    cache = ArenaStaticCache(families.model("llama").config, 2, N_PROMPT + 2)
    read_prompt("llama", cache)
    forward, _ = compiled("llama")
    with pytest.raises(CapacityError):
        decode(forward, "llama", cache, before=cache.check_room)
    assert cache.stats.n_tokens == N_PROMPT + 2
    cache.crop(-1)
    decode(forward, "llama", cache, n_steps=1, start=N_PROMPT + 1, before=cache.check_room)


@pytest.mark.nightly
def test_other_rows_are_refused_and_taken_after_a_reset():
    cache = ArenaStaticCache(families.model("llama").config, 2, CAPACITY)
    read_prompt("llama", cache)
    forward, _ = compiled("llama", fullgraph=False)
    decode(forward, "llama", cache, n_steps=1)
    with torch.no_grad(), pytest.raises(ShapeError, match="1 rows given, the cache holds 2"):
        forward(input_ids=text()[:1, :1], **{CACHE: cache})
    assert cache.stats.n_tokens == N_PROMPT + 1
    cache.reset()
    with torch.no_grad():
        one = forward(input_ids=text()[:1, :N_PROMPT], **{CACHE: cache}).logits
    assert (one - expected("llama")[:1, :N_PROMPT]).abs().max() < TOLERANCE
    assert cache.stats.n_rows == 1


# ------------------------------------------------------------------------------------------------------------- generate


@pytest.fixture
def auto_compile(monkeypatch):
    """Let `generate` compile on a CPU too; returns its arguments and the counter of graphs."""
    counter = CompileCounterWithBackend("eager")
    config = CompileConfig(fullgraph=True, mode=None)
    config._compile_all_devices = True
    monkeypatch.setattr(config, "to_dict", lambda: {"fullgraph": True, "backend": counter})
    yield {"compile_config": config}, counter
    for name in ("llama", "mistral", "gemma3"):
        vars(families.model(name)).pop("_compiled_call", None)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("mistral", "left padding"), pytest.param("gemma3", "greedy", marks=pytest.mark.nightly)],
)
def test_generate_compiles_by_itself(name, mode, auto_compile, n_reads):
    compiling, counter = auto_compile
    cache = ArenaStaticCache(families.model(name).config, MODES[mode].rows, N_TOKENS, bucket=8)
    outputs = generate(families.model(name), MODES[mode].arguments(name) | compiling, cache)
    assert_same(outputs, families.reference(name, mode))
    assert 1 <= counter.frame_count <= 3  # 8, 16 and all
    assert n_reads() == 0


def test_generate_finds_a_full_cache_before_the_compiled_step(auto_compile):
    compiling, counter = auto_compile
    model = families.model("llama")
    cache = ArenaStaticCache(model.config, 2, N_PROMPT + 3)
    with pytest.raises(CapacityError):
        generate(model, families.prompt() | compiling, cache)
    assert counter.frame_count == 1
    assert cache.stats.n_tokens == N_PROMPT + 3
    assert not any(layer.keys.isnan().any() for layer in cache.layers)
    cache.reset()
    assert_same(
        generate(model, families.prompt() | compiling, cache, n_new=4),
        generate(model, families.prompt(), n_new=4),
    )
    assert counter.frame_count == 1


# -- the other cache ------------------------------------------------------------------------------------------------


@pytest.mark.nightly  # Dynamo traces each piece between two appends again: half a minute
def test_compiled_code_is_interrupted_where_a_growing_cache_appends():
    model, n_steps = families.model("llama"), 2
    step = torch.compile(model.forward, backend="eager")
    cache = ArenaCache(model.config, 2, CAPACITY)
    with torch.no_grad():
        logits = [step(input_ids=text()[:, :N_PROMPT], use_cache=True, **{CACHE: cache}).logits]
        for at in range(N_PROMPT, N_PROMPT + n_steps):
            logits.append(step(input_ids=text()[:, at : at + 1], use_cache=True, **{CACHE: cache}).logits)
    found = torch.cat(logits, dim=1)
    assert (found - expected("llama")[:, : found.shape[1]]).abs().max() < TOLERANCE
    assert cache.stats.n_tokens == N_PROMPT + n_steps


def test_a_whole_graph_over_a_growing_cache_is_refused_with_the_name_of_the_static_one():
    model = families.model("llama")
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported, match="ArenaStaticCache"):
        step(input_ids=text(), use_cache=True, **{CACHE: ArenaCache(model.config, 2, CAPACITY)})
