"""The command line, as a user types it."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")


def gpuarena(*arguments, timeout=300):
    return subprocess.run(
        [sys.executable, "-m", "gpuarena.cli", *arguments], capture_output=True, text=True, timeout=timeout
    )


def test_version():
    import gpuarena as package

    done = gpuarena("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"gpuarena {package.__version__}")


def test_demo_with_a_random_model_shows_the_mechanics():
    done = gpuarena("demo", "Who are you?", "--model", "random", "--max-new-tokens", "4", "--context", "600")
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
    assert "Traceback" not in done.stderr


def test_a_model_that_is_not_there_is_one_clear_line():
    done = gpuarena("demo", "--model", "/no/such/folder")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "error:" in done.stderr
    assert "/no/such/folder" in done.stderr.replace("\n", "")


def test_a_context_that_is_too_small_is_one_clear_line():
    done = gpuarena("demo", "--model", "random", "--context", "20")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "context of 20 tokens is too small" in " ".join(done.stderr.split())


def test_bench_decode_writes_what_it_prints(tmp_path):
    path = tmp_path / "out.json"
    done = gpuarena(
        "bench", "decode", "--quick", "--device", "cpu", "--dtype", "float32", "--json", str(path)
    )
    assert done.returncode == 0, done.stderr
    assert "ArenaCache + gpuarena" in done.stdout
    result = json.loads(path.read_text())
    assert result["benchmark"] == "decode"
    assert [one["n_tokens"] for one in result["results"]] == [32, 64]


def test_bench_decode_refuses_lengths_that_are_no_numbers():
    done = gpuarena("bench", "decode", "--lengths", "many")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_device_that_is_not_there_is_one_clear_line():
    for command in (["demo", "--model", "random"], ["bench", "decode", "--quick"]):
        done = gpuarena(*command, "--device", "meta:7x")
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert "torch cannot use device 'meta:7x'" in " ".join(done.stderr.split())
