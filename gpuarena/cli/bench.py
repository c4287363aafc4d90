"""``gpuarena bench``: measurements side by side in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gpuarena._files import check_replaceable
from gpuarena.cli._bench_run import (
    CompiledOption,
    DeviceOption,
    FakeGpuOption,
    GpuOption,
    JsonOption,
    QuickOption,
    Target,
    device_named,
    measure,
)
from gpuarena.cli._bench_suite import bench_all, bench_gpu, bench_report
from gpuarena.cli._output import examples, needs
from gpuarena.cli.compare import bench_compare

__all__ = ["bench_app"]

_OF_A_GPU = ("--gpu", "--fake-gpu")


class _Bench(TyperGroup):
    """The group of ``bench``: before a command --gpu and --fake-gpu are its own, without one they are ``bench gpu``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command before the options of a GPU."""
        if args and args[0] in _OF_A_GPU:
            if len(args) > 1 and args[1] in self.commands:
                args = [args[1], args[0], *args[2:]]
            else:
                args = ["gpu", *args]
        return super().parse_args(ctx, args)


bench_app = typer.Typer(
    help="Measure, side by side in one process. gpuarena bench --gpu checks what only a GPU can show.",
    no_args_is_help=True,
    cls=_Bench,
)
bench_app.command("all")(bench_all)
bench_app.command("gpu")(bench_gpu)


@bench_app.command("decode")
def bench_decode(
    device: DeviceOption = None,
    gpu: GpuOption = False,
    fake_gpu: FakeGpuOption = False,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16.")] = "bfloat16",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens held, separated by commas. Default: 512,4096,16384; on a GPU 512,8192,32768."
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the model. Default: 4; on a GPU 28.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Samples of each variant. Default: 9; on a GPU 15.")
    ] = None,
    compiled: CompiledOption = False,
    quick: QuickOption = False,
    json_path: JsonOption = None,
) -> None:
    """Time one decoding step with each cache and attention, at several context lengths."""
    target = Target(json_path)
    with needs("transformers", "bench decode"):
        from gpuarena.bench import decode
    measure(
        "decode",
        decode.run,
        device_named(device, gpu=gpu, fake_gpu=fake_gpu),
        target,
        dtype=dtype,
        lengths=None if lengths is None else _integers(lengths, "--lengths"),
        layers=layers,
        rounds=rounds,
        compiled=compiled,
        quick=quick,
    )


@bench_app.command("alloc")
def bench_alloc(
    device: DeviceOption = None,
    gpu: GpuOption = False,
    fake_gpu: FakeGpuOption = False,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 21,
    quick: QuickOption = False,
    json_path: JsonOption = None,
) -> None:
    """Time allocation, rollback and frames against torch.empty, numpy.empty and slicing by hand."""
    target = Target(json_path)
    with needs("torch", "bench alloc"):
        from gpuarena.bench import alloc
    measure(
        "alloc",
        alloc.run,
        device_named(device, gpu=gpu, fake_gpu=fake_gpu),
        target,
        rounds=rounds,
        quick=quick,
    )


@bench_app.command("kv")
def bench_kv(
    device: DeviceOption = None,
    gpu: GpuOption = False,
    fake_gpu: FakeGpuOption = False,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the caches.")] = 28,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 9,
    cat_limit: Annotated[
        int, typer.Option(min=0, help="Tokens of the longest loop of torch.cat; 8192 takes minutes.")
    ] = 2048,
    quick: QuickOption = False,
    json_path: JsonOption = None,
) -> None:
    """Time appends, reordering, kept prompts and reads of KV caches against torch.cat and transformers' caches."""
    target = Target(json_path)
    with needs("transformers", "bench kv"):
        from gpuarena.bench import kv
    measure(
        "kv",
        kv.run,
        device_named(device, gpu=gpu, fake_gpu=fake_gpu),
        target,
        dtype=dtype,
        layers=layers,
        rounds=rounds,
        cat_limit=cat_limit,
        quick=quick,
    )


@bench_app.command("generate")
def bench_generate(
    model: Annotated[
        str,
        typer.Option(help="qwen2.5-1.5b (its geometry, random weights), smollm2, a folder or .gguf file."),
    ] = "qwen2.5-1.5b",
    device: DeviceOption = None,
    gpu: GpuOption = False,
    fake_gpu: FakeGpuOption = False,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16.")] = "bfloat16",
    lengths: Annotated[str, typer.Option(help="Tokens held, separated by commas.")] = "512,4096,16384",
    batches: Annotated[str, typer.Option(help="Rows, separated by commas.")] = "1,4",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random model.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that whole calls make.")] = 32,
    whole_limit: Annotated[int, typer.Option(min=0, help="Longest prompt of whole calls, in tokens.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 7,
    compiled: CompiledOption = False,
    quick: QuickOption = False,
    json_path: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the steps into this .png or .svg file.")] = None,
) -> None:
    """Time steps, whole answers and prompts that are used again, with each cache; count what they allocate."""
    target = Target(json_path)
    if plot is not None:
        check_replaceable(plot)
        with needs("plot", "bench generate --plot"):
            import matplotlib  # noqa: F401
    with needs("transformers", "bench generate"):
        from gpuarena.bench import generate
    result = measure(
        "generate",
        generate.run,
        device_named(device, gpu=gpu, fake_gpu=fake_gpu),
        target,
        model=model,
        dtype=dtype,
        lengths=_integers(lengths, "--lengths"),
        batches=_integers(batches, "--batches"),
        layers=layers,
        new_tokens=new_tokens,
        whole_limit=whole_limit,
        rounds=rounds,
        compiled=compiled,
        quick=quick,
    )
    if plot is not None:
        from gpuarena.bench.plot import plot_steps

        plot_steps(result, plot)
        target.console.print(f"drawn in {plot}", highlight=False, soft_wrap=True)


def _integers(text: str, option: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of integers", param_hint=option) from None


@bench_app.command("attention")
def bench_attention(
    device: DeviceOption = None,
    gpu: GpuOption = False,
    fake_gpu: FakeGpuOption = False,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    batches: Annotated[str, typer.Option(help="Rows, separated by commas.")] = "1,4",
    lengths: Annotated[str, typer.Option(help="Tokens held, separated by commas.")] = "512,4096,16384",
    queries: Annotated[
        str, typer.Option(help="Query tokens of a call, separated by commas.")
    ] = "1,2,4,8,16,32,64,128",
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 7,
    quick: QuickOption = False,
    json_path: JsonOption = None,
) -> None:
    """Time attn_implementation="gpuarena" against transformers' own attention, by queries, tokens and mask."""
    target = Target(json_path)
    with needs("transformers", "bench attention"):
        from gpuarena.bench import attention
    measure(
        "attention",
        attention.run,
        device_named(device, gpu=gpu, fake_gpu=fake_gpu),
        target,
        dtype=dtype,
        batches=_integers(batches, "--batches"),
        lengths=_integers(lengths, "--lengths"),
        queries=_integers(queries, "--queries"),
        rounds=rounds,
        quick=quick,
    )


bench_app.command("report", epilog=examples("gpuarena bench report figures.json --out figures.md"))(
    bench_report
)
bench_app.command("compare")(bench_compare)
