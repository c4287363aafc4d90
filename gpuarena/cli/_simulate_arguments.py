"""What ``gpuarena simulate`` is asked, checked before anything is simulated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuarena._files import check_replaceable
from gpuarena.cli._output import printable
from gpuarena.cli.size import DTYPES, find_size
from gpuarena.errors import ArgumentError, BackendError

if TYPE_CHECKING:
    from gpuarena.simulate import RequestTrace, Result

__all__ = [
    "DTYPES",
    "LOCAL",
    "N_SYNTHETIC",
    "POLICIES",
    "BytesPerTokenOption",
    "LimitOption",
    "MemoryOption",
    "ModelOption",
    "check_capacity",
    "check_files",
    "check_lengths",
    "check_local",
    "check_memory",
    "check_share",
    "check_sources",
    "policies_of",
    "requests_of",
    "result_figures",
    "room_for_users",
    "size_of",
    "trace_figures",
    "usage",
]

N_SYNTHETIC = 2000
_MEMORY = "Memory"

#: Options of both commands.
LimitOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"The first N requests only. Of synthetic ones {N_SYNTHETIC} by default.",
        show_default=False,
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        help="What the KV cache may use, without the weights: 2GiB, 16GB.",
        rich_help_panel=_MEMORY,
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Whose bytes a token: folder, config.json, .gguf file, or a name such as qwen2.5-1.5b.",
        rich_help_panel=_MEMORY,
        show_default=False,
    ),
]
BytesPerTokenOption = Annotated[
    int | None,
    typer.Option(min=1, help="In place of a model.", rich_help_panel=_MEMORY, show_default=False),
]

#: In the order of the tables; "linear" is run for a number of users only.
POLICIES = ("max", "buddy_max", "buddy_pow2", "buddy_exact", "exact", "grow", "paged")
#: What `local` compares for the same users; "linear" stands for the one with their number.
LOCAL = ("linear", "grow", "paged")


def check_sources(trace: Path | None, synthetic: bool, of_synthetic: dict[str, Any]) -> None:
    """Raise unless there is one source of requests."""
    if trace is None and not synthetic:
        raise typer.BadParameter("give a file of requests, or --synthetic", param_hint="TRACE")
    if trace is not None and synthetic:
        raise typer.BadParameter(
            "requests come from a file or are drawn at random, not both", param_hint="--synthetic"
        )
    for option, value in of_synthetic.items():
        if value is not None and not synthetic:
            raise typer.BadParameter("only with --synthetic", param_hint=option)


def check_memory(
    memory: str | None,
    capacity: int | None,
    model: str | None,
    bytes_per_token: int | None,
    *,
    local: bool = False,
) -> None:
    """Raise unless the tokens that fit are said once, or need not be since a few users are compared."""
    if memory is not None and capacity is not None:
        raise typer.BadParameter("--memory says it already; leave one out", param_hint="--capacity")
    if model is not None and bytes_per_token is not None:
        raise typer.BadParameter("--model says it already; leave one out", param_hint="--bytes-per-token")
    if memory is None and capacity is None and not local:
        raise typer.BadParameter(
            "say how much memory there is: --memory 2GiB with --model or --bytes-per-token, or --capacity in tokens",
            param_hint="--memory",
        )
    if memory is not None and model is None and bytes_per_token is None:
        raise typer.BadParameter(
            "how many tokens that is depends on --model or --bytes-per-token; give one", param_hint="--memory"
        )


def policies_of(asked: list[str], users: int | None) -> list[str]:
    """Return what the simulation is to be called with, in the order asked, each once."""
    from gpuarena.simulate._arguments import as_policy

    found = []
    for name in asked:
        if name == "all":
            found += [*POLICIES, *([f"linear({users})"] if users else [])]
        elif name == "linear":
            if users is None:
                raise typer.BadParameter("linear needs --users", param_hint="--policy")
            found.append(f"linear({users})")
        else:
            kind, its_users = usage("--policy", as_policy, name)
            found.append(f"{kind}({its_users})" if its_users else kind)
    if users is not None and not any(name.startswith("linear") for name in found):
        raise typer.BadParameter("only of the policies linear and all", param_hint="--users")
    return list(dict.fromkeys(found))


def check_local(policies: list[str], reject: bool, share: bool) -> None:
    """Raise if `local` is asked for with what it cannot be compared with."""
    if set(policies) != {"local"}:
        raise typer.BadParameter(
            f"local compares {', '.join(LOCAL)} for the same users, and stands alone", param_hint="--policy"
        )
    for option, given in (("--reject", reject), ("--share", share)):
        if given:
            raise typer.BadParameter("not with --policy local", param_hint=option)


def room_for_users(users: int, max_length: int, chunk: int, page_size: int) -> int:
    """Return slots among which each request finds one piece, wherever the others lie, so that nobody waits.

    In the worst case each user has a piece, and one of them needs another; a hole before, between and behind
    them may each be a slot too short.
    """
    longest = max(-(-max_length // unit) * unit for unit in (chunk, page_size))
    return (2 * users + 1) * longest


def usage(option: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call the function; what it refuses is wrong usage of the option."""
    try:
        return function(*arguments, **named)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def check_files(plot: Path | None, html: Path | None) -> None:
    """Raise now what would be raised after the simulation."""
    if plot is not None:
        from gpuarena.simulate.plot import check_plot_path

        check_replaceable(plot)
        usage("--plot", check_plot_path, plot)
    if html is not None:
        check_replaceable(html)
    if plot is not None and html is not None and plot.absolute() == html.absolute():
        raise typer.BadParameter("is the file of --plot, too", param_hint="--html")


def requests_of(
    path: Path | None, limit: int | None, arrivals: float | None, seed: int | None
) -> RequestTrace:
    """Return the requests of a file, or those that are drawn where there is none."""
    from gpuarena.simulate import load_trace, synthetic

    if path is not None:
        return load_trace(path)[:limit]
    drawn = {"rate": arrivals, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in drawn.items() if value is not None}
    return usage("--arrivals", synthetic, limit or N_SYNTHETIC, **given)  # type: ignore[no-any-return]


def check_lengths(requests: RequestTrace, max_length: int) -> None:
    """Raise if all requests would be left out."""
    shortest = min(one.prompt + one.output for one in requests)
    if shortest > max_length:
        raise ArgumentError(
            f"all {len(requests)} requests are longer than --max-length {max_length}; the shortest has "
            f"{shortest} tokens",
            max_length=max_length,
            shortest=shortest,
        )


def check_share(policies: list[str], requests: RequestTrace, page_size: int) -> None:
    """Raise if no policy shares pages, or no page could be shared."""
    if "paged" not in policies:
        why = "only of the policy paged"
    elif requests.block_size is None:
        why = f"{printable(requests.name)} has no hashes of prefixes; JSON lines with hash_ids have"
    elif requests.block_size % page_size:
        why = f"pages of {page_size} tokens do not divide blocks of {requests.block_size}, for which there are hashes"
    else:
        return
    raise typer.BadParameter(why, param_hint="--share")


def size_of(model: str, dtype: str) -> dict[str, Any]:
    """Return the figures of a model, of which its bytes a token are used."""
    try:
        sized = find_size(model, context=None, batch=1, dtype=dtype)
    except BackendError as error:
        raise BackendError(
            "--model needs the transformers extra: pip install 'gpuarena[cli,transformers]'; or give the bytes of a "
            f"token, --bytes-per-token ({error.__cause__ or error})"
        ) from error
    if not sized["bytes_per_token"]:
        raise ArgumentError(
            f"the cache of {sized['model']} takes no memory for a token: any number of them fits"
        )
    return sized


def trace_figures(requests: RequestTrace) -> dict[str, Any]:
    """Return what ``--json`` shows of a trace."""
    return {
        "name": requests.name,
        "requests": len(requests),
        "duration_s": requests.duration_s,
        "block_size": requests.block_size,
    }


def result_figures(result: Result) -> dict[str, Any]:
    """Return what ``--json`` shows of a policy: all but the curves over time."""
    figures = result.to_dict()
    del figures["samples"]
    return figures


def check_capacity(
    policies: list[str], capacity: int, bytes_per_token: int | None, nbytes: int | None, sizes: dict[str, Any]
) -> None:
    """Raise if a policy could not serve a request of the maximal length alone, and say what each one needs."""
    from gpuarena.simulate._arguments import as_policy, as_settings
    from gpuarena.simulate._format import count, of_slots

    least: dict[str, int] = {}
    for policy in policies:
        name, users = as_policy(policy)
        try:
            as_settings(name, users, capacity=max(capacity, 1), block_size=None, **sizes)
        except ArgumentError as error:
            if not hasattr(error, "least_capacity"):
                raise
            least[policy] = error.least_capacity
    if not least:
        return
    has = of_slots(capacity, bytes_per_token)
    if nbytes is not None:
        has = f"{count(nbytes, 'byte')}, which is {has}"
    alike: dict[int, list[str]] = {}
    for policy, needed in least.items():
        alike.setdefault(needed, []).append(policy)
    parts = [
        f"{of_slots(needed, bytes_per_token)} for {', '.join(alike[needed])}" for needed in sorted(alike)
    ]
    others = [policy for policy in policies if policy not in least]
    needed = max(least.values())
    option = f"--capacity {needed}"
    if nbytes is not None and bytes_per_token is not None:
        option = f"--memory {needed * bytes_per_token}"
    raise ArgumentError(
        f"requests of up to {sizes['max_length']} tokens (--max-length) cannot be served with {has}; least needed are "
        f"{'; '.join(parts)}. Give {option} or a smaller --max-length"
        + (f", or leave these policies out ({', '.join(others)} would work)" if others else ""),
        capacity=capacity,
        least_capacity=least,
    )
