"""Layers on several devices: one arena for each behind one cache, of the size of the layers it gets."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
import gpuarena_transformers.memory as memory_module  # noqa: E402
from families import CACHE, assert_same, generate  # noqa: E402
from gpuarena_transformers import ArenaCache  # noqa: E402
from gpuarena_transformers.sizing import input_device  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from gpuarena.kv import KVSpec  # noqa: E402

CPU = torch.device("cpu")


def fresh(name):
    """Return a model of its own, since hooks stay on a model."""
    model = AutoModelForCausalLM.from_config(families.config(name)).eval()
    model.load_state_dict(families.model(name).state_dict())
    return model


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_weights_that_lie_elsewhere(tmp_path, name, how):
    """`model.device` is "meta" then, which the token of the dry run once was sent to."""
    accelerate = pytest.importorskip("accelerate")
    model = fresh(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "cpu_offload":
            accelerate.cpu_offload(model, CPU)
        else:
            accelerate.disk_offload(model, str(tmp_path / "weights"), CPU)
        assert model.device.type == "meta"
        assert input_device(model) == CPU
        cache = ArenaCache.for_model(model, families.N_TOKENS, max_batch_size=2)
        outputs = generate(model, families.MODES["left padding"].arguments(name), cache)
    assert_same(outputs, families.reference(name, "left padding"))
    assert [torch.device(arena.device) for arena in cache.arenas] == [CPU]
    assert [one.device for one in cache.sizing.devices] == [CPU]


def test_a_device_map_of_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = fresh("llama")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerate.dispatch_model(
            model, places, main_device="cpu", offload_dir=str(tmp_path / "weights"), force_hooks=True
        )
        assert model.hf_device_map == places
        cache = ArenaCache.for_model(model, families.N_TOKENS, max_batch_size=6)
        outputs = generate(model, families.MODES["beam"].arguments("llama"), cache)
    assert_same(outputs, families.reference("llama", "beam"))
    assert len(cache.arenas) == 1


def test_two_devices_have_an_arena_each(monkeypatch):
    """No second device is at hand: what is reserved is looked at, and not the memory."""
    model = families.model("gemma3")
    cache = ArenaCache(model.config, 2, 32)
    made = []
    monkeypatch.setattr(cache.memory, "_new_arena", lambda nbytes, device: made.append((nbytes, device)))
    monkeypatch.setattr(cache.memory.group, "reserve_scratch", lambda arena, nbytes: None)
    layout = ArenaCache.for_model(model, 32, max_batch_size=2).sizing.layout
    specs = [layer.spec for layer in layout.layers]
    there = torch.device("cuda", 1)
    cache.memory.reserve({CPU: KVSpec(specs[:2]), there: KVSpec(specs[2:])})
    assert made == [
        (KVSpec(specs[:2]).arena_nbytes(2, 32), CPU),
        (KVSpec(specs[2:]).arena_nbytes(2, 32), there),
    ]


@pytest.mark.parametrize(("n_devices", "n_layers"), [(2, 4), (3, 4), (2, 5)])
def test_a_config_says_nothing_of_devices(monkeypatch, n_devices, n_layers):
    """All layers were once reserved on the first device, however many of them came to lie on others."""
    monkeypatch.setattr(memory_module, "device_count", lambda device: n_devices)
    config = families.config("llama", num_hidden_layers=n_layers)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = ArenaCache(config, 1, 64)
    ids = torch.arange(3, 12)[None]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")  # another arena is no news here
        found = [model(input_ids=piece, **{CACHE: cache}).logits for piece in ids.split([5, 4], dim=1)]
        expected = model(input_ids=ids).logits
    torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=families.TOLERANCE, rtol=0)
    per_layer = 64 * 2 * 2 * 16 * 4
    sizes = [arena.capacity // per_layer for arena in cache.arenas]
    assert sizes[0] == -(-n_layers // n_devices)  # an equal share
    assert sum(sizes) == n_layers  # and nothing too much in the end


def test_a_device_that_is_named_gets_all_layers(monkeypatch):
    monkeypatch.setattr(memory_module, "device_count", lambda device: 2)
    first = torch.device("cuda", 0)
    for device, n_devices in (("cuda:0", 1), ("cuda", 2), (None, 2)):
        cache = ArenaCache(families.config("llama"), 1, 64, device)
        assert cache.memory._n_devices(first) == n_devices


# ------------------------------------------------------------------------------------------------------------ on two GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("mode", ["greedy", "beam"])
def test_layers_on_two_gpus(mode, is_measured):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    accelerate = pytest.importorskip("accelerate")
    model = fresh("gemma3")
    names = ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1"]
    places = dict.fromkeys(names, 0) | dict.fromkeys(["model.layers.2", "model.norm", "lm_head"], 1)
    accelerate.dispatch_model(model, places)
    rows = families.MODES[mode].rows
    if is_measured:
        cache = ArenaCache.for_model(model, families.N_TOKENS, max_batch_size=rows, measure_prefill=True)
        assert {one.device.index for one in cache.sizing.devices} == {0, 1}
    else:
        cache = ArenaCache(model.config, rows, families.N_TOKENS)
    arguments = {
        name: value.to("cuda:0") if isinstance(value, torch.Tensor) else value
        for name, value in families.MODES[mode].arguments("gemma3").items()
    }
    outputs = generate(model, arguments, cache)
    outputs.logits = tuple(logits.cpu() for logits in outputs.logits)
    outputs.sequences = outputs.sequences.cpu()
    assert_same(outputs, families.reference("gemma3", mode))
    assert {arena.device for arena in cache.arenas} == {"cuda:0", "cuda:1"}
