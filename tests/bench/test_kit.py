"""The GPU kit without a GPU: what it makes of tests, what it writes, and what it answers."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from gpuarena.bench import apart
from gpuarena.errors import BackendError


@pytest.fixture
def kit(monkeypatch):
    """Return the module; what it does to the path and the environment is undone."""
    spec = importlib.util.spec_from_file_location("gpu_kit", Path(__file__).parents[1] / "gpu" / "kit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # so that it is put back
    return module


TESTS = """
import pytest
pytestmark = pytest.mark.gpu
def test_good(record_property):
    record_property("bandwidth", "4 TB/s")
def test_bad():
    assert 1 == 2, "one is not two"
def test_left_out():
    pytest.skip("no CuPy")
"""


def test_tests_are_counted_with_their_messages_and_what_they_recorded(kit, tmp_path):
    (tmp_path / "test_made_up_gpu.py").write_text(TESTS)
    (tmp_path / "test_broken_gpu.py").write_text("import nothing_of_this_name")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: made up\n")
    found = kit.run_tests(fake=True, budget=float("inf"), folder=tmp_path)
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1, "error": 1}
    assert found["exit_status"] == 1
    cases = {case["name"].split("::")[-1]: case for case in found["cases"]}
    assert cases["test_good"]["figures"] == {"bandwidth": "4 TB/s"}
    assert "one is not two" in cases["test_bad"]["message"]
    assert "test_made_up_gpu.py" in cases["test_bad"]["text"]
    assert cases["test_left_out"]["outcome"] == "skipped"


def test_tests_without_pytest_or_time_are_not_measured(kit, monkeypatch):
    assert "budget" in kit.run_tests(fake=True, budget=1.0)["not_measured"]
    monkeypatch.setattr(kit.importlib.util, "find_spec", lambda name: None)
    assert kit.run_tests(fake=True, budget=100.0)["not_measured"] == "pytest is missing"


def test_one_file_and_one_document_are_written_as_results_come(kit, monkeypatch, tmp_path, capsys):
    out = tmp_path / "results.json"
    asked, kept = {}, []

    def suite(names, *, on_result, **options):
        asked.update(options, names=names)
        results = {"benchmark": "all", "fake": False, "seconds": 1.0, "benchmarks": [{"benchmark": "alloc"}]}
        on_result(results)
        kept.append((json.loads(out.read_text()), out.with_suffix(".md").read_text()))
        return results

    case = {"name": "t::bad", "outcome": "failed", "message": "assert 1 == 2"}
    tests = {"counts": {"passed": 3}, "cases": [], "exit_status": 0}
    monkeypatch.setattr(apart, "run", suite)
    monkeypatch.setattr(kit, "run_tests", lambda **options: asked.update(tests=options) or tests)
    assert kit.main(["--out", str(out), "--budget", "100"]) == 0
    assert kept[0][0]["benchmarks"] == [{"benchmark": "alloc"}]
    assert "## alloc" in kept[0][1]
    assert asked["device"] == "cuda"
    assert asked["gpu"] is True
    assert asked["budget_s"] == pytest.approx(80)
    assert 90 < asked["tests"]["budget"] <= 100
    assert json.loads(out.read_text())["tests"] == tests
    assert "| passed | 3 |" in out.with_suffix(".md").read_text()
    tests |= {"cases": [case], "exit_status": 1}
    assert kit.main(["--out", str(out), "--fake", "--only", "kv,tests"]) == 1
    assert asked["names"] == ["kv"]
    assert asked["device"] == "fake-gpu"
    assert asked["budget_s"] is None
    assert "failed: t::bad: assert 1 == 2" in capsys.readouterr().out


def test_without_a_gpu_it_says_so_in_one_line(kit, monkeypatch, tmp_path, capsys):
    def suite(names, **options):
        raise BackendError("there is no CUDA device")

    monkeypatch.setattr(apart, "run", suite)
    assert kit.main(["--out", str(tmp_path / "results.json")]) == 1
    assert capsys.readouterr().err == "error: there is no CUDA device\n"


def test_it_needs_no_command_line(kit):
    source = Path(kit.__file__).read_text()
    assert "gpuarena.cli" not in source
    for name in ("apart", "suite", "report", "_labels"):
        assert "gpuarena.cli" not in Path(apart.__file__).with_name(f"{name}.py").read_text()
