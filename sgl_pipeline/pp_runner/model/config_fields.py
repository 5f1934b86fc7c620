"""The fields of a model's config.json, under the names of all families.

Checks the type of a field's value, never its meaning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_pipeline.errors import ConfigurationError

# Fields of a multimodal config that are not repeated, or win, where its text model is described.
_OF_WHOLE_MODEL = (
    "architectures dtype torch_dtype eos_token_id quantization_config tie_word_embeddings"
).split()


def text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the text model of a multimodal config, as a text model's config has them; any
    other `config` as it is."""
    if not has_text_config(config):
        return config
    of_all = {name: config[name] for name in _OF_WHOLE_MODEL if config.get(name) is not None}
    return {**config["text_config"], **of_all}


def has_text_config(config: Mapping[str, Any]) -> bool:
    """True if the fields of `config`'s text model are under `text_config`."""
    return isinstance(config.get("text_config"), Mapping)


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """`raw` by the names that most families use; `spellings` maps those to this config's own.

    Errors name a field as the config spells it.
    """

    raw: Mapping[str, Any]
    spellings: Mapping[str, str]

    def spelt(self, name: str) -> str:
        """This config's name for the field `name`."""
        own = self.spellings.get(name, name)
        return own if own in self.raw else name

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name`, or `default` if the config does not have it."""
        return self.raw.get(self.spelt(name), default)

    def positive(self, name: str, default: int | None = None) -> int:
        """The positive integer `name`; raises ConfigurationError if it is not one."""
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(
                f"config.json: {self.spelt(name)} is {value!r}, not a positive integer"
            )
        return value

    def number(self, name: str, default: float) -> float:
        """The number above zero `name`; raises ConfigurationError if it is not one."""
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigurationError(
                f"config.json: {self.spelt(name)} is {value!r}, not a number above 0"
            )
        return float(value)

    def integers(self, name: str) -> frozenset[int]:
        """The list of integers `name`, none by default; raises ConfigurationError otherwise."""
        value = self.get(name) or []
        if not isinstance(value, list) or not all(isinstance(entry, int) for entry in value):
            raise ConfigurationError(
                f"config.json: {self.spelt(name)} is {value!r}, not a list of integers"
            )
        return frozenset(value)
