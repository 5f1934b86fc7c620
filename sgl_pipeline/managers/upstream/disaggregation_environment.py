"""SGLang's environment variables for prefill and decode apart: those with a meaning here, by the
field of `DisaggregationArgs` that they set; the others are named."""

import logging
import math
import os

from sgl_pipeline.errors import ConfigurationError

logger = logging.getLogger(__name__)

_PREFIXES = ("SGLANG_DISAGG", "SGLANG_TEST_DISAGG")
_TIMEOUTS = {
    "bootstrap_timeout_s": "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
    "waiting_timeout_s": "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
}
_INTERVAL = "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL"
_FAILURES = "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE"
# SGLang's defaults of these two, and the shortest interval that it takes.
_INTERVAL_S, _NUM_FAILURES, _LEAST_INTERVAL_S = 5.0, 2.0, 2.0
_FAILURE_PROBABILITY = "SGLANG_TEST_DISAGG_FAILURE_PROB"
_HONORED = {*_TIMEOUTS.values(), _INTERVAL, _FAILURES, _FAILURE_PROBABILITY}


def fields_of_environment() -> dict[str, float]:
    """The fields that variables set. `silence_s` is the time in which as many
    heartbeats of a peer fail as SGLang allows.

    Raises ConfigurationError for a value that is not such a number.
    """
    fields = {field: _number(name, 0.0) for field, name in _TIMEOUTS.items() if name in os.environ}
    if _INTERVAL in os.environ or _FAILURES in os.environ:
        interval_s = max(_LEAST_INTERVAL_S, _number(_INTERVAL, _INTERVAL_S))
        fields["silence_s"] = interval_s * _number(_FAILURES, _NUM_FAILURES)
    if _FAILURE_PROBABILITY in os.environ:
        fields["failure_probability"] = _number(_FAILURE_PROBABILITY, 0.0, most=1.0)
    return fields


def name_variables_of_other_transfers() -> None:
    """One line for all that are set and tune SGLang's own transfers alone."""
    names = [name for name in os.environ if name.startswith(_PREFIXES) and name not in _HONORED]
    if names:
        logger.warning("no effect here: %s; they tune SGLang's transfers", ", ".join(sorted(names)))


def _number(name: str, default: float, most: float = math.inf) -> float:
    """The value of a variable, above 0 and finite; `default` where it is not set."""
    text = os.environ.get(name)
    try:
        number = default if text is None else float(text)
    except ValueError:
        number = math.nan
    if not (0.0 < number <= most and math.isfinite(number)):
        limit = "" if most == math.inf else f" and at most {most:g}"
        raise ConfigurationError(f"{name}={text} must be a number above 0{limit}")
    return number
