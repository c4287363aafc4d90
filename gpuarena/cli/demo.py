"""``gpuarena demo``: a language model answers through the arena."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gpuarena._units import format_nbytes
from gpuarena.cli._output import megabytes, needs, plain_table, print_json, usable_device

if TYPE_CHECKING:
    from gpuarena.demo.run import Column, Report

__all__ = ["demo"]


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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON; the answers go to standard error.")
    ] = False,
) -> None:
    """Let a real language model answer through the arena, next to the caches that transformers ships.

    The first run downloads a small model, once; `--model random` needs none.
    """
    with needs("demo", "demo"):
        from gpuarena.demo import run as demo_run
        from gpuarena.demo.weights import load_model

    console = Console(stderr=as_json)
    where = usable_device(device)
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
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    console.print(_demo_table(report))
    for line in _demo_notes(report):
        console.print(line, highlight=False)


def _streamer(tokenizer: Any, console: Console) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):  # type: ignore[misc]  # transformers is untyped
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            console.print(text, end="\n" if stream_end else "", markup=False, highlight=False)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _demo_table(report: Report) -> Table:
    arena, dynamic, static = report.columns
    table = plain_table(
        f"{report.model}, {report.device}, {report.dtype}, capacity {report.context} tokens",
        caption=f"attention: {arena.attention} in ArenaCache, {dynamic.attention} in the others; "
        f"gain of ArenaCache over DynamicCache / StaticCache, side by side in this run",
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
    table.add_row("K/V reserved, MB", *(megabytes(c.reserved_nbytes) for c in report.columns))
    table.add_row(
        "  in use", *("all, masked" if c is static else megabytes(c.used_nbytes) for c in report.columns)
    )
    table.add_row("  peak in a step", *(megabytes(c.peak_nbytes) for c in report.columns))
    table.add_row("allocated a token, bytes", *(f"{c.allocated_nbytes_per_token:,}" for c in report.columns))
    table.add_row("logits differ by", *(_difference(c, dynamic) for c in report.columns))
    return table


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
