"""The meter of allocations, against allocations that are known."""

import pytest

torch = pytest.importorskip("torch")

from gpuarena.bench.memory import AllocationMeter, meter_updates  # noqa: E402


def test_new_storages_are_counted_by_their_bytes():
    with AllocationMeter() as meter:
        a = torch.zeros(10, dtype=torch.float32)
        b = a + 1
    assert (meter.allocated_nbytes, meter.n_allocations) == (80, 2)
    assert b.shape == (10,)


def test_views_and_in_place_writes_are_no_allocations():
    a = torch.zeros(4, 4)
    index, row, zero = torch.tensor([1]), torch.ones(1, 4), torch.tensor([0])
    with AllocationMeter() as meter:
        a.narrow(0, 1, 2).view(-1).add_(1)
        a.index_copy_(0, index, row)
        torch.index_select(row, 0, torch.narrow(zero, 0, 0, 1), out=a[2:3])
    assert meter.allocated_nbytes == 0


def test_the_peak_counts_what_is_alive_at_once():
    held = torch.zeros(100, dtype=torch.uint8)
    with AllocationMeter([held]) as meter:
        for _ in range(5):
            temporary = torch.empty(50, dtype=torch.uint8)
            del temporary
        first, second = torch.empty(30, dtype=torch.uint8), torch.empty(30, dtype=torch.uint8)
    assert meter.held_nbytes == 100
    assert meter.allocated_nbytes == 5 * 50 + 60
    assert meter.peak_nbytes == 100 + 60
    assert first.shape == second.shape


def test_growing_by_cat_is_seen_and_the_cache_is_left_as_it_was():
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    states = torch.zeros(1, 2, 3, 4)
    cache.update(states, states, 0)
    with meter_updates(cache) as meter:
        cache.update(states[:, :, :1], states[:, :, :1], 0)
    grown = 2 * (1 * 2 * 4 * 4) * 4  # keys and values of 4 tokens, float32
    assert meter.allocated_nbytes == grown
    assert meter.peak_nbytes > meter.held_nbytes
    assert "update" not in vars(cache)
    assert "reorder_cache" not in vars(cache)
