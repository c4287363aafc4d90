"""`ArenaCache(offload="cpu")` on a GPU: pinned host memory, copies on a stream of their own, and what waits for what."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

#: Clock cycles that a kernel spins: about a tenth of a second, long enough for the host and copies to get ahead.
SPIN = 200_000_000


@pytest.fixture
def model(families, device):
    """Three layers, so that none keeps a buffer to itself."""
    torch.manual_seed(6)
    return families._build("gemma3", families.config("gemma3")).to(device)


def on(device, arguments):
    arguments = copy.copy(arguments)
    return {key: value.to(device) if hasattr(value, "to") else value for key, value in arguments.items()}


def spin(device):
    """Keep the current stream busy, so that whatever does not wait for it is early."""
    if device.type == "cuda":
        torch.cuda._sleep(SPIN)


@pytest.mark.parametrize("mode", ["greedy", "beam", "left padding, prefill in chunks"])
@pytest.mark.parametrize("measured", [False, True], ids=["estimated", "measured"])
def test_generate_gives_the_logits_of_a_dynamic_cache(device, families, model, mode, measured):
    from gpuarena_transformers import ArenaCache

    arguments = on(device, families.MODES[mode].arguments("gemma3"))
    expected = families.generate(model, arguments)
    rows, n_tokens = families.MODES[mode].rows, families.N_TOKENS
    if measured:
        cache = ArenaCache.for_model(model, n_tokens, max_batch_size=rows, offload="cpu")
    else:
        cache = ArenaCache(model.config, rows, n_tokens, offload="cpu")
    for _ in range(2):
        cache.reset()
        families.assert_same(families.generate(model, arguments, cache), expected)
    host, staging = cache.arenas
    assert [torch.device(arena.device) for arena in (host, staging)] == [torch.device("cpu"), device]
    assert cache.layers[0].keys.device.type == "cpu"
    assert device.type != "cuda" or cache.layers[0].keys.is_pinned()


def test_copies_and_a_device_that_is_late(device, families):
    """Each step spins before new tokens are written and before they are read: nothing may overtake."""
    from gpuarena_transformers import ArenaCache

    cache = ArenaCache(families.config("gemma3", layer_types=["full_attention"] * 3), 2, 64, offload="cpu")
    held = [torch.empty(2, 2, 0, 16, device=device)] * 3
    order = torch.tensor([1, 0], device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for step in range(8):
        for layer in range(3):
            new = torch.randn(2, 2, 5 if step == 0 else 1, 16, device=device)
            spin(device)
            late = new.clone()
            keys, values = cache.update(late, -late, layer)
            spin(device)
            held[layer] = torch.cat([held[layer], new], dim=2)
            wrong += (keys != held[layer]).sum() + (values != -held[layer]).sum()
        if step == 4:
            cache.reorder_cache(order)
            held = [one[order] for one in held]
        if step == 6:
            cache.crop(-3)
            held = [one[:, :, :-3] for one in held]
    for layer in range(3):
        torch.testing.assert_close(cache.layers[layer].keys.to(device), held[layer], atol=0, rtol=0)
    assert wrong.item() == 0


def test_copies_of_the_cache_and_files(device, families, model, tmp_path):
    from gpuarena_transformers import ArenaCache

    prompt = on(device, families.prompt("one"))
    cache = ArenaCache(model.config, 1, 64, device, offload="cpu")
    with torch.no_grad():
        model(input_ids=prompt["input_ids"], **{families.CACHE: cache})
    longer = {"input_ids": torch.cat([prompt["input_ids"]] * 2, dim=1)}
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    expected = families.generate(model, longer)
    cache.save(tmp_path / "prompt")
    other = ArenaCache(model.config, 1, 64, device, offload="cpu")
    other.load(tmp_path / "prompt")
    for one in (copy.deepcopy(cache), other, cache):
        families.assert_same(families.generate(model, longer, one), expected)


def test_a_step_does_not_wait_for_the_gpu(device, families):
    from gpuarena_transformers import ArenaCache

    if device.type != "cuda":
        pytest.skip("only CUDA shows this")
    cache = ArenaCache(families.config("gemma3"), 1, 64, offload="cpu")
    new = torch.ones(1, 2, 1, 16, device=device)

    def step():
        for layer in range(3):
            cache.update(new, new, layer)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
        cache.crop(-1)
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
