"""``gpuarena export``, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from gpuarena import Arena
from gpuarena.cli import app
from gpuarena.observe import load_snapshot


@pytest.fixture(params=[".jsonl", ".csv"])
def log(request, tmp_path):
    arena = Arena(4096, name="scratch")
    path = tmp_path / f"run{request.param}"
    with arena.record(path), arena.scope("step"):
        arena.alloc((2, 3), "float32", label="mask")
    return path


def run(*arguments, width=80):
    return CliRunner(env={"COLUMNS": str(width)}).invoke(app, ["export", *map(str, arguments)])


def test_a_log_becomes_a_snapshot(log, tmp_path):
    target = tmp_path / "run.pickle"
    done = run(log, "-o", target)
    assert done.exit_code == 0, done.output
    (line,) = load_snapshot(target)
    assert [(region.label, region.shape, region.stop is None) for region in line.regions] == [
        ("mask", (2, 3), False)
    ]
    assert "https://pytorch.org/memory_viz" in done.output
    assert f"python -m torch.cuda._memory_viz stats {target}" in done.output
    n_events = 2 + 4  # two starts; the scope and the region come and go
    assert f"written to {target}: {n_events} events" in done.output


def test_a_log_becomes_a_trace_for_perfetto(log, tmp_path):
    target = tmp_path / "run.json"
    done = run(log, "--output", target)
    assert done.exit_code == 0, done.output
    names = {event["name"] for event in json.loads(target.read_text())["traceEvents"] if event["ph"] == "X"}
    assert names == {"step", "mask float32[2, 3]"}
    assert "https://ui.perfetto.dev" in done.output


@pytest.mark.parametrize("name", ["run.txt", "run", "run.jsonl", "-"])
def test_an_output_that_no_viewer_opens(log, tmp_path, name):
    before = sorted(tmp_path.iterdir())
    done = run(log, "-o", tmp_path / name)
    assert done.exit_code != 0
    assert "ends in .pickle (PyTorch's memory viewer) or .json (Perfetto)" in str(done.exception)
    assert sorted(tmp_path.iterdir()) == before


def test_a_log_that_is_none(tmp_path):
    wrong = tmp_path / "run.jsonl"
    wrong.write_text('{"kind": "nothing"}\n')
    target = tmp_path / "run.pickle"
    target.write_bytes(b"old")
    done = run(wrong, "-o", target)
    assert done.exit_code != 0
    assert "run.jsonl, line 1" in str(done.exception)
    assert target.read_bytes() == b"old"


def test_errors_are_one_line_on_standard_error(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "gpuarena.cli", "export", str(tmp_path / "missing.jsonl"), "-o", str(tmp_path / "x.json")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "missing.jsonl: No such file" in done.stderr.replace("\n", "")


def test_help_and_export_need_no_torch(log, tmp_path):
    code = (
        "import sys; from typer.testing import CliRunner; from gpuarena.cli import app; "
        f"done = CliRunner().invoke(app, ['export', {str(log)!r}, '-o', {str(tmp_path / 'x.pickle')!r}]); "
        "assert done.exit_code == 0, done.output; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
