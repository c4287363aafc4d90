"""A request on its way through a simulation."""

from __future__ import annotations

from typing import Any

from gpuarena.simulate.trace import Request

__all__ = ["Job"]


class Job:
    """A request, and where it stands. In each step that it runs, a token is made for it."""

    __slots__ = (
        "arrival",
        "failed",
        "generated",
        "held",
        "is_done",
        "order",
        "output",
        "place",
        "prefix",
        "prompt",
        "rejected",
        "since",
        "waited",
    )

    def __init__(self, request: Request, arrival: int) -> None:
        self.arrival = arrival  # step
        self.prompt = request.prompt
        self.output = request.output
        self.prefix = request.prefix
        self.generated = 0  # tokens, when it was last admitted
        self.since = 0  # the step in which that was
        self.order = -1  # the number of that admission among all; -1 while it does not run
        self.held = 0  # slots it may fill without asking, those it shares included
        self.place: Any = None  # what its memory knows it by: a first slot, or pages
        self.waited: int | None = None  # steps until it was first admitted
        self.failed = False  # whether its first attempt failed
        self.rejected = False
        self.is_done = False

    @property
    def length(self) -> int:
        """Tokens it has in the end."""
        return self.prompt + self.output

    @property
    def n_tokens(self) -> int:
        """Tokens that it is admitted with; they are computed at once."""
        return self.prompt + self.generated

    @property
    def n_left(self) -> int:
        """Tokens, and so steps, from its admission to its end."""
        return self.output - self.generated

    def tokens_at(self, step: int) -> int:
        """Return the tokens that it has at the start of a step in which it runs."""
        return self.prompt + self.generated + step - self.since
