"""Texts and token ids in the forms that people have them, as rows of ids and a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpuarena.errors import ArgumentError, ArgumentTypeError, ShapeError

__all__ = ["as_tokens", "expanded", "joined"]


def as_tokens(value: Any, tokenizer: Any, *, is_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids int64 and mask bool, ``[rows, n]`` on the CPU; rows of different lengths are padded on the left.

    >>> as_tokens([[5, 6], [7]], None, is_first=True)
    (tensor([[5, 6],
            [0, 7]]), tensor([[ True,  True],
            [False,  True]]))

    Parameters
    ----------
    value
        A text or several, ids ``[n]`` or ``[rows, n]`` or several ``[n_i]``, or what a tokenizer returns.
    tokenizer : optional
        For texts.
    is_first : bool
        Whether the tokenizer may add what begins a text.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        It is nothing of that kind, or a text without a tokenizer.
    """
    mask = None
    if isinstance(value, str) or (_is_list(value) and len(value) and all(isinstance(t, str) for t in value)):
        if tokenizer is None:
            raise ArgumentError("a text needs a tokenizer: give tokenizer=, or token ids")
        value = tokenizer(value, add_special_tokens=is_first)["input_ids"]
    elif hasattr(value, "keys"):  # BatchEncoding is a mapping to all but isinstance
        if "input_ids" not in value:
            raise ArgumentTypeError(
                f"a mapping must have input_ids, this has {', '.join(map(str, value.keys()))}"
            )
        mask, value = value.get("attention_mask"), value["input_ids"]
    rows = _rows(value)
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    if mask is not None:
        try:
            found = torch.as_tensor(mask).detach().cpu() != 0
        except (TypeError, ValueError, RuntimeError) as error:
            raise ArgumentTypeError(f"attention_mask must be 0 and 1: {error}") from error
        found = found[None] if found.ndim == 1 else found
        if found.shape != ids.shape:
            raise ShapeError(f"attention_mask is {list(found.shape)}, input_ids are {list(ids.shape)}")
        return ids, found
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(width)[None] >= (width - lengths)[:, None]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _rows(value: Any) -> list[torch.Tensor]:
    """Return the ids of each row, ``[n_i]`` int64 on the CPU."""
    if _is_list(value) and len(value) and (_is_list(value[0]) or isinstance(value[0], torch.Tensor)):
        found = [_ids(row) for row in value]
        if all(row.ndim == 1 for row in found):
            return found
    else:
        ids = _ids(value)
        if ids.ndim in (1, 2) and len(ids):
            return [ids] if ids.ndim == 1 else list(ids.unbind(0))
        if ids.ndim == 1:
            return [ids]
    raise ArgumentTypeError("token ids must be [n] or [rows, n] integers, or several [n_i]")


def _ids(value: Any) -> torch.Tensor:
    try:
        ids = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(f"token ids must be integers, not {type(value).__name__}: {error}") from error
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise ArgumentTypeError(f"token ids must be integers, not {ids.dtype}")
    return ids.detach().to("cpu", torch.long)


def expanded(ids: torch.Tensor, mask: torch.Tensor, n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of `n_rows` rows: those that are given, or one for all.

    Raises
    ------
    ShapeError
        They have other numbers of rows.
    """
    if ids.shape[0] not in (1, n_rows):
        raise ShapeError(f"token ids of {ids.shape[0]} rows are given, {n_rows} are wanted, or one for all")
    return ids.expand(n_rows, -1), mask.expand(n_rows, -1)


def joined(
    ids: torch.Tensor, mask: torch.Tensor, new_ids: torch.Tensor, new_mask: torch.Tensor, device: Any
) -> dict[str, torch.Tensor]:
    """Return ids and masks one behind the other, under the names that `generate` has for them."""
    return {
        "input_ids": torch.cat([ids, new_ids], dim=1).to(device),
        "attention_mask": torch.cat([mask, new_mask], dim=1).long().to(device),
    }
