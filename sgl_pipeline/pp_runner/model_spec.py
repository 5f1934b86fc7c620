"""What a model is, read from its Hugging Face config: sizes, rotary embedding, biases, EOS ids.

Read by the stage worker, which builds its layers from it, and by `managers/`, which plans the
stages with it. Must never pass over a config field that changes the maths: what the decoder does
not compute is refused by name, because a model that runs slightly wrong looks like one that works.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sgl_pipeline.errors import ConfigurationError, UnsupportedModelError
from sgl_pipeline.pp_runner.attention.backend import AttentionShape

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How an architecture differs from the plain decoder, and what its config may leave out.

    `bias_fields` are the config fields that switch biases on; `has_window_switch` says that
    `sliding_window` counts only where `use_sliding_window` and `layer_types` say so.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    bias_fields: frozenset[str] = frozenset()
    has_window_switch: bool = False
    defaults: Config = field(default_factory=dict)


# The defaults are those of transformers' configuration classes.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(bias_fields=frozenset({"attention_bias", "mlp_bias"})),
    "MistralForCausalLM": Family(defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family(qkv_bias=True, has_window_switch=True),
    "Qwen3ForCausalLM": Family(
        qk_norm=True,
        bias_fields=frozenset({"attention_bias"}),
        has_window_switch=True,
        defaults={"head_dim": 128},
    ),
}

ROPE_FACTORS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}

# Fields whose names sound like maths (see below) but which are read here or concern training.
_KNOWN_FIELDS = frozenset(
    "attention_bias mlp_bias attention_dropout hidden_act head_dim num_attention_heads rms_norm_eps"
    " rope_parameters rope_scaling rope_theta sliding_window use_sliding_window max_window_layers"
    " max_position_embeddings tie_word_embeddings attn_implementation _attn_implementation"
    " _attn_implementation_autoset use_cache chunk_size_feed_forward output_attentions"
    " num_key_value_heads layer_types".split()
)
# An unknown field is refused when its name holds one of these and its value does something.
_MATHS_WORDS = tuple(
    "activation alibi attention attn bias chunk clip compress embedding expert factor lora moe"
    " multiplier norm quant residual rope rotary scal sliding soft_cap softcap window".split()
)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotary embedding: base `theta`, and `factors` by their Hugging Face names
    (`ROPE_FACTORS[kind]`)."""

    theta: float
    kind: str = "default"
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that the decoder needs to know of a model. Lengths in tokens.

    `dtype` is the torch dtype name that the checkpoint was saved in. `eos_token_ids` are those of
    config.json and generation_config.json; the tokenizer's are added by `managers/`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_epsilon: float
    rope: RopeSpec
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    dtype: str
    eos_token_ids: frozenset[int]

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices (norms and biases are too few to count)."""
        heads = 2 * self.num_query_heads + 2 * self.num_kv_heads
        return self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)

    @property
    def head_layers(self) -> float:
        """What lm_head weighs, in layers: the ratio of the bytes that a decode step reads."""
        return self.vocab_size * self.hidden_size / self.layer_weights

    def attention_shape(
        self, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> AttentionShape:
        """What an attention backend needs to know; scores are scaled by head_dim ** -0.5."""
        return AttentionShape(
            num_query_heads=self.num_query_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            scale=self.head_dim**-0.5,
            dtype=dtype,
            device=device,
        )


def read_model_spec(path: str | Path) -> ModelSpec:
    """The spec of the model directory `path` (config.json, and generation_config.json if it is
    there).

    Raises ConfigurationError when there is no readable config, UnsupportedModelError when the model
    needs something that the decoder does not compute.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigurationError(f"--model-path {path}: no such directory")
    generation_path = directory / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    return model_spec(_read_json(directory / "config.json"), generation)


def model_spec(config: Config, generation_config: Config | None = None) -> ModelSpec:
    """The spec that the dicts of config.json and generation_config.json describe.

    Raises UnsupportedModelError naming the architecture or the field.
    """
    architecture = _known_architecture(config)
    family = FAMILIES[architecture]
    config = {**family.defaults, **config}
    _refuse_unsupported_fields(config, architecture)
    num_query_heads = _positive(config, "num_attention_heads")
    hidden_size = _positive(config, "hidden_size")
    attention_bias = bool(config.get("attention_bias"))
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=_positive(config, "num_hidden_layers"),
        num_query_heads=num_query_heads,
        num_kv_heads=_positive(config, "num_key_value_heads", num_query_heads),
        head_dim=_positive(config, "head_dim", hidden_size // num_query_heads),
        context_length=_positive(config, "max_position_embeddings"),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope_spec(config),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias")),
        qk_norm=family.qk_norm,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        eos_token_ids=_eos_token_ids(config) | _eos_token_ids(generation_config or {}),
    )
    if spec.num_query_heads % spec.num_kv_heads or spec.head_dim % 2:
        raise ConfigurationError(
            f"config.json: num_attention_heads {spec.num_query_heads} must be a multiple of "
            f"num_key_value_heads {spec.num_kv_heads}, and head_dim {spec.head_dim} must be even"
        )
    return spec


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"--model-path {path.parent} holds no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


def _known_architecture(config: Config) -> str:
    architectures = config.get("architectures") or []
    for architecture in architectures:
        if architecture in FAMILIES:
            return str(architecture)
    raise UnsupportedModelError(
        f"config.json names the architectures {architectures}; known are {', '.join(FAMILIES)}"
    )


def _refuse_unsupported_fields(config: Config, architecture: str) -> None:
    family = FAMILIES[architecture]
    if _sliding_window_in_use(config, family):
        _refuse(config, "sliding_window", architecture)
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        _refuse(config, "layer_types", architecture)
    if config.get("hidden_act", "silu") != "silu":
        _refuse(config, "hidden_act", architecture)
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name) and name not in family.bias_fields:
            _refuse(config, name, architecture)
    for name, value in config.items():
        sounds_like_maths = any(word in name for word in _MATHS_WORDS)
        if name not in _KNOWN_FIELDS and sounds_like_maths and not _is_neutral(name, value):
            _refuse(config, name, architecture)


def _refuse(config: Config, name: str, architecture: str) -> None:
    value = repr(config[name])
    shown = value if len(value) <= 80 else value[:77] + "..."
    raise UnsupportedModelError(
        f"config.json sets {name} = {shown}, which changes what the model computes; "
        f"it is not supported for {architecture}"
    )


def _sliding_window_in_use(config: Config, family: Family) -> bool:
    if config.get("sliding_window") is None:
        return False
    if not family.has_window_switch:
        return True
    # Where layer_types is given, it alone decides (and is checked by itself).
    return bool(config.get("use_sliding_window")) and not config.get("layer_types")


def _is_neutral(name: str, value: Any) -> bool:
    """Whether `value` leaves the maths alone: switched off, or a multiplication by one."""
    if not value:
        return True
    multiplies = any(word in name for word in ("factor", "multiplier", "scal"))
    return multiplies and value is not True and value == 1


def _positive(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"config.json: {name} is {value!r}, not a positive integer")
    return value


def _rope_spec(config: Config) -> RopeSpec:
    """transformers 5 writes `rope_parameters`; older ones `rope_theta` and `rope_scaling`."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModelError("config.json: rope_parameters for each layer type")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_FACTORS:
        raise UnsupportedModelError(
            f"config.json: rope type {kind!r} is not supported; known are {', '.join(ROPE_FACTORS)}"
        )
    rotated_share = parameters.get("partial_rotary_factor")
    if rotated_share not in (None, 1):
        raise UnsupportedModelError(f"config.json: partial_rotary_factor {rotated_share}, not 1")
    fallbacks = {"original_max_position_embeddings": config.get("max_position_embeddings")}
    factors = []
    for name in ROPE_FACTORS[kind]:
        factor = parameters.get(name, fallbacks.get(name))
        if not isinstance(factor, int | float) or factor <= 0:
            raise ConfigurationError(f"config.json: rope type {kind} needs {name}, got {factor!r}")
        factors.append(float(factor))
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0
    return RopeSpec(float(theta), kind, tuple(factors))


def _eos_token_ids(config: Config) -> frozenset[int]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ConfigurationError(f"config.json: eos_token_id is {value!r}, not a token id")
    return frozenset(ids)
