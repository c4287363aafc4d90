from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shared_core.assignment import *  # noqa: E402, F403
from shared_core.autograd import *  # noqa: E402, F403
from shared_core.dtypes import *  # noqa: E402, F403
from shared_core.indexing import *  # noqa: E402, F403
from shared_core.interop import *  # noqa: E402, F403
from shared_core.lifetime import *  # noqa: E402, F403

from gpuarena import Arena  # noqa: E402
from gpuarena.errors import ArgumentError, BackendError, DeviceMismatchError  # noqa: E402

CASE = "torch-cpu"


def test_the_device_is_torchs_default_unless_given():
    assert Arena(64, backend="torch").device == "cpu"
    assert Arena(64, backend="torch", device=torch.device("cpu")).device == "cpu"
    with torch.device("meta"):
        with pytest.raises(DeviceMismatchError, match="meta"):
            Arena(64, backend="torch")
        region = Arena(64, backend="torch", device="cpu").alloc(4, "float32", fill=1.5)
        assert region.array.tolist() == [1.5] * 4


@pytest.mark.parametrize("device", ["gpu", 1.5, object()])
def test_what_is_no_device_is_refused(device):
    with pytest.raises(ArgumentError, match="device"):
        Arena(64, backend="torch", device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(DeviceMismatchError, match="cuda"):
        Arena(64, backend="torch", device="cuda")


def test_the_default_dtype_and_grad_mode_do_not_matter():
    torch.set_default_dtype(torch.float64)
    try:
        assert Arena(64, backend="torch").alloc(2, "float32", fill=0.5).array.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        array = Arena(64, backend="torch").alloc(2, "float32", fill=0.5).array
    assert (array * torch.ones(2, requires_grad=True)).requires_grad


def test_arrays_of_disjoint_regions_share_one_storage_and_no_version():
    arena = Arena(4096, backend="torch")
    x, y = arena.alloc(4, "float32").array, arena.alloc(4, "float32").array
    assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    version = y._version
    x.add_(1)
    assert y._version == version


def test_an_unknown_backend_is_refused():
    with pytest.raises(BackendError, match="host, torch, cupy"):
        Arena(64, backend="jax")
