"""What an enemy does to pages and contiguous requests: wrong types, memory of the cache as input, interrupts half-way."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from interrupt_kit import interrupt, interrupted

torch = pytest.importorskip("torch")

from gpuarena import Arena  # noqa: E402
from gpuarena.errors import (  # noqa: E402
    ArenaError,
    ArgumentTypeError,
    CapacityError,
    LayerOrderError,
    SequenceError,
    ShapeError,
)
from gpuarena.kv import ContiguousKVCache, KVSpec, LayerSpec, PagedKVCache  # noqa: E402

# -- what the tests need ------------------------------------------------------------------------------------------


def arena_of(backend: str = "torch") -> Arena:
    return Arena("1MiB", backend="torch", device="cpu") if backend == "torch" else Arena("1MiB")


def arena_of_ff() -> Arena:
    """Return an empty arena whose memory is NaN in every dtype of floats."""
    arena = arena_of()
    with arena.scope():
        arena.alloc(arena.capacity, "uint8", fill=0xFF)
    return arena


def spec_of(layers: int = 2, heads: int = 2, value_dim: int = 4) -> KVSpec:
    return KVSpec([LayerSpec(heads, 4, value_dim, "float32") for _ in range(layers)])


def ramp(first: int, n: int, rows: int = 1, heads: int = 2, backend: str = "torch") -> Any:
    """Return keys ``[rows, heads, n, 4]`` that say of which token they are."""
    new = torch.arange(first, first + n).float()[None, None, :, None].expand(rows, heads, n, 4).contiguous()
    return new if backend == "torch" else new.numpy()


def noise(n: int, rows: int = 1, heads: int = 2, backend: str = "torch") -> Any:
    new = torch.randn(rows, heads, n, 4)
    return new if backend == "torch" else new.numpy()


def paged(backend: str = "torch", layers: int = 1, **options: Any) -> PagedKVCache:
    options = {"num_pages": 8, "page_size": 4} | options
    return PagedKVCache(arena_of(backend), spec_of(layers), **options)


def one_sequence(n: int = 3) -> tuple[PagedKVCache, Any]:
    cache = paged()
    sequence = cache.sequence()
    sequence.append(0, ramp(0, n), ramp(0, n))
    return cache, sequence


# -- memory of the cache itself as input --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 9])
@pytest.mark.parametrize("backend", ["torch", "host"])
def test_old_keys_and_values_of_a_request_can_be_appended_in_exchange(backend: str, n: int) -> None:
    request = ContiguousKVCache(arena_of(backend), spec_of(1), capacity_tokens=64).request(32)
    keys, values = request.append(0, ramp(0, n, backend=backend), -ramp(0, n, backend=backend))
    keys_before, values_before = np.array(keys.tolist()), np.array(values.tolist())
    request.truncate(0)
    keys, values = request.append(0, values, keys)
    np.testing.assert_array_equal(keys.tolist(), values_before)
    np.testing.assert_array_equal(values.tolist(), keys_before)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("backend", ["torch", "host"])
def test_old_tokens_of_a_request_can_be_appended_where_they_overlap_their_new_place(
    backend: str, heads: int
) -> None:
    request = ContiguousKVCache(arena_of(backend), spec_of(1, heads), capacity_tokens=64).request(32)
    keys, values = request.append(
        0, noise(8, heads=heads, backend=backend), noise(8, heads=heads, backend=backend)
    )
    wanted = np.array(keys.tolist())[:, :, 1:7]
    request.truncate(2)
    keys, _ = request.append(0, keys[:, :, 1:7], values[:, :, 1:7])
    np.testing.assert_array_equal(np.array(keys.tolist())[:, :, 2:], wanted)


@pytest.mark.parametrize("layout", ["per-head", "HND", "NHD"])
@pytest.mark.parametrize("backend", ["torch", "host"])
def test_the_pages_themselves_can_be_appended_in_exchange(backend: str, layout: str) -> None:
    cache = paged(backend, layout=layout)
    sequence = cache.sequence()
    sequence.append(0, ramp(1, 4, backend=backend), -ramp(1, 4, backend=backend))
    sequence.truncate(0)
    views = []
    for side in (cache.keys(0), cache.values(0)):
        page = {"per-head": lambda x: x[:, 0], "HND": lambda x: x[0], "NHD": lambda x: x[0].swapaxes(0, 1)}
        views.append(page[layout](side)[None])  # [1, kv_heads, 4, 4]
    sequence.append(0, views[1], views[0])
    keys, values = sequence.read(0)
    assert keys[0, :, 0].tolist() == [-1, -2, -3, -4]
    assert values[0, :, 0].tolist() == [1, 2, 3, 4]


def test_pages_can_be_appended_shifted_by_one() -> None:
    cache, sequence = one_sequence(8)
    pages = cache.keys(0).flatten(1, 2)[None, :, 0:6], cache.values(0).flatten(1, 2)[None, :, 0:6]
    sequence.truncate(1)
    sequence.append(0, *pages)
    assert sequence.read(0)[0][0, :, 0].tolist() == [0, 0, 1, 2, 3, 4, 5]


# -- tensors that are not strided ---------------------------------------------------------------------------------


def nested() -> Any:
    return torch.nested.nested_tensor([torch.ones(2, 1, 4)])


@pytest.mark.filterwarnings("ignore")  # nested tensors may change, says torch
@pytest.mark.parametrize(
    "new",
    [lambda: noise(1).to_sparse(), lambda: noise(1).to_mkldnn(), nested],
    ids=["sparse", "mkldnn", "nested"],
)
def test_tensors_that_are_not_strided_are_refused(new: Callable[[], Any]) -> None:
    cache, sequence = one_sequence()
    request = ContiguousKVCache(arena_of(), spec_of(1), capacity_tokens=64).request(32)
    for call in (
        lambda: sequence.append(0, new(), new()),
        lambda: request.append(0, new(), new()),
        lambda: request.append(0, noise(1), new()),
        lambda: cache.attend(0, new(), [sequence]),
        lambda: cache.flex_attend(0, new(), [sequence]),
    ):
        with pytest.raises(ArenaError):
            call()
    assert (sequence.length, request.length) == (3, 0)


# -- memory that nobody wrote, or that holds NaN of others --------------------------------------------------------


def flex(memory: Arena | None = None, **options: Any) -> PagedKVCache:
    spec = KVSpec([LayerSpec(2, 16, 16, "float32")])
    return PagedKVCache(memory or arena_of_ff(), spec, **{"num_pages": 4, "page_size": 4} | options)


def tokens_of(n: int) -> Any:
    return torch.randn(1, 2, n, 16)


@pytest.mark.filterwarnings("ignore")  # it is slow uncompiled, says torch
@pytest.mark.parametrize("layout", ["per-head", "NHD"])
def test_flex_attend_does_not_show_what_lay_in_the_memory(layout: str) -> None:
    cache = flex(layout=layout)
    sequence = cache.sequence()
    sequence.append(0, tokens_of(5), tokens_of(5))
    q = torch.randn(1, 2, 1, 16)
    torch.testing.assert_close(cache.flex_attend(0, q, [sequence]), cache.attend(0, q, [sequence]))
    fork = sequence.fork()  # it shares the page whose slots nobody wrote
    q = torch.randn(2, 2, 1, 16)
    torch.testing.assert_close(
        cache.flex_attend(0, q, [sequence, fork]), cache.attend(0, q, [sequence, fork])
    )


@pytest.mark.filterwarnings("ignore")
def test_flex_attend_does_not_show_a_nan_of_another_sequence() -> None:
    cache = flex()
    good, bad = cache.sequence(), cache.sequence()
    good.append(0, tokens_of(5), tokens_of(5))
    bad.append(0, tokens_of(3), torch.full((1, 2, 3, 16), float("nan")))
    q = torch.randn(2, 2, 1, 16)
    out = cache.flex_attend(0, q, [good, bad])
    torch.testing.assert_close(out[:1], cache.attend(0, q[:1], [good]))
    assert out[1].isnan().all()


def test_a_compiled_flex_attention_is_given_no_nan_in_the_pages_it_reads() -> None:
    cache = flex()
    sequence = cache.sequence()
    sequence.append(0, tokens_of(5), tokens_of(5))

    def kernel(q: Any, keys: Any, values: Any, **options: Any) -> Any:
        assert torch.isfinite(values[0, :, :8]).all()
        assert values.untyped_storage().data_ptr() == cache.values(0).untyped_storage().data_ptr()
        return q

    cache.flex_attend(0, torch.randn(1, 2, 1, 16), [sequence], kernel=kernel)


def test_flex_attend_leaves_alone_what_others_hold_in_a_page() -> None:
    cache = flex(arena_of())
    long = cache.sequence()
    values = tokens_of(7)
    long.append(0, tokens_of(7), values)
    short = long.fork()
    short.truncate(5)
    published = cache.sequence()
    published.append(0, tokens_of(4), values[:, :, :4])
    published.publish(range(4))
    published.truncate(2)
    for sequence in (short, published):
        cache.flex_attend(0, torch.randn(1, 2, 1, 16), [sequence], kernel=lambda q, *_, **__: q)
    torch.testing.assert_close(long.read(0)[1], values[0])
    found = cache.match([*range(4), 9])
    torch.testing.assert_close(found.read(0)[1], values[0, :, :4])


# -- steps that are over, or never began --------------------------------------------------------------------------


def test_a_step_that_is_over_takes_nothing_back() -> None:
    cache = paged()
    sequence = cache.sequence()
    with cache.step([sequence], 2) as step:
        step.write(0, noise(2), noise(2))
    sequence.append(0, noise(1), noise(1))
    error = KeyError()
    step.__exit__(KeyError, error, None)
    assert sequence.length == 3


def test_a_step_that_is_over_does_not_unlock_the_next() -> None:
    cache = paged()
    sequence = cache.sequence()
    with cache.step([sequence], 2) as first:
        first.write(0, noise(2), noise(2))
    with cache.step([sequence], 2) as second:
        first.__exit__(None, None, None)
        with pytest.raises(SequenceError, match="step is open"):
            sequence.truncate(0)
        second.write(0, noise(2), noise(2))
    assert sequence.length == 4


def test_a_step_that_was_not_entered_cannot_be_left() -> None:
    cache = paged(num_pages=1)
    sequence = cache.sequence()
    with pytest.raises(SequenceError, match="not entered"):
        cache.step([sequence], 1).__exit__(None, None, None)
    step = cache.step([sequence], 5)
    with pytest.raises(CapacityError):
        step.__enter__()
    with pytest.raises(SequenceError, match="not entered"):
        step.__exit__(None, None, None)
    sequence.append(0, noise(1), noise(1))
    assert sequence.length == 1


# -- devices and bad input ----------------------------------------------------------------------------------------


def test_swap_out_goes_to_the_host_whatever_the_default_device_is() -> None:
    _, sequence = one_sequence()
    with torch.device("meta"):
        sequence.swap_out()
        sequence.swap_in()
    assert sequence.read(0)[0][0, :, 0].tolist() == [0, 1, 2]


def _pages(call: Callable[[PagedKVCache, Any], Any]) -> Callable[[], Any]:
    return lambda: call(*one_sequence())


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        pytest.param(ArgumentTypeError, lambda: PagedKVCache(None, spec_of(), num_pages=4), id="paged arena"),
        pytest.param(ArgumentTypeError, lambda: PagedKVCache(arena_of(), None, num_pages=4), id="paged spec"),
        pytest.param(
            ArgumentTypeError, lambda: PagedKVCache.arena_nbytes(None, num_pages=4), id="paged nbytes of no spec"
        ),
        pytest.param(
            ArgumentTypeError, lambda: ContiguousKVCache(None, spec_of(), capacity_tokens=4), id="contiguous arena"
        ),
        pytest.param(
            ArgumentTypeError, lambda: ContiguousKVCache(arena_of(), None, capacity_tokens=4), id="contiguous spec"
        ),
        pytest.param(
            ArgumentTypeError,
            lambda: ContiguousKVCache.arena_nbytes(None, capacity_tokens=4),
            id="contiguous nbytes of no spec",
        ),
        pytest.param(ShapeError, _pages(lambda c, s: c.block_table([s], width=2**62)), id="width 2**62"),
        pytest.param(ShapeError, _pages(lambda c, s: c.block_table([s], width=2**70)), id="width 2**70"),
        *(
            pytest.param(
                ArgumentTypeError,
                _pages(lambda c, s, name=name, out=out: getattr(c, name)([s], out=out)),
                id=f"{name} into {out!r}",
            )
            for name in ("block_table", "flashinfer_tables")
            for out in (3, "ab", [1], (), torch.zeros(2), torch.zeros(3, 2), np.zeros(2))
        ),
        *(
            pytest.param(
                ArgumentTypeError,
                _pages(lambda c, s, of=of: c.slot_mapping(of(s))),
                id=f"slot_mapping {number}",
            )
            for number, of in enumerate([lambda s: 3, lambda s: None, lambda s: s, lambda s: [s], lambda s: [(s, 1)]])
        ),
        *(
            pytest.param(
                ArgumentTypeError,
                _pages(lambda c, s, name=name, scale=scale: getattr(c, name)(0, noise(1), [s], scale=scale)),
                id=f"{name} scale {scale!r}",
            )
            for name in ("attend", "flex_attend")
            for scale in ("x", "1", True, [1.0], np.ones(2), torch.ones(2))
        ),
    ],
)  # fmt: skip
def test_bad_input_raises_a_typed_error(kind: type[Exception], call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, ArenaError)


def test_tables_and_scales_may_be_of_other_kinds() -> None:
    cache, sequence = one_sequence()
    tables = cache.block_table([sequence])
    assert cache.block_table([sequence], out=list(tables)).block_table is tables.block_table
    for scale in (2, np.float32(2), torch.tensor(2.0), None):
        cache.attend(0, noise(1), [sequence], scale=scale)


# -- interrupts ---------------------------------------------------------------------------------------------------


def two_sequences() -> Any:
    cache = paged(layers=2)
    first = cache.sequence()
    for layer in range(2):
        first.append(layer, ramp(0, 6), ramp(0, 6))
    first.publish(range(6))
    return cache, first, first.fork()


def chain() -> Any:
    """Return sequences whose next tokens copy a page to the one that was copied just before."""
    cache = paged(layers=2, num_pages=3)
    first, second = cache.sequence(), cache.sequence()
    for layer in range(2):
        first.append(layer, ramp(0, 4), ramp(0, 4))
        second.append(layer, ramp(10, 3), ramp(10, 3))
    first.publish(range(4))
    first.truncate(3)
    return cache, first, second, second.fork()


def swapped() -> Any:
    subject = two_sequences()
    subject[1].swap_out()
    return subject


def crowded() -> Any:
    """Return a sequence whose next pages are those of a prompt that nobody uses."""
    cache = paged(layers=2, num_pages=4)
    prompt, other = cache.sequence(), cache.sequence()
    for layer in range(2):
        prompt.append(layer, ramp(0, 8), ramp(0, 8))
        other.append(layer, ramp(0, 3), ramp(0, 3))
    prompt.publish(range(8))
    prompt.free()
    return cache, other


def same_prompts() -> Any:
    cache, other = crowded()
    second = cache.sequence()
    other.free()
    for layer in range(2):
        second.append(layer, ramp(0, 8), ramp(0, 8))
    return cache, second


def pages_state(subject: Any) -> Any:
    """Return what sequences show. All pages must be theirs or to be had, and every handle usable."""
    cache, *sequences = subject
    for sequence in sequences:
        if sequence._step is not None:  # left once more, as the docstring of `Step` says
            with contextlib.suppress(LayerOrderError):
                sequence._step.__exit__(None, None, None)
    for sequence in sequences:
        if sequence._append is not None:  # given up, as its error says
            sequence.truncate(sequence._append.start)
    live = [sequence for sequence in sequences if sequence.is_live]
    held = {page for sequence in live for page in sequence.pages}
    stats = cache.stats
    assert stats.pages_used == len(held)
    states = cache._core.pool._states
    free = [*states._free, *states._cached]
    assert sorted([*free, *held]) == list(range(cache.num_pages))
    for page in held:
        assert states.count(page) == sum(sequence.pages.count(page) for sequence in live)
    assert stats.n_sequences == len(live)
    found = []
    for sequence in live:
        if not sequence.is_swapped_out:
            sequence.checkpoint()
        shown = None if sequence.is_swapped_out else [sequence.read(n)[0][0, :, 0].tolist() for n in range(2)]
        found.append((sequence.length, shown))
    # Every page that nobody holds can be had, whatever the prefixes are that it was published with.
    filler = cache.sequence()
    for layer in range(2):
        if free:
            filler.append(layer, *2 * [ramp(0, len(free) * 4)])
    for sequence in live:
        if sequence.is_swapped_out:
            with pytest.raises(CapacityError):
                sequence.swap_in()
    filler.free()
    for sequence in live:
        if sequence.is_swapped_out:
            sequence.swap_in()
            assert sequence.read(1)[0][0, :, 0].tolist() == list(range(sequence.length))
            sequence.swap_out()
    return len(sequences) - len(live), found


def _append(subject: Any, n: int = 1) -> None:
    sequence = subject[1]
    start = sequence.length
    for layer in range(2):
        sequence.append(layer, ramp(start, n), ramp(start, n))


def _step(subject: Any) -> None:
    cache, first, second = subject[:3]
    with cache.step([first, second], 1) as step:
        for layer in range(2):
            step.write(layer, ramp(6, 1, 2), ramp(6, 1, 2))


def _failed_step(subject: Any) -> None:
    cache, first, second = subject[:3]
    with pytest.raises(LayerOrderError), cache.step([first, second], 3) as step:
        step.write(0, ramp(6, 3, 2), ramp(6, 3, 2))


PAGES: list[Any] = [
    pytest.param(two_sequences, _step, id="step"),
    pytest.param(chain, _step, id="step that copies to what it copied"),
    pytest.param(two_sequences, _failed_step, id="step that fails"),
    pytest.param(two_sequences, _append, id="append"),
    pytest.param(chain, _append, id="append behind a published page"),
    pytest.param(crowded, lambda s: _append(s, 6), id="append to the pages of a prompt"),
    pytest.param(two_sequences, lambda s: s[1].truncate(2), id="truncate"),
    pytest.param(two_sequences, lambda s: s[1].free(), id="free"),
    pytest.param(two_sequences, lambda s: s[1].swap_out(), id="swap_out"),
    pytest.param(
        two_sequences, lambda s: s[1].swap_out(Arena("1MiB", backend="torch", device="cpu")), id="swap_out to an arena"
    ),
    pytest.param(swapped, lambda s: s[1].swap_in(), id="swap_in"),
    pytest.param(two_sequences, lambda s: s[0].reset_prefix_cache(), id="reset_prefix_cache"),
    pytest.param(same_prompts, lambda s: s[1].publish(range(8)), id="publish what is published"),
    pytest.param(chain, lambda s: s[2].publish(range(3)), id="publish nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "call"), PAGES)
def test_an_interrupt_anywhere_leaves_the_pages_before_or_behind_the_call(
    make: Callable[[], Any], call: Callable[[Any], Any]
) -> None:
    assert interrupted(make, call, pages_state) == []


@pytest.mark.parametrize(
    ("make", "call"),
    [
        pytest.param(two_sequences, lambda subject: subject[1].fork(), id="fork"),
        pytest.param(crowded, lambda subject: subject[0].match(range(9)), id="match"),
    ],
)
def test_a_sequence_that_is_lost_to_an_interrupt_is_freed_by_keep(
    make: Callable[[], Any], call: Callable[[Any], Any]
) -> None:
    def state(subject: Any) -> Any:
        subject[0].keep(subject[1])
        return pages_state(subject)

    assert interrupted(make, call, state) == []


def test_a_prompt_is_found_whatever_interrupted_the_append_that_took_its_pages() -> None:
    def state(subject: Any) -> Any:
        pages_state(subject)
        return True

    for at in range(1, 400):
        subject = crowded()
        interrupt(lambda s: _append(s, 6), subject, at)
        found = subject[0].match(range(9))  # what is left of it, in order
        assert found.read(1)[0][0, :, 0].tolist() == list(range(found.length))
        assert state((*subject, found))


def test_a_truncation_that_was_interrupted_leaves_no_checkpoint_of_what_is_gone() -> None:
    for at in range(1, 60):
        _, sequence = one_sequence(3)
        mark = sequence.checkpoint()
        where = interrupt(lambda s: s.truncate(1), sequence, at)
        if sequence.length == 1:
            sequence.append(0, ramp(7, 3), ramp(7, 3))
            with pytest.raises(ArenaError):
                sequence.rollback(mark)
        if not where:
            break


# -- contiguous requests ------------------------------------------------------------------------------------------


def holes(policy: str = "first_fit") -> Any:
    cache = ContiguousKVCache(arena_of(), spec_of(), capacity_tokens=32, policy=policy)
    hole, request, last = cache.request(3), cache.request(12), cache.request(2)
    for layer in range(2):
        request.append(layer, ramp(0, 8), ramp(0, 8))
        last.append(layer, ramp(20, 2), ramp(20, 2))
    hole.free()
    return cache, request, last


def blocks() -> Any:
    cache = ContiguousKVCache(arena_of(), spec_of(), capacity_tokens=32, policy="buddy")
    requests = [cache.request(8) for _ in range(4)]
    for number, request in enumerate(requests):
        for layer in range(2):
            request.append(layer, ramp(8 * number, 8), ramp(8 * number, 8))
    for request in requests[::2]:
        request.free()
    return cache, *requests[1::2]


def slots_state(subject: Any) -> Any:
    cache, *requests = subject
    shown = []
    for request in requests:
        if request.is_live:
            request.truncate(request.length)  # drops a step that is unfinished
    for request in requests:
        shown.append([request.read(layer)[0].tolist() for layer in range(2)] if request.is_live else None)
    taken = cache._slots
    assert cache.occupancy.reserved == sum(taken.length_for(p.max_tokens) for p in cache._pieces.values())
    assert cache.occupancy.used == sum(piece.length for piece in cache._pieces.values())
    assert sorted(cache._pieces) == [start for start, _ in taken.allocations()]
    assert sum(length for _, length in taken.holes()) == taken.free_slots
    assert {p.start for p in cache._pieces.values()} >= {r.start for r in requests if r.is_live}
    sizes = [(request.max_tokens, request.length) for request in requests]
    return shown, sizes, cache.occupancy.reserved


def _two_layers(subject: Any) -> None:
    for layer in range(2):
        subject[1].append(layer, ramp(8, 2), ramp(8, 2))


@pytest.mark.parametrize("policy", ["first_fit", "buddy"])
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda subject: subject[0].request(4), id="request"),
        pytest.param(lambda subject: subject[1].free(), id="free"),
        pytest.param(lambda subject: subject[2].grow(4), id="grow"),
        pytest.param(lambda subject: subject[1].truncate(3), id="truncate"),
        pytest.param(_two_layers, id="append"),
    ],
)
def test_an_interrupt_anywhere_leaves_the_requests_before_or_behind_the_call(
    policy: str, call: Callable[[Any], Any]
) -> None:
    def make() -> Any:
        subject = holes(policy)
        if policy == "buddy":  # so that the last one can grow where it lies
            cache, request, last = subject
            last.free()
            last = cache.request(2)
            for layer in range(2):
                last.append(layer, ramp(20, 2), ramp(20, 2))
            return cache, request, last
        return subject

    assert interrupted(make, call, slots_state) == []


@pytest.mark.parametrize("policy", ["first_fit", "best_fit", "buddy"])
def test_an_interrupted_compaction_shows_the_right_tokens_or_ends_the_request(policy: str) -> None:
    make = blocks if policy == "buddy" else lambda: holes(policy)
    wanted = slots_state(make())[0]
    n_ended = 0
    for at in itertools.count(1):
        subject = make()
        where = interrupt(lambda s: s[0].compact(for_tokens=16), subject, at)
        shown = slots_state(subject)[0]
        assert all(now is None or now == then for now, then in zip(shown, wanted, strict=True))
        assert shown.count(None) <= 1
        for request in subject[1:]:
            if not request.is_live:
                n_ended += 1
                with pytest.raises(SequenceError, match="interrupted"):
                    request.read(0)
        subject[0].compact()
        assert all(
            request.read(1)[0].tolist() == shown[i][1] for i, request in enumerate(subject[1:]) if shown[i]
        )
        if not where:
            break
    assert n_ended > 5


# -- what held up -------------------------------------------------------------------------------------------------


def test_pages_that_are_used_up_are_neither_lost_nor_shared() -> None:
    cache = paged(num_pages=2)
    first = cache.sequence()
    first.append(0, ramp(0, 8), ramp(0, 8))
    second = first.fork()
    first.truncate(7)
    for sequence, n in ((first, 1), (second, 1)):
        with pytest.raises(CapacityError):
            sequence.append(0, ramp(8, n), ramp(8, n))
    assert (first.length, second.length, cache.stats.pages_used) == (7, 8, 2)
    first.free()
    assert second.read(0)[0][0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
