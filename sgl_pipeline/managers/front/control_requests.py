"""Answers upstream's control messages: all messages that its scheduler takes, except generations.

An unanswered message would hang the HTTP route that sent it, so every type of upstream's dispatch
table is here: served, or refused with the reply that its route waits for. Where a reply has no room
for a refusal, `entrance/route_guard.py` refuses the route.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from sglang.srt.managers import io_struct as io

from sgl_pipeline.managers.front.garbage import collect_at_leisure
from sgl_pipeline.managers.front.tier_requests import TIER_TYPES, TierRequests
from sgl_pipeline.managers.reports.profiles import Profiles
from sgl_pipeline.managers.upstream.upstream_messages import (
    FlushMessage,
    LoggingMessage,
    PauseMessage,
    SessionMessage,
    SglangMessage,
)

logger = logging.getLogger(__name__)

# One flush waits at a time, so none may wait for ever.
MAX_FLUSH_WAIT_S = 600.0

_WEIGHTS = "changing weights at run time is not supported by this server yet"
_LORA = "LoRA adapters are not supported by this server yet"
_SPECULATION = "drafts come from a request's own prompt and output, not from a corpus"
_EXPERTS = "expert parallelism is not supported by this server: experts stay with their layer"


def _says(
    reply: Callable[..., SglangMessage], message: str, **fields: object
) -> Callable[[SglangMessage], SglangMessage]:
    return lambda request: reply(success=False, message=message, **fields)


def _lora(request: SglangMessage) -> SglangMessage:
    return io.LoRAUpdateOutput(success=False, error_message=_LORA)


def _session(request: SessionMessage) -> SglangMessage:
    return io.OpenSessionReqOutput(session_id=request.session_id, success=False)


# Message type -> the refusal that its route waits for.
_REFUSALS: dict[type, Callable[[Any], SglangMessage]] = {
    io.OpenSessionReqInput: _session,
    io.UpdateWeightFromDiskReqInput: _says(io.UpdateWeightFromDiskReqOutput, _WEIGHTS),
    io.InitWeightsUpdateGroupReqInput: _says(io.InitWeightsUpdateGroupReqOutput, _WEIGHTS),
    io.DestroyWeightsUpdateGroupReqInput: _says(io.DestroyWeightsUpdateGroupReqOutput, _WEIGHTS),
    io.InitWeightsSendGroupForRemoteInstanceReqInput: _says(
        io.InitWeightsSendGroupForRemoteInstanceReqOutput, _WEIGHTS
    ),
    io.SendWeightsToRemoteInstanceReqInput: _says(
        io.SendWeightsToRemoteInstanceReqOutput, _WEIGHTS
    ),
    io.BeginWeightUpdateReqInput: _says(io.BeginWeightUpdateReqOutput, _WEIGHTS),
    io.EndWeightUpdateReqInput: _says(io.EndWeightUpdateReqOutput, _WEIGHTS),
    io.UpdateWeightsFromDistributedReqInput: _says(
        io.UpdateWeightsFromDistributedReqOutput, _WEIGHTS
    ),
    io.UpdateWeightsFromTensorReqInput: _says(io.UpdateWeightsFromTensorReqOutput, _WEIGHTS),
    io.UpdateWeightsFromIPCReqInput: _says(io.UpdateWeightsFromIPCReqOutput, _WEIGHTS),
    io.GetWeightsByNameReqInput: lambda request: io.GetWeightsByNameReqOutput(parameter=None),
    io.CheckWeightsReqInput: _says(io.CheckWeightsReqOutput, _WEIGHTS),
    io.PdRoleSwitchReqInput: _says(
        io.PdRoleSwitchReqOutput, "disaggregation is not supported by this server yet"
    ),
    io.SetInternalStateReq: lambda request: io.SetInternalStateReqOutput(updated=False),
    io.LoadLoRAAdapterReqInput: _lora,
    io.LoadLoRAAdapterFromTensorsReqInput: _lora,
    io.UnloadLoRAAdapterReqInput: _lora,
    io.ScaleElasticEPReqInput: _says(io.ScaleElasticEPReqOutput, _EXPERTS),
    io.DumperControlReqInput: lambda request: io.DumperControlReqOutput(
        success=False, response=[], error="the tensor dumper is not supported by this server"
    ),
    io.AddExternalCorpusReqInput: _says(io.AddExternalCorpusReqOutput, _SPECULATION),
    io.RemoveExternalCorpusReqInput: _says(io.RemoveExternalCorpusReqOutput, _SPECULATION),
    io.ListExternalCorporaReqInput: _says(io.ListExternalCorporaReqOutput, _SPECULATION),
    # These replies have no room for a refusal: `entrance/route_guard.py` refuses their routes.
    io.ReleaseMemoryOccupationReqInput: lambda request: io.ReleaseMemoryOccupationReqOutput(),
    io.ResumeMemoryOccupationReqInput: lambda request: io.ResumeMemoryOccupationReqOutput(),
    io.SlowDownReqInput: lambda request: io.SlowDownReqOutput(),
    io.ExpertDistributionReq: lambda request: io.ExpertDistributionReqOutput(),
}

# No route waits for an answer to these. Their routes are refused by `entrance/route_guard.py`, or,
# for RpcReqInput, belong to upstream's offline Engine, which has another scheduler.
_UNANSWERED = (
    io.CloseSessionReqInput,
    io.RpcReqInput,
)

_SERVED = (
    io.FlushCacheReqInput,
    io.PauseGenerationReqInput,
    io.ContinueGenerationReqInput,
    io.ProfileReq,
    io.GetInternalStateReq,
    io.UpdateWeightVersionReqInput,
    io.FreezeGCReq,
    io.ConfigureLoggingReq,
    io.ShutdownReq,
)

CONTROL_TYPES: tuple[type, ...] = (*_SERVED, *TIER_TYPES, *_REFUSALS, *_UNANSWERED)


class Front(Protocol):
    """Sends replies (`sglang_io.SglangFront`)."""

    def reply(self, message: SglangMessage, to: SglangMessage) -> None: ...
    def forward_to_detokenizer(self, message: SglangMessage) -> None: ...


class ControlledServer(Protocol):
    """The part of the scheduler process that control messages reach."""

    def flush_cache(self) -> bool:
        """Empties the radix cache; False while requests are served (`StepScheduler`)."""

    def pause(self, *, retract: bool) -> None:
        """Starts no step until `resume`; with `retract`, running requests wait again."""

    def resume(self) -> None:
        """Ends a pause."""

    def describe(self) -> dict[str, Any]:
        """Facts for /server_info: stages, layer partition, policy, pages. JSON types only."""

    def shut_down(self) -> None:
        """Leaves the main loop after this tick."""


class ControlReplies:
    """Serves or refuses one control message at a time."""

    def __init__(
        self, front: Front, server: ControlledServer, profiles: Profiles, tiers: TierRequests
    ) -> None:
        self._front = front
        self._server = server
        self._profiles = profiles
        self._tiers = tiers
        # A flush that waits for the server to become idle, and its deadline (monotonic seconds).
        self._waiting_flush: tuple[FlushMessage, float] | None = None

    def answer(self, message: SglangMessage, now_s: float) -> None:
        """Answers `message`, at once or, for a flush with a timeout, from `poll`."""
        if (refusal := _REFUSALS.get(type(message))) is not None:
            self._front.reply(refusal(message), message)
        elif isinstance(message, TIER_TYPES):
            self._tiers.answer(message)
        elif isinstance(message, io.FlushCacheReqInput):
            self._flush(message, now_s)
        elif isinstance(message, io.PauseGenerationReqInput):
            self._pause(message)
        elif isinstance(message, io.ContinueGenerationReqInput):
            # `torch_empty_cache`: the stages allocate their pools once and keep nothing else.
            self._server.resume()
        elif isinstance(message, io.ProfileReq):
            self._profiles.answer(message)
        elif isinstance(message, io.GetInternalStateReq):
            state = self._server.describe()
            self._front.reply(io.GetInternalStateReqOutput(internal_state=state), message)
        elif isinstance(message, io.UpdateWeightVersionReqInput):
            # A label that the front keeps; it waits only for the acknowledgement.
            self._front.reply(io.UpdateWeightVersionReqOutput(), message)
        elif isinstance(message, io.FreezeGCReq):
            collect_at_leisure()
            self._front.forward_to_detokenizer(message)
        elif isinstance(message, io.ConfigureLoggingReq):
            self._configure_logging(message)
        elif isinstance(message, io.ShutdownReq):
            self._server.shut_down()
        else:
            logger.warning("%s is not supported and was dropped", type(message).__name__)

    def poll(self, now_s: float) -> None:
        """Finishes a waiting flush once it can be done or its time is over."""
        if self._waiting_flush is None:
            return
        message, deadline_s = self._waiting_flush
        is_flushed = self._server.flush_cache()
        if is_flushed or now_s >= deadline_s:
            self._waiting_flush = None
            self._report_flush(message, is_flushed)

    def _pause(self, message: PauseMessage) -> None:
        # Upstream's TokenizerManager holds back new requests; its mode "abort" ends all others
        # with an AbortReq and never comes here.
        self._server.pause(retract=message.mode == "retract")

    def _flush(self, message: FlushMessage, now_s: float) -> None:
        if self._waiting_flush is not None:
            reply = io.FlushCacheReqOutput(success=False, message="another flush is waiting")
            self._front.reply(reply, message)
            return
        is_flushed = self._server.flush_cache()
        if not is_flushed and message.timeout_s and message.timeout_s > 0:
            wait_s = min(message.timeout_s, MAX_FLUSH_WAIT_S)
            self._waiting_flush = (message, now_s + wait_s)
        else:
            self._report_flush(message, is_flushed)

    def _report_flush(self, message: FlushMessage, is_flushed: bool) -> None:
        text = "" if is_flushed else "requests are waiting or running; the cache was not flushed"
        self._front.reply(io.FlushCacheReqOutput(success=is_flushed, message=text), message)

    def _configure_logging(self, message: LoggingMessage) -> None:
        level = (message.log_level or "").upper()
        if level in logging.getLevelNamesMapping():
            logging.getLogger().setLevel(level)
            self._front.forward_to_detokenizer(message)
