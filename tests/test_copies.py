from __future__ import annotations

import copy
import io
import os
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from gpuarena import Arena
from gpuarena.errors import NotCopyableError

# Native arrays know nothing of the arena. What copies one, writes it to a file or sends it to another process, must take
# its own bytes and not the arena's, or refuse.

BIG = 1 << 22  # bytes of an arena whose contents would be noticed in a file


def fork_pickled(value):
    return bytes(ForkingPickler.dumps(value))


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


# -- NumPy ------------------------------------------------------------------------------------------------------

PARTS = {
    "array": lambda region: region.array,
    "slice of the region": lambda region: region[1:].array,
    "slice of the array": lambda region: region.array[1:],
    "strided": lambda region: region[::2, 1].array,
    "reshaped": lambda region: region.reshape(-1).array,
    "as_numpy": lambda region: region.as_numpy(),
}


@pytest.fixture(params=["host", "virtual", "debug"])
def numpy_region(request):
    options = {"host": {}, "virtual": {"backend": "virtual"}, "debug": {"debug": True}}[request.param]
    arena = Arena(BIG, **options)
    arena.alloc(1000, "uint8", fill=255)
    return arena.from_array(np.arange(12, dtype=np.float32).reshape(4, 3))


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_numpy_copies_hold_their_own_bytes(numpy_region, part):
    array = part(numpy_region)
    before = array.tolist()
    copies = [
        copy.copy(array),
        copy.deepcopy(array),
        copy.deepcopy({"in": [array]})["in"][0],
        pickle.loads(pickle.dumps(array)),
        pickle.loads(pickle.dumps(array, protocol=5)),
        ForkingPickler.loads(fork_pickled(array)),
        array.copy(),
        np.array(array),
    ]
    numpy_region.arena.close()
    for each in copies:
        assert each.tolist() == before
        assert not np.shares_memory(each, array)
        each[...] = 0
    assert array.tolist() == before


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_numpy_files_hold_their_own_bytes(numpy_region, part, tmp_path):
    array = part(numpy_region)
    np.save(tmp_path / "one.npy", array)
    np.savez(tmp_path / "two.npz", x=array)
    assert (
        np.load(tmp_path / "one.npy").tolist()
        == np.load(tmp_path / "two.npz")["x"].tolist()
        == array.tolist()
    )
    assert all(os.path.getsize(path) < 2000 for path in tmp_path.iterdir())
    assert len(pickle.dumps(array)) < 1000
    assert len(fork_pickled(array)) < 1000


def test_out_of_band_buffers_hold_their_own_bytes(numpy_region):
    buffers = []
    data = pickle.dumps(numpy_region.array, protocol=5, buffer_callback=buffers.append)
    assert len(data) + sum(buffer.raw().nbytes for buffer in buffers) < 1000
    assert pickle.loads(data, buffers=buffers).tolist() == numpy_region.array.tolist()


def test_a_frames_arrays_are_copied_as_all_arrays():
    frame = Arena(BIG).frame(x=(4, "float32"))
    frame.x[...] = 2
    assert len(pickle.dumps(frame.x)) < 1000
    assert copy.deepcopy(frame.x).tolist() == [2] * 4


# -- torch ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["torch", "virtual:torch", "debug", "child"])
def region(request):
    options = {"debug": {"debug": True}}.get(request.param, {})
    arena = Arena(BIG, backend=request.param if ":" in request.param else "torch", **options)
    arena.alloc(1000, "uint8", fill=255)
    if request.param == "child":
        arena = arena.child(BIG // 2)
        arena.alloc(1000, "uint8", fill=255)
    return arena.from_array(np.arange(12, dtype=np.float32).reshape(4, 3))


VIEWS = {
    "tensor": lambda region: region.array,
    "element": lambda region: region.array[0],
    "slice of the region": lambda region: region[1:].array,
    "strided": lambda region: region[::2, 1].array,
    "viewed": lambda region: region.view("uint8").array,
    "detached": lambda region: region.array.detach(),
    "transposed": lambda region: region.array.T,
}
COPIES = {
    "torch.save": saved,
    "torch.save in a dict": lambda tensor: saved({"weight": tensor}),
    "torch.save, old format": lambda tensor: torch.save(
        tensor, io.BytesIO(), _use_new_zipfile_serialization=False
    ),
    "copy.deepcopy": copy.deepcopy,
    "copy.deepcopy in a list": lambda tensor: copy.deepcopy([tensor]),
    "pickle.dumps": pickle.dumps,
    "pickle.dumps, protocol 2": lambda tensor: pickle.dumps(tensor, protocol=2),
    "ForkingPickler": fork_pickled,
    "share_memory_": lambda tensor: tensor.share_memory_(),
    "storage.share_memory_": lambda tensor: tensor.untyped_storage().share_memory_(),
    "storage.resize_": lambda tensor: tensor.untyped_storage().resize_(0),
    "storage.resize_ larger": lambda tensor: tensor.untyped_storage().resize_(2 * BIG),
    "pickle of the storage": lambda tensor: pickle.dumps(tensor.untyped_storage()),
    "copy.deepcopy of the storage": lambda tensor: copy.deepcopy(tensor.untyped_storage()),
    "storage.clone": lambda tensor: tensor.untyped_storage().clone(),
    "state_dict": lambda tensor: saved(_module(tensor).state_dict()),
    "deepcopy of a module": lambda tensor: copy.deepcopy(_module(tensor)),
}


def _module(tensor):
    module = torch.nn.Module()
    module.register_buffer("x", tensor)
    return module


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("copier", COPIES.values(), ids=COPIES)
def test_what_would_copy_or_move_the_whole_arena_is_refused(region, make, copier):
    tensor = make(region)
    before, stats, address = tensor.tolist(), region.arena.stats, tensor.data_ptr()
    with pytest.raises(NotCopyableError, match=r"clone\(\)") as caught:
        copier(tensor)
    assert isinstance(caught.value, TypeError)
    assert region.arena.stats == stats
    assert (tensor.tolist(), tensor.data_ptr(), region.address) == (before, address, region.array.data_ptr())
    assert not tensor.is_shared()
    assert region.arena.alloc(4, "float32", fill=3).array.tolist() == [3] * 4
    assert region.as_numpy().tolist() == np.arange(12).reshape(4, 3).tolist()


@pytest.mark.parametrize("copier", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("backend", ["host", "virtual"])
def test_tensors_over_a_numpy_arena_refuse_as_well(backend, copier):
    arena = Arena(BIG, backend=backend)
    region = arena.from_array(np.arange(12, dtype=np.float32))
    tensor = region.as_torch()
    with pytest.raises(NotCopyableError, match=r"clone\(\)"):
        copier(tensor)
    assert tensor.data_ptr() == region.address
    assert region.array.tolist() == list(range(12))


def test_a_tensor_cannot_outgrow_the_arena(region):
    tensor, address = region.array, region.address
    with pytest.raises((RuntimeError, TypeError)):
        tensor.resize_(2 * BIG)
    assert region.address == region.array[0].data_ptr() == address


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_clones_hold_their_own_bytes_and_are_copied_as_all_tensors(region, make):
    tensor = make(region)
    clone = tensor.clone()
    assert len(saved(clone)) < 3000
    assert len(pickle.dumps(clone)) < 2000
    assert torch.equal(copy.deepcopy(clone), tensor)
    assert torch.equal(torch.load(io.BytesIO(saved(clone))), tensor)
    assert clone.share_memory_().is_shared()
    clone.untyped_storage().resize_(0)
    assert tensor.numel() > 0


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_copies_by_way_of_numpy_hold_their_own_bytes(region, make):
    array = make(region).numpy()
    assert len(pickle.dumps(array)) < 1000
    assert copy.deepcopy(array).tolist() == array.tolist()
    file = io.BytesIO()
    np.save(file, array)
    assert len(file.getvalue()) < 1000


def test_copy_copy_is_another_tensor_of_the_same_memory_or_refused(region):
    try:
        other = copy.copy(region.array)
    except NotCopyableError:
        return
    other[0, 0] = 9
    assert region.array[0, 0] == 9


def test_results_computed_from_arena_tensors_are_ordinary(region):
    for result in (
        region.array + 1,
        region.array.sum(),
        region.array.to(torch.float64),
        region.array.T.contiguous(),
    ):
        assert len(saved(result)) < 3000
        copy.deepcopy(result)
        pickle.dumps(result)


def test_a_module_loads_and_moves_arena_tensors(region):
    layer = torch.nn.Linear(3, 4, bias=False)
    layer.load_state_dict({"weight": region.array})
    assert len(saved(layer.state_dict())) < 3000
    assert torch.equal(layer.weight.detach(), region.array)


def test_tensors_of_other_storages_are_left_alone(region):
    tensor = torch.arange(4.0)
    assert torch.equal(torch.load(io.BytesIO(saved(tensor))), tensor)
    copy.deepcopy(tensor)
    tensor.untyped_storage().resize_(64)
    tensor.share_memory_()


def test_memory_of_somebody_else_stays_as_copyable_as_it_was():
    owner = torch.zeros(1024, dtype=torch.uint8)
    region = Arena.from_buffer(owner, alignment=1).alloc(4, "uint8", fill=3)
    assert copy.deepcopy(owner)[:4].tolist() == [3] * 4
    assert len(saved(owner)) > 1024
    assert region.array.tolist() == [3] * 4
