"""One end of an arena: the regions on it in the order they were made, and what watches them come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from types import CodeType

    from gpuarena.checkpoint import Scope
    from gpuarena.dtypes import DType
    from gpuarena.errors import ArenaError

#: Names of the two ends, as arguments and messages have them.
SIDES = ("low", "high")


class Record(NamedTuple):
    """What an end remembers of a region: bytes, label, and where the end's pointer stood after it."""

    offset: int
    nbytes: int
    label: str | None
    top: int


class Stack:
    """The live regions of one end.

    A region is live iff ``serials[slot] == serial``: serials are never reused, so a stale handle cannot be
    revived by a new region in its slot. The three lists always have the same length.
    """

    __slots__ = ("arrays", "freed", "marked", "records", "serials", "side", "start", "top", "used")

    def __init__(self, side: str, start: int) -> None:
        self.side = side
        self.start = start  # where the pointer stands when the end is empty
        self.top = start  # low: first free byte; high: first byte that is taken
        self.used = 0  # bytes of the live regions
        self.freed = 0  # bytes of all regions ever dropped
        self.marked = -1  # serial of the last region below a checkpoint
        self.serials: list[int] = []
        self.records: list[Record] = []
        self.arrays: list[Any] = []  # root array of the backend's library, made on first use

    def truncate(self, n_live: int) -> None:
        """Forget the regions from slot `n_live` on."""
        del self.serials[n_live:], self.records[n_live:], self.arrays[n_live:]


class Cause(NamedTuple):
    """A rollback: which regions it dropped, and the code that called it."""

    side: str
    n_live: int
    serial_limit: int
    text: str
    code: CodeType
    instruction: int

    def __str__(self) -> str:
        # Only needed for a message, so the line is looked up here and not at every rollback.
        return f"{self.text} at {self.code.co_filename}:{line_number(self.code, self.instruction)}"


def line_number(code: CodeType, instruction: int) -> int:
    """Return the line of an instruction, as ``frame.f_lasti`` says it."""
    lines = (line for start, stop, line in code.co_lines() if start <= instruction < stop)
    return next(lines, None) or code.co_firstlineno


class Take:
    """A region that is about to be taken, or was; sizes in bytes.

    `kind` is ``"alloc"``, ``"extend"`` (the last region grows) or, of what is placed as it was, ``"pin"`` or
    ``"restore"``. A `lazy` one is only reserved: whoever takes it commits its memory in pieces.
    """

    __slots__ = (
        "align", "dtype", "filled", "kind", "label", "lazy", "nbytes", "new_top", "offset", "old_top", "shape", "slot", "stack",
    )  # fmt: skip

    def __init__(
        self,
        stack: Stack,
        slot: int,
        offset: int,
        nbytes: int,
        new_top: int,
        shape: tuple[int, ...],
        dtype: DType,
        align: int,
        label: str | None,
        filled: bool,
        kind: str = "alloc",
        lazy: bool = False,
    ) -> None:
        self.stack, self.slot, self.offset, self.nbytes = stack, slot, offset, nbytes
        self.old_top, self.new_top = stack.top, new_top
        self.shape, self.dtype, self.align, self.label, self.filled = shape, dtype, align, label, filled
        self.kind, self.lazy = kind, lazy

    @property
    def growing(self) -> bool:
        """Whether it is a region that there is, which grows."""
        return self.kind == "extend"


class Drop:
    """Regions that are about to be dropped, or were: those from slot `n_live` on; sizes in bytes.

    `leaving` tells whether a scope ends, which restores its state whatever is found.
    """

    __slots__ = ("cause", "leaving", "n_live", "new_top", "old_top", "stack")

    def __init__(self, stack: Stack, n_live: int, new_top: int, cause: Cause, leaving: bool) -> None:
        self.stack, self.n_live, self.cause, self.leaving = stack, n_live, cause, leaving
        self.old_top, self.new_top = stack.top, new_top


#: What is to be raised, or warned of, once a rollback is done.
Report: TypeAlias = "ArenaError | Warning | None"


class Hook:
    """Sees what an arena does, under its lock; a subclass overrides what it needs."""

    def before_take(self, take: Take) -> None:
        """May raise, having changed nothing that shows."""

    def after_take(self, take: Take) -> None:
        """The region is live; must not raise."""

    def refuse_drop(self, drop: Drop) -> None:
        """May raise; changes nothing that shows, because another hook may still refuse."""

    def before_drop(self, drop: Drop) -> Report:
        """Nobody has refused; must not raise."""
        return None

    def after_drop(self, drop: Drop) -> list[Warning] | None:
        """The regions are stale; must not raise."""
        return None

    def failed(self, stack: Stack, nbytes: int, align: int, label: str | None) -> None:
        """A request did not fit."""

    def extended(self, stack: Stack, slot: int, old: Record) -> None:
        """The last region was grown in place."""

    def spilling(self, stack: Stack, n_live: int) -> Any:
        """The regions from slot `n_live` on go to the host; return what `restored` needs."""

    def restoring(self, records: list[Record], known: Any) -> None:
        """They are about to come back, and need memory; may raise."""

    def restored(self, stack: Stack, n_live: int, known: Any) -> None:
        """They are back; `known` is None for a hook that came after the spill."""

    def scope_opened(self, scope: Scope) -> None:
        """A scope was entered."""

    def scope_closed(self, scope: Scope) -> None:
        """It is over, in whatever way; its rollback, if there was one, has happened."""

    def was_reset(self) -> None:
        """Every checkpoint and scope is dead."""

    def marking(self) -> Any:
        """Several allocations begin that are made together or not at all; return what `undone` needs."""

    def undone(self, mark: Any) -> None:
        """They were taken back, as if they had not been made."""

    def check(self) -> ArenaError | None:
        """Return what `Arena.check` is to raise."""
        return None

    def forked(self) -> None:
        """Go on in a child of the process that it was."""

    def closing(self) -> list[Warning] | None:
        """The arena is about to be closed; return what to warn of."""
        return None


class Watcher(Hook):
    """A hook that refuses nothing and changes nothing.

    While there are no other hooks, allocations and rollbacks go the short way. It is told of the former by `took`
    then, without `before_take` and `after_take`; of the latter as ever, but has nothing to report.
    """

    def took(self, stack: Stack, slot: int, record: Record, shape: tuple[int, ...], dtype: DType) -> None:
        """A region of the low end is live, aligned as by default; must not raise."""
