"""What the sections check alike; a ConfigurationError names the flag, its value and the limit."""

from collections.abc import Collection

from sgl_pipeline.errors import ConfigurationError


def require(condition: bool, message: str) -> None:
    """Raises ConfigurationError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigurationError(message)


def require_choice(flag: str, value: str, choices: Collection[str]) -> None:
    """`value` must be one of `choices`."""
    require(value in choices, f"{flag} {value!r} is unknown; choose from {', '.join(choices)}")


def require_seconds(flag: str, value: float) -> None:
    """`value` must be above 0 and finite."""
    require(0.0 < value < float("inf"), f"{flag} {value} must be a number of seconds above 0")
