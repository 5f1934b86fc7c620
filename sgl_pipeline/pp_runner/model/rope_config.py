"""The rotary embedding that a config.json describes, and how many tokens it is served for.

`dynamic` and `longrope` choose their frequencies by the length of the sequence, and transformers
changes them while a sequence grows. Keys in pages keep the rotation that they were written with,
and sequences of all lengths share them, so a server has one choice for all: that of transformers
for a sequence of the server's whole context. By default this context ends where the choice would
change the numbers, and tokens are those of transformers at every length; `--context-length` asks
for more, as with vLLM and SGLang. It must never pass over a rope parameter that changes the maths.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from sgl_pipeline.errors import ConfigurationError, UnsupportedModelError
from sgl_pipeline.pp_runner.model.config_fields import ConfigFields
from sgl_pipeline.pp_runner.model.families import Family
from sgl_pipeline.pp_runner.model.rope_spec import (
    LinearScaling,
    Llama3Scaling,
    PairScaling,
    RopeSpec,
    Scaling,
    YarnScaling,
)

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_FACTORS = frozenset(
    "factor original_max_position_embeddings low_freq_factor high_freq_factor attention_factor"
    " beta_fast beta_slow mscale mscale_all_dim truncate short_factor long_factor".split()
)
# Read elsewhere here; the others have no effect on what is computed: the three positions that
# `mrope` shares the pairs out to are the same one in text.
_OTHER_PARAMETERS = frozenset(
    "rope_type type rope_theta partial_rotary_factor finetuned max_position_embeddings"
    " mrope_section mrope_interleaved".split()
)


class ContextLengths(NamedTuple):
    """Tokens of a model: its context unless `--context-length` says otherwise, and the most that
    its rotary embedding is made for."""

    default: int
    longest: int


class RopeConfig:
    """The rope parameters of a config.json, checked.

    Raises UnsupportedModelError and ConfigurationError, which name the parameter.
    """

    def __init__(self, fields: ConfigFields, family: Family) -> None:
        self._parameters = parameters = rope_parameters(fields.raw)
        if any(isinstance(value, dict) for value in parameters.values()):
            raise UnsupportedModelError("config.json: rope_parameters for each layer type")
        self._kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
        if self._kind not in ROPE_KINDS:
            raise UnsupportedModelError(
                f"config.json: rope type {self._kind!r} is not supported; known are "
                f"{', '.join(ROPE_KINDS)}"
            )
        for name, value in parameters.items():
            if value and name not in _FACTORS | _OTHER_PARAMETERS:
                raise UnsupportedModelError(
                    f"config.json: rope type {self._kind} with {name} {value!r}, which may change "
                    "what the model computes, is not supported"
                )
        self._max_positions = fields.positive("max_position_embeddings")
        # Where both are given, transformers takes the one beside the parameters.
        name = "original_max_position_embeddings"
        original = fields.get(name) or parameters.get(name) or self._max_positions
        self._original_context = self._tokens(name, original)
        self._interleaved = family.interleaved_rope
        self._rotated_share = self._read_rotated_share(fields, family)
        # ChatGLM3 stretches the base: modeling_chatglm.py, RotaryEmbedding.forward_impl.
        theta = parameters.get("rope_theta") or fields.get("rope_theta") or 10_000.0
        self._theta = self._number("rope_theta", theta) * fields.number("rope_ratio", 1.0)
        if self._theta <= 1:
            raise ConfigurationError(f"config.json: rope_theta is {theta!r}, not a number above 1")

    def context_lengths(self) -> ContextLengths:
        """SGLang and vLLM stretch `max_position_embeddings` by the factor of `linear` and
        `dynamic`, too; for YaRN this is vLLM's reading: configs are published with and without the
        factor in `max_position_embeddings`."""
        published = self._max_positions
        if self._kind == "linear":
            stretched = int(self._factor() * published)
            return ContextLengths(stretched, stretched)
        if self._kind == "dynamic":
            return ContextLengths(published, int(self._factor() * published))
        if self._kind == "yarn":
            stretched = max(published, int(self._factor() * self._original_context))
            return ContextLengths(stretched, stretched)
        if self._kind == "longrope":
            return ContextLengths(min(self._original_context, published), published)
        return ContextLengths(published, published)

    def spec(self, head_dim: int, context_length: int) -> RopeSpec:
        """The embedding of heads of `head_dim` on a server of `context_length` tokens."""
        rotated = int(head_dim * self._rotated_share)
        theta, attention_factor = self._theta, 1.0
        scaling: Scaling | None = None
        if self._kind == "linear":
            scaling = LinearScaling(self._factor())
        elif self._kind == "dynamic":
            theta = self._dynamic_theta(rotated, context_length)
        elif self._kind == "llama3":
            scaling = self._llama3()
        elif self._kind == "yarn":
            scaling, attention_factor = self._yarn(), self._yarn_attention_factor()
        elif self._kind == "longrope":
            scaling = self._longrope(rotated, context_length)
            attention_factor = self._longrope_attention_factor()
        return RopeSpec(theta, scaling, attention_factor, self._rotated_share, self._interleaved)

    def _factor(self) -> float:
        """The factor by which the context is stretched. DeepSeek's configs may give it by lengths
        alone, with a factor of null; LongRoPE's may have none."""
        parameters = self._parameters
        by_lengths = self._kind == "longrope" or (self._kind == "yarn" and "factor" in parameters)
        if by_lengths and parameters.get("factor") is None:
            return self._max_positions / self._original_context
        return self._number("factor", parameters.get("factor"))

    def _dynamic_theta(self, rotated: int, context_length: int) -> float:
        """The base that transformers' `_compute_dynamic_ntk_parameters` has for a sequence of
        `context_length` tokens."""
        if rotated <= 2:
            raise ConfigurationError("config.json: rope type dynamic needs heads of more than 2")
        factor, published = self._factor(), self._max_positions
        stretch = factor * max(context_length, published) / published - (factor - 1)
        return float(self._theta * stretch ** (rotated / (rotated - 2)))

    def _llama3(self) -> Llama3Scaling:
        low, high = (
            self._number(name, self._parameters.get(name))
            for name in ("low_freq_factor", "high_freq_factor")
        )
        return Llama3Scaling(self._factor(), low, high, self._original_context)

    def _yarn(self) -> YarnScaling:
        truncated = self._parameters.get("truncate", True)
        if not isinstance(truncated, bool):
            raise ConfigurationError(f"config.json: truncate is {truncated!r}, not true or false")
        return YarnScaling(
            self._factor(),
            self._original_context,
            fast_turns=self._optional("beta_fast") or 32.0,
            slow_turns=self._optional("beta_slow") or 1.0,
            truncated=truncated,
        )

    def _yarn_attention_factor(self) -> float:
        if (given := self._parameters.get("attention_factor")) is not None:
            return self._number("attention_factor", given)
        scale, scale_of_all = self._optional("mscale"), self._optional("mscale_all_dim")
        if scale and scale_of_all:
            return self._temperature(scale) / self._temperature(scale_of_all)
        return self._temperature(1.0)

    def _temperature(self, scale: float) -> float:
        """YaRN's, equation 22, with DeepSeek's `scale` of the logarithm."""
        factor = self._factor()
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    def _longrope(self, rotated: int, context_length: int) -> PairScaling:
        name = "long_factor" if context_length > self._original_context else "short_factor"
        values = self._parameters.get(name)
        if not isinstance(values, list) or len(values) != rotated // 2:
            found = f"{len(values)} numbers" if isinstance(values, list) else repr(values)
            raise ConfigurationError(
                f"config.json: rope type longrope needs {rotated // 2} numbers in {name}, "
                f"one for each rotated pair, and has {found}"
            )
        return PairScaling(tuple(self._number(name, value) for value in values))

    def _longrope_attention_factor(self) -> float:
        if (given := self._parameters.get("attention_factor")) is not None:
            return self._number("attention_factor", given)
        factor, original = self._factor(), self._original_context
        if factor <= 1:
            return 1.0
        if original == 1:
            raise ConfigurationError("config.json: an original context of 1 token")
        return math.sqrt(1 + math.log(factor) / math.log(original))

    def _read_rotated_share(self, fields: ConfigFields, family: Family) -> float:
        share = self._parameters.get("partial_rotary_factor")
        if family.partial_rope and share is None:
            share = fields.get("partial_rotary_factor")
        share = 1.0 if share is None else share
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigurationError(f"config.json: partial_rotary_factor is {share!r}")
        if share != 1 and not family.partial_rope:
            raise UnsupportedModelError(f"config.json: partial_rotary_factor {share}, not 1")
        return float(share)

    def _optional(self, name: str) -> float | None:
        """A parameter for which null and 0 mean that it is not set, as in transformers."""
        value = self._parameters.get(name)
        return self._number(name, value) if value else None

    def _number(self, name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ConfigurationError(
                f"config.json: rope type {self._kind} needs {name}, a number above 0, got {value!r}"
            )
        return float(value)

    def _tokens(self, name: str, value: Any) -> int:
        number = self._number(name, value)
        if not number.is_integer():
            raise ConfigurationError(f"config.json: {name} is {value!r}, not a number of tokens")
        return int(number)


def rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes `rope_parameters`; older ones `rope_scaling`, beside `rope_theta`."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ConfigurationError(f"config.json: rope_scaling is {parameters!r}, not an object")
    return parameters
