"""Every error that the package raises on purpose, drawn as one tree.

    SglPipelineError
    +-- ConfigurationError          the server cannot start as asked
    |   +-- UnsupportedModelError   an architecture or config field that we would compute wrongly
    |   +-- CheckpointError         weights missing, truncated or of the wrong shape
    |   +-- KernelBuildError        the CPU kernels cannot be compiled or loaded on this machine
    +-- RequestError                one request is refused; the server goes on
    |   +-- QueueFullError          too many requests wait (503)
    |   +-- MoveRefused             layers cannot move as asked (400), or others move now (409)
    +-- ProtocolError               scheduler and stage disagree: a lost, repeated or late message
    |   +-- WorkerFault             a worker's message cannot be what it should have said
    +-- MalformedData               bytes of a message or file that cannot be decoded
    +-- StageFailure                a stage process died or could not run a step
    +-- StoreError                  a store beyond the pool could not do what it was asked for
    |   +-- BrokenObject            an object of it is missing, short or altered
    |   +-- StoreFull               it has no space, and saving is off for a while
    |   +-- PeerLost                another server whose pages are read is gone, or does not answer
    +-- PipelineLost                the stages that are left cannot serve, and no worker comes
    +-- EngineEnded                 a call of an engine that was shut down, or whose process is gone

A message says what happened, the limit, and the knob that moves it; `assert`
is for our own bugs and never appears here.
"""


class SglPipelineError(Exception):
    """Base of all errors raised on purpose."""


class ConfigurationError(SglPipelineError):
    """Raised at start-up when flags, model or machine cannot work together."""


class UnsupportedModelError(ConfigurationError):
    """Raised when a model's config asks for maths that the decoder does not implement."""


class CheckpointError(ConfigurationError):
    """Raised when a checkpoint's files or tensors do not fit the model's config."""


class KernelBuildError(ConfigurationError):
    """Raised when the CPU attention kernels cannot be compiled, cached or loaded."""


class RequestError(SglPipelineError):
    """Raised when one request cannot be served; `status_code` is the HTTP status it gets."""

    def __init__(self, message: str, status_code: int = 400) -> None:
        super().__init__(message)
        self.status_code = status_code


class QueueFullError(RequestError):
    """Raised when the waiting queue is at its limit."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status_code=503)


class MoveRefused(RequestError):
    """Raised when the layers cannot be split as an operator asks."""


class ProtocolError(SglPipelineError):
    """Raised when a message between scheduler and stages was lost, repeated or altered."""


class WorkerFault(ProtocolError):
    """Raised when a message of `worker` cannot be read, or is not its to send."""

    def __init__(self, worker: int, reason: str) -> None:
        super().__init__(f"worker {worker}: {reason}")
        self.worker = worker
        self.reason = reason


class MalformedData(SglPipelineError):
    """Raised when bytes from another process or a file cannot be decoded."""


class StoreError(SglPipelineError):
    """Raised when a store of pages cannot do what it was asked for; no request fails of it."""


class BrokenObject(StoreError):
    """Raised when an object of a store is missing, short or altered."""


class StoreFull(StoreError):
    """Raised when a store has no space for an object; saving is off for a while."""


class PeerLost(StoreError):
    """Raised when another server whose pages are read is gone or does not answer."""


class PipelineLost(SglPipelineError):
    """Raised when no worker is available and the stages that are left cannot serve without one:
    requests get a 503, and the server ends."""


class EngineEnded(SglPipelineError):
    """Raised by a call of `sgl_pipeline.Engine` that has no engine any more, or loses it."""


class StageFailure(SglPipelineError):
    """Raised when a stage process ended or could not run a step.

    Args:
        stage: position in the pipeline, 0-based.
        last_step: id of the last step that this stage reported, or None before the first.
        reason: what is known of the cause.
    """

    def __init__(self, stage: int, last_step: int | None, reason: str) -> None:
        done = "before its first step" if last_step is None else f"after step {last_step}"
        super().__init__(f"stage {stage} failed {done}: {reason}")
        self.stage = stage
        self.last_step = last_step
        self.reason = reason
