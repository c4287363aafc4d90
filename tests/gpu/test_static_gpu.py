"""`ArenaStaticCache` on a GPU: graphs that `generate` compiles, graphs that are captured by hand, and no waiting."""

from __future__ import annotations

import copy
import os
import shutil
import sysconfig
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]


def need_a_compiler(device):
    """Skip where Triton cannot compile what launches its kernels."""
    if device.type == "cuda":
        if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc")))):
            pytest.skip("torch.compile needs a C compiler, which is missing")
        if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
            pytest.skip("torch.compile needs Python.h, which is missing")


def on(device, families, name, mode="greedy"):
    """Return a model and the arguments of `generate` on a device."""
    model = copy.deepcopy(families.model(name)).to(device)
    arguments = copy.deepcopy(families.MODES[mode].arguments(name))
    return model, {
        key: value.to(device) if hasattr(value, "to") else value for key, value in arguments.items()
    }


@pytest.mark.parametrize(
    ("name", "mode", "bucket"),
    [("llama", "greedy", None), ("llama", "beam", 16), ("gemma3", "left padding", 16)],
    ids=["llama", "llama-beam", "gemma3-padding"],
)
def test_generate_gives_the_logits_of_a_dynamic_cache(device, families, name, mode, bucket):
    """On a GPU each step but the first is a graph; on the fake one nothing is compiled."""
    from gpuarena_transformers import ArenaStaticCache
    from torch._dynamo.utils import counters  # after torch.compile is wanted: it takes seconds to import

    need_a_compiler(device)
    model, arguments = on(device, families, name, mode)
    expected = families.generate(model, arguments)
    cache = ArenaStaticCache(model.config, families.MODES[mode].rows, families.N_TOKENS, bucket=bucket)
    torch._dynamo.reset()  # it compiles only so many graphs of one function
    counters.clear()
    for _ in range(2):  # the second time the graphs are there
        cache.reset()
        families.assert_same(families.generate(model, arguments, cache), expected)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert [arena.device for arena in cache.arenas] == [str(device)]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_step_that_is_captured_and_replayed(device, families, name):
    from gpuarena_transformers import ArenaStaticCache

    model, arguments = on(device, families, name)
    ids = torch.cat([arguments["input_ids"]] * 2, dim=1)
    n = arguments["input_ids"].shape[1]
    cache = ArenaStaticCache.for_model(model, 2 * n, max_batch_size=2)
    token = ids[:, n : n + 1].clone()
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        model(input_ids=ids[:, :n], **{families.CACHE: cache})
        run = capture(device, cache, lambda: model(input_ids=token, **{families.CACHE: cache}).logits)
        for position in range(n, 2 * n):
            assert cache.advance() == position
            token.copy_(ids[:, position : position + 1])
            off = (run()[:, 0] - expected[:, position]).abs().max().item()
            assert off < families.TOLERANCE, f"logits of token {position} are off by {off}"
    assert cache.stats.n_tokens == int(cache.get_seq_length()) == 2 * n


def capture(device, cache, call):
    """Return what runs `call` again and gives its result; on the fake GPU that is the call itself."""
    if device.type != "cuda":

        def again():
            cache.crop(-1)  # the call counts, where a replay does not
            return call()

        return again
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # libraries get ready
    torch.cuda.current_stream().wait_stream(side)
    cache.crop(-1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay():
        graph.replay()
        return result

    return replay


def test_nothing_waits_for_the_gpu(device, families):
    from gpuarena_transformers import ArenaStaticCache

    if device.type != "cuda":
        pytest.skip("only CUDA shows this")
    need_a_compiler(device)
    cache = ArenaStaticCache(families.config("llama"), 2, 64, bucket=8)
    keys = torch.ones(2, 2, 1, 16, device=device)

    def step():
        for layer in range(2):
            cache.update(keys, keys, layer)

    def write():
        for layer in cache.layers:
            layer.update(keys, keys)

    step()
    compiled = torch.compile(write, fullgraph=True)
    cache.check_room()
    compiled()
    order = torch.tensor([1, 0], device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            cache.check_room()
            compiled()
            step()
            cache.reorder_cache(order)
        with cache.scope():
            step()
        cache.crop(-1)
        cache.truncate(2)
        cache.reset()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_full_cache_leaves_the_gpu_usable(device, families):
    from gpuarena_transformers import ArenaStaticCache

    from gpuarena.errors import CapacityError

    need_a_compiler(device)
    model, arguments = on(device, families, "llama")
    cache = ArenaStaticCache(model.config, 2, arguments["input_ids"].shape[1] + 2)
    with pytest.raises(CapacityError):
        families.generate(model, arguments, cache)
    assert torch.ones(3, device=device).sum().item() == 3
    cache.reset()
    families.assert_same(
        families.generate(model, arguments, cache, n_new=3), families.generate(model, arguments, n_new=3)
    )
