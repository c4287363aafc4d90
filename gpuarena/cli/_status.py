"""How commands end: what is printed of an error, and the status that the shell sees.

====  ==============================================================================================
0     done
1     an error, told in one line on standard error
2     wrong usage: an unknown option, a value that is no number
130   interrupted (128 + SIGINT)
141   whoever read the output went away, as ``head`` does (128 + SIGPIPE, what other programs give)
====  ==============================================================================================

An exception that nobody foresaw is a fault of this package and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from gpuarena.cli._output import print_line, printable
from gpuarena.errors import ArenaError

__all__ = ["Group", "run"]

BROKEN_PIPE = 141
INTERRUPTED = 130

#: What a full or failing disk answers; standard output has no file name to report.
_WRITE_FAILURES = {errno.ENOSPC, errno.EFBIG, errno.EIO}
#: Of a message; what is longer holds a whole file.
_LONGEST_LINE = 4000


class Group(TyperGroup):
    """The group of all commands; it sees interrupts and broken pipes before Typer, whose versions differ in these."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(_interrupted()) from None
        except BrokenPipeError:
            raise typer.Exit(_broken_pipe()) from None


def run(app: Callable[..., Any]) -> None:
    """Run the command line of this process; always raises `SystemExit`, or what nobody foresaw."""
    for stream in (sys.stdout, sys.stderr):  # a letter that the terminal lacks is no reason to fail
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            app(prog_name="gpuarena")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here what goes wrong can still be told
    except SystemExit as ended:
        if _came_from_a_broken_pipe(ended):  # Rich and Typer exit with 1 then
            sys.exit(_broken_pipe())
        raise
    except BrokenPipeError:
        sys.exit(_broken_pipe())
    except KeyboardInterrupt:
        sys.exit(_interrupted())
    except Exception as error:
        message = _foreseen(error)
        if message is None:
            raise
        # A label or a file name in it may hold anything.
        lines = [printable(line, _LONGEST_LINE) for line in message.split("\n")]
        print_line(Console(stderr=True), ("error: ", "red"), "\n".join(lines))
        sys.exit(1)


def _foreseen(error: Exception) -> str | None:
    """Return what to say of an error that is the user's to mend; None of any other."""
    from gpuarena.demo.errors import WeightsError

    if isinstance(error, (ArenaError, WeightsError)):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in _WRITE_FAILURES:
        _discard_output()
        return f"cannot write the output: {error.strerror}"
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError)):
        first_line = str(error).partition("\n")[0]
        return f"out of memory{': ' + first_line if first_line else ''}"
    return None


def _interrupted() -> int:
    print_line(Console(stderr=True), "interrupted")
    return INTERRUPTED


def _broken_pipe() -> int:
    _discard_output()
    return BROKEN_PIPE


def _discard_output() -> None:
    """Let what is still buffered go nowhere, or Python would complain about it at its end."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, sys.stdout.fileno())
    except (OSError, ValueError):  # it has no file: somebody replaced or closed it
        pass
    finally:
        os.close(devnull)


def _came_from_a_broken_pipe(error: BaseException) -> bool:
    before: BaseException | None = error
    while before is not None:
        if isinstance(before, BrokenPipeError):
            return True
        before = before.__context__
    return False
