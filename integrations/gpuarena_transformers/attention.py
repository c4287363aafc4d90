"""``attn_implementation="gpuarena"``: decoding that reads each key and value byte once.

>>> register()
>>> from transformers import AttentionInterface
>>> "gpuarena" in AttentionInterface().valid_keys()
True

In a decode step one query token meets all keys, and with grouped heads several query heads share one
key/value head. Treated as separate heads, they read the same keys once each, or a copy of them made by
``repeat_kv``. Here the group becomes the query axis of scaled dot product attention (SDPA), by a view of the
query and nothing else, in `gpuarena.kv.attention.scaled_dot_product`::

    query  [batch, q_heads, n, key_dim]  ->  [batch, kv_heads, group * n, key_dim]

A few queries are folded alike (assisted decoding verifies that many), for which a mask is repeated. Many queries
with a mask (a prompt in chunks, left padding, a window) are left to torch's own grouping, where transformers'
function would repeat keys and values.

=====================================================  =====================================================
a call with                                            goes to
=====================================================  =====================================================
a soft cap or attention sinks (Gemma 2, GPT-OSS, ...)  `attend_by_scores`, under the conditions [*]_ below;
                                                       else the model's own ``eager_attention_forward``
grouped heads, and one query token, or a mask, or no   the fold above, or torch's grouping, under the
causality                                              conditions below
anything else                                          transformers' ``sdpa_attention_forward``
=====================================================  =====================================================

.. [*] A device type in `FOLD_DEVICE_TYPES`, no training, no dropout, no ``output_attentions``, no
   ``position_bias``, and a mask of four dimensions if any.

transformers tests whether a model supports SDPA for the name "sdpa" only, and some model files compare that
name. What they leave undone for another name is done here: soft caps and sinks; the key selection of sparse
models (DeepSeek-V3.2, GLM-MoE-DSA), which pass the indices on instead of masking; the masks of Gemma 4, which
drops query rows, and of DeepSeek-V4, which appends columns. Refused with `UnsupportedAttentionError`: MiniMax-M3, sparse in blocks, and models that do
not look their attention up by name (BLOOM, MPT, XGLM), which would add a boolean mask to their scores. Models
that choose a class by name (Falcon, GPT-Neo) fail with ``KeyError: 'gpuarena'`` when they are built.

Not guaranteed: that nothing is copied. Eager functions repeat keys and values for each query head. Where keys
and values differ in head dimension, torch's CPU kernel gives way to the general one, which scales a copy of
the keys, and repeats keys and values where the group is not folded. Nor which function a call goes to: the choice
is of speed, and the results differ by rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from gpuarena.errors import ArenaError
from gpuarena.kv.attention import scaled_dot_product

from ._scores import attend_by_scores

__all__ = [
    "FOLD_DEVICE_TYPES",
    "UnsupportedAttentionError",
    "gpuarena_attention_forward",
    "gpuarena_mask",
    "register",
]

_NAME = "gpuarena"

#: Device types (``tensor.device.type``) on which calls go another way than stock SDPA or the model's own eager
#: function. CUDA is not among them, as SDPA packs groups there by itself when it has no mask. Where the fold is
#: faster: ``FOLD_DEVICE_TYPES.add("cuda")``.
FOLD_DEVICE_TYPES: set[str] = {"cpu"}

#: Arguments by which models ask for what SDPA cannot do, and what each is.
_BEYOND_SDPA = {
    "softcap": "a soft cap of the attention scores",  # Gemma 2, VaultGemma, T5Gemma, VideoPrism
    "s_aux": "attention sinks",  # GPT-OSS, MiMo-V2, Granite SWA, DeepSeek-V4, HY-V4, Flint
    "sinks": "attention sinks",  # Inkling 2
}

#: Model types that append columns of zeros and least numbers to the mask, which in a boolean one mean the reverse.
_APPENDS_TO_MASKS = ("deepseek_v4",)


class UnsupportedAttentionError(ArenaError, ValueError):
    """The model needs an attention that neither SDPA nor an eager function of its own can provide.

    Attributes
    ----------
    model : str
        The class that asked: an attention module, or the configuration of a model.
    needs : str
        What it asked for.
    """

    model: str
    needs: str


def gpuarena_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend from `query` to `key` and `value`; the function behind ``attn_implementation="gpuarena"``.

    Parameters
    ----------
    module
        The attention module that calls; its `training`, its `is_causal` and, on the eager path, its sinks are
        read.
    query : [batch, q_heads, n_queries, key_dim]
    key : [batch, kv_heads, n_keys, key_dim]
    value : [batch, kv_heads, n_keys, value_dim]
        `q_heads` is a multiple of `kv_heads`; query head h attends to key/value head
        ``h // (q_heads // kv_heads)``.
    attention_mask : [batch or 1, q_heads or 1, n_queries, n_keys], optional
        Boolean (True attends) or additive, of the dtype of the query. None hides nothing from a single query,
        and the future from several of a causal module.
    dropout, scaling, is_causal
        As for transformers' ``sdpa_attention_forward``; a `scaling` of None is ``key_dim ** -0.5``.
    **kwargs
        What the model passes besides, such as `softcap`, `s_aux`, `sinks`, `indices`, `position_bias`.

    Returns
    -------
    output : [batch, n_queries, q_heads, value_dim]
    weights
        None, or the attention weights where the model's eager function was used.

    Raises
    ------
    UnsupportedAttentionError
        The model passes a soft cap or sinks and its file has no ``eager_attention_forward``; or it passes
        block indices.
    """
    if kwargs.get("block_indices") is not None:
        raise _unsupported(type(module), "keys selected in blocks", "sdpa")
    indices = kwargs.pop("indices", None)
    if indices is not None:
        # The model has applied its selection to the mask only if it is called "eager" or "sdpa".
        attention_mask = _spell_out(attention_mask, module, query, key, is_causal)
        attention_mask = _hide_unselected(attention_mask, indices, n_keys=key.shape[2])
    folds = (
        query.device.type in FOLD_DEVICE_TYPES
        and query.shape[1] > key.shape[1]
        and dropout == 0.0
        and not module.training
        and not _wants_weights(module, kwargs)
        and kwargs.get("position_bias") is None
        and (attention_mask is None or attention_mask.dim() == 4)
    )
    hides_future = (
        attention_mask is None
        and query.shape[2] > 1
        and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    )
    beyond = [name for name in _BEYOND_SDPA if kwargs.get(name) is not None]
    if beyond:
        eager = _own_eager_function(module)
        if eager is None:
            raise _unsupported(type(module), _BEYOND_SDPA[beyond[0]], "eager")
        scale = query.shape[3] ** -0.5 if scaling is None else scaling  # some eager functions require it
        if folds and _is_capped_or_sinks(beyond, kwargs, n_heads=query.shape[1]):
            softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
            output = attend_by_scores(
                query,
                key,
                value,
                attention_mask,
                scale=scale,
                softcap=softcap,
                sinks=sinks,
                is_causal=hides_future,
            )
            return output, None
        mask = _additive(_spell_out(attention_mask, module, query, key, is_causal), query.dtype)
        output, weights = eager(module, query, key, value, mask, dropout=dropout, scaling=scale, **kwargs)
        return output, weights
    if folds and not hides_future:  # stock SDPA needs no copy to hide the future
        output = scaled_dot_product(query, key, value, attention_mask, scale=scaling)
        return output.transpose(1, 2).contiguous(), None
    output, weights = sdpa_attention_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **kwargs,
    )
    return output, weights


def gpuarena_mask(
    *, q_length: int, config: Any = None, allow_is_causal_skip: bool = True, **kwargs: Any
) -> torch.Tensor | None:
    """Build the mask that `gpuarena_attention_forward` takes: transformers' ``sdpa_mask``, with three guards.

    Without a mask function of that name transformers passes no mask at all, and left padding is attended to.

    Returns
    -------
    mask : [batch, 1, q_length, n_keys], optional
        Boolean, True attends; None where ``sdpa_mask`` sees that the lengths say it all. A sliding window
        that hides a key is never left out: ``sdpa_mask`` does so only while keys are fewer than the window.
        Additive, and never None, for DeepSeek-V4, which appends the mask of compressed keys to it.

    Raises
    ------
    UnsupportedAttentionError
        The model of `config` does not look its attention up by name, and would add this mask to its scores.
    """
    if config is not None:
        if not _looks_attention_up(type(config)):
            raise _unsupported(type(config), "its own attention code", "eager")
        if q_length > 1 and str(getattr(config, "model_type", "")).startswith("gemma4"):
            # Layers that share keys keep only the query rows whose logits are wanted. "Causal" without a mask
            # would then count from the first of those rows; the model prevents that for the name "sdpa" only.
            allow_is_causal_skip = False
        if str(getattr(config, "model_type", "")).startswith(_APPENDS_TO_MASKS):
            added: torch.Tensor | None = eager_mask(q_length=q_length, config=config, **kwargs)
            return added
    mask: torch.Tensor | None = sdpa_mask(
        q_length=q_length, config=config, allow_is_causal_skip=allow_is_causal_skip, **kwargs
    )
    return mask


def register() -> None:
    """Make ``attn_implementation="gpuarena"`` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(_NAME, gpuarena_attention_forward)
    AttentionMaskInterface.register(_NAME, gpuarena_mask)


def _wants_weights(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    asked = kwargs.get("output_attentions")
    if asked is None:  # models that are not asked in a call look here
        asked = getattr(getattr(module, "config", None), "output_attentions", False)
    return bool(asked)


def _is_capped_or_sinks(beyond: list[str], kwargs: dict[str, Any], *, n_heads: int) -> bool:
    """Whether `attend_by_scores` computes what the model asks for by these arguments."""
    if beyond == ["softcap"]:
        return True
    # No eager function knows both, so together they would mean something else; and sinks of other shapes
    # are computed from hidden states.
    return beyond == ["s_aux"] and tuple(kwargs["s_aux"].shape) == (n_heads,)


def _own_eager_function(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return the ``eager_attention_forward`` beside the class of `module` or beside a base of it."""
    for cls in type(module).__mro__:
        eager: Callable[..., Any] | None = getattr(
            sys.modules.get(cls.__module__), "eager_attention_forward", None
        )
        if eager is not None:
            return eager
    return None


def _spell_out(
    mask: torch.Tensor | None,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    is_causal: bool | None,
) -> torch.Tensor | None:  # [batch or 1, q_heads or 1, n_queries, n_keys]
    """Return the mask that a None stands for; None only if nothing is hidden."""
    n_queries, n_keys = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if mask is not None or n_queries == 1 or not is_causal:
        return mask
    # ``sdpa_mask`` leaves a mask out for several queries only if they are the first tokens of the cache. The
    # i-th sees keys 0 to i, and a static cache has empty slots behind them: hence aligned to the upper left.
    return torch.ones(1, 1, n_queries, n_keys, dtype=torch.bool, device=query.device).tril()


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the mask in the form of eager functions, which add it to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    # The least finite number, as in transformers' eager_mask: a row that sees nothing gives no NaN.
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def _hide_unselected(
    mask: torch.Tensor | None,  # [batch or 1, 1, n_queries, n_keys]
    indices: torch.Tensor,  # [batch, n_queries, n_selected]: positions of the keys that each query may see
    *,
    n_keys: int,
) -> torch.Tensor:  # [batch, 1, n_queries, n_keys]
    selected = indices.new_zeros((*indices.shape[:-1], n_keys), dtype=torch.bool)
    selected = selected.scatter(-1, indices.long(), True)[:, None]
    if mask is None:
        return selected
    if mask.dtype == torch.bool:
        return mask & selected
    return mask.masked_fill(~selected, torch.finfo(mask.dtype).min)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch does not annotate it
def _looks_attention_up(config_class: type) -> bool:
    """Whether the model beside `config_class` looks its attention up by name; True if that is unknown."""
    package, _, name = config_class.__module__.rpartition(".configuration_")
    modeling = sys.modules.get(f"{package}.modeling_{name}") if package else None
    if modeling is None:
        return True
    for item in vars(modeling).values():
        # A private method, so absence is no error. It reads its module's source: one class answers for all.
        if getattr(item, "__module__", None) == modeling.__name__ and hasattr(
            item, "_can_set_attn_implementation"
        ):
            return bool(item._can_set_attn_implementation())
    return True


def _unsupported(model: type, needs: str, remedy: str) -> UnsupportedAttentionError:
    return UnsupportedAttentionError(
        f'{model.__name__} needs {needs}, which attn_implementation="{_NAME}" cannot provide for it; '
        f'load the model with attn_implementation="{remedy}"',
        model=model.__name__,
        needs=needs,
    )
