from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import as_dtype
from gpuarena.errors import DTypeError
from shared_core.case import ML_DTYPES, PLAIN, native, raw_bytes

#: Every byte, and NaN payloads, -0.0, subnormals and 0xFF among the words of any size.
PATTERN = (
    bytes(range(256))
    + b"\xff" * 32
    + b"\x00\x00\x00\x80" * 8
    + b"\x01\x00\xa0\x7f" * 8
    + b"\x01\x7c\x01\xfc" * 8
)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_type_of_the_library_keeps_every_bit(case):  # S10
    for name in case.dtype_names():
        itemsize = as_dtype(name).itemsize
        # a bool is 0 or 1 in every library
        data = bytes([0, 1] * (len(PATTERN) // 2)) if name == "bool" else PATTERN
        shape = (2, len(data) // itemsize // 2)
        values = native(case, data, name, shape)
        arena = case.arena(16384)
        written = arena.alloc(shape, name, label=name)
        assert written.nbytes == len(data), name
        written[...] = values
        assert raw_bytes(written.array) == data, name
        assert str(written.array.dtype).removeprefix("torch.") == name
        assert raw_bytes(arena.from_array(values).array) == data, name
        copy = arena.alloc(shape, name, fill=written)
        assert raw_bytes(copy.array) == data, name
        assert raw_bytes(copy[1, ::3].array) == b"".join(
            data[start : start + itemsize] for start in range(len(data) // 2, len(data), 3 * itemsize)
        ), name


@given(name=st.sampled_from([*PLAIN, *ML_DTYPES]), data=st.binary(min_size=16, max_size=16))
def test_a_numpy_array_keeps_every_bit_where_the_library_has_its_type(case, name, data):  # S10
    if name not in case.dtype_names():
        return
    if name == "bool":
        data = bytes(byte & 1 for byte in data)
    values = np.frombuffer(data, as_dtype(name).numpy)
    assert raw_bytes(case.arena(512).from_array(values).array) == data
    assert raw_bytes(case.arena(512).from_array(values[::-1]).array) == values[::-1].tobytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_strided_slices_of_every_type_can_be_written(case):
    for name in case.dtype_names():
        itemsize = as_dtype(name).itemsize
        region = case.arena(4096).alloc((4, 6), name, fill=0)
        ones = bytes([1]) * itemsize
        zeros = raw_bytes(region[0, 0].array)
        region[1:3, ::2] = native(case, ones * 6, name, (2, 3))
        row = (ones + zeros) * 3
        assert raw_bytes(region.array) == zeros * 6 + row * 2 + zeros * 6, name


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_zero_as_initial_contents_is_zero_in_every_type(case):
    for name in case.dtype_names():
        if name in ("float8_e8m0fnu",):  # it has no zero
            continue
        assert not any(raw_bytes(case.arena(512).alloc(7, name, fill=0).array)), name
        assert not any(raw_bytes(case.arena(512).zeros(7, name))), name


def test_a_type_that_the_library_lacks_is_a_dtype_error(case):
    lacking = {
        "host": ["bits8", "int3", "float4_e2m1fn_x2"],
        "torch": ["float6_e2m3fn", "S3", "datetime64[s]", "f4,i2"],
    }
    arena = case.arena(4096)
    for name in lacking.get(case.library, lacking["host"]):
        with pytest.raises(DTypeError):
            arena.alloc(1, name)
        with pytest.raises(DTypeError):
            arena.alloc(4, "uint8", fill=0).view(name)


@pytest.mark.parametrize(
    "dtype", ["object", "O", ">f4", ">i8", ("f4", (2,)), "S0", "V0", None, "float31", [("x", "O")]], ids=repr
)
def test_types_that_are_not_plain_native_bytes_are_refused(case, dtype):  # S9
    arena = case.arena(512)
    with pytest.raises(DTypeError):
        arena.alloc(1, dtype)
    with pytest.raises(DTypeError):
        arena.alloc(1, "uint8", fill=0).view(dtype)
    assert arena.stats.n_regions == 1


__all__ = [name for name in globals() if name.startswith("test_")]
