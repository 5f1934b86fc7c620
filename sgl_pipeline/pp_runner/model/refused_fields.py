"""Refuses models whose config.json has fields that change the maths and that the decoder does not
compute: a model that runs slightly wrong looks like one that works.
"""

from collections.abc import Mapping
from typing import Any

from sgl_pipeline.errors import UnsupportedModelError
from sgl_pipeline.pp_runner.model.families import FAMILIES

# Fields whose names sound like maths (see below) but which are read here or concern training.
_KNOWN_FIELDS = frozenset(
    "attention_dropout hidden_act head_dim num_attention_heads rms_norm_eps"
    " rope_parameters rope_scaling rope_theta sliding_window use_sliding_window max_window_layers"
    " max_position_embeddings original_max_position_embeddings tie_word_embeddings"
    " attn_implementation _attn_implementation"
    " _attn_implementation_autoset use_cache chunk_size_feed_forward output_attentions"
    " num_key_value_heads layer_types quantization_config".split()
)
# An unknown field is refused when its name holds one of these and its value does something.
_MATHS_WORDS = tuple(
    "activation alibi attention attn bias chunk clip compress embedding expert factor lora moe"
    " multiplier norm quant residual rope rotary router scal sliding soft_cap softcap topk vision"
    " window".split()
)


def refuse_unsupported_fields(config: Mapping[str, Any], architecture: str) -> None:
    """Raises UnsupportedModelError, which names the first such field of `config`: config.json with
    the defaults of the family of `architecture`."""
    family = FAMILIES[architecture]
    if config.get("hidden_act", "silu") != "silu":
        _refuse(config, "hidden_act", architecture)
    for name, needed in family.required.items():
        if config.get(name) != needed:
            _refuse(config, name, architecture)
    known = _KNOWN_FIELDS | family.own_fields | {*family.spellings.values(), *family.required}
    if family.partial_rope:
        known |= {"partial_rotary_factor"}
    for name, value in config.items():
        sounds_like_maths = any(word in name for word in _MATHS_WORDS)
        if name not in known and sounds_like_maths and not _is_neutral(name, value):
            _refuse(config, name, architecture)


def _refuse(config: Mapping[str, Any], name: str, architecture: str) -> None:
    value = repr(config[name])
    shown = value if len(value) <= 80 else value[:77] + "..."
    raise UnsupportedModelError(
        f"config.json sets {name} = {shown}, which changes what the model computes; "
        f"it is not supported for {architecture}"
    )


def _is_neutral(name: str, value: Any) -> bool:
    """True if `value` does not change the maths: switched off, or a multiplication by one."""
    if not value:
        return True
    multiplies = any(word in name for word in ("factor", "multiplier", "scal"))
    return multiplies and value is not True and value == 1
