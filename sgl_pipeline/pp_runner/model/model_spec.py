"""A model's description, read from its Hugging Face config: sizes, rotary embedding, biases, EOS
ids.

It must never pass over a config field that changes the maths (`refused_fields.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sgl_pipeline.errors import ConfigurationError, UnsupportedModelError
from sgl_pipeline.model_directory import read_json_object
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape, LayerAttention
from sgl_pipeline.pp_runner.base.kv_format import CODED_DTYPES
from sgl_pipeline.pp_runner.base.state_shape import StateShape
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import GateClamp
from sgl_pipeline.pp_runner.model.config_fields import ConfigFields, text_fields
from sgl_pipeline.pp_runner.model.families import FAMILIES, Family, MlpNames, TensorNames
from sgl_pipeline.pp_runner.model.layer_attention import layer_attentions, state_shape
from sgl_pipeline.pp_runner.model.refused_fields import refuse_unsupported_fields
from sgl_pipeline.pp_runner.model.rope_config import ContextLengths, RopeConfig
from sgl_pipeline.pp_runner.model.rope_overrides import with_rope_overrides
from sgl_pipeline.pp_runner.model.rope_spec import RopeSpec
from sgl_pipeline.pp_runner.weights.quantization_config import (
    choose_quantization,
    read_quantization,
)
from sgl_pipeline.pp_runner.weights.schemes import Quantization

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """Mixture-of-experts layers: `layers` are their ids, the other layers are dense.

    Each token goes to `experts_per_token` of `num_experts` MLPs of `inner_size`, whose routing
    weights sum to one if they are `normalized`. A shared expert of `shared_inner_size` sees every
    token (Qwen2-MoE); 0 if there is no shared expert. With a `clamp`, which is the experts' gate,
    the router has a bias (gpt-oss).
    """

    num_experts: int
    experts_per_token: int
    inner_size: int
    normalized: bool
    shared_inner_size: int
    layers: frozenset[int]
    clamp: GateClamp | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(ABC):
    """All facts about a model that the pipeline needs, whichever code computes its layers. Lengths
    in tokens.

    `context_length` is what the server serves. `dtype` is the torch dtype name that the checkpoint
    was saved in. `eos_token_ids` are those of config.json and generation_config.json; the
    tokenizer's are added by `managers/`. `attentions` has an entry for each layer; those without
    heads have a `state`, the same in all of them. `quantization` lists matrices of fewer than 16
    bits; None: there are none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    context_length: int
    own_context_lengths: ContextLengths
    attentions: tuple[LayerAttention, ...]
    tied_embeddings: bool
    dtype: str
    eos_token_ids: frozenset[int]
    quantization: Quantization | None = None
    state: StateShape | None = None

    def state_of(self, layer: int) -> StateShape | None:
        """The state of `layer` for a request; None if it has keys and values in its place."""
        return None if self.attentions[layer].has_heads else self.state

    @property
    def states(self) -> tuple[StateShape | None, ...]:
        """`state_of` each layer."""
        return tuple(map(self.state_of, range(self.num_layers)))

    @property
    def has_states(self) -> bool:
        """True if some layers keep a state."""
        return self.state is not None

    @property
    def num_layers(self) -> int:
        return len(self.attentions)

    @property
    def quantization_method(self) -> str | None:
        """The method as spelled in the config or `--quantization`; None for 16 bits."""
        return None if self.quantization is None else self.quantization.method

    @abstractmethod
    def layer_has_experts(self, layer: int) -> bool:
        """True if `layer` is a mixture of experts."""

    @abstractmethod
    def layer_kind(self, layer: int) -> tuple[object, ...]:
        """Equal for layers that have the same parts, quantized alike: their bytes and times are
        the same, too."""

    def attention_shapes(
        self,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_cache_dtype: str = "auto",
    ) -> tuple[AttentionShape, ...]:
        """The shapes of all layers' attention, equal ones the same object.

        Args:
            kv_cache_dtype: as `--kv-cache-dtype`.
        """
        shapes = {
            attention: AttentionShape(
                **asdict(attention),
                page_size=page_size,
                dtype=dtype,
                device=device,
                coded_dtype=CODED_DTYPES.get(kv_cache_dtype),
            )
            for attention in dict.fromkeys(self.attentions)
        }
        return tuple(shapes[attention] for attention in self.attentions)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """A model whose layers are those of `decoder.py`. `norm_offset` and `output_gate` are as in
    `Family`."""

    intermediate_size: int
    norm_epsilon: float
    norm_offset: float
    rope: RopeSpec
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    output_gate: bool
    experts: ExpertSpec | None
    names: TensorNames

    @property
    def head_dim(self) -> int:
        """The same in all layers that have heads."""
        return _first_with_heads(self.attentions).head_dim

    @property
    def num_query_heads(self) -> int:
        """The same in all layers that have heads."""
        return _first_with_heads(self.attentions).num_query_heads

    @property
    def num_kv_heads(self) -> int:
        """The same in all layers that have heads."""
        return _first_with_heads(self.attentions).num_kv_heads

    def layer_experts(self, layer: int) -> ExpertSpec | None:
        """The experts of `layer`; None if it is dense."""
        return self.experts if self.experts and layer in self.experts.layers else None

    def layer_has_experts(self, layer: int) -> bool:
        return self.layer_experts(layer) is not None

    def layer_kind(self, layer: int) -> tuple[object, ...]:
        experts, quantization = self.layer_experts(layer), self.quantization
        kind = (self.attentions[layer], self.state_of(layer), experts)
        if quantization is None:
            return kind
        names = [*self._mixer_names(layer)]
        for mlp, numbers in self._mlps(experts):
            names += [name.format(expert=e) for e in numbers for name in (*mlp.gate_up, mlp.down)]
        prefix = self.names.layer.format(layer=layer)
        return (*kind, *(quantization.scheme_of(f"{prefix}.{name}") for name in names))

    def _mixer_names(self, layer: int) -> tuple[str, ...]:
        """The names of the matrices of a layer's attention, or of what is in its place."""
        if self.state_of(layer) is None:
            return (*self.names.qkv, self.names.output)
        assert self.names.state is not None
        return self.names.state.projections

    def _mlps(self, experts: ExpertSpec | None) -> list[tuple[MlpNames, range]]:
        """The names of a layer's MLPs, and the numbers that replace `{expert}` in them."""
        if experts is None:
            return [(self.names.mlp, range(1))]
        return [
            (self.names.expert, range(experts.num_experts)),
            (self.names.shared_expert, range(bool(experts.shared_inner_size))),
        ]


def read_model_spec(
    path: str | Path,
    quantization: str | None = None,
    context_length: int | None = None,
    rope_overrides: str = "{}",
) -> DecoderSpec:
    """The spec of the model directory `path` (config.json, and generation_config.json if it is
    there).

    Args:
        quantization: as `--quantization`; None: as the checkpoint is.
        context_length: as `--context-length`; None: the model's own.
        rope_overrides: as `--json-model-override-args`.

    Raises ConfigurationError when there is no readable config or an argument does not fit it,
    UnsupportedModelError when the model needs something that the decoder does not compute.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigurationError(f"--model-path {path}: no such directory")
    generation_path = directory / "generation_config.json"
    generation = read_json_object(generation_path) if generation_path.exists() else {}
    config = with_rope_overrides(read_json_object(directory / "config.json"), rope_overrides)
    spec = model_spec(config, generation, context_length)
    chosen = choose_quantization(
        quantization, spec.quantization, spec.names.head, has_tied_head=spec.tied_embeddings
    )
    return replace(spec, quantization=chosen)


def model_spec(
    config: Config, generation_config: Config | None = None, context_length: int | None = None
) -> DecoderSpec:
    """The spec that the dicts of config.json and generation_config.json describe.

    Args:
        context_length: as `--context-length`; None: the model's own.

    Raises UnsupportedModelError naming the architecture or the field.
    """
    config = text_fields(config)
    architecture = _known_architecture(config)
    family = FAMILIES[architecture]
    fields = ConfigFields({**family.defaults, **config}, family.spellings)
    refuse_unsupported_fields(fields.raw, architecture)
    attentions = layer_attentions(fields, family)
    rope = RopeConfig(fields, family)
    own_context_lengths = rope.context_lengths()
    context_length = context_length or own_context_lengths.default
    spec = DecoderSpec(
        architecture=architecture,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        intermediate_size=fields.positive("intermediate_size"),
        attentions=attentions,
        context_length=context_length,
        own_context_lengths=own_context_lengths,
        norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        norm_offset=family.norm_offset,
        rope=rope.spec(_first_with_heads(attentions).head_dim, context_length),
        qkv_bias=family.qkv_bias or bool(fields.get("qkv_bias")),
        output_bias=bool(fields.get("output_bias")),
        mlp_bias=bool(fields.get("mlp_bias")),
        qk_norm=family.qk_norm,
        output_gate=family.output_gate,
        state=state_shape(fields, family),
        experts=_expert_spec(fields, family) if family.experts else None,
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        eos_token_ids=eos_token_ids(config) | eos_token_ids(generation_config or {}),
        names=family.names,
        quantization=read_quantization(fields.get("quantization_config"), family.names.head),
    )
    if spec.rope.rotated_dims(spec.head_dim) % 2:
        raise ConfigurationError(
            f"config.json: head_dim {spec.head_dim} must be even in its rotated share"
        )
    return spec


def _first_with_heads(attentions: Sequence[LayerAttention]) -> LayerAttention:
    return next(attention for attention in attentions if attention.has_heads)


def _known_architecture(config: Config) -> str:
    architectures = config.get("architectures") or []
    for architecture in architectures:
        if architecture in FAMILIES:
            return str(architecture)
    raise UnsupportedModelError(
        f"config.json names the architectures {architectures}; known are {', '.join(FAMILIES)}"
    )


def _expert_spec(fields: ConfigFields, family: Family) -> ExpertSpec:
    """The sparse layers: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    step = fields.positive("decoder_sparse_step", 1)
    sparse = frozenset(range(step - 1, fields.positive("num_hidden_layers"), step))
    shared = "shared_expert_intermediate_size"
    experts = ExpertSpec(
        num_experts=fields.positive("num_experts"),
        experts_per_token=fields.positive("num_experts_per_tok"),
        inner_size=fields.positive("moe_intermediate_size"),
        normalized=bool(fields.get("norm_topk_prob")),
        shared_inner_size=fields.positive(shared) if fields.get(shared) else 0,
        layers=sparse - fields.integers("mlp_only_layers"),
        clamp=_gate_clamp(fields) if family.clamped_gate else None,
    )
    if experts.experts_per_token > experts.num_experts:
        raise ConfigurationError(
            f"config.json: num_experts_per_tok {experts.experts_per_token} is more than "
            f"{fields.spelt('num_experts')} {experts.num_experts}"
        )
    return experts


def _gate_clamp(fields: ConfigFields) -> GateClamp:
    """The clamp by the fields and defaults of transformers' GptOssConfig."""
    return GateClamp(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))


def eos_token_ids(config: Config) -> frozenset[int]:
    """The ids of `eos_token_id`, one or several. Raises ConfigurationError for anything else."""
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ConfigurationError(f"config.json: eos_token_id is {value!r}, not a token id")
    return frozenset(ids)
