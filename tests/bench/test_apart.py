"""The suite in processes: what kills one is noted, and another goes on with the rest."""

import sys

import pytest

from gpuarena.bench import apart, suite
from gpuarena.bench.suite import Job
from gpuarena.errors import BackendError

#: A process that plays the suite: it writes results as that does, and ends as its lines say.
PROGRAM = """
import json, os, signal, sys, time
request = json.loads(sys.argv[1])
entries = []
def write(**more):
    with open(request["path"] + ".new", "w") as file:
        json.dump({"environment": {"device": "d"}, "benchmarks": entries, **more}, file)
    os.replace(request["path"] + ".new", request["path"])
def check(title, **more):
    return {"title": title, "passed": True, "why": "", "seconds": 1, "figures": {}, "groups": [], **more}
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""

CHECKS = """
if request["names"] == ["gpu"]:
    entry = {"benchmark": "gpu", "unfinished": True, "checks": []}
    entries.append(entry)
    for title in ["a", "kills", "b", "hangs", "c"]:
        if title in request["skipped_checks"]:
            continue
        entry["running"] = title
        write()
        if title == "kills":
            die()
        if title == "hangs":
            time.sleep(60)
        entry["checks"].append(check(title))
        write()
    del entry["unfinished"], entry["running"]
    write()
    sys.exit()
"""

BENCHMARKS = """
for name in request["names"]:
    entry = {"benchmark": name, "unfinished": True, "groups": [1]}
    entries.append(entry)
    write()
    if name == "dies":
        die()
    del entry["unfinished"]
    if name == "loses":
        entries.append({"benchmark": "last", "not_measured": "lost", "lost": True})
    write()
    if name == "loses":
        break
"""


@pytest.fixture
def play(monkeypatch):
    """Return a function that lets a program be each process of the suite."""

    def set_program(text, *names):
        jobs = tuple(Job(name, gpu_s=1, cpu_s=1, only_gpu=name == "gpu") for name in names)
        monkeypatch.setattr(suite, "JOBS", jobs)

        def command(request):
            return [sys.executable, "-S", "-c", PROGRAM + text, apart.json.dumps(request)]

        monkeypatch.setattr(apart, "_command", command)

    return set_program


def test_checks_that_kill_their_process_or_hang_cost_themselves_alone(play):
    play(CHECKS + BENCHMARKS, "gpu", "kv")
    told = []
    found = apart.run(device="cuda", gpu=True, stall_s=2.0, on_result=lambda one: told.append(str(one)))
    gpu, kv = found["benchmarks"]
    assert [(one["title"], one["passed"]) for one in gpu["checks"]] == [
        ("a", True),
        ("kills", False),
        ("b", True),
        ("hangs", False),
        ("c", True),
    ]
    assert "SIGKILL" in gpu["checks"][1]["why"]
    assert "nothing new came for 2 s" in gpu["checks"][3]["why"]
    assert not {"unfinished", "running", "error"} & gpu.keys()
    assert kv == {"benchmark": "kv", "groups": [1]}
    assert found["environment"] == {"device": "d"}
    assert len(told) > 5


def test_a_benchmark_that_kills_its_process_and_one_that_loses_the_device(play):
    play(BENCHMARKS, "first", "dies", "loses", "last")
    found = apart.run(device="cuda")["benchmarks"]
    assert [one["benchmark"] for one in found] == ["first", "dies", "loses", "last"]
    assert "SIGKILL" in found[1]["error"]
    assert found[1]["groups"] == [1]
    assert all("error" not in one and "not_measured" not in one for one in (found[0], found[2], found[3]))


def test_a_process_that_cannot_even_begin_ends_with_its_benchmarks_noted(play):
    play("sys.exit(3)", "gpu", "kv")
    gpu, kv = apart.run(device="cuda", gpu=True)["benchmarks"]
    assert gpu["error"] == kv["error"] == "its process ended with status 3"


def test_one_that_compiles_is_waited_for_as_long_as_it_may_take(tmp_path):
    work = apart._Work({"device": "cuda", "quick": False}, None, 120.0, lambda results: None)
    compiles = next(job for job in suite.JOBS if job.always.get("compiled"))
    found = apart._File(tmp_path / "none")
    found.found = {"benchmarks": [{**compiles.facts, "unfinished": True}]}
    assert work._patience(found) == 2 * compiles.gpu_s > 120
    found.found = {"benchmarks": [dict(compiles.facts), {"benchmark": "alloc", "unfinished": True}]}
    assert work._patience(found) == 120


def test_a_device_that_is_not_there_is_said_at_once(play):
    play('write(refused="there is no CUDA device")', "kv")
    with pytest.raises(BackendError, match="there is no CUDA device"):
        apart.run(device="cuda")
