"""What is said of results: each figure is one of theirs, and nothing is said of what was not run or did not happen."""

import dataclasses
import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from made_results_kit import FORTY, POLICIES, made, moments, results, struck

from gpuarena.errors import ArgumentError, ArgumentTypeError
from gpuarena.simulate import LengthClass
from gpuarena.simulate._format import keep_together
from gpuarena.simulate.words import describe_results, diagnose_worst, explain_results


def numbers(text):
    """Return all integers in a text, thousands apart or not."""
    return {int(found.replace(" ", "")) for found in re.findall(r"\d{1,3}(?: \d{3})+|\d+", text)}


def sentence(text, part):
    """Return the one sentence that has `part`."""
    found = [one for one in re.split(r"(?<=\.)\s+(?=[A-Z]|\w+[ (])", text) if part in one]
    assert len(found) == 1, f"{part!r} is in {len(found)} sentences of {text!r}"
    return found[0]


# Of any results.


@given(
    st.lists(st.sampled_from(POLICIES), max_size=6, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: results(name) for name in names})
    ),
    st.none() | st.integers(1, 10**6),
)
def test_any_results_are_explained_with_the_policies_given_and_possible_figures(
    given_results, bytes_per_token
):
    text = describe_results(given_results, bytes_per_token=bytes_per_token)
    expect_possible(text, given_results)
    for name in given_results:  # each is spoken of
        same = {one.done for one in given_results.values()}
        assert name in text or len(same) == 1 or len(given_results) > 5
    expect_possible(explain_results(given_results, bytes_per_token=bytes_per_token), given_results)


def expect_possible(text, given_results):
    assert text.strip()
    assert not re.search(r"\b(nan|inf|None)\b", text)
    for name in POLICIES:
        mentioned = re.search(rf"\b{name}\b", text) is not None
        assert not mentioned or name in given_results, text
    for share in re.findall(r"(-?[\d.]+) %", text):
        assert 0 <= float(share) <= 100
    assert not re.search(r"(?<!\d)-\d", text), "no negative figure"
    assert "  " not in text.replace("\n\n", "")
    for paragraph in text.split("\n\n"):
        assert paragraph.endswith(".")
        assert paragraph == paragraph.strip()


@given(results("exact"), results("paged"))
def test_fragmentation_is_spoken_of_where_it_happened_and_only_there(exact, paged):
    text = describe_results({"exact": exact, "paged": paged})
    assert ("not in one piece" in text) == (exact.first_fail_frag > 0)
    assert ("worst failure by fragmentation" in text) == (exact.worst is not None)
    assert ("No request fails by fragmentation under exact" in text) == (
        exact.worst is None and exact.first_fail_frag == 0
    )
    assert ("slots are free: " in text) == (exact.first_fail_nofree + paged.first_fail_nofree > 0)
    assert ("give up their slots" in text) == (exact.preempt + paged.preempt > 0)


def test_nothing_was_run():
    assert describe_results({}) == explain_results({}) == "No policy was run."


@pytest.mark.parametrize(
    ("value", "error"), [(0, ArgumentError), (1.5, ArgumentTypeError), ("2", ArgumentTypeError)]
)
def test_bytes_of_a_token_are_a_positive_integer(value, error):
    for explain in (describe_results, explain_results):
        with pytest.raises(error):
            explain({"exact": made()}, bytes_per_token=value)


# Of results whose figures are known.


def test_who_serves_how_many():
    text = describe_results({"max": made("max", done=10), "exact": struck(), "paged": made("paged", done=48)})
    first = sentence(text, "paged finishes")
    assert numbers(first) >= {1000, 48, 50, 40, 10}
    assert "48 of 50 requests (96.0 %) in 5 s, exact 40 (80.0 %) and max 10 (20.0 %)" in first
    assert "4.80 times as many under paged as under max" in text


def test_bytes_are_those_of_the_slots():
    text = describe_results({"exact": struck()}, bytes_per_token=3_000_000)
    assert "1 000 slots (3.00 GB)" in text


def test_requests_left_out_are_counted():
    text = describe_results({"exact": made(dropped=3)})
    assert "Left out are 3 requests longer than 500 tokens." in text
    assert "Left out" not in describe_results({"exact": made()})


def test_enough_memory_for_all_is_said():
    text = describe_results({"exact": made(), "paged": made("paged")})
    assert "both policies finish 50 of 50 requests (100 %)" in text
    assert "No request ever waits for memory" in text
    assert "No request fails by fragmentation under exact." in text
    assert "Pages do not help here by what is finished: exact finishes as many requests as paged." in text


def test_pages_that_finish_no_more_but_sooner():
    text = describe_results({"exact": struck(done=50), "paged": made("paged")})
    assert "though 1 in 100 waits 4 s or more under exact and 0 s under paged" in text
    assert "No request ever waits for memory under paged." in text


def test_internal_fragmentation_and_whose_doing_it_is():
    wasting = made("max", sum_used=15_000, sum_internal=82_500, sum_reserved=2_300, sum_free=200)
    rounding = made("buddy_exact", sum_used=50_000, sum_internal=25_000, sum_free=25_000)
    text = describe_results({"max": wasting, "buddy_exact": rounding, "exact": made()})
    assert "82.5 % of the slots under max and 25.0 % under buddy_exact." in sentence(text, "Internal frag")
    assert "Under max each request takes 500 slots" in text
    assert "Under buddy_exact what a request takes is rounded up to a power of two" in text
    assert "2.3 % of the slots under max" in sentence(text, "tokens still to come")
    assert "Internal" not in describe_results({"exact": made()})


def test_external_fragmentation_with_the_moment():
    text = describe_results({"exact": struck(), "paged": made("paged")})
    assert "7 (14.0 %) under exact." in sentence(text, "not in one piece")
    worst = sentence(text, "worst failure")
    assert {300, 400, 1000, 2, 200} <= numbers(worst)
    assert "2.5 s after the first arrival" in worst
    assert "(40.0 %)" in worst
    assert "3 times under exact" in sentence(text, "40 % or more")
    assert "54 of 62 pages: it would fit." in text


def test_a_moment_that_pages_would_not_help():
    full = dataclasses.replace(FORTY, pages_needed=63)
    text = describe_results({"exact": struck(worst=full, n_failed_at_40=0)})
    assert "63 of 62 pages: it would not fit either." in text
    assert "With 40 % or more free, no first attempt fails so under exact." in text


def test_the_worst_moment_is_the_one_with_most_free():
    less = dataclasses.replace(FORTY, free=399, capacity=1000)
    for order in (("exact", "grow"), ("grow", "exact")):
        both = {"exact": struck(worst=less), "grow": struck("grow")}
        text = describe_results({name: both[name] for name in order})
        assert "fragmentation is under grow" in text


def test_long_requests_are_refused_and_short_ones_served():
    text = describe_results({"exact": struck()})
    said = sentence(text, "It is the long ones")
    assert "3.3 % of the requests under 100 tokens" in said
    assert "60.0 % of those of 400 tokens or more" in said
    reversed_classes = tuple(
        dataclasses.replace(one, n_failed=n) for one, n in zip(struck().classes, (29, 2, 0), strict=True)
    )
    assert "long ones" not in describe_results({"exact": struck(classes=reversed_classes)})
    few_long = (LengthClass(1, 100, 30, 0, 5, 25), LengthClass(100, None, 3, 0, 1, 2))
    assert "33.3 % of those" in describe_results({"exact": struck(classes=few_long)}), (
        "shares count, not numbers"
    )


def test_requests_turned_away():
    text = describe_results(
        {"exact": struck(reject=True, rejected=9), "paged": made("paged", reject=True, rejected=4)}
    )
    assert "9 (18.0 %) under exact and 4 (8.0 %) under paged." in sentence(text, "turned away:")
    assert "wait at most" not in text


def test_waits_are_of_those_that_got_in():
    text = describe_results({"exact": struck(unadmitted=6), "paged": made("paged")})
    assert "Still waiting for a first start at the end are 6 under exact." in text
    assert "Half of the others wait at most 1.5 s under exact (1 in 100: 4 s)." in text
    assert "Half of all requests" in describe_results({"exact": struck()})


def test_more_first_failures_under_pages_are_put_right():
    crowded = made("paged", done=45, first_fail_nofree=30, unadmitted=2, blocked_steps=9)
    text = describe_results({"exact": struck(unadmitted=8), "paged": crowded})
    assert "More first attempts fail under paged than under exact" in text
    assert "48 against 42" in text


def test_growing_by_a_token_is_what_torch_cat_does():
    text = describe_results({"grow": made("grow", chunk=1, copied=57_180, tokens=300)})
    assert (
        "grow copies 57 180 tokens into longer pieces, 191 for each token made, since it grows a token"
        in text
    )
    assert "torch.cat" not in describe_results({"grow": made("grow", chunk=2, copied=57_180)})


def test_what_pages_cost():
    text = describe_results({"paged": made("paged", preempt=1)})
    assert "give up their slots to others, and wait again, 1 time under paged." in text


def test_local_users_compare_reserved_slots_copies_and_failures():
    arena = made("linear", sum_used=20_000, sum_internal=80_000, sum_free=0, steps=100)
    growing = struck("grow", copied=1500, tokens=300)
    pages = made("paged", sum_used=49_500, sum_internal=500, sum_free=50_000)
    text = describe_results({"linear(2)": arena, "grow": growing, "paged": pages}, bytes_per_token=10**6)
    own = text.split("\n\n")[-1]
    assert "linear(2) reserves 1 000 slots (1.00 GB) from the start, 500 for each of 2 users" in own
    assert "20.0 % of them hold a token; 800 slots (800.0 MB) lie idle" in own
    assert "For it, no request fails and nothing is copied." in own
    assert (
        "grow reserves no more than the next 256 tokens but copies 1 500 tokens into longer pieces, 5 for each"
        in own
    )
    assert "9 of 50 requests do not fit at first" in own
    assert "Where 99.0 % of the slots taken hold a token, as under paged" in own
    assert "202 slots (202.0 MB)" in own  # 200 tokens, of which 99 % of the slots are


def test_the_same_users_are_compared_by_what_each_policy_takes_and_copies():
    arena = made("linear", sum_used=20_000, sum_internal=80_000, sum_free=0, peak_taken=1000)
    growing = made("grow", users=2, chunk=1, sum_used=20_000, sum_free=80_000, copied=45_000, peak_taken=1250)
    pages = made(
        "paged", users=2, sum_used=20_000, sum_internal=1000, sum_free=79_000, peak_taken=400, steps=100
    )
    found = {"linear(2)": arena, "grow": growing, "paged": pages}
    requests, *each = describe_results(found, bytes_per_token=10**6).split("\n\n")
    assert requests == (
        "2 users send 50 requests, the next one when the last one is answered. It takes 5 s under each policy."
    )
    assert each == [
        "linear(2) takes 1 000 slots (1.00 GB) from the start to the end, 500 for each user; on average 200 of them "
        "(20.0 %) hold a token. It copies nothing. No request waits.",
        "grow takes at most 1 250 slots (1.25 GB), 1.25 times as many as the regions, with both pieces while one is copied, and 200 on "
        "average. It copies 45 000 tokens into longer pieces, 150 for each token made (150.0 MB). It grows a token at "
        "a time, as torch.cat does. No request waits.",
        "paged takes at most 400 slots (400.0 MB), 0.40 times as many as the regions, and 210 on average. It copies nothing. What a "
        "request holds lies in pages of 16 tokens, not in one piece. No request waits.",
    ]


def test_users_who_had_to_wait_are_told_of():
    growing = struck("grow", users=1, copied=300, dropped=2, preempt=4, steps=101, sum_free=51_000)
    pages = made("paged", users=1)
    text = describe_results({"grow": growing, "paged": pages})
    assert text.startswith("One user sends 50 requests,")
    assert (
        "Left out are 2 requests longer than 500 tokens. It takes 5.05 s under grow, 5 s under paged." in text
    )
    assert (
        "9 requests do not fit at first. Running requests give up their slots to others, and wait again, 4 times"
        in text
    )
    assert "times as many" not in text
    assert "torch.cat" not in text
    assert text.count("No request waits.") == 1


def test_an_arena_alone_is_not_compared():
    text = describe_results({"linear(2)": made("linear")})
    assert text.startswith("linear(2) reserves")
    assert "\n\n" not in text


def test_results_of_different_workloads_are_each_given_their_own():
    text = describe_results(
        {"exact": made(), "paged": made("paged", requests=60, done=55, capacity=500, sum_free=0)}
    )
    assert "exact finishes 50 of 50 requests (100 %) in 1 000 slots in 5 s." in text
    assert "paged finishes 55 of 60 requests (91.7 %) in 500 slots in 5 s." in text
    assert "times as many" not in text
    assert "Pages do not help" not in text


def test_ten_policies_are_not_one_endless_sentence():
    many = {f"p{number}": struck(first_fail_frag=number) for number in range(1, 11)}
    assert "and 5 more" in sentence(describe_results(many), "not in one piece")


# In short, of any number of policies.


def n_words(text):
    """Count words; "12 736" and "38.3 %" are one each."""
    return len(keep_together(text).replace("\n\n", " ").split(" "))


@given(
    st.lists(st.sampled_from(POLICIES), min_size=1, max_size=8, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: results(name) for name in names})
    )
)
def test_in_short_it_is_two_paragraphs_of_what_happened_with_the_worst_moment_in_it(given_results):
    text = explain_results(given_results)
    assert text.count("\n\n") <= 1
    assert n_words(text) <= 130
    queued = {name: one for name, one in given_results.items() if one.policy != "linear"}
    contiguous = [one for name, one in queued.items() if name != "paged"]
    moments_of = [one.worst for one in contiguous if one.worst is not None]
    assert ("at worst one needs" in text) == bool(moments_of)
    if moments_of:
        most = max(moment.free_share for moment in moments_of)
        said = re.search(
            r"needs ([\d ]+) with ([\d ]+) of ([\d ]+) \(.* holes of at most ([\d ]+),.*it would( not)?", text
        )
        need, free, capacity, hole = (int(number.replace(" ", "")) for number in said.groups()[:4])
        assert (need, free, capacity, hole) in [
            (moment.need, moment.free, moment.capacity, moment.largest_hole)
            for moment in moments_of
            if moment.free_share == most and (moment.pages_needed > moment.n_pages) == bool(said[5])
        ]
    assert ("not in one piece" in text) == any(one.first_fail_frag for one in contiguous)
    happened = {
        "do not fit at first": any(one.first_fail_nofree for one in queued.values()),
        "preempted": any(one.preempt for one in queued.values()),
        "into longer pieces": any(one.copied for one in queued.values()),
        "turned away": any(one.reject for one in queued.values()),
        "No request ever waits": any(not one.blocked_steps + one.preempt for one in queued.values()),
        "No request fails by fragmentation": not any(one.first_fail_frag for one in contiguous),
        "Left out": any(one.dropped for one in queued.values()),
        "reserves": "linear" in given_results,
        "Pages do not help": "paged" in queued,
    }
    for said, possible in happened.items():
        assert possible or said not in text, (said, text)


def test_in_short_the_best_and_the_worst_stand_for_ten():
    between = {f"p{number}": made("exact", done=20 + number) for number in range(7)}
    worst = made("max", done=10, sum_used=15_000, sum_internal=82_500, sum_free=2_500, blocked_steps=9)
    growing = struck("grow", copied=1500, tokens=300, done=21, worst=dataclasses.replace(FORTY, free=399))
    some = {
        **between,
        "exact": struck(done=30),
        "grow": growing,
        "max": worst,
        "paged": made("paged", done=45, preempt=3),
    }
    text = explain_results(some, bytes_per_token=10**6)
    first, second = text.split("\n\n")
    assert first.startswith(
        "In 1 000 slots (1.00 GB) paged finishes 45 of 50 requests (90.0 %) in 5 s, 4.50 times as many as max; the other "
        "9 lie between. Under max 82.5 % of the slots are allocated but never hold a token: each request takes 500, the "
        "most that one may need."
    )
    assert second == (
        "Under exact 7 requests (14.0 %) find enough slots free at first, only not in one piece; at worst one needs 300 "
        "with 400 of 1 000 (40.0 %) free, in holes of at most 200, and in pages of 16 tokens it would fit. Under paged no "
        "request fails by fragmentation, and 100 % of the slots taken hold a token. grow copies 1 500 tokens into longer "
        "pieces, 5 for each token made. Running requests are preempted 3 times under paged."
    )


def test_in_short_pages_that_do_not_help_and_memory_that_is_enough_are_told():
    text = explain_results({"exact": made(), "paged": made("paged")})
    assert "both policies finish 50 of 50 requests (100 %)" in text
    assert "No request ever waits for memory: there is enough of it." in text
    assert "Pages do not help here by what is finished: exact finishes as many." in text
    more = explain_results({"exact": struck(done=46), "paged": made("paged", done=45)})
    assert "exact finishes more." in more


@pytest.mark.parametrize(("needed", "fits"), [(62, "it would fit."), (63, "it would not fit either.")])
def test_in_short_pages_would_fit_where_there_are_as_many(needed, fits):
    text = explain_results({"exact": struck(worst=dataclasses.replace(FORTY, pages_needed=needed))})
    assert f"in pages of 16 tokens {fits}" in text


def test_in_short_the_cause_is_what_takes_most():
    kept = made(done=1, sum_used=30_000, sum_reserved=60_000, sum_free=10_000, first_fail_nofree=3)
    assert "Under exact 60.0 % of the slots are kept for tokens still to come." in explain_results(
        {"exact": kept}
    )
    full = made("paged", done=1, sum_used=100_000, sum_free=0, first_fail_nofree=3)
    text = explain_results({"paged": full})
    assert "Under paged 3 (6.0 %) do not fit at first because too few slots are free." in text
    rounded = made("buddy_exact", sum_used=50_000, sum_internal=25_000, sum_free=25_000, blocked_steps=1)
    assert "rounded up to a power of two" in explain_results({"buddy_exact": rounded})
    assert "holes" not in explain_results({"max": made("max", done=1)})


# The diagnosis of the worst moment.


@given(st.sampled_from(["exact", "grow", "buddy_pow2"]).flatmap(lambda p: st.tuples(st.just(p), moments(p))))
def test_the_diagnosis_is_of_the_slots_of_the_moment(drawn):
    policy, moment = drawn
    if moment is None:
        return
    found = diagnose_worst(struck(policy, worst=moment))
    assert found.cause == "fragmentation"
    assert found.requested == moment.need
    at = found.occupancy
    assert (at.free, at.largest_hole, at.capacity) == (moment.free, moment.largest_hole, moment.capacity)
    assert at.used == sum(held for _, _, held in moment.allocations)
    assert (found.pages_needed, found.n_pages) == (moment.pages_needed, moment.n_pages)
    # Each end that is said to make room does, by a bitmap.
    if policy == "exact":
        taken = [False] * moment.capacity
        for start, length, _ in moment.allocations:
            taken[start : start + length] = [True] * length
        lengths = {start: length for start, length, _ in moment.allocations}
        for start in found.any_of[:3]:
            after = taken.copy()
            after[start : start + lengths[start]] = [False] * lengths[start]
            runs = "".join("x" if one else "." for one in after).split("x")
            assert max(map(len, runs)) >= moment.need


def test_touching_blocks_of_a_buddy_are_two_holes():
    """The halves of no block: a list of holes would take the two for one."""
    moment = dataclasses.replace(
        FORTY,
        need=5,
        free=8,
        largest_hole=4,
        capacity=16,
        holes=((4, 4), (8, 4)),
        allocations=((0, 4, 3), (12, 4, 4)),
    )
    found = diagnose_worst(struck("buddy_exact", worst=moment))
    assert (found.cause, found.length, found.occupancy.largest_hole) == ("fragmentation", 8, 4)
    assert found.any_of == (0, 12)


def test_no_diagnosis_without_a_moment():
    assert diagnose_worst(made()) is None


def test_a_diagnosis_of_forty_percent():
    text = str(diagnose_worst(struck()))
    assert "400 of 1000 slots (40 %) are free" in text
    assert "copies 200 tokens" in text
    assert "54 of 62 pages" in text


@given(st.integers(0, 10**7), st.integers(0, 10**7))
@example(99_999, 100_000)
@example(1, 100_000)
def test_percent_is_nothing_or_all_only_where_it_is(part, whole):
    from gpuarena.simulate._format import percent

    text = percent(part, whole)
    if whole and part < whole:
        assert not text.startswith("100")
        assert (text == "0 %") == (part == 0)
    if "under" not in text and "over" not in text and whole:
        assert math.isclose(float(text.split()[0]), min(100.0, 100 * part / whole), abs_tol=0.0501)
