from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpuarena import _bump
from gpuarena.testing import alignments, negative_shapes, overflowing_shapes, shapes

positions = st.integers(0, 5000) | st.integers(0, 2**63)


@given(st.integers(-10, 5000) | st.sampled_from([2**62, 2**63 + 1, 2**64, 3 * 2**62]))
def test_an_alignment_is_a_power_of_two(align):
    assert _bump.is_alignment(align) == (align in {2**power for power in range(70)})


@given(positions, alignments(2**40))
def test_align_up_gives_the_smallest_multiple_that_is_not_below(position, align):
    aligned = _bump.align_up(position, align)
    assert aligned % align == 0
    assert position <= aligned < position + align


@given(top=positions, nbytes=st.integers(0, 100), align=alignments(2**20), base=positions)
def test_place_aligns_the_address_and_skips_less_than_the_alignment(top, nbytes, align, base):
    offset = _bump.place(top, nbytes, align, base)
    if nbytes == 0:
        assert offset == top
    else:
        assert (base + offset) % align == 0
        assert top <= offset < top + align


@given(offset=positions, nbytes=st.integers(0, 200), capacity=positions)
def test_a_region_fits_when_its_last_byte_lies_inside(offset, nbytes, capacity):
    last = range(offset, offset + nbytes)
    assert _bump.fits(offset, nbytes, capacity) == (not last or last[-1] < capacity)


def test_a_region_fits_exactly():
    assert _bump.fits(10, 6, 16)
    assert not _bump.fits(10, 7, 16)
    assert _bump.fits(17, 0, 16)


@given(hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=9), st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_nbytes_is_numpys(shape, itemsize):
    assert _bump.nbytes_of(shape, itemsize) == np.zeros(shape, f"V{itemsize}").nbytes


@given(negative_shapes(), st.sampled_from([1, 2, 8]))
def test_a_negative_dimension_is_refused_in_any_position(shape, itemsize):
    with pytest.raises(ValueError, match="negative"):
        _bump.nbytes_of(shape, itemsize)


@given(overflowing_shapes(4))
def test_sizes_do_not_wrap(shape):
    with pytest.raises(OverflowError):
        _bump.nbytes_of(shape, 4)


@pytest.mark.parametrize(
    "shape", [(2**32, 2**32), (2**31, 2**33), (2**63,), (0, 2**63 - 1, 2), (2**63 - 1, 0, 2)]
)
def test_products_that_a_64_bit_integer_wraps_to_something_harmless_are_refused(shape):
    with pytest.raises(OverflowError):
        _bump.nbytes_of(shape, 1)


def test_the_largest_size_is_the_largest_signed_64_bit_integer():
    assert _bump.nbytes_of((2**63 - 1,), 1) == 2**63 - 1
    assert _bump.nbytes_of((0, 2**63 - 1), 1) == 0


@given(
    st.lists(st.sampled_from([0, 1, 2, 3, 2**20, 2**31, 2**40]), max_size=4),
    st.sampled_from(["u1", "f4", "c16"]),
)
def test_an_empty_shape_is_refused_exactly_when_numpy_refuses_it(dims, dtype):
    shape = (0, *dims)
    try:
        np.empty(shape, dtype)
    except ValueError:
        with pytest.raises(OverflowError):
            _bump.nbytes_of(shape, np.dtype(dtype).itemsize)
    else:
        assert _bump.nbytes_of(shape, np.dtype(dtype).itemsize) == 0


@given(shapes(max_dims=4, max_side=5).filter(lambda shape: 0 not in shape), st.sampled_from([1, 2, 4, 16]))
def test_contiguous_strides_are_numpys(shape, itemsize):
    array = np.zeros(shape, f"V{itemsize}")
    assert _bump.contiguous_strides(shape, itemsize) == array.strides
    assert _bump.is_contiguous(shape, array.strides, itemsize)


@given(st.data())
def test_contiguity_is_numpys(data):
    array = np.zeros(data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)), np.int16)
    view = array[data.draw(hnp.basic_indices(array.shape, allow_newaxis=True))]
    view = view if isinstance(view, np.ndarray) else np.asarray(view)
    strides = view.strides
    if data.draw(st.booleans()):
        view, strides = view.T, strides[::-1]
    assert _bump.is_contiguous(view.shape, strides, 2) == view.flags.c_contiguous


def test_the_arithmetic_needs_no_other_module_of_the_library():
    tree = ast.parse(Path(_bump.__file__).read_text())
    imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [
        line
        for line in imports
        if "math" not in line
        and "__future__" not in line
        and "typing" not in line
        and "collections.abc" not in line
    ]
