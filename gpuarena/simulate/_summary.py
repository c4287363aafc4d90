"""What simulations found, in two short paragraphs, however many policies were run; the figures are in tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpuarena.simulate._format import count, grouped, keep_together, listed, of_slots, percent, seconds
from gpuarena.simulate._words_of_users import copies
from gpuarena.simulate.result import Result

__all__ = ["duration", "of_requests", "share_of_slots", "summarise", "troubles"]

#: Of both paragraphs; what matters least is left out first.
_MOST_WORDS = 130
#: A share of the slots below this is no reason for anything.
_LEAST_SHARE = 0.005

#: How much a sentence matters, 0 most, and what it says.
_Sentence = tuple[int, str]


def summarise(results: Mapping[str, Result], bytes_per_token: int | None) -> list[str]:
    """Return a paragraph on what is served and one on fragmentation, pages and copies."""
    queued = {name: one for name, one in results.items() if one.policy != "linear"}
    linear = {name: one for name, one in results.items() if one.policy == "linear"}
    first = [*_served(queued, bytes_per_token), *_cause(queued)] if queued else []
    second = [*_worst_moment(queued), *_pages(queued), *_costs(queued), *_linear(linear, bytes_per_token)]
    kept = sorted([*first, *second], key=lambda sentence: sentence[0])
    while kept[-1:] and kept[-1][0] and sum(_words(text) for _, text in kept) > _MOST_WORDS:
        kept.pop()
    said = {text for _, text in kept}
    paragraphs = [" ".join(text for _, text in one if text in said) for one in (first, second)]
    return [one for one in paragraphs if one]


# On what is served, and why not more.


def _served(results: Mapping[str, Result], bytes_per_token: int | None) -> Iterator[_Sentence]:
    ranked = _ranked(results)
    (best, one), (worst, least) = ranked[0], ranked[-1]
    if len({(each.requests, each.capacity, each.steps, each.rate) for each in results.values()}) > 1:
        for name, each in dict([ranked[0], ranked[-1]]).items():
            slots = of_slots(each.capacity, bytes_per_token)
            yield (
                0,
                f"{name} finishes {of_requests(each.done, each.requests)} in {slots} in {duration(each)}.",
            )
        if len(ranked) > 2:
            yield 5, f"The other {len(ranked) - 2} are in the tables."
    else:
        where = f"In {of_slots(one.capacity, bytes_per_token)}"
        served = f"{of_requests(one.done, one.requests)} in {duration(one)}"
        if len(ranked) > 1 and one.done == least.done:
            each_of = "both policies finish" if len(ranked) == 2 else f"all {len(ranked)} policies finish"
            yield 0, f"{where} {each_of} {served}."
        elif len(ranked) > 1:
            ratio = (
                f", {one.done / least.done:.2f} times as many as {worst}" if least.done else f", {worst} none"
            )
            between = f"; the other {len(ranked) - 2} lie between" if len(ranked) > 2 else ""
            yield 0, f"{where} {best} finishes {served}{ratio}{between}."
        else:
            yield 0, f"{where} {best} finishes {served}."
    dropped = max(results.values(), key=lambda each: each.dropped)
    if dropped.dropped:
        are = "is" if dropped.dropped == 1 else "are"
        longer = f"longer than {count(dropped.max_length, 'token')}"
        yield 4, f"Left out {are} {count(dropped.dropped, 'request')} {longer}."
    calm = [name for name, each in results.items() if each.requests and not troubles(each)]
    if calm and len(calm) == len(results):
        yield 1, "No request ever waits for memory: there is enough of it."
    elif calm:
        shown = listed(calm) if len(calm) < 4 else f"{calm[0]} and {len(calm) - 1} others"
        yield 5, f"No request ever waits for memory under {shown}."


def _ranked(results: Mapping[str, Result]) -> list[tuple[str, Result]]:
    """Return results by the share of the requests that is done, the most first."""
    return sorted(results.items(), key=lambda item: (-item[1].done / (item[1].requests or 1), item[0]))


def _cause(results: Mapping[str, Result]) -> Iterator[_Sentence]:
    """Yield what takes most room, or keeps most out, under the policy that serves least."""
    name, one = max(
        reversed(_ranked(results)), key=lambda item: (bool(troubles(item[1])), -_done_share(item[1]))
    )
    if not troubles(one):
        return
    shares = {part: share_of_slots(one, getattr(one, f"sum_{part}")) for part in ("internal", "reserved")}
    part = max(shares, key=lambda key: shares[key])
    holes = share_of_slots(one, one.sum_free) if one.first_fail_frag else 0.0
    if shares[part] >= max(holes, _LEAST_SHARE):
        said = f"Under {name} {percent(shares[part])} of the slots"
        why = ""
        if part == "reserved":
            said += " are kept for tokens still to come"
        else:
            said += " are allocated but never hold a token"
            if one.policy in ("max", "buddy_max"):
                why = f": each request takes {grouped(one.max_length)}, the most that one may need"
            elif one.policy in ("buddy_pow2", "buddy_exact"):
                why = ": what a request takes is rounded up to a power of two"
        yield 1, f"{said}{why}."
    elif one.first_fail_frag and holes >= _LEAST_SHARE:
        yield (
            4,  # the sentence on the worst moment says more
            f"Under {name} {percent(holes)} of the slots are free on average, and still requests do not fit.",
        )
    elif one.first_fail_nofree:
        requests = f"{grouped(one.first_fail_nofree)} ({percent(one.first_fail_nofree, one.requests)})"
        yield 1, f"Under {name} {requests} do not fit at first because too few slots are free."
    if one.reject:
        yield (
            1,
            f"Under {name} {grouped(one.rejected)} ({percent(one.rejected, one.requests)}) are turned away.",
        )


def _done_share(one: Result) -> float:
    return one.done / one.requests if one.requests else 0.0


# On fragmentation, pages and copies.


def _worst_moment(results: Mapping[str, Result]) -> Iterator[_Sentence]:
    contiguous = {name: one for name, one in results.items() if one.policy != "paged"}
    struck = {name: one for name, one in contiguous.items() if one.first_fail_frag}
    if not struck:
        if contiguous:
            names = [*contiguous]
            shown = listed(names) if len(names) < 4 else f"the {len(names)} policies without pages"
            yield 2, f"No request fails by fragmentation under {shown}."
        return
    name = max(struck, key=lambda key: (_free_share(struck[key]), struck[key].first_fail_frag))
    one, moment = struck[name], struck[name].worst
    number = one.first_fail_frag
    text = (
        f"Under {name} {count(number, 'request')} ({percent(number, one.requests)}) "
        f"{'finds' if number == 1 else 'find'} enough slots free at first, only not in one piece"
    )
    if moment is None:
        yield 0, f"{text}."
        return
    fits = "would fit" if moment.pages_needed <= moment.n_pages else "would not fit either"
    yield (
        0,
        f"{text}; at worst one needs {grouped(moment.need)} with {grouped(moment.free)} of {grouped(moment.capacity)} "
        f"({percent(moment.free, moment.capacity)}) free, in holes of at most {grouped(moment.largest_hole)}, and in pages of "
        f"{count(one.page_size, 'token')} it {fits}.",
    )


def _free_share(one: Result) -> float:
    return one.worst.free_share if one.worst is not None else 0.0


def _pages(results: Mapping[str, Result]) -> Iterator[_Sentence]:
    paged = {name: one for name, one in results.items() if one.policy == "paged"}
    if not paged:
        return
    name, one = _ranked(paged)[0]
    none = "" if one.first_fail_frag else " no request fails by fragmentation, and"
    yield 1, f"Under {name}{none} {percent(one.effective)} of the slots taken hold a token."
    peers = {
        other: its
        for other, its in results.items()
        if its.policy != "paged"
        and (its.requests, its.capacity, its.steps) == (one.requests, one.capacity, one.steps)
    }
    if peers:
        best, its = _ranked(peers)[0]
        if its.done >= one.done:
            more = "as many" if its.done == one.done else "more"
            yield 1, f"Pages do not help here by what is finished: {best} finishes {more}."


def _costs(results: Mapping[str, Result]) -> Iterator[_Sentence]:
    if not results:
        return
    name, one = max(results.items(), key=lambda item: item[1].copied)
    if one.copied:
        cat = ", as torch.cat does" if one.chunk == 1 else ""
        yield 1, f"{name} copies {copies(one)}{cat}."
    name, one = max(results.items(), key=lambda item: item[1].preempt)
    if one.preempt:
        yield 3, f"Running requests are preempted {count(one.preempt, 'time')} under {name}."


def _linear(results: Mapping[str, Result], bytes_per_token: int | None) -> Iterator[_Sentence]:
    for name, one in list(results.items())[:1]:
        users = one.users or 1
        reserved = users * one.max_length
        held = percent(one.sum_used, reserved * one.steps)
        whose = "one user" if users == 1 else f"{grouped(users)} users"
        yield (
            2,
            f"{name} reserves {of_slots(reserved, bytes_per_token)} for {whose}, of which {held} hold a token.",
        )


# Figures, and parts of sentences.


def troubles(one: Result) -> int:
    """Return 0 if there was memory enough for each request at once."""
    return one.first_fail_frag + one.first_fail_nofree + one.blocked_steps + one.preempt + one.rejected


def share_of_slots(one: Result, slots: int) -> float:
    """Return a sum over the steps as a share of all slots in all steps."""
    whole = one.capacity * one.steps
    return slots / whole if whole else 0.0


def of_requests(number: int, requests: int) -> str:
    """Return how many requests of how many."""
    return f"{grouped(number)} of {count(requests, 'request')} ({percent(number, requests)})"


def duration(one: Result) -> str:
    """Return how long a simulation goes on in its own time."""
    return seconds(one.steps / one.rate) if one.rate else count(one.steps, "step")


def _words(text: str) -> int:
    return len(keep_together(text).split(" "))
