"""What the same users pay for regions of their own, for growing and for pages, in plain English."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpuarena.simulate._format import count, grouped, of_bytes, of_slots, percent, seconds, tokens
from gpuarena.simulate.result import Result

__all__ = ["compares_users", "copies", "explain_users", "mean_taken"]


def compares_users(results: Mapping[str, Result]) -> bool:
    """Return whether the users of an arena were served under other policies, too."""
    return any(one.users is not None and one.policy != "linear" for one in results.values())


def mean_taken(one: Result) -> int:
    """Return the slots that are taken on average over the steps."""
    return round((one.capacity * one.steps - one.sum_free) / one.steps) if one.steps else 0


def explain_users(results: Mapping[str, Result], bytes_per_token: int | None) -> list[str]:
    """Return a paragraph on the requests, and one on each policy."""
    regions = max((one.peak_taken for one in results.values() if one.policy == "linear"), default=0)
    paragraphs = [_requests(results)]
    paragraphs += [_policy(name, one, regions, bytes_per_token) for name, one in results.items()]
    return [" ".join(sentences) for sentences in paragraphs]


def copies(one: Result, bytes_per_token: int | None = None) -> str:
    """Return what growing copies."""
    if not one.tokens:
        return f"{tokens(one.copied)} into longer pieces"
    each = one.copied / one.tokens
    shown = grouped(round(each)) if each >= 100 else f"{each:.3g}"
    nbytes = "" if bytes_per_token is None else f" ({of_bytes(round(each * bytes_per_token))})"
    return f"{tokens(one.copied)} into longer pieces, {shown} for each token made{nbytes}"


def _requests(results: Mapping[str, Result]) -> Iterator[str]:
    one = next(iter(results.values()))
    users = "One user sends" if one.users == 1 else f"{grouped(one.users or 0)} users send"
    yield f"{users} {count(one.requests, 'request')}, the next one when the last one is answered."
    if one.dropped:
        left_out = f"Left out {'is' if one.dropped == 1 else 'are'} {count(one.dropped, 'request')}"
        yield f"{left_out} longer than {count(one.max_length, 'token')}."
    times = {name: seconds(other.steps / other.rate) for name, other in results.items()}
    if len(set(times.values())) == 1:
        yield f"It takes {times.popitem()[1]} under each policy."
    else:
        yield f"It takes {', '.join(f'{time} under {name}' for name, time in times.items())}."


def _policy(name: str, one: Result, regions: int, bytes_per_token: int | None) -> Iterator[str]:
    held = round(one.sum_used / one.steps) if one.steps else 0
    if one.policy == "linear":
        yield (
            f"{name} takes {of_slots(one.peak_taken, bytes_per_token)} from the start to the end, "
            f"{grouped(one.max_length)} for each user; on average {grouped(held)} of them "
            f"({percent(held, one.peak_taken)}) hold a token."
        )
    else:
        ratio = f", {one.peak_taken / regions:.2f} times as many as the regions" if regions else ""
        yield (
            f"{name} takes at most {of_slots(one.peak_taken, bytes_per_token)}{ratio}"
            f"{', with both pieces while one is copied' if one.copied else ''}, and {grouped(mean_taken(one))} on average."
        )
    if one.copied:
        yield f"It copies {copies(one, bytes_per_token)}."
        if one.chunk == 1:
            yield "It grows a token at a time, as torch.cat does."
    else:
        yield "It copies nothing."
    if one.policy == "paged":
        yield f"What a request holds lies in pages of {count(one.page_size, 'token')}, not in one piece."
    if failed := one.first_fail_frag + one.first_fail_nofree:
        yield f"{count(failed, 'request')} {'does' if failed == 1 else 'do'} not fit at first."
    if one.preempt:
        yield f"Running requests give up their slots to others, and wait again, {count(one.preempt, 'time')}."
    if not failed and not one.preempt:
        yield "No request waits."
