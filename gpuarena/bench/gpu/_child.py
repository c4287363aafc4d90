"""Run a program of ours in a process of its own, with a limit of time that holds for all that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from gpuarena.bench.gpu._check import NotMeasuredError

__all__ = ["run_child"]


def run_child(
    command: Sequence[str], *, limit_s: float, environment: Mapping[str, str | None] | None = None
) -> tuple[int, str, str]:
    """Run `command` and return its exit status, its output and what it wrote to standard error.

    Parameters
    ----------
    command : sequence of str
        Python finds the modules that this process finds.
    limit_s : float
        Seconds until it is killed, with all the processes that it has started.
    environment : mapping, optional
        Variables to set, or to take away where the value is None.

    Raises
    ------
    NotMeasuredError
        It cannot be started, or was still running at the limit.
    """
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    for name, value in (environment or {}).items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = value
    try:
        # A group of its own: a checker starts the program that it checks, which would outlive it.
        child = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise NotMeasuredError(f"{command[0]} cannot be started: {error}") from error
    try:
        out, err = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise NotMeasuredError(
            f"{os.path.basename(command[0])} was still running after {limit_s:g} s"
        ) from error
    finally:
        if child.poll() is None:  # an interrupt comes here too
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    return child.returncode, out, err
