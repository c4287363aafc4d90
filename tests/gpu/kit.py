"""Everything that wants a GPU, in one command: the GPU tests and the benchmarks, into one JSON file.

    python tests/gpu/kit.py --out results.json [--fake] [--budget SECONDS]

No network and no weights are needed, only pytest and hypothesis beside the package's own dependencies. With
``--fake`` the same runs on the CPU with a tiny model, to see that the script itself works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run the kit; return 0 if all of it passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results.json"))
    parser.add_argument("--fake", action="store_true", help="run on the CPU, tiny")
    parser.add_argument("--budget", type=float, default=290.0, help="seconds that the tests may take at most")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "integrations")]
    from gpuarena.bench import alloc, decode, generate, harness, kv

    device = "cpu" if options.fake else "cuda"
    results: dict[str, Any] = {"environment": harness.environment(device), "fake": options.fake}
    start = time.monotonic()
    results["tests"] = run_tests(options.fake, options.budget)
    results["tests"]["seconds"] = round(time.monotonic() - start, 1)
    options.out.write_text(json.dumps(results, indent=2) + "\n")  # what there is so far, should the rest fail
    results["benchmarks"] = []
    try:
        figures = alloc.run(device=device, quick=options.fake, rounds=15)
    except Exception as error:  # the other results are worth keeping, whatever went wrong with this one
        figures = {"benchmark": "alloc", "error": f"{type(error).__name__}: {error}"}
    results["benchmarks"].append(figures)
    try:
        figures = kv.run(device=device, quick=options.fake)
    except Exception as error:  # the other results are worth keeping, whatever went wrong with this one
        figures = {"benchmark": "kv", "error": f"{type(error).__name__}: {error}"}
    results["benchmarks"].append(figures)
    for dtype in ("bfloat16", "float32"):
        try:
            figures = decode.run(
                device=device,
                dtype=dtype,
                lengths=[16, 32] if options.fake else decode.LENGTHS,
                layers=2 if options.fake else 28,
                rounds=2 if options.fake else 15,
                tiny=options.fake,
            )
        except Exception as error:  # the other results are worth keeping, whatever went wrong with this one
            figures = {"benchmark": "decode", "dtype": dtype, "error": f"{type(error).__name__}: {error}"}
        results["benchmarks"].append(figures)
        options.out.write_text(json.dumps(results, indent=2) + "\n")
    try:
        figures = generate.run(
            device=device, lengths=[512, 8192], layers=28, rounds=9, whole_limit=512, quick=options.fake
        )
    except Exception as error:  # as above
        figures = {"benchmark": "generate", "error": f"{type(error).__name__}: {error}"}
    results["benchmarks"].append(figures)
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    print(f"tests: {results['tests']['counts']}; results in {options.out}")
    broken = [one for one in results["benchmarks"] if "error" in one]
    for one in broken:
        print(f"benchmark failed: {one['error']}")
    return 1 if broken or results["tests"]["exit_status"] else 0


def run_tests(fake: bool, budget: float) -> dict[str, Any]:
    """Run the tests marked gpu in a process of their own; return counts and the failures' messages."""
    report = Path(os.environ.get("TMPDIR", "/tmp")) / f"gpuarena-kit-{os.getpid()}.xml"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")]
        ),
        "HYPOTHESIS_PROFILE": os.environ.get("HYPOTHESIS_PROFILE", "ci"),
    }
    if fake:
        environment["GPUARENA_FAKE_GPU"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        f"--junitxml={report}",
        str(ROOT / "tests" / "gpu"),
    ]
    # Warnings are no errors here: the libraries of the GPU machine are older than those that CI knows.
    command += ["-p", "no:cacheprovider", "-o", "addopts=-ra", "-W", "default"]
    try:
        status = subprocess.run(command, cwd=ROOT, env=environment, timeout=budget).returncode
    except subprocess.TimeoutExpired:
        status = -1
    found: dict[str, Any] = {"exit_status": status, "counts": {}, "cases": []}
    if report.exists():
        for case in ET.parse(report).getroot().iter("testcase"):
            bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
            outcome = "passed" if bad is None else {"failure": "failed"}.get(bad.tag, bad.tag)
            found["counts"][outcome] = found["counts"].get(outcome, 0) + 1
            entry = {"name": f"{case.get('classname')}::{case.get('name')}", "outcome": outcome}
            if bad is not None:
                entry["message"] = (bad.get("message") or "")[:2000]
            found["cases"].append(entry)
        report.unlink()
    return found


if __name__ == "__main__":
    sys.exit(main())
