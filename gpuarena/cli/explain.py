"""The command ``gpuarena explain``: why a request is refused while much of the memory is free, and what would help."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from gpuarena._units import parse_nbytes
from gpuarena.cli._output import print_json, progress
from gpuarena.cli._simulate_arguments import (
    BytesPerTokenOption,
    LimitOption,
    MemoryOption,
    ModelOption,
    check_capacity,
    check_lengths,
    check_memory,
    check_sources,
    requests_of,
    result_figures,
    size_of,
    trace_figures,
    usage,
)

if TYPE_CHECKING:
    from gpuarena.simulate import RequestTrace, Result

__all__ = ["EXAMPLES", "explain"]

EXAMPLES = """Examples:

gpuarena explain

gpuarena explain log.csv --memory 2GiB --model qwen2.5-1.5b

gpuarena explain log.csv --capacity 65536 --policy buddy_exact
"""

#: Whose pieces lie in one row, so that holes arise between them.
_POLICIES = ("exact", "grow", "max", "buddy_exact", "buddy_pow2", "buddy_max")
#: The capacity is taken for so many long requests where none is given.
_LONG_REQUESTS = 8
#: What holds no request's tokens at a step is known at these only; enough to find a peak.
_N_SAMPLES = 400
_CHUNK = 256  # tokens by which `grow` grows, as of `run`
#: Parts of the peak that are tried as a capacity when nothing failed by fragmentation.
_SMALLER = (1.0, 0.75, 0.5, 0.25)


def explain(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="Requests, as for gpuarena simulate. Default: some drawn at random.", show_default=False
        ),
    ] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Draw requests at random, as without TRACE.")
    ] = False,
    limit: LimitOption = None,
    memory: MemoryOption = None,
    model: ModelOption = None,
    bytes_per_token: BytesPerTokenOption = None,
    capacity: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Tokens, in place of bytes of memory. Default: room for about {_LONG_REQUESTS} long requests.",
            rich_help_panel="Memory",
            show_default=False,
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of prompt and answer; longer requests are left out. Default: the longest that fits.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(help=f"How a request gets its one piece: {', '.join(_POLICIES)}.")
    ] = "exact",
    page_size: Annotated[int, typer.Option(min=1, help="Tokens of a page, to compare with.")] = 16,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")
    ] = False,
) -> None:
    """Show why long requests are refused while much of the memory is free, and what pages do with the same requests.

    Each request gets one contiguous piece of the memory, or, in the comparison, pages wherever they are free.
    The screen shows the slots, each for one token, when a request did not fit with the largest share of them free.
    """
    check_sources(trace, synthetic or trace is None, {})
    if policy not in _POLICIES:
        raise typer.BadParameter(f"{policy!r} is none of {', '.join(_POLICIES)}", param_hint="--policy")
    # Without --memory a capacity is found below, where none is given.
    check_memory(memory, capacity if memory is not None else capacity or 1, model, bytes_per_token)
    nbytes = None if memory is None else usage("--memory", parse_nbytes, memory, what="memory")

    requests = requests_of(trace, limit, None, None)
    if model is not None:
        bytes_per_token = size_of(model, "bfloat16")["bytes_per_token"]
    if nbytes is not None:
        assert bytes_per_token is not None, "memory was given with what a token takes"
        capacity = nbytes // bytes_per_token
    elif capacity is None:
        capacity = _room_for_long_requests(requests)
    if max_length is None:
        lengths = [one.prompt + one.output for one in requests]
        max_length = min(max(lengths), _longest_possible(policy, max(1, capacity), page_size))
        if min(lengths) > max_length:  # nobody asked for that length
            max_length = min(lengths)
    check_lengths(requests, max_length)
    sizes: dict[str, Any] = {"max_length": max_length, "page_size": page_size, "chunk": _CHUNK}
    check_capacity([policy, "paged"], capacity, bytes_per_token, nbytes, {**sizes, "fit": "first"})
    from gpuarena.simulate.engine import run

    results = {}
    for name in (policy, "paged"):
        with progress(f"{len(requests)} requests, {name}"):
            results[name] = run(requests, name, capacity=capacity, n_samples=_N_SAMPLES, **sizes)
    result = results[policy]

    from gpuarena.simulate.words import diagnose_worst, explain_results

    found = diagnose_worst(result)
    smaller = {} if found else _try_smaller(requests, result, sizes)
    if as_json:
        print_json(
            {
                "trace": trace_figures(requests),
                "bytes_per_token": bytes_per_token,
                "results": {name: result_figures(one) for name, one in results.items()},
                "diagnosis": found and {**asdict(found), "text": found.text},
                "smaller": smaller or None,
                "explanation": explain_results(results, bytes_per_token=bytes_per_token),
            }
        )
        return
    from gpuarena.cli._explain_screen import print_calm, print_comparison, print_heading, print_moment

    console = Console()
    print_heading(console, requests, result, bytes_per_token)
    if found is None:
        print_calm(console, result, smaller)
    else:
        print_moment(console, result, found)
    print_comparison(console, result, results["paged"])


def _room_for_long_requests(requests: RequestTrace) -> int:
    """Return the highest power of two in which no more than a few long requests fit, as in a server under load."""
    lengths = sorted(one.prompt + one.output for one in requests)
    long = lengths[min(len(lengths) - 1, len(lengths) * 99 // 100)]
    return 1 << ((_LONG_REQUESTS * long).bit_length() - 1)


def _longest_possible(policy: str, capacity: int, page_size: int) -> int:
    """Return the longest request that both policies could serve alone."""
    unit = _CHUNK if policy == "grow" else 1
    longest = min(capacity // page_size * page_size, capacity // unit * unit)
    if policy.startswith("buddy"):
        longest = min(longest, 1 << (capacity.bit_length() - 1))
    return max(1, longest)


def _try_smaller(requests: RequestTrace, result: Result, sizes: dict[str, Any]) -> dict[str, Any]:
    """Run with less memory until requests fail by fragmentation, and return what was found."""
    from gpuarena.errors import ArgumentError
    from gpuarena.simulate.engine import run

    peak = max((result.capacity - one.free for one in result.samples), default=0)
    found: dict[str, Any] = {"peak": peak, "tried": [], "first_fail_frag": 0, "free_share": None}
    for part in _SMALLER:
        capacity = int(peak * part)
        if not 0 < capacity < result.capacity:
            continue
        try:
            tried = run(requests, result.policy, capacity=capacity, **sizes)
        except ArgumentError:  # too small for the longest request
            break
        found["tried"].append(capacity)
        if tried.worst is not None:
            found |= {"first_fail_frag": tried.first_fail_frag, "free_share": tried.worst.free_share}
            break
    return found
