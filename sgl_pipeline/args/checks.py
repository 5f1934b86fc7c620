"""Checks of values; a ConfigurationError names the flag, its value and the limit."""

from collections.abc import Callable, Collection

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


def require_not_negative(flag: str, value: float) -> None:
    """`value` must be 0 or more."""
    require(value >= 0, f"{flag} {value} must not be negative")


def at_least(limit: int) -> Callable[[str, int], None]:
    """A check that a value is `limit` or more."""
    return lambda flag, value: require(value >= limit, f"{flag} {value} must be at least {limit}")


def one_of(choices: Collection[str]) -> Callable[[str, str], None]:
    """A check that a value is one of `choices`."""
    return lambda flag, value: require_choice(flag, value, choices)


def between(least: int, most: int) -> Callable[[str, int], None]:
    """A check that a value is in [`least`, `most`]."""
    return lambda flag, value: require(
        least <= value <= most, f"{flag} {value} must be between {least} and {most}"
    )


def seconds_from(least: int) -> Callable[[str, float], None]:
    """A check that a value is finite and `least` or more."""
    return lambda flag, value: require(
        least <= value < float("inf"),
        f"{flag} {value} must be a number of seconds, {least} or more",
    )
