"""The supported model families: a table of how each differs from the plain decoder.

A new family is a new entry if the decoder computes all that it needs; no other module of this room
knows a family by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class MlpNames:
    """A gated MLP's projections inside a layer; a single `gate_up` holds both, gate first."""

    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateNames:
    """A gated delta rule's tensors inside a layer. `qkvz` and `ba`, if given, are in the place of
    the four projections before them: of each key head its query, key, values and gates, and the
    rates and decays of its values.
    """

    qkv: str = "linear_attn.in_proj_qkv"
    z: str = "linear_attn.in_proj_z"
    b: str = "linear_attn.in_proj_b"
    a: str = "linear_attn.in_proj_a"
    qkvz: str | None = None
    ba: str | None = None
    conv: str = "linear_attn.conv1d"
    a_log: str = "linear_attn.A_log"
    dt_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    output: str = "linear_attn.out_proj"

    @property
    def projections(self) -> tuple[str, ...]:
        """All matrices."""
        inputs = (self.qkv, self.z, self.b, self.a) if self.qkvz is None else (self.qkvz, self.ba)
        return (*filter(None, inputs), self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """A checkpoint's names of the model's tensors, without `.weight` and `.bias`.

    `{layer}` and `{expert}` stand for numbers; the names from `attention_norm` on are inside a
    layer. A single `qkv` holds queries, keys and values one after the other. The norms that end on
    `output_norm` lie between a block's result and the residual stream; None if there is no such
    norm, or no sinks. An `expert` without a number names stacks of all experts, which have biases,
    and in which outputs of gates and of ups take turns (`stacked_matrices.py`). `expert_stacks` are
    stacks that a checkpoint may have in the place of `expert`: all gates come before all ups.
    `state` is given if layers may have a state.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{layer}"

    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str | None = None
    output: str = "self_attn.o_proj"
    attention_output_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    mlp: MlpNames = MlpNames()
    mlp_output_norm: str | None = None
    state: StateNames | None = None

    router: str = "mlp.gate"
    expert: MlpNames = MlpNames(
        ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
        "mlp.experts.{expert}.down_proj",
    )
    expert_stacks: MlpNames | None = None
    shared_expert: MlpNames = MlpNames(
        ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"), "mlp.shared_expert.down_proj"
    )
    shared_expert_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, slots=True)
class WindowRule:
    """The layers that `sliding_window` is for, where a config has no `layer_types`: all for which
    `includes(layer, max_window_layers)` holds. With a switch, `use_sliding_window` must be true.
    """

    has_switch: bool
    includes: Callable[[int, int], bool] = lambda layer, bound: True


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The differences of an architecture from the plain decoder, and how to read its config.

    Attributes:
        qkv_bias: queries, keys and values have biases, with any config. interleaved_rope: a rotated
        pair is two neighbors, not two halves of the head. partial_rope: the config's
        `partial_rotary_factor` counts. experts: layers may be mixtures of experts.
        clamped_gate: their gate is a `GateClamp`, and their router has a bias.
        norm_offset: added to the weights of all norms but that of a state.
        output_gate: the first of `TensorNames.qkv` has of each head the query, then a gate, whose
            sigmoid multiplies what was attended to.
        windows: its layers with a sliding window; None: it cannot have one.
        spellings: this config's names of fields that `model_spec` knows by other names. The
            family's own spelling wins where a config holds both.
        own_fields: fields that look like maths to `model_spec`, and that are read for this family
        or do not change its maths.
        required: fields of which only one value is supported.
        defaults: values of fields that a config may leave out, by the config's spelling, from the
            family's configuration class.
        names: its checkpoints' names of the tensors.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    interleaved_rope: bool = False
    partial_rope: bool = False
    experts: bool = False
    clamped_gate: bool = False
    norm_offset: float = 0.0
    output_gate: bool = False
    windows: WindowRule | None = None
    spellings: Mapping[str, str] = field(default_factory=dict)
    own_fields: frozenset[str] = frozenset()
    required: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: TensorNames = TensorNames()


_ALL_WINDOWED = WindowRule(has_switch=False)
_ALL_SWITCHED = WindowRule(has_switch=True)
_LATER_SWITCHED = WindowRule(has_switch=True, includes=lambda layer, bound: layer >= bound)
_EVEN = WindowRule(has_switch=False, includes=lambda layer, bound: layer % 2 == 0)
_EVEN_SWITCHED = WindowRule(
    has_switch=True, includes=lambda layer, bound: layer % 2 == 0 and layer < bound
)
_ALL_ATTENTION_BIASES = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
# Read by `model_spec`, or (the last three) of use in training only.
_EXPERT_FIELDS = frozenset(
    "num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob"
    " router_aux_loss_coef router_jitter_noise output_router_logits".split()
)

_QWEN3_5 = Family(
    qk_norm=True,
    partial_rope=True,
    norm_offset=1.0,
    output_gate=True,
    spellings=_ALL_ATTENTION_BIASES,
    # The second is one of MTP heads, which are not read.
    own_fields=frozenset({"full_attention_interval", "mtp_use_dedicated_embeddings"}),
    required={"attn_output_gate": True},
    defaults={
        "attn_output_gate": True,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    names=TensorNames(state=StateNames()),
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    experts=True,
    # No layer is dense.
    spellings={**_ALL_ATTENTION_BIASES, "intermediate_size": "moe_intermediate_size"},
    own_fields=_QWEN3_5.own_fields | _EXPERT_FIELDS | {"shared_expert_intermediate_size"},
    required={**_QWEN3_5.required, "norm_topk_prob": True},
    defaults={
        **_QWEN3_5.defaults,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    names=replace(
        _QWEN3_5.names,
        expert_stacks=MlpNames(("mlp.experts.gate_up_proj",), "mlp.experts.down_proj"),
    ),
)
_QWEN3_NEXT = replace(
    _QWEN3_5_MOE,
    spellings=_ALL_ATTENTION_BIASES,
    required=_QWEN3_5.required,
    defaults={**_QWEN3_5_MOE.defaults, "num_experts": 512, "num_experts_per_tok": 10},
    names=replace(
        _QWEN3_5_MOE.names,
        state=StateNames(qkvz="linear_attn.in_proj_qkvz", ba="linear_attn.in_proj_ba"),
    ),
)


def _text_of(family: Family) -> Family:
    """The same inside a multimodal checkpoint, whose other tensors are not read."""
    names = replace(
        family.names,
        embedding="model.language_model.embed_tokens",
        final_norm="model.language_model.norm",
        layer="model.language_model.layers.{layer}",
    )
    return replace(family, names=names)


_GLM = Family(
    interleaved_rope=True,
    partial_rope=True,
    spellings={"qkv_bias": "attention_bias"},
    defaults={
        "attention_bias": True,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
    },
    names=TensorNames(mlp=MlpNames(("mlp.gate_up_proj",))),
)
_GLM_4 = replace(
    _GLM,
    names=replace(
        _GLM.names,
        attention_output_norm="post_self_attn_layernorm",
        mlp_output_norm="post_mlp_layernorm",
    ),
)
# The layout of the modeling_chatglm.py that chatglm3-6b and glm-4-9b-chat are published with, the
# same as in SGLang's models/chatglm.py. ChatGLM2-6B-32K gives rope_ratio another meaning under the
# same names, and cannot be distinguished from them.
_CHATGLM = Family(
    interleaved_rope=True,
    partial_rope=True,
    spellings={
        "vocab_size": "padded_vocab_size",
        "num_hidden_layers": "num_layers",
        "num_key_value_heads": "multi_query_group_num",
        "head_dim": "kv_channels",
        "intermediate_size": "ffn_hidden_size",
        "max_position_embeddings": "seq_length",
        "rms_norm_eps": "layernorm_epsilon",
        "qkv_bias": "add_qkv_bias",
    },
    own_fields=frozenset(
        "rope_ratio apply_query_key_layer_scaling attention_softmax_in_fp32 bias_dropout_fusion"
        " original_rope".split()
    ),
    required={
        "rmsnorm": True,
        "post_layer_norm": True,
        "multi_query_attention": True,
        "pre_seq_len": None,
    },
    defaults={
        "rmsnorm": True,
        "post_layer_norm": True,
        "multi_query_attention": False,
        "multi_query_group_num": 1,
        "kv_channels": 128,
        "layernorm_epsilon": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    names=TensorNames(
        embedding="transformer.embedding.word_embeddings",
        final_norm="transformer.encoder.final_layernorm",
        head="transformer.output_layer",
        layer="transformer.encoder.layers.{layer}",
        qkv=("self_attention.query_key_value",),
        output="self_attention.dense",
        mlp=MlpNames(("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h"),
    ),
)

# By the name in `architectures`. The defaults are those of transformers' configuration classes.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(spellings=_ALL_ATTENTION_BIASES, own_fields=frozenset({"mlp_bias"})),
    "MistralForCausalLM": Family(windows=_ALL_WINDOWED, defaults={"sliding_window": 4096}),
    "MixtralForCausalLM": Family(
        experts=True,
        windows=_ALL_WINDOWED,
        spellings={
            "num_experts": "num_local_experts",
            "moe_intermediate_size": "intermediate_size",
        },
        own_fields=_EXPERT_FIELDS,
        required={"norm_topk_prob": True},
        defaults={
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        names=TensorNames(
            router="block_sparse_moe.gate",
            expert=MlpNames(
                ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
                "block_sparse_moe.experts.{expert}.w2",
            ),
        ),
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows=_LATER_SWITCHED),
    "Qwen2MoeForCausalLM": Family(
        experts=True,
        windows=_EVEN_SWITCHED,
        own_fields=_EXPERT_FIELDS | {"qkv_bias", "shared_expert_intermediate_size"},
        defaults={
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "Qwen3ForCausalLM": Family(
        qk_norm=True,
        windows=_LATER_SWITCHED,
        spellings=_ALL_ATTENTION_BIASES,
        defaults={"head_dim": 128},
    ),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=True,
        experts=True,
        windows=_ALL_SWITCHED,
        spellings={**_ALL_ATTENTION_BIASES, "num_experts": "num_local_experts"},
        own_fields=_EXPERT_FIELDS,
        defaults={"num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "GptOssForCausalLM": Family(
        experts=True,
        clamped_gate=True,
        windows=_EVEN,
        spellings={
            **_ALL_ATTENTION_BIASES,
            "num_experts": "num_local_experts",
            "moe_intermediate_size": "intermediate_size",
        },
        # `experts_per_token` is written beside `num_experts_per_tok` and not read by transformers.
        own_fields=_EXPERT_FIELDS | {"experts_per_token"},
        required={"norm_topk_prob": True},
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "sliding_window": 128,
        },
        names=TensorNames(
            sinks="self_attn.sinks",
            router="mlp.router",
            expert=MlpNames(("mlp.experts.gate_up_proj",), "mlp.experts.down_proj"),
        ),
    ),
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _text_of(_QWEN3_5),
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _text_of(_QWEN3_5_MOE),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM_4,
    "ChatGLMModel": _CHATGLM,
    "ChatGLMForConditionalGeneration": _CHATGLM,
}
