"""Whole calls of `generate` with each cache, timed side by side."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import torch
from gpuarena_transformers import cache_argument
from transformers import CompileConfig, LogitsProcessor, LogitsProcessorList

from gpuarena.bench import _caches, _compiled
from gpuarena.bench._caches import OURS, REFERENCE, VARIANTS, Way
from gpuarena.bench._labels import reason
from gpuarena.bench._models import Models
from gpuarena.bench._steps import difference, tolerance
from gpuarena.bench.harness import Group, Variant, WrongDataError, measure, rows

__all__ = ["COMPILED_ANSWERS", "measure_answers"]

#: What `generate` compiles by itself.
COMPILED_ANSWERS = {
    "StaticCache (exact) + sdpa, compiled": Way("static", "sdpa", run_by="compiler"),
    "ArenaStaticCache (exact) + sdpa, compiled": Way("arena static", "sdpa", run_by="compiler"),
}


class _Given(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped
    """Chooses tokens that are known beforehand, ``[rows, new tokens]``: logits are compared behind equal tokens."""

    def __init__(self, answer: torch.Tensor, n_prompt: int) -> None:
        self.answer, self.n_prompt = answer, n_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Leave one token of each row."""
        position = input_ids.shape[1] - self.n_prompt
        chosen = self.answer[:, position : position + 1]
        return torch.full_like(scores, float("-inf")).scatter_(1, chosen, 0.0)


class _Answers:
    """The answers of one variant, each to the next prompt."""

    def __init__(
        self,
        models: Models,
        way: Way,
        prompts: list[torch.Tensor],
        capacity: Mapping[str, int],
        new_tokens: int,
    ) -> None:
        self.models, self.way, self.prompts, self.new_tokens = models, way, prompts, new_tokens
        self.n_done = 0
        self.graphs: dict[str, int] = {}
        self._make = functools.partial(_caches.make, way.kind, models, len(prompts[0]), capacity[way.rule])
        self._kept = self._make() if way.run_by == "compiler" else None
        self._options: dict[str, Any] = {"disable_compile": True}
        if way.run_by == "compiler":
            config = CompileConfig(**{"mode": None} | _compiled.compile_options(models.where))
            config._compile_all_devices = True  # also on a CPU
            self._options = {"compile_config": config}

    def run(self, **options: Any) -> Any:
        """Answer the next prompt."""
        prompt = self.prompts[self.n_done]
        self.n_done += 1
        cache = self._kept
        if cache is None:
            cache = self._make()
        elif self.n_done > 1:
            cache.reset()
        with torch.no_grad():
            return self.models.by_attention[self.way.attention].generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=self.new_tokens,
                min_new_tokens=self.new_tokens,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
                **{cache_argument(): cache},
                **self._options,
                **options,
            )


def measure_answers(
    models: Models,
    length: int,
    batch: int,
    new_tokens: int,
    *,
    rounds: int,
    compiled: bool = False,
    compile_budget_s: float | None = None,
) -> Group:
    """Time answers of `new_tokens` to prompts of `length` tokens; every round has a prompt of its own.

    Before that all variants read the same answer to the first prompt, and their logits are compared. After
    `compile_budget_s` seconds of compiling no other variant is compiled.

    Raises
    ------
    WrongDataError
        The logits of `ArenaCache` differ from those of the reference by more than rounding.
    """
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, models.config.vocab_size, (1 + rounds, batch, length), generator=generator)
    prompts = list(ids.to(models.device))
    capacity = {"exact": length + new_tokens, "largest": 2 * (length + new_tokens)}
    ways = {name: way for name, way in VARIANTS.items() if way.kind != "ideal"}
    ways |= COMPILED_ANSWERS if compiled else {}
    first: tuple[torch.Tensor, torch.Tensor] | None = None  # the answer and its logits
    compile_s = 0.0
    ready: dict[str, _Answers] = {}
    failed: dict[str, str] = {}
    figures: dict[str, dict[str, float]] = {}
    graphs: dict[str, dict[str, int]] = {}
    try:
        for name in sorted(ways, key=lambda name: name != REFERENCE):
            compiles = ways[name].run_by == "compiler"
            if compiles and compile_budget_s is not None and compile_s >= compile_budget_s:
                failed[name] = "the time for compiling was over"
                continue
            began = time.monotonic()
            try:
                one = _Answers(models, ways[name], prompts, capacity, new_tokens)
                found, figures[name] = _first_answer(one, None if first is None else first[0])
                logits = torch.cat(found.logits).float()
                if first is None:
                    first = found.sequences[:, length:], logits
                figures[name]["logits_difference"] = _compared(logits, first[1], length, models)
            except WrongDataError as error:
                if name == OURS:
                    raise WrongDataError(f"{name!r}: {error}") from None
                failed[name] = reason(error)
            except Exception as error:  # no memory, no compiler: the other variants are worth having
                failed[name] = reason(error)
            else:
                ready[name] = one
                if compiles:
                    graphs[name] = one.graphs
            if compiles:
                compile_s += time.monotonic() - began
        timings = measure(
            {
                name: Variant(functools.partial(_answer, name, ready[name], failed))
                for name in ways
                if name in ready
            },
            rounds=rounds,
            warmup=0,
            synchronize=models.where.synchronize,
        )
    finally:
        ready.clear()
        if compiled:
            _forget(models)
    timings = {name: timing for name, timing in timings.items() if name not in failed}
    reference = OURS if OURS in timings else next(iter(timings), None)
    return {
        "title": f"generate {new_tokens} tokens from {length}, batch {batch}",
        "kind": "generate",
        "n_tokens": length,
        "batch": batch,
        "new_tokens": new_tokens,
        **({"compile_s": compile_s, "graphs": graphs} if compiled else {}),
        "reference": reference,
        "rows": {} if reference is None else rows(timings, reference, figures),
        "not_measured": failed,
    }


def _answer(name: str, one: _Answers, failed: dict[str, str]) -> Any:
    """Answer the next prompt, or nothing after a failure."""
    if name in failed:
        return None
    try:
        return one.run()
    except Exception as error:  # out of memory, say: the other variants go on
        failed[name] = reason(error)
        return None


def _first_answer(one: _Answers, answer: torch.Tensor | None) -> tuple[Any, dict[str, float]]:
    """Answer the first prompt, with the tokens of `answer` if there is one; return what came and what it took."""
    processors = LogitsProcessorList([] if answer is None else [_Given(answer, one.prompts[0].shape[1])])
    if one.way.run_by != "compiler":
        return one.run(logits_processor=processors), {}
    before, began = _compiled.graph_counts(), time.perf_counter()
    found = one.run(logits_processor=processors)
    seconds = time.perf_counter() - began
    one.graphs = _compiled.graph_figures(before, _compiled.graph_counts())
    if one.graphs["n_graphs"] == 0:
        raise RuntimeError("generate compiled nothing")
    return found, {"compile_s": seconds}


def _compared(logits: torch.Tensor, wanted: torch.Tensor, length: int, models: Models) -> float:
    dtype = str(models.dtype).removeprefix("torch.")
    allowed = tolerance(dtype, int(models.config.num_hidden_layers))
    off = difference(logits, wanted)
    if not off < allowed:
        raise WrongDataError(
            f"the logits behind {length} tokens are {off:.3g} standard deviations away from those of {REFERENCE!r}; "
            f"{allowed:.3g} is allowed in {dtype}"
        )
    return off


def _forget(models: Models) -> None:
    """Drop what `generate` compiled, which the models keep."""
    for model in models.by_attention.values():
        vars(model).pop("_compiled_call", None)
    _compiled.forget()
