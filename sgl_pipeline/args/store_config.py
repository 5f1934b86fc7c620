"""The configuration of a store of pages.

Its keys are those of SGLang's `--hicache-storage-backend-extra-config`, and a few of ours. Each is
a field here, declared with `_key`: what is known, its default and its check follow.
`managers/command_line/store_config_text.py` reads JSON, files and variables.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, TypeVar

from sgl_pipeline.args.checks import require
from sgl_pipeline.errors import ConfigurationError

T = TypeVar("T")
EXTRA_CONFIG_FLAG = "--hicache-storage-backend-extra-config"
_READ = "read"
# Those that upstream takes (`utils/common.py`, human_readable_int).
_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)
}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(_UNITS)})?")


def _key(default: T, read: Callable[[str, object], T]) -> T:
    """A field that a key of its name sets; `read` gets the key and its value, and gives the field's
    or raises ConfigurationError."""
    return dataclasses.field(default=default, metadata={_READ: read})


def _folder(key: str, value: object) -> str:
    require(isinstance(value, str) and value != "", f"{key} must name a folder, got {value!r}")
    return str(value)


def _size_from(least: int) -> Callable[[str, object], int]:
    """Bytes: a whole number, or text with one of `_UNITS`."""

    def read(key: str, value: object) -> int:
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            units = ", ".join(_UNITS)
            raise ConfigurationError(
                f"{key} {value!r} is not a size; write bytes, or a number with {units}"
            )
        size = int(Decimal(match[1]) * _UNITS.get(match[2] or "", 1))
        require(size >= least, f"{key} {value} must be at least {least} bytes")
        return size

    return read


def _whole(key: str, value: object) -> int:
    is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(is_whole, f"{key} {value!r} must be a whole number, 1 or more")
    return int(str(value))


def _number(least: float, most: float) -> Callable[[str, object], float]:
    def read(key: str, value: object) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(str(value))
        except ValueError:
            number = math.nan
        in_range = least <= number <= most
        require(in_range, f"{key} {value!r} must be a number between {least:g} and {most:g}")
        return number

    return read


MOST_SECONDS = 3600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """The place of a store, its bounds, and the time that a request waits for it.

    `file_storage_path` is the folder of the file backend. It holds at most `max_size` bytes, by
    default four fifths of what is free at the start, and `max_files` files, and leaves
    `min_free_space` bytes of its file system free. Fewer than `prefetch_threshold` tokens are
    computed instead of loaded. A request waits for a load at most `prefetch_timeout_base` seconds
    and `prefetch_timeout_per_ki_token` more for each 1,024 tokens, and never more than
    `prefetch_timeout_max`. A stage saves at most `save_bytes_per_s`. All other keys are a backend
    of SGLang's (`backend_settings`).
    """

    file_storage_path: str = _key("/tmp/hicache", _folder)
    max_size: int | None = _key(None, _size_from(2**20))
    min_free_space: int = _key(2**30, _size_from(0))
    max_files: int = _key(1_000_000, _whole)
    prefetch_threshold: int = _key(256, _whole)
    prefetch_timeout_base: float = _key(1.0, _number(0.0, MOST_SECONDS))
    prefetch_timeout_per_ki_token: float = _key(0.25, _number(0.0, MOST_SECONDS))
    prefetch_timeout_max: float = _key(30.0, _number(0.0, MOST_SECONDS))
    save_bytes_per_s: int = _key(256 * 2**20, _size_from(2**16))
    backend_settings: Mapping[str, object] = dataclasses.field(default_factory=dict)


_FIELDS = tuple(field for field in dataclasses.fields(StoreConfig) if _READ in field.metadata)
KEYS = tuple(field.name for field in _FIELDS)


def store_config(values: Mapping[str, object], source: str = EXTRA_CONFIG_FLAG) -> StoreConfig:
    """The configuration with these `values`, and defaults for the rest.

    Raises ConfigurationError, which names `source`, for values that their keys do not take.
    """
    given: dict[str, Any] = {
        field.name: field.metadata[_READ](f"{source}: {field.name}", values[field.name])
        for field in _FIELDS
        if field.name in values
    }
    others = {name: value for name, value in values.items() if name not in KEYS}
    return StoreConfig(**given, backend_settings=others)
