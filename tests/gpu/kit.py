"""Everything that wants a GPU, in one command, into one JSON file and the same as a document.

    python tests/gpu/kit.py --out results.json [--fake] [--budget SECONDS]

It needs no network, no weights, no installation and no command line: a checkout, torch, and for some parts
transformers, CuPy, pytest and hypothesis. What is missing is named as not measured. With ``--fake`` the same runs on
the CPU, tiny, to see that the kit itself works.

Whatever happens, each part gives its own result: the checks of the GPU, the benchmarks and the tests have processes of
their own, which write what they found as they go. The checks come first, since they say what nothing else can; then
the benchmarks, the most valuable first. The tests come last: they tell the least that is new, as most of what
they find wrong would fail a check as well. A part of the budget is kept for them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Less than the 8 minutes that a loan of a machine may last.
BUDGET_S = 460.0
#: Of the budget, kept for the tests.
TESTS_SHARE = 0.2
#: Letters of a failed test's message that are kept.
MESSAGE_LIMIT = 2000


def main(arguments: list[str] | None = None) -> int:
    """Run the kit; return 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results.json"), help="the document is beside it: .md"
    )
    parser.add_argument("--fake", action="store_true", help="run on the CPU, tiny")
    parser.add_argument(
        "--budget", type=float, help="seconds that everything may take: 460, and no limit with --fake"
    )
    parser.add_argument("--only", help="benchmarks, separated by commas, and tests; all by default")
    options = parser.parse_args(arguments)
    budget = options.budget or (float("inf") if options.fake else BUDGET_S)
    began = time.monotonic()
    paths = [str(ROOT), str(ROOT / "integrations"), str(ROOT / "tests")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    if options.fake:  # tiny operations gain nothing by more threads, and waiting ones use the processor
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from gpuarena.bench import apart
    from gpuarena.bench._labels import failures
    from gpuarena.errors import ArenaError

    names = None if options.only is None else options.only.split(",")
    try:
        results = apart.run(
            None if names is None else [name for name in names if name != "tests"],
            device="fake-gpu" if options.fake else "cuda",
            gpu=True,
            quick=options.fake,
            budget_s=None if budget == float("inf") else (1 - TESTS_SHARE) * budget,
            on_result=lambda found: write(found, options.out),
        )
    except ArenaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if names is None or "tests" in names:
        print("== tests", flush=True)
        left = budget - (time.monotonic() - began)
        results["tests"] = run_tests(fake=options.fake, budget=left)
    results["seconds"] = round(time.monotonic() - began, 1)
    write(results, options.out)
    bad = failures(results)
    for sentence in bad:
        print(f"failed: {sentence}")
    counts = results.get("tests", {}).get("counts", {})
    print(
        f"{len(bad)} failed; tests: {counts}; {results['seconds']:.0f} s; {options.out} and its .md",
        flush=True,
    )
    return 1 if bad else 0


def write(results: dict[str, Any], out: Path) -> None:
    """Write the results so far, and the document beside them."""
    from gpuarena._files import replacing
    from gpuarena.bench import report
    from gpuarena.bench._json import as_json

    with replacing(out) as file:
        file.write(as_json(results, indent=2) + "\n")
    try:
        text = report.markdown(results)
    except Exception as error:  # the figures are what matters, and they are written
        text = f"The results cannot be shown: {type(error).__name__}: {error}\n"
    with replacing(out.with_suffix(".md")) as file:
        file.write(text)


def run_tests(*, fake: bool, budget: float, folder: Path = ROOT / "tests" / "gpu") -> dict[str, Any]:
    """Run the tests marked gpu in a process of their own; return counts, messages of failures, and figures."""
    if importlib.util.find_spec("pytest") is None:
        return {"counts": {}, "cases": [], "not_measured": "pytest is missing"}
    if budget < 5:
        return {"counts": {}, "cases": [], "not_measured": "no time of the budget was left"}
    began = time.monotonic()
    # No plugin is needed, and one that is broken would end all tests.
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HYPOTHESIS_PROFILE": os.environ.get("HYPOTHESIS_PROFILE", "ci"),
    }
    if fake:
        environment["GPUARENA_FAKE_GPU"] = "1"
    with tempfile.TemporaryDirectory(prefix="gpuarena-kit-") as made:
        path = Path(made) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={path}", str(folder)]
        # A module whose imports fail is one error. Warnings are no errors here: the libraries of the GPU machine are
        # others than those that CI knows.
        command += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
        command += ["-o", "addopts=-ra", "-o", "filterwarnings=default"]
        if importlib.util.find_spec("hypothesis") is None:
            command += [f"--confcutdir={folder}"]  # the conftest above wants it; only tests that do fail then
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        found: dict[str, Any] = {}
        try:
            status = process.wait(timeout=None if budget == float("inf") else budget)
        except subprocess.TimeoutExpired:
            found["not_measured"] = f"the rest: the {budget:.0f} s that were left are over"
            status = _stop(process)
        found["exit_status"] = status
        found |= read_report(path)
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def _stop(process: subprocess.Popen[bytes]) -> int:
    """End pytest as Ctrl-C does, after which it writes its report, or else at once."""
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def read_report(path: Path) -> dict[str, Any]:
    """Return what pytest wrote: counts by outcome, and each test with its message and what it recorded."""
    found: dict[str, Any] = {"counts": {}, "cases": []}
    if not path.exists():
        return found
    for case in ET.parse(path).getroot().iter("testcase"):
        if case.get("name") is None:  # pytest was stopped in it
            continue
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if bad is None else {"failure": "failed"}.get(bad.tag, bad.tag)
        found["counts"][outcome] = found["counts"].get(outcome, 0) + 1
        entry: dict[str, Any] = {"name": f"{case.get('classname')}::{case.get('name')}", "outcome": outcome}
        if bad is not None:
            entry["message"] = (bad.get("message") or "")[:MESSAGE_LIMIT]
            if outcome in ("failed", "error"):
                entry["text"] = (bad.text or "")[-MESSAGE_LIMIT:]  # where it happened
        figures = {one.get("name"): one.get("value") for one in case.iter("property")}
        if figures:
            entry["figures"] = figures
        found["cases"].append(entry)
    return found


if __name__ == "__main__":
    sys.exit(main())
