"""The cache on GPU memory: the state machine, a model written by hand, `generate`, and what only a GPU shows."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kv.test_linear import check_a_model_step_by_step, step, tokens, torch_cache  # noqa: E402
from properties.test_kv_machine import CupyLibrary, TorchLibrary, run_kv_machine  # noqa: E402

from gpuarena import DeviceMismatchError  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]


@pytest.fixture
def cuda(device):
    if device.type != "cuda":
        pytest.skip("only CUDA shows this")
    return device


def test_the_cache_behaves_as_the_model(case):
    library = CupyLibrary() if case.library == "cupy" else TorchLibrary("cpu" if case.on_cpu else "cuda")
    run_kv_machine(library, max_examples=20)  # each step copies the whole memory to the host


@pytest.mark.parametrize("chunks", [[5], [1, 1, 3], [4, 7, 1, 2, 1]])
def test_a_model_written_by_hand_gives_the_logits_of_one_pass(device, chunks):
    check_a_model_step_by_step(device, chunks, 3, [2, 0, 0, 1])


@pytest.mark.parametrize("mode", ["greedy", "beam", "draft model", "left padding, prefill in chunks"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v3"])
def test_generate_gives_the_logits_of_a_dynamic_cache(device, name, mode):
    pytest.importorskip("transformers")
    sys.path.append(str(Path(__file__).parents[1] / "transformers"))
    import families
    from gpuarena_transformers import ArenaCache

    arguments = {
        key: value.to(device) if hasattr(value, "to") else value
        for key, value in copy.deepcopy(families.MODES[mode].arguments(name)).items()
    }
    model = copy.deepcopy(families.model(name)).to(device)
    cache = ArenaCache.for_model(model, families.N_TOKENS, max_batch_size=families.MODES[mode].rows)
    outputs = families.generate(model, arguments, cache)
    families.assert_same(outputs, families.generate(model, arguments))
    assert [arena.device for arena in cache.arenas] == [str(device)]


def test_nothing_is_allocated_on_the_gpu(cuda):
    cache = torch_cache(batch=4, max_tokens=64, device=cuda)
    one, many = (tokens(n_new, rows=4, device=cuda).contiguous() for n_new in (1, 8))
    order = torch.tensor([3, 3, 0, 1], device=cuda)
    few = torch.tensor([1, 0], device=cuda, dtype=torch.int32)

    def n_allocated():
        return torch.cuda.memory_stats(cuda)["allocation.all.allocated"]

    step(cache, one)
    before = n_allocated()
    step(cache, one)
    step(cache, many)
    cache.reorder(order)
    with cache.scope():
        step(cache, one)
    cache.truncate(3)
    cache.select(few)
    assert n_allocated() == before


def test_nothing_waits_for_the_gpu(cuda):
    cache = torch_cache(batch=4, max_tokens=64, device=cuda)
    one, many = (tokens(n_new, rows=4, device=cuda).contiguous() for n_new in (1, 8))
    order = torch.tensor([3, 3, 0, 1], device=cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(cache, many)
        step(cache, one)
        cache.reorder(order)
        cache.rollback(cache.checkpoint())
        cache.select(order)
        cache.reset()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tensors_of_the_host_are_refused(cuda):
    cache = torch_cache(device=cuda)
    step(cache, tokens(2, device=cuda))
    with pytest.raises(DeviceMismatchError, match="keys are on cpu, the cache is on cuda"):
        cache.append(0, tokens(1), tokens(1))
    with pytest.raises(DeviceMismatchError, match="values are on cpu"):
        cache.append(0, tokens(1, device=cuda), tokens(1))
    assert [layer.length for layer in cache.layers] == [2, 2]


def test_one_of_several_rows_is_asked_for_on_the_host(cuda):
    cache = torch_cache(batch=3, device=cuda)
    step(cache, tokens(2, rows=3, device=cuda))
    cache.reorder([2, 1, 0])
    assert cache.layers[1].keys[:, 0, 0, 0].tolist() == [200, 100, 0]
    cache.select(torch.tensor([1]))
    assert cache.layers[1].values[:, 0, 1, 3].tolist() == [101]
