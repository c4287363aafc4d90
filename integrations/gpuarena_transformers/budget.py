"""What fits: the keys, values and states of a cache beside what a prompt needs, on each device of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpuarena._bump import align_up
from gpuarena.errors import ArgumentError, OutOfMemoryError
from gpuarena.kv import KVSpec, LayerSpec
from gpuarena_transformers._staging import staging_nbytes
from gpuarena_transformers.layout import LayerLayout, ModelLayout
from gpuarena_transformers.prefill import PrefillCost, measure_prefill
from gpuarena_transformers.sizing import devices_of

__all__ = [
    "DeviceBudget",
    "Plan",
    "Sizing",
    "devices_of",
    "given_nbytes",
    "least_of_ranks",
    "most_tokens_in",
    "reserved_nbytes",
]

_HOST = torch.device("cpu")
_ALIGNMENT = 256  # of an arena


@dataclass(frozen=True)
class DeviceBudget:
    """Where the bytes of one device go."""

    device: torch.device
    n_layers: int
    """Layers that cache something here."""
    kv_nbytes: int
    """Keys and values, and keys of indexers, in the arena."""
    state_nbytes: int
    """Recurrent and convolution states, in the arena."""
    scratch_nbytes: int
    """What moving rows needs, and the alignment of each region, in the arena; and what stages keys and values that
    lie in host memory."""
    beside_nbytes: int
    """What layers of a model's own class hold outside the arena."""
    prefill_nbytes: int | None
    """Most that a prompt needs besides; None if that was not measured."""
    free_nbytes: int | None
    """Free when the cache was sized; None if the device does not tell."""

    @property
    def nbytes(self) -> int:
        """The sum of what is needed."""
        return self.arena_nbytes + self.beside_nbytes + (self.prefill_nbytes or 0)

    @property
    def arena_nbytes(self) -> int:
        """What the arena takes."""
        return self.kv_nbytes + self.state_nbytes + self.scratch_nbytes


@dataclass(frozen=True)
class Sizing:
    """What a cache was sized by; its text is a table."""

    n_tokens: int
    rows: int
    prefill_tokens: int
    """The longest prompt that `prefill_nbytes` is for."""
    limit: str
    """What decided the number of tokens."""
    layout: ModelLayout
    devices: tuple[DeviceBudget, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.n_tokens} tokens x {self.rows} {'row' if self.rows == 1 else 'rows'}: {self.limit}; "
            f"{self.layout.bytes_per_token} bytes a token"
        ]
        heads = ("MB on", "layers", "keys+values", "states", "scratch", "beside", "prefill", "sum", "free")
        rows: list[tuple[str, ...]] = [heads]
        for one in self.devices:
            figures = (
                one.kv_nbytes, one.state_nbytes, one.scratch_nbytes, one.beside_nbytes, one.prefill_nbytes,
                one.nbytes, one.free_nbytes,
            )  # fmt: skip
            shown = ("-" if figure is None else f"{figure / 1e6:.1f}" for figure in figures)
            rows.append((str(one.device), str(one.n_layers), *shown))
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        for row in rows:
            cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
            lines.append("  ".join(cells))
        if self.devices and self.devices[0].prefill_nbytes is not None:
            lines.append(
                f"prefill: of one prompt of {self.prefill_tokens} tokens a row, measured on shorter ones"
            )
        return "\n".join(lines)


class Plan:
    """What a cache of any length would take of each device.

    Parameters
    ----------
    layout : ModelLayout
    held : iterable of int
        The numbers of the layers that lie in the arena.
    rows : int
    free : callable
        Returns the free bytes of a device; raises `ArgumentError` where nobody knows.
    devices : iterable of torch.device
        Devices that hold weights, beside those that hold a part of the cache.
    resident : collection of int, optional
        Layers whose keys and values stay on their device, where those of the others lie in host memory; None keeps
        all there.
    """

    def __init__(
        self,
        layout: ModelLayout,
        held: Iterable[int],
        rows: int,
        free: Callable[[torch.device], int],
        devices: Iterable[torch.device] = (),
        *,
        resident: Collection[int] | None = None,
    ) -> None:
        self.layout = layout
        self.rows = rows
        self.held = frozenset(held)
        self.specs: dict[torch.device, KVSpec] = {}
        self.states: dict[torch.device, list[int]] = {}
        self.offloaded: dict[torch.device, list[LayerSpec]] = {}
        """Keys and values in host memory, by the device that reads them."""
        by_device: dict[torch.device, list[LayerSpec]] = {}
        for layer in layout.layers:
            if layer.index in self.held:
                here = list(layer.per_token)
                if resident is not None and layer.spec is not None and layer.index not in resident:
                    here.remove(layer.spec)
                    self.offloaded.setdefault(layer.device, []).append(layer.spec)
                if here:
                    by_device.setdefault(layer.device, []).extend(here)
                if layer.states:
                    self.states.setdefault(layer.device, []).extend(layer.states)
        self.specs.update((device, KVSpec(specs)) for device, specs in by_device.items())
        cached = [layer.device for layer in layout.layers if not layer.is_empty]
        host = [_HOST] if self.offloaded else []
        self.devices = tuple(dict.fromkeys([*cached, *devices, *host]))
        self.free: dict[torch.device, int | None] = {}
        self._unknown: dict[torch.device, ArgumentError] = {}
        for device in self.devices:
            try:
                self.free[device] = free(device)
            except ArgumentError as error:
                self.free[device], self._unknown[device] = None, error
        self.prefill: dict[torch.device, PrefillCost] | None = None
        self.prefill_tokens: int | None = None

    def measure_prefill(
        self,
        model: Any,
        make_cache: Callable[[int], Any],
        *,
        longest: int | None,
        prefill_tokens: int | None = None,
    ) -> None:
        """Count what a prompt of `prefill_tokens` needs from now on, or one as long as the cache if that is None."""
        windows = {spec.window for layer in self.layout.layers for spec in layer.per_token if spec.window}
        self.prefill = measure_prefill(
            model, make_cache, rows=self.rows, longest=longest, devices=self.devices, windows=windows
        )
        self.prefill_tokens = prefill_tokens

    def sizing(self, n_tokens: int, limit: str) -> Sizing:
        """Return what `n_tokens` would take."""
        prompt = n_tokens if self.prefill_tokens is None else min(n_tokens, self.prefill_tokens)
        budgets = tuple(self._budget(device, n_tokens, prompt) for device in self.devices)
        return Sizing(n_tokens, self.rows, prompt, limit, self.layout, budgets)

    def _budget(self, device: torch.device, n_tokens: int, prompt: int) -> DeviceBudget:
        here = [layer for layer in self.layout.layers if layer.device == device and not layer.is_empty]
        kv, states = self.specs.get(device), self.states.get(device, [])
        kv_nbytes = 0 if kv is None else kv.nbytes(self.rows, n_tokens)
        state_nbytes = sum(states) * self.rows
        scratch = reserved_nbytes(kv, states, self.rows, n_tokens) - kv_nbytes - state_nbytes
        scratch += 2 * staging_nbytes(self.offloaded.get(device, []), self.rows, n_tokens)
        if self.offloaded and device == _HOST:
            in_host = KVSpec([spec for specs in self.offloaded.values() for spec in specs])
            kv_nbytes += in_host.nbytes(self.rows, n_tokens)
            scratch += in_host.arena_nbytes(self.rows, n_tokens) - in_host.nbytes(self.rows, n_tokens)
        beside = sum(
            layer.bytes_per_token * n_tokens + layer.state_nbytes
            for layer in here
            if layer.index not in self.held
        )
        prefill = None
        if self.prefill is not None:
            cost = self.prefill.get(device)
            prefill = 0 if cost is None else cost.nbytes(prompt)
        return DeviceBudget(
            device,
            len(here),
            kv_nbytes,
            state_nbytes,
            scratch,
            beside * self.rows,
            prefill,
            self.free[device],
        )

    def most_tokens(self, fraction: float, longest: int | None) -> tuple[int, str]:
        """Return the most tokens that fit in `fraction` of what is free, up to `longest`, and what decided it.

        Raises
        ------
        ArgumentError
            A device does not tell what is free; nothing fits; or any number of tokens does.
        """
        for error in self._unknown.values():
            raise error
        low, limit = self._search(self._bound() if longest is None else longest, fraction)
        if limit is None:
            if longest is None:
                raise ArgumentError("any number of tokens fits; give max_context_length")
            return low, "the model's maximum"
        if low < 1:
            needed = next(one for one in self.sizing(1, "").devices if one.device == limit)
            raise ArgumentError(
                f"there is no memory free for even one token: {needed.nbytes} bytes on {limit}, of which "
                f"{fraction:.0%} of {needed.free_nbytes} free bytes may be used; give max_context_length"
            )
        return low, f"what fits in {fraction:.0%} of what is free on {limit}"

    def _search(self, high: int, fraction: float) -> tuple[int, torch.device | None]:
        """Return the most tokens up to `high` that fit, and the device that has no room for one more."""
        limit = self._over(high, fraction)
        if limit is None:
            return high, None
        low = 0
        while low < high:  # what is needed grows with the tokens
            middle = (low + high + 1) // 2
            worst = self._over(middle, fraction)
            if worst is None:
                low = middle
            else:
                high, limit = middle - 1, worst
        return low, limit

    def _bound(self) -> int:
        """Return more tokens than fit anywhere, or 2**40 where a token takes nothing."""
        per_token = self.layout.bytes_per_token * self.rows
        return sum(free or 0 for free in self.free.values()) // per_token + 1 if per_token else 1 << 40

    def _over(self, n_tokens: int, fraction: float) -> torch.device | None:
        """Return the first device on which `n_tokens` do not fit."""
        for one in self.sizing(n_tokens, "").devices:
            if one.free_nbytes is not None and one.nbytes > int(one.free_nbytes * fraction):
                return one.device
        return None

    def check(self, n_tokens: int) -> None:
        """Raise `OutOfMemoryError` unless `n_tokens` fit in what is free, on the devices that tell."""
        device = self._over(n_tokens, 1.0)
        if device is None:
            return
        one = next(one for one in self.sizing(n_tokens, "").devices if one.device == device)
        free = one.free_nbytes or 0
        prefill = "" if one.prefill_nbytes is None else f", {one.prefill_nbytes} of them for the prompt"
        raise OutOfMemoryError(
            f"{n_tokens} tokens x {self.rows} rows need {one.nbytes} bytes on {device}{prefill}; {free} are free, "
            f"{one.nbytes - free} too few; {self._search(n_tokens, 1.0)[0]} tokens fit",
            requested=one.nbytes,
            aligned_offset=0,
            available=free,
            capacity=free,
            missing=one.nbytes - free,
            label="kv-cache",
        )


def reserved_nbytes(kv: KVSpec | None, states: list[int], rows: int, n_tokens: int) -> int:
    """Return the bytes of an arena for keys and values, and for states of so many bytes a row.

    It is at least what `CacheMemory.reserve` takes: every state is aligned like the regions of a layer.
    """
    nbytes = sum(align_up(state * rows, _ALIGNMENT) for state in states)
    moved = align_up(max(states, default=0) * rows, _ALIGNMENT) if rows > 1 else 0
    if kv is None:
        return nbytes + moved
    kv_scratch = align_up(kv.scratch_nbytes(rows, n_tokens), _ALIGNMENT)
    return nbytes + kv.arena_nbytes(rows, n_tokens) - kv_scratch + max(kv_scratch, moved)


def given_nbytes(layers: Sequence[LayerLayout], rows: int, n_tokens: int) -> int:
    """Return the bytes that a cache takes at most of an arena it is given, whose layers it sees one after the other."""
    states = [nbytes for layer in layers for nbytes in layer.states]
    specs = [spec for layer in layers for spec in layer.per_token]
    first = next((layer.spec for layer in layers if layer.spec is not None), None)
    # Before the second layer is seen, all are taken for layers like the first.
    alike = [first or spec if spec is layer.spec else spec for layer in layers for spec in layer.per_token]
    nbytes = max(
        reserved_nbytes(KVSpec(some) if some else None, states, rows, n_tokens) for some in (specs, alike)
    )
    moved = [spec.scratch_nbytes(rows, n_tokens) for spec in specs]
    moved += [state * rows for state in states if rows > 1]
    scratches = {align_up(one, _ALIGNMENT) for one in moved}  # each larger one is taken beside those before
    return align_up(nbytes + sum(scratches) - max(scratches, default=0), _ALIGNMENT)


def most_tokens_in(nbytes: int, kv: KVSpec | None, states: list[int], rows: int) -> int | None:
    """Return the most tokens of each row that `reserved_nbytes` allows in `nbytes`; None if any number fits."""
    if reserved_nbytes(kv, states, rows, 0) > nbytes:
        return 0
    if kv is None:
        return None
    low, high = 0, nbytes // (kv.bytes_per_token * rows)
    while low < high:
        middle = (low + high + 1) // 2
        if reserved_nbytes(kv, states, rows, middle) <= nbytes:
            low = middle
        else:
            high = middle - 1
    return low


def least_of_ranks(model: Any, n_tokens: int) -> int:
    """Return the least `n_tokens` among the ranks that a model is split over; all of them have to call this."""
    if (getattr(model, "_tp_size", None) or 1) == 1 or not torch.distributed.is_initialized():
        return n_tokens
    mesh = model._device_mesh
    if mesh.ndim > 1:  # also of what is not split by heads
        mesh = mesh["tp"]
    group = mesh.get_group()
    on_gpu = torch.distributed.get_backend(group) == "nccl"
    least = torch.tensor([n_tokens], device="cuda" if on_gpu else "cpu")
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=group)
    return int(least)
