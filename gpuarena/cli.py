"""The command line: ``gpuarena demo``, ``gpuarena size`` and ``gpuarena bench``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from rich import box
    from rich.console import Console
    from rich.table import Table
except ImportError as error:  # pragma: no cover - the message is for an installation without the extra
    raise SystemExit(
        f"the gpuarena command needs its extra: pip install 'gpuarena[cli]' ({error})"
    ) from error

import gpuarena
from gpuarena._units import format_nbytes
from gpuarena.errors import ArenaError, DeviceMismatchError

if TYPE_CHECKING:
    from gpuarena.demo.run import Column, Report

app = typer.Typer(
    help="One device buffer, a bump pointer, exact rollback; and KV caches on it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure, side by side in one process.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run the command line; errors of this package end it with their message and status 1."""
    from gpuarena.demo.errors import WeightsError

    try:
        app()
    except (ArenaError, WeightsError) as error:
        console = Console(stderr=True)
        console.print("error: ", style="red", end="")
        console.print(str(error), markup=False, highlight=False)  # a message may hold brackets
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpuarena {gpuarena.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    question: Annotated[str, typer.Argument(help="What to ask first.")] = "What is the capital of France?",
    model: Annotated[
        str | None, typer.Option(help="Folder, .gguf file or hub id; 'random' for a tiny random model.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Default: the GPU if there is one, otherwise the CPU.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer, at most.")] = 48,
    context: Annotated[int | None, typer.Option(min=1, help="Capacity of the caches, in tokens.")] = None,
) -> None:
    """Let a real language model answer through the arena, next to the caches that transformers ships."""
    from gpuarena.demo import run as demo_run
    from gpuarena.demo.weights import load_model

    console = Console()
    where = _usable_device(device)
    loaded = load_model(model, device=where, dtype=dtype, console=console)
    console.print(f"[dim]{loaded.name} on {where} in {dtype}, loaded in {loaded.load_seconds:.1f} s[/dim]")
    report = demo_run.run(
        loaded,
        question,
        max_new_tokens=max_new_tokens,
        context=context,
        say=lambda text: console.print(f"[bold cyan]>[/bold cyan] {text}", highlight=False),
        streamer=_streamer(loaded.tokenizer, console),
    )
    console.print(_demo_table(report))
    for line in _demo_notes(report):
        console.print(line, highlight=False)


@app.command("size")
def size_command(
    model: Annotated[
        str, typer.Argument(help="Folder, config.json or .gguf file; or a name such as qwen2.5-1.5b.")
    ],
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence. Default: the model's maximum.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows: sequences times beams.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of the model: bfloat16, float16 or float32.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Say what the KV cache of a model takes, and what context fits, without its weights."""
    from gpuarena._cli_size import size

    size(model, context=context, batch=batch, dtype=dtype, as_json=as_json, console=Console())


def _usable_device(device: str | None) -> str:
    """Return the device asked for, or the GPU if there is one; raise if torch cannot use it."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch has no type of its own for this
        first_line = str(error).splitlines()[0]
        raise DeviceMismatchError(
            f"torch cannot use device {device!r}: {first_line}", device=device
        ) from error
    return device


def _streamer(tokenizer: Any, console: Console) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):  # type: ignore[misc]  # transformers is untyped
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            console.print(text, end="\n" if stream_end else "", markup=False, highlight=False)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _demo_table(report: Report) -> Table:
    arena, dynamic, static = report.columns
    table = Table(
        title=f"{report.model}, {report.device}, {report.dtype}, capacity {report.context} tokens",
        caption=f"attention: {arena.attention} in ArenaCache, {dynamic.attention} in the others; "
        f"gain of ArenaCache over DynamicCache / StaticCache, side by side in this run",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for column in report.columns:
        table.add_column(column.name, justify="right", no_wrap=True)
    table.add_column("gain", justify="right", no_wrap=True)

    for n_tokens, at in ((report.n_short, "short_tokens_per_s"), (report.n_long, "long_tokens_per_s")):
        speeds = [getattr(column, at) for column in report.columns]
        gains = " / ".join(f"{speeds[0] / speed:.2f}x" for speed in speeds[1:])
        table.add_row(f"tokens/s at {n_tokens} held", *(f"{speed:.1f}" for speed in speeds), gains)
    firsts = [column.first_token_s for column in report.columns]
    table.add_row("next answer's token, s", "rollback", "read again", "read again")
    table.add_row(
        f"  {report.n_prefix} tokens shared",
        *(f"{first:.3f}" for first in firsts),
        " / ".join(f"{first / firsts[0]:.1f}x" for first in firsts[1:]),
    )
    deepcopy_s = report.deepcopy_first_token_s
    table.add_row("  by deepcopy", "", f"{deepcopy_s:.3f}", "", f"{deepcopy_s / firsts[0]:.2f}x")
    table.add_row("K/V reserved, MB", *(_megabytes(c.reserved_nbytes) for c in report.columns))
    table.add_row(
        "  in use", *("all, masked" if c is static else _megabytes(c.used_nbytes) for c in report.columns)
    )
    table.add_row("  peak in a step", *(_megabytes(c.peak_nbytes) for c in report.columns))
    table.add_row("allocated a token, bytes", *(f"{c.allocated_nbytes_per_token:,}" for c in report.columns))
    table.add_row("logits differ by", *(_difference(c, dynamic) for c in report.columns))
    return table


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f}"


def _difference(column: Column, reference: Column) -> str:
    if column is reference:
        return "reference"
    diverging = "" if column.diverging_token is None else f"\ntoken {column.diverging_token} differs"
    return f"{column.logits_difference:.1e}{diverging}"


def _demo_notes(report: Report) -> list[str]:
    arena, dynamic, _ = report.columns
    return [
        f"A token takes {format_nbytes(report.bytes_per_token)} of cache; the high-water mark was "
        f"{report.high_water_tokens} of {report.context} tokens.",
        f"Going back to the shared text took {report.rollback_s * 1e6:.0f} us by rollback and "
        f"{report.deepcopy_s * 1e3:.1f} ms by deepcopy.",
        f"With the same attention DynamicCache makes {report.dynamic_same_attention_tokens_per_s:.1f} tokens/s at "
        f"{report.n_long} tokens, and ArenaCache {arena.long_tokens_per_s:.1f}: the rest of the distance to "
        f"{dynamic.long_tokens_per_s:.1f} is the attention's.",
    ]


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
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Time one decoding step with each cache and attention, at several context lengths."""
    from gpuarena.bench import decode

    console = Console()
    parsed = _integers(lengths, "--lengths")
    result = decode.run(
        device=_usable_device(device),
        dtype=dtype,
        lengths=[32, 64] if quick else parsed,
        layers=layers,
        rounds=min(rounds, 3) if quick else rounds,
        tiny=quick,
        on_length=lambda one: console.print(_decode_table(one, dtype)),
    )
    _write_json(console, json_path, result)


@bench_app.command("alloc")
def bench_alloc(
    device: Annotated[
        str | None, typer.Option(help="Default: the GPU if there is one, otherwise the CPU.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 21,
    quick: Annotated[bool, typer.Option(help="Few samples, to see that it runs.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Time allocation, rollback and frames against torch.empty, numpy.empty and slicing by hand."""
    from gpuarena.bench import alloc

    console = Console()
    result = alloc.run(
        device=_usable_device(device),
        rounds=rounds,
        quick=quick,
        on_group=lambda group: console.print(_alloc_table(group)),
    )
    _write_json(console, json_path, result)


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
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Time appends, reordering, kept prompts and reads of KV caches against torch.cat and transformers' caches."""
    from gpuarena.bench import kv

    console = Console()
    result = kv.run(
        device=_usable_device(device),
        dtype=dtype,
        layers=layers,
        rounds=rounds,
        cat_limit=cat_limit,
        quick=quick,
        on_group=lambda group: console.print(_alloc_table(group)),
    )
    _write_json(console, json_path, result)


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
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the steps into this .png or .svg file.")] = None,
) -> None:
    """Time steps, whole answers and prompts that are used again, with each cache; count what they allocate."""
    from gpuarena.bench import generate

    console = Console()
    result = generate.run(
        model=model,
        device=_usable_device(device),
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
    _write_json(console, json_path, result)
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
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Time attn_implementation="gpuarena" against transformers' own attention, by queries, tokens and mask."""
    from gpuarena.bench import attention

    console = Console()
    numbers = {}
    for name, text in (("batches", batches), ("lengths", lengths), ("queries", queries)):
        try:
            numbers[name] = [int(number) for number in text.split(",")]
        except ValueError:
            raise typer.BadParameter(f"{text!r} is no list of integers", param_hint=f"--{name}") from None
    result = attention.run(
        device=_usable_device(device),
        dtype=dtype,
        **numbers,
        rounds=rounds,
        quick=quick,
        on_group=lambda group: console.print(_alloc_table(group)),
    )
    _write_json(console, json_path, result)


def _write_json(console: Console, path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"written to {path}", highlight=False, soft_wrap=True)


#: What rows may hold besides times: the heading, and how a figure reads.
_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "write_amplification": ("x written", "{:.2f}".format),
    "peak_nbytes": ("peak, MB", lambda nbytes: f"{nbytes / 1e6:.1f}"),
    "allocated_nbytes": ("allocated, B", "{:.0f}".format),
    "bytes_per_token": ("B/token", "{:.0f}".format),
}


def _alloc_table(group: dict[str, Any]) -> Table:
    title = group["title"]
    if "on_top_of_numpy_s" in group:
        title += f", {group['on_top_of_numpy_s'] * 1e3:.0f} ms on top of NumPy"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
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


def _decode_table(result: dict[str, Any], dtype: str) -> Table:
    table = Table(
        title=f"one decoding step, {result['n_tokens']} tokens held, {dtype}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("cache, attention", no_wrap=True)
    for title in ("median, ms", "quartiles", "x ours", "off by, std"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, figures in result["variants"].items():
        low, high = figures["quartiles_s"]
        table.add_row(
            name,
            f"{figures['median_s'] * 1e3:.2f}",
            f"{low * 1e3:.2f} - {high * 1e3:.2f}",
            f"{figures['ratio_to_ours']:.2f}",
            f"{result['logits_difference'][name]:.1e}",
        )
    return table


if __name__ == "__main__":
    main()
