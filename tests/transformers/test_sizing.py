"""What `ArenaCache.for_model` sizes a cache by: the layout of each layer, what a prompt needs, what is free."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
import gpuarena_transformers.cache as cache_module  # noqa: E402
from families import CACHE  # noqa: E402
from gpuarena_transformers import ArenaCache, ArenaEncoderDecoderCache, ArenaStaticCache  # noqa: E402
from gpuarena_transformers.budget import Plan, most_tokens_in, reserved_nbytes  # noqa: E402
from gpuarena_transformers.from_config import size_of_config  # noqa: E402
from gpuarena_transformers.layout import LayerLayout, ModelLayout, measure_layout  # noqa: E402
from gpuarena_transformers.prefill import PrefillCost, measure_prefill  # noqa: E402
from gpuarena_transformers.sizing import _container_nbytes, free_nbytes  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

from gpuarena import Arena, OutOfMemoryError  # noqa: E402
from gpuarena.errors import ArgumentError, ArgumentTypeError  # noqa: E402
from gpuarena.kv import KVSpec, LayerSpec  # noqa: E402

CPU = torch.device("cpu")
#: name -> kinds of the layers, bytes a token, bytes of states a sequence, in float32; counted by hand.
LAYOUTS = {
    "llama": (["full"] * 2, 2 * 2 * 2 * 16 * 4, 0),
    "mistral": (["window"] * 2, 2 * 2 * 2 * 16 * 4, 0),
    "gemma3": (["window", "window", "full"], 3 * 2 * 2 * 16 * 4, 0),
    "deepseek-v3": (["full"] * 2, 2 * (16 + 8) * 4, 0),  # one head of the latent, and the part with positions
    "gemma4": (["window", "full"] * 2, 2 * 2 * 2 * (16 + 32) * 4, 0),
    "gemma4-shared": (["window", "full", "shared", "shared"], 2 * (2 * 16 + 32) * 4, 0),
    "lfm2": (["recurrent", "full"], 2 * 2 * 16 * 4, 64 * 3 * 4),
    # Convolution: 4 x 32 + 2 x 8 channels of 4 tokens; recurrence: 4 heads x 32 x 8.
    "bamba": (["recurrent", "full", "recurrent"], 2 * 2 * 16 * 4, 2 * ((128 + 16) * 4 + 4 * 32 * 8) * 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_of_a_model(name):
    kinds, per_token, state_nbytes = LAYOUTS[name]
    layout = measure_layout(families.model(name))
    assert [layer.kind for layer in layout.layers] == kinds
    assert (layout.bytes_per_token, layout.state_nbytes) == (per_token, state_nbytes)
    assert layout.nbytes(3, 10) == 3 * (10 * per_token + state_nbytes)
    assert all(layer.is_empty == (layer.kind in ("shared", "empty")) for layer in layout.layers)


FROM_CONFIG = [
    "llama",
    "mistral",
    "gemma2",
    "gpt-oss",
    "deepseek-v3",
    "gpt2",
    "gemma4-shared",
    "lfm2",
    "bamba",
]


@pytest.mark.parametrize("name", FROM_CONFIG)
def test_a_config_tells_what_the_model_does(name):
    """The layout from the meta device against the tensors that a real model leaves in a `DynamicCache`."""
    model, found = families.model(name), size_of_config(families.config(name), torch.float32)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]]), **{CACHE: cache})
    for layer, known in zip(cache.layers, found.layout.layers, strict=False):
        tensors = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        held = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        assert held == known.bytes_per_token
        for states in (getattr(layer, "conv_states", None), getattr(layer, "recurrent_states", None)):
            held += sum(state.nbytes for state in (states or {}).values() if state is not None)
        assert held == known.bytes_per_token + known.state_nbytes
    assert found.n_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.weights_nbytes == 4 * found.n_parameters


def test_what_multi_query_attention_really_caches():
    """Its config names a head for each query, and the cache holds one."""
    arguments = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    mqa = transformers.FalconConfig(
        **arguments, multi_query=True, new_decoder_architecture=False, alibi=False
    )
    before = mqa.to_dict()
    assert size_of_config(mqa, torch.bfloat16).layout.bytes_per_token == 2 * 2 * 16 * 2
    assert mqa.to_dict() == before  # it once got another dtype


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transformers.T5Config(), "is an encoder-decoder"),
        (
            lambda: transformers.RecurrentGemmaConfig(
                vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16, lru_width=64,
            ),
            "layer 0 ",
        ),
        (lambda: transformers.ViTConfig(num_hidden_layers=1), "no language model can be built of it"),
    ],
    ids=["encoder-decoder", "states of its own", "no language model"],
)  # fmt: skip
def test_configs_that_cannot_be_sized(make, message):
    with pytest.raises(ArgumentError, match=message):
        size_of_config(make(), torch.bfloat16)


# --------------------------------------------------------------------------------------------------------- what prompts need


class Linear(torch.nn.Module):
    """A model whose forward needs known bytes: 100 floats a token kept, and then n x n of them for a moment."""

    device = CPU
    config = None

    def __init__(self, n_square=1):
        super().__init__()
        self.n_square = n_square

    def forward(self, input_ids, use_cache=None, attention_mask=None, **kwargs):
        n = input_ids.shape[1]
        kept = torch.ones(n, 100)
        for _ in range(self.n_square):
            square = torch.ones(n, n)
            del square
        return kept.sum()


class NoCache:
    arenas = ()


@pytest.mark.parametrize("n_square", [0, 1])
def test_each_operation_has_a_polynomial_of_its_own(n_square):
    """In a short prompt the square is hidden behind what is linear, and far larger in a long one."""
    (cost,) = measure_prefill(
        Linear(n_square), lambda n: NoCache(), rows=1, longest=None, devices=[CPU]
    ).values()
    for n in (16, 1000, 10_000):
        ids_nbytes = 0  # were there before
        expected = 400 * n + (4 * n * n if n_square else 0) + ids_nbytes
        assert expected <= cost.nbytes(n) <= expected + 64
    assert cost.is_aligned


def test_operations_that_change_with_the_length_leave_the_peaks():
    class Chunks(Linear):
        def forward(self, input_ids, **kwargs):
            for _ in range(input_ids.shape[1] // 32):
                torch.ones(10)
            return torch.ones(input_ids.shape[1], 25)

    (cost,) = measure_prefill(Chunks(), lambda n: NoCache(), rows=1, longest=None, devices=[CPU]).values()
    assert not cost.is_aligned
    assert 100 * 5000 <= cost.nbytes(5000) <= 100 * 5000 + 4096


@pytest.mark.parametrize(
    ("name", "attention", "rows"),
    [("llama", "sdpa", 1), ("llama", "eager", 2), ("mistral", "sdpa", 1), ("deepseek-v3", "gpuarena", 2)],
)
def test_a_prompt_needs_what_was_foretold(name, attention, rows):
    """Foretold from 16 to 64 tokens, and counted by torch's profiler for 240."""
    model = families.model(name, attention)

    def make(n_tokens):
        return ArenaCache.for_model(model, n_tokens, max_batch_size=rows)

    windows = [families.WINDOW] if name == "mistral" else []
    costs = measure_prefill(model, make, rows=rows, longest=64, devices=[CPU], windows=windows)
    n_tokens = 240
    cache = make(n_tokens)
    ids = torch.ones((rows, n_tokens), dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    arguments = {"input_ids": ids, CACHE: cache, "logits_to_keep": 1}
    if rows > 1:
        arguments["attention_mask"] = mask
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        model(**arguments)
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    foretold = costs[CPU].nbytes(n_tokens)
    # What kernels take for themselves is not seen on a CPU; short-lived inputs are counted to the end of an operation.
    assert 0.9 * peak <= foretold <= 1.7 * peak


def test_the_cache_itself_is_not_a_part_of_what_a_prompt_needs():
    """It once was: the arena was counted as a tensor that the forward had made."""
    model = families.model("llama")
    costs = []
    for capacity in (64, 256):
        made = []

        def make(n_tokens, capacity=capacity, made=made):
            made.append(ArenaCache.for_model(model, capacity))
            return made[-1]

        found = measure_prefill(model, make, rows=1, longest=64, devices=[CPU])
        costs.append(found[CPU].nbytes(64))
    assert 0 <= costs[1] - costs[0] <= 16 * (256 - 64)  # an index of tokens, and no keys


# ------------------------------------------------------------------------------------------------------------- what fits


def with_free(monkeypatch, nbytes):
    monkeypatch.setattr(cache_module, "free_nbytes", lambda device: nbytes)


@pytest.mark.parametrize(("free", "rows"), [(400_000, 1), (1_000_000, 3)])
def test_auto_leaves_room_for_the_prompt(monkeypatch, free, rows):
    model = families.model("llama")
    with_free(monkeypatch, free)
    bare = ArenaCache.for_model(model, max_batch_size=rows, measure_prefill=False)
    cache = ArenaCache.for_model(model, max_batch_size=rows)
    assert 1 <= cache.max_context_length < bare.max_context_length <= 256
    (one,) = cache.sizing.devices
    assert one.nbytes <= 0.9 * free
    assert one.prefill_nbytes > 0
    assert (
        cache.arena.capacity
        <= one.arena_nbytes
        == reserved_nbytes(
            KVSpec([layer.spec for layer in cache.sizing.layout.layers]), [], rows, cache.max_context_length
        )
    )
    assert (cache.sizing.n_tokens, cache.sizing.rows) == (cache.max_context_length, rows)
    short = ArenaCache.for_model(model, max_batch_size=rows, max_prompt_length=4)
    assert cache.max_context_length < short.max_context_length
    assert short.sizing.prefill_tokens == 4


def test_auto_counts_states(monkeypatch):
    model = families.model("bamba")
    layout = measure_layout(model)
    with_free(monkeypatch, layout.state_nbytes + 100 * layout.bytes_per_token)
    cache = ArenaCache.for_model(model, memory_fraction=1.0, measure_prefill=False)
    assert 90 <= cache.max_context_length <= 100
    assert cache.sizing.devices[0].state_nbytes == layout.state_nbytes


def test_what_is_not_free_cannot_be_had(monkeypatch):
    model = families.model("llama")
    with_free(monkeypatch, 100_000)
    with pytest.raises(OutOfMemoryError, match=r"256 tokens x 1 rows need .* 195 tokens fit") as caught:
        ArenaCache.for_model(model, 256)
    error = caught.value
    assert (error.available, error.missing) == (100_000, error.requested - 100_000)
    assert error.requested == 256 * 512
    with pytest.raises(OutOfMemoryError, match="of them for the prompt"):
        ArenaCache.for_model(model, 190, measure_prefill=True)
    assert ArenaCache.for_model(model, 190).max_context_length == 190


def test_bad_arguments():
    model = families.model("llama")
    for wrong in (0, -1):
        with pytest.raises(ArgumentError, match="max_prompt_length"):
            ArenaCache.for_model(model, 8, max_prompt_length=wrong)
        with pytest.raises(ArgumentError, match="max_context_length"):
            ArenaCache.for_model(model, wrong)


def test_the_report_is_a_table():
    cache = ArenaCache.for_model(families.model("llama"), 64, max_batch_size=2, measure_prefill=True)
    text = str(cache.sizing)
    assert "64 tokens x 2 rows: as asked; 512 bytes a token" in text
    assert "prefill: of one prompt of 64 tokens a row" in text
    assert text.splitlines()[1].split() == [
        "MB", "on", "layers", "keys+values", "states", "scratch", "beside", "prefill", "sum", "free",
    ]  # fmt: skip
    assert ArenaCache(families.config("llama"), 1, 8).sizing is None


def plan(free, *, layers=4, split=2, rows=1, unknown=()):
    """Return a plan of layers of 64 bytes a token, the first `split` of them on the CPU."""
    spec = LayerSpec(1, 8, 8, "float32")
    devices = [CPU if index < split else torch.device("meta") for index in range(layers)]
    layout = ModelLayout(
        "two devices",
        tuple(LayerLayout(index, "full", spec, device) for index, device in enumerate(devices)),
        "made up",
    )

    def ask(device):
        if device in unknown:
            raise ArgumentError(f"free memory on {device} is unknown")
        return free[device.type]

    return Plan(layout, range(layers), rows, ask)


def test_the_device_that_is_full_first_decides():
    found = plan({"cpu": 64_000, "meta": 30_000})
    n_tokens, limit = found.most_tokens(1.0, None)
    assert n_tokens == 30_000 // 2 // 256 * 256 // 64  # each layer is aligned
    assert "on meta" in limit
    assert (
        plan({"cpu": 64_000, "meta": 30_000}, split=3).most_tokens(1.0, None)[0]
        == 64_000 // 3 // 256 * 256 // 64
    )
    assert found.most_tokens(1.0, 50) == (50, "the model's maximum")
    budgets = {one.device.type: one for one in found.sizing(100, "").devices}
    assert {kind: one.kv_nbytes for kind, one in budgets.items()} == {"cpu": 12800, "meta": 12800}
    found.prefill = {CPU: PrefillCost((0,), (1000,), (0,), 8)}
    assert found.most_tokens(1.0, None)[0] < 64_000 // (1000 + 2 * 64) + 1
    assert "on cpu" in found.most_tokens(1.0, None)[1]


def test_a_device_that_does_not_tell_what_is_free():
    found = plan({"cpu": 64_000}, unknown=[torch.device("meta")])
    with pytest.raises(ArgumentError, match="free memory on meta is unknown"):
        found.most_tokens(1.0, None)
    found.check(500)  # of what is known
    with pytest.raises(OutOfMemoryError, match=r"501 tokens x 1 rows need .* on cpu"):
        found.check(501)


def test_layers_outside_of_the_arena_are_counted_all_the_same():
    found = plan({"cpu": 64_000, "meta": 64_000})
    outside = Plan(found.layout, [2, 3], 1, lambda device: 64_000)
    assert outside.sizing(100, "").devices[0].beside_nbytes == 2 * 64 * 100
    assert outside.most_tokens(1.0, None)[0] == found.most_tokens(1.0, None)[0]
    assert set(outside.specs) == {torch.device("meta")}


@pytest.mark.parametrize("rows", [1, 4])
def test_most_tokens_in_is_the_inverse_of_what_is_reserved(rows):
    kv = KVSpec([LayerSpec(2, 16, 16, "bfloat16"), LayerSpec(1, 32, 8, "float32")])
    for nbytes in (1, 5000, 123_456):
        n = most_tokens_in(nbytes, kv, [640, 100], rows)
        assert n == 0 or reserved_nbytes(kv, [640, 100], rows, n) <= nbytes
        assert reserved_nbytes(kv, [640, 100], rows, n + 1) > nbytes
    assert most_tokens_in(-5, kv, [], 1) == 0
    assert most_tokens_in(10_000, None, [640], 1) is None


def test_the_limit_of_a_container(tmp_path):
    assert _container_nbytes(str(tmp_path)) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("500\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 150\n")
    assert _container_nbytes(str(tmp_path)) is None
    (tmp_path / "memory.max").write_text("2000\n")
    assert _container_nbytes(str(tmp_path)) == 2000 - 500 + 150
    assert free_nbytes(CPU) > 0


def test_a_plan_is_of_plain_values():
    layer = LayerLayout(0, "full", None, CPU)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.kind = "window"


def test_models_of_other_modes_are_measured_alike():
    """Dropout would change nothing of the sizes, and a model in training keeps its mode."""
    model = AutoModelForCausalLM.from_config(families.config("llama")).train()
    assert measure_layout(model).bytes_per_token == 512
    assert model.training


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma4", "lfm2"])
def test_caches_share_an_arena_of_what_they_take(name, rows):
    model = families.model(name)
    nbytes = ArenaCache.arena_nbytes(model.config, rows, 20, dtype=torch.float32)
    arena = Arena(2 * nbytes, backend="torch", device="cpu")
    caches = [ArenaCache(model.config, rows, 20, arena=arena) for _ in range(2)]
    prompt = families.prompt()["input_ids"][:1].expand(rows, -1)
    with torch.no_grad():
        for cache in caches:
            model(input_ids=prompt, **{CACHE: cache})
            cache.reorder_cache(torch.arange(rows))
            assert cache.arenas == [arena]
    assert 0.9 * 2 * nbytes < arena.stats.top <= 2 * nbytes
    if rows == 1 and name != "gemma4":  # nothing to spare; of layers that differ, a later one finds it out
        with pytest.raises(OutOfMemoryError), torch.no_grad():
            model(
                input_ids=prompt,
                **{CACHE: ArenaCache(model.config, 1, 20, arena=Arena(nbytes - 256, backend="torch"))},
            )


def test_a_config_is_no_model():
    config = families.config("llama")
    for cache_class in (ArenaCache, ArenaStaticCache, ArenaEncoderDecoderCache):
        name = cache_class.__name__
        with pytest.raises(
            ArgumentTypeError, match=rf"not its config, a LlamaConfig; {name}\(config\) is made"
        ):
            cache_class.for_model(config)
    with pytest.raises(ArgumentTypeError, match="takes a model of transformers, not str"):
        ArenaCache.for_model("llama")
    with pytest.raises(ArgumentTypeError, match="config must be that of a model"):
        ArenaCache.arena_nbytes(None, 1, 20)
