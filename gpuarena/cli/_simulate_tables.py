"""What ``gpuarena simulate`` prints: what it was asked, and a few tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from gpuarena.cli._output import plain_table, printable
from gpuarena.simulate import RequestTrace, Result
from gpuarena.simulate._format import class_label, count, filled, grouped, of_slots
from gpuarena.simulate._words_of_users import compares_users, mean_taken

__all__ = ["heading", "print_paragraphs", "print_tables"]

_Column = tuple[str, Callable[[Result], str]]


def heading(
    trace: RequestTrace,
    capacity: int,
    bytes_per_token: int | None,
    sized: dict[str, Any] | None,
    max_length: int,
    *,
    is_enough: bool = False,
) -> Iterator[str]:
    """Yield lines that say what is simulated."""
    times = f"within {trace.duration_s:,.1f} s".replace(",", " ") if trace.duration_s else "all at time 0"
    yield f"{printable(trace.name)}: {count(len(trace), 'request')}, {times}"
    if bytes_per_token is not None:
        whose = "" if sized is None else f"{printable(sized['model'])} in {sized['dtype']}: "
        yield f"{whose}{count(bytes_per_token, 'byte')} a token"
    if sized is not None and (bounded := _bounded(sized)):
        yield f"counted as if all layers kept all tokens; {bounded}"
    enough = ": enough for nobody to wait" if is_enough else ""
    yield f"{of_slots(capacity, bytes_per_token)}, each for one token{enough}"
    longer = [total for one in trace if (total := one.prompt + one.output) > max_length]
    if longer:
        yield (
            f"left out: {count(len(longer), 'request')} of more than {grouped(max_length)} tokens, "
            f"up to {grouped(max(longer))} (--max-length)"
        )


def _bounded(sized: dict[str, Any]) -> str:
    parts = [f"{one['n_layers']} have a window" for one in sized["layers"] if one["windows"]]
    if sized["state_nbytes"]:
        parts.append(f"{grouped(sized['state_nbytes'])} bytes of state a sequence come on top")
    return ", ".join(parts)


def print_tables(console: Console, results: Mapping[str, Result]) -> None:
    """Print the tables: of the slots, of the requests, of what failed, and with ``--reject`` of the lengths."""
    legend: tuple[str, ...] = ("",)
    for table, next_legend in _tables(results):
        if legend:  # a table ends with an empty line
            console.print()
        legend = next_legend
        console.print(table, end="")
        for line in legend:
            console.print(line, style="dim", highlight=False)


def _tables(results: Mapping[str, Result]) -> Iterator[tuple[Table, tuple[str, ...]]]:
    """Yield tables with the lines that explain their columns."""
    if compares_users(results):
        legend_of_users = (
            "most: at one time, with both pieces while one is copied to a longer one",
            "used: of the slots taken, what holds a token",
        )
        yield _table("slots that the users take", list(_users_columns()), results), legend_of_users
        return
    legend_of_slots = (
        "used: holds a token; reserved: will hold one; internal: never will",
        "external: 1 - largest hole / free; effective: used / (all but free)",
    )
    yield _table("slots, % of all over time", _slots_columns(), results), legend_of_slots
    rejecting = any(one.reject for one in results.values())
    yield _table("requests, times in s", list(_request_columns(results, rejecting)), results), ()
    of_failures = ("no hole: enough slots free, but not in one piece",)
    title = "requests that did not fit at first, and what it cost"
    yield _table(title, list(_failure_columns(results)), results), of_failures
    if rejecting:
        yield _lengths_table(results), ()


def print_paragraphs(console: Console, text: str) -> None:
    """Print paragraphs of plain text, no wider than reads well, without tearing figures like "1 024 s" apart."""
    plain = "\n\n".join(filled(one, console.width) for one in text.split("\n\n"))
    console.print()
    console.print(plain, markup=False, highlight=False, soft_wrap=True)


def _table(title: str, columns: list[_Column], results: Mapping[str, Result]) -> Table:
    table = _titled(title)
    table.add_column("policy", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for policy, one in results.items():
        table.add_row(policy, *(cell(one) for _, cell in columns))
    return table


def _titled(title: str) -> Table:
    table = plain_table(title)
    table.title_justify = "left"
    return table


def _slots_columns() -> list[_Column]:
    def share(name: str) -> Callable[[Result], str]:
        return lambda one: _percent(getattr(one, name), one.capacity * one.steps)

    return [
        ("used", share("sum_used")),
        ("reserved", share("sum_reserved")),
        ("internal", share("sum_internal")),
        ("free", share("sum_free")),
        ("external", lambda one: _percent(one.ext_mean, 1)),
        ("effective", lambda one: _percent(one.effective, 1)),
    ]


def _users_columns() -> Iterator[_Column]:
    yield "most", lambda one: grouped(one.peak_taken)
    yield "mean", lambda one: grouped(mean_taken(one))
    yield "used, %", lambda one: _percent(one.effective, 1)
    yield "tokens copied", _counts("copied")
    yield "did not fit", lambda one: grouped(one.first_fail_frag + one.first_fail_nofree)
    yield "done", lambda one: grouped(one.done)


def _request_columns(results: Mapping[str, Result], rejecting: bool) -> Iterator[_Column]:
    yield "running", lambda one: f"{one.mean_running:.1f}"
    yield "at most", lambda one: grouped(one.max_running)
    yield "done", lambda one: grouped(one.done)
    if len({one.steps for one in results.values()}) > 1:
        yield "within", lambda one: _seconds(one.steps / one.rate)
    if rejecting:
        yield "turned away", lambda one: grouped(one.rejected)
    else:
        yield "never started", lambda one: grouped(one.unadmitted)
        yield "wait p50", lambda one: _seconds(one.wait_p50_s)
        yield "p99", lambda one: _seconds(one.wait_p99_s)


def _failure_columns(results: Mapping[str, Result]) -> Iterator[_Column]:
    yield "too few free", lambda one: grouped(one.first_fail_nofree)
    yield "no hole", lambda one: grouped(one.first_fail_frag)
    yield "preempted", lambda one: grouped(one.preempt)
    yield "tokens copied", _counts("copied")
    if any(one.hit_tokens for one in results.values()):
        yield "tokens shared", _counts("hit_tokens")


def _counts(name: str) -> Callable[[Result], str]:
    def cell(one: Result) -> str:
        number = getattr(one, name)
        return f"{number / 1e6:.2f} M" if number >= 10**6 else grouped(number)

    return cell


def _lengths_table(results: Mapping[str, Result]) -> Table:
    table = _titled("turned away, % of the requests of so many tokens")
    table.add_column("policy", no_wrap=True)
    classes = next(iter(results.values())).classes
    for one in classes:
        table.add_column(f"{class_label(one.least, one.limit)}", justify="right", no_wrap=True)
    table.add_row("requests", *(grouped(one.n_requests) for one in classes), style="dim")
    for policy, result in results.items():
        table.add_row(policy, *(_percent(one.n_rejected, one.n_requests) for one in result.classes))
    return table


def _percent(part: float, whole: float) -> str:
    """Return a share in percent; only nothing is 0 and only all is 100."""
    if not whole:
        return "-"
    share = 100 * part / whole
    if share in (0, 100):
        return f"{share:.0f}"
    return "< 0.1" if share < 0.05 else "> 99.9" if share >= 99.95 else f"{share:.1f}"


def _seconds(time_s: float) -> str:
    return f"{time_s:,.0f}".replace(",", " ") if time_s >= 100 else f"{time_s:.3g}"
