"""What results are called, what they are made of, and what in them failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from gpuarena.errors import ArgumentError

__all__ = ["NOT_MEASURED", "OUTCOMES", "complete", "failures", "label", "not_run", "parts", "reason"]

NOT_MEASURED = "not measured"
#: How the outcome of a check reads.
OUTCOMES = {True: "passed", False: "FAILED", None: NOT_MEASURED}


def label(part: Mapping[str, Any]) -> str:
    """Return the name of one benchmark's results, which tells it from the others of a file.

    >>> label({"benchmark": "decode", "geometry": {"dtype": "bfloat16"}, "compiled": True})
    'decode, bfloat16, compiled'
    """
    if part.get("label"):
        return str(part["label"])
    dtype = part.get("dtype") or (part.get("geometry") or {}).get("dtype")
    words = [
        part.get("benchmark") or "an unnamed benchmark",
        dtype,
        "compiled" if part.get("compiled") else None,
    ]
    return ", ".join(str(word) for word in words if word)


def parts(results: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return the single benchmarks of results, in order: those of a suite or a kit, or the results themselves."""
    if "benchmarks" not in results:
        yield results
        return
    for one in results["benchmarks"]:
        yield from parts(one)


@contextlib.contextmanager
def complete() -> Iterator[None]:
    """Let what is missing in results, or is something else than it should be, be told in a line.

    Raises
    ------
    ArgumentError
        In place of the error that the block raised.
    """
    try:
        yield
    except ArgumentError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ArgumentError(f"the results are incomplete: {type(error).__name__} {error}") from None


def reason(error: BaseException) -> str:
    r"""Return the type and the first line of an error, which say why something was not measured.

    >>> reason(ValueError("too long:\n  a list")), reason(KeyboardInterrupt())
    ('ValueError: too long:', 'KeyboardInterrupt')
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def not_run(title: str, passed: bool | None, why: str) -> dict[str, Any]:
    """Return the result of a check that was not run to its end, as `gpuarena.bench.gpu` has it of the others."""
    return {"title": title, "passed": passed, "why": why, "seconds": 0.0, "figures": {}, "groups": []}


def failures(results: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each benchmark that broke, each check and each test that failed; none for a good run.

    >>> failures({"benchmarks": [{"benchmark": "kv", "error": "ValueError: x"}, {"benchmark": "alloc", "groups": []}]})
    ['kv: ValueError: x']
    """
    found = []
    for part in parts(results):
        if part.get("error"):
            found.append(f"{label(part)}: {part['error']}")
        found += [
            f"{check['title']}: {check['why']}"
            for check in part.get("checks", [])
            if check["passed"] is False
        ]
    tests = results.get("tests") or {}
    bad = [case for case in tests.get("cases", []) if case["outcome"] in ("failed", "error")]
    found += [f"{case['name']}: {(case.get('message') or case['outcome']).splitlines()[0]}" for case in bad]
    if tests.get("exit_status") and not bad and not tests.get("not_measured"):  # which is pytest, stopped
        found.append(f"tests: pytest ended with status {tests['exit_status']}")
    return found
