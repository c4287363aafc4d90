"""``gpuarena size``, and the configs that it reads or has built in."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
typer_testing = pytest.importorskip("typer.testing")

import families  # noqa: E402 - after the skips
from gpuarena_transformers.from_config import size_of_config  # noqa: E402
from gpuarena_transformers.known_models import KNOWN_MODELS, known_config  # noqa: E402
from gpuarena_transformers.model_files import read_config  # noqa: E402

from gpuarena.cli import app  # noqa: E402
from gpuarena.errors import ArgumentError, BackendError  # noqa: E402


def run(*arguments):
    return typer_testing.CliRunner().invoke(app, ["size", *map(str, arguments)], catch_exceptions=False)


def figures(*arguments):
    return json.loads(run(*arguments, "--json").stdout)


def test_qwen_1_5b_at_32768_tokens():
    found = figures("qwen2.5-1.5b", "--context", "32768")
    assert (found["bytes_per_token"], found["nbytes"]) == (28_672, 939_524_096)
    assert (found["max_length"], found["scratch_nbytes"], found["state_nbytes"]) == (32_768, 0, 0)
    assert found["n_parameters"] == 1_543_714_304
    assert found["weights_nbytes"] == 2 * found["n_parameters"]
    assert found["source"] == "a dry run on the meta device"
    eight = found["fits"][0]
    assert eight == {
        "gigabytes": 8,
        "without_weights": 8 * 10**9 // 28_672,
        "with_weights": (8 * 10**9 - found["weights_nbytes"]) // 28_672,
    }


def test_what_is_printed():
    text = run("Qwen/Qwen2.5-1.5B-Instruct", "--context", "32768").stdout
    for part in (
        "28 672 bytes a token",
        "32 768 tokens x 1 row: 939.5 MB",
        "2 x 128",
        "80 GB",
        "without weights",
    ):
        assert part in text
    assert "3.09 GB of weights in bfloat16" in text
    assert "Warning" not in text


def test_windows_and_rows():
    """Each row is counted, and the scratch that moves them; the window says what attention sees of it."""
    found = figures("gemma-3-1b", "--context", "4096", "--batch", "4", "--dtype", "float32")
    by_kind = {one["kind"]: one for one in found["layers"]}
    assert (by_kind["window"]["n_layers"], by_kind["full"]["n_layers"]) == (22, 4)
    assert by_kind["window"]["windows"] == [512]
    assert by_kind["window"]["visible_nbytes"] == by_kind["window"]["nbytes"] // 8
    assert found["nbytes"] == 4 * 4096 * 26 * 2 * 256 * 4
    assert found["scratch_nbytes"] >= 4 * 4096 * 256 * 4
    assert "MB within windows" in run("gemma-3-1b", "--context", "4096").stdout


def test_a_model_of_latent_attention_is_not_mistaken_for_one_of_128_heads():
    config = known_config("deepseek-v3")
    config.num_hidden_layers = 4  # all are alike in what they cache
    assert size_of_config(config, torch.bfloat16).layout.bytes_per_token == 4 * (512 + 64) * 2


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt-oss-20b", "smollm2-135m", "falcon-7b", "gpt2"])
def test_the_weights_of_a_built_in_config_are_as_many_as_its_makers_say(name):
    assert size_of_config(known_config(name), torch.bfloat16).n_parameters == KNOWN_MODELS[name][2]


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_all_built_in_configs(name):
    assert size_of_config(known_config(name), torch.bfloat16).n_parameters == KNOWN_MODELS[name][2]


# ---------------------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("name", ["lfm2", "gemma4-shared"])
def test_a_folder_and_its_config(tmp_path, name):
    folder = tmp_path / "some-model"
    families.config(name).save_pretrained(folder)
    found = figures(folder, "--context", "100", "--dtype", "float32")
    assert found == figures(folder / "config.json", "--context", "100", "--dtype", "float32")
    assert found["model"] == "some-model"
    expected = size_of_config(families.config(name), torch.float32).layout
    assert found["nbytes"] == expected.nbytes(1, 100)
    assert found["state_nbytes"] == expected.state_nbytes
    assert found["stored_nbytes"] is None
    families.model(name).save_pretrained(folder)
    assert found["weights_nbytes"] <= read_config(str(folder))[2] < found["weights_nbytes"] + 20_000
    assert "bytes a sequence whatever its length" in run(folder).stdout or name != "lfm2"


def test_a_gguf_file(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(3)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(256)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = figures(path)
    assert (found["model"], found["context"], found["bytes_per_token"]) == ("tiny", 512, 3 * 2 * 2 * 16 * 2)


def test_a_context_beyond_what_the_model_was_made_for():
    text = run("gpt2", "--context", "5000").stdout
    assert "the model was made for 1 024 tokens" in text


# ---------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("quen2.5-1.5b", "close are qwen2.5-1.5b"),
        ("zzzzzz", "there are deepseek-v3, "),
        ("/no/such/folder", "there is no file or folder"),
        ("/no/such/config.json", "cannot read '/no/such/config.json'"),
        ("/no/such/model.gguf", "there is no file '/no/such/model.gguf'"),
    ],
)
def test_names_and_files_that_are_not_there(source, message):
    with pytest.raises(ArgumentError, match=message):
        read_config(source)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read"),
        ("[]", "has no model_type"),
        ('{"hidden_size": 5}', "has no model_type"),
        ('{"model_type": "no-such-model"}', "transformers cannot use this config"),
    ],
)
def test_files_that_are_no_configs(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        read_config(str(path))


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ArgumentError, match=r"has no config\.json"):
        read_config(str(tmp_path))


def test_a_file_that_is_no_gguf(tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(ArgumentError, match="cannot read"):
        read_config(str(path))


def test_what_is_not_installed_is_named(monkeypatch, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    real = builtins.__import__

    def without(missing):
        def load(name, *args, **kwargs):
            if name.partition(".")[0] == missing:
                raise ImportError(f"No module named {missing!r}")
            return real(name, *args, **kwargs)

        return load

    monkeypatch.setattr(builtins, "__import__", without("gguf"))
    with pytest.raises(BackendError, match="pip install 'gpuarena\\[demo\\]'"):
        read_config(str(path))
    monkeypatch.setattr(builtins, "__import__", without("torch"))
    with pytest.raises(BackendError, match="pip install 'gpuarena\\[cli,transformers\\]'"):
        run("gpt2")


def test_a_dtype_that_caches_do_not_have():
    with pytest.raises(ArgumentError, match="dtype 'int3' is none of bfloat16, float16, float32"):
        run("gpt2", "--dtype", "int3")


def test_an_error_is_one_clear_line():
    done = subprocess.run(
        [sys.executable, "-m", "gpuarena.cli", "size", "no-such-model"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "error:" in done.stderr
