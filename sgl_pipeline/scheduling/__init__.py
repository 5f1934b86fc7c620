"""Who runs next: the scheduler core, without I/O, clock, randomness or tensors.

`managers/` and `simulator/` drive a `StepScheduler` and see nothing else of this room.
"""

from sgl_pipeline.requests import TokenEvent
from sgl_pipeline.scheduling.age_limit import WAITED_TOO_LONG
from sgl_pipeline.scheduling.step_scheduler import StepScheduler

__all__ = ["WAITED_TOO_LONG", "StepScheduler", "TokenEvent"]
