"""Our server, but what travels between scheduler and stages is spoiled on request.

    python -m benchmark.recovery.faulty_server --pp 2 ...   # flags as of sgl_pipeline.launch_server

Started by `hurt_stages.py`, which writes what is wanted into the file that the environment variable
names (`ask_for`). Links have buffers of a few messages (`faulty_nursery.py`). CPU only: the
scheduler process is a fork of this one.
"""

import os
import sys
from pathlib import Path
from random import Random

import msgspec

from sgl_pipeline.wire.channels import SchedulerChannel
from sgl_pipeline.wire.stage_messages import FromWorker, StageReport

WISH_VARIABLE = "SGL_PIPELINE_WANTED_FAULT"
ORDER_FAULTS = ("truncated order", "repeated order", "altered order")
REPORT_FAULTS = ("truncated report", "repeated report", "another stage's report")


def ask_for(fault: str, message: int, path: Path) -> None:
    """The `message`-th message from now on of the kind that `fault` names gets it, once."""
    draft = path.with_suffix(".part")
    draft.write_text(f"{message} {fault}")
    draft.replace(path)


class FaultyChannel(SchedulerChannel):
    """Spoils an order before it is sent, or a report before it is read."""

    def _send_encoded(self, worker: int, payload: bytes) -> None:
        if b"SealedOrder" in payload[:32]:
            fault = _wanted(ORDER_FAULTS)
            if fault == "truncated order":
                payload = payload[: len(payload) // 2]
            elif fault == "repeated order":
                super()._send_encoded(worker, payload)
            elif fault == "altered order":
                place = Random(len(payload)).randrange(len(payload) // 2, len(payload))
                payload = payload[:place] + bytes([payload[place] ^ 1]) + payload[place + 1 :]
        super()._send_encoded(worker, payload)

    def receive(self) -> tuple[int, FromWorker] | None:
        if _again:
            return _again.pop()
        return super().receive()

    def _decode(self, worker: int, frames: list[bytes]) -> FromWorker:
        if b"StageReport" not in frames[0][:32]:
            return super()._decode(worker, frames)
        fault = _wanted(REPORT_FAULTS)
        if fault == "truncated report":
            return super()._decode(worker, [frames[0][:-5]])
        message = super()._decode(worker, frames)
        if fault == "repeated report":
            _again.append((worker, message))
        if fault == "another stage's report":
            assert isinstance(message, StageReport)
            return msgspec.structs.replace(message, stage=1 - min(1, message.stage))
        return message


_again: list[tuple[int, FromWorker]] = []


def _wanted(faults: tuple[str, ...]) -> str | None:
    """The fault that this message gets, if it is its turn."""
    path = Path(os.environ[WISH_VARIABLE])
    try:
        number, fault = path.read_text().split(" ", 1)
    except FileNotFoundError:
        return None
    if fault not in faults:
        return None
    if int(number) > 0:
        ask_for(fault, int(number) - 1, path)
        return None
    path.unlink()
    return fault


def main() -> None:
    """Serves as `sgl_pipeline.launch_server` does."""
    from sgl_pipeline import launch_server
    from sgl_pipeline.managers.stages import nursery, stage_launcher

    stage_launcher.SchedulerChannel = FaultyChannel  # type: ignore[misc]
    nursery.Nursery.module = "benchmark.recovery.faulty_nursery"
    sys.argv[0] = "sgl_pipeline.launch_server"
    launch_server.run_and_exit()


if __name__ == "__main__":
    main()
