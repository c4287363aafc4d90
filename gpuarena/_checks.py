"""Poison, guard zones and call sites: what debug mode writes and looks at."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuarena._stack import Drop, Hook, Record, Report, Stack, Take
from gpuarena._state import caller
from gpuarena.debug import GUARD, POISON, Debug
from gpuarena.errors import ArenaError, CorruptionError, CorruptionWarning

if TYPE_CHECKING:
    from gpuarena.arena import Arena


def call_site() -> str:
    """Return file and line of the innermost caller outside of this package."""
    frame, _ = caller()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _Gap(NamedTuple):
    """Bytes beside a region that nobody may write."""

    start: int
    stop: int
    where: str


class _Watched(NamedTuple):
    """A region, as the messages describe it, and its gaps."""

    what: str
    site: str
    nbytes: int
    gaps: list[_Gap]


class Checks(Hook):
    """Keeps a pattern in the bytes that belong to no region, and looks whether it is still there."""

    def __init__(self, arena: Arena, settings: Debug) -> None:
        self._arena = weakref.proxy(arena)
        self._call_sites = settings.call_sites
        self._poison = settings.poison and not settings.separate
        self._guards = not settings.separate
        self._watched: dict[tuple[str, int], _Watched] = {}
        self._resized: set[tuple[str, int]] = set()  # slots whose arrays were reported as resized
        # Free memory that was poisoned: from the low end's pointer up to here, and from here to the high end's.
        self._low_stop = 0
        self._high_start = arena.capacity

    # -- what happens -------------------------------------------------------------------------------------------

    def before_take(self, take: Take) -> None:
        """Raise if somebody wrote to memory that was given back and is about to be handed out."""
        found = []
        if take.growing:  # over its guard zone, which is looked at before it moves
            found = self._damage([(take.stack, take.slot)])
        if self._poison:
            start, stop = sorted((take.old_top, take.new_top))  # guard zones and gaps included
            found += self._written_after(min(start, take.offset), max(stop, take.offset + take.nbytes))
        if found:
            raise _error(found)

    def after_take(self, take: Take) -> None:
        """Poison the region unless it has contents, and draw its guard zones."""
        stop = take.offset + take.nbytes
        if take.nbytes and self._poison and not take.filled:
            self._fill(take.offset, stop, POISON)
        label = f" {take.label!r}" if take.label else ""
        site = call_site() if self._call_sites else ""
        what = f"region{label} {take.dtype}{list(take.shape)} at offset {take.offset}"
        if site:
            what += f", allocated at {site}"
        gaps = []
        if take.nbytes and self._guards:
            gaps = self._gaps_of(take, stop)
            for gap in gaps:
                self._fill(gap.start, gap.stop, GUARD)
        self._watched[take.stack.side, take.slot] = _Watched(what, site, take.nbytes, gaps)

    @staticmethod
    def _gaps_of(take: Take, stop: int) -> list[_Gap]:
        if take.stack.side == "low":
            gaps = [_Gap(take.old_top, take.offset, "before"), _Gap(stop, take.new_top, "behind")]
        else:
            gaps = [_Gap(stop, take.old_top, "behind")]
        return [gap for gap in gaps if gap.stop > gap.start]

    def extended(self, stack: Stack, slot: int, old: Record) -> None:
        """Poison the new bytes, and move the guard zone behind them."""
        record = stack.records[slot]
        what, site, _, gaps = self._watched[stack.side, slot]
        old_stop, stop = old.offset + old.nbytes, record.offset + record.nbytes
        if self._poison and stop > old_stop:
            self._fill(old_stop, stop, POISON)
        gaps = [gap for gap in gaps if gap.where == "before"]
        if self._guards and record.top > stop:
            self._fill(stop, record.top, GUARD)
            gaps.append(_Gap(stop, record.top, "behind"))
        self._watched[stack.side, slot] = _Watched(what, site, record.nbytes, gaps)

    def before_drop(self, drop: Drop) -> Report:
        """Look at the guard zones of the regions that go."""
        slots = range(drop.n_live, len(drop.stack.serials))
        found = self._damage([(drop.stack, slot) for slot in slots])
        return _error(found) if found else None

    def after_drop(self, drop: Drop) -> None:
        """Poison what was given back."""
        self._resized = {key for key in self._resized if key in self._watched}
        for key in [key for key in self._watched if key[0] == drop.stack.side and key[1] >= drop.n_live]:
            del self._watched[key]
        if self._poison and drop.old_top != drop.new_top:
            start, stop = sorted((drop.old_top, drop.new_top))
            self._fill(start, stop, POISON)
            if drop.stack.side == "low":
                self._low_stop = max(self._low_stop, stop)
            else:
                self._high_start = min(self._high_start, start)

    def spilling(self, stack: Stack, n_live: int) -> Any:
        """Return what is known of the regions; the guard zones' bytes go to the host and back with them."""
        return {
            key: value for key, value in self._watched.items() if key[0] == stack.side and key[1] >= n_live
        }

    def restored(self, stack: Stack, n_live: int, known: Any) -> None:
        """Watch the regions again."""
        self._watched.update(known)

    def check(self) -> ArenaError | None:
        """Look at all guard zones and all poisoned memory."""
        found = self._everything()
        return _error(found) if found else None

    def closing(self) -> list[Warning]:
        """Look at everything for the last time."""
        found = self._everything()
        return [CorruptionWarning(str(_error(found)))] if found else []

    def _fill(self, start: int, stop: int, byte: int) -> None:
        arena = self._arena
        if arena._order is None:
            arena._backend.fill_bytes(start, stop, byte)
            return
        with arena._order.on_home():
            arena._backend.fill_bytes(start, stop, byte)
        arena._order.wrote()

    def _find(self, start: int, stop: int, byte: int) -> int | None:
        arena = self._arena
        with contextlib.nullcontext() if arena._order is None else arena._order.on_home():
            at: int | None = arena._backend.find_other(start, stop, byte)
            return at

    # -- looking ------------------------------------------------------------------------------------------------

    def site_of(self, side: str, slot: int) -> str:
        """Return where the region of a live slot was allocated; empty if that is not remembered."""
        return self._watched[side, slot].site

    def inspect(self, stack: Stack, n_live: int) -> None:
        """Raise if the guard zones of the slots from `n_live` on are damaged."""
        found = self._damage([(stack, slot) for slot in range(n_live, len(stack.serials))])
        if found:
            raise _error(found)

    def _everything(self) -> list[tuple[int, str]]:
        arena = self._arena
        live = [(stack, slot) for stack in (arena._low, arena._high) for slot in range(len(stack.serials))]
        found = self._damage(live)
        if self._poison:
            found += self._written_after(arena._low.top, arena._high.top)
        return found

    def _damage(self, slots: list[tuple[Stack, int]]) -> list[tuple[int, str]]:
        """Return where the guard zones of these slots are damaged, and mend them; and what was resized."""
        tracker = self._arena._tracker
        found: list[tuple[int, str]] = []
        if self._arena._captures():
            return found  # the host may not wait now
        if self._arena._order is not None and slots:
            for side in {
                stack.side for stack, _ in slots
            }:  # what is still queued may be what does the damage
                self._arena._order.synchronize(side, min(slot for stack, slot in slots if stack.side == side))
        for stack, slot in slots:
            watched = self._watched.get((stack.side, slot))
            if watched is None:
                continue
            for gap in watched.gaps:
                at = self._find(gap.start, gap.stop, GUARD)
                if at is not None:
                    found.append((at, f"byte {at}, {gap.where} {watched.what}, was overwritten"))
                    self._fill(gap.start, gap.stop, GUARD)
            for _, array in tracker.roots_of(stack, slot):
                key = stack.side, slot
                if array.nbytes > watched.nbytes and key not in self._resized:
                    self._resized.add(key)
                    found.append(
                        (
                            stack.records[slot].offset + watched.nbytes,
                            f"an array of {watched.what} was resized from {watched.nbytes} to {array.nbytes} "
                            f"bytes, into its neighbour",
                        )
                    )
        return found

    def _written_after(self, start: int, stop: int) -> list[tuple[int, str]]:
        """Return where free memory from `start` to `stop` is no longer poisoned, and mend it."""
        arena = self._arena
        low, high = arena._low.top, arena._high.top
        found: list[tuple[int, str]] = []
        if self._arena._captures():
            return found
        for a, b in ((low, min(self._low_stop, high)), (max(self._high_start, low), high)):
            a, b = max(a, start), min(b, stop)
            at = self._find(a, b, POISON) if a < b else None
            if at is not None:
                found.append(
                    (at, f"byte {at} was written after it was given back, by an array that is stale")
                )
                self._fill(a, b, POISON)
        return found


def _error(found: list[tuple[int, str]]) -> CorruptionError:
    return CorruptionError("; ".join(text for _, text in found), offsets=[at for at, _ in found])
