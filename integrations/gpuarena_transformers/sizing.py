"""What sizing a cache asks a model, its config and its devices."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from gpuarena.errors import ArgumentError, ArgumentTypeError

__all__ = [
    "cache_argument",
    "cache_of_one_token",
    "check_asked",
    "check_model",
    "decoder_config",
    "devices_of",
    "evaluating",
    "free_nbytes",
    "input_device",
    "model_max_length",
]


def decoder_config(config: Any) -> Any:
    """Return the part of a model's config that describes its decoder.

    Raises
    ------
    ArgumentTypeError
        It is no config: often a model, in place of its ``config``.
    """
    if not hasattr(config, "get_text_config"):
        raise ArgumentTypeError(
            f"config must be that of a model, model.config, or None, not {type(config).__name__}"
        )
    return config.get_text_config(decoder=True)


def model_max_length(config: Any) -> int | None:
    """Return the longest context that the config declares, in tokens, or None."""
    text = decoder_config(config)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        length = getattr(text, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return None


def check_asked(max_context_length: Any, memory_fraction: Any) -> None:
    """Raise `ArgumentError` or `ArgumentTypeError` for a text but "auto", or a share not above 0 and at most 1."""
    if isinstance(max_context_length, str) and max_context_length != "auto":
        raise ArgumentError(f'max_context_length is a number of tokens or "auto", not {max_context_length!r}')
    if isinstance(memory_fraction, bool) or not isinstance(memory_fraction, Real):
        raise ArgumentTypeError(f"memory_fraction must be a number, not {type(memory_fraction).__name__}")
    if not 0 < float(memory_fraction) <= 1:
        raise ArgumentError(f"memory_fraction must be above 0 and at most 1, not {memory_fraction}")


def check_model(model: Any, cache_class: type) -> None:
    """Raise `ArgumentTypeError` unless this is a model that a cache may be measured for, and no config."""
    if hasattr(model, "config"):
        return
    kind, name = type(model).__name__, cache_class.__name__
    if hasattr(model, "get_text_config"):
        raise ArgumentTypeError(
            f"for_model takes a model, not its config, a {kind}; {name}(config) is made of that"
        )
    raise ArgumentTypeError(f"for_model takes a model of transformers, not {kind}")


def devices_of(model: Any) -> list[torch.device]:
    """Return the devices that hold weights of a model, other than the meta device."""
    found = dict.fromkeys(parameter.device for parameter in model.parameters())
    return [device for device in found if device.type != "meta"]


def cache_of_one_token(model: Any) -> DynamicCache:
    """Return what a model puts in transformers' own cache for a single token.

    The model may be on the meta device. Its training mode is as it was afterwards.
    """
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=input_device(model))
    with evaluating(model), torch.no_grad():
        model(input_ids=token, use_cache=True, **{cache_argument(model): cache})
    return cache


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model in evaluation mode inside of the block."""
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in in_training:  # not model.train(), since a part of a model may be in another mode
            module.training = True


def input_device(model: Any) -> torch.device:
    """Return where a model wants its token ids.

    With offloaded weights ``model.device`` is "meta", and accelerate's hooks know where the model runs.
    """
    device = torch.device(model.device)
    if device.type != "meta":
        return device
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", [hook]):
            where = getattr(one, "execution_device", None)
            if where is not None:
                return torch.device("cuda", where) if isinstance(where, int) else torch.device(where)
    return device


def cache_argument(model: Any = None) -> str:
    """Return the name of the cache argument of `forward` and `generate`: ``"cache"`` from transformers 5.24 on.

    Before, some models had a name of their own, ``"cache_params"`` (Mamba): give the model to be told.
    """
    import transformers

    if model is not None:
        taken = inspect.signature(model.forward).parameters
        if "cache_params" in taken and not {"cache", "past_key_values"} & taken.keys():
            return "cache_params"
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return "cache" if (major, minor) >= (5, 24) else "past_key_values"


def free_nbytes(device: torch.device) -> int:
    """Return the bytes that are free on a device.

    Raises
    ------
    ArgumentError
        This kind of device does not tell.
    """
    if device.type == "cpu":
        free = [nbytes for nbytes in (_available_nbytes(), _container_nbytes()) if nbytes is not None]
        if free:
            return max(min(free), 0)
    else:
        module: Any = getattr(torch, device.type, None)
        if hasattr(module, "mem_get_info"):
            return int(module.mem_get_info(device)[0])
    raise ArgumentError(f"free memory on {device} is unknown; give max_context_length as a number of tokens")


def _available_nbytes() -> int | None:
    """Return what the system could give without swapping: also what only caches files."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # not Linux
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None  # not a POSIX system


def _container_nbytes(root: str = "/sys/fs/cgroup") -> int | None:
    """Return what is left of the limit of a container, whose processes are killed above it; None without one."""
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = int(Path(root, limit).read_text())  # "max" is no limit, and no number
            taken = int(Path(root, used).read_text())
            stat = Path(root, used).with_name("memory.stat").read_text()
            reclaimable = dict(line.split() for line in stat.splitlines()).get(cached, "0")
            return most - taken + int(reclaimable)
        except (OSError, ValueError):
            continue
    return None
