"""Runs pieces of code in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

#: Runs its cases in forked processes, because imports take seconds; a case ends as any program does, through the
#: interpreter's own shutdown.
DRIVER = """
import os, sys
import numpy as np
import gpuarena
from gpuarena import Arena, Debug, FrameArenas
from gpuarena.errors import *
from gpuarena.testing import FakeDevice

def run_all(cases):
    for case in cases:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(write, 1)
            os.dup2(write, 2)
            os.close(read)
            os.close(write)
            return case
        os.close(write)
        with os.fdopen(read) as file:
            output = file.read()
        _, status = os.waitpid(child, 0)
        print(repr((os.waitstatus_to_exitcode(status), output)), flush=True)
    os._exit(0)

case = run_all(eval(sys.stdin.read()))
exec(case)
"""


def run_cases(cases, *, torch=False):
    """Run pieces of code, each in a process of its own; return exit code and output of each."""
    cases = [textwrap.dedent(case) for case in cases]
    options = ["-W", "error", "-W", "ignore::DeprecationWarning"]
    done = subprocess.run(
        [sys.executable, *options, "-c", ("import torch\n" if torch else "") + DRIVER],
        input=repr(cases), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [eval(line) for line in done.stdout.splitlines()]


def run_named(cases):
    """Run cases by name, those whose name has torch in it with torch."""
    outcomes = {}
    for torch in (False, True):
        chosen = {name: case for name, case in cases.items() if ("torch" in str(name)) == torch}
        outcomes.update(zip(chosen, run_cases(chosen.values(), torch=torch), strict=True))
    return outcomes
