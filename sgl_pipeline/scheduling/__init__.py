"""The scheduler core, which decides who runs next, without I/O, clock, randomness or tensors.

A `StepScheduler` is the only entry; the other modules are its parts.
"""

from sgl_pipeline.requests import TokenEvent
from sgl_pipeline.scheduling.age_limit import WAITED_TOO_LONG
from sgl_pipeline.scheduling.explanation import Explanation
from sgl_pipeline.scheduling.outlook import Demand, Outlook
from sgl_pipeline.scheduling.recovery_log import RecoveryLog
from sgl_pipeline.scheduling.step_scheduler import StepScheduler

__all__ = [
    "WAITED_TOO_LONG",
    "Demand",
    "Explanation",
    "Outlook",
    "RecoveryLog",
    "StepScheduler",
    "TokenEvent",
]
