"""The spec of a model whose layers are transformers' code, as the probes have seen it.

Plain data: it travels as JSON to processes that never import transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sgl_pipeline.pp_runner.attention.attention_backend import LayerAttention
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec
from sgl_pipeline.pp_runner.model.rope_config import ContextLengths
from sgl_pipeline.pp_runner.weights.quantization_config import (
    choose_quantization,
    read_quantization,
)
from sgl_pipeline.pp_runner.weights.schemes import Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericSpec(ModelSpec):
    """A model that `probes.probe` has passed.

    Attributes:
        model_type: transformers' name of the family.
        kinds: a number for each layer, equal for those that `layer_kind` takes for equal.
        expert_layers: ids of the layers with experts.
        head: the output head's module name in the checkpoint.
        quantization_config: that of config.json; empty: the checkpoint has 16 bits.
        asked_quantization: as `--quantization`.
        transformers_version: whose code the probes ran; stages must run the same.
    """

    model_type: str
    kinds: tuple[int, ...]
    expert_layers: frozenset[int]
    head: str
    quantization_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    asked_quantization: str | None = None
    transformers_version: str = ""

    def layer_has_experts(self, layer: int) -> bool:
        return layer in self.expert_layers

    def layer_kind(self, layer: int) -> tuple[object, ...]:
        return (self.kinds[layer],)

    def to_json(self) -> str:
        """JSON that `from_json` reads."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        del values["quantization"]  # follows from the config
        values["attentions"] = [asdict(attention) for attention in self.attentions]
        for name in ("eos_token_ids", "expert_layers"):
            values[name] = sorted(values[name])
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> "GenericSpec":
        """The spec that `to_json` wrote."""
        values = json.loads(text)
        return cls(
            **{
                **values,
                "attentions": tuple(LayerAttention(**one) for one in values["attentions"]),
                "eos_token_ids": frozenset(values["eos_token_ids"]),
                "expert_layers": frozenset(values["expert_layers"]),
                "kinds": tuple(values["kinds"]),
                "own_context_lengths": ContextLengths(*values["own_context_lengths"]),
                "quantization": quantization_of(
                    values["quantization_config"],
                    values["asked_quantization"],
                    values["head"],
                    has_tied_head=values["tied_embeddings"],
                ),
            }
        )


def quantization_of(
    config: Mapping[str, Any], asked: str | None, head: str, *, has_tied_head: bool
) -> Quantization | None:
    """The quantization of a checkpoint by its `quantization_config` and `--quantization asked`.

    Raises ConfigurationError and UnsupportedModelError as `quantization_config.py`.
    """
    found = read_quantization(config, head)
    return choose_quantization(asked, found, head, has_tied_head=has_tied_head)
