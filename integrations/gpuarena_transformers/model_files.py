"""The config of a model, from whatever names it: a folder, a config.json, a .gguf file, or a name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpuarena.errors import ArgumentError, BackendError
from gpuarena_transformers.known_models import known_config

__all__ = ["read_config"]

#: Entries that choose how a model is run, and may name code on a hub, which transformers would fetch and run.
_HOW_TO_RUN = ("attn_implementation", "experts_implementation", "use_kernels", "auto_map")


def read_config(source: str) -> tuple[Any, str, int | None]:
    """Return the config of a model, its name, and the bytes of its weights as stored if a file tells.

    No weights are read and nothing is fetched. Code that comes with a model is not run.

    Parameters
    ----------
    source : str
        A folder with a ``config.json``, such a file, a ``.gguf`` file, or the name of a model that is built in.

    Raises
    ------
    ArgumentError
        It is none of these, or cannot be read, or names a model that transformers does not have.
    BackendError
        A ``.gguf`` file without the gguf package.
    """
    try:
        path = Path(source).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # it may be the name of a model
    except (OSError, RuntimeError, ValueError) as error:
        raise ArgumentError(f"cannot read {source[:80]!r}: {error}") from error
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ArgumentError(
                f"the folder {source!r} has no config.json; give that of a model, or a .gguf file"
            )
        path = path / "config.json"
    if path.suffix == ".gguf":
        return _read_gguf(path)
    if path.is_file() or path.suffix == ".json":
        return _read_json(path), path.resolve().parent.name, _weights_nbytes(path.parent)
    if "/" in source and source.count("/") > 1:  # a path, since names have one at most
        raise ArgumentError(f"there is no file or folder {source!r}")
    return known_config(source), source, None


def _read_json(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise ArgumentError(f"{str(path)!r} is no config of a model: it has no model_type")
    kind = found.pop("model_type")
    try:
        return AutoConfig.for_model(kind, **_without_code(found))
    except Exception as error:  # configs check their entries each in its own way
        first_line = str(error).partition(" Should contain")[0].partition("\n")[0]
        raise ArgumentError(f"{str(path)!r}: transformers cannot use this config: {first_line}") from error


def _without_code(found: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a config, also of its parts, that say what a model is and not how it is run."""
    return {
        name: _without_code(value) if isinstance(value, dict) else value
        for name, value in found.items()
        if not any(name.strip("_").startswith(one) for one in _HOW_TO_RUN)
    }


def _weights_nbytes(folder: Path) -> int | None:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None


def _read_gguf(path: Path) -> tuple[Any, str, int]:
    if not path.is_file():
        raise ArgumentError(f"there is no file {str(path)!r}")
    try:
        import gguf  # noqa: F401 - transformers' own message does not say how to get it
    except ImportError as error:
        raise BackendError("a .gguf file needs the gguf package: pip install 'gpuarena[demo]'") from error
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        found = dict(load_gguf_checkpoint(str(path), return_tensors=False)["config"])
        config = AutoConfig.for_model(found.pop("model_type"), **found)
    except Exception as error:  # readers of files raise what they come across
        first_line = str(error).partition("\n")[0]
        raise ArgumentError(f"cannot read {str(path)!r}: {type(error).__name__}: {first_line}") from error
    return config, path.stem, path.stat().st_size
