"""One record per step, the same from the runtime and from the simulator.

Written as JSON lines by `managers/` (`--trace-path`) and `simulator/`; every plot and benchmark
reads these and does not know which produced them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec


class StageTiming(msgspec.Struct, frozen=True):
    """One stage's share of a step: idle before its input was there, then busy with it."""

    input_wait_ms: float
    compute_ms: float


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one step carried and what it cost. Times are seconds of the producer's clock.

    `samples` are the rows that went through the head, `attended_tokens` the pairs of a row and a
    token that it attends to.
    """

    step_id: int
    epoch: int
    prefill_tokens: int
    decodes: int
    samples: int
    attended_tokens: int
    waiting_tokens: int
    running_decodes: int
    free_page_share: float
    scheduled_s: float
    finished_s: float
    schedule_ms: float
    result_ms: float
    stages: tuple[StageTiming, ...]


class TraceWriter:
    """Writes a new file of records, a line each, flushed when closed or asked."""

    def __init__(self, path: str | Path) -> None:
        self._file: IO[bytes] = Path(path).open("wb")  # noqa: SIM115 - closed by `close`
        self._encoder = msgspec.json.Encoder()

    def write(self, record: StepRecord) -> None:
        self._file.write(self._encoder.encode(record) + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_trace(path: str | Path) -> Iterator[StepRecord]:
    """The records of a trace file, in order. Raises msgspec.ValidationError on a foreign line."""
    decoder = msgspec.json.Decoder(StepRecord)
    with open(path, "rb") as lines:
        for line in lines:
            yield decoder.decode(line)
