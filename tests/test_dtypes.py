from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest
from shared_core.case import ML_DTYPES, PLAIN

from gpuarena import Arena, DType, as_dtype
from gpuarena.dtypes import known_names
from gpuarena.errors import DTypeError


@pytest.mark.parametrize("name", [*PLAIN, *ML_DTYPES])
def test_every_type_of_numpy_and_ml_dtypes_is_found_under_all_its_names(name):
    scalar = getattr(ml_dtypes, name) if name in ML_DTYPES else np.dtype(name).type
    dtype = np.dtype(scalar)
    found = as_dtype(name)
    assert (found.name, found.itemsize, found.numpy) == (name, dtype.itemsize, dtype)
    for other in (scalar, dtype, found, f"{dtype.str}" if name in PLAIN else name):
        assert as_dtype(other) is found
    assert name in known_names()


def test_every_type_of_torch_is_found_or_refused_as_quantised():
    torch = pytest.importorskip("torch")
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        name = str(dtype).removeprefix("torch.")
        if name.startswith("q"):
            with pytest.raises(DTypeError, match="quantis"):
                as_dtype(dtype)
            continue
        found = as_dtype(dtype)
        assert (found.name, found.itemsize, found.torch) == (name, dtype.itemsize, dtype)
        assert found.itemsize == found.alignment


def test_torch_and_ml_dtypes_mean_the_same_by_a_name():
    torch = pytest.importorskip("torch")
    values = [0.0, 1.0, -1.5, 2.0, 0.25]
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        ours = as_dtype(name)
        as_torch = torch.tensor(values).to(ours.torch).view(torch.uint8).numpy().tobytes()
        assert np.array(values, ours.numpy).tobytes() == as_torch, name


def test_types_that_only_one_side_has():
    torch = pytest.importorskip("torch")
    assert as_dtype(torch.bits16).itemsize == 2
    with pytest.raises(DTypeError, match="bits16"):
        as_dtype(torch.bits16).require_numpy()
    with pytest.raises(DTypeError, match="float6_e2m3fn"):
        as_dtype("float6_e2m3fn").torch
    assert as_dtype("float6_e2m3fn").require_numpy() == ml_dtypes.float6_e2m3fn


def test_types_below_a_byte_take_a_byte_an_element():  # S8: ml_dtypes does not pack them
    for name in ("int4", "uint4", "int2", "float4_e2m1fn", "float6_e3m2fn"):
        assert Arena(64).alloc(5, name).nbytes == 5
        assert np.zeros(5, as_dtype(name).numpy).nbytes == 5


def test_a_packed_type_counts_pairs_as_torch_does():  # S8
    torch = pytest.importorskip("torch")
    region = Arena(64, backend="torch").alloc((2, 3), torch.float4_e2m1fn_x2)
    assert region.nbytes == 6
    assert tuple(region.array.shape) == (2, 3)
    assert torch.zeros(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).shape == (6,)


def test_python_types_are_what_numpy_makes_of_them():
    for python in (bool, int, float, complex):
        assert as_dtype(python).numpy == np.dtype(python)


@pytest.mark.parametrize(
    "dtype",
    [
        None,
        "float31",
        "",
        3,
        1.5,
        object(),
        "object",
        object,
        ["x"],
        {"a": 1},
        [("x", "O")],
        (),
        ("f4", (2,)),
        ">f4",
        "S0",
    ],
)
def test_what_is_no_element_type_is_refused(dtype):
    with pytest.raises(DTypeError):
        as_dtype(dtype)


@pytest.mark.parametrize("fault", ["byte order", "sub-array", "Python objects", "no bytes"])
def test_the_reason_for_a_refusal_is_named(fault):  # S9
    dtype = {
        "byte order": ">f4",
        "sub-array": np.dtype(("f4", (2,))),
        "Python objects": "O",
        "no bytes": "V0",
    }[fault]
    with pytest.raises(DTypeError, match=fault):
        as_dtype(dtype)


def test_structures_are_types_of_their_own():
    packed = as_dtype([("a", "i1"), ("b", "i4")])
    assert (packed.itemsize, packed.alignment) == (5, 1)
    assert packed == np.dtype([("a", "i1"), ("b", "i4")])
    assert packed != as_dtype([("a", "i1"), ("c", "i4")])
    assert as_dtype({"names": ["a"], "formats": ["f4"]}).itemsize == 4
    with pytest.raises(DTypeError, match="Python objects"):
        as_dtype([("a", "O")])
    with pytest.raises(DTypeError, match="byte order"):
        as_dtype([("a", ">i4")])


def test_the_alignment_of_a_structure_does_not_depend_on_what_was_asked_before():
    aligned = np.dtype([("a", "i1"), ("b", "i4")], align=True)
    loose = np.dtype({"names": ["a", "b"], "formats": ["i1", "i4"], "offsets": [0, 4], "itemsize": 8})
    assert aligned == loose
    assert hash(aligned) == hash(loose)
    for dtype in (aligned, loose, aligned):
        assert as_dtype(dtype).alignment == dtype.alignment


def test_equality_is_by_meaning():
    assert as_dtype("f4") == "float32" == as_dtype(np.float32)
    assert as_dtype("f4") != "float64"
    assert as_dtype("f4") != 5
    assert as_dtype("f4") != "no type"
    assert len({as_dtype("f4"), as_dtype("float32"), as_dtype("<f4")}) == 1
    assert str(as_dtype("f4")) == "float32"
    assert repr(as_dtype("f4")) == "DType('float32')"


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bits8", "S3", "datetime64[s]", "i4,f8"])
def test_a_type_can_be_pickled(name):
    dtype = as_dtype(name)
    again = pickle.loads(pickle.dumps(dtype))
    assert isinstance(again, DType)
    assert (again, again.itemsize, again.alignment, again.numpy) == (
        dtype,
        dtype.itemsize,
        dtype.alignment,
        dtype.numpy,
    )


def test_short_names_and_near_ones():
    for short, name in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("fp64", "float64")):
        assert as_dtype(short) is as_dtype(name)
    assert as_dtype("float") is as_dtype(np.dtype("float"))  # as NumPy reads it, and not torch
    for wrong, near in (
        ("flaot32", "float32"),
        ("torch.bfloat16", "bfloat16"),
        ("BF16", "bf16"),
        ("f32", "fp32"),
    ):
        with pytest.raises(DTypeError, match=f"unknown dtype '{wrong}'; did you mean '{near}'\\?$"):
            as_dtype(wrong)
    with pytest.raises(DTypeError, match="for example 'float32'"):
        as_dtype("quaternion")
    with pytest.raises(DTypeError, match=r"alloc\(\(4, 4\), 'float32'\)"):
        Arena(64).alloc(4, 4)
