"""One table of element types: canonical name, and what NumPy, ml_dtypes, torch and CuPy call it.

>>> as_dtype("bfloat16").itemsize
2
>>> as_dtype("float32") == as_dtype("f4")
True
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import ml_dtypes
import numpy as np

from gpuarena.errors import DTypeError

__all__ = ["DType", "as_dtype", "known_names"]

# name -> itemsize in bytes, for the types that NumPy lacks; ml_dtypes and torch agree on the names they share.
# Types below a byte (int4, float6, ...) take one byte an element in both libraries; torch's `_x2` and
# `bits` types pack several values into an element, and shapes count those elements.
_EXTRA: dict[str, int] = {
    "bfloat16": 2,
    "complex32": 4,
    "bcomplex32": 4,
    "float8_e3m4": 1,
    "float8_e4m3": 1,
    "float8_e4m3b11fnuz": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float6_e2m3fn": 1,
    "float6_e3m2fn": 1,
    "float4_e2m1fn": 1,
    "float4_e2m1fn_x2": 1,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    "bits8": 1,
    "bits16": 2,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
}
_PLAIN = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


class DType:
    """An element type, one object per name.

    Attributes
    ----------
    name : str
        Canonical name: NumPy's (``"float32"``), ml_dtypes' and torch's (``"bfloat16"``, ``"float8_e4m3fn"``).
    itemsize : int
        Bytes an element.
    alignment : int
        Bytes; the address of every region of this type is a multiple of it.
    numpy : numpy.dtype or None
        The NumPy or ml_dtypes type, None where there is none (torch's ``bits8``).

    Notes
    -----
    A `DType` equals whatever `as_dtype` turns into it: ``region.dtype == "bfloat16"``, ``== torch.bfloat16``.
    """

    __slots__ = ("alignment", "itemsize", "name", "numpy")

    def __init__(self, name: str, itemsize: int, alignment: int, numpy: np.dtype[Any] | None) -> None:
        self.name = name
        self.itemsize = itemsize
        self.alignment = alignment
        self.numpy = numpy

    @property
    def torch(self) -> Any:
        """The ``torch.dtype`` of the same name; `DTypeError` where torch has none."""
        import torch

        found = getattr(torch, self.name, None)
        if not isinstance(found, torch.dtype):
            raise DTypeError(f"torch {torch.__version__} has no dtype {self.name!r}", dtype=self.name)
        return found

    def require_numpy(self) -> np.dtype[Any]:
        """Return the NumPy type; `DTypeError` where NumPy and ml_dtypes have none."""
        if self.numpy is None:
            raise DTypeError(f"NumPy and ml_dtypes have no dtype {self.name!r}", dtype=self.name)
        return self.numpy

    def __repr__(self) -> str:
        return f"DType({self.name!r})"

    def __str__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DType):
            return self.name == other.name
        try:
            return as_dtype(other).name == self.name
        except DTypeError:
            return NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return as_dtype, (self.name if self.name in _TABLE else self.numpy,)


def _build() -> dict[str, DType]:
    sizes = {name: np.dtype(name).itemsize for name in _PLAIN} | _EXTRA
    table = {}
    for name, itemsize in sizes.items():
        scalar = name if name in _PLAIN else getattr(ml_dtypes, name, None)  # old ml_dtypes lack the newest
        # torch views a storage at multiples of the item size only, hence alignment = itemsize
        table[name] = DType(name, itemsize, itemsize, None if scalar is None else np.dtype(scalar))
    return table


_TABLE: dict[str, DType] = _build()


#: Short names that mean the same wherever they are used; what NumPy and torch read differently ("float") is NumPy's.
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def known_names() -> tuple[str, ...]:
    """Return the canonical names of the table; NumPy's structured, text and time types work on top of it."""
    return tuple(_TABLE)


@functools.lru_cache(maxsize=1024)
def _lookup(dtype: Any) -> DType:
    if isinstance(dtype, DType):
        return dtype
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
        if name not in _TABLE:
            raise DTypeError(
                f"{dtype} cannot be kept in an arena: it carries quantisation parameters", dtype=name
            )
        return _TABLE[name]
    if isinstance(dtype, str):
        name = _ALIASES.get(dtype, dtype)
        if name in _TABLE:
            return _TABLE[name]
    if dtype is None:
        raise DTypeError("dtype None: say which, for example 'float32'")
    if isinstance(dtype, np.dtype) and dtype.fields is not None:
        raise TypeError("not cached: two structures can be equal and differ in alignment")
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise DTypeError(f"unknown dtype {dtype!r}; {_advice(dtype)}") from error
    return _from_numpy(found)


def _advice(dtype: Any) -> str:
    """Return what to give in place of an unknown dtype."""
    if isinstance(dtype, int):
        return "a shape of several dimensions is one tuple: alloc((4, 4), 'float32')"
    near = []
    if isinstance(dtype, str):
        import difflib

        near = difflib.get_close_matches(dtype.lower().removeprefix("torch."), [*_TABLE, *_ALIASES], n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return "for example 'float32', 'bfloat16' or 'int8'; gpuarena.dtypes.known_names() has all, besides NumPy's own"


def _from_numpy(found: np.dtype[Any]) -> DType:
    known = _TABLE.get(found.name)
    if known is not None and found.isnative and known.numpy == found:
        return known
    if found.hasobject:
        raise DTypeError(f"dtype {found} holds Python objects; an arena holds bytes", dtype=str(found))
    if found.subdtype is not None:
        raise DTypeError(f"dtype {found} is a sub-array; put its dimensions into the shape", dtype=str(found))
    if not found.isnative:
        raise DTypeError(
            f"dtype {found.str} has the other byte order; convert to native first", dtype=found.str
        )
    if found.itemsize == 0:
        raise DTypeError(f"dtype {found.str} has elements of no bytes", dtype=found.str)
    name = found.str if found.fields is None else str(found)
    return DType(name, found.itemsize, found.alignment, found)


def as_dtype(dtype: Any) -> DType:
    """Return the `DType` of a name, a NumPy, ml_dtypes, CuPy or torch dtype, or a scalar type such as `float`.

    Raises
    ------
    DTypeError
        Unknown; or a type that is not plain bytes in native order: objects, sub-arrays, the other byte
        order, torch's quantised types.

    Examples
    --------
    >>> as_dtype(float).name
    'float64'
    """
    try:
        return _lookup(dtype)
    except TypeError as error:
        if isinstance(error, DTypeError):
            raise
        # A NumPy structure is not cached, or not hashable when it is given by its fields.
    if isinstance(dtype, (list, dict, np.dtype)):
        fields: Any = dtype
        try:
            return _from_numpy(np.dtype(fields))
        except DTypeError:
            raise
        except (TypeError, ValueError) as error:
            raise DTypeError(f"unknown dtype {dtype!r}") from error
    raise DTypeError(f"{type(dtype).__name__} is not a dtype")
