"""The flags of fair shares: whose requests they tell apart, and the tenants' weights."""

import json
import math
import re
from pathlib import Path

from sgl_pipeline.args.checks import require
from sgl_pipeline.errors import ConfigurationError

API_KEY, USER = "api-key", "user"
_HEADER_PREFIX = "header:"
# Of a name in HTTP (RFC 9110, token).
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
MAX_TENANT_NAME_LENGTH = 256
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3


def check_fair_shares_by(flag: str, value: str) -> None:
    """Raises ConfigurationError unless `value` names what tells tenants apart."""
    header = header_of(value)
    require(
        value in (API_KEY, USER)
        or (header is not None and _HEADER_NAME.fullmatch(header) is not None),
        f"{flag} {value!r} is unknown; choose {API_KEY}, {USER} or {_HEADER_PREFIX}NAME with the "
        "name of an HTTP header",
    )


def header_of(value: str) -> str | None:
    """The header that --fair-shares-by `value` names, if it names one."""
    return value.removeprefix(_HEADER_PREFIX) if value.startswith(_HEADER_PREFIX) else None


def read_tenant_weights(text: str) -> dict[str, float]:
    """The weights by name in the JSON object `text`, or in the file of "@FILE".

    Raises ConfigurationError for anything else.
    """
    place = "--tenant-weights"
    if text.startswith("@"):
        place += f" {text}"
        try:
            text = Path(text[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{place} cannot be read: {error}") from error
    try:
        weights = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(
            f"{place} {text!r:.60} is not JSON ({error}); it must be an object of names and "
            f'weights, as {{"alice": 3}}'
        ) from error
    require(
        isinstance(weights, dict),
        f'{place} must be an object of names and weights, as {{"alice": 3}}',
    )
    for name, weight in weights.items():
        require(
            1 <= len(name) <= MAX_TENANT_NAME_LENGTH,
            f"{place}: a name has 1 to {MAX_TENANT_NAME_LENGTH} characters, got {len(name)}",
        )
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        require(
            is_number and math.isfinite(weight) and LEAST_WEIGHT <= weight <= MOST_WEIGHT,
            f"{place}: the weight of {name!r:.60} must be a number from {LEAST_WEIGHT:g} to "
            f"{MOST_WEIGHT:g}, got {weight!r:.60}",
        )
    return {name: float(weight) for name, weight in weights.items()}
