"""The policies that `POST /pipeline/tune` tries."""

import asyncio

import msgspec
import pytest

from sgl_pipeline.managers.entrance import tuning
from sgl_pipeline.managers.entrance.tuning import TuneBody, Tuner


class Process:
    """A process of the simulator that answers with the policies of its task."""

    returncode = 0

    def communicate(self, payload: bytes, timeout_s: float) -> tuple[bytes, bytes]:
        return msgspec.msgpack.encode(msgspec.msgpack.decode(payload)["policies"]), b""

    def kill(self) -> None:
        pass

    def wait(self) -> None:
        pass


@pytest.mark.parametrize(
    ("in_force", "named", "tried"),
    [
        ("sarathi", None, ["sarathi", "throttle-time", "throttle"]),
        ("throttle", None, ["throttle", "throttle-time"]),
        ("throttle-time", None, ["throttle-time", "throttle"]),
        ("throttle", ("greedy-queue",), ["greedy-queue"]),
    ],
)
def test_the_default_policy_is_tried_whatever_is_in_force(
    in_force: str, named: tuple[str, ...] | None, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_start", Process)
    body = TuneBody(ttft_ms=500.0, tpot_ms=40.0, policies=named)
    answer = asyncio.run(Tuner().run(body, msgspec.msgpack.encode({}), in_force))
    assert msgspec.msgpack.decode(answer) == tried
