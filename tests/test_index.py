from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpuarena import _index
from gpuarena._index import Layout
from gpuarena.errors import ArgumentTypeError, ShapeError

# NumPy is the oracle: an array whose elements count up from 0 shows where the elements of a view lie.
array_shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
itemsizes = st.sampled_from([1, 2, 4, 8, 16])


def numbered(shape, itemsize=1):
    """An array of `shape` with 16-byte items at most, and its layout as the library has it."""
    array = np.arange(int(np.prod(shape)) * itemsize, dtype=np.uint8).view(f"V{itemsize}").reshape(shape)
    return array, Layout(0, shape, tuple(_strides(shape, itemsize)))


def _strides(shape, itemsize):
    # not array.strides, which NumPy sets to 0 for empty arrays
    return [itemsize * int(np.prod([max(dim, 1) for dim in shape[axis + 1 :]])) for axis in range(len(shape))]


def assert_same(layout, view, array):
    view = np.asarray(view)
    assert layout.shape == view.shape
    if view.size:
        assert layout.offset == view.ctypes.data - array.ctypes.data
        for dim, ours, theirs in zip(view.shape, layout.strides, view.strides, strict=True):
            assert dim == 1 or ours == theirs


@given(st.data(), array_shapes, itemsizes)
def test_every_basic_index_is_numpys(data, shape, itemsize):  # D3
    array, layout = numbered(shape, itemsize)
    key = data.draw(hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    view = array[key] if isinstance(key, tuple) else array[(key,)]
    assert_same(
        _index.index(layout, key), view if isinstance(view, np.ndarray) else array[(..., *_tuple(key))], array
    )


def _tuple(key):
    return key if isinstance(key, tuple) else (key,)


@given(st.data(), array_shapes)
def test_an_index_of_an_index_is_relative_to_the_base(data, shape):  # D4
    array, layout = numbered(shape)
    first = data.draw(hnp.basic_indices(shape, allow_newaxis=True))
    middle = array[(*_tuple(first), ...)] if Ellipsis not in _tuple(first) else array[first]
    second = data.draw(hnp.basic_indices(middle.shape, allow_newaxis=True))
    view = middle[(*_tuple(second), ...)] if Ellipsis not in _tuple(second) else middle[second]
    assert_same(_index.index(_index.index(layout, first), second), view, array)


@given(st.data(), array_shapes)
def test_a_view_lies_inside_what_it_is_a_view_of(data, shape):  # D5
    array, layout = numbered(shape)
    offset, new_shape, strides = _index.index(layout, data.draw(hnp.basic_indices(shape, allow_newaxis=True)))
    assert 0 <= offset <= array.nbytes
    if 0 not in new_shape:
        reach = [(dim - 1) * stride for dim, stride in zip(new_shape, strides, strict=True)]
        assert offset + sum(min(step, 0) for step in reach) >= 0
        assert offset + sum(max(step, 0) for step in reach) < array.nbytes


@given(st.data(), array_shapes.filter(lambda shape: shape != ()))
def test_an_integer_out_of_range_is_an_index_error_and_a_slice_is_clamped(data, shape):  # D6
    array, layout = numbered(shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    before = (slice(None),) * axis
    position = data.draw(st.sampled_from([shape[axis], shape[axis] + 7, -shape[axis] - 1, 2**70, -(2**70)]))
    with pytest.raises(IndexError):
        _index.index(layout, (*before, position))
    bound = data.draw(st.integers(-10, 10) | st.just(2**70))
    key = (
        *before,
        data.draw(st.sampled_from([slice(bound, None), slice(None, bound), slice(None, bound, -1)])),
    )
    assert_same(_index.index(layout, key), array[key], array)


@pytest.mark.parametrize("key", [(0, 0), (0, ..., 0), (..., 0, 0), (None, 0, 0)])
def test_more_indices_than_dimensions_are_an_index_error(key):
    array, layout = numbered((3,))
    with pytest.raises(IndexError):
        array[key]
    with pytest.raises(IndexError):
        _index.index(layout, key)


def test_two_ellipses_are_an_index_error():
    with pytest.raises(IndexError, match="single ellipsis"):
        _index.index(numbered((3,))[1], (..., ...))


def test_more_dimensions_than_numpy_has_are_an_index_error():
    array, layout = numbered((3,))
    with pytest.raises(IndexError):
        array[(None,) * 64]
    with pytest.raises(IndexError, match="65 dimensions"):
        _index.index(layout, (None,) * 64)
    assert len(_index.index(layout, (None,) * 63).shape) == 64


@pytest.mark.parametrize(
    "key",
    [
        1.0,
        True,
        False,
        np.True_,
        "0",
        [0],
        [True, False, True],
        np.array([0, 1]),
        np.array([0]),
        np.array(True),
        (0, 1.5),
        slice(0.0, 2),
        slice(None, None, 1.0),
        slice(True, None),
        slice("a", None),
        {},
        object(),
    ],
)
def test_what_would_need_a_copy_or_is_no_index_is_a_type_error(key):  # D6
    with pytest.raises(ArgumentTypeError):
        _index.index(numbered((3, 4))[1], key)


def test_torch_tensors_of_one_bool_are_masks_and_of_one_integer_are_not():
    torch = pytest.importorskip("torch")
    layout = numbered((3, 4))[1]
    for key in (torch.tensor(True), torch.tensor([1]), torch.tensor(1.0), slice(torch.tensor(1.5), None)):
        with pytest.raises((ArgumentTypeError, TypeError)):
            _index.index(layout, key)
    assert _index.index(layout, torch.tensor(2)) == _index.index(layout, 2)


@pytest.mark.parametrize("integer", [np.int8(-1), np.uint64(2), np.array(2), 2])
def test_all_integers_are_indices(integer):
    array, layout = numbered((3, 4))
    assert_same(_index.index(layout, integer), array[int(integer)], array)
    assert_same(_index.index(layout, slice(integer, None)), array[int(integer) :], array)


def test_a_step_of_zero_is_refused_as_numpy_refuses_it():
    array, layout = numbered((3,))
    with pytest.raises(ValueError, match="zero"):
        array[::0]
    with pytest.raises(ShapeError, match="zero"):
        _index.index(layout, slice(None, None, 0))


@given(st.data(), array_shapes)
def test_steps_backwards_finds_negative_steps(data, shape):
    key = data.draw(hnp.basic_indices(shape, allow_newaxis=True))
    expected = any(isinstance(k, slice) and k.step is not None and k.step < 0 for k in _tuple(key))
    assert _index.steps_backwards(key) == expected


@given(array_shapes, st.lists(st.integers(-2, 12) | st.just(np.int64(-1)), max_size=4))
def test_reshape_is_numpys(shape, new):  # D7
    array, _ = numbered(shape)
    try:
        if min(new, default=0) < -1:  # NumPy takes any negative number for -1; a typing error is likelier
            raise ValueError
        expected = array.reshape(tuple(new)).shape
    except ValueError:
        with pytest.raises(ShapeError):
            _index.reshape(shape, new)
    else:
        assert _index.reshape(shape, new) == expected
        assert _index.reshape(shape, (tuple(new),)) == expected
        assert all(type(dim) is int for dim in _index.reshape(shape, new))


@pytest.mark.parametrize("new", [(2.0, 3), (True, 6), ("6",), (None,), ([2], 3)])
def test_reshape_takes_integers(new):
    with pytest.raises(ArgumentTypeError):
        _index.reshape((2, 3), new)


@given(array_shapes, itemsizes, itemsizes)
def test_recast_is_numpys_view(shape, itemsize, new_itemsize):  # D7
    array = np.zeros(shape, f"V{itemsize}")
    try:
        expected = array.view(f"V{new_itemsize}").shape
    except ValueError:
        with pytest.raises(ShapeError):
            _index.recast(shape, itemsize, new_itemsize)
    else:
        assert _index.recast(shape, itemsize, new_itemsize) == expected


@given(array_shapes, array_shapes)
def test_broadcasting_is_what_numpys_assignment_does(source, target):
    array = np.zeros(target)
    try:
        array[...] = np.zeros(source)
    except ValueError:
        with pytest.raises(ShapeError):
            _index.check_broadcast(source, target)
    else:
        _index.check_broadcast(source, target)


@given(hnp.mutually_broadcastable_shapes(num_shapes=1, base_shape=(3, 1, 4), max_dims=5, min_side=0))
def test_broadcasting_of_shapes_that_nearly_fit(shapes):
    test_broadcasting_is_what_numpys_assignment_does.hypothesis.inner_test(shapes.input_shapes[0], (3, 1, 4))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (3, (3,)),
        ((), ()),
        ([2, 3], (2, 3)),
        ((np.int8(2), np.uint64(3)), (2, 3)),
        (np.int64(4), (4,)),
        (np.array(4), (4,)),
    ],
)
def test_a_shape_becomes_a_tuple_of_int(shape, expected):  # S6
    parsed = _index.parse_shape(shape)
    assert parsed == expected
    assert all(type(dim) is int for dim in parsed)


def test_a_torch_size_is_a_shape():  # S6
    torch = pytest.importorskip("torch")
    assert _index.parse_shape(torch.Size([2, 3])) == (2, 3)
    assert _index.parse_shape((torch.tensor(2), 3)) == (2, 3)


@pytest.mark.parametrize(
    "shape",
    [
        None,
        2.0,
        True,
        "23",
        {2: 3},
        {2, 3},
        (2, None),
        (2.0,),
        (True, 2),
        (np.True_,),
        ("2",),
        ((2,),),
        np.array([2, 3]),
    ],
    ids=repr,
)
def test_what_is_no_shape_is_a_type_error(shape):  # S6
    with pytest.raises(ArgumentTypeError):
        _index.parse_shape(shape)


@pytest.mark.parametrize("shape", [(-1, 2.0), (2.0, -1)])
def test_the_types_of_all_dimensions_come_before_their_signs(shape):  # F5
    with pytest.raises(ArgumentTypeError):
        _index.parse_shape(shape)


def test_negative_dimensions_and_too_many_of_them_are_refused():  # S1
    for shape in [(-1,), (0, -1), (-1, 0), (-2, -3), (5, -(2**70))]:
        with pytest.raises(ShapeError, match="negative"):
            _index.parse_shape(shape)
    assert _index.parse_shape((1,) * 64) == (1,) * 64
    with pytest.raises(ShapeError, match="65 dimensions"):
        _index.parse_shape((1,) * 65)
