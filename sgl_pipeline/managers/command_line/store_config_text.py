"""Reads the configuration of a store: JSON, a file in JSON, YAML or TOML, SGLang's variables."""

import json
import logging
import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import yaml

from sgl_pipeline.args.store_config import EXTRA_CONFIG_FLAG, StoreConfig, store_config
from sgl_pipeline.errors import ConfigurationError

logger = logging.getLogger(__name__)

_PREFIX = "SGLANG_HICACHE_"
# Upstream's variables: that of the folder comes before its key, the others after theirs.
_FOLDER = f"{_PREFIX}FILE_BACKEND_STORAGE_DIR"
_BOUNDS = {f"{_PREFIX}FILE_BACKEND_{key.upper()}": key for key in ("max_size", "min_free_space")}
_PARSERS: dict[str, Callable[[str], object]] = {
    ".json": json.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
    ".toml": tomllib.loads,
}


def read_store_config(text: str | None, *, takes_files: bool = True) -> StoreConfig:
    """The configuration that `text` and the environment give.

    Args:
        text: a JSON object, `@` and the name of a file, or None.
        takes_files: whether it may name a file.

    Raises ConfigurationError when it cannot be read or has what a store does not take.
    """
    values = _values(text, takes_files) if text else {}
    for name, key in _BOUNDS.items():
        if (given := os.environ.get(name)) and key not in values:
            values[key] = given
    if folder := os.environ.get(_FOLDER):
        values["file_storage_path"] = folder
    others = [name for name in os.environ if name.startswith(_PREFIX)]
    if unknown := sorted({*others} - {*_BOUNDS, _FOLDER}):
        logger.warning(
            "no effect here: %s; they are about parts of SGLang's own", ", ".join(unknown)
        )
    return store_config(values)


def _values(text: str, takes_files: bool) -> dict[str, object]:
    if text.startswith("@"):
        if not takes_files:
            raise ConfigurationError("a file is read at the start only; send its content as JSON")
        values = _content(Path(text[1:]))
    else:
        values = _parsed(json.loads, text, EXTRA_CONFIG_FLAG)
    if not isinstance(values, dict):
        raise ConfigurationError(f"{EXTRA_CONFIG_FLAG} must be an object of keys and values")
    return values


def _content(path: Path) -> object:
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        kinds = ", ".join(_PARSERS)
        raise ConfigurationError(f"{EXTRA_CONFIG_FLAG} @{path}: its name must end in {kinds}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{EXTRA_CONFIG_FLAG} @{path}: {error}") from error
    return _parsed(parse, text, f"{EXTRA_CONFIG_FLAG} @{path}")


def _parsed(parse: Callable[[str], object], text: str, source: str) -> object:
    try:
        return parse(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{source} cannot be read: {reason:.200}") from error
