"""The suite in processes of its own: what crashes, hangs or loses the device takes nothing else with it.

The checks of a GPU have one process and the benchmarks another. Each writes what it has found into a file after every
group; when it dies, or writes nothing for a while, what it was doing is noted as failed and another process goes on.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from gpuarena._files import replacing
from gpuarena.bench import suite
from gpuarena.bench._json import as_json
from gpuarena.bench._labels import OUTCOMES, label, not_run
from gpuarena.bench.suite import Job, Results
from gpuarena.errors import BackendError

__all__ = ["run"]

#: Processes that the checks may use up.
_MOST_PROCESSES = 4
#: Seconds beyond the budget in which a process may end what it is doing.
_GRACE_S = 20.0
_POLL_S = 0.1


def run(
    names: Collection[str] | None = None,
    *,
    device: str = "cpu",
    gpu: bool = False,
    quick: bool = False,
    budget_s: float | None = None,
    stall_s: float = 120.0,
    on_result: Callable[[Results], object] = lambda results: None,
) -> Results:
    """Run benchmarks as `gpuarena.bench.suite.run` does, and return the same.

    The processes print as they go: a line for each benchmark, group and check.

    Parameters
    ----------
    names, device, gpu, quick, budget_s
        As there; the device by its name.
    stall_s : float
        Seconds without a new group or check after which a process is killed; twice what a benchmark is expected to
        take where that is more, since one that compiles may have a single group.
    on_result : callable, optional
        Called with all results so far, whenever there are more.

    Raises
    ------
    ArgumentError
        A name is none of a benchmark.
    BackendError
        There is no such device.
    """
    quick = quick or device == "fake-gpu"
    jobs = suite.fitting(suite.chosen(names, gpu=gpu), on_gpu=device != "cpu", quick=quick)
    work = _Work({"device": device, "quick": quick}, budget_s, stall_s, on_result)
    checks = [job for job in jobs if job.is_checks]
    if checks:
        work.run_checks(checks[0])
    work.run_benchmarks([job for job in jobs if not job.is_checks])
    return work.results


class _Work:
    """What was found so far, and the processes that find more."""

    def __init__(
        self,
        request: dict[str, Any],
        budget_s: float | None,
        stall_s: float,
        on_result: Callable[[Results], object],
    ) -> None:
        self.request = request
        self.stall_s = stall_s
        self.on_result = on_result
        self.began = time.monotonic()
        self.deadline = None if budget_s is None else self.began + budget_s
        self.results: Results = {
            "benchmark": "all",
            "environment": {},
            "fake": request["device"] == "fake-gpu",
            "seconds": 0.0,
            "benchmarks": [],
        }

    def run_checks(self, job: Job) -> None:
        """Run the checks; after one that killed its process, or after which the device was lost, in another one."""
        earlier = [*self.results["benchmarks"]]
        done: list[dict[str, Any]] = []
        why = ""
        for _ in range(_MOST_PROCESSES):

            def tell(entries: list[dict[str, Any]], before: Sequence[dict[str, Any]] = tuple(done)) -> None:
                joined = [{**entry, "checks": [*before, *_kept(entry)]} for entry in entries]
                self._tell(earlier + joined)

            entries, why = self._process([job.label], tell, skipped_checks=[check["title"] for check in done])
            entry = entries[0] if entries else dict(job.facts)
            was_lost = any(check.get("lost") for check in entry.get("checks", []))
            done += _kept(entry)
            running = entry.pop("running", None)
            if why and running is not None:
                done.append(not_run(running, False, why))
                why = ""
            elif why or not was_lost:
                break
        entry.pop("unfinished", None)
        if why:
            entry["error"] = why
        self._tell([*earlier, {**entry, "checks": done}])

    def run_benchmarks(self, jobs: Sequence[Job]) -> None:
        """Run benchmarks; after one that killed its process, or lost the device, the others in another one."""
        while jobs:
            earlier = [*self.results["benchmarks"]]

            def tell(
                entries: list[dict[str, Any]], before: Sequence[dict[str, Any]] = tuple(earlier)
            ) -> None:
                self._tell([*before, *(entry for entry in entries if not entry.get("lost"))])

            entries, why = self._process([job.label for job in jobs], tell)
            entries = [entry for entry in entries if not entry.get("lost")]
            if why and not (entries and entries[-1].get("unfinished")) and len(entries) < len(jobs):
                entries.append({**jobs[len(entries)].facts})  # it died before it could say what it was doing
            if why and entries:
                entries[-1].pop("unfinished", None)
                entries[-1].setdefault("error", why)
            self._tell([*earlier, *entries])
            jobs = jobs[len(entries) :] if entries else ()

    def _tell(self, entries: list[dict[str, Any]]) -> None:
        self.results["benchmarks"] = entries
        self.results["seconds"] = round(time.monotonic() - self.began, 1)
        self.on_result(self.results)

    def _process(
        self,
        names: list[str],
        tell: Callable[[list[dict[str, Any]]], object],
        *,
        skipped_checks: Sequence[str] = (),
    ) -> tuple[list[dict[str, Any]], str]:
        """Run a process; return the entries that it left, and why it did not end as it should, empty if it did."""
        left = None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)
        with tempfile.TemporaryDirectory(prefix="gpuarena-bench-") as folder:
            path = Path(folder) / "results.json"
            request = self.request | {
                "names": names,
                "budget_s": left,
                "skipped_checks": [*skipped_checks],
                "path": str(path),
            }
            process = subprocess.Popen(_command(request))
            left_behind = _File(path)

            def look() -> bool:
                if not left_behind.look():
                    return False
                if "environment" in left_behind.found:
                    self.results["environment"] = left_behind.found["environment"]
                    tell(left_behind.entries)
                return True

            try:
                why = self._wait(
                    process,
                    look,
                    lambda: self._patience(left_behind),
                    None if left is None else left + _GRACE_S,
                )
            except KeyboardInterrupt:  # the process has got it too, and writes what it has
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)
                look()
                raise
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            look()
            if "refused" in left_behind.found:
                raise BackendError(left_behind.found["refused"])
            return left_behind.entries, why

    def _patience(self, left_behind: _File) -> float:
        """Return the seconds that may pass without anything new from what is being run."""
        running = [
            label(entry) for entry in left_behind.entries if entry.get("unfinished") and "checks" not in entry
        ]
        if self.request["quick"] or not running:
            return self.stall_s
        on_gpu = self.request["device"] != "cpu"
        expected = (job.gpu_s if on_gpu else job.cpu_s for job in suite.JOBS if job.label in running)
        return max(self.stall_s, 2 * max(expected, default=0.0))

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        look: Callable[[], bool],
        patience: Callable[[], float],
        left: float | None,
    ) -> str:
        """Wait for a process to end; say what was wrong with that, empty if nothing."""
        began = moved = time.monotonic()
        while process.poll() is None:
            time.sleep(_POLL_S)
            now = time.monotonic()
            if look():
                moved = now
            if now - moved > patience():
                return f"its process was killed: nothing new came for {now - moved:.0f} s"
            if left is not None and now - began > left:
                return f"its process was killed: it went on for {now - began:.0f} s, beyond the budget"
        if process.returncode < 0:
            with contextlib.suppress(ValueError):
                return f"its process was ended by {signal.Signals(-process.returncode).name}"
        return f"its process ended with status {process.returncode}" if process.returncode else ""


def _command(request: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "gpuarena.bench.apart", json.dumps(request)]


class _File:
    """The results that a process writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: Results = {"benchmarks": []}
        self._changed_ns = 0

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Results of the benchmarks so far."""
        found: list[dict[str, Any]] = self.found["benchmarks"]
        return found

    def look(self) -> bool:
        """Read the file, and return whether there is more than before."""
        try:
            changed_ns = self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        if changed_ns == self._changed_ns:
            return False
        self._changed_ns = changed_ns
        self.found = json.loads(self.path.read_text(encoding="utf-8"))
        return True


def _kept(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the checks that were run, or had no budget; not those for which the device was lost before."""
    return [check for check in entry.get("checks", []) if not check.get("lost")]


# -- in the process ---------------------------------------------------------------------------------------------------


def _main(text: str) -> int:
    request = json.loads(text)
    path = request.pop("path")

    def write(results: Results) -> None:
        with replacing(path) as file:
            file.write(as_json(results))

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        suite.run(
            **request,
            on_start=lambda started: say(f"== {started}"),
            on_group=lambda group: say(f"   {group.get('title')}"),
            on_check=lambda check: say(f"   {OUTCOMES[check['passed']]}: {check['title']}"),
            on_result=write,
        )
    except BackendError as error:
        write({"benchmarks": [], "refused": str(error)})
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
