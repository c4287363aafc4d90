"""A spec as a plain table."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuarena.kv.spec import KVSpec, LayerSpec

__all__ = ["spec_table"]

_HEADINGS = ("layers", "heads", "keys", "values", "dtype", "window", "slots", "bytes/token", "total")
_RIGHT = {"heads", "keys", "values", "slots", "bytes/token"}


def spec_table(spec: KVSpec, batch: int, tokens: int) -> str:
    """Return one line for each run of equal layers; see `KVSpec.table`."""
    from gpuarena.kv.spec import LayerSpec

    total = _short(spec.nbytes(batch, tokens))  # first, since it checks the numbers
    rows = [list(_HEADINGS)]
    for layer, run in groupby(enumerate(spec.layers), key=lambda item: item[1]):
        numbers = [number for number, _ in run]
        name = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        if isinstance(layer, LayerSpec):
            rows.append([name, *_cells(layer, len(numbers), batch, tokens)])
        else:
            rows.append([name, f"layer {layer.source}"])
    rows.append(["sum", *[""] * 6, str(spec.bytes_per_token), total])
    widths = [max(len(row[column]) for row in rows if len(row) == len(_HEADINGS)) for column in range(9)]
    widths[0] = max(len(row[0]) for row in rows)  # a shared layer has a name too
    return "\n".join(_line(row, widths) for row in rows)


def _cells(layer: LayerSpec, n_layers: int, batch: int, tokens: int) -> list[str]:
    dtype = layer.dtype.name
    if layer.value_dtype != layer.dtype:
        dtype += f"/{layer.value_dtype.name}"
    if layer.storage is not None:
        dtype += f" as {layer.storage}"
    window = "all" if layer.window is None else str(layer.window)
    if layer.sinks:
        window = f"{layer.sinks} + {window}"
    if layer.slack is not None:
        window += f" + {layer.slack}"
    return [
        str(layer.kv_heads),
        str(layer.key_dim),
        str(layer.value_dim),
        dtype,
        window,
        str(layer.n_slots(tokens)),
        str(layer.bytes_per_token * n_layers),
        _short(sum(layer.region_nbytes(batch, tokens)) * n_layers),
    ]


def _line(row: list[str], widths: list[int]) -> str:
    if len(row) == 2:  # a shared layer
        return f"{row[0].ljust(widths[0])}  {row[1]}"
    cells = [
        cell.rjust(width) if heading in _RIGHT else cell.ljust(width)
        for cell, width, heading in zip(row, widths, _HEADINGS, strict=True)
    ]
    return "  ".join(cells).rstrip()


def _short(nbytes: int) -> str:
    """Return a byte count in the largest binary unit, with at most two decimals."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{nbytes} B"
