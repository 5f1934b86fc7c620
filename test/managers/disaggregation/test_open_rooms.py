"""A server with a role opens its end of the rooms, as its flags have it."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from support.clusters import host_directory, open_port, until
from support.pipelines import make_request, new_scheduler

from sgl_pipeline.args import DisaggregationArgs, PipelineArgs, StageArgs
from sgl_pipeline.disaggregation.decode_rooms import DecodeRooms
from sgl_pipeline.disaggregation.room_limits import RoomLimits
from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.disaggregation import open_rooms as module
from sgl_pipeline.managers.disaggregation.open_rooms import open_rooms
from sgl_pipeline.requests import Room
from sgl_pipeline.stage_plan import StagePlan

STAGES = StageArgs(model_path="m", dtype="float32", kv_cache_dtype="int8")


def opened(run_directory: str = "", **role: Any) -> Any:
    """The end of a server of two layers whose worker 0 fills its stage."""
    args = PipelineArgs(
        stages=STAGES, disaggregation=DisaggregationArgs(**role), run_directory=run_directory
    )
    core: Any = SimpleNamespace(
        scheduler=new_scheduler(num_pages=8, num_stages=1), plan=StagePlan(0, (2,))
    )
    roster: Any = SimpleNamespace(workers_of_stages=[0], host_address=lambda worker: "")
    spec: Any = SimpleNamespace(num_layers=2)
    return open_rooms(args, spec, core, roster, 30000, zmq.Poller())


@pytest.fixture(autouse=True)
def digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "store_identity", lambda args, spec: SimpleNamespace(digest="d"))


def test_a_server_without_a_role_has_no_rooms() -> None:
    assert opened() is None


def test_both_ends_meet(tmp_path: Path) -> None:
    directories = [host_directory(tmp_path / name) for name in ("p", "d")]
    prefill, decode = (
        opened(directory, mode=mode)
        for directory, mode in zip(directories, ("prefill", "decode"), strict=True)
    )
    with open_port(directories[0]) as (address, _):
        request = make_request("r", range(5), 1)
        request.room = Room(3, address)
        decode.check(request)
        decode.opened(request, time.monotonic())

        def have_met() -> bool:
            for end in (prefill, decode):
                end.serve(time.monotonic())
            return bool(prefill.state().num_peers and decode.state().num_peers)

        until(have_met)
    for end in (decode, prefill):
        end.close()


def test_limits_are_those_of_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def make(*parts: Any) -> DecodeRooms:
        made.extend(parts)
        return DecodeRooms(*parts)

    monkeypatch.setattr(module, "DecodeRooms", make)
    end = opened(
        mode="decode",
        bootstrap_timeout_s=1.0,
        waiting_timeout_s=2.0,
        reserved_decode_tokens=3,
        decode_fallback=True,
        silence_s=4.5,
        failure_probability=1.0,
    )
    _, identity, limits, rule = made
    assert rule is None
    assert limits == RoomLimits(
        bootstrap_timeout_s=1.0,
        waiting_timeout_s=2.0,
        reserved_tokens=3,
        falls_back=True,
        silence_s=4.5,
    )
    assert (identity.digest, identity.kv_dtype, identity.num_layers) == ("d", "int8", 2)
    request = make_request("r", range(5), 1)
    request.room = Room(3, "p:1")
    with pytest.raises(RequestError, match="SGLANG_TEST_DISAGG_FAILURE_PROB"):
        end.check(request)
    end.close()


def test_attention_is_offloaded_by_flag() -> None:
    end = opened(mode="prefill", attention_offload=True)
    assert end.state().offload.most_lent_pages == 4
    end.close()
    end = opened(mode="decode", attention_offload=True, attention_offload_ratio="0.5")
    assert end.state().offload.bound == 0.5
    end.close()
    end = opened(mode="decode")
    assert end.state().offload is None
    end.close()
