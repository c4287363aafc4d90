"""The decode benchmark, on a very small model: that it runs, checks itself, and says what it found and what not."""

import itertools
import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers  # noqa: E402 - after the skips
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

from gpuarena.bench import _caches, _compiled, _floor, _models, _steps, decode  # noqa: E402
from gpuarena.bench.device import Device, FakeGpu  # noqa: E402
from gpuarena.errors import ArgumentError  # noqa: E402

TINY = _models.TINY
LAYERS = 2


@pytest.fixture(scope="module")
def models():
    return _models.random_models(Device(), torch.float32, LAYERS, TINY)


@pytest.fixture(scope="module")
def gpu_models(models):
    """The same model, on the CPU in the place of a GPU."""
    return _models.Models("fake", models.by_attention, FakeGpu(), torch.float32)


def by_hand(n_tokens, itemsize=4):
    """Return the bytes of weights and of live keys and values of a step, from the shapes of Qwen2."""
    width, inner = 64, 128
    queries, held = 4 * 16, 2 * 16  # heads x head width
    a_layer = 2 * width  # two norms
    a_layer += (width + 1) * (queries + 2 * held) + queries * width  # q, k, v have a bias, o has none
    a_layer += 3 * width * inner  # gate, up, down
    weights = (
        256 * width + LAYERS * a_layer + width
    )  # embeddings that are the output projection too; last norm
    return weights * itemsize, LAYERS * 2 * held * n_tokens * itemsize


def test_every_variant_is_timed_at_every_length():
    seen = []
    result = decode.run(
        device="cpu",
        dtype="float32",
        lengths=[5, 60],
        layers=LAYERS,
        rounds=2,
        quick=True,
        on_group=seen.append,
    )
    json.dumps(result)
    assert result["groups"] == seen
    assert [one["n_tokens"] for one in seen] == [5, 60]
    for one in seen:
        assert list(one["rows"]) == list(decode.VARIANTS)
        assert one["not_measured"] == {}
        assert all(row["median_s"] > 0 for row in one["rows"].values())
        assert one["rows"][decode.OURS]["ratio"] == 1.0
        assert max(row["logits_difference"] for row in one["rows"].values()) < 1e-3
        # 3 steps are compared, 2 warm up, and the 2 that are timed attend to themselves as well
        weights, kv = by_hand(one["n_tokens"] + (6 + 7) / 2)
        assert (one["weights_nbytes"], one["kv_nbytes"]) == (weights, kv)
        assert one["floor_s"] == pytest.approx((weights + kv) / result["copy_nbytes_per_s"])
        for row in one["rows"].values():
            assert row["floor_ratio"] == pytest.approx(row["median_s"] / one["floor_s"])
    assert not any("peak_nbytes" in row for row in seen[0]["rows"].values())
    peaks = {name: row.get("peak_nbytes") for name, row in seen[1]["rows"].items()}
    assert peaks.pop("ideal + gpuarena") is None
    assert peaks["ArenaCache + sdpa"] < peaks["DynamicCache + sdpa"]


def test_a_table_that_is_not_the_output_projection_is_read_by_rows():
    config = transformers.Qwen2Config(**TINY, num_hidden_layers=LAYERS, tie_word_embeddings=False)
    model = transformers.Qwen2ForCausalLM(config)
    assert _floor.weights_nbytes(model, batch=3) == by_hand(0)[0] + 3 * 64 * 4


def test_layers_with_a_window_read_no_more_than_it(models):
    class Windows(_models.Models):
        config = transformers.Qwen2Config(**TINY, num_hidden_layers=2)

    Windows.config.layer_types, Windows.config.sliding_window = ["full_attention", "sliding_attention"], 10
    found = Windows("", models.by_attention, Device(), torch.float32)
    assert _floor.kv_nbytes(found, 3, 25) == 3 * 2 * 32 * (25 + 10) * 4
    assert _floor.kv_nbytes(found, 1, 7) == 2 * 32 * (7 + 7) * 4


def test_each_variant_runs_the_attention_in_its_name(models):
    for attention, model in models.by_attention.items():
        layers = model.model.layers
        assert {layer.self_attn.config._attn_implementation for layer in layers} == {attention}
    one, other = (model.state_dict() for model in models.by_attention.values())
    assert {name: tensor.data_ptr() for name, tensor in one.items()} == {
        name: tensor.data_ptr() for name, tensor in other.items()
    }


def test_each_step_takes_the_next_token_and_position(models):
    tokens = decode._tokens(models, 2, 6)
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(tokens))
    way = decode.VARIANTS["StaticCache (largest) + sdpa"]
    steps = _steps.Steps(models, way, 5, {"exact": 11, "largest": 13}, tokens)
    given = [steps.run(1), steps.run(3), steps.run(2)]
    assert (steps.n_done, int(steps.cache.get_seq_length())) == (6, 11)
    generator = torch.Generator().manual_seed(1)
    held = transformers.DynamicCache()
    for layer in range(LAYERS):
        held.update(*(torch.randn(2, 2, 5, 16, generator=generator) for _ in range(2)), layer)
    with torch.no_grad():
        wanted = models.by_attention["sdpa"](
            input_ids=torch.cat(tokens, dim=1), **{_steps.cache_argument(): held}
        ).logits
    for logits, last in zip(given, [0, 3, 5], strict=True):
        torch.testing.assert_close(logits[:, 0], wanted[:, last])


class Recorder(TorchDispatchMode):
    """Notes each operation, to do it again on the same tensors without the Python around it."""

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a capture cannot wait for the device"
        found = func(*args, **(kwargs or {}))
        # .data: tensors whose versions are their own, since the host does not see what a graph writes
        same_memory = [
            tree_map_only(torch.Tensor, lambda one: one.data, part) for part in (args, kwargs, found)
        ]
        self.done.append((func, *same_memory))
        return found

    def replay(self):
        for func, args, kwargs, found in self.done:
            again = func(*args, **(kwargs or {}))
            for one, new in zip(tree_leaves(found), tree_leaves(again), strict=True):
                if isinstance(one, torch.Tensor) and one.data_ptr() != new.data_ptr():
                    one.copy_(new)


class Graphs(FakeGpu):
    """Replays as CUDA does: kernels alone."""

    def __init__(self, monkeypatch):
        super().__init__()
        from gpuarena_transformers import static, static_layers

        for module in (static, static_layers):
            monkeypatch.setattr(module, "is_capturing", lambda device: self.is_capturing)

    def capture(self, body):
        body()
        self.is_capturing = True
        with Recorder() as graph:
            body()
        self.is_capturing = False
        return graph.replay


@pytest.mark.parametrize("kind", [FakeGpu, Graphs])
def test_captured_steps_go_on_by_a_token_each(models, monkeypatch, kind):
    where = kind() if kind is FakeGpu else kind(monkeypatch)
    here = _models.Models("fake", models.by_attention, where, torch.float32)
    ways = decode.VARIANTS | decode.GPU_VARIANTS
    if kind is Graphs:  # the others are not captured
        ways = {name: way for name, way in ways.items() if way.run_by == "graph" or name == decode.OURS}
    group = decode.measure_step(here, 6, largest=9, rounds=2, steps=2, ways=ways)
    assert list(group["rows"]) == list(ways), group["not_measured"]
    assert list(group["not_measured"]) == ["ArenaCache + gpuarena, graph"]
    assert max(row["logits_difference"] for row in group["rows"].values()) < 1e-3
    assert "floor_s" not in group


def test_a_capture_that_stays_at_its_position_is_not_timed(gpu_models, monkeypatch):
    def capture(self, body):
        body()
        return lambda: None

    monkeypatch.setattr(FakeGpu, "capture", capture)
    name = "ArenaStaticCache (exact) + sdpa, graph"
    ways = {decode.OURS: decode.VARIANTS[decode.OURS], name: decode.GPU_VARIANTS[name]}
    group = decode.measure_step(gpu_models, 6, largest=9, rounds=1, ways=ways)
    assert set(group["rows"]) == {decode.OURS}
    assert "a replay moved the position from 6 to 6" in group["not_measured"][name]


def test_caches_that_disagree_are_not_timed(monkeypatch):
    from gpuarena_transformers import ArenaCache

    update = ArenaCache.update

    def wrong(self, keys, values, *args, **kwargs):
        return update(self, keys, values + 0.5, *args, **kwargs)

    monkeypatch.setattr(ArenaCache, "update", wrong)
    with pytest.raises(decode.WrongDataError, match="ArenaCache"):
        decode.run(device="cpu", dtype="float32", lengths=[5], layers=LAYERS, rounds=1, quick=True)


def overwrite(update):
    def wrong(self, keys, *args, **kwargs):
        self.cumulative_length.sub_(int(keys.shape[2] == 1))
        return update(self, keys, *args, **kwargs)

    return wrong


def misplace(update):
    def wrong(self, keys, values, *args, **kwargs):
        found = tuple(tensor.clone() for tensor in update(self, keys, values, *args, **kwargs))
        last = int(self.cumulative_length) - 1
        if last == 5 + _steps.CHECKED - 1:  # of the last step that is compared, so that no logits show it
            self.keys[:, :, last] += 0.1
        return found

    return wrong


def fail_late(update):
    def wrong(self, keys, *args, **kwargs):
        if int(self.cumulative_length) >= 5 + _steps.CHECKED + 3:
            raise torch.OutOfMemoryError("tried to allocate\nand more")
        return update(self, keys, *args, **kwargs)

    return wrong


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (overwrite, "WrongDataError: after 3 steps the cache holds 5 tokens and not 8"),
        (misplace, "WrongDataError: the keys or values behind 5 tokens are"),
        (fail_late, "OutOfMemoryError: tried to allocate"),
    ],
)
def test_a_variant_that_fails_leaves_the_others(models, monkeypatch, change, why):
    layer = transformers.StaticCache(config=models.config, max_cache_len=4).layers[0].__class__
    monkeypatch.setattr(layer, "update", change(layer.update))
    broken = "StaticCache (exact) + sdpa"
    ways = {name: decode.VARIANTS[name] for name in (broken, decode.OURS, _caches.REFERENCE)}
    group = decode.measure_step(models, 5, largest=5, rounds=3, ways=ways)
    assert set(group["not_measured"]) == {broken}
    assert set(group["rows"]) == {decode.OURS, _caches.REFERENCE}
    assert group["reference"] == decode.OURS
    assert all(found.startswith(why) for found in group["not_measured"].values()), group["not_measured"]


def test_a_compiled_step_is_one_graph_and_others_may_fail(gpu_models, monkeypatch):
    """Each fails in its own way: no compiler, and no room for what is compiled for any size."""
    name, broken = "ArenaStaticCache (bucket) + sdpa, compiled", "StaticCache (exact) + sdpa, compiled"
    compile_step, options = _compiled.compile_step, iter([{"backend": "none"}, {"backend": "eager"}])
    monkeypatch.setattr(_compiled, "compile_step", lambda call, _: compile_step(call, next(options)))
    ways = {name: decode.VARIANTS[name] for name in (decode.OURS, _caches.REFERENCE)}
    ways |= {broken: decode.COMPILED[broken], name: decode.COMPILED[name]}
    group = decode.measure_step(gpu_models, 12, largest=40, rounds=4, steps=3, ways=ways)
    assert set(group["rows"]) == set(ways) - {broken}
    assert "none" in group["not_measured"][broken]
    row = group["rows"][name]
    assert group["graphs"] == {name: {"n_graphs": 1, "n_cudagraph_skips": 0}}
    assert group["n_graphs_while_timed"] == 0
    assert group["compile_s"] >= row["compile_s"]
    assert row["logits_difference"] < 1e-3
    assert row["compile_s"] > row["median_s"]


def test_nothing_is_compiled_when_the_time_is_over(monkeypatch):
    few = {name: decode.VARIANTS[name] for name in (decode.OURS, _caches.REFERENCE)}
    monkeypatch.setattr(decode, "VARIANTS", few)
    result = decode.run(
        device="fake-gpu", dtype="float32", lengths=[5], layers=1, rounds=1, compiled=True, compile_budget_s=0
    )
    assert result["fake"]
    [group] = result["groups"]
    assert set(group["rows"]) == {*decode.VARIANTS, *decode.GPU_VARIANTS}
    assert decode.COMPILED.keys() <= group["not_measured"].keys()


@pytest.mark.parametrize(
    "bad",
    [
        {"dtype": "int8"},
        {"rounds": 0},
        {"layers": 0},
        {"steps": 0},
        {"lengths": []},
        {"lengths": [0]},
        {"lengths": [9], "largest": 8},
        {"compiled": ["fast"]},
        {"compiled": "ideal"},
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_a_model_is_built(bad, monkeypatch):
    monkeypatch.delattr(_models, "random_models")
    with pytest.raises(ArgumentError):
        decode.run(**{"device": "cpu", "quick": True, **bad})
