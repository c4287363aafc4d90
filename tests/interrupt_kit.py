"""Interrupts at every line of the library that a call runs, as Ctrl-C would be."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from gpuarena.errors import ArenaError


class Interrupt(BaseException):
    """What Ctrl-C is."""


def interrupt(call: Callable[[Any], Any], subject: Any, at: int) -> str:
    """Interrupt a call at its line number `at` within the library; return the line, or nothing if it has fewer."""
    n_seen, where = 0, ""

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        return line if "/gpuarena/" in frame.f_code.co_filename else None

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal n_seen, where
        n_seen += event == "line"
        if event == "line" and n_seen == at:
            sys.settrace(None)
            where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
            raise Interrupt
        return line

    traced, mode = sys.gettrace(), torch.is_grad_enabled()
    sys.settrace(trace)
    try:
        call(subject)
    except Interrupt:
        pass
    finally:
        sys.settrace(traced)
        torch.set_grad_enabled(mode)  # the line may have been the one that leaves no_grad()
    return where


def interrupted(
    make: Callable[[], Any], call: Callable[[Any], Any], state: Callable[[Any], Any]
) -> list[Any]:
    """Return the lines of the library at which an interrupt leaves neither the state before nor that behind `call`."""
    before = state(make())
    subject = make()
    call(subject)
    fine = (before, state(subject))
    found: list[Any] = []
    for at in itertools.count(1):
        subject = make()
        where = interrupt(call, subject, at)
        if not where:
            assert at > 5, "the call was traced"
            break
        try:
            left = state(subject)
        except (ArenaError, AssertionError, LookupError) as error:
            left = error
        if left not in fine:
            found.append((where, left))
    return found
