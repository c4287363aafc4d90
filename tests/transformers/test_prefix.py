"""Prompts that are prefilled once: every answer is what it would be without a cache to start from."""

from __future__ import annotations

import copy
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, assert_same, generate  # noqa: E402
from gpuarena_transformers import ArenaCache, ArenaLayer, cache_argument, generate_from  # noqa: E402
from gpuarena_transformers.tokens import as_tokens  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from gpuarena import CapacityError, CheckpointError, ShapeError  # noqa: E402
from gpuarena.errors import ArgumentError, ArgumentTypeError, NotCopyableError  # noqa: E402

#: One of each kind: full attention, windows on all layers, windows on some, keys and values of different widths.
KINDS = ["llama", "mistral", "gemma3", "deepseek-v3"]
PREFIX = families.prompt("repeating")["input_ids"]  # 12 tokens, longer than the windows
QUESTIONS = families.prompt()["input_ids"]  # [2, 9]


class Tokenizer:
    """Letters are tokens, and 1 begins a text."""

    def __call__(self, text, add_special_tokens=True):
        if isinstance(text, list):
            return {"input_ids": [self(one, add_special_tokens)["input_ids"] for one in text]}
        ids = [1] * add_special_tokens + [ord(letter) for letter in text]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}


def whole(*parts):
    ids = torch.cat(parts, dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@functools.cache
def fresh(name, *ids, n_new=5, num_beams=1):
    """Return what is generated without a cache to start from."""
    return generate(families.model(name), whole(torch.tensor([ids])) | {"num_beams": num_beams}, n_new=n_new)


def answer(name, cache, prompt, **options):
    return generate(families.model(name), prompt | options, cache, n_new=5)


def rows_of(outputs, row):
    """Return one row of what `generate` returned."""
    one = copy.copy(outputs)
    one.logits = [logits[row : row + 1] for logits in outputs.logits]
    one.sequences = outputs.sequences[row : row + 1]
    return one


def assert_same_new(found, wanted):
    """Compare logits and the new tokens; in front of them one may be padded."""
    n_new = len(wanted.logits)
    found, wanted = copy.copy(found), copy.copy(wanted)
    found.sequences, wanted.sequences = found.sequences[:, -n_new:], wanted.sequences[:, -n_new:]
    assert_same(found, wanted)


# ----------------------------------------------------------------------------------------------------- one after the other


@pytest.mark.parametrize("name", [*KINDS, "lfm2", "bamba"])
def test_continuations_are_what_they_would_be_without_a_cache(name):
    model = families.model(name)
    cache = ArenaCache(model.config, 1, 40)
    system = cache.prefix(model, PREFIX)
    assert (len(system), cache.get_seq_length(), len(cache.transcript)) == (12, 12, 12)
    layer = next(layer for layer in cache.layers if isinstance(layer, ArenaLayer))
    held, address = layer.keys.clone(), layer.keys.data_ptr()
    arenas = list(cache.arenas)
    for number, n_tokens in ((0, 4), (1, 9), (0, 4)):
        question = QUESTIONS[number : number + 1, :n_tokens]
        with system:
            outputs = answer(name, cache, system.inputs(question))
        assert_same(outputs, fresh(name, *PREFIX[0].tolist(), *question[0].tolist()))
        assert cache.get_seq_length() == len(cache.transcript) == 12
        assert layer.keys.data_ptr() == address  # no copy
        assert torch.equal(layer.keys, held)
    assert cache.arenas == arenas


def test_a_prompt_of_pure_states():
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
        initializer_range=0.5,  # with less the recurrence does not show in the logits
        eos_token_id=None,
    )
    model = transformers.MambaForCausalLM(config).eval()
    name = cache_argument(model)
    cache = ArenaCache(config, 1)
    system = cache.prefix(model, PREFIX)
    ids = torch.cat([PREFIX, QUESTIONS[:1]], dim=1)
    with torch.no_grad():
        expected = model(input_ids=ids).logits[:, 12:]
        for prefix in (system, system, system.prefix(model, QUESTIONS[:1, :4])):
            assert torch.equal(prefix.ids, ids[:, : len(prefix)])
            wanted = expected[:, len(prefix) - 12 :]
            with prefix:
                pieces = ids[:, len(prefix) :].split(1, dim=1)
                found = [model(input_ids=one, **{name: cache}).logits for one in pieces]
            torch.testing.assert_close(torch.cat(found, dim=1), wanted, atol=families.TOLERANCE, rtol=0)
    question = system.prefix(model, QUESTIONS[:1, :-1])
    with question:  # what is left is one token, with which the recurrence goes on
        options = {"max_new_tokens": 4, "do_sample": False, name: cache}
        answers = model.generate(input_ids=QUESTIONS[:1, -1:], **options)
    assert (
        answers[0, 1:].tolist()
        == model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)[0, -4:].tolist()
    )
    cache.reset()
    with torch.no_grad():
        model(input_ids=PREFIX, **{name: cache})
    with pytest.raises(ArgumentError, match="states of tokens, of which the ids of 0 are known"):
        cache.prefix(model, [3])


@pytest.mark.parametrize("name", ["gemma3", "bamba"])
def test_prefixes_of_prefixes(name):
    model = families.model(name)
    cache = ArenaCache(model.config, 1, 40)
    system = cache.prefix(model, PREFIX[:, :5])
    examples = system.prefix(model, PREFIX[:, 5:9])
    question = examples.prefix(model, PREFIX[:, 9:])
    assert [len(one) for one in (system, examples, question)] == [5, 9, 12]
    for prefix in (question, question, examples):
        with prefix:
            rest = torch.cat([PREFIX[:, len(prefix) :], QUESTIONS[:1, :3]], dim=1)
            outputs = answer(name, cache, prefix.inputs(rest))
        assert_same(outputs, fresh(name, *PREFIX[0].tolist(), *QUESTIONS[0, :3].tolist()))
    # Going back to a shorter one takes the tokens of the longer one away.
    assert not question.is_live
    assert repr(system) == "Prefix(5 tokens of 1 rows)"
    assert repr(question) == "Prefix(3 tokens behind 9, of 1 rows, stale)"
    assert repr(examples) == "Prefix(4 tokens behind 5, of 1 rows)"
    with pytest.raises(CheckpointError, match="the prefix of 12 tokens is stale"):
        question.__enter__()
    assert cache.get_seq_length() == 9
    with examples.scope() as same:
        assert same is examples
    other = system.prefix(model, QUESTIONS[:1])
    assert not examples.is_live
    with other:
        outputs = answer(name, cache, other.inputs([7]))
    assert_same(outputs, fresh(name, *PREFIX[0, :5].tolist(), *QUESTIONS[0].tolist(), 7))


def test_texts():
    model = families.model("llama")
    cache = ArenaCache(model.config, 1, 64)
    tokenizer = Tokenizer()
    system = cache.prefix(model, "Answer.", tokenizer)
    assert system.ids.tolist() == [[1, *map(ord, "Answer.")]]
    examples = system.prefix(model, " A", tokenizer)  # what begins a text is not in the middle of one
    assert examples.ids.tolist() == [[1, *map(ord, "Answer. A")]]
    inputs = examples.inputs("why?", tokenizer)
    assert inputs["input_ids"].tolist() == [[1, *map(ord, "Answer. Awhy?")]]
    assert inputs["attention_mask"].tolist() == [[1] * 14]
    with examples:
        outputs = answer("llama", cache, inputs)
    assert_same(outputs, fresh("llama", 1, *map(ord, "Answer. Awhy?")))
    with pytest.raises(ArgumentError, match="needs a tokenizer"):
        cache.prefix(model, "text")


@pytest.mark.parametrize("name", KINDS[:3])
@pytest.mark.parametrize("chunk_size", [1, 5, 100])
def test_a_prefix_in_chunks_and_with_padding(name, chunk_size):
    model = families.model(name)
    prompt = families.prompt("padded")
    cache = ArenaCache(model.config, 2, 40)
    system = cache.prefix(model, prompt, chunk_size=chunk_size)
    assert system.ids.shape == (2, 9)
    assert torch.equal(system.mask, prompt["attention_mask"] == 1)
    with system:
        inputs = system.inputs([[5, 6, 7], [8, 9, 10]])
        outputs = answer(name, cache, inputs)
    assert_same(outputs, generate(model, inputs, n_new=5))
    assert torch.equal(inputs["attention_mask"][:, :9], prompt["attention_mask"])


def test_beams_on_a_prefix():
    """The prompt is prefilled once, and then repeated in place."""
    model = families.model("gemma3")
    cache = ArenaCache(model.config, 3, 40)
    system = cache.prefix(model, PREFIX)
    for _ in range(2):
        with system:
            cache.batch_repeat_interleave(3)
            outputs = answer("gemma3", cache, system.inputs(QUESTIONS[:1, :4]), num_beams=3)
        assert_same(outputs, fresh("gemma3", *PREFIX[0].tolist(), *QUESTIONS[0, :4].tolist(), num_beams=3))
        assert (cache.batch_size, cache.get_seq_length()) == (1, 12)
        assert torch.equal(cache.transcript.ids, PREFIX)


@pytest.mark.parametrize("mode", ["draft model", "prompt lookup"])
def test_assisted_decoding_takes_the_new_ids_alone(mode):
    model = families.model("llama")
    cache = ArenaCache(model.config, 1, 60)
    system = cache.prefix(model, PREFIX)
    options = families.MODES[mode].arguments("llama")
    options = {key: value for key, value in options.items() if key not in ("input_ids", "attention_mask")}
    with system:
        inputs = system.inputs(QUESTIONS[:1, :4])
        inputs["input_ids"] = inputs["input_ids"][:, len(system) :]
        outputs = answer("llama", cache, inputs, **options)
    assert_same_new(outputs, fresh("llama", *PREFIX[0].tolist(), *QUESTIONS[0, :4].tolist()))
    assert cache.get_seq_length() == 12


def test_an_exception_inside_rolls_back_as_well():
    model = families.model("llama")
    cache = ArenaCache(model.config, 1, 20)
    system = cache.prefix(model, PREFIX)
    with pytest.raises(CapacityError), system:
        generate(model, system.inputs([3]), cache, n_new=20)
    assert cache.get_seq_length() == 12
    with pytest.raises(ZeroDivisionError), system:
        cache.reset() or 1 / 0  # so that going back is not possible
    with pytest.raises(CheckpointError, match="stale"), system:
        pass


# --------------------------------------------------------------------------------------------------------------- stale ones


def test_a_prefix_whose_tokens_were_cut_is_stale():
    model = families.model("llama")
    cache = ArenaCache(model.config, 4, 40)
    for spoil in (
        lambda start: cache.truncate(11),
        lambda start: cache.crop(-1),
        lambda start: cache.reset(),
        cache.rollback,
        lambda start: (cache.truncate(11), cache.update(*[torch.zeros(1, 2, 1, 16)] * 2, 0)),
    ):
        cache.reset()
        start = cache.checkpoint()
        system = cache.prefix(model, PREFIX)
        assert system.is_live
        spoil(start)
        assert not system.is_live
        length = cache.get_seq_length()
        for use in (
            system.__enter__,
            system.restore,
            functools.partial(system.prefix, model, [3]),
            system.branches(2).__enter__,
        ):
            with pytest.raises(CheckpointError, match="the prefix of 12 tokens is stale"):
                use()
        assert cache.get_seq_length() == length
    cache.reset()
    system = cache.prefix(model, families.prompt())
    cache.reorder_cache(torch.tensor([1, 0]))
    assert not system.is_live


def test_a_prefix_is_not_entered_twice_at_once():
    cache = ArenaCache(families.config("llama"), 1, 40)
    system = cache.prefix(families.model("llama"), PREFIX)
    with system:
        with pytest.raises(CheckpointError, match="entered already"):
            system.__enter__()
        cache.update(*[torch.zeros(1, 2, 1, 16)] * 2, 0)
    with system:
        pass
    for make in (copy.copy, copy.deepcopy):
        with pytest.raises(NotCopyableError):
            make(system)


def test_a_prefill_that_fails_has_changed_nothing():
    model = families.model("gemma3")
    cache = ArenaCache(model.config, 1, 16)
    system = cache.prefix(model, PREFIX)
    held = [layer.keys.clone() for layer in cache.layers]
    with pytest.raises(
        CapacityError, match="prefix: 12 of 16 tokens used, 5 more asked, 1 too many"
    ) as caught:
        cache.prefix(model, QUESTIONS[:1, :5])
    error = caught.value
    assert (error.used, error.requested, error.capacity, error.missing) == (12, 5, 16, 1)

    class Broken:
        config, device = model.config, model.device

        def __init__(self):
            self.n_calls = 0

        def parameters(self):
            return model.parameters()

        def __getattr__(self, name):
            return getattr(model, name)  # what tells of its weights

        def forward(self, *args, **kwargs):
            raise AssertionError

        def __call__(self, **options):
            self.n_calls += 1
            if self.n_calls == 2:
                cache.update(*[torch.zeros(1, 2, 1, 16)] * 2, 0)  # half of a step
                raise KeyboardInterrupt
            return model(**options)

    for target in (cache, ArenaCache(model.config, 1, 16)):
        cache = target
        n_before = target.get_seq_length()
        target.transcript.bind(broken := Broken())
        with pytest.raises(KeyboardInterrupt):
            target.prefix(broken, [3, 4, 5], chunk_size=1)
        assert [layer.get_seq_length() for layer in target.layers] == [n_before] * 3
        assert len(target.transcript) == n_before
    assert system.is_live
    for layer, keys in zip(system.cache.layers, held, strict=True):
        assert torch.equal(layer.keys, keys)


def test_what_is_refused():
    model = families.model("llama")
    cache = ArenaCache(model.config, 2, 40)
    for wrong in ([], torch.empty(0, dtype=torch.long)):
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            cache.prefix(model, wrong)
    for wrong in (3.5, [0.5], None, torch.zeros(1, 1, 1), {"ids": [3]}, [True], [["a"]]):
        with pytest.raises(ArgumentTypeError):
            cache.prefix(model, wrong)
    for wrong in (0, 1.5):
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            cache.prefix(model, [3], chunk_size=wrong)
    with pytest.raises(ShapeError, match=r"attention_mask is \[2, 2\]"):
        cache.prefix(
            model, {"input_ids": torch.ones(1, 2, dtype=torch.long), "attention_mask": torch.ones(2, 2)}
        )
    with pytest.raises(ShapeError, match="3 rows given"):
        cache.prefix(model, [[3], [4], [5]])
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        model(input_ids=PREFIX, **{CACHE: cache})
    with pytest.raises(ArgumentError, match="holds 12 tokens, of which the ids of 0 are known"):
        cache.prefix(model, [3])
    cache.reset()
    system = cache.prefix(model, families.prompt())
    with pytest.raises(ShapeError, match="3 rows are given, 2 are wanted"):
        system.prefix(model, [[3], [4], [5]])
    with pytest.raises(ShapeError, match="3 rows are given, 2 are wanted"):
        system.inputs([[3], [4], [5]])
    assert system.inputs([7])["input_ids"][:, 9].tolist() == [7, 7]  # one for all
    other = families.model("qwen2")
    with pytest.raises(ArgumentError, match="another model"):
        system.prefix(other, [3])


def test_a_conversation_is_not_taken_for_the_beginning_of_a_prefix():
    model = families.model("llama")
    cache = ArenaCache(model.config, 1, 60)
    chat = generate_from(model, cache, PREFIX, max_new_tokens=3)
    with pytest.raises(ArgumentError, match=r"holds 14 tokens, 14 of them a conversation.*reset\(\) first"):
        cache.prefix(model, [3, 4])
    assert (cache.get_seq_length(), len(cache.transcript)) == (14, 14)
    cache.transcript.note(cache.transcript.ids, cache.transcript.mask)
    whole_chat = cache.prefix(model, [3, 4])
    assert torch.equal(whole_chat.ids[:, :14], chat[:, :14])
    assert repr(whole_chat) == "Prefix(2 tokens behind 14, of 1 rows)"
    cache.reset()
    system = cache.prefix(model, PREFIX)
    with system:
        generate_from(model, cache, system.inputs([7, 8]), max_new_tokens=3)
        with pytest.raises(ArgumentError, match=r"holds 16 tokens, 4 of them a conversation"):
            cache.prefix(model, [3, 4])
        assert len(system.prefix(model, [3, 4])) == 14


@pytest.mark.parametrize("block", ["prefix", "branches"])
def test_a_conversation_that_would_drop_an_open_prefix_is_refused(block):
    model = families.model("llama")
    cache = ArenaCache(model.config, 2, 60)
    system = cache.prefix(model, PREFIX)
    options = {"max_new_tokens": 3, "do_sample": False}
    right = whole(PREFIX, QUESTIONS[:1])
    wanted = model.generate(**right, **options)
    with system if block == "prefix" else system.branches(1):
        for wrong, n_same in ((torch.tensor([[99, 98]]), 0), (PREFIX[:, :5], 4), (PREFIX, 11)):
            with pytest.raises(CheckpointError, match=f"goes on from {n_same} of those that the cache holds"):
                generate_from(model, cache, wrong, **options)
            assert (cache.get_seq_length(), system.is_live) == (12, True)
        with pytest.raises(CheckpointError, match="generate_from starts over here"):
            generate_from(model, cache, right, output_attentions=True, **options)
        assert torch.equal(generate_from(model, cache, right, **options), wanted)
    with system:
        assert torch.equal(answer("llama", cache, system.inputs(QUESTIONS[:1])).sequences[:, :24], wanted)
    generate_from(model, cache, QUESTIONS[:1], **options)  # nothing is open any more
    assert not system.is_live


def test_rows_that_would_drop_an_open_prefix_are_refused():
    model = families.model("llama")
    cache = ArenaCache(model.config, 2, 60)
    system = cache.prefix(model, QUESTIONS)
    with system:
        with pytest.raises(CheckpointError, match="or keeps other rows"):
            generate_from(model, cache, whole(QUESTIONS[1:], PREFIX), max_new_tokens=2)
        generate_from(model, cache, whole(QUESTIONS, PREFIX.expand(2, -1)), max_new_tokens=2)
    assert system.is_live


# ------------------------------------------------------------------------------------------------------------- side by side


@pytest.mark.parametrize("of", ["prefix", "cache"])
@pytest.mark.parametrize("name", KINDS)
def test_branches_are_what_they_would_be_alone(name, of):
    model = families.model(name)
    cache = ArenaCache(model.config, 3, 40)
    system = cache.prefix(model, PREFIX)
    address = cache.layers[0].keys.data_ptr()
    ends = [QUESTIONS[0, :4], QUESTIONS[1, :4], QUESTIONS[1, 4:8]]
    for _ in range(2):
        with system.branches(3) if of == "prefix" else cache.branches(3) as branches:
            assert len(branches) == cache.batch_size == 3
            outputs = answer(name, cache, branches.inputs(ends))
        for number, end in enumerate(ends):
            assert_same(rows_of(outputs, number), fresh(name, *PREFIX[0].tolist(), *end.tolist()))
        assert (cache.batch_size, cache.get_seq_length()) == (1, 12)
        assert cache.layers[0].keys.data_ptr() == address
        assert torch.equal(cache.transcript.ids, PREFIX)
        assert system.is_live


@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek-v3"])
def test_branches_of_different_lengths(name):
    model = families.model(name)
    cache = ArenaCache(model.config, 3, 40)
    system = cache.prefix(model, PREFIX)
    ends = [QUESTIONS[0, :2], QUESTIONS[1], QUESTIONS[1, 4:8]]
    with system.branches(3) as branches:
        inputs = branches.inputs(ends)
        assert inputs["attention_mask"].sum(1).tolist() == [14, 21, 16]
        outputs = answer(name, cache, inputs)
    for number, end in enumerate(ends):
        assert_same_new(rows_of(outputs, number), fresh(name, *PREFIX[0].tolist(), *end.tolist()))


@pytest.mark.parametrize("name", ["gemma3", "bamba"])
def test_branches_of_different_lengths_where_padding_counts(name):
    model = families.model(name)
    cache = ArenaCache(model.config, 2, 40)
    system = cache.prefix(model, PREFIX)
    with system.branches(2) as branches:
        with pytest.raises(ArgumentError, match="windows and recurrent states"):
            branches.inputs([[3, 4], [5]])
        outputs = answer(name, cache, branches.inputs([[3, 4], [5, 6]]))
    for row, end in enumerate(([3, 4], [5, 6])):
        assert_same(rows_of(outputs, row), fresh(name, *PREFIX[0].tolist(), *end))


@pytest.mark.parametrize("name", ["gemma3", "llama", "bamba"])
def test_one_branch_is_kept(name):
    model = families.model(name)
    cache = ArenaCache(model.config, 3, 40)
    system = cache.prefix(model, PREFIX)
    with system.branches(3) as branches:
        outputs = answer(name, cache, branches.inputs([[3, 4], [5, 6], [7, 8]]))
        for wrong, error in ((3, ArgumentError), (-1, ArgumentError), (1.0, ArgumentTypeError)):
            with pytest.raises(error):
                branches.keep(wrong)
        branches.keep(2)
        with pytest.raises(CheckpointError, match="not open"):
            branches.keep(0)
    assert (cache.batch_size, cache.get_seq_length()) == (1, 12 + 2 + 4)
    more = torch.cat([outputs.sequences[2:], QUESTIONS[:1, :3]], dim=1)
    assert_same(answer(name, cache, whole(more)), fresh(name, *more[0].tolist()))
    if name != "bamba":
        assert system.is_live
    with system:  # the prompt is still there
        assert_same(answer(name, cache, system.inputs([9])), fresh(name, *PREFIX[0].tolist(), 9))


def test_what_branches_refuse():
    model = families.model("llama")
    cache = ArenaCache(model.config, 3, 40)
    with pytest.raises(ShapeError, match="holds 0 tokens of 0 rows"):
        cache.branches(2).__enter__()
    with pytest.raises(
        ShapeError, match=r"branches\(4\): the cache was made for 3 rows.*max_batch_size of at least 4"
    ):
        cache.branches(4)
    for wrong in (0, 1.5, "2"):
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            cache.branches(wrong)
    system = cache.prefix(model, PREFIX)
    branches = system.branches(2)
    with pytest.raises(CheckpointError, match="not open"):
        branches.keep(0)
    with branches:
        with pytest.raises(ShapeError, match="3 rows are given, 2 are wanted"):
            branches.inputs([[3], [4], [5]])
        with pytest.raises(ShapeError, match="holds 12 tokens of 2 rows"):
            cache.branches(2).__enter__()
        assert branches.inputs("ab", Tokenizer())["input_ids"][:, 12:].tolist() == [[97, 98]] * 2
        assert branches.inputs(["a", "bc"], Tokenizer())["input_ids"][:, 12:].tolist() == [[0, 97], [98, 99]]
    with pytest.raises(CheckpointError, match="entered before"):
        branches.__enter__()
    with pytest.raises(NotCopyableError):
        copy.copy(branches)
    cache.reset()
    with torch.no_grad():
        model(input_ids=PREFIX, **{CACHE: cache})
    with cache.branches(2) as branches, pytest.raises(ArgumentError, match="ids of 0 are known"):
        branches.inputs([3])
    with pytest.raises(ZeroDivisionError), cache.branches(2):
        raise ZeroDivisionError
    assert cache.batch_size == 1


def test_a_prefix_beyond_the_capacity_of_a_cache_that_may_grow():
    model = families.model("gemma3")
    cache = ArenaCache(model.config, 2, 10, on_full="fallback")
    with pytest.warns(UserWarning, match="the cache is full"):
        system = cache.prefix(model, PREFIX, chunk_size=5)
    with system.branches(2) as branches:
        outputs = answer("gemma3", cache, branches.inputs([[3, 4], [5, 6]]))
    for row, end in enumerate(([3, 4], [5, 6])):
        assert_same(rows_of(outputs, row), fresh("gemma3", *PREFIX[0].tolist(), *end))


# ------------------------------------------------------------------------------------------------------------- any sequence


@settings(max_examples=12)
@given(data=st.data())
def test_a_tree_of_prefixes(data):
    """Whatever was answered before, a prefix that is live gives the logits of a forward without a cache."""
    name = data.draw(st.sampled_from(["gemma3", "llama"]))
    model = families.model(name)
    cache = ArenaCache(model.config, 2, 60)
    ids = st.lists(st.integers(3, 127), min_size=1, max_size=9)
    stack = [cache.prefix(model, data.draw(ids))]
    made = list(stack)
    for _ in range(data.draw(st.integers(1, 5))):
        prefix = data.draw(st.sampled_from(made))
        if not prefix.is_live:
            with pytest.raises(CheckpointError):
                prefix.restore()
            continue
        new = data.draw(ids)
        action = data.draw(st.sampled_from(["extend", "ask", "branch"]))
        if action == "extend" and len(prefix) < 40:
            made.append(prefix.prefix(model, new))
            continue
        with prefix if action == "ask" else prefix.branches(2), torch.no_grad():
            rows = cache.batch_size
            found = model(input_ids=torch.tensor([new] * rows), **{CACHE: cache}).logits
            expected = model(input_ids=torch.cat([prefix.ids, torch.tensor([new])], dim=1)).logits
        torch.testing.assert_close(
            found, expected[:, len(prefix) :].expand(rows, -1, -1), atol=families.TOLERANCE, rtol=0
        )
        assert cache.get_seq_length() == len(prefix)


def test_tokens_in_all_their_forms():
    ones = torch.ones(1, 2, dtype=torch.bool)
    for form in (
        [5, 6],
        [[5, 6]],
        torch.tensor([5, 6]),
        torch.tensor([[5, 6]]),
        (5, 6),
        [torch.tensor([5, 6])],
    ):
        ids, mask = as_tokens(form, None, is_first=True)
        assert (ids.tolist(), ids.dtype) == ([[5, 6]], torch.long)
        assert torch.equal(mask, ones)
    ids, mask = as_tokens([[5, 6], torch.tensor([7])], None, is_first=True)
    assert (ids.tolist(), mask.tolist()) == ([[5, 6], [0, 7]], [[True, True], [False, True]])
    batch = transformers.BatchEncoding({"input_ids": [[5, 6]], "attention_mask": [[0, 1]]})
    ids, mask = as_tokens(batch, None, is_first=True)
    assert (ids.tolist(), mask.tolist()) == ([[5, 6]], [[False, True]])
    assert DynamicCache
