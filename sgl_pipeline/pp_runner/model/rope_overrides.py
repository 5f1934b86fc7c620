"""The rope fields of a config.json that `--json-model-override-args` sets.

SGLang has the fields of a multimodal config's text model under `text_config`; here they may stand
at the top as well.
"""

import json
from collections.abc import Mapping
from typing import Any

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.model.config_fields import has_text_config, text_fields
from sgl_pipeline.pp_runner.model.rope_config import rope_parameters

_PARAMETER_FIELDS = ("rope_scaling", "rope_parameters")
_OVERRIDABLE = (
    *_PARAMETER_FIELDS,
    "rope_theta",
    "max_position_embeddings",
    "original_max_position_embeddings",
)
_TEXT = "text_config"


def read_rope_overrides(text: str) -> dict[str, Any]:
    """The fields of `--json-model-override-args`, those under `text_config` as if at the top.

    Raises ConfigurationError, which names the flag, for other text and for other fields.
    """
    return _without_text_config(_read_object(text), f"--json-model-override-args {text}")


def overridden_rope_fields(config: Mapping[str, Any], overrides: str) -> dict[str, Any]:
    """The fields that the JSON text `overrides` gives the text model of config.json, `config`.

    Parameters are merged as SGLang merges them: those that `overrides` does not name stay.

    Raises ConfigurationError as `read_rope_overrides`, and for a length or a `text_config` that
    `config` lacks.
    """
    flag = f"--json-model-override-args {overrides}"
    if _TEXT in _read_object(overrides) and not has_text_config(config):
        raise ConfigurationError(f"{flag}: config.json has no {_TEXT}; give the fields without it")
    given, config = read_rope_overrides(overrides), text_fields(config)
    if "max_position_embeddings" in given and "max_position_embeddings" not in config:
        raise ConfigurationError(f"{flag}: config.json has no max_position_embeddings")
    new: dict[str, Any] = {}
    for name in _PARAMETER_FIELDS:
        new |= given.pop(name, {})
    if "type" in new:  # else the type in the config, in the newer spelling, would win
        new.setdefault("rope_type", new["type"])
    if "rope_theta" in given:
        new["rope_theta"] = given["rope_theta"]
    return {**given, "rope_scaling": {**rope_parameters(config), **new}}


def with_rope_overrides(config: Mapping[str, Any], overrides: str) -> Mapping[str, Any]:
    """The `text_fields` of config.json, `config`, with the JSON text `overrides`. Raises
    ConfigurationError as `overridden_rope_fields`."""
    return {**text_fields(config), **overridden_rope_fields(config, overrides)}


def overrides_of_front(
    config: Mapping[str, Any], overrides: str, max_positions: int | None = None
) -> str:
    """`overrides` as SGLang's front needs them, with `max_positions` for the
    `max_position_embeddings` if given: under `text_config` where config.json, `config`, has one.

    Raises ConfigurationError as `overridden_rope_fields`.
    """
    is_empty = not read_rope_overrides(overrides)
    fields = {} if is_empty else overridden_rope_fields(config, overrides)
    if max_positions is not None:
        fields["max_position_embeddings"] = max_positions
    return json.dumps({_TEXT: fields} if fields and has_text_config(config) else fields)


def _read_object(text: str) -> dict[str, Any]:
    flag = f"--json-model-override-args {text}"
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{flag} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigurationError(f"{flag} is not a JSON object")
    return given


def _without_text_config(given: dict[str, Any], flag: str) -> dict[str, Any]:
    if _TEXT in given:
        if len(given) > 1:
            raise ConfigurationError(f"{flag}: give all fields in {_TEXT}, or all beside it")
        given = given[_TEXT]
        if not isinstance(given, dict):
            raise ConfigurationError(f"{flag}: {_TEXT} is not a JSON object")
    if others := given.keys() - set(_OVERRIDABLE):
        raise ConfigurationError(
            f"{flag}: {', '.join(sorted(others))} cannot be overridden; only "
            f"{', '.join(_OVERRIDABLE)} can"
        )
    for name in _PARAMETER_FIELDS:
        if not isinstance(given.get(name, {}), dict):
            raise ConfigurationError(f"{flag}: {name} is not a JSON object")
    return given
