"""``gpuarena bench``: where it runs, what it writes, and how it ends; the figures are those of doubles."""

import json
import sys

import pytest

pytest.importorskip("torch")

import torch
from typer.testing import CliRunner

from gpuarena.bench import alloc, suite
from gpuarena.cli import app

GROUP = {
    "title": "copies [red]",
    "reference": "ours",
    "rows": {"ours": {"median_s": 2e-6, "quartiles_s": [1e-6, 3e-6], "ratio": 1.0}},
}
CHECK = {
    "title": "replay",
    "passed": True,
    "why": "",
    "seconds": 1.0,
    "figures": {"kept": {"value": 3, "unit": "bytes"}},
    "groups": [GROUP],
}


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.fixture
def played(monkeypatch):
    """Let the suite be a double, which hears a group and ends as the list says; return what it was asked."""
    asked = {"end": []}

    def run(names, *, on_group, on_check, on_result, on_start, **options):
        asked.update(options, names=names)
        on_start("alloc")
        on_group(GROUP)
        on_check(CHECK)
        entry = {"benchmark": "gpu", "checks": [CHECK], "groups": [GROUP]}
        results = {
            "benchmark": "all",
            "environment": {},
            "fake": options["device"].is_fake,
            "benchmarks": [entry],
        }
        on_result(results)
        if asked["end"]:
            error = asked["end"][0]
            if isinstance(error, BaseException):
                raise error
            entry["error"] = error
        return results

    monkeypatch.setattr(suite, "run", run)
    return asked


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--fake-gpu"], ["gpu"]),
        (["gpu", "--fake-gpu"], ["gpu"]),
        (["all", "--fake-gpu"], None),
        (["--fake-gpu", "all"], None),
        (["all", "--fake-gpu", "--only", "kv, alloc"], ["kv", "alloc"]),
    ],
    ids=lambda value: "-".join(value) if value else "all",
)
def test_the_checks_and_everything(played, tmp_path, arguments, names):
    paths = [tmp_path / "out.json", tmp_path / "out.md"]
    done = bench(*arguments, "--json", str(paths[0]), "--markdown", str(paths[1]), "--budget", "9")
    assert done.exit_code == 0, done.output
    assert played["names"] == names
    assert played["gpu"] is True
    assert played["budget_s"] == 9
    assert played["device"].is_fake
    for part in (
        "copies [red]",
        "passed: replay",
        "kept: 3 bytes",
        "checks: 1 passed",
        "figures mean nothing",
    ):
        assert part in done.output
    assert json.loads(paths[0].read_text())["benchmarks"][0]["checks"] == [CHECK]
    assert "| replay | passed | kept: 3 bytes |" in paths[1].read_text()


def test_on_a_cpu_no_checks_are_asked_for(played):
    assert bench("all", "--device", "cpu").exit_code == 0
    assert played["gpu"] is False
    assert played["device"].name == "cpu"


@pytest.mark.parametrize(
    ("end", "status"), [("ValueError: x", 1), (KeyboardInterrupt(), 130)], ids=["broken", "interrupted"]
)
def test_what_was_measured_is_kept_whatever_the_end(played, tmp_path, end, status):
    played["end"].append(end)
    path = tmp_path / "out.json"
    done = bench("all", "--fake-gpu", "--json", str(path))
    assert done.exit_code == status
    assert json.loads(path.read_text())["benchmarks"][0]["groups"] == [GROUP]


def test_a_single_benchmark_keeps_its_groups_when_it_is_interrupted(monkeypatch, tmp_path):
    def run(*, device, rounds, quick, on_group):
        assert device.is_fake
        assert quick
        on_group(GROUP)
        raise KeyboardInterrupt

    monkeypatch.setattr(alloc, "run", run)
    path = tmp_path / "out.json"
    assert bench("alloc", "--fake-gpu", "--json", str(path)).exit_code == 130
    found = json.loads(path.read_text())
    assert found["benchmark"] == "alloc"
    assert found["error"] == "interrupted"
    assert found["groups"] == [GROUP]
    assert found["fake"] is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "arguments", [["--gpu"], ["all", "--gpu"], ["alloc", "--gpu"]], ids=lambda value: value[0]
)
def test_without_a_gpu_there_is_one_line(arguments):
    from gpuarena.errors import BackendError

    done = bench(*arguments)
    assert isinstance(done.exception, BackendError)  # which the command line tells in one line, with status 1
    assert "there is no CUDA device; --fake-gpu" in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kv", "--gpu", "--device", "cpu"], "exclude each other"),
        (["all", "--only", "kw"], "there is no benchmark 'kw'"),
        (["decode", "--lengths", "many"], "no list of integers"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_usage(arguments, message):
    done = bench(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_without_transformers_the_extra_is_named(monkeypatch):
    import gpuarena.bench
    from gpuarena.errors import BackendError

    for name in [one for one in sys.modules if one.startswith("gpuarena_transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "gpuarena.bench.attention", raising=False)
    monkeypatch.delattr(gpuarena.bench, "attention", raising=False)
    done = bench("attention", "--fake-gpu")
    assert isinstance(done.exception, BackendError)
    assert "bench attention needs the transformers extra" in str(done.exception)


def test_alone_it_shows_its_commands():
    done = bench()
    assert "attention" in done.output
    assert "--gpu" in done.output


def test_a_real_run_as_a_document(tmp_path):
    pytest.importorskip("transformers")
    paths = [tmp_path / "out.json", tmp_path / "out.md"]
    done = bench(
        "all", "--fake-gpu", "--only", "attention", "--json", str(paths[0]), "--markdown", str(paths[1])
    )
    assert done.exit_code == 0, done.output
    (entry,) = json.loads(paths[0].read_text())["benchmarks"]
    assert entry["groups"]
    assert not {"error", "not_measured", "unfinished"} & entry.keys()
    printed = bench("report", str(paths[0])).output
    assert printed == paths[1].read_text()
    assert all(f"**{group['title']}**" in printed for group in entry["groups"])
