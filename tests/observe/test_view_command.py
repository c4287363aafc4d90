"""``gpuarena view``, as a user types it."""

import json
import re
import subprocess
import sys
import webbrowser

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from gpuarena import Arena
from gpuarena.cli import app
from gpuarena.errors import ArgumentError, OutOfMemoryError


def view(*arguments):
    result = CliRunner().invoke(app, ["view", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def carried(path):
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text("ascii"), re.DOTALL)[1])


@pytest.fixture(params=[".jsonl", ".csv"])
def log(request, tmp_path):
    path = tmp_path / f"run{request.param}"
    arena = Arena(4096, name="scratch [red]")
    with arena.record(path):
        arena.alloc(1000, "uint8", label="weights")
        with arena.scope("step"):
            arena.alloc(2000, "uint8", label=None)
        with pytest.raises(OutOfMemoryError):
            arena.alloc(4000, "uint8", label="too much")
    return path


def test_a_log_becomes_a_page_beside_it(log):
    output = view(log)
    page = log.with_suffix(".html")
    assert output.splitlines() == [
        "scratch [red]: 2 regions, peak 2.95 KiB of 4 KiB, 1 failure",
        f"written to {page}",
    ]
    data = carried(page)
    (one,) = data["maps"]
    assert data["title"] == log.name
    assert (one["nbytes"], one["capacity"]) == ([1000, 2000], 4096)
    assert [failure["nbytes"] for failure in one["failures"]] == ["4000"]


def test_output_title_and_summary_can_be_chosen(log, tmp_path):
    page = tmp_path / "other.map"
    found = json.loads(view(log, "-o", page, "--title", "<b>", "--json"))
    assert found["output"] == str(page)
    (one,) = found["arenas"]
    assert {name: one[name] for name in ("name", "device", "capacity", "n_regions", "n_scopes", "n_rollbacks", "n_failures")} == {
        "name": "scratch [red]", "device": "cpu", "capacity": 4096, "n_regions": 2, "n_scopes": 1, "n_rollbacks": 1,
        "n_failures": 1,
    }  # fmt: skip
    # 1000 bytes, and 2000 from the next multiple of 256 on
    assert one["peak_nbytes"] == 1024 + 2000
    assert carried(page)["title"] == "<b>"
    assert not log.with_suffix(".html").exists()


def test_a_page_goes_to_standard_output(log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    view(log)
    result = CliRunner().invoke(app, ["view", str(log), "-o", "-"], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout == log.with_suffix(".html").read_text("ascii")
    assert result.stderr == "scratch [red]: 2 regions, peak 2.95 KiB of 4 KiB, 1 failure\n"
    for option in ("--json", "--open"):
        with pytest.raises(ArgumentError, match=f"{option} needs it in a file"):
            view(log, "-o", "-", option)
    assert {path.name for path in tmp_path.iterdir()} == {log.name, "run.html"}


def test_the_input_is_never_overwritten(log, tmp_path):
    before = log.read_bytes()
    link = tmp_path / "link.html"
    link.symlink_to(log)
    for output in (log, link):
        with pytest.raises(ArgumentError, match="name another file with -o"):
            view(log, "-o", output)
        assert log.read_bytes() == before


def test_a_log_that_is_cut_off_names_its_line(log):
    text = log.read_text()
    log.write_text(text[: text.rindex("{" if log.suffix == ".jsonl" else ",") + 1])
    n_lines = len(log.read_text().splitlines())
    with pytest.raises(ArgumentError, match=rf"run\{log.suffix}, line {n_lines}, "):
        view(log)
    assert not log.with_suffix(".html").exists()


def test_an_unknown_suffix_says_which_are_known(tmp_path):
    with pytest.raises(ArgumentError, match=r"'run.txt'.*\.jsonl or \.csv.*\.pickle or \.pkl"):
        view(tmp_path / "run.txt")


def test_no_page_is_written_where_there_can_be_none(log, tmp_path):
    for output, error in ((tmp_path, IsADirectoryError), (tmp_path / "no" / "map.html", FileNotFoundError)):
        with pytest.raises(error):
            view(log, "-o", output)
    assert list(tmp_path.iterdir()) == [log]


def test_errors_are_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "gpuarena.cli", "view", str(tmp_path / "no.jsonl")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch("error: .*no.jsonl: No such file or directory\n", done.stderr)


@pytest.mark.parametrize("there_is_one", [True, False])
def test_open_asks_the_browser(log, monkeypatch, there_is_one):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or there_is_one)
    output = view(log, "--open")
    assert opened == [log.with_suffix(".html").as_uri()]
    assert ("no browser was found" in output) is not there_is_one


def test_a_snapshot_becomes_a_page(tmp_path):
    pytest.importorskip("gpuarena.observe.snapshot")
    path = tmp_path / "run.pickle"
    arena = Arena(4096, name="scratch")
    arena.alloc(1000, "uint8", label="weights")
    arena.dump_snapshot(path)
    assert "1 region" in view(path)
    assert "weights" in path.with_suffix(".html").read_text()
