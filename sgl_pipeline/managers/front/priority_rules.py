"""The meaning of a request's `priority`, by upstream's flags.

Upstream's front has filled in --default-priority-value and bounded the number before; a rule here
never fails a request that upstream would serve.
"""

from dataclasses import dataclass

from sgl_pipeline.errors import RequestError

# After all that were given one: upstream's front accepts 64-bit integers.
_LOWEST_PRIORITY = -(2**63) - 1


@dataclass(frozen=True, slots=True)
class PriorityRules:
    """The fields are upstream's flags of the same names."""

    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    abort_on_priority_when_disabled: bool = False

    def priority(self, asked: int | None) -> int:
        """`Request.priority`, of which the larger goes first, from the user's value.

        Raises RequestError (503) if priorities are refused (upstream: scheduler.py,
        _set_or_validate_priority).
        """
        if not self.enable_priority_scheduling:
            if asked is not None and self.abort_on_priority_when_disabled:
                raise RequestError(
                    "Using priority is disabled for this server. Please send a new request without "
                    "a priority.",
                    status_code=503,
                )
            return 0
        if asked is None:
            return _LOWEST_PRIORITY
        return -asked if self.schedule_low_priority_values_first else asked
