"""``gpuarena bench``: measurements side by side in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gpuarena._files import check_replaceable
from gpuarena.cli._output import console_beside, megabytes, needs, plain_table, usable_device, write_json
from gpuarena.cli.compare import bench_compare

__all__ = ["bench_app"]

_JSON_HELP = "Write the figures to this file; - prints them, and the tables go to standard error."

bench_app = typer.Typer(help="Measure, side by side in one process.", no_args_is_help=True)
bench_app.command("compare")(bench_compare)


@bench_app.command("decode")
def bench_decode(
    device: Annotated[
        str | None, typer.Option(help="Default: the GPU if there is one, otherwise the CPU.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16.")] = "bfloat16",
    lengths: Annotated[str, typer.Option(help="Tokens held, separated by commas.")] = "512,4096,16384",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each variant.")] = 9,
    quick: Annotated[
        bool, typer.Option(help="A tiny model and short contexts, to see that it runs.")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help=_JSON_HELP)] = None,
) -> None:
    """Time one decoding step with each cache and attention, at several context lengths."""
    console = console_beside(json_path)
    with needs("transformers", "bench decode"):
        from gpuarena.bench import decode
    parsed = _integers(lengths, "--lengths")
    result = decode.run(
        device=usable_device(device),
        dtype=dtype,
        lengths=[32, 64] if quick else parsed,
        layers=layers,
        rounds=min(rounds, 3) if quick else rounds,
        quick=quick,
        on_group=lambda group: console.print(_alloc_table(group)),
    )
    write_json(json_path, result, console)


@bench_app.command("alloc")
def bench_alloc(
    device: Annotated[
        str | None, typer.Option(help="Default: the GPU if there is one, otherwise the CPU.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 21,
    quick: Annotated[bool, typer.Option(help="Few samples, to see that it runs.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help=_JSON_HELP)] = None,
) -> None:
    """Time allocation, rollback and frames against torch.empty, numpy.empty and slicing by hand."""
    console = console_beside(json_path)
    with needs("torch", "bench alloc"):
        from gpuarena.bench import alloc
    result = alloc.run(
        device=usable_device(device),
        rounds=rounds,
        quick=quick,
        on_group=lambda group: console.print(_alloc_table(group)),
    )
    write_json(json_path, result, console)


@bench_app.command("kv")
def bench_kv(
    device: Annotated[
        str | None, typer.Option(help="Default: the GPU if there is one, otherwise the CPU.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the caches.")] = 28,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 9,
    cat_limit: Annotated[
        int, typer.Option(min=0, help="Tokens of the longest loop of torch.cat; 8192 takes minutes.")
    ] = 2048,
    quick: Annotated[bool, typer.Option(help="Two layers, short contexts, to see that it runs.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help=_JSON_HELP)] = None,
) -> None:
    """Time appends, reordering, kept prompts and reads of KV caches against torch.cat and transformers' caches."""
    console = console_beside(json_path)
    with needs("transformers", "bench kv"):
        from gpuarena.bench import kv
    result = kv.run(
        device=usable_device(device),
        dtype=dtype,
        layers=layers,
        rounds=rounds,
        cat_limit=cat_limit,
        quick=quick,
        on_group=lambda group: console.print(_alloc_table(group)),
    )
    write_json(json_path, result, console)


@bench_app.command("generate")
def bench_generate(
    model: Annotated[
        str,
        typer.Option(help="qwen2.5-1.5b (its geometry, random weights), smollm2, a folder or .gguf file."),
    ] = "qwen2.5-1.5b",
    device: Annotated[
        str | None, typer.Option(help="Default: the GPU if there is one, otherwise the CPU.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16.")] = "bfloat16",
    lengths: Annotated[str, typer.Option(help="Tokens held, separated by commas.")] = "512,4096,16384",
    batches: Annotated[str, typer.Option(help="Rows, separated by commas.")] = "1,4",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random model.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that whole calls make.")] = 32,
    whole_limit: Annotated[int, typer.Option(min=0, help="Longest prompt of whole calls, in tokens.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 7,
    quick: Annotated[bool, typer.Option(help="A tiny model and short prompts, to see that it runs.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help=_JSON_HELP)] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the steps into this .png or .svg file.")] = None,
) -> None:
    """Time steps, whole answers and prompts that are used again, with each cache; count what they allocate."""
    console = console_beside(json_path)
    if plot is not None:
        check_replaceable(plot)
        with needs("plot", "bench generate --plot"):
            import matplotlib  # noqa: F401
    with needs("transformers", "bench generate"):
        from gpuarena.bench import generate
    result = generate.run(
        model=model,
        device=usable_device(device),
        dtype=dtype,
        lengths=_integers(lengths, "--lengths"),
        batches=_integers(batches, "--batches"),
        layers=layers,
        new_tokens=new_tokens,
        whole_limit=whole_limit,
        rounds=rounds,
        quick=quick,
        on_group=lambda group: console.print(_alloc_table(group)),
    )
    write_json(json_path, result, console)
    if plot is not None:
        from gpuarena.bench.plot import plot_steps

        plot_steps(result, plot)
        console.print(f"drawn in {plot}", highlight=False, soft_wrap=True)


def _integers(text: str, option: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of integers", param_hint=option) from None


@bench_app.command("attention")
def bench_attention(
    device: Annotated[
        str | None, typer.Option(help="Default: the GPU if there is one, otherwise the CPU.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    batches: Annotated[str, typer.Option(help="Rows, separated by commas.")] = "1,4",
    lengths: Annotated[str, typer.Option(help="Tokens held, separated by commas.")] = "512,4096,16384",
    queries: Annotated[
        str, typer.Option(help="Query tokens of a call, separated by commas.")
    ] = "1,2,4,8,16,32,64,128",
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 7,
    quick: Annotated[bool, typer.Option(help="A few small shapes, to see that it runs.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help=_JSON_HELP)] = None,
) -> None:
    """Time attn_implementation="gpuarena" against transformers' own attention, by queries, tokens and mask."""
    console = console_beside(json_path)
    with needs("transformers", "bench attention"):
        from gpuarena.bench import attention
    result = attention.run(
        device=usable_device(device),
        dtype=dtype,
        batches=_integers(batches, "--batches"),
        lengths=_integers(lengths, "--lengths"),
        queries=_integers(queries, "--queries"),
        rounds=rounds,
        quick=quick,
        on_group=lambda group: console.print(_alloc_table(group)),
    )
    write_json(json_path, result, console)


#: What rows may hold besides times: the heading, and how a figure reads.
_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "write_amplification": ("x written", "{:.2f}".format),
    "peak_nbytes": ("peak, MB", megabytes),
    "allocated_nbytes": ("allocated, B", "{:.0f}".format),
    "bytes_per_token": ("B/token", "{:.0f}".format),
    "logits_difference": ("off by, std", "{:.1e}".format),
}


def _alloc_table(group: dict[str, Any]) -> Table:
    table = plain_table(group["title"])
    table.add_column("", overflow="fold")
    if group["reference"] is None:
        table.add_column("bytes", justify="right")
        for name, row in group["rows"].items():
            table.add_row(name, f"{row['nbytes']:.0f}")
        return table
    figures = [key for key in _FIGURES if any(key in row for row in group["rows"].values())]
    for column in ("median, us", "quartiles", "ratio", *(_FIGURES[key][0] for key in figures)):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in group["rows"].items():
        low, high = row["quartiles_s"]
        table.add_row(
            name,
            _microseconds(row["median_s"]),
            f"{_microseconds(low)} - {_microseconds(high)}",
            f"{row['ratio']:.2f}",
            *(_FIGURES[key][1](row[key]) if key in row else "" for key in figures),
        )
    return table


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"
