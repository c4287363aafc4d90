"""The states of all layers of a cache, which are copied, restored and moved together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from gpuarena.errors import ArgumentError, CheckpointError, ShapeError
from gpuarena.kv import LayerGroup
from gpuarena_transformers.states import ArenaStateLayer, Key

__all__ = ["StateCopy", "StateGroup"]


@dataclass(frozen=True)
class StateCopy:
    """States as they were: ordinary tensors of the rows in use, freed with this object."""

    layers: list[tuple[dict[Key, torch.Tensor], dict[int, bool]]] = field(default_factory=list)
    """For each state layer its states, ``[rows, ...]``, and which of them go on from a previous one."""

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(
            state.numel() * state.element_size() for states, _ in self.layers for state in states.values()
        )


class StateGroup:
    """The state layers of one cache, and what they have in common with its keys and values: the rows.

    Parameters
    ----------
    group : LayerGroup
        The layers of keys and values of the cache.
    """

    def __init__(self, group: LayerGroup) -> None:
        self.group = group
        self.layers: list[ArenaStateLayer] = []
        self.holds_tokens = True
        """Whether other layers of the cache hold something for each token."""
        self.is_torn = False
        """Whether a step failed that had put some layers ahead of the others."""

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def is_empty(self) -> bool:
        """Whether no layer holds a state."""
        return not any(layer.holds_states for layer in self.layers)

    @property
    def has_recurrence(self) -> bool:
        """Whether any layer holds a recurrent state."""
        return any(layer.has_recurrence for layer in self.layers)

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of all state regions."""
        return sum(layer.reserved_nbytes for layer in self.layers)

    @property
    def used_nbytes(self) -> int:
        """Bytes of the states of the rows in use."""
        return sum(layer.used_nbytes for layer in self.layers)

    # -- rows ----------------------------------------------------------------------------------------------------

    def check_rows(self, index: int, shape: Any) -> None:
        """Raise `ShapeError` unless a state of this shape has as many rows as the cache holds, or may hold."""
        n_rows, held, most = int(shape[0]), self.group.rows, self.group.batch
        if held is not None and n_rows != held and not (self.is_empty and self.group.is_empty):
            raise ShapeError(
                f"layer {index}: {n_rows} rows given, the cache holds {held}; reset() starts anew, "
                f"batch_repeat_interleave(n) and batch_select_indices(rows) change the rows that are held",
                shape=tuple(shape),
            )
        if not 1 <= n_rows <= most:
            raise ShapeError(
                f"layer {index}: {n_rows} rows given, the cache was made for at most {most} (sequences times "
                f"beams or returned sequences); make it with a larger max_batch_size",
                shape=tuple(shape),
            )

    def use_rows(self, n_rows: int) -> None:
        """Note that the cache holds so many rows; a layer of states often comes before one that holds tokens."""
        self.group._common.rows = n_rows

    def reserve_scratch(self) -> None:
        """Make sure that there is memory to move the rows of states; there is after the first step.

        Raises
        ------
        OutOfMemoryError
            States were put in by hand, without keys and values, and fill the arena. Unchanged on error.
        """
        if self.group.batch > 1:
            for layer in self.layers:
                for region in layer.regions.values():
                    self.group.reserve_scratch(region.arena, region.nbytes)

    def gather(self, rows: Any, held: int | None, count: int) -> None:
        """Put rows in the place of those that are held, as the group has done with keys and values.

        Parameters
        ----------
        rows : integers
            Checked by the group.
        held : int, optional
            Rows before; None if nothing was held.
        count : int
            Rows afterwards.
        """
        if held is None or self.group.batch == 1:
            return
        with torch.no_grad():
            for layer in self.layers:
                if layer.holds_states:
                    arena = next(iter(layer.regions.values())).arena
                    ops = self.group.ops(arena)
                    index, _ = ops.row_index(rows, held)
                    layer.gather(ops, index, count, self.group._common.scratch[arena.device].array)

    def check_live(self) -> None:
        """Raise `StaleRegionError` if an arena was rolled back below the states."""
        for layer in self.layers:
            layer.check_live()

    # -- going back ----------------------------------------------------------------------------------------------

    def check_complete(self) -> None:
        """Raise `CheckpointError` unless all layers hold states, or none.

        Raises
        ------
        CheckpointError
            Some layers hold a state and others none: a step is under way, or the model keeps states elsewhere.
        """
        self.check_whole()
        if self.layers and not (self.is_empty and self.group.is_empty):
            without = next((layer for layer in self.layers if not layer.holds_states), None)
            if without is not None:
                raise CheckpointError(
                    f"layer {without.index} holds no state, while others hold states or tokens: a step is under way, "
                    f"or the model keeps that state in its own modules (as RecurrentGemma does), where no cache can "
                    f"bring it back"
                )

    def copy(self) -> StateCopy:
        """Return copies of all states."""
        if not self.layers:
            return StateCopy([])
        with torch.inference_mode(False), torch.no_grad():
            return StateCopy(
                [
                    ({key: state.clone() for key, state in layer.held()}, dict(layer.has_previous_state))
                    for layer in self.layers
                ]
            )

    def restore(self, copy: StateCopy) -> None:
        """Make the states what they were; the rows of the cache are those of the copies."""
        if not self.layers:
            return
        with torch.no_grad():
            for layer, (states, has_previous) in zip(self.layers, copy.layers, strict=True):
                layer.load(states, has_previous)
        self.is_torn = False

    def reset(self) -> None:
        """Forget all states."""
        for layer in self.layers:
            ArenaStateLayer.reset(layer)
        self.is_torn = False

    def check_cut(self, n_removed: int, n_left: int | None) -> None:
        """Raise `ArgumentError` unless the states can go back `n_removed` tokens.

        Parameters
        ----------
        n_left : int, optional
            Tokens that will be left; None where only states are held and nobody counts. With 0 left there is
            nothing to know.
        """
        if not self.layers or n_left == 0:
            return
        lengths = self.group._common.lengths
        if self.has_recurrence and (self.is_torn or (lengths and max(lengths) != min(lengths))):
            raise ArgumentError(
                "a step failed half-way, and recurrent states cannot be cut to where it began: rollback() to a "
                "checkpoint(), or reset()"
            )
        if n_removed and n_left is not None:
            without = next((layer for layer in self.layers if not layer.holds_states), None)
            if without is not None:
                raise ArgumentError(
                    f"layer {without.index} holds no state: the model keeps it in its own modules (as RecurrentGemma "
                    f"does), where no cache can cut it"
                )
        for layer in self.layers:
            reason = layer.reason_against(n_removed)
            if reason:
                raise ArgumentError(f"{n_removed} tokens cannot be removed: {reason}")

    def cut(self, n_removed: int, n_left: int | None) -> None:
        """Take `n_removed` tokens out, which `check_cut` allowed; also for 0, which drops what was recorded."""
        if n_left == 0:
            self.reset()
            return
        with torch.no_grad():
            for layer in self.layers:
                layer.cut(n_removed)

    # -- steps that fail -----------------------------------------------------------------------------------------

    def step_failed(self, index: int, *, is_behind_own: bool = True) -> None:
        """Note that layer `index` refused what it was given, behind states that were already advanced.

        `is_behind_own` says whether the states of that layer itself come before what it refused.
        """
        advanced = [
            layer for layer in self.layers if layer.index < index + is_behind_own and layer.holds_states
        ]
        if not advanced:
            return
        # The first step of all: before it there was nothing.
        if self.group.is_empty and (self.holds_tokens or len(advanced) < len(self.layers)):
            self.reset()
            self.group._common.rows = None
        else:
            self.is_torn = True

    def check_whole(self) -> None:
        """Raise `CheckpointError` if a step failed half-way."""
        if self.is_torn:
            raise CheckpointError(
                "a step failed after some recurrent states were advanced: rollback() to a checkpoint(), or reset()"
            )
