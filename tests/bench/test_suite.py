"""The suite: one benchmark that breaks, is interrupted or runs out of time leaves the others standing."""

import copy
import importlib
import inspect
import json
import sys
import types

import pytest

pytest.importorskip("torch")

from gpuarena.bench import suite
from gpuarena.bench.device import Device, FakeGpu
from gpuarena.bench.gpu import suite as checks
from gpuarena.bench.gpu._check import Check, NotMeasuredError
from gpuarena.bench.suite import Job
from gpuarena.errors import ArgumentError


class Recorded(Device):
    """A CPU that notes when memory is given back, and breaks where it is told to."""

    def __init__(self, breaks_after=99):
        super().__init__()
        self.n_given_back = 0
        self.breaks_after = breaks_after

    def forget_peak(self):
        self.n_given_back += 1
        if self.n_given_back >= self.breaks_after:
            raise RuntimeError("CUDA error: an illegal memory access\nmore lines")


@pytest.fixture
def jobs(monkeypatch):
    """Return a function that replaces all jobs by doubles; each is told what to do after its groups."""

    def make(**bodies):
        def run_of(body):
            def run(*, device, quick, on_group, **options):
                groups = [{"title": "first", "rows": {}}]
                on_group(groups[0])
                found = body(on_group, options)
                return {"groups": groups, **(found or {})}

            return run

        for name, body in bodies.items():
            monkeypatch.setitem(
                sys.modules, f"gpuarena.bench.{name}", types.SimpleNamespace(run=run_of(body))
            )
        monkeypatch.setattr(suite, "environment", lambda device: {"device": device})  # which asks git
        # Doubles leave nothing behind; to collect what other tests left takes long.
        monkeypatch.setattr("gpuarena.bench.device.gc", types.SimpleNamespace(collect=lambda: 0))
        monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
        monkeypatch.setattr(suite, "JOBS", tuple(Job(name, gpu_s=1, cpu_s=2) for name in bodies))

    return make


def raising(error):
    def body(on_group, options):
        raise error

    return body


def fine(on_group, options):
    return {"rounds": 3}


def test_one_that_fails_is_noted_and_the_others_are_run_with_memory_given_back(jobs):
    jobs(
        broken=raising(ValueError("no good")),
        missing=raising(ModuleNotFoundError("No module named 'cupy'", name="cupy")),
        faulty=raising(ModuleNotFoundError("gone", name="gpuarena.nothing")),
        impossible=raising(NotMeasuredError("too little memory")),
        fine=fine,
    )
    device = Recorded()
    seen, started = [], []
    found = suite.run(
        device=device, on_result=lambda r: seen.append(copy.deepcopy(r)), on_start=started.append
    )
    broken, missing, faulty, impossible, last = found["benchmarks"]
    assert started == ["broken", "missing", "faulty", "impossible", "fine"]
    assert device.n_given_back == 5
    assert broken["error"] == "ValueError: no good"
    assert "test_suite.py" in broken["traceback"]
    assert "cupy" in missing["not_measured"]
    assert faulty["error"].startswith("ModuleNotFoundError")  # a module of the package is no library
    assert impossible["not_measured"] == "too little memory"
    assert last["rounds"] == 3
    assert not {"error", "not_measured", "unfinished"} & last.keys()
    assert all(len(one["groups"]) == 1 for one in found["benchmarks"])
    assert found["benchmark"] == "all"
    assert found["fake"] is False
    json.dumps(found)
    # What is heard before a benchmark and after a group is the results so far, of which the last is not finished.
    assert [len(one["benchmarks"]) for one in seen] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5]
    assert all(seen[n]["benchmarks"][1]["unfinished"] for n in (3, 4))
    assert "unfinished" not in seen[3]["benchmarks"][0]


def test_what_does_not_fit_into_the_budget_is_left_out_and_what_overruns_it_is_cut(jobs, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(suite.time, "monotonic", lambda: clock[0])

    def slow(on_group, options):
        clock[0] += 3
        on_group({"title": "second", "rows": {}})
        clock[0] += 30
        on_group({"title": "third", "rows": {}})
        raise AssertionError("it was not cut")

    jobs(slow=slow, late=fine)
    slow, late = suite.run(device=Recorded(), budget_s=10)["benchmarks"]
    assert [group["title"] for group in slow["groups"]] == ["first", "second", "third"]
    assert "budget" in slow["not_measured"]
    assert "error" not in slow
    assert late == {
        "benchmark": "late",
        "not_measured": "it takes about 2 s, and 0 s of the budget were left",
    }


def test_an_interrupted_suite_has_told_what_it_had(jobs):
    jobs(fine=fine, stopped=raising(KeyboardInterrupt()), never=raising(AssertionError()))
    seen = []
    with pytest.raises(KeyboardInterrupt):
        suite.run(device=Recorded(), on_result=lambda results: seen.append(copy.deepcopy(results)))
    one, other = seen[-1]["benchmarks"]
    assert one["rounds"] == 3
    assert other["error"] == "interrupted"
    assert len(other["groups"]) == 1


def test_a_lost_device_measures_nothing_any_more(jobs):
    jobs(killer=fine, after=raising(AssertionError("it was run")))
    killer, after = suite.run(device=Recorded(breaks_after=1))["benchmarks"]
    assert killer["rounds"] == 3
    assert after["lost"]
    assert "illegal memory access" in after["not_measured"]
    assert "more lines" not in after["not_measured"]


def test_checks_after_which_the_device_is_lost_and_checks_that_are_skipped(monkeypatch):
    class Lost(FakeGpu):
        is_lost = False

        def synchronize(self):
            if self.is_lost:
                raise RuntimeError("CUDA error")

    device = Lost()

    def lose(probe):
        device.is_lost = True
        raise RuntimeError("launch failed")

    made = [Check("skipped", lose), Check("kills", lose), Check("after", lambda probe: None)]
    monkeypatch.setattr(checks, "checks", lambda: made)
    monkeypatch.setattr(checks, "environment", lambda device: {"device": device})
    told = []
    found = checks.run(device=device, skipped=["skipped"], on_start=told.append)["checks"]
    assert told == ["kills"]
    assert [(one["title"], one["passed"], one.get("lost")) for one in found] == [
        ("kills", False, None),
        ("after", None, True),
    ]


def test_each_job_is_called_as_its_benchmark_wants_it():
    pytest.importorskip("transformers")
    for job in suite.JOBS:
        name = f"gpuarena.bench.{job.benchmark}" + (".suite" if job.is_checks else "")
        signature = inspect.signature(importlib.import_module(name).run)
        for where in (Device(), FakeGpu()):
            for quick in (False, True):
                signature.bind(**job.arguments(where, quick))
    labels = [job.label for job in suite.JOBS]
    assert len(labels) == len(set(labels))
    assert labels[0] == "gpu"


def test_the_checks_are_asked_of_a_gpu_only_and_names_are_known():
    with pytest.raises(ArgumentError, match="cannot run on cpu"):
        suite.run(["gpu"], device="cpu")
    with pytest.raises(ArgumentError, match="there is no benchmark 'kw'; there are gpu, decode"):
        suite.run(["kw"], device="cpu")
    assert [job.label for job in suite.chosen(["decode"], gpu=False)] == [
        "decode, bfloat16",
        "decode, bfloat16, compiled",
        "decode, float32",
    ]
    assert not any(job.only_gpu for job in suite.chosen(None, gpu=False))
