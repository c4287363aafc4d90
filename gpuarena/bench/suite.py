"""All benchmarks one after another, each with a result whatever happens to the others.

What is run, and with what, is the table `JOBS`. The most valuable comes first, so that a budget leaves out the least:
what only a GPU can show, then what a decoding step costs, then what it is made of.
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuarena.bench._labels import label, reason
from gpuarena.bench.environment import environment
from gpuarena.errors import ArgumentError

if TYPE_CHECKING:  # what a suite is made of can be asked without torch
    from gpuarena.bench.device import Device

__all__ = ["JOBS", "Job", "chosen", "fitting", "run"]

Results = dict[str, Any]

#: Largest part of a budget for the checks of the GPU: what they leave is for the benchmarks.
_CHECKS_SHARE = 0.5
#: Letters of a traceback that are kept, the last ones.
_TRACEBACK_LIMIT = 3000


@dataclass(frozen=True)
class Job:
    """One benchmark with its parameters."""

    benchmark: str
    """Name of the module in `gpuarena.bench` whose `run` is called."""
    gpu_s: float
    """About how long it takes on a GPU, in seconds, to tell whether it fits into a budget."""
    cpu_s: float
    """The same on a CPU; without `quick`."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of each run."""
    gpu: Mapping[str, Any] = field(default_factory=dict)
    """More of them on a GPU, where larger ones can be afforded."""
    quick: Mapping[str, Any] | None = field(default_factory=dict)
    """In place of those of a GPU with `quick`, which itself makes everything small; None: it is never quick."""
    only_gpu: bool = False
    """Whether it says nothing about a CPU."""

    @property
    def is_checks(self) -> bool:
        """Whether it is the checks of `gpuarena.bench.gpu`, which tell what they found one by one."""
        return self.benchmark == "gpu"

    @property
    def facts(self) -> dict[str, Any]:
        """What a result begins with, also one that has nothing else."""
        names = ("dtype", "compiled")
        return {
            "benchmark": self.benchmark,
            **{name: self.always[name] for name in names if name in self.always},
        }

    @property
    def label(self) -> str:
        """What tells it from the others: ``"decode, bfloat16"``."""
        return label(self.facts)

    def seconds(self, where: Device, quick: bool) -> float:
        """Return about how long it takes."""
        if quick:
            return 5.0
        return self.gpu_s if where.is_gpu else self.cpu_s

    def arguments(self, where: Device, quick: bool) -> dict[str, Any]:
        """Return what `run` is called with, without callbacks."""
        more = (self.quick or {}) if quick else self.gpu if where.is_gpu else {}
        return {**self.always, **more, "device": where, "quick": quick}


_DECODE_QUICK = {"lengths": [16, 32], "rounds": 2}

JOBS = (
    Job("gpu", gpu_s=20, cpu_s=60, only_gpu=True),
    Job("decode", gpu_s=60, cpu_s=120, always={"dtype": "bfloat16"}, quick=_DECODE_QUICK),
    Job("kv", gpu_s=30, cpu_s=150, always={"dtype": "bfloat16"}),
    Job("alloc", gpu_s=15, cpu_s=30, gpu={"rounds": 15}),
    Job(
        "generate",
        gpu_s=60,
        cpu_s=240,
        always={"dtype": "bfloat16"},
        gpu={"lengths": [512, 8192], "layers": 28, "rounds": 9},
    ),
    Job(
        "decode",
        gpu_s=90,  # most of which is compiling
        cpu_s=240,
        always={"dtype": "bfloat16", "compiled": True},
        gpu={"lengths": [8192], "largest": 32768, "compile_budget_s": 60.0},
        quick=None,
        only_gpu=True,
    ),
    Job("attention", gpu_s=30, cpu_s=240, always={"dtype": "bfloat16"}, gpu={"queries": [1, 8, 128]}),
    Job("decode", gpu_s=60, cpu_s=120, always={"dtype": "float32"}, quick=_DECODE_QUICK),
)


def chosen(names: Collection[str] | None, *, gpu: bool) -> list[Job]:
    """Return the jobs of some names, or all that say something about a device, in the order in which they are run.

    >>> [job.label for job in chosen(["kv", "decode, float32"], gpu=False)]
    ['kv, bfloat16', 'decode, float32']

    Raises
    ------
    ArgumentError
        A name is none of a benchmark.
    """
    known = {name for job in JOBS for name in (job.benchmark, job.label)}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        everything = ", ".join(dict.fromkeys(job.benchmark for job in JOBS))
        raise ArgumentError(f"there is no benchmark {unknown[0]!r}; there are {everything}")
    if names is None:
        return [job for job in JOBS if gpu or not job.only_gpu]
    return [job for job in JOBS if {job.benchmark, job.label} & {*names}]


def fitting(jobs: Iterable[Job], *, on_gpu: bool, quick: bool) -> list[Job]:
    """Return the jobs that say something about such a device, and can be as quick as is wanted."""
    return [job for job in jobs if (on_gpu or not job.only_gpu) and not (quick and job.quick is None)]


def run(
    names: Collection[str] | None = None,
    *,
    device: str | Device = "cpu",
    gpu: bool = False,
    quick: bool = False,
    budget_s: float | None = None,
    skipped_checks: Collection[str] = (),
    on_start: Callable[[str], object] = lambda label: None,
    on_group: Callable[[dict[str, Any]], object] = lambda group: None,
    on_check: Callable[[dict[str, Any]], object] = lambda check: None,
    on_result: Callable[[Results], object] = lambda results: None,
) -> Results:
    """Run benchmarks one after another; return their results with the machine and the versions, for JSON.

    ``{"benchmark": "all", "environment", "fake": bool, "seconds", "benchmarks": [...]}``. One that broke has an
    ``"error"`` and a ``"traceback"``, one for which there was no time or no library says so in ``"not_measured"``; both
    keep the groups that were done before. Memory is given back between them, so that one which ran out of it leaves
    the next as much as the first had.

    Parameters
    ----------
    names : collection of str, optional
        Names of benchmarks or labels of `JOBS`; all by default.
    device : str or Device
        ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or ``"fake-gpu"`` for a dry run on the CPU.
    gpu : bool
        With the checks of `gpuarena.bench.gpu`, where `names` does not choose.
    quick : bool
        Small sizes, to see that it runs; a dry run is always quick.
    budget_s : float, optional
        Seconds for everything. What does not fit any more is not begun, and what takes longer than expected ends
        after its current group.
    skipped_checks : collection of str
        Titles of checks of the GPU that are left out.
    on_start : callable, optional
        Called with the label of each benchmark before it.
    on_group, on_check : callable, optional
        Called with each group, and each check, when it is done.
    on_result : callable, optional
        Called with all results so far after each group, check and benchmark, and when it is interrupted: what is
        written there survives the process. The benchmark that is being run is marked ``"unfinished"``.

    Raises
    ------
    ArgumentError
        A name is none of a benchmark, or the checks of a GPU are asked of a CPU.
    BackendError
        There is no such device.
    """
    jobs = chosen(names, gpu=gpu)
    from gpuarena.bench.device import device_of

    where = device_of(device)
    if not where.is_gpu and any(job.is_checks for job in jobs):
        raise ArgumentError(
            f"the checks of a GPU cannot run on {where.name}: take cuda, or fake-gpu for a dry run"
        )
    quick = quick or where.is_fake
    jobs = fitting(jobs, on_gpu=where.is_gpu, quick=quick)
    began = time.monotonic()
    results: Results = {
        "benchmark": "all",
        "environment": environment(where.name),
        "fake": where.is_fake,
        "seconds": 0.0,
        "benchmarks": [],
    }

    def left() -> float:
        return float("inf") if budget_s is None else budget_s - (time.monotonic() - began)

    def tell() -> None:
        results["seconds"] = round(time.monotonic() - began, 1)
        on_result(results)

    lost = ""
    for job in jobs:
        entry: dict[str, Any] = {**job.facts, "unfinished": True}
        results["benchmarks"].append(entry)
        expected = job.seconds(where, quick)
        if lost:
            entry |= {"not_measured": lost, "lost": True}
        elif expected > left():
            remaining = max(left(), 0)
            entry["not_measured"] = (
                f"it takes about {expected:.0f} s, and {remaining:.0f} s of the budget were left"
            )
        else:
            on_start(job.label)
            tell()  # what is being run, for who finds the file of a process that died, or waits for more
            _measure(job, where, quick, entry, left, skipped_checks, on_group, on_check, tell)
            why = _give_back(where)
            lost = f"the device does not answer any more after {job.label}: {why}" if why else ""
        del entry["unfinished"]
        tell()
    return results


class _Spent(BaseException):
    """The budget is spent; no `Exception`, which a benchmark may take for a failure of its own."""


def _measure(
    job: Job,
    where: Device,
    quick: bool,
    entry: dict[str, Any],
    left: Callable[[], float],
    skipped_checks: Collection[str],
    on_group: Callable[[dict[str, Any]], object],
    on_check: Callable[[dict[str, Any]], object],
    tell: Callable[[], object],
) -> None:
    """Run a benchmark and write into `entry` what it found, as far as it came."""

    def hear(kind: str, callback: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
        def heard(found: dict[str, Any]) -> None:
            entry.setdefault(kind, []).append(found)
            callback(found)
            tell()
            if left() <= 0 and kind == "groups":  # the checks mind their budget themselves
                raise _Spent

        return heard

    def begin(title: str) -> None:
        entry["running"] = title  # for who finds the file of a process that died
        tell()

    arguments = job.arguments(where, quick)
    if job.is_checks:
        budget = left() * _CHECKS_SHARE
        arguments |= {"on_check": hear("checks", on_check), "on_start": begin, "skipped": skipped_checks}
        arguments |= {"budget_s": None if budget == float("inf") else budget}
    else:
        arguments["on_group"] = hear("groups", on_group)
    from gpuarena.bench.gpu._check import NotMeasuredError

    began = time.monotonic()
    try:
        name = f"gpuarena.bench.{job.benchmark}" + (".suite" if job.is_checks else "")
        entry |= importlib.import_module(name).run(**arguments)
    except _Spent:
        entry["not_measured"] = "the rest: the budget is spent"
    except KeyboardInterrupt:
        entry["error"] = "interrupted"
        tell()
        raise
    except NotMeasuredError as error:
        entry["not_measured"] = str(error)
    except Exception as error:  # whatever it is, the other benchmarks are worth having
        if isinstance(error, ImportError) and not (error.name or "").startswith("gpuarena"):
            entry["not_measured"] = f"a library is missing: {error}"
        else:
            entry["error"] = f"{type(error).__name__}: {error}"
            entry["traceback"] = traceback.format_exc()[-_TRACEBACK_LIMIT:]
    entry.pop("running", None)
    entry["seconds"] = round(time.monotonic() - began, 1)


def _give_back(where: Device) -> str:
    """Return the memory of a benchmark to the device; say why the device cannot be used any more, if so."""
    if "torch._dynamo" in sys.modules:  # compiled code keeps graphs, and these memory
        import torch

        torch.compiler.reset()
    try:
        where.give_back()
    except Exception as error:  # a failed kernel is told by every call after it
        return reason(error)
    return ""
