"""`/start_profile` and `/stop_profile`: a Chrome trace of each stage, named as upstream's, and one
of the steps on all of them, beside those.

A request is answered when all stages have answered (upstream:
`scheduler_components/profiler_manager.py`, whose words the replies use).
"""

import logging
import os
from dataclasses import dataclass, field
from typing import Protocol

from sglang.srt.managers import io_struct as io

from sgl_pipeline.managers.reports.trace_files import TraceFiles
from sgl_pipeline.managers.upstream.upstream_messages import ProfileMessage, SglangMessage
from sgl_pipeline.records.chrome_trace import ChromeTraceWriter
from sgl_pipeline.wire.stage_messages import ProfileReply, StartProfile, StopProfile, ToWorker

logger = logging.getLogger(__name__)

_ACTIVITIES = frozenset({"CPU", "GPU"})
_UNSUPPORTED_OPTIONS = (
    "start_step",
    "profile_by_stage",
    "profile_stages",
    "merge_profiles",
    "detailed_annotations",
)


class _Front(Protocol):
    def reply(self, message: SglangMessage, to: SglangMessage) -> None: ...


class _Stages(Protocol):
    @property
    def has_vacant_stage(self) -> bool:
        """True if a stage is being replaced."""

    @property
    def stages(self) -> range:
        """The stages that serve."""

    def send(self, stage: int, message: ToWorker) -> None: ...


@dataclass(slots=True)
class _Pending:
    """A request that some stages have not answered yet."""

    message: ProfileMessage
    waiting: set[int]
    errors: list[str] = field(default_factory=list)


class Profiles:
    """Starts and stops the profiles of all stages together."""

    def __init__(self, front: _Front, launcher: _Stages, traces: TraceFiles) -> None:
        self._front = front
        self._launcher = launcher
        self._traces = traces
        self._steps: ChromeTraceWriter | None = None
        self._recording: set[int] = set()
        self._pending: _Pending | None = None

    def answer(self, message: ProfileMessage) -> None:
        """Answers a ProfileReq, at once or from `on_reply`."""
        if self._pending is not None:
            self._refuse(message, "Another profile request is being answered.")
        elif message.req_type is io.ProfileReqType.STOP_PROFILE:
            self._stop(message)
        else:
            self._start(message)

    def on_reply(self, reply: ProfileReply) -> None:
        """A stage has answered, or has recorded as many steps as it should."""
        if reply.is_recording:
            self._recording.add(reply.stage)
        else:
            self._recording.discard(reply.stage)
            self._end_steps()
        error = f"stage {reply.stage}: {reply.error}" if reply.error else ""
        if error:
            logger.error("profiling: %s", error)
        if (pending := self._pending) is None:
            return
        pending.waiting.discard(reply.stage)
        if error:
            pending.errors.append(error)
        if not pending.waiting:
            self._pending = None
            self._finish(pending)

    def on_lost(self, stage: int) -> None:
        """A stage was lost, and its recording with it; the other stages record on. A request that
        waits for its reply fails."""
        is_awaited = self._pending is not None and stage in self._pending.waiting
        if is_awaited or stage in self._recording:
            self.on_reply(
                ProfileReply(stage=stage, is_recording=False, error="it was lost while it recorded")
            )

    def _start(self, message: ProfileMessage) -> None:
        if self._launcher.has_vacant_stage:
            self._refuse(message, "A stage is being replaced. Ask again when that is done.")
        elif self._recording:
            text = "Profiling is already in progress. Call /stop_profile first."
            self._refuse(message, text)
        elif (problem := _problem(message)) is not None:
            self._refuse(message, problem)
        elif (error := self._start_steps(message)) is not None:
            self._refuse(message, f"{type(error).__name__}: {error}")
        else:
            self._pending = _Pending(message, set(self._launcher.stages))
            for stage in self._launcher.stages:
                self._launcher.send(stage, self._order(message, stage))

    def _start_steps(self, message: ProfileMessage) -> OSError | None:
        path = _path(message, "steps.trace.json")
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._steps = ChromeTraceWriter(path)
        except OSError as error:
            return error
        self._traces.add(self._steps)
        return None

    def _end_steps(self) -> None:
        """Ends the count of steps when the last stage's recording has ended."""
        if self._steps is not None and not self._recording:
            self._traces.remove(self._steps)
            self._steps = None

    def _stop(self, message: ProfileMessage) -> None:
        if not self._recording:
            self._refuse(message, "Profiling is not in progress. Call /start_profile first.")
            return
        self._pending = _Pending(message, set(self._recording))
        self._send_stop()

    def _finish(self, pending: _Pending) -> None:
        if pending.errors and self._recording:
            self._send_stop()  # none of them, rather than some
        text = "; ".join(pending.errors) or "Succeeded."
        reply = io.ProfileReqOutput(success=not pending.errors, message=text)
        self._front.reply(reply, pending.message)

    def _send_stop(self) -> None:
        for stage in self._launcher.stages:
            self._launcher.send(stage, StopProfile())

    def _refuse(self, message: ProfileMessage, text: str) -> None:
        self._front.reply(io.ProfileReqOutput(success=False, message=text), message)

    def _order(self, message: ProfileMessage, stage: int) -> StartProfile:
        position = f"TP-0-PP-{stage}" if len(self._launcher.stages) > 1 else "TP-0"
        return StartProfile(
            path=_path(message, f"{position}.trace.json.gz"),
            activities=tuple(message.activities or sorted(_ACTIVITIES)),
            with_stack=message.with_stack is not False,
            record_shapes=bool(message.record_shapes),
            num_steps=message.num_steps or None,
        )


def _path(message: ProfileMessage, name: str) -> str:
    """The requested path of the file that ends in `name`."""
    directory = message.output_dir or os.environ.get("SGLANG_TORCH_PROFILER_DIR", "/tmp")
    parts = (message.profile_prefix, message.profile_id, name)
    folder = os.path.abspath(os.path.expanduser(directory))
    return os.path.join(folder, "-".join(part for part in parts if part))


def _problem(message: ProfileMessage) -> str | None:
    """The part of a start request that cannot be done, if there is one."""
    for option in _UNSUPPORTED_OPTIONS:
        if getattr(message, option):
            return f"{option}: not supported by this server; every stage writes one trace"
    if unknown := set(message.activities or ()) - _ACTIVITIES:
        return f"activities: {', '.join(sorted(unknown))} not supported; choose from CPU and GPU"
    if message.num_steps is not None and message.num_steps < 0:
        return f"num_steps {message.num_steps} must not be negative"
    for option in ("profile_id", "profile_prefix"):
        if "/" in (getattr(message, option) or ""):
            return f"{option} is part of a file's name and may not contain a slash"
    return None
