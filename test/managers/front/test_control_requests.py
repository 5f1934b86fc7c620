import gc
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.managers import io_struct as io
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_control_mixin import _COMMUNICATOR_SPECS
from support.minimal_messages import minimal_fields

from sgl_pipeline.managers.front.control_requests import CONTROL_TYPES, ControlReplies
from sgl_pipeline.managers.front.message_decoder import make_decoder
from sgl_pipeline.managers.front.tier_requests import TierRequests
from sgl_pipeline.managers.reports.profiles import Profiles
from sgl_pipeline.managers.reports.trace_files import TraceFiles
from sgl_pipeline.managers.upstream.refused_features import REFUSED_ROUTES
from sgl_pipeline.wire.stage_messages import ProfileReply, StartProfile

# What `sglang_io.py` takes itself.
GENERATION_TYPES = {
    io.TokenizedGenerateReqInput,
    io.TokenizedEmbeddingReqInput,
    io.BatchTokenizedGenerateReqInput,
    io.BatchTokenizedEmbeddingReqInput,
    io.AbortReq,
}
# Types that a route of the HTTP server waits on, by upstream's own list, or with a future.
WAITED_FOR = {spec[1] for spec in _COMMUNICATOR_SPECS} | {
    io.OpenSessionReqOutput,
    io.UpdateWeightFromDiskReqOutput,
}
# Request type -> reply type where the names do not tell.
IRREGULAR = {
    io.ProfileReq: io.ProfileReqOutput,
    io.ExpertDistributionReq: io.ExpertDistributionReqOutput,
    io.GetInternalStateReq: io.GetInternalStateReqOutput,
    io.SetInternalStateReq: io.SetInternalStateReqOutput,
    io.GetHiCacheL3LayoutReq: io.GetHiCacheL3LayoutReqOutput,
    io.LoadLoRAAdapterReqInput: io.LoRAUpdateOutput,
    io.LoadLoRAAdapterFromTensorsReqInput: io.LoRAUpdateOutput,
    io.UnloadLoRAAdapterReqInput: io.LoRAUpdateOutput,
}


class FakeFront:
    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.forwarded: list[Any] = []

    def reply(self, message: Any, to: Any) -> None:
        self.replies.append(message)

    def forward_to_detokenizer(self, message: Any) -> None:
        self.forwarded.append(message)


NOW_S = 1000.0


class FakeServer:
    def __init__(self) -> None:
        self.is_idle = True
        self.num_flushes = 0
        self.pauses: list[str] = []
        self.is_shut_down = False

    def flush_cache(self) -> bool:
        self.num_flushes += self.is_idle
        return self.is_idle

    def pause(self, *, retract: bool) -> None:
        self.pauses.append("retract" if retract else "in_place")

    def resume(self) -> None:
        self.pauses.append("resume")

    def describe(self) -> dict[str, Any]:
        return {"num_stages": 4}

    def shut_down(self) -> None:
        self.is_shut_down = True


class Desk:
    def __init__(self) -> None:
        self.front, self.server = FakeFront(), FakeServer()
        channel = SimpleNamespace(send=self._recorded, has_vacant_stage=False, stages=range(1))
        profiles = Profiles(self.front, channel, TraceFiles())
        tiers = TierRequests(self.front, None, page_size=16)
        self.desk = ControlReplies(self.front, self.server, profiles, tiers)
        self._profiles = profiles

    def _recorded(self, stage: int, message: Any) -> None:
        self._profiles.on_reply(ProfileReply(stage, isinstance(message, StartProfile)))

    def ask(self, message: Any) -> Any:
        """The one reply to `message`, or None when there is none."""
        self.front.replies.clear()
        self.desk.answer(message, NOW_S)
        assert len(self.front.replies) <= 1
        return self.front.replies[0] if self.front.replies else None


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """Undoes what a desk does to the whole process: the logging level and the frozen garbage."""
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", str(tmp_path))
    level = logging.getLogger().level
    desk = Desk()
    yield desk
    desk.ask(io.ProfileReq(req_type=io.ProfileReqType.STOP_PROFILE))
    logging.getLogger().setLevel(level)
    gc.unfreeze()


def upstream_types() -> set[type]:
    """Every type in the dispatch table of upstream's scheduler, read off the table itself."""
    tables: list[list[tuple[type, Any]]] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return Recorder()

        def __call__(self, *arguments: Any) -> None: ...

    code = Scheduler.init_request_dispatcher
    scope = dict(code.__globals__, TypeBasedDispatcher=tables.append)
    recording = type(code)(code.__code__, scope, closure=code.__closure__)
    recording(Recorder())
    return {kind for kind, _ in tables[0]}


def reply_type(kind: type) -> type | None:
    if kind in IRREGULAR:
        return IRREGULAR[kind]
    named = getattr(io, kind.__name__.removesuffix("Input") + "Output", None)
    return named if inspect.isclass(named) and named in WAITED_FOR else None


def test_every_message_of_upstreams_dispatch_table_is_known() -> None:
    types = upstream_types()
    assert len(types) > 40
    assert types == GENERATION_TYPES | set(CONTROL_TYPES)
    assert len(CONTROL_TYPES) == len(set(CONTROL_TYPES))


@pytest.mark.parametrize("kind", CONTROL_TYPES, ids=lambda kind: kind.__name__)
def test_a_message_gets_the_reply_that_its_route_waits_for(desk: Desk, kind: type) -> None:
    message = make_decoder().decode(io.msgpack_encode(kind(**minimal_fields(kind))))
    reply = desk.ask(message)
    assert type(reply) is (reply_type(kind) or type(None))
    if reply is not None:
        # It survives the way to the TokenizerManager.
        assert type(io.msgpack_decode(io.msgpack_encode(reply))) is type(reply)


def test_every_reply_that_a_route_waits_for_is_given_by_some_message() -> None:
    assert {reply_type(kind) for kind in CONTROL_TYPES} - {None} == WAITED_FOR


def test_a_reply_that_cannot_say_no_has_its_route_refused() -> None:
    # Otherwise the route would report success. The served types are those that succeed.
    silent = {
        io.ReleaseMemoryOccupationReqInput: "/release_memory_occupation",
        io.ResumeMemoryOccupationReqInput: "/resume_memory_occupation",
        io.SlowDownReqInput: "/slow_down",
        io.ExpertDistributionReq: "/start_expert_distribution_record",
        io.CloseSessionReqInput: "/close_session",
        io.SetInternalStateReq: "/set_internal_state",
    }
    assert set(silent.values()) <= set(REFUSED_ROUTES)
    served = {io.UpdateWeightVersionReqInput}
    for kind in set(CONTROL_TYPES) - set(silent) - served:
        reply = reply_type(kind)
        assert reply is None or len(msgspec.structs.fields(reply)) > 2, kind


def test_the_cache_is_flushed_when_idle_and_not_when_busy(desk: Desk) -> None:
    assert desk.ask(io.FlushCacheReqInput()).success
    desk.server.is_idle = False
    reply = desk.ask(io.FlushCacheReqInput())
    assert not reply.success and "running" in reply.message
    assert desk.server.num_flushes == 1


def test_a_flush_with_a_timeout_waits_for_the_server_to_become_idle(desk: Desk) -> None:
    desk.server.is_idle = False
    assert desk.ask(io.FlushCacheReqInput(timeout_s=60)) is None
    assert not desk.ask(io.FlushCacheReqInput(timeout_s=60)).success  # one at a time
    desk.front.replies.clear()
    desk.desk.poll(NOW_S + 59.0)
    assert desk.front.replies == []
    desk.server.is_idle = True
    desk.desk.poll(NOW_S + 59.0)
    assert [reply.success for reply in desk.front.replies] == [True]


def test_a_waiting_flush_fails_when_its_time_is_over(desk: Desk) -> None:
    desk.server.is_idle = False
    desk.ask(io.FlushCacheReqInput(timeout_s=60))
    desk.desk.poll(NOW_S + 59.9)
    assert desk.front.replies == []
    desk.desk.poll(NOW_S + 60.0)
    assert [reply.success for reply in desk.front.replies] == [False]
    assert desk.server.num_flushes == 0


def test_a_pause_says_whether_running_requests_are_retracted(desk: Desk) -> None:
    for mode in ("in_place", "retract"):
        assert desk.ask(io.PauseGenerationReqInput(mode=mode)) is None
    assert desk.ask(io.ContinueGenerationReqInput()) is None
    assert desk.server.pauses == ["in_place", "retract", "resume"]


def test_server_info_tells_of_the_pipeline(desk: Desk) -> None:
    assert desk.ask(io.GetInternalStateReq()).internal_state == {"num_stages": 4}


def test_shutdown_leaves_the_loop(desk: Desk) -> None:
    assert desk.ask(io.ShutdownReq()) is None
    assert desk.server.is_shut_down


def test_logging_and_gc_requests_reach_the_detokenizer_too(desk: Desk) -> None:
    messages = [io.FreezeGCReq(), io.ConfigureLoggingReq(log_level="warning")]
    for message in messages:
        desk.ask(message)
    assert desk.front.forwarded == messages
    desk.ask(io.ConfigureLoggingReq(log_level="no such level"))
    assert desk.front.forwarded == messages
