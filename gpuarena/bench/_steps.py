"""One variant of a decoding step: it is built, checked against another, and then goes on token by token."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter

import torch
from gpuarena_transformers import ArenaStaticCache, attention, cache_argument
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpuarena.bench import _caches, _compiled
from gpuarena.bench._caches import IdealCache, Way
from gpuarena.bench._models import Models
from gpuarena.bench.harness import WrongDataError

__all__ = ["CHECKED", "TOLERANCE", "Steps", "difference", "tolerance"]

#: Largest difference of logits, in units of their standard deviation: rounding alone, in either dtype, of a model of
#: at most 4 layers.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}

#: Steps that are compared before the timed ones: torch.compile runs the first as it is, records a CUDA graph in the
#: second, and replays it in the third.
CHECKED = 3


class Steps:
    """The decoding steps of one variant, each of one token a row, at positions that follow each other.

    Parameters
    ----------
    models : Models
    way : Way
        The cache and how it is used.
    length : int
        Tokens a row that the cache holds at first, random ones.
    capacity : mapping
        Slots of the cache, by rule.
    tokens : list of tensor
        ``[batch, 1]`` each, one a step: as many steps there can be.

    Raises
    ------
    Exception
        Whatever comes of missing memory, a compiler that is not there, or a capture that is refused.
    """

    def __init__(
        self, models: Models, way: Way, length: int, capacity: Mapping[str, int], tokens: list[torch.Tensor]
    ) -> None:
        self.way, self.length, self.tokens = way, length, tokens
        self.figures: dict[str, float] = {}
        self.graphs: dict[str, int] = {}
        self.n_done = 0
        self.cache = _caches.filled(models, way, length, capacity, batch=len(tokens[0]))
        if isinstance(self.cache, ArenaStaticCache):
            self.cache.check_room(len(tokens))  # for all steps to come, so that none asks
        self._device_type = models.device.type
        self._n_layers = int(models.config.num_hidden_layers)
        model, cache, argument = models.by_attention[way.attention], self.cache, cache_argument()

        def step(token: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = model(input_ids=token, use_cache=True, **{argument: cache}).logits
            return logits

        self._call: Callable[[torch.Tensor], torch.Tensor] = step
        self._replay: Callable[[list[torch.Tensor]], torch.Tensor] | None = None
        if way.run_by == "compiler":
            self._call = _compiled.compile_step(step, _compiled.compile_options(models.where))
        elif way.run_by == "graph":
            with self._settings():
                self._replay = _compiled.capture_step(models.where, cache, step, tokens[0])

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        """Have what this variant sets besides the model and the cache."""
        folds = self.way.folds and self._device_type not in attention.FOLD_DEVICE_TYPES
        if folds:
            attention.FOLD_DEVICE_TYPES.add(self._device_type)
        try:
            with torch.no_grad(), _without_cudnn() if self.way.without_cudnn else contextlib.nullcontext():
                yield
        finally:
            if folds:
                attention.FOLD_DEVICE_TYPES.discard(self._device_type)

    def run(self, n: int = 1) -> torch.Tensor:
        """Do the next `n` steps, without waiting for the device; return the logits of the last."""
        tokens = self.tokens[self.n_done : self.n_done + n]
        with self._settings():
            if self._replay is not None:
                logits = self._replay(tokens)
            else:
                for token in tokens:
                    logits = self._call(token)
        self.n_done += len(tokens)
        return logits

    def check(self, wanted: Steps | None, dtype: str) -> None:
        """Do the first steps and compare them with those of another variant; None is compared with nothing.

        Compared are the logits, the position, and what was written into the first and the last layer: keys there
        are turned by their positions.

        Raises
        ------
        WrongDataError
            They differ by more than rounding.
        """
        if isinstance(self.cache, IdealCache) and wanted is not None:
            self.cache.take(wanted.cache, self.length, len(self.tokens))
        compiles = self.way.run_by == "compiler"
        before, began = _compiled.graph_counts() if compiles else (0, 0), perf_counter()
        # Copied at once, since the next replay writes over it.
        self.logits = torch.cat([self.run().to(torch.float32, copy=True) for _ in range(CHECKED)])
        if compiles:
            after = _compiled.graph_counts()
            self.figures["compile_s"] = perf_counter() - began
            self.graphs = _compiled.graph_figures(before, after)
        self.check_position()
        self.written = (
            []
            if isinstance(self.cache, IdealCache)
            else [
                tensor.to(torch.float32, copy=True)
                for tensor in _caches.new_tokens(self.cache, self.length + CHECKED, CHECKED)
            ]
        )
        if wanted is None:
            self.figures["logits_difference"] = 0.0
            return
        off, allowed = difference(self.logits, wanted.logits), tolerance(dtype, self._n_layers)
        self.figures["logits_difference"] = off
        if not off < allowed:
            raise WrongDataError(
                f"at {self.length} tokens the logits are {off:.3g} standard deviations away from those of "
                f"{_caches.REFERENCE!r}; {allowed:.3g} is allowed in {dtype}"
            )
        for one, other in zip(self.written, wanted.written, strict=False):
            off = difference(one, other)
            if not off < allowed:
                raise WrongDataError(
                    f"the keys or values behind {self.length} tokens are {off:.3g} standard deviations away from those "
                    f"of {_caches.REFERENCE!r}; {allowed:.3g} is allowed in {dtype}"
                )

    def check_position(self) -> None:
        """Raise unless the cache, and what it says on the device, is where the steps have led.

        Raises
        ------
        WrongDataError
            It is elsewhere: a step wrote over another, or was not counted.
        """
        found, wanted = [int(self.cache.get_seq_length())], self.length + self.n_done
        if isinstance(self.cache, ArenaStaticCache):
            found.append(self.cache.stats.n_tokens)  # on the host, which a replay has to be told of
        for one in found:
            if one != wanted:
                raise WrongDataError(
                    f"after {self.n_done} steps the cache holds {one} tokens and not {wanted}"
                )


def _without_cudnn() -> contextlib.AbstractContextManager[None]:
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kernels)


def tolerance(dtype: str, layers: int) -> float:
    """Return the largest difference of logits that rounding explains, in their standard deviations.

    Each layer adds its own rounding to that of the others: two kernels of attention in bfloat16 are 0.05 apart after
    4 layers and 0.14 after 28.

    >>> tolerance("bfloat16", 2), round(tolerance("bfloat16", 28), 2)
    (0.15, 0.4)
    """
    return TOLERANCE[dtype] * math.sqrt(max(layers, 4) / 4)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return how far apart two tensors are at most, in standard deviations of the second."""
    return float((one - other).abs().max() / other.std())
