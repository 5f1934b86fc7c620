"""Records a stage's steps with torch's profiler and writes them down as a Chrome trace.

It works between steps. A failure is reported in a `ProfileReply` and never ends the stage.
"""

import os

from torch.profiler import ProfilerActivity, profile

from sgl_pipeline.wire.stage_messages import ProfileReply, StartProfile


class StageProfile:
    """At most one recording at a time, of one stage; with `has_gpu` it runs on a GPU."""

    def __init__(self, stage: int, has_gpu: bool) -> None:
        self._stage = stage
        self._has_gpu = has_gpu
        self._profiler: profile | None = None
        self._path = ""
        self._steps_left: int | None = None

    def start(self, request: StartProfile) -> ProfileReply:
        """Records from now on, unless something is being recorded already."""
        if self._profiler is not None:
            return self._reply("a profile is being recorded already")
        activities = [ProfilerActivity.CPU] if "CPU" in request.activities else []
        if "GPU" in request.activities and self._has_gpu:
            activities.append(ProfilerActivity.CUDA)
        if not activities:
            return self._reply("activities: there is no GPU; ask for CPU")
        try:
            os.makedirs(os.path.dirname(request.path), exist_ok=True)
            # An unwritable path is refused now, not after the recording.
            with open(request.path, "wb"):
                pass
            profiler = profile(
                activities=activities,
                with_stack=request.with_stack,
                record_shapes=request.record_shapes,
            )
            profiler.start()
        except (OSError, RuntimeError) as error:
            return self._reply(f"{type(error).__name__}: {error}")
        self._profiler, self._path = profiler, request.path
        self._steps_left = request.num_steps
        return self._reply()

    @property
    def ends_with_this_step(self) -> bool:
        """True if the next `step_done` ends the recording."""
        return self._profiler is not None and self._steps_left == 1

    def step_done(self) -> ProfileReply | None:
        """To be called after each step: ends a recording that has all the steps it should have."""
        if self._profiler is None or self._steps_left is None:
            return None
        self._steps_left -= 1
        return self.stop() if self._steps_left == 0 else None

    def stop(self) -> ProfileReply:
        """Ends the recording, if there is one, and writes it."""
        if self._profiler is None:
            return self._reply()
        profiler, self._profiler = self._profiler, None
        try:
            profiler.stop()
            profiler.export_chrome_trace(self._path)
        except (OSError, RuntimeError) as error:
            return self._reply(f"{type(error).__name__}: {error}")
        return self._reply()

    def _reply(self, error: str = "") -> ProfileReply:
        return ProfileReply(self._stage, self._profiler is not None, error)
