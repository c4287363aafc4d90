from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from shared_core.assignment import *  # noqa: F403
from shared_core.dtypes import *  # noqa: F403
from shared_core.indexing import *  # noqa: F403
from shared_core.interop import *  # noqa: F403
from shared_core.lifetime import *  # noqa: F403

from gpuarena import Arena
from gpuarena.errors import DeviceMismatchError

if importlib.util.find_spec("torch"):
    from shared_core.autograd import *  # noqa: F403

CASE = "host"


def test_the_host_has_one_device():
    assert Arena(64, device="cpu").device == "cpu"
    for device in ("cuda:0", 0, "gpu"):
        with pytest.raises(DeviceMismatchError, match="host backend has no device"):
            Arena(64, device=device)


@pytest.mark.parametrize(
    "dtype",
    ["S3", "U2", "V5", "datetime64[s]", "timedelta64[ns]", "longdouble", "clongdouble", "i1,f8", "f4,(3,)i2"],
)
def test_types_of_numpy_alone_keep_every_bit(dtype):  # S7, S10
    dtype = np.dtype(dtype)
    data = bytes(range(1, 1 + 4 * dtype.itemsize))
    values = np.frombuffer(data, dtype)
    arena = Arena(4096, alignment=1)
    arena.alloc(1, "uint8")
    region = arena.from_array(values)
    assert region.offset == dtype.alignment  # the first multiple after one byte
    assert region.nbytes == 4 * dtype.itemsize
    assert region.dtype.numpy == region.array.dtype == dtype
    assert region.array.tobytes() == data
    assert region[::-2].array.tobytes() == values[::-2].tobytes()
    assert np.asarray(region).tobytes() == data


def test_fields_of_a_structure_are_numpys_and_a_structure_may_be_a_list():
    region = Arena(64).alloc(2, [("a", "i1"), ("b", "f8")], fill=(1, 2.5))
    assert region.array["b"].tolist() == [2.5, 2.5]
    assert region.nbytes == 18


def test_out_arguments_land_in_the_arena():
    out = Arena(64).alloc(3, "float64", fill=0)
    np.add([1, 2, 3], 1, out=out.array)
    assert out.array.tolist() == [2, 3, 4]
