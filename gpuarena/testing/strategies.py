"""Hypothesis strategies for what goes into an arena, right and wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpuarena.debug import Debug

__all__ = [
    "DTYPES",
    "alignments",
    "debug_settings",
    "indices",
    "negative_shapes",
    "overflowing_shapes",
    "programs",
    "shapes",
    "wrong_alignments",
    "wrong_dtypes",
    "wrong_shapes",
]

#: Element types that every backend has, of 1, 2, 4, 8 and 16 bytes. Not bool, which cannot hold any byte.
DTYPES = ("uint8", "float8_e4m3fn", "int16", "bfloat16", "float32", "int64", "complex128")

_HUGE = (2**31, 2**32, 2**33, 2**62, 2**63 - 1, 2**63, 2**64)


def shapes(*, max_dims: int = 3, max_side: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    """Return shapes of `max_dims` dimensions at most: ``()`` and dimensions of 0 among them."""
    return hnp.array_shapes(min_dims=0, max_dims=max_dims, min_side=0, max_side=max_side)


def alignments(largest: int = 1024) -> st.SearchStrategy[int]:
    """Return powers of two from 1 to `largest`, in bytes."""
    return st.sampled_from([1 << power for power in range(largest.bit_length())])


def indices(shape: tuple[int, ...], *, negative_steps: bool = True) -> st.SearchStrategy[Any]:
    """Return NumPy's basic indices of an array of `shape`, ``...`` and ``None`` among them."""
    found = hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True)
    return found if negative_steps else found.filter(lambda key: not steps_backwards(key))


def steps_backwards(key: Any) -> bool:
    """Return whether an index has a slice with a negative step."""
    keys: Sequence[Any] = key if isinstance(key, tuple) else (key,)
    return any(isinstance(k, slice) and k.step is not None and k.step < 0 for k in keys)


def debug_settings() -> st.SearchStrategy[Debug | None]:
    """Return settings of debug mode that keep everything in one buffer, and as often None."""
    return st.none() | st.builds(
        Debug,
        poison=st.sampled_from([True, True, True, False]),
        guard=st.sampled_from([64, 1, 0, 13]),
        call_sites=st.booleans(),
        on_live_arrays=st.sampled_from(["warn", "raise", "ignore"]),
        strict=st.sampled_from([False] * 5 + [True]),  # most calls are refused in it
    )


@st.composite
def _shapes_with(draw: st.DrawFn, part: st.SearchStrategy[Any]) -> tuple[Any, ...]:
    """Return shapes in which `part` stands somewhere, next to zeros and other dimensions."""
    dims: list[Any] = draw(st.lists(st.integers(0, 3), max_size=3))
    for _ in range(draw(st.integers(1, 2))):
        dims.insert(draw(st.integers(0, len(dims))), draw(part))
    return tuple(dims)


def negative_shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """Return shapes with a negative dimension: after a zero, or two of them, whose product is positive."""
    return _shapes_with(st.integers(-3, -1) | st.just(-(2**63)))


def wrong_shapes() -> st.SearchStrategy[Any]:
    """Return what is no shape at all: dimensions that are no integers, and things that are no sequence of them."""
    no_integers: list[Any] = [True, 2.0, None, "3", (1,)]
    return _shapes_with(st.sampled_from(no_integers)) | st.sampled_from(
        [None, 2.0, True, "12", {1: 2}, object()]
    )


@st.composite
def overflowing_shapes(draw: st.DrawFn, itemsize: int = 1) -> tuple[int, ...]:
    """Return shapes whose dimensions, zeros left out, multiply to 2**63 bytes or more; a zero may be among them."""
    dims: list[int] = draw(st.lists(st.sampled_from(_HUGE), min_size=1, max_size=3))
    product = itemsize
    for dim in dims:
        product *= dim
    while product < 2**63:
        dims.append(2**32)
        product *= 2**32
    if draw(st.booleans()):
        dims.insert(draw(st.integers(0, len(dims))), 0)
    return tuple(dims)


def wrong_dtypes() -> st.SearchStrategy[Any]:
    """Return what is no element type of an arena on any backend."""
    wrong: list[Any] = ["float31", "object", ">f4", ("f4", (2,)), "S0", None, 3, 1.5, object(), ["x"]]
    return st.sampled_from(wrong)


def wrong_alignments() -> st.SearchStrategy[Any]:
    """Return what is no alignment: no power of two, or no integer."""
    wrong: list[Any] = [0, -1, -256, 3, 24, 257, 2**63 + 1, True, 16.0, "16", [16]]
    return st.sampled_from(wrong)


def programs(
    max_steps: int = 40, *, largest_alignment: int = 1024, parts: bool = False
) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """Return calls for `Driver.step`: each a name and its arguments, numbers standing for things made before.

    With `parts`, calls on the high end, on children, frames and spilled regions, and growth are among them.
    """
    number = st.integers(0, 30)
    byte = st.integers(0, 255)
    align = st.none() | alignments(largest_alignment)
    bound = st.none() | st.integers(-7, 7)
    part = (
        st.builds(slice, bound, bound, st.none() | st.integers(1, 3))
        | st.integers(-7, 6)
        | st.sampled_from([None, Ellipsis])
    )
    keys = st.lists(part, max_size=4).map(tuple)
    dtypes = st.sampled_from(DTYPES)
    calls = [
        st.tuples(st.just("alloc"), shapes(), dtypes, align, byte),
        st.tuples(st.just("fill"), st.integers(-1, 1), align, byte),
        st.tuples(
            st.just("alloc"), negative_shapes() | wrong_shapes() | overflowing_shapes(), dtypes, align, byte
        ),
        st.tuples(st.just("alloc"), shapes(), wrong_dtypes(), align, byte),
        st.tuples(st.just("alloc"), shapes(), dtypes, wrong_alignments(), byte),
        st.tuples(st.just("slice"), number, keys),
        st.tuples(st.just("view"), number, dtypes),
        st.tuples(st.just("reshape"), number, st.lists(st.integers(-1, 6), max_size=3)),
        st.tuples(st.just("write"), number, byte),
        st.tuples(st.just("copy"), number, number),
        st.tuples(st.just("checkpoint")),
        st.tuples(st.just("rollback"), number),
        st.tuples(st.just("keep"), number),
        st.tuples(st.just("reset")),
        st.tuples(st.just("open")),
        st.tuples(st.just("close"), st.booleans()),
    ]
    if not parts:
        return st.lists(st.one_of(calls), max_size=max_steps)
    side = st.sampled_from(["low", "high"])
    small = shapes(max_dims=2, max_side=4)
    last = st.sampled_from([-1, -1, 0, 5])
    inside = st.one_of(
        st.tuples(st.just("alloc"), small, dtypes, st.none(), byte, side),
        st.tuples(st.just("extend"), last, st.integers(-1, 3), byte),
        st.tuples(st.just("checkpoint"), side),
        st.tuples(st.just("rollback"), last),
        st.tuples(st.just("spill"), last),
        st.tuples(st.just("restore"), last),
    )
    more = [
        inside,
        inside,
        st.tuples(st.just("open"), side),
        st.tuples(st.just("frame"), st.lists(st.tuples(small, dtypes), min_size=1, max_size=3), byte, side),
        st.tuples(st.just("child"), st.integers(1, 200), side),
        st.tuples(st.just("inside"), number, inside),
    ]
    return st.lists(st.one_of(*more, *more, *calls), max_size=max_steps)
