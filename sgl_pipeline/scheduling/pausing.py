"""Pauses and resumes the start of steps, for operators.

Steps in flight finish during a pause, and requests still come and go.
"""

from sgl_pipeline.scheduling.preemption import Preemption
from sgl_pipeline.scheduling.running_requests import RunningRequests


class Pausing:
    """`is_paused`: no step starts until `resume`."""

    def __init__(self, running: RunningRequests, preemption: Preemption) -> None:
        self.is_paused = False
        self._retracts_running = False
        self._running = running
        self._preemption = preemption

    def pause(self, *, retract: bool) -> None:
        """Starts no step until `resume`; steps in flight finish.

        With `retract`, running requests return to the queue, each with the last of its steps in
        flight: then the cache can be flushed, and their tokens are computed again.
        """
        self.is_paused = True
        self._retracts_running = self._retracts_running or retract
        self.retract_if_asked()

    def resume(self) -> None:
        """Ends a pause, if there is one."""
        self.is_paused = self._retracts_running = False

    def retract_if_asked(self) -> None:
        """To be called when steps have left the pipeline."""
        if self._retracts_running:
            for request in [one for one in self._running if not one.steps_in_flight]:
                self._preemption.retract(request)
