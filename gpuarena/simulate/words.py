"""What simulations found, in plain English; each sentence stands on figures of the results given and on nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from gpuarena.kv.contiguous import Buddy, Diagnosis, FreeList, diagnose
from gpuarena.kv.spec import positive
from gpuarena.simulate._format import count, grouped, listed, of_slots, percent, seconds, tokens
from gpuarena.simulate._summary import duration, of_requests, share_of_slots, summarise, troubles
from gpuarena.simulate._words_of_users import compares_users, copies, explain_users
from gpuarena.simulate.result import LengthClass, Result

__all__ = ["describe_results", "diagnose_worst", "explain_results"]

#: Names in one enumeration; the rest is counted, so that a sentence stays readable with ten policies.
_MOST_NAMES = 5
#: A share of the slots below this is no reason for anything, and is not spoken of.
_LEAST_SHARE = 0.005


def explain_results(results: Mapping[str, Result], *, bytes_per_token: int | None = None) -> str:
    """Say which policy serves how many requests, why the others serve fewer, and where pages do not help.

    >>> from gpuarena.simulate import synthetic
    >>> from gpuarena.simulate.engine import run
    >>> found = run(synthetic(100), "exact", capacity=20_000, max_length=10_000)
    >>> explain_results({"exact": found}).split(". ")[0]
    'In 20 000 slots exact finishes 12 of 100 requests (12.0 %) in 18 s'

    There are two paragraphs of about 130 words at most, with an empty line between them, however many results there
    are: on the policies that serve most and least, and on the worst failure by fragmentation, on pages and on what
    growing copies. `describe_results` says more. Where the same users were served under other policies
    (``run(users=)``), the text compares what these take and copy. Policies that were not run are not mentioned.

    Parameters
    ----------
    results : mapping of str to Result
        By the names to use in the text. Those of `linear` are spoken of apart: its users wait for their own last
        answer, so what they finish does not compare with a queue.
    bytes_per_token : int, optional
        Of a model's KV cache; slots are then given in bytes, too.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        `bytes_per_token` is no positive integer.
    """
    return _explained(results, bytes_per_token, summarise)


def describe_results(results: Mapping[str, Result], *, bytes_per_token: int | None = None) -> str:
    """Say all that is to be said of the results, policy by policy, for a page with room.

    >>> describe_results({})
    'No policy was run.'

    Paragraphs stand apart by an empty line: on what was served, on why not more, on the worst failure by fragmentation,
    and, where ``linear`` was run, on what its users pay and gain.

    Parameters
    ----------
    results : mapping of str to Result
        As of `explain_results`.
    bytes_per_token : int, optional
        Of a model's KV cache; slots are then given in bytes, too.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        `bytes_per_token` is no positive integer.
    """
    return _explained(results, bytes_per_token, _at_length)


def _explained(
    results: Mapping[str, Result],
    bytes_per_token: int | None,
    explain: Callable[[Mapping[str, Result], int | None], list[str]],
) -> str:
    if bytes_per_token is not None:
        bytes_per_token = positive(bytes_per_token, "bytes_per_token")
    users = {name: one for name, one in results.items() if one.users is not None}
    if compares_users(users):
        paragraphs = explain_users(users, bytes_per_token)
        results = {name: one for name, one in results.items() if name not in users}
    else:
        paragraphs = []
    return "\n\n".join([*paragraphs, *explain(results, bytes_per_token)]) or "No policy was run."


def _at_length(results: Mapping[str, Result], bytes_per_token: int | None) -> list[str]:
    paragraphs = []
    queued = {name: one for name, one in results.items() if one.policy != "linear"}
    linear = {name: one for name, one in results.items() if one.policy == "linear"}
    if queued:
        paragraphs.append(" ".join(_served(queued, bytes_per_token)))
        paragraphs.append(" ".join(_reasons(queued)))
        paragraphs.append(" ".join((*_worst_moment(queued), *_pages(queued), *_costs(queued))))
    for name, one in linear.items():
        paragraphs.append(" ".join(_linear(name, one, queued, bytes_per_token)))
    return [*filter(None, paragraphs)]


def diagnose_worst(result: Result) -> Diagnosis | None:
    """Return the diagnosis of the worst failure by fragmentation, or None if there was none.

    It is made from the holes and allocations of `Result.worst`, so it can say what would have helped at that time.
    """
    moment = result.worst
    if moment is None:
        return None
    slots: FreeList | Buddy
    slots = Buddy(moment.capacity) if result.policy.startswith("buddy") else FreeList(moment.capacity)
    for start, length, n_tokens in moment.allocations:
        slots.reserve(start, length)
        slots.use(start, n_tokens)
    found = diagnose(slots, moment.need, page_size=result.page_size)
    # What a policy asks for may be more than the tokens of the request, of which pages would take no more.
    return replace(found, pages_needed=moment.pages_needed, n_pages=moment.n_pages)


# On what was served.


def _served(results: Mapping[str, Result], bytes_per_token: int | None) -> Iterator[str]:
    yield from _done(results, bytes_per_token)
    yield from _untroubled(results)
    rejecting = {name: one for name, one in results.items() if one.reject}
    yield from _list_counts(rejecting, lambda one: one.rejected, "requests are turned away")
    yield from _waits({name: one for name, one in results.items() if not one.reject})
    yield from _by_length(results)


def _reasons(results: Mapping[str, Result]) -> Iterator[str]:
    yield from _shares(
        results,
        lambda one: one.sum_internal,
        "Internal fragmentation, slots of allocations that never hold a token, takes",
    )
    yield from _why_internal(results)
    yield from _shares(results, lambda one: one.sum_reserved, "Slots kept for tokens still to come are")
    yield from _list_counts(
        results,
        lambda one: one.first_fail_frag,
        "requests do not fit at first although enough slots are free, only not in one piece",
    )
    yield from _list_counts(
        results,
        lambda one: one.first_fail_nofree,
        "requests do not fit at first because too few slots are free",
    )


def _done(results: Mapping[str, Result], bytes_per_token: int | None) -> Iterator[str]:
    ranked = sorted(results.items(), key=lambda item: (-item[1].done, item[0]))
    best, worst = ranked[0], ranked[-1]
    same = len({(one.requests, one.capacity, one.steps, one.rate) for one in results.values()}) == 1
    if same:
        one = best[1]
        where = f"In {of_slots(one.capacity, bytes_per_token)}, each for one token,"
        if len(ranked) > 1 and best[1].done == worst[1].done:
            each = "both policies finish" if len(ranked) == 2 else f"all {len(ranked)} policies finish"
            yield f"{where} {each} {of_requests(one.done, one.requests)} in {duration(one)}."
        else:
            first = f"{best[0]} finishes {of_requests(one.done, one.requests)} in {duration(one)}"
            others = [
                f"{name} {grouped(other.done)} ({percent(other.done, other.requests)})"
                for name, other in ranked[1:]
            ]
            yield f"{where} {first}{', ' if others else ''}{_short(others)}."
    else:
        for name, one in ranked:
            yield (
                f"{name} finishes {of_requests(one.done, one.requests)} in {of_slots(one.capacity, bytes_per_token)} "
                f"in {duration(one)}."
            )
    if same and best[1].done > worst[1].done > 0:
        ratio = best[1].done / worst[1].done
        yield f"That is {ratio:.2f} times as many under {best[0]} as under {worst[0]}."
    dropped = max(results.values(), key=lambda one: one.dropped)
    if dropped.dropped:
        yield (
            f"Left out {'is' if dropped.dropped == 1 else 'are'} {count(dropped.dropped, 'request')} longer than "
            f"{count(dropped.max_length, 'token')}."
        )


def _untroubled(results: Mapping[str, Result]) -> Iterator[str]:
    """Yield which policies had memory enough for each request at once."""
    calm = [name for name, one in results.items() if one.requests and not troubles(one)]
    if not calm:
        return
    if len(calm) == len(results):
        yield "No request ever waits for memory: there is enough of it, and no policy serves more than another by it."
    else:
        yield f"No request ever waits for memory under {_short(calm)}."


def _shares(results: Mapping[str, Result], of: Callable[[Result], int], what: str) -> Iterator[str]:
    shares = {name: share_of_slots(one, of(one)) for name, one in results.items()}
    ranked = sorted((name for name in shares if shares[name] >= _LEAST_SHARE), key=lambda name: -shares[name])
    if ranked:
        first = f"{what} {percent(shares[ranked[0]])} of the slots under {ranked[0]}"
        others = [f"{percent(shares[name])} under {name}" for name in ranked[1:]]
        yield f"{first}{', ' if len(others) > 1 else ' and ' if others else ''}{_short(others)}."


def _why_internal(results: Mapping[str, Result]) -> Iterator[str]:
    """Yield what makes slots that never hold a token, where that is the policy's doing."""
    wasteful = {
        name: one for name, one in results.items() if share_of_slots(one, one.sum_internal) >= _LEAST_SHARE
    }
    whole = [name for name, one in wasteful.items() if one.policy in ("max", "buddy_max")]
    rounded = [name for name, one in wasteful.items() if one.policy in ("buddy_pow2", "buddy_exact")]
    if whole:
        longest = max(wasteful[name].max_length for name in whole)
        yield f"Under {_short(whole)} each request takes {count(longest, 'slot')}, the most that one may need."
    if rounded:
        yield f"Under {_short(rounded)} what a request takes is rounded up to a power of two."


def _list_counts(
    results: Mapping[str, Result],
    number: Callable[[Result], int],
    what: str,
) -> Iterator[str]:
    ranked = sorted((name for name in results if number(results[name])), key=lambda n: -number(results[n]))
    parts = [
        f"{grouped(number(results[name]))} ({percent(number(results[name]), results[name].requests)}) under {name}"
        for name in ranked
    ]
    if parts:
        yield f"{what[0].upper()}{what[1:]}: {_short(parts)}."


def _waits(results: Mapping[str, Result]) -> Iterator[str]:
    waiting = [name for name, one in results.items() if one.wait_p99_s > 0]
    waiting.sort(key=lambda name: (results[name].wait_p50_s, results[name].wait_p99_s))
    unserved = [name for name, one in results.items() if one.unadmitted]
    unserved.sort(key=lambda name: -results[name].unadmitted)
    if unserved:
        parts = [f"{grouped(results[name].unadmitted)} under {name}" for name in unserved]
        yield f"Still waiting for a first start at the end are {_short(parts)}."
    if waiting:
        parts = [
            f"{seconds(results[name].wait_p50_s)} under {name} (1 in 100: {seconds(results[name].wait_p99_s)})"
            for name in waiting
        ]
        yield f"Half of {'the others' if unserved else 'all requests'} wait at most {_short(parts)}."


def _by_length(results: Mapping[str, Result]) -> Iterator[str]:
    """Yield how the shortest and the longest requests fare where fragmentation strikes most."""
    struck = {name: one for name, one in results.items() if one.first_fail_frag}
    if not struck:
        return
    name, one = max(struck.items(), key=lambda item: item[1].first_fail_frag)
    classes = [each for each in one.classes if each.n_requests]
    if len(classes) < 2:
        return
    short, long = classes[0], classes[-1]

    def missed(each: LengthClass) -> int:
        return each.n_rejected if one.reject else each.n_failed

    if missed(long) * short.n_requests <= missed(short) * long.n_requests:
        return  # it is not the long ones that are refused
    did = "are turned away" if one.reject else "do not fit at first"
    limit = f"under {count(short.limit, 'token')}" if short.limit is not None else "of the shortest kind"
    yield (
        f"It is the long ones: under {name} {percent(missed(short), short.n_requests)} of the requests {limit} {did}, "
        f"and {percent(missed(long), long.n_requests)} of those of {count(long.least, 'token')} or more."
    )


# On the worst failure by fragmentation, and on pages.


def _worst_moment(results: Mapping[str, Result]) -> Iterator[str]:
    contiguous = {name: one for name, one in results.items() if one.policy != "paged"}
    moments = {name: one.worst for name, one in contiguous.items() if one.worst is not None}
    if not moments:
        if contiguous and not any(one.first_fail_frag for one in contiguous.values()):
            yield f"No request fails by fragmentation under {_short(list(contiguous))}."
        return
    name = max(moments, key=lambda name: moments[name].free_share)
    moment, one = moments[name], contiguous[name]
    yield (
        f"The worst failure by fragmentation is under {name}, {seconds(moment.time_s)} after the first arrival: a "
        f"request needs {count(moment.need, 'slot')}, {grouped(moment.free)} of {grouped(moment.capacity)} "
        f"({percent(moment.free, moment.capacity)}) are free, and the largest of {count(len(moment.holes), 'hole')} "
        f"has {grouped(moment.largest_hole)}."
    )
    number = one.n_failed_at_40
    if number:
        once = "Once" if number == 1 else f"{grouped(number)} times"
        yield f"{once} under {name} a first attempt fails so with 40 % or more of the slots free."
    else:
        yield f"With 40 % or more free, no first attempt fails so under {name}."
    fits = moment.pages_needed <= moment.n_pages
    yield (
        f"In pages of {count(one.page_size, 'token')}, the tokens of the requests alive then and of this one take "
        f"{grouped(moment.pages_needed)} of {count(moment.n_pages, 'page')}: it would {'' if fits else 'not '}fit"
        f"{'' if fits else ' either'}."
    )


def _pages(results: Mapping[str, Result]) -> Iterator[str]:
    paged = {name: one for name, one in results.items() if one.policy == "paged"}
    contiguous = {name: one for name, one in results.items() if one.policy != "paged"}
    for name, one in paged.items():
        none = "" if one.first_fail_frag else " no request fails by fragmentation,"
        yield (
            f"Under {name}{none} {percent(one.effective)} of the slots taken hold a token, and "
            f"{percent(share_of_slots(one, one.sum_used))} of all slots."
        )
        if one.hit_tokens:
            yield f"{tokens(one.hit_tokens)} of prompts are found in pages of earlier requests."
        peers = {
            other: its
            for other, its in contiguous.items()
            if (its.requests, its.capacity, its.steps) == (one.requests, one.capacity, one.steps)
        }
        if not peers:
            continue
        best = max(peers, key=lambda other: peers[other].done)
        its = peers[best]
        if its.done >= one.done:
            more = "as many requests as" if its.done == one.done else "more requests than"
            sooner = ""
            if its.wait_p99_s > one.wait_p99_s:
                sooner = (
                    f", though 1 in 100 waits {seconds(its.wait_p99_s)} or more under {best} and "
                    f"{seconds(one.wait_p99_s)} under {name}"
                )
            yield f"Pages do not help here by what is finished: {best} finishes {more} {name}{sooner}."
        elif one.first_fail_nofree > its.first_fail_nofree + its.first_fail_frag:
            yield (
                f"More first attempts fail under {name} than under {best} because more requests get in, "
                f"{grouped(one.requests - one.unadmitted)} against {grouped(its.requests - its.unadmitted)}."
            )


def _costs(results: Mapping[str, Result]) -> Iterator[str]:
    preempting = [name for name, one in results.items() if one.preempt]
    if preempting:
        parts = [f"{count(results[name].preempt, 'time')} under {name}" for name in preempting]
        yield f"Running requests give up their slots to others, and wait again, {_short(parts)}."
    for name, one in results.items():
        if one.copied:
            cat = ", since it grows a token at a time, as torch.cat does" if one.chunk == 1 else ""
            yield f"{name} copies {copies(one)}{cat}."


# On users with a fixed region each.


def _linear(
    name: str, one: Result, queued: Mapping[str, Result], bytes_per_token: int | None
) -> Iterator[str]:
    users = one.users or 1
    reserved = users * one.max_length
    held = one.sum_used // one.steps if one.steps else 0
    yield (
        f"{name} reserves {of_slots(reserved, bytes_per_token)} from the start, {grouped(one.max_length)} "
        f"for {'one user' if users == 1 else f'each of {grouped(users)} users'}, and finishes "
        f"{of_requests(one.done, one.requests)} in {duration(one)}."
    )
    yield (
        f"On average {percent(held, reserved)} of them hold a token; "
        f"{of_slots(max(0, reserved - held), bytes_per_token)} lie idle, which is its price."
    )
    failed = one.first_fail_nofree + one.first_fail_frag
    gains = [
        gain for gain, had in (("no request fails", failed), ("nothing is copied", one.copied)) if not had
    ]
    if gains:
        yield f"For it, {listed(gains)}."
    peak = max((sample.used for sample in one.samples), default=0)
    if peak:
        yield f"At the steps that were sampled at most {count(peak, 'token')} are held."
    for other, its in queued.items():
        if its.policy == "paged" and its.effective:
            slots = round(held / its.effective)
            yield (
                f"Where {percent(its.effective)} of the slots taken hold a token, as under {other}, what the users hold on "
                f"average would take {of_slots(slots, bytes_per_token)}."
            )
        elif its.policy == "grow":
            failed = its.first_fail_frag + its.first_fail_nofree
            yield (
                f"{other} reserves no more than the next {count(its.chunk, 'token')} but copies {copies(its)}, and "
                f"{grouped(failed)} of {count(its.requests, 'request')} do not fit at first."
            )


# Parts of sentences.


def _short(parts: list[str]) -> str:
    if len(parts) > _MOST_NAMES + 1:
        parts = [*parts[:_MOST_NAMES], f"{len(parts) - _MOST_NAMES} more"]
    return listed(parts)
