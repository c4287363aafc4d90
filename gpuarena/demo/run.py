"""The demo: a real model answers through an `ArenaCache`, next to the caches that transformers ships.

`run` streams two answers and measures, in one process and with the same tokens forced into every cache, what
`ArenaCache`, `DynamicCache` and `StaticCache` cost. `render` prints the result.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpuarena.bench.memory import meter_updates
from gpuarena.demo.text import QUESTIONS, handbook
from gpuarena.errors import ArgumentError

__all__ = ["Column", "Report", "run"]

DEFAULT_QUESTION = "What is the capital of France?"
#: Asked one after the other over the shared text.
SHARED_QUESTIONS = tuple(question for question, _ in QUESTIONS[:2])
#: Steps timed of each cache, at each length; the caches take turns within a step.
_N_TIMED = 24
#: Steps whose allocations are counted, apart from the timed ones.
_N_METERED = 4
#: Rounds of the measurements that are cheap enough to repeat.
_N_ROUNDS = 5


@dataclass
class Column:
    """What was measured of one cache; times in seconds, sizes in bytes."""

    name: str
    attention: str
    short_tokens_per_s: float = 0.0
    long_tokens_per_s: float = 0.0
    first_token_s: float = 0.0
    """From a prefilled prefix that is reused, or from nothing where it is not."""
    reserved_nbytes: int = 0
    used_nbytes: int = 0
    peak_nbytes: int = 0
    """Most bytes of keys and values alive at once during a step at the long context."""
    allocated_nbytes_per_token: int = 0
    logits_difference: float = 0.0
    """Largest difference from DynamicCache's logits, over all steps at both lengths."""
    diverging_token: int | None = None
    """First step at which the most likely token is another than DynamicCache's."""


@dataclass
class Report:
    """What the demo found out."""

    model: str
    device: str
    dtype: str
    context: int
    n_short: int
    n_prefix: int
    n_long: int
    bytes_per_token: int
    high_water_tokens: int
    deepcopy_first_token_s: float
    rollback_s: float
    deepcopy_s: float
    columns: list[Column]
    dynamic_same_attention_tokens_per_s: float
    answers: list[tuple[str, str]] = field(default_factory=list)


class _Session:
    """A model and the ways to run it that the demo needs."""

    def __init__(self, model: Any, tokenizer: Any, context: int) -> None:
        from gpuarena_transformers import cache_argument

        self.model = model
        self.tokenizer = tokenizer
        self.context = context
        self.device = model.device
        self._argument = cache_argument()

    def ids(self, question: str, text: str | None = None) -> torch.Tensor:
        """Return the prompt's token ids, ``[1, tokens]``."""
        content = question if text is None else f"{text}\n\nAnswer in one short sentence. {question}"
        if self.tokenizer.chat_template is None:  # a base model: it goes on with the text
            encoded = self.tokenizer(content, return_tensors="pt")
        else:
            encoded = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": content}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
        ids: torch.Tensor = encoded["input_ids"].to(self.device)
        return ids

    def stock(self, name: str) -> Any:
        """Return an empty cache of transformers' own."""
        import transformers

        if name == "StaticCache":
            return transformers.StaticCache(config=self.model.config, max_cache_len=self.context)
        return transformers.DynamicCache(config=self.model.config)

    def use(self, attention: str) -> None:
        """Switch the attention of the model."""
        if self.model.config._attn_implementation != attention:
            self.model.set_attn_implementation(attention)

    def forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Run new tokens through the model; return the last position's logits, ``[vocab]``, in float32."""
        with torch.inference_mode():
            logits = self.model(
                input_ids=ids, use_cache=True, logits_to_keep=1, **{self._argument: cache}
            ).logits
        last: torch.Tensor = logits[0, -1].float()
        return last

    def generate(self, ids: torch.Tensor, cache: Any, max_new_tokens: int, streamer: Any) -> str:
        """Stream a greedy answer; return its text."""
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                streamer=streamer,
                **{self._argument: cache},
            )
        return str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, function: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds that a call took, the device's work included, and what it returned."""
        self.synchronize()
        start = time.perf_counter()
        result = function()
        self.synchronize()
        return time.perf_counter() - start, result


def run(
    loaded: Any,
    question: str = DEFAULT_QUESTION,
    *,
    max_new_tokens: int = 48,
    context: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    streamer: Any = None,
) -> Report:
    """Answer `question`, then two more over a long shared text, and measure the caches.

    Parameters
    ----------
    loaded : gpuarena.demo.weights.LoadedModel
    question : str
    max_new_tokens : int
        Of each answer.
    context : int, optional
        Capacity of the caches in tokens; by default 4096, or the model's maximum if that is less.
    say : callable
        Is told what happens next, in a line.
    streamer : transformers streamer, optional
        Is given the answers' tokens as they come.

    Raises
    ------
    ArgumentError
        The capacity holds not even the question and the answer.
    """
    from gpuarena_transformers import ArenaCache
    from gpuarena_transformers.sizing import model_max_length

    model = loaded.model
    context = min(context or 4096, model_max_length(model.config) or 4096)
    session = _Session(model, loaded.tokenizer, context)
    short = session.ids(question)
    room = max_new_tokens + _N_TIMED + _N_METERED
    if short.shape[1] + room > context:
        raise ArgumentError(
            f"a context of {context} tokens is too small: the question has {short.shape[1]}, "
            f"the answer and the measurement need {room} more"
        )
    columns = [
        Column("ArenaCache", "gpuarena"),
        Column("DynamicCache", "sdpa"),
        Column("StaticCache", "sdpa"),
    ]
    same_attention = Column("DynamicCache", "gpuarena")
    everyone = [*columns, same_attention]

    session.use("gpuarena")
    cache = ArenaCache.for_model(model, context)
    say(question)
    with cache.scope():
        answers = [(question, session.generate(short, cache, max_new_tokens, streamer))]
    forced = _forced_tokens(session, answers[0][1])  # every cache is fed the same, so that they compare
    caches = [
        cache,
        session.stock("DynamicCache"),
        session.stock("StaticCache"),
        session.stock("DynamicCache"),
    ]
    for column, one in zip(everyone, caches, strict=True):
        session.use(column.attention)
        session.forward(short, one)
    for column, samples in zip(everyone, _decode(session, everyone, caches, forced[:_N_TIMED]), strict=True):
        column.short_tokens_per_s = 1 / statistics.median(samples)
    del caches

    text = _fitting_text(session, room)
    first, second = (session.ids(shared, text) for shared in SHARED_QUESTIONS)
    n_prefix = _common_prefix(first, second)
    say(f"reading {n_prefix} tokens of text once")
    session.use("gpuarena")
    cache.reset()
    session.forward(first[:, :n_prefix], cache)
    prefix = cache.checkpoint()
    for shared, ids in zip(SHARED_QUESTIONS, (first, second), strict=True):
        say(shared)
        with cache.scope():
            answers.append((shared, session.generate(ids, cache, max_new_tokens, streamer)))

    say("the same for DynamicCache and StaticCache, which read the text anew")
    stock = [session.stock("DynamicCache"), session.stock("StaticCache")]
    session.use("sdpa")
    for column, one in zip(columns[1:], stock, strict=True):
        column.first_token_s, _ = session.timed(functools.partial(session.forward, second, one))
    reuse, twin = _measure_reuse(session, cache, prefix, stock[0], first[:, :n_prefix], second)
    columns[0].first_token_s = reuse["rollback_first_token_s"]

    caches = [cache, *stock, twin]
    for column, samples in zip(everyone, _decode(session, everyone, caches, forced[:_N_TIMED]), strict=True):
        column.long_tokens_per_s = 1 / statistics.median(samples)
    for column, one in zip(columns, caches, strict=False):
        _measure_memory(session, column, one, forced[_N_TIMED:])
    stats = cache.stats
    columns[0].reserved_nbytes, columns[0].used_nbytes = stats.reserved_nbytes, stats.used_nbytes
    return Report(
        model=loaded.name,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        context=context,
        n_short=short.shape[1],
        n_prefix=n_prefix,
        n_long=second.shape[1],
        bytes_per_token=stats.bytes_per_token,
        high_water_tokens=stats.high_water_tokens,
        deepcopy_first_token_s=reuse["deepcopy_first_token_s"],
        rollback_s=reuse["rollback_s"],
        deepcopy_s=reuse["deepcopy_s"],
        columns=columns,
        dynamic_same_attention_tokens_per_s=same_attention.long_tokens_per_s,
        answers=answers,
    )


def _measure_reuse(
    session: _Session, cache: Any, prefix: Any, read: Any, shared: torch.Tensor, whole: torch.Tensor
) -> tuple[dict[str, float], Any]:
    """Time going back to a prefix that is held, by rollback and by deepcopy, and the first token after it.

    `read` is a DynamicCache that holds all of `whole`. Return the medians and the last deepcopy; it and `cache` then
    hold all of `whole`, too.
    """
    rest = whole[:, shared.shape[1] :]
    prefilled = copy.deepcopy(read)  # cut back, since reading again is what takes the demo's time
    if any(prefilled.is_sliding):  # which cannot be cut back
        prefilled = session.stock("DynamicCache")
        session.use("sdpa")
        session.forward(shared, prefilled)
    else:
        prefilled.crop(-rest.shape[1])
    samples: dict[str, list[float]] = {}
    twin: Any = None

    def note(name: str, back_s: float, first_s: float) -> None:
        samples.setdefault(f"{name}_s", []).append(back_s)
        samples.setdefault(f"{name}_first_token_s", []).append(back_s + first_s)

    for _ in range(_N_ROUNDS):
        session.use("gpuarena")
        back_s, _ = session.timed(functools.partial(cache.rollback, prefix))
        note("rollback", back_s, session.timed(functools.partial(session.forward, rest, cache))[0])
        session.use("sdpa")
        back_s, twin = session.timed(functools.partial(copy.deepcopy, prefilled))
        note("deepcopy", back_s, session.timed(functools.partial(session.forward, rest, twin))[0])
    return {name: statistics.median(values) for name, values in samples.items()}, twin


def _forced_tokens(session: _Session, answer: str) -> list[torch.Tensor]:
    """Return the tokens of an answer, over and over, as many as the measurement takes."""
    ids = session.tokenizer(answer or "word", add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    count = _N_TIMED + _N_METERED
    ids = ids.repeat(count // len(ids) + 1)[:count].to(session.device)
    return list(ids.view(-1, 1, 1))


def _decode(
    session: _Session, columns: Sequence[Column], caches: Sequence[Any], tokens: Sequence[torch.Tensor]
) -> list[list[float]]:
    """Force `tokens` into all caches in turn; return the seconds of each step by cache, and note the logits."""
    samples: list[list[float]] = [[] for _ in caches]
    reference = 1  # DynamicCache
    for number, token in enumerate(tokens):
        logits: list[torch.Tensor] = [torch.empty(0)] * len(caches)
        for turn in range(len(caches)):
            which = (turn + number) % len(caches)
            session.use(columns[which].attention)
            step = functools.partial(session.forward, token, caches[which])
            seconds, logits[which] = session.timed(step)
            samples[which].append(seconds)
        for column, values in zip(columns, logits, strict=True):
            difference = float((values - logits[reference]).abs().max())
            column.logits_difference = max(column.logits_difference, difference)
            if column.diverging_token is None and values.argmax() != logits[reference].argmax():
                column.diverging_token = number
    return [one[2:] for one in samples]  # the first two warm up


def _measure_memory(session: _Session, column: Column, cache: Any, tokens: Sequence[torch.Tensor]) -> None:
    session.use(column.attention)
    with meter_updates(cache) as meter:
        for token in tokens:
            session.forward(token, cache)
    column.allocated_nbytes_per_token = meter.allocated_nbytes // len(tokens)
    column.peak_nbytes = meter.peak_nbytes
    column.reserved_nbytes = sum(
        tensor.untyped_storage().nbytes() for layer in cache.layers for tensor in (layer.keys, layer.values)
    )
    column.used_nbytes = column.reserved_nbytes


def _fitting_text(session: _Session, room: int) -> str:
    """Return the handbook, cut short where the context does not hold it."""
    text: str = handbook()
    while text:
        n_tokens = max(session.ids(shared, text).shape[1] for shared in SHARED_QUESTIONS)
        if n_tokens + room <= session.context:
            return text
        text = text[: len(text) * (session.context - room) // n_tokens - 16] if session.context > room else ""
    raise ArgumentError(f"a context of {session.context} tokens leaves no room for a shared text")


def _common_prefix(one: torch.Tensor, other: torch.Tensor) -> int:
    n = min(one.shape[1], other.shape[1])
    different = (one[0, :n] != other[0, :n]).nonzero()
    return int(different[0]) if len(different) else n - 1
