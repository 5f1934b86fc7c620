"""Finds the structure of a model of transformers by running its code without weights.

The attention probe records every attention, and the mask probe every mask, of three rows on the
meta device: geometry is what was seen, and no field of a config says it. A model that does
something else with its rows than to pass one residual stream through layers that attend once is
refused, with what was seen.
"""

import itertools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from sgl_pipeline.errors import UnsupportedModelError
from sgl_pipeline.pp_runner.attention.attention_backend import LayerAttention
from sgl_pipeline.pp_runner.model.generic.attention_call import (
    PROBED,
    attention_of_call,
    direct_attention,
)
from sgl_pipeline.pp_runner.model.generic.layers import is_experts, num_experts_of
from sgl_pipeline.pp_runner.model.generic.skeleton import Skeleton

_ROWS = 3
# Kinds of rotary embedding whose frequencies depend on the longest sequence of a step.
_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class Trace:
    """The structure that was seen: each layer's attention, the layers with experts, and the name in
    the decoder of the norm after the last layer."""

    attentions: tuple[LayerAttention, ...]
    expert_layers: frozenset[int]
    norm: str


@dataclass(frozen=True, slots=True)
class _Mask:
    """In the place of a mask: what it shows. `window` as in `LayerAttention`."""

    window: int | None


@dataclass(slots=True)
class _Seen:
    """Events of one pass, in their order."""

    attentions: list[list[LayerAttention]]
    expert_layers: set[int] = field(default_factory=set)
    called: list[str] = field(default_factory=list)  # parts of the decoder; "layers" for a layer
    keys: list[torch.Tensor] = field(default_factory=list)  # and values, of all attentions


def trace(skeleton: Skeleton) -> Trace:
    """Runs the decoder of `skeleton`, which was made for `PROBED`.

    Raises UnsupportedModelError.
    """
    _refuse_by_length(skeleton)
    seen = _Seen([[] for _ in skeleton.layers])
    decoder = skeleton.decoder
    ids = torch.zeros(1, _ROWS, dtype=torch.int64, device="meta")
    with ExitStack() as hooks, torch.inference_mode():
        _watch(skeleton, seen, hooks)
        try:
            output = decoder(
                input_ids=ids,
                position_ids=ids,
                attention_mask=torch.ones_like(ids),
                use_cache=False,
            ).last_hidden_state
        except UnsupportedModelError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())
            raise UnsupportedModelError(
                f"{type(decoder).__name__} does not run without weights: "
                f"{type(error).__name__}: {reason:.200}{_kinds_of_layers(skeleton)}"
            ) from None
    if output.shape != (1, _ROWS, skeleton.embedding.weight.shape[1]):
        raise UnsupportedModelError(f"its decoder returns rows of shape {list(output.shape)}")
    for number, calls in enumerate(seen.attentions):
        if len(calls) != 1:
            raise UnsupportedModelError(_miscount(seen.attentions, number))
    norm = _norm_of(seen.called, len(skeleton.layers))
    _refuse_other_weights(skeleton, norm)
    return Trace(tuple(calls[0] for calls in seen.attentions), frozenset(seen.expert_layers), norm)


def _kinds_of_layers(skeleton: Skeleton) -> str:
    """Words for an error: the kinds of layers that its config names, if they are not all known."""
    kinds = {*(getattr(skeleton.text_config, "layer_types", None) or ())}
    if not kinds - {"full_attention", "sliding_attention"}:
        return ""
    return f"; its config names layers of {', '.join(sorted(map(str, kinds)))}"


def _miscount(attentions: list[list[LayerAttention]], first: int) -> str:
    others = sum(len(calls) != 1 for calls in attentions)
    return (
        f"{others} of its {len(attentions)} layers do not attend exactly once through "
        f"transformers' attention interface (layer {first}: {len(attentions[first])} times): they "
        "keep another state, or none"
    )


def _refuse_other_weights(skeleton: Skeleton, norm: str) -> None:
    for name, part in skeleton.decoder.named_children():
        if name in ("layers", norm) or part is skeleton.embedding:
            continue
        if [*part.parameters()]:
            raise UnsupportedModelError(
                f"its decoder has weights in {name}, beside embedding, layers and norm"
            )


def _refuse_by_length(skeleton: Skeleton) -> None:
    for module in skeleton.decoder.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if found := _LENGTH_DEPENDENT.intersection(kind for kind in kinds if kind):
            raise UnsupportedModelError(
                f"its rotary embedding is of type {', '.join(found)}, whose frequencies depend on "
                "the longest sequence of a step, so that a request's tokens would depend on others"
            )


def _norm_of(called: list[str], num_layers: int) -> str:
    """The only part of the decoder that ran after the layers, and not before them."""
    if called.count("layers") != num_layers:
        raise UnsupportedModelError(
            f"its decoder called {called.count('layers')} of {num_layers} layers"
        )
    end = len(called) - called[::-1].index("layers")
    after = called[end:]
    if len(after) != 1 or called.count(after[0]) != 1:
        raise UnsupportedModelError(
            f"its decoder calls {', '.join(after) or 'nothing'} after the layers, and "
            f"{called[: called.index('layers')]} before them, instead of one norm after them"
        )
    return after[0]


def _watch(skeleton: Skeleton, seen: _Seen, hooks: ExitStack) -> None:
    decoder = skeleton.decoder
    for number, layer in enumerate(skeleton.layers):
        direct_attention(layer, _recorder(seen, number))
        hook = layer.register_forward_pre_hook(_layer_watcher(seen), with_kwargs=True)
        hooks.callback(hook.remove)
        hook = layer.register_forward_hook(_refuse_other_outputs)
        hooks.callback(hook.remove)
        for name, module in [*layer.named_modules()]:
            if is_experts(module):
                seen.expert_layers.add(number)
                _replace(layer, name, _NoExperts(num_experts_of(module)))
                hooks.callback(_replace, layer, name, module)
    for name, module in decoder.named_children():
        if name != "layers":
            hook = module.register_forward_hook(
                lambda module, args, output, name=name: seen.called.append(name)
            )
            hooks.callback(hook.remove)


def _replace(layer: nn.Module, name: str, module: nn.Module) -> None:
    layer.set_submodule(name, module)


class _NoExperts(nn.Module):
    """In the place of experts, which choose by values."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, hidden_states: torch.Tensor, *routing: Any, **others: Any) -> torch.Tensor:
        return torch.empty_like(hidden_states)


def _recorder(seen: _Seen, layer: int) -> Callable[..., torch.Tensor]:
    def record(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        arguments: Mapping[str, Any],
    ) -> torch.Tensor:
        if not isinstance(mask, _Mask):
            what = "no mask" if mask is None else "a mask that it makes itself"
            raise UnsupportedModelError(f"its attention is called with {what}")
        for rows in (query, key, value):
            if rows.dim() != 4 or rows.shape[0] != 1 or rows.shape[2] != _ROWS:
                raise UnsupportedModelError(
                    f"its attention is called with rows of shape {list(rows.shape)} for a step of "
                    f"{_ROWS} rows"
                )
        if any(own is rows for own in seen.keys for rows in (key, value)):
            raise UnsupportedModelError(
                f"its layer {layer} attends to keys and values of another one, which may be on "
                "another stage"
            )
        seen.keys += [key, value]
        # Where the two differ, transformers' own attention follows the mask.
        seen.attentions[layer].append(
            replace(attention_of_call(query, key, value, arguments), window=mask.window)
        )
        return query.new_empty(1, _ROWS, query.shape[1], value.shape[-1])

    return record


def _layer_watcher(seen: _Seen) -> Callable[..., None]:
    def watch(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.called.append("layers")
        stream = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(stream, torch.Tensor) or stream.dim() != 3 or stream.shape[1] != _ROWS:
            shape = list(stream.shape) if isinstance(stream, torch.Tensor) else stream
            raise UnsupportedModelError(
                f"its layers are called with {shape}, not one residual stream"
            )

    return watch


def _refuse_other_outputs(layer: nn.Module, args: Any, output: Any) -> None:
    if not isinstance(output, torch.Tensor):
        raise UnsupportedModelError(
            f"its layers return a {type(output).__name__}, not one residual stream"
        )


def _mask(
    *,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    **others: Any,
) -> _Mask:
    """transformers' interface for masks: what the mask shows, found at pairs of positions.

    Raises UnsupportedModelError for one that is neither causal nor a window.
    """
    edges = {0, 1, 2, 5, 63, 1023, 1024, 4096, 8191, 8192, 8193, 20000, 100_000}
    if local_size:
        edges |= {local_size - 1, local_size, local_size + 1, 2 * local_size, 3 * local_size + 1}
    zero = torch.tensor(0)
    for query, key in itertools.product(sorted(edges), repeat=2):
        wanted = key <= query and (local_size is None or key > query - local_size)
        try:
            shown = bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))
        except Exception as error:
            raise UnsupportedModelError(
                f"its mask is not a function of two positions: {type(error).__name__}: "
                f"{error!s:.120}"
            ) from None
        if shown != wanted:
            raise UnsupportedModelError(
                f"its mask {'shows' if shown else 'hides'} key {key} to row {query}, which is "
                f"neither causal nor a window{f' of {local_size}' if local_size else ''}"
            )
    return _Mask(local_size)


ALL_MASK_ATTENTION_FUNCTIONS.register(PROBED, _mask)
