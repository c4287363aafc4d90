"""The commands that run models, as a user types them; in one process, since each would import torch anew."""

import json
import subprocess
import sys
import types

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from gpuarena.cli import main

RANDOM = ("--model", "random", "--max-new-tokens", "4", "--device", "cpu")


@pytest.fixture
def gpuarena(monkeypatch, capfd):
    """Run the command; return its status and what it printed, also below Python."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gpuarena", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        assert "…" not in out
        return types.SimpleNamespace(returncode=ended.value.code or 0, stdout=out, stderr=err)

    return run


def test_version():
    import gpuarena as package

    done = subprocess.run(
        [sys.executable, "-m", "gpuarena.cli", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, f"gpuarena {package.__version__}")


def test_demo_with_a_random_model_shows_the_mechanics(gpuarena):
    done = gpuarena("demo", "Who are you?", *RANDOM, "--context", "600")
    assert done.returncode == 0, done.stderr
    for word in (
        "Who are you?",
        "ArenaCache",
        "DynamicCache",
        "StaticCache",
        "allocated a token, bytes",
        "rollback",
    ):
        assert word in done.stdout
    assert "Warning" not in done.stderr


def test_the_figures_of_the_demo_are_all_of_standard_output(gpuarena):
    done = gpuarena("demo", "Who are you?", *RANDOM, "--context", "600", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["model"], found["context"], found["device"]) == ("random Llama", 600, "cpu")
    assert [column["name"] for column in found["columns"]] == ["ArenaCache", "DynamicCache", "StaticCache"]
    assert all(column["long_tokens_per_s"] > 0 for column in found["columns"])
    assert found["answers"][0][0] == "Who are you?"
    assert "Who are you?" in done.stderr


def test_a_model_that_is_not_there_is_one_clear_line(gpuarena):
    done = gpuarena("demo", "--model", "/no/such/folder", "--device", "cpu")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "/no/such/folder" in done.stderr
    done = gpuarena("size", "/no/such/folder")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: there is no file or folder '/no/such/folder'")


def test_a_context_that_is_too_small_is_one_clear_line(gpuarena):
    done = gpuarena("demo", *RANDOM, "--context", "20")
    assert done.returncode == 1
    assert "context of 20 tokens is too small" in done.stderr


def test_bench_decode_writes_what_it_prints(gpuarena, tmp_path):
    path = tmp_path / "out.json"
    arguments = ("bench", "decode", "--quick", "--device", "cpu", "--dtype", "float32", "--json")
    done = gpuarena(*arguments, str(path))
    assert done.returncode == 0, done.stderr
    assert "ArenaCache + gpuarena" in done.stdout
    written = json.loads(path.read_text())
    done = gpuarena(*arguments, "-")
    assert "ArenaCache + gpuarena" in done.stderr
    for result in (written, json.loads(done.stdout)):
        assert result["benchmark"] == "decode"
        assert [one["n_tokens"] for one in result["groups"]] == [32, 64]


def test_a_file_that_cannot_be_written_is_known_before_anything_is_measured(gpuarena, tmp_path):
    for command in ("decode", "alloc", "kv", "generate", "attention"):
        done = gpuarena("bench", command, "--json", str(tmp_path / "none" / "out.json"))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"error: {tmp_path}/none/out.json: No such file or directory\n"
    done = gpuarena("bench", "generate", "--plot", str(tmp_path))
    assert done.stderr == f"error: {tmp_path}: Is a directory\n"


@pytest.mark.parametrize(
    "arguments",
    [("decode", "--lengths", "many"), ("attention", "--queries", "1,two"), ("generate", "--batches", "")],
)
def test_bench_refuses_lists_that_are_no_numbers(gpuarena, arguments):
    done = gpuarena("bench", *arguments)
    assert done.returncode == 2
    assert "is no list of integers" in " ".join(done.stderr.replace("│", " ").split())


def test_a_device_that_is_not_there_is_one_clear_line(gpuarena):
    for command in (["demo", "--model", "random"], ["bench", "decode", "--quick"]):
        done = gpuarena(*command, "--device", "meta:7x")
        assert done.returncode == 1
        assert "torch cannot use device 'meta:7x'" in done.stderr


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("demo", "demo"),
        ("bench decode", "transformers"),
        ("bench kv", "transformers"),
        ("size gpt2", "transformers"),
    ],
)
def test_without_torch_the_extra_is_named(command, extra):
    # In a process of its own: modules that are imported anew here would not be those that other tests have.
    code = f"import sys; sys.modules['torch'] = None; sys.argv = ['gpuarena', *{command.split()!r}]\n"
    code += "from gpuarena.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"pip install 'gpuarena[cli,{extra}]'" in done.stderr
    assert done.stderr.count("\n") == 1
