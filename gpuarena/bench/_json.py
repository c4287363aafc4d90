"""Results as JSON that every reader takes, whatever a figure turned out to be."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["as_json"]


def as_json(results: Any, *, indent: int | None = None) -> str:
    r"""Return results as JSON; numbers that JSON does not have become null, and other objects what they print.

    >>> as_json({"ratio": float("nan"), "quartiles_s": (1.0, float("inf")), "dtype": complex})
    '{"ratio": null, "quartiles_s": [1.0, null], "dtype": "<class \'complex\'>"}'
    """
    return json.dumps(_plain(results), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (str, int)):  # a bool is an int
        return value
    try:
        number = float(value)  # also a number of NumPy
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None
