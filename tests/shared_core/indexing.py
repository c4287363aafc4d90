from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpuarena.errors import AlignmentError, ArgumentTypeError, ShapeError, StrideError
from gpuarena.testing import indices
from shared_core.case import raw_bytes

array_shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


def counting(shape, dtype=np.int32):
    return np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)


def view_of(array, key):
    """A view, of an index that gives one element too."""
    return (
        array[key]
        if isinstance(array[key], np.ndarray)
        else array[(*(key if isinstance(key, tuple) else (key,)), ...)]
    )


def has_negative_step(*keys):
    parts = [part for key in keys for part in (key if isinstance(key, tuple) else (key,))]
    return any(isinstance(part, slice) and part.step is not None and part.step < 0 for part in parts)


@given(data=st.data(), shape=array_shapes)
def test_a_basic_index_shows_the_elements_that_numpy_shows(case, data, shape):  # D3
    array = counting(shape)
    region = case.arena(4096).from_array(array)
    key = data.draw(indices(shape))
    if has_negative_step(key) and not case.negative_strides:
        with pytest.raises(StrideError, match="negative"):
            region[key]
        return
    expected = view_of(array, key)
    assert region[key].shape == expected.shape
    assert tuple(region[key].array.shape) == expected.shape
    assert raw_bytes(region[key].array) == expected.tobytes()


@given(data=st.data(), shape=array_shapes)
def test_a_slice_of_a_slice_is_the_slice(case, data, shape):  # D4
    array = counting(shape)
    region = case.arena(4096).from_array(array)
    first = data.draw(indices(shape, negative_steps=case.negative_strides))
    middle = view_of(array, first)
    second = data.draw(indices(middle.shape, negative_steps=case.negative_strides))
    assert raw_bytes(region[first][second].array) == view_of(middle, second).tobytes()


@given(data=st.data(), shape=array_shapes)
def test_writing_through_a_slice_changes_the_elements_that_numpy_changes(case, data, shape):  # D5
    array = counting(shape)
    arena = case.arena(4096)
    before = arena.alloc(3, "uint8", fill=0xAB)
    region = arena.from_array(array)
    after = arena.alloc(3, "uint8", fill=0xCD)
    key = data.draw(indices(shape, negative_steps=case.negative_strides))
    values = -1 - counting(view_of(array, key).shape)
    array[key] = values
    region[key] = values
    assert raw_bytes(region.array) == array.tobytes()
    assert raw_bytes(before.array) == b"\xab" * 3
    assert raw_bytes(after.array) == b"\xcd" * 3


@st.composite
def _spans_of_one_length(draw, dim):
    length, step = draw(st.integers(1, dim)), draw(st.integers(1, 2))
    reach = step * (length - 1) + 1
    if reach > dim:
        length, step, reach = 1, 1, 1
    return [
        slice(start, start + reach, step) for start in draw(st.tuples(*[st.integers(0, dim - reach)] * 2))
    ]


@given(rows=_spans_of_one_length(5), columns=_spans_of_one_length(6))
def test_a_slice_can_be_copied_onto_one_that_it_overlaps(case, rows, columns):
    array = counting((5, 6))
    region = case.arena(4096).from_array(array)
    target, source = zip(rows, columns, strict=True)
    array[target] = array[source]
    region[target] = region[source]
    assert raw_bytes(region.array) == array.tobytes()


def test_neighbouring_elements_can_be_moved_in_place(case):
    # torch copies element by element and would read what it has just written
    array = counting((3, 5))
    region = case.arena(4096).from_array(array)
    array[:, 1:] = array[:, :-1]
    region[:, 1:] = region[:, :-1]
    assert raw_bytes(region.array) == array.tobytes()
    array[1:] = array[:-1]
    region[1:] = region[:-1].array
    assert raw_bytes(region.array) == array.tobytes()


@given(shape=array_shapes, new=st.lists(st.integers(-1, 12), max_size=4))
def test_a_reshape_succeeds_when_numpys_does_and_never_copies(case, shape, new):  # D7
    array = counting(shape)
    region = case.arena(4096).from_array(array)
    try:
        expected = array.reshape(new)
    except ValueError:
        with pytest.raises(ShapeError):
            region.reshape(new)
        return
    reshaped = region.reshape(new)
    assert reshaped.shape == expected.shape
    assert region.reshape(*new).shape == expected.shape
    assert reshaped.address == region.address
    reshaped[...] = 7
    assert raw_bytes(region.array) == np.full_like(array, 7).tobytes()


DTYPES = ["uint8", "int16", "float32", "complex64", "complex128"]


@given(data=st.data(), shape=array_shapes, old=st.sampled_from(DTYPES), new=st.sampled_from(DTYPES))
def test_a_view_as_another_type_succeeds_when_numpys_does_and_never_copies(case, data, shape, old, new):  # D7
    array = np.frombuffer(
        np.random.default_rng(0).bytes(np.dtype(old).itemsize * int(np.prod(shape))), old
    ).reshape(shape)
    arena = case.arena(16384, alignment=16)
    if data.draw(st.booleans()):
        arena.alloc(1, "uint8")
    region = arena.from_array(array)
    try:
        expected = array.view(new)
    except ValueError:
        with pytest.raises(ShapeError):
            region.view(new)
        return
    view = region.view(new)
    assert (view.shape, view.dtype, view.address) == (expected.shape, new, region.address)
    assert raw_bytes(view.array) == array.tobytes()
    view[...] = 0
    assert not any(raw_bytes(region.array))


def test_a_view_of_bytes_at_an_odd_offset_needs_an_aligned_first_byte(case):
    arena = case.arena(256, alignment=1)
    arena.alloc(1, "uint8")
    region = arena.from_array(np.arange(16, dtype=np.uint8), align=1)
    assert region.address % 4 == 1
    with pytest.raises(AlignmentError, match="multiple of 4"):
        region[:4].view("int32")
    with pytest.raises(AlignmentError):
        region.view("int32")
    assert raw_bytes(region[3:11].view("int32").array) == bytes(range(3, 11))
    assert region[1:1].view("int32").shape == (0,)


def test_a_slice_that_is_not_contiguous_is_neither_reshaped_nor_viewed(case):  # D7
    region = case.arena(1024).from_array(counting((4, 6)))
    for strided in (region[:, ::2], region[::2, :3], region[:, 0]):
        with pytest.raises(ShapeError, match="copy"):
            strided.reshape(-1)
        with pytest.raises(ShapeError, match="copy"):
            strided.view("uint8")
    assert region[1:3].reshape(-1).shape == (12,)
    assert region[2, 1:5].view("uint8").shape == (16,)


def test_an_element_of_an_empty_region_at_the_very_end_stays_inside(case):  # D5
    # an offset that was summed up as for full dimensions would lie behind the buffer
    arena = case.arena(64, alignment=1)
    arena.alloc(64, "uint8")
    region = arena.alloc((1, 2, 0), "complex128")
    for part in (region[0, 1], region[:, 1:], region[0][1][None], region[0, -1, ::2]):
        assert part.offset == 64
        assert tuple(part.array.shape) == part.shape
        part[...] = 1
        assert raw_bytes(part.array) == b""


def test_a_0d_region_is_one_element(case):  # S5
    region = case.arena(1024).alloc((), "float32", fill=1.5)
    assert region.shape == ()
    assert region[()].shape == region[...].shape == ()
    assert raw_bytes(region[...].array) == np.float32(1.5).tobytes()
    with pytest.raises(IndexError):
        region[0]
    with pytest.raises(TypeError, match="0-d"):
        len(region)
    assert region[None].shape == (1,)


@pytest.mark.parametrize(
    "key", [1.0, True, [0], np.array([0]), np.array([True, False]), (0, [1]), "0"], ids=repr
)
def test_an_index_that_would_copy_is_a_type_error(case, key):  # D6
    region = case.arena(1024).from_array(counting((2, 3)))
    with pytest.raises(ArgumentTypeError):
        region[key]
    with pytest.raises(ArgumentTypeError):
        region[key] = 0
    assert raw_bytes(region.array) == counting((2, 3)).tobytes()


def test_an_index_out_of_range_raises_and_a_slice_is_clamped(case):  # D6
    region = case.arena(1024).from_array(counting((2, 3)))
    for key in (2, -3, (0, 3), (0, 0, 0)):
        with pytest.raises(IndexError):
            region[key]
    assert region[1:9, -9:2].shape == (1, 2)


def test_a_region_iterates_over_its_first_dimension(case):
    region = case.arena(1024).from_array(counting((3, 2)))
    assert len(region) == 3
    assert [raw_bytes(row.array) for row in region] == [row.tobytes() for row in counting((3, 2))]


__all__ = [name for name in globals() if name.startswith("test_")]
