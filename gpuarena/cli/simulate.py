"""The command ``gpuarena simulate``: what a memory serves of a trace of requests, under one policy or all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from gpuarena._units import parse_nbytes
from gpuarena.cli._output import print_json, print_line, printable
from gpuarena.cli._simulate_arguments import (
    DTYPES,
    LOCAL,
    POLICIES,
    BytesPerTokenOption,
    LimitOption,
    MemoryOption,
    ModelOption,
    check_capacity,
    check_files,
    check_lengths,
    check_local,
    check_memory,
    check_share,
    check_sources,
    policies_of,
    requests_of,
    result_figures,
    room_for_users,
    size_of,
    trace_figures,
    usage,
)

if TYPE_CHECKING:
    from gpuarena.simulate import RequestTrace, Result

__all__ = ["EXAMPLES", "simulate"]

EXAMPLES = """Examples:

gpuarena simulate --synthetic --capacity 65536

gpuarena simulate log.csv --memory 2GiB --model qwen2.5-1.5b --html out.html

gpuarena simulate log.csv --policy local --users 4 --model qwen2.5-1.5b

gpuarena simulate log.jsonl.gz --capacity 1000000 --policy paged --share --json
"""

_FITS = ("first", "best")
#: Points of a curve over time; more than a picture has room for.
_N_SAMPLES = 400
_CHUNK = 256  # tokens by which `grow` grows, as of `run`

_MEMORY, _SERVING, _OUTPUT = "Memory", "Serving", "Output"


def simulate(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="Requests: CSV with arrival_s,prompt,output or prompt,output, or of Azure's; JSON lines of "
            "Mooncake's; also .gz.",
            show_default=False,
        ),
    ] = None,
    synthetic: Annotated[
        bool,
        typer.Option(
            "--synthetic", help="Requests drawn at random, with the moments of Azure's conversations."
        ),
    ] = False,
    limit: LimitOption = None,
    arrivals: Annotated[
        float | None,
        typer.Option(help="Synthetic requests a second, in the mean. Default: 5.53.", show_default=False),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of synthetic requests. Default: 0.", show_default=False)
    ] = None,
    memory: MemoryOption = None,
    model: ModelOption = None,
    dtype: Annotated[
        str,
        typer.Option(help="Of the model's cache: bfloat16, float16 or float32.", rich_help_panel=_MEMORY),
    ] = "bfloat16",
    bytes_per_token: BytesPerTokenOption = None,
    capacity: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens, in place of bytes of memory.", rich_help_panel=_MEMORY, show_default=False
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(POLICIES)}, linear; again for more; or all; or local.",
            rich_help_panel=_SERVING,
            show_default="all",
        ),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of linear, each with a region of the maximal length; adds it to all. Of local 1 by default.",
            rich_help_panel=_SERVING,
            show_default=False,
        ),
    ] = None,
    max_length: Annotated[
        int,
        typer.Option(
            min=2,
            help="Tokens of prompt and answer; longer requests are left out.",
            rich_help_panel=_SERVING,
        ),
    ] = 8192,
    rate: Annotated[
        int,
        typer.Option(min=1, help="Tokens a second of each request that runs.", rich_help_panel=_SERVING),
    ] = 20,
    page_size: Annotated[
        int, typer.Option(min=1, help="Tokens of a page, of paged.", rich_help_panel=_SERVING)
    ] = 16,
    fit: Annotated[
        str,
        typer.Option(help="Which hole is taken: first or best, of exact and grow.", rich_help_panel=_SERVING),
    ] = "first",
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens by which grow grows. Default: 256; 1 of local.",
            rich_help_panel=_SERVING,
            show_default=False,
        ),
    ] = None,
    reject: Annotated[
        bool,
        typer.Option(
            "--reject",
            help="Turn away what does not fit at once, instead of letting it wait.",
            rich_help_panel=_SERVING,
        ),
    ] = False,
    share: Annotated[
        bool,
        typer.Option(
            "--share", help="Let paged share prefixes that a trace has hashes of.", rich_help_panel=_SERVING
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the figures as JSON, and nothing else.", rich_help_panel=_OUTPUT),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the slots over time, and who fails, into this .png, .svg or .pdf.",
            rich_help_panel=_OUTPUT,
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a page of it all into this .html.", rich_help_panel=_OUTPUT, show_default=False
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="No text and no progress, only --json and files.", rich_help_panel=_OUTPUT
        ),
    ] = False,
) -> None:
    """Say what a memory serves of a trace of requests: what is used, what is wasted, who waits or fails, and why.

    The memory is slots, each for one token. A policy is how a request gets its slots:

    max: one piece, as long as any request may get (--max-length)
    exact: one piece, as long as this one will get, which nobody knows
    buddy_max, buddy_exact: the same as a block of a power of two
    buddy_pow2: such a block, with the output rounded up to one before
    grow: one piece for what there is, copied to a longer one when full
    paged: pages for what there is
    linear: an arena with a region of --max-length for each of --users

    local compares linear, grow and paged for the same --users, who each send a request when the last one is answered.
    By default there is memory for all that they need, and grow grows by one token, as torch.cat does.
    """
    check_sources(trace, synthetic, {"--arrivals": arrivals, "--seed": seed})
    local = "local" in (policy or ())
    if local:
        check_local(policy or [], reject, share)
        policy, users = list(LOCAL), users or 1
    check_memory(memory, capacity, model, bytes_per_token, local=local)
    chunk = chunk or (1 if local else _CHUNK)
    nbytes = None if memory is None else usage("--memory", parse_nbytes, memory, what="memory")
    policies = policies_of(policy or ["all"], users)
    for option, value, known in (("--fit", fit, _FITS), ("--dtype", dtype, DTYPES)):
        if value not in known:
            raise typer.BadParameter(f"{value!r} is none of {', '.join(known)}", param_hint=option)
    check_files(plot, html)

    requests = requests_of(trace, limit, arrivals, seed)
    check_lengths(requests, max_length)
    if share:
        check_share(policies, requests, page_size)
    sized = None if model is None else size_of(model, dtype)
    if sized is not None:
        bytes_per_token = sized["bytes_per_token"]
    if nbytes is not None:
        assert bytes_per_token is not None, "memory was given with what a token takes"
        capacity = nbytes // bytes_per_token
    is_enough = capacity is None
    if capacity is None and local and users:
        capacity = room_for_users(users, max_length, chunk, page_size)
    assert capacity is not None, "one of the two was given"
    sizes = {"max_length": max_length, "page_size": page_size, "fit": fit, "chunk": chunk}
    check_capacity(policies, capacity, bytes_per_token, nbytes, sizes)

    text = Console(stderr=as_json, quiet=quiet)
    from gpuarena.cli import _simulate_tables as tables

    heading = list(
        tables.heading(requests, capacity, bytes_per_token, sized, max_length, is_enough=is_enough)
    )
    for line in heading:
        print_line(text, line)
    results = _run_all(
        requests,
        policies,
        quiet=quiet,
        capacity=capacity,
        rate=rate,
        reject=reject,
        share=share,
        users=users if local else None,
        n_samples=_N_SAMPLES,
        **sizes,
    )

    from gpuarena.simulate.words import describe_results, explain_results

    explanation = explain_results(results, bytes_per_token=bytes_per_token)
    if as_json:
        print_json(
            {
                "trace": trace_figures(requests),
                "model": sized and sized["model"],
                "dtype": sized and sized["dtype"],
                "bytes_per_token": bytes_per_token,
                "memory_nbytes": nbytes,
                "capacity": capacity,
                "results": {name: result_figures(one) for name, one in results.items()},
                "explanation": explanation,
            }
        )
    else:
        tables.print_tables(text, results)
        tables.print_paragraphs(text, explanation)
    if plot is not None:
        from gpuarena.simulate.plot import plot_results

        plot_results(results, plot, bytes_per_token=bytes_per_token)
        print_line(text, f"drawn in {printable(str(plot), 400)}")
    if html is not None:
        from gpuarena.simulate.page import write_page

        words = describe_results(results, bytes_per_token=bytes_per_token)
        write_page(results, html, title=heading[0], words=words, bytes_per_token=bytes_per_token)
        print_line(text, f"written to {printable(str(html), 400)}")


def _run_all(
    requests: RequestTrace, policies: list[str], *, quiet: bool, **settings: Any
) -> dict[str, Result]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from gpuarena.simulate.engine import run

    console = Console(stderr=True)
    results = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=1)
        for number, policy in enumerate(policies, start=1):
            bar.reset(task, total=1, description=f"{policy} ({number} of {len(policies)})")

            def show(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            share = settings["share"] and policy == "paged"
            results[policy] = run(requests, policy, progress=show, **(settings | {"share": share}))
    return results
