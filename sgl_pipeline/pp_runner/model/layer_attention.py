"""The attention of a model's layers, or the state of some in its place, read from its config.

It must never pass over a window: a layer that sees more keys than in training runs slightly wrong.
"""

from sgl_pipeline.errors import ConfigurationError, UnsupportedModelError
from sgl_pipeline.pp_runner.attention.attention_backend import NO_ATTENTION, LayerAttention
from sgl_pipeline.pp_runner.base.state_shape import StateShape
from sgl_pipeline.pp_runner.model.config_fields import ConfigFields
from sgl_pipeline.pp_runner.model.families import Family, WindowRule

# transformers' configuration classes of Qwen2, Qwen2-MoE and Qwen3.
_MAX_WINDOW_LAYERS = 28
_CONV_WIDTHS = (2, 3, 4)  # that kernels are compiled for
_FULL, _WINDOWED, _STATE = "full_attention", "sliding_attention", "linear_attention"


def layer_attentions(fields: ConfigFields, family: Family) -> tuple[LayerAttention, ...]:
    """The attention of each layer, NO_ATTENTION of one with a state; scores are scaled by
    head_dim ** -0.5.

    Raises UnsupportedModelError for a window of a family that has none, and ConfigurationError for
    fields that contradict each other.
    """
    num_query_heads = fields.positive("num_attention_heads")
    head_dim = fields.positive("head_dim", fields.positive("hidden_size") // num_query_heads)
    num_kv_heads = fields.positive("num_key_value_heads", num_query_heads)
    if num_query_heads % num_kv_heads:
        raise ConfigurationError(
            f"config.json: num_attention_heads {num_query_heads} must be a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    has_state = _layers_with_state(fields, family)
    if all(has_state):
        raise UnsupportedModelError("config.json: every layer keeps a state, none keys and values")
    return tuple(
        NO_ATTENTION
        if with_state
        else LayerAttention(
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=head_dim,
            scale=head_dim**-0.5,
            window=window,
            has_sinks=family.names.sinks is not None,
        )
        for window, with_state in zip(_windows(fields, family), has_state, strict=True)
    )


def state_shape(fields: ConfigFields, family: Family) -> StateShape | None:
    """The state of the layers that have one; None where no layer has.

    Raises ConfigurationError for fields that contradict each other.
    """
    if not any(_layers_with_state(fields, family)):
        return None
    shape = StateShape(
        num_value_heads=fields.positive("linear_num_value_heads"),
        num_key_heads=fields.positive("linear_num_key_heads"),
        key_dim=fields.positive("linear_key_head_dim"),
        value_dim=fields.positive("linear_value_head_dim"),
        conv_width=fields.positive("linear_conv_kernel_dim"),
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise ConfigurationError(
            f"config.json: linear_num_value_heads {shape.num_value_heads} must be a multiple of "
            f"linear_num_key_heads {shape.num_key_heads}"
        )
    if shape.conv_width not in _CONV_WIDTHS:
        raise UnsupportedModelError(
            f"config.json: linear_conv_kernel_dim {shape.conv_width}; known are "
            f"{', '.join(map(str, _CONV_WIDTHS))}"
        )
    return shape


def _layers_with_state(fields: ConfigFields, family: Family) -> list[bool]:
    """For each layer, as transformers' configuration classes decide it."""
    num_layers = fields.positive("num_hidden_layers")
    if family.names.state is None:
        return [False] * num_layers
    kinds = _layer_kinds(fields, family)
    if kinds is not None:
        return [kind == _STATE for kind in kinds]
    interval = fields.positive("full_attention_interval")
    return [bool((layer + 1) % interval) for layer in range(num_layers)]


def _layer_kinds(fields: ConfigFields, family: Family) -> list[str] | None:
    """The config's `layer_types`, checked, if it has them."""
    num_layers, kinds = fields.positive("num_hidden_layers"), fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ConfigurationError(
            f"config.json: layer_types is {kinds!r:.80}, not a list of {num_layers} names"
        )
    known = (_FULL, _WINDOWED) if family.names.state is None else (_FULL, _STATE)
    for kind in kinds:
        if kind not in known:
            raise UnsupportedModelError(
                f"config.json: layer_types names {kind!r}; known are {', '.join(known)}"
            )
    return kinds


def _windows(fields: ConfigFields, family: Family) -> list[int | None]:
    """The window of each layer; None: it sees all keys."""
    is_windowed = _windowed_layers(fields, family)
    if not any(is_windowed):
        return [None] * len(is_windowed)
    if family.windows is None:
        raise UnsupportedModelError(
            f"config.json sets sliding_window = {fields.get('sliding_window')!r}, which changes "
            f"what the model computes; it is not supported for {fields.get('architectures')}"
        )
    window = fields.positive("sliding_window")
    return [window if windowed else None for windowed in is_windowed]


def _windowed_layers(fields: ConfigFields, family: Family) -> list[bool]:
    """For each layer, as transformers' configuration classes decide it."""
    num_layers = fields.positive("num_hidden_layers")
    kinds = _layer_kinds(fields, family)
    if kinds is not None:
        return [kind == _WINDOWED for kind in kinds]
    rule = family.windows or WindowRule(has_switch=False)
    is_off = rule.has_switch and not fields.get("use_sliding_window")
    if is_off or fields.get("sliding_window") is None:
        return [False] * num_layers
    bound = fields.positive("max_window_layers", _MAX_WINDOW_LAYERS)
    return [rule.includes(layer, bound) for layer in range(num_layers)]
