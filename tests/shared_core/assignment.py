from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gpuarena.errors import ArgumentTypeError, DTypeError, ShapeError
from shared_core.case import CASES, raw_bytes

F32 = np.float32


def written(case, values, name="float32", shape=(2, 3)):
    """What `region[...] = values` leaves in a region that was full of 9."""
    region = case.arena(4096).alloc(shape, name, fill=9)
    region[...] = values
    return raw_bytes(region.array)


def _read_only(array):
    array = np.array(array)
    array.flags.writeable = False
    return array


ROWS = np.arange(6, dtype=F32).reshape(2, 3)
VALUES = {
    "int": (7, 7),
    "bool": (True, 1),
    "float": (1.5, 1.5),
    "numpy scalar": (F32(1.5), 1.5),
    "numpy bool": (np.True_, 1),
    "ml_dtypes scalar": (ml_dtypes.bfloat16(1.5), 1.5),
    "0-d array": (np.array(1.5), 1.5),
    "row list": ([1, 2.5, 3], [1, 2.5, 3]),
    "nested lists": ([[1], [2]], [[1], [2]]),
    "tuple": ((1, 2, 3), [1, 2, 3]),
    "range": (range(3), [0, 1, 2]),
    "list of scalars": ([F32(1), F32(2), F32(3)], [1, 2, 3]),
    "array": (ROWS, ROWS),
    "other type": (ROWS.astype(np.int64), ROWS),
    "bfloat16 array": (ROWS.astype(ml_dtypes.bfloat16), ROWS),
    "float8 array": (ROWS.astype(ml_dtypes.float8_e4m3fn), ROWS),
    "leading ones": (ROWS[None, None], ROWS),
    "column": (ROWS[:, :1], ROWS[:, :1]),
    "negative strides": (ROWS[::-1, ::-1], ROWS[::-1, ::-1]),
    "Fortran order": (np.asfortranarray(ROWS), ROWS),
    "other byte order": (ROWS.astype(">f4"), ROWS),
    "read-only": (_read_only(ROWS), ROWS),
    "read-only scalar": (np.broadcast_to(F32(3), (2, 3)), 3),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_many_kinds_are_written(case, name):
    values, expected = VALUES[name]
    assert written(case, values) == np.broadcast_to(np.asarray(expected, F32), (2, 3)).tobytes()
    region = case.arena(4096).alloc((2, 3), "float32", fill=values)
    assert raw_bytes(region.array) == np.broadcast_to(np.asarray(expected, F32), (2, 3)).tobytes()


def torch_values():
    import torch

    rows = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    return {
        "tensor": rows,
        "0-d": torch.tensor(1.5),
        "bfloat16": rows.bfloat16(),
        "float8": rows.to(torch.float8_e4m3fn),
        "requires grad": rows.clone().requires_grad_(),
        "part of a graph": rows.clone().requires_grad_() * 2,
        "strided": rows.t().contiguous().t(),
        "expanded": torch.ones(1).expand(2, 3),
        "lazy conjugate": torch.view_as_complex(torch.stack([rows, rows], -1)).conj(),
        "lazy negation": torch.view_as_complex(torch.stack([rows, rows], -1)).conj().imag,
    }


TORCH_VALUES = (
    "tensor", "0-d", "bfloat16", "float8", "requires grad", "part of a graph", "strided", "expanded", "lazy negation"
)  # fmt: skip


@pytest.mark.parametrize("name", TORCH_VALUES)
def test_torch_tensors_are_written_into_every_arena(case, name):
    torch = pytest.importorskip("torch")
    values = torch_values()[name]
    expected = values.detach().float().resolve_neg().expand(2, 3).contiguous().numpy().tobytes()
    assert written(case, values) == expected
    region = case.arena(4096).from_array(values)
    assert region.shape == tuple(values.shape)
    assert region.dtype == values.dtype
    assert not isinstance(region.array, torch.Tensor) or not region.array.requires_grad


def test_lazy_conjugates_are_written_conjugated(case):
    pytest.importorskip("torch")
    values = torch_values()["lazy conjugate"]
    assert written(case, values, "complex64") == values.resolve_conj().numpy().tobytes()


def test_a_python_float_keeps_its_precision(case):
    # torch's own conversion of Python numbers goes through its default dtype, float32
    for values in (0.1, [0.1] * 3, np.float64(0.1)):
        assert written(case, values, "float64") == np.full((2, 3), 0.1).tobytes()
    assert written(case, 2**64 - 1, "uint64") == b"\xff" * 48
    assert written(case, 2**53 + 1, "int64") == np.full((2, 3), 2**53 + 1).tobytes()
    assert written(case, 1 + 2j, "complex128") == np.full((2, 3), 1 + 2j).tobytes()


def test_regions_of_every_other_backend_on_the_cpu_are_written(case):
    pytest.importorskip("torch")
    for other in CASES.values():
        if other.on_cpu:
            for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int64"):
                source = other.arena(4096).alloc((2, 3), dtype)
                source[...] = ROWS
                assert written(case, source, "float32") == ROWS.tobytes()
                assert (
                    written(case, source[:, 1:2], "float32")
                    == np.broadcast_to(ROWS[:, 1:2], (2, 3)).tobytes()
                )
                assert raw_bytes(case.arena(4096).from_array(source).array) == raw_bytes(source.array)


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((2, 4)),
        np.zeros((3, 3)),
        np.zeros((2, 2, 3)),
        np.zeros((0, 3)),
        np.zeros(0),
        [1, 2],
        [],
    ],
    ids=lambda values: f"shape {np.shape(values)}",
)
def test_values_that_do_not_broadcast_are_refused_and_nothing_is_written(case, values):  # F1
    arena = case.arena(4096)
    region = arena.alloc((2, 3), "float32", fill=9)
    before = arena.stats
    with pytest.raises(ShapeError, match=r"\(2, 3\)"):
        region[...] = values
    with pytest.raises(ShapeError):
        arena.alloc((2, 3), "float32", fill=values)
    assert raw_bytes(region.array) == np.full((2, 3), 9, F32).tobytes()
    assert arena.stats == before


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ("x", "float32"),
        ([1, "x"], "float32"),
        (np.array([1.0, "x", 2.0], dtype=object), "float32"),
        (np.array(["1", "x", "2"]), "float32"),
        ([[1, 2, 3], [4, 5]], "float32"),
        (object(), "float32"),
        ({"a": 1}, "float32"),
        (1 + 2j, "float32"),
        (300, "int8"),
        (-1, "uint8"),
        (2**64, "uint64"),
        ([0, 300, 0], "int8"),
    ],
    ids=lambda value: None if "0x" in repr(value) else repr(value),
)
def test_values_that_cannot_be_converted_are_refused_and_nothing_is_written(case, values, name):  # F1
    arena = case.arena(4096)
    region = arena.alloc((2, 3), name, fill=9)
    before = arena.stats
    with pytest.raises((TypeError, ValueError, OverflowError)):
        region[...] = values
    with pytest.raises((TypeError, ValueError, OverflowError)):
        arena.alloc((2, 3), name, fill=values)
    assert raw_bytes(region.array) == np.full((2, 3), 9, name).tobytes()
    assert arena.stats == before


def test_full_needs_a_value_and_a_shape_that_fits(case):
    arena = case.arena(4096)
    assert raw_bytes(arena.full((2, 3), 1.5, "float32")) == np.full((2, 3), 1.5, F32).tobytes()
    assert raw_bytes(arena.full((2, 3), [1, 2, 3], "float32")) == np.float32([[1, 2, 3]] * 2).tobytes()
    assert raw_bytes(arena.zeros((2, 3), "float32")) == bytes(24)
    with pytest.raises(ArgumentTypeError):
        arena.full((2, 3), None, "float32")
    assert arena.stats.n_regions == 3


def test_from_array_takes_shape_type_and_contents(case):
    for values in (
        [[1.0, 2.0]],
        3,
        True,
        np.float32(2),
        np.arange(4, dtype=np.int16),
        np.zeros((0, 3), np.uint8),
    ):
        region = case.arena(4096).from_array(values)
        assert region.shape == np.shape(values)
        assert region.dtype == np.asarray(values).dtype
        assert raw_bytes(region.array) == np.asarray(values).tobytes()
    for values in (np.array([object()]), None, [None], np.float32([1]).astype(">f4")):
        with pytest.raises(DTypeError):
            case.arena(4096).from_array(values)


def test_an_empty_region_is_written_and_read(case):
    for shape in ((0,), (2, 0, 3)):
        region = case.arena(64).alloc(shape, "float32", fill=1)
        region[...] = np.zeros(shape)
        region[...] = 5
        assert tuple(region.array.shape) == shape
        assert raw_bytes(region.array) == b""


def test_an_augmented_assignment_to_an_element_is_refused_rather_than_lost(case):
    region = case.arena(64).alloc(3, "int32", fill=1)
    with pytest.raises(TypeError):
        region[0] += 1
    region.array[0] += 1
    assert raw_bytes(region.array) == np.int32([2, 1, 1]).tobytes()


__all__ = [name for name in globals() if name.startswith("test_")]
