"""The sizes of made-up models: their config.json and the shapes of their tensors."""

from dataclasses import asdict, dataclass
from typing import Any

Shapes = dict[str, tuple[int, ...]]

# Of `make_model.SPECIAL_TOKENS`.
_TOKEN_IDS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Sizes of a dense Qwen3-shaped model, by the names of its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool = False

    def config(self, dtype: str) -> dict[str, Any]:
        """The contents of config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **asdict(self),
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "rope_scaling": None,
            "max_position_embeddings": 32_768,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            **_TOKEN_IDS,
            "torch_dtype": dtype,
        }

    def mixer_shapes(self, layer: int) -> Shapes:
        """The tensors of the attention of `layer`, or of what is in its place."""
        return _attention_shapes(self, self.num_attention_heads * self.head_dim)

    def mlp_shapes(self) -> Shapes:
        """The tensors of a layer's feed-forward part."""
        return _mlp_shapes("mlp", self.hidden_size, self.intermediate_size)

    def tensor_shapes(self) -> Shapes:
        """Every tensor of the checkpoint by name, in file order."""
        hidden = self.hidden_size
        shapes: Shapes = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_hidden_layers):
            layer_shapes: Shapes = {
                "input_layernorm.weight": (hidden,),
                **self.mixer_shapes(layer),
                "post_attention_layernorm.weight": (hidden,),
                **self.mlp_shapes(),
            }
            for name, shape in layer_shapes.items():
                shapes[f"model.layers.{layer}.{name}"] = shape
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePreset(Preset):
    """Sizes of a Qwen3-MoE-shaped model, whose layers are all sparse."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = True

    def config(self, dtype: str) -> dict[str, Any]:
        names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
        return Preset.config(self, dtype) | names

    def mlp_shapes(self) -> Shapes:
        shapes: Shapes = {"mlp.gate.weight": (self.num_experts, self.hidden_size)}
        for expert in range(self.num_experts):
            prefix = f"mlp.experts.{expert}"
            shapes |= _mlp_shapes(prefix, self.hidden_size, self.moe_intermediate_size)
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPreset(Preset):
    """Sizes of a dense Qwen3.5-shaped model: every fourth layer attends, the others have a state.
    Heads of 256 numbers, of which 64 are rotated."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4

    @property
    def layer_types(self) -> list[str]:
        """The type of each layer, by the names of config.json."""
        kinds = ["linear_attention", "full_attention"]
        return [kinds[layer % 4 == 3] for layer in range(self.num_hidden_layers)]

    def config(self, dtype: str) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **asdict(self),
            "layer_types": self.layer_types,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10_000_000,
                "rope_type": "default",
            },
            "max_position_embeddings": 32_768,
            "attention_bias": False,
            **_TOKEN_IDS,
            "torch_dtype": dtype,
        }

    def mixer_shapes(self, layer: int) -> Shapes:
        if self.layer_types[layer] == "full_attention":
            # The queries bring their output gates along.
            return _attention_shapes(self, 2 * self.num_attention_heads * self.head_dim)
        hidden, num_heads = self.hidden_size, self.linear_num_value_heads
        value_width = num_heads * self.linear_value_head_dim
        num_channels = 2 * self.linear_num_key_heads * self.linear_key_head_dim + value_width
        return {
            "linear_attn.in_proj_qkv.weight": (num_channels, hidden),
            "linear_attn.in_proj_z.weight": (value_width, hidden),
            "linear_attn.in_proj_b.weight": (num_heads, hidden),
            "linear_attn.in_proj_a.weight": (num_heads, hidden),
            "linear_attn.conv1d.weight": (num_channels, 1, self.linear_conv_kernel_dim),
            "linear_attn.A_log": (num_heads,),
            "linear_attn.dt_bias": (num_heads,),
            "linear_attn.norm.weight": (self.linear_value_head_dim,),
            "linear_attn.out_proj.weight": (hidden, value_width),
        }


def _attention_shapes(preset: Preset, query_width: int) -> Shapes:
    hidden = preset.hidden_size
    kv_width = preset.num_key_value_heads * preset.head_dim
    return {
        "self_attn.q_proj.weight": (query_width, hidden),
        "self_attn.k_proj.weight": (kv_width, hidden),
        "self_attn.v_proj.weight": (kv_width, hidden),
        "self_attn.q_norm.weight": (preset.head_dim,),
        "self_attn.k_norm.weight": (preset.head_dim,),
        "self_attn.o_proj.weight": (hidden, preset.num_attention_heads * preset.head_dim),
    }


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }
