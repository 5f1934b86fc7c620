"""transformers' attention interface: every attention of a model comes here, and goes on to what its
module was given.

A module finds its own callee in an attribute, never in a global: two stage models can live in one
process.

Shapes: T rows of the step, Hq query heads, Hkv key/value heads, D head dim of queries and keys, Dv
that of values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sgl_pipeline.errors import UnsupportedModelError
from sgl_pipeline.pp_runner.attention.attention_backend import LayerAttention, LayerwiseAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.base.kv_format import write_rows

# Of a served model, and of one that is probed. transformers makes masks for the second only, which
# `probes.py` registers there.
SERVED, PROBED = "sgl_pipeline", "sgl_pipeline_probe"
_CALLEE = "sgl_pipeline_attention"
# Arguments that say how a layer attends.
_GEOMETRY = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
# Arguments that change nothing without dropout, cache and packed sequences.
_HARMLESS = frozenset(
    "dropout position_ids use_cache output_attentions return_dict is_causal output_router_logits"
    " output_hidden_states".split()
)


class Callee(Protocol):
    """Computes or records an attention."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        arguments: Mapping[str, Any],
    ) -> torch.Tensor:
        """[1, T, Hq, Dv] of `query` [1, Hq, T, D], `key` [1, Hkv, T, D] and `value`
        [1, Hkv, T, Dv]."""


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    callee: Callee = getattr(module, _CALLEE)
    return callee(query, key, value, attention_mask, arguments), None


for _name in (SERVED, PROBED):
    ALL_ATTENTION_FUNCTIONS.register(_name, _attend)


def direct_attention(layer: nn.Module, callee: Callee) -> None:
    """Makes `callee` compute every attention of the modules of `layer`."""
    for module in layer.modules():
        object.__setattr__(module, _CALLEE, callee)


def attention_of_call(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: Mapping[str, Any]
) -> LayerAttention:
    """The attention of a layer, by one call of it.

    Raises UnsupportedModelError for an argument that is not known.
    """
    for name, argument in arguments.items():
        if name not in _GEOMETRY and name not in _HARMLESS and argument is not None:
            raise UnsupportedModelError(
                f"its attention is called with {name} = {argument!r:.60}, which is not known"
            )
    head_dim = query.shape[-1]
    scale, softcap = arguments.get("scaling"), arguments.get("softcap")
    return LayerAttention(
        num_query_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=head_dim,
        value_dim=value.shape[-1],
        scale=head_dim**-0.5 if scale is None else float(scale),
        window=arguments.get("sliding_window"),
        softcap=None if softcap is None else float(softcap),
        has_sinks=arguments.get("s_aux") is not None,
    )


@dataclass(slots=True)
class StageStep:
    """The part of a step that the attentions of a stage model need."""

    slots: torch.Tensor
    kv_pool: KvPool
    attention: LayerwiseAttention


@dataclass(slots=True)
class RunningStep:
    """The step that a stage model runs now; None between steps."""

    step: StageStep | None = None


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The `Callee` of `layer`, a model-wide id: writes keys and values into its pages and attends
    to what they hold. `expected` is what the probes saw."""

    layer: int
    expected: LayerAttention
    running: RunningStep

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        arguments: Mapping[str, Any],
    ) -> torch.Tensor:
        """See `Callee`. `GenericStageModel` compares windows, which may be in masks, at load."""
        step, expected = self.running.step, self.expected
        assert step is not None, "an attention outside of a step"
        assert mask is None, f"layer {self.layer} makes a mask of its own"
        seen = attention_of_call(
            query, key, value, {**arguments, "sliding_window": expected.window}
        )
        assert seen == expected, f"layer {self.layer} attends as {seen}, not as {expected}"
        pages = step.kv_pool.pages(self.layer)
        for store, rows in zip(pages, (key, value), strict=True):
            write_rows(store, step.slots, rows[0].transpose(0, 1))
        queries = query[0].transpose(0, 1).contiguous()
        backend = step.attention.of(self.layer)
        if expected.has_sinks:
            attended = backend.attend(queries, *pages, arguments["s_aux"].float())
        else:
            attended = backend.attend(queries, *pages)
        return attended[None]
