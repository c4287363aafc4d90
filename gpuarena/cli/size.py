"""The command ``gpuarena size``: what a model's cache takes, before there is a model."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gpuarena._units import grouped
from gpuarena.cli._output import megabytes, needs, plain_table, print_json, printable
from gpuarena.errors import ArgumentError
from gpuarena.kv import KVSpec

__all__ = ["DTYPES", "find_size", "size"]

#: Memory of common GPUs, in GB of 10**9 bytes.
_DEVICES_GB = (8, 16, 24, 80)
DTYPES = ("bfloat16", "float16", "float32")
#: Of a folder, so that a mistake in a path to a huge one is told at once.
_MOST_NAMES = 5000
#: What a kind of layer is, for people.
_KINDS = {
    "full": "full attention",
    "window": "window",
    "chunked": "chunks",
    "indexed": "full, with an index",
    "recurrent": "recurrent state",
    "hybrid": "attention and state",
    "shared": "reads another layer's",
    "empty": "no attention",
}


def _known_models() -> list[str]:
    """Return the names of the models that are built in, without what is slow: the package imports transformers."""
    package = importlib.util.find_spec("gpuarena_transformers")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        path = os.path.join(folder, "known_models.py")
        spec = importlib.util.spec_from_file_location("_gpuarena_known_models", path)
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return list(module.KNOWN_MODELS)
    return []


def complete_model(incomplete: str) -> list[str]:
    """Return the names that a shell may complete a model's to; of files it knows itself."""
    return [name for name in _known_models() if name.startswith(incomplete)]


def size(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder, config.json or .gguf file; or a name such as qwen2.5-1.5b.",
            autocompletion=complete_model,
        ),
    ],
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence. Default: the model's maximum.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows: sequences times beams.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of the model: bfloat16, float16 or float32.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Say what the KV cache of a model takes, and what context fits, without its weights."""
    console = Console()
    found = find_size(model, context=context, batch=batch, dtype=dtype)
    if as_json:
        print_json(found)
        return
    name, n_tokens, rows = found["model"], found["context"], found["batch"]
    console.print(f"[bold]{name}[/bold], {found['dtype']}, {found['source']}", highlight=False)
    console.print(_kinds_table(found))
    total = found["nbytes"] + found["scratch_nbytes"]
    parts = f"{grouped(found['bytes_per_token'])} bytes a token"
    if found["state_nbytes"]:
        parts += f", {grouped(found['state_nbytes'])} bytes a sequence whatever its length"
    console.print(parts, highlight=False)
    scratch = (
        f", of which {megabytes(found['scratch_nbytes'])} MB to move rows" if found["scratch_nbytes"] else ""
    )
    each = f"{grouped(n_tokens)} tokens x {rows} {'row' if rows == 1 else 'rows'}"
    console.print(f"{each}: {megabytes(total)} MB{scratch}", highlight=False)
    longest = found["max_length"]
    if longest is not None and n_tokens > longest:
        console.print(f"[yellow]the model was made for {grouped(longest)} tokens[/yellow]", highlight=False)
    console.print(_fits_table(found))
    console.print(
        "GB are 10**9 bytes. A prompt needs room besides: ArenaCache.for_model(model) measures how much.",
        style="dim",
        highlight=False,
    )


def find_size(source: str, *, context: int | None, batch: int, dtype: str) -> dict[str, Any]:
    """Return all figures, as they are written with ``--json``."""
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    _check_there(source)
    with needs("transformers", "size"):
        import torch
        import transformers
        from gpuarena_transformers.budget import most_tokens_in, reserved_nbytes
        from gpuarena_transformers.from_config import size_of_config
        from gpuarena_transformers.model_files import read_config
        from gpuarena_transformers.sizing import model_max_length
    transformers.logging.set_verbosity_error()  # of the config, of which only a part may be given
    config, name, stored_nbytes = read_config(source)
    sized = size_of_config(config, getattr(torch, dtype), name=name)
    layout, longest = sized.layout, model_max_length(config)
    n_tokens = context or longest or 4096

    specs = [spec for layer in layout.layers for spec in layer.per_token]
    kv = KVSpec(specs) if specs else None
    states = [state for layer in layout.layers for state in layer.states]
    nbytes = layout.nbytes(batch, n_tokens)

    def most(gigabytes: int, taken: int) -> int | None:
        return most_tokens_in(gigabytes * 10**9 - taken, kv, states, batch)

    return {
        "model": name,
        "source": layout.source,
        "dtype": dtype,
        "context": n_tokens,
        "batch": batch,
        "max_length": longest,
        "bytes_per_token": layout.bytes_per_token,
        "state_nbytes": layout.state_nbytes,
        "nbytes": nbytes,
        "scratch_nbytes": reserved_nbytes(kv, states, batch, n_tokens) - nbytes if batch > 1 else 0,
        "n_parameters": sized.n_parameters,
        "weights_nbytes": sized.weights_nbytes,
        "stored_nbytes": stored_nbytes,
        "layers": [_kind_figures(kind, layers, batch, n_tokens) for kind, layers in layout.of_kind().items()],
        "fits": [
            {
                "gigabytes": gigabytes,
                "without_weights": most(gigabytes, 0),
                "with_weights": most(gigabytes, sized.weights_nbytes),
            }
            for gigabytes in _DEVICES_GB
        ],
    }


def _check_there(source: str) -> None:
    """Raise `ArgumentError` with what may be meant if `source` is a path at which there is nothing."""
    path = Path(source)
    looks_like_a_path = path.suffix in (".json", ".gguf") or source.startswith((".", "~", "/", os.sep))
    try:
        path = path.expanduser()
        if path.exists() or not (looks_like_a_path or source.count("/") > 1):  # a name has one slash at most
            return
    except (OSError, RuntimeError, ValueError):  # it cannot even be looked at; whoever reads it says so
        return
    names = _known_models()
    message = f"there is no file or folder '{printable(source, 400)}'"
    folder = next(one for one in path.absolute().parents if one.is_dir())
    missing = path.absolute().relative_to(folder).parts[0]
    beside = _close(missing, _names_in(folder))
    if beside:
        message += f"; {printable(str(folder), 400)} has {', '.join(printable(name) for name in beside)}"
    elif folder != path.absolute().parent:
        message += f": {printable(str(folder), 400)} has no {printable(missing)}"
    named = _close(path.stem if path.suffix in (".json", ".gguf") else path.name, names)
    message += f"; close to a model that is built in: {', '.join(named)}" if named else ""
    if not beside and not named:
        message += f"; built in are {', '.join(names)}"
    raise ArgumentError(message)


def _close(name: str, names: Iterable[str]) -> list[str]:
    """Return the most similar names, without regard to case."""
    by_lower = {one.lower(): one for one in names}
    return [by_lower[one] for one in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)]


def _names_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry, _ in zip(entries, range(_MOST_NAMES), strict=False)]
    except OSError:  # it may not be listed
        return []


def _kind_figures(kind: str, layers: list[Any], batch: int, n_tokens: int) -> dict[str, Any]:
    per_token = sum(layer.bytes_per_token for layer in layers)
    state_nbytes = sum(layer.state_nbytes for layer in layers)
    specs = [layer.spec for layer in layers if layer.spec is not None]
    windows = sorted({spec.window for spec in specs if spec.window is not None})
    shapes = dict.fromkeys(
        f"{spec.kv_heads} x {spec.key_dim}"
        + ("" if spec.key_dim == spec.value_dim else f" | {spec.value_dim}")
        for spec in specs
    )
    visible = sum(
        layer.bytes_per_token * min(n_tokens, layer.spec.window or n_tokens)
        for layer in layers
        if layer.spec is not None
    )
    return {
        "kind": kind,
        "n_layers": len(layers),
        "heads_and_dims": list(shapes),
        "windows": windows,
        "bytes_per_token": per_token,
        "state_nbytes": state_nbytes,
        "nbytes": batch * (per_token * n_tokens + state_nbytes),
        "visible_nbytes": batch * (visible + state_nbytes),
    }


def _kinds_table(found: dict[str, Any]) -> Table:
    table = plain_table()
    table.add_column("layers", no_wrap=True)
    for title in ("", "heads x dim", "bytes a token", "MB"):
        table.add_column(title, justify="right", no_wrap=True)
    has_windows = any(one["windows"] for one in found["layers"])
    if has_windows:
        table.add_column("MB within windows", justify="right", no_wrap=True)
    for one in found["layers"]:
        windows = ", ".join(map(str, one["windows"]))
        cells = [
            _KINDS[one["kind"]] + (f" {windows}" if windows else ""),
            str(one["n_layers"]),
            ", ".join(one["heads_and_dims"]),
            grouped(one["bytes_per_token"]),
            megabytes(one["nbytes"]),
        ]
        table.add_row(*cells, *([megabytes(one["visible_nbytes"])] if has_windows else []))
    return table


def _fits_table(found: dict[str, Any]) -> Table:
    rows = found["batch"]
    table = plain_table(f"tokens that fit, {'one row' if rows == 1 else f'each of {rows} rows'}")
    table.title_justify = "left"
    table.add_column("memory", no_wrap=True)
    table.add_column("without weights", justify="right", no_wrap=True)
    weights = f"{found['weights_nbytes'] / 1e9:.2f} GB"
    table.add_column(f"beside {weights} of weights in {found['dtype']}", justify="right")
    for one in found["fits"]:
        table.add_row(
            f"{one['gigabytes']} GB", *(_tokens(one[key]) for key in ("without_weights", "with_weights"))
        )
    return table


def _tokens(n_tokens: int | None) -> str:
    if n_tokens is None:
        return "any number"
    return grouped(n_tokens) if n_tokens else "none"
