"""An arena cache for every `generate` of a model, until it is switched off."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from types import MethodType, TracebackType
from typing import Any, Literal

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from gpuarena.errors import ArgumentError, refuse_copy
from gpuarena_transformers._view import Call, reason_against
from gpuarena_transformers.attention import _NAME as ATTENTION
from gpuarena_transformers.attention import _looks_attention_up
from gpuarena_transformers.cache import ArenaCache
from gpuarena_transformers.generation import leaves_no_place

__all__ = ["ArenaSwitch", "disable", "enable"]


def enable(
    model: Any,
    *,
    max_context_length: int | Literal["auto"] = "auto",
    max_batch_size: int = 1,
    memory_fraction: float = 0.9,
    on_full: Literal["raise", "fallback"] = "raise",
    attention: bool = True,
) -> ArenaSwitch:
    """Let every `generate` of a model, also that of a pipeline, use one arena cache.

    >>> enable(model, max_context_length=4096)    # doctest: +SKIP
    >>> model.generate(ids, max_new_tokens=50)    # doctest: +SKIP
    >>> disable(model)                            # doctest: +SKIP

    A call goes on from the tokens that it has in common with the one before, as `generate_from` does. As a context
    manager, ``with enable(model): ...``, it is switched off at the end.

    Parameters
    ----------
    model : PreTrainedModel
    max_context_length : int or "auto"
        Capacity in tokens, prompt and new ones; "auto" is the model's maximum, or what fits if that is less.
    max_batch_size : int
        Rows to begin with: sequences times beams or returned sequences. A call with more gets an arena of that many,
        made after the first is given back, and later calls keep it.
    memory_fraction : float
        Share of the free memory that "auto" may take.
    on_full : {"raise", "fallback"}
        What becomes of a call that needs more tokens than there are: an error, or tensors that grow after one warning,
        as in `ArenaCache`.
    attention : bool
        Switch a model from "sdpa" to the "gpuarena" attention, if it looks its attention up by name. Another
        attention was chosen by somebody, and stays.

    Returns
    -------
    ArenaSwitch

    Raises
    ------
    OutOfMemoryError
        The memory cannot be reserved, which is done here.
    ArgumentError
        The model is enabled, has a `generate` of its own, or no keys and values to hold. Unchanged on error.

    Notes
    -----
    These calls go through as if nothing had been enabled: with a cache of their own, ``use_cache=False``,
    ``cache_implementation=`` or ``custom_generate=``; with code from the hub; those of a draft model; and those that
    come while another is running, in another thread or in a callback.

    What a call with ``return_dict_in_generate=True`` returns has no cache, as the next call would overwrite it.

    A call that may need more tokens than there are raises `CapacityError` before its first forward, unless `on_full`
    says otherwise.

    After ``model.to(...)``, and in a ``torch.autocast`` that changes the dtype of keys, the arena is made anew.

    A copy of the model, or what is unpickled from it, is not enabled, but keeps the attention.
    """
    reason = reason_against(model)
    if reason:
        raise ArgumentError(reason)
    present = model.__dict__.get("generate")
    if isinstance(present, _Generate):
        raise ArgumentError("the model is enabled already; disable(model) first")
    if present is not None and not _is_plain(present, model):
        raise ArgumentError("generate() of this model is replaced on the object itself, by somebody else")
    sizes = {
        "max_context_length": max_context_length,
        "memory_fraction": memory_fraction,
        "on_full": on_full,
    }
    return ArenaSwitch(model, sizes, max_batch_size, attention)


def disable(model: Any) -> None:
    """Undo `enable` and give the memory back; nothing happens to a model that is not enabled."""
    present = getattr(model, "__dict__", {}).get("generate")
    if isinstance(present, _Generate):
        present.switch.disable()


class ArenaSwitch:
    """What `enable` returns: it knows the cache, and switches off. It does not keep the model alive."""

    def __init__(
        self,
        model: Any,
        sizes: dict[str, Any],
        max_batch_size: int,
        attention: bool,
    ) -> None:
        self._model = weakref.ref(model, functools.partial(_forget, weakref.ref(self)))
        self._sizes = sizes  # arguments of `ArenaCache.for_model`
        self._running = threading.Lock()
        self._cache: ArenaCache | None = self._make(max_batch_size)  # raises before anything is changed
        self._attention: list[tuple[Any, Any]] = _switch_attention(model) if attention else []
        self._had = {"generate": model.__dict__["generate"]} if "generate" in model.__dict__ else {}
        model.generate = _Generate(self, model)

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    def __repr__(self) -> str:
        return f"ArenaSwitch({'on' if self.is_on else 'off'}, {self._cache!r})"

    @property
    def is_on(self) -> bool:
        """Whether the model uses the cache."""
        model = self._model()
        present = None if model is None else model.__dict__.get("generate")
        return isinstance(present, _Generate) and present.switch is self

    @property
    def cache(self) -> ArenaCache | None:
        """The cache; None once it is switched off, or the model is gone. Calls of the model overwrite it."""
        return self._cache

    def disable(self) -> None:
        """Leave the model as it was, and give the memory back. A call that is running ends with it."""
        model = self._model()
        if model is not None and self.is_on:
            del model.generate
            model.__dict__.update(self._had)
            for config, implementation in self._attention:
                # Not where somebody has chosen another one since.
                if config._attn_implementation_internal == ATTENTION:
                    config._attn_implementation_internal = implementation
        self._attention = []
        self._cache = None

    def __enter__(self) -> ArenaSwitch:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.disable()

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        if model is None:
            raise ArgumentError("the model that was enabled is gone; call generate() of the copy's class")
        if not self.is_on or _goes_through(args, kwargs) or not self._running.acquire(blocking=False):
            return type(model).generate(model, *args, **kwargs)
        try:
            has_positions = kwargs.get("position_ids") is not None
            call = Call(model, self._cache_for, has_positions=has_positions, allows_foreign=True)
            return _without(call.run(*args, **kwargs), call.cache)
        finally:
            self._running.release()

    def _cache_for(self, n_rows: int) -> ArenaCache | None:
        """Return the cache, another one if it has too few rows or the model was converted; None if switched off."""
        held = self._cache
        if held is None:
            return None
        n_held = held.max_batch_size
        if n_rows <= n_held and self._made_for == _formats(self._model()):
            return held
        self._cache = held = None  # its memory is free before the larger one is asked for
        try:
            self._cache = self._make(max(n_rows, n_held))
        except BaseException:
            self._cache = self._make(n_held)
            raise
        return self._cache

    def _make(self, n_rows: int) -> ArenaCache:
        model = self._model()
        self._made_for = _formats(model)
        return ArenaCache.for_model(model, max_batch_size=n_rows, **self._sizes)


class _Generate:
    """What stands in for the `generate` of a model; it refers to the model only weakly."""

    def __init__(self, switch: ArenaSwitch, model: Any) -> None:
        functools.update_wrapper(self, type(model).generate)
        self.__signature__ = inspect.signature(type(model).generate.__get__(model))
        self.switch = switch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.switch._generate(*args, **kwargs)

    def __reduce__(self) -> Any:
        # In a copy of the model this is the method of its class.
        return getattr, (self.switch._model(), "generate")


def _forget(switch: weakref.ref[ArenaSwitch], model: Any) -> None:
    """Give the memory back when the model is gone, though somebody still holds the switch."""
    held = switch()
    if held is not None:
        held._cache = None
        held._attention = []


def _formats(model: Any) -> int:
    """Return a number that changes when a model is converted or moved, and inside of an autocast: so do its keys."""
    kind = model.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return hash((autocast, *((weight.dtype, weight.device) for weight in model.parameters())))


def _is_plain(present: Any, model: Any) -> bool:
    """Return whether `present` is the method of the class, as a copy of an enabled model has it."""
    return isinstance(present, MethodType) and present.__func__ is type(model).generate


def _goes_through(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call brings or refuses a cache, or drafts for another model."""
    if leaves_no_place(kwargs):
        return True
    config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    return bool(getattr(config, "is_assistant", False) or kwargs.get("is_assistant"))


def _without(outputs: Any, cache: Any) -> Any:
    if not isinstance(outputs, ModelOutput) or cache is None:
        return outputs
    return type(outputs)(**{name: value for name, value in outputs.items() if value is not cache})


def _switch_attention(model: Any) -> list[tuple[Any, Any]]:
    """Switch from "sdpa" to our attention where that works; return the configs that changed, with what they had."""
    modules = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    configs = {id(config): config for module in modules for config in _with_parts(module.config)}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    if model.config._attn_implementation != "sdpa" or not all(
        _looks_attention_up(type(module.config)) for module in modules
    ):
        return []
    model.set_attn_implementation(ATTENTION)
    return [(config, had) for config, had in before if config._attn_implementation_internal != had]


def _with_parts(config: Any) -> list[Any]:
    """Return a config and those inside it."""
    parts = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(inner for part in parts if part is not None for inner in _with_parts(part))]
