"""`ArenaCache(offload="cpu")`: keys and values in host memory, which layers read through two buffers they share.

Models have three layers or more: with two, each layer would keep a buffer to itself. A device whose copies are late
stands in for CUDA: they happen when somebody waits for them, and not before.
"""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, MODES, N_TOKENS, WINDOW, assert_same, generate  # noqa: E402
from gpuarena_transformers import ArenaCache, _staging  # noqa: E402
from hypothesis import example, given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from gpuarena import Arena, CapacityError  # noqa: E402
from gpuarena.errors import (  # noqa: E402
    ArgumentError,
    AutogradError,
    DeviceMismatchError,
    DTypeError,
    OutOfMemoryError,
    ShapeError,
    StaleRegionError,
)

#: Layers of each model, and what the config needs for them.
LAYERS = {"llama": 4, "mistral": 3, "gemma3": 3}


@functools.cache
def model_of(name):
    if name not in LAYERS:
        return families.model(name)
    torch.manual_seed(len(name))
    return families._build(name, families.config(name, num_hidden_layers=LAYERS[name]))


@functools.cache
def reference(name, mode):
    return generate(model_of(name), MODES[mode].arguments(name))


class LateCopies(_staging.Copies):
    """Copies that are done when somebody waits for them, as late as a stream of copies may be."""

    def __init__(self):
        self.queue = []
        self.n_done = 0

    def copy(self, source, target, n_rows, start, stop):
        self.queue.append((source, target, n_rows, start, stop))
        return self.n_done + len(self.queue)

    def wait(self, event):
        while self.n_done < event:
            self.n_done += 1
            super().copy(*self.queue.pop(0))

    def settle(self):
        self.wait(self.n_done + len(self.queue))


@pytest.fixture(params=["at once", "late"])
def copies(request, monkeypatch):
    """Run the test with both kinds of copies."""
    if request.param == "late":
        monkeypatch.setattr(_staging, "copies_for", lambda device: LateCopies())
    return request.param


# ------------------------------------------------------------------------------------------------------------- generate


@pytest.mark.parametrize("mode", ["greedy", "beam", "draft model", "left padding, prefill in chunks"])
@pytest.mark.parametrize("name", LAYERS)
def test_logits_are_those_of_a_dynamic_cache(name, mode, copies):
    cache = ArenaCache(model_of(name).config, MODES[mode].rows, N_TOKENS, offload="cpu")
    arguments = MODES[mode].arguments("gemma3" if mode == "draft model" and name == "gemma3" else name)
    assert_same(generate(model_of(name), arguments, cache), reference(name, mode))
    assert cache.offload_to == "cpu"


@pytest.mark.parametrize("name", ["gemma4", "gemma4-shared", "deepseek-v3", "deepseek-v3.2", "bamba"])
def test_layers_that_hold_something_else(name, copies):
    """Keys of several widths, keys that later layers read, indexers and states."""
    model = families.model(name)
    for make in (
        lambda: ArenaCache(model.config, 6, N_TOKENS, offload="cpu"),
        lambda: ArenaCache.for_model(model, N_TOKENS, max_batch_size=6, offload="cpu"),
    ):
        try:
            cache = make()
        except ArgumentError as error:
            if hasattr(model.config, "kv_sharing_modes") or "does not tell which" not in str(error):
                raise
            pytest.skip("this transformers does not tell which layers share")
        assert_same(generate(model, MODES["beam"].arguments(name), cache), families.reference(name, "beam"))


def test_layers_that_others_read_stay_on_the_device():
    config = families.config("gemma4-shared")
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None:
        with pytest.raises(ArgumentError, match="does not tell which"):
            ArenaCache(config, 1, 8, offload="cpu")
        return
    cache = ArenaCache(config, 1, N_TOKENS, offload="cpu")
    generate(families.model("gemma4-shared"), families.prompt("one"), cache)
    host = set(map(id, cache.memory.offload.arenas))
    for layer, mode in zip(cache.layers, modes, strict=False):
        if mode != "reuse":
            assert (id(layer._kv.arena) in host) == (mode != "store")


@pytest.mark.parametrize("name", LAYERS)
def test_a_conversation_of_three_turns(name, copies):
    model = model_of(name)
    new_ids = [families.prompt()["input_ids"][:, 2 * turn : 2 * turn + 3] for turn in range(2)]

    def talk(cache):
        outputs = [generate(model, families.prompt(), cache, n_new=5)]
        for new in new_ids:
            ids = torch.cat([outputs[-1].sequences, new], dim=1)
            outputs.append(
                generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, cache, n_new=5)
            )
        return outputs

    found = talk(ArenaCache(model.config, 2, 64, offload="cpu"))
    for outputs, wanted in zip(found, talk(DynamicCache(config=model.config)), strict=True):
        assert_same(outputs, wanted)


@pytest.mark.parametrize("way", ["scope", "rollback", "crop", "copy", "file"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_prompt_is_read_once_and_answered_twice(name, way, copies, tmp_path):
    model = model_of(name)
    prefix = families.prompt("repeating")["input_ids"]  # longer than the windows
    ends = families.prompt()["input_ids"]
    cache = ArenaCache(model.config, 3, 64, offload="cpu")
    with torch.inference_mode():
        model(input_ids=prefix, **{CACHE: cache})
    start = cache.checkpoint()
    cache.save(tmp_path / "prefix")
    for number in (0, 1, 0):
        ids = torch.cat([prefix, ends[number : number + 1, :4]], dim=1)
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if way == "scope":
            prompt["num_beams"] = 3
            with cache.scope():
                cache.batch_repeat_interleave(3)
                found = generate(model, prompt, cache, n_new=4)
        elif way == "copy":
            found = generate(model, prompt, copy.deepcopy(cache), n_new=4)
        elif way == "file":
            other = ArenaCache(model.config, 1, 64, offload="cpu") if number else cache
            other.load(tmp_path / "prefix")
            found = generate(model, prompt, other, n_new=4)
        else:
            found = generate(model, prompt, cache, n_new=4)
            if way == "rollback":
                cache.rollback(start)
            else:
                cache.crop(prefix.shape[1] - cache.get_seq_length())
        assert_same(found, generate(model, prompt, n_new=4))


# ------------------------------------------------------------------------------------- every change, against plain tensors


KINDS = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
BATCH, CAPACITY = 3, 24


def config_of(n_layers):
    return families.config("gemma3", num_hidden_layers=n_layers, layer_types=KINDS[:n_layers])


CONFIG = config_of(4)

CHANGES = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 5)),
    st.tuples(st.just("crop"), st.integers(0, 4)),
    st.tuples(st.just("reorder"), st.permutations(range(BATCH))),
    st.tuples(st.just("repeat"), st.integers(1, 3)),
    st.tuples(st.just("select"), st.integers(0, 2)),
    st.tuples(st.just("checkpoint"), st.none()),
    st.tuples(st.just("rollback"), st.none()),
    st.tuples(st.just("reset"), st.none()),
    st.tuples(st.just("some layers"), st.integers(1, 3)),
)
#: Two buffers hold as many tokens of one layer, of which one was cut and replaced.
CUT_TWICE = [("append", 3), ("crop", 2), ("append", 1), ("crop", 1), ("append", 1), ("append", 1)]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@example(changes=CUT_TWICE, rows=1, n_layers=1)
@given(changes=st.lists(CHANGES, max_size=14), rows=st.integers(1, BATCH), n_layers=st.integers(1, 4))
def test_what_a_layer_returns_is_what_was_appended(late, changes, rows, n_layers):
    staged = _staging.copies_for
    _staging.copies_for = (lambda device: LateCopies()) if late else staged
    try:
        run(changes, rows, n_layers)
    finally:
        _staging.copies_for = staged


def run(changes, rows, n_layers):
    cache = ArenaCache(config_of(n_layers), BATCH, CAPACITY, offload="cpu")
    held = [torch.empty(rows, 2, 0, 16)] * n_layers  # keys; values are their negatives
    count, mark = 0, None

    def append(n_new, n_reached=n_layers):
        nonlocal count
        for layer in range(n_reached):
            n_rows, n_held = held[layer].shape[0], held[layer].shape[2]
            count += 1
            new = count + torch.arange(n_rows * 2 * n_new * 16).view(n_rows, 2, n_new, 16) / 10_000
            keys, values = cache.update(new, -new, layer)
            held[layer] = torch.cat([held[layer], new], dim=2)
            low = max(n_held - WINDOW + 1, 0) if KINDS[layer] == "sliding_attention" else 0
            torch.testing.assert_close(keys, held[layer][:, :, low:], atol=0, rtol=0)
            torch.testing.assert_close(values, -held[layer][:, :, low:], atol=0, rtol=0)

    append(2)
    for what, argument in changes:
        n_rows, length = held[0].shape[0], held[0].shape[2]
        if what == "append" and length + argument <= CAPACITY:
            append(argument)
        elif what == "some layers" and length + 2 <= CAPACITY:  # a step that fails half-way
            append(2, min(argument, n_layers - 1))
            cache.crop(0)
            held = [one[:, :, :length] for one in held]
        elif what == "crop" and argument <= length:
            cache.crop(-argument)
            held = [one[:, :, : length - argument] for one in held]
            mark = None if mark and length - argument < mark[1][0].shape[2] else mark
        elif what == "reorder":
            order = torch.tensor([row for row in argument if row < n_rows])
            cache.reorder_cache(order)
            held, mark = [one[order] for one in held], None
        elif what == "repeat" and n_rows * argument <= BATCH:
            cache.batch_repeat_interleave(argument)
            held = [one.repeat_interleave(argument, 0) for one in held]
            mark = mark if n_rows == 1 else None
        elif what == "select":
            cache.batch_select_indices(torch.tensor([argument % n_rows]))
            held, mark = [one[[argument % n_rows]] for one in held], None
        elif what == "checkpoint":
            mark = cache.checkpoint(), list(held)
        elif what == "rollback" and mark is not None:
            cache.rollback(mark[0])
            held = list(mark[1])
        elif what == "reset":
            cache.reset()
            held, mark = [one[:, :, :0] for one in held], None
    for layer, wanted in enumerate(held):
        if wanted.shape[2]:
            torch.testing.assert_close(cache.layers[layer].keys, wanted, atol=0, rtol=0)
            torch.testing.assert_close(cache.layers[layer].values, -wanted, atol=0, rtol=0)


def test_a_buffer_that_is_read_late_is_not_written_over(copies):
    """New tokens of a prompt are on their way to the host while another layer gets the buffer."""
    cache = ArenaCache(CONFIG, 1, CAPACITY, offload="cpu")
    keys = [torch.randn(1, 2, 9, 16) for _ in range(4)]
    for layer in range(4):  # what a layer does the first time waits for copies
        cache.update(keys[layer], -keys[layer], layer)
    cache.reset()
    for layer in range(4):
        cache.update(keys[layer], -keys[layer], layer)
    for layer in range(4):
        torch.testing.assert_close(cache.layers[layer].keys, keys[layer], atol=0, rtol=0)


def test_what_was_returned_may_be_appended_again(copies):
    cache = ArenaCache(CONFIG, 1, CAPACITY, offload="cpu")
    new = torch.randn(1, 2, 3, 16)
    keys, values = cache.update(new, -new, 0)
    keys, values = cache.update(keys[:, :, 1:], values[:, :, 1:], 0)
    wanted = torch.cat([new, new[:, :, 1:]], dim=2)
    torch.testing.assert_close(keys, wanted, atol=0, rtol=0)
    torch.testing.assert_close(cache.layers[0].values, -wanted, atol=0, rtol=0)


def test_only_what_is_missing_is_brought():
    """The window of a sliding layer, and nothing for a layer that a buffer holds already."""
    copied = []

    class Counting(_staging.Copies):
        def copy(self, source, target, n_rows, start, stop):
            copied.append((source[0].data_ptr() < target[0].data_ptr(), stop - start))
            return super().copy(source, target, n_rows, start, stop)

    cache = ArenaCache(CONFIG, 1, CAPACITY, offload="cpu")
    new = torch.ones(1, 2, 1, 16)
    for layer in range(4):
        cache.update(new.expand(1, 2, 12, 16), new.expand(1, 2, 12, 16), layer)
    (staging,) = cache.memory.offload.stagings.values()
    staging.copies = Counting()
    for _ in range(2):
        copied.clear()
        for layer in range(4):
            cache.update(new, new, layer)
    lengths = sorted(n_tokens for _, n_tokens in copied)
    # Four new tokens to the host; of 13 or, for the next step, 14 tokens all, or the 7 before the new one.
    assert lengths == [1, 1, 1, 1, WINDOW - 1, 13, 13, 14]


# ---------------------------------------------------------------------------------------------------------------- memory


def test_where_the_bytes_are():
    model = model_of("gemma3")
    cache = ArenaCache.for_model(model, 32, max_batch_size=2, offload="cpu")
    layer_nbytes = 2 * 32 * 2 * 2 * 16 * 4  # rows, tokens, keys and values, heads, dim, float32
    host, staging = cache.arenas
    assert (host.name, staging.name) == ("kv-cache in host memory", "kv-cache staging")
    assert host.capacity == cache.stats.host_nbytes == 3 * layer_nbytes + layer_nbytes // 2  # and scratch
    assert staging.capacity == cache.stats.staging_nbytes == 2 * layer_nbytes
    (budget,) = cache.sizing.devices
    assert budget.kv_nbytes == 3 * layer_nbytes
    assert budget.arena_nbytes == host.capacity + staging.capacity
    assert_same(generate(model, families.prompt(), cache), reference("gemma3", "greedy"))
    assert cache.arenas == [host, staging]
    assert cache.arena is host
    assert ArenaCache(model.config, 1, 8).stats.host_nbytes == 0


def test_the_length_that_fits_counts_the_host_and_the_device(monkeypatch):
    from gpuarena_transformers import budget, cache

    free = 100_000
    monkeypatch.setattr(cache, "free_nbytes", lambda device: free)
    made = ArenaCache.for_model(
        model_of("gemma3"), max_batch_size=1, memory_fraction=1.0, offload="cpu", measure_prefill=False
    )
    assert sum(arena.capacity for arena in made.arenas) <= free
    n_tokens = made.max_context_length
    assert n_tokens == free // (5 * 256)  # three layers and two buffers of 256 bytes a token
    with pytest.raises(OutOfMemoryError, match=f"{n_tokens} tokens fit"):
        ArenaCache.for_model(model_of("gemma3"), n_tokens + 1, offload="cpu")
    # Weights on another device: the host holds the keys and values, that device the buffers alone.
    layout, device = made.sizing.layout, torch.device("meta")
    object.__setattr__(layout, "layers", tuple(budget_layer(layer, device) for layer in layout.layers))
    plan = budget.Plan(layout, range(3), 1, lambda device: free, resident=frozenset())
    there, host = plan.sizing(16, "").devices
    assert (there.device, there.kv_nbytes, there.arena_nbytes) == (device, 0, 2 * 16 * 256)
    assert (host.device.type, host.kv_nbytes, host.arena_nbytes) == ("cpu", 3 * 16 * 256, 3 * 16 * 256)


def budget_layer(layer, device):
    import dataclasses

    return dataclasses.replace(layer, device=device)


def test_a_cache_that_is_dropped_frees_its_memory():
    cache = ArenaCache(CONFIG, 1, CAPACITY, offload="cpu")
    cache.update(torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, 16), 0)
    arenas = [weakref.ref(arena) for arena in cache.arenas]
    gc.collect()
    gc.disable()
    try:
        del cache
        assert [arena() for arena in arenas] == [None, None]
    finally:
        gc.enable()


def test_a_larger_layer_that_comes_later_gets_larger_buffers(copies):
    cache = ArenaCache(CONFIG, 1, CAPACITY, offload="cpu")
    keys = [torch.randn(1, 2, 3, dim) for dim in (16, 48, 16)]
    for layer, new in enumerate(keys):
        found = cache.update(new, -new, layer)[0]
        torch.testing.assert_close(found, new, atol=0, rtol=0)
    assert cache.stats.staging_nbytes == 2 * 2 * CAPACITY * 2 * 48 * 4
    for layer, new in enumerate(keys):
        found = cache.update(new, -new, layer)[1]
        torch.testing.assert_close(found, -torch.cat([new, new], dim=2), atol=0, rtol=0)


# ---------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"offload": "disk"}, r"offload is None or \"cpu\", not 'disk'"),
        ({"offload": True}, "not True"),
        ({"config": None, "max_context_length": 8, "offload": "cpu"}, "needs the config"),
        ({"on_full": "fallback", "offload": "cpu"}, "exclude each other"),
        ({"arena": Arena(1 << 16, backend="torch", device="cpu"), "offload": "cpu"}, "give none"),
    ],
    ids=["disk", "true", "no config", "fallback", "arena"],
)
def test_arguments_that_do_not_agree(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        ArenaCache(**{"config": CONFIG} | arguments)


def test_for_model_refuses_what_the_constructor_does():
    with pytest.raises(ArgumentError, match="exclude each other"):
        ArenaCache.for_model(model_of("llama"), 8, offload="cpu", on_full="fallback")


def test_a_layer_that_is_refused_has_changed_nothing(copies):
    cache = ArenaCache(CONFIG, 2, 4, offload="cpu")
    new = torch.randn(2, 2, 3, 16)
    for layer in range(4):
        cache.update(new, -new, layer)
    for wrong, error in [
        (new, CapacityError),
        (new[:1, :, :1], ShapeError),
        (new[:, :, :1].double(), DTypeError),
        (new[:, :, :1].to("meta"), DeviceMismatchError),
        (new[:, :, :1].clone().requires_grad_(), AutogradError),
    ]:
        with pytest.raises(error):
            cache.update(wrong, wrong, 0)
    for layer in range(4):
        assert cache.layers[layer].get_seq_length() == 3
        found = cache.update(new[:, :, :1], -new[:, :, :1], layer)[1]
        torch.testing.assert_close(found, -torch.cat([new, new[:, :, :1]], dim=2), atol=0, rtol=0)


@pytest.mark.parametrize("number", [0, 1], ids=["host", "staging"])
def test_memory_that_somebody_rolled_back_is_not_used(number):
    cache = ArenaCache(CONFIG, 1, CAPACITY, offload="cpu")
    new = torch.ones(1, 2, 1, 16)
    for layer in range(4):
        cache.update(new, new, layer)
    cache.arenas[number].reset()
    with pytest.raises(StaleRegionError):
        cache.update(new, new, 0)
    assert cache.layers[0].get_seq_length() == 1


def test_no_memory_on_the_host_or_the_device(monkeypatch):
    new = torch.ones(1, 2, 1, 16)
    with pytest.raises(OutOfMemoryError):
        ArenaCache(CONFIG, 1, 1 << 50, offload="cpu").update(new, new, 0)
    cache = ArenaCache(CONFIG, 1, CAPACITY, offload="cpu")
    arena = _staging.Arena

    def refuse(*args, **kwargs):
        return arena(1 << 60, backend="torch", device="cpu")

    monkeypatch.setattr(_staging, "Arena", refuse)
    with pytest.raises(OutOfMemoryError):
        cache.update(new, new, 0)
    assert cache.arenas == []
    monkeypatch.undo()
    torch.testing.assert_close(cache.update(new, new, 0)[0], new)


@pytest.mark.parametrize("n_done", range(8))
def test_a_step_that_is_interrupted_is_taken_back(n_done, copies):
    cache = ArenaCache(CONFIG, 1, CAPACITY, offload="cpu")
    new = [torch.randn(1, 2, 3, 16) for _ in range(4)]
    for layer in range(4):
        cache.update(new[layer], -new[layer], layer)
    (staging,) = cache.memory.offload.stagings.values()
    whole, left = staging.copies.copy, [n_done]

    def interrupted(*args):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return whole(*args)

    def step(tokens):
        for layer, token in enumerate(tokens):
            found = cache.update(token, -token, layer)[0]
            held = cache.layers[layer].keys
            torch.testing.assert_close(found, held[:, :, -found.shape[2] :], atol=0, rtol=0)

    staging.copies.copy = interrupted
    with pytest.raises(KeyboardInterrupt):
        step([torch.full((1, 2, 1, 16), 7.0)] * 4)
    staging.copies.copy = whole
    cache.crop(0)
    for _ in range(2):
        step([one[:, :, :1] for one in new])
    for layer in range(4):
        wanted = torch.cat([new[layer], new[layer][:, :, :1], new[layer][:, :, :1]], dim=2)
        torch.testing.assert_close(cache.layers[layer].keys, wanted, atol=0, rtol=0)


def test_the_order_in_which_cuda_is_told_to_copy(monkeypatch):
    """By a stand-in for its streams: a copy begins behind the current stream, and its event lies behind it."""
    log, source, target = [], torch.randn(1, 2, 4, 8), torch.zeros(1, 2, 4, 8)

    class Stream:
        def __init__(self, device=None):
            self.device = device

        def wait_stream(self, other):
            log.append(("copies wait", other, target.any().item()))

        def record_event(self):
            log.append(("event", self, target.any().item()))
            return "event"

        def wait_event(self, event):
            log.append(("current waits", event))

        def synchronize(self):
            log.append(("host waits", self))

        def __enter__(self):
            log.append(("on", self))

        def __exit__(self, *error):
            log.append(("off", self))

    current = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    made = _staging.copies_for(torch.device("cuda", 1))
    event = made.copy((source, source), (target, target), 1, 1, 3)
    made.wait(event)
    made.settle()
    own = made._stream
    assert log == [
        ("copies wait", current, False),
        ("on", own),
        ("event", own, True),
        ("off", own),
        ("current waits", "event"),
        ("host waits", own),
    ]
    assert own.device == torch.device("cuda", 1)
    torch.testing.assert_close(target[:, :, 1:3], source[:, :, 1:3], atol=0, rtol=0)
    assert not target[:, :, [0, 3]].any()
