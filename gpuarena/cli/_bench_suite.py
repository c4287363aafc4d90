"""``gpuarena bench all``, ``gpu`` and ``report``: everything, the checks of a GPU, and results as a document."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gpuarena._files import replacing
from gpuarena.bench._labels import failures
from gpuarena.cli._bench_run import (
    DeviceOption,
    FakeGpuOption,
    GpuOption,
    JsonOption,
    QuickOption,
    Target,
    device_named,
    working,
)
from gpuarena.cli._bench_tables import print_check, print_group, print_summary
from gpuarena.errors import ArgumentError

__all__ = ["bench_all", "bench_gpu", "bench_report"]

MarkdownOption = Annotated[
    Path | None, typer.Option("--markdown", help="Write the results to this file as a document; - prints it.")
]
BudgetOption = Annotated[
    float | None,
    typer.Option("--budget", min=0, help="Seconds for everything; what does not fit is left out and named."),
]


def bench_all(
    device: DeviceOption = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="On the GPU, and with the checks of bench gpu.")] = False,
    fake_gpu: FakeGpuOption = False,
    quick: QuickOption = False,
    only: Annotated[
        str | None, typer.Option(help="Benchmarks, separated by commas: gpu, decode, kv, alloc, ...")
    ] = None,
    budget: BudgetOption = None,
    json_path: JsonOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Run all benchmarks, one after another; one that fails leaves the others standing.

    The files hold what was measured so far from the first group on. The status is 1 if anything failed.
    """
    target = Target(json_path, markdown)
    names = None if only is None else [name.strip() for name in only.split(",")]
    from gpuarena.bench import suite

    try:
        suite.chosen(names, gpu=gpu or fake_gpu)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from None
    _run(names, device_named(device, gpu=gpu, fake_gpu=fake_gpu), gpu or fake_gpu, quick, budget, target)


def bench_gpu(
    device: DeviceOption = None,
    gpu: GpuOption = False,
    fake_gpu: FakeGpuOption = False,
    quick: QuickOption = False,
    budget: BudgetOption = None,
    json_path: JsonOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Check what only a GPU can show; bench --gpu is the same. The status is 1 if a check failed."""
    target = Target(json_path, markdown)
    where = device_named(device, gpu=gpu or not (device or fake_gpu), fake_gpu=fake_gpu)
    _run(["gpu"], where, True, quick, budget, target)


def _run(
    names: list[str] | None, device: Any, gpu: bool, quick: bool, budget: float | None, target: Target
) -> None:
    from gpuarena.bench import suite

    console = target.console
    results: dict[str, Any] = {}

    def keep(found: dict[str, Any]) -> None:
        results.update(found)
        target.keep(found)

    try:
        with working(console, "bench") as show:
            suite.run(
                names,
                device=device,
                gpu=gpu,
                quick=quick,
                budget_s=budget,
                on_start=lambda label: show(f"bench {label}"),
                on_group=lambda group: print_group(console, group),
                on_check=lambda check: print_check(console, check),
                on_result=keep,
            )
    except BaseException:
        if results:
            target.finish(results)
        raise
    print_summary(console, results)
    target.finish(results)
    if failures(results):
        raise typer.Exit(1)


def bench_report(
    results: Annotated[
        Path, typer.Argument(help="A file that bench ... --json wrote, or the GPU kit.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write it to this file instead of printing it.")
    ] = None,
) -> None:
    """Print results as one Markdown document: machine, versions, checks, tables, and what was not measured."""
    from gpuarena.bench.compare import load
    from gpuarena.bench.report import markdown

    text = markdown(load(results))
    if out is None or str(out) == "-":
        typer.echo(text, nl=False)
        return
    with replacing(out) as file:
        file.write(text)
    typer.echo(f"written to {out}")
