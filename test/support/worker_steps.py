"""A worker in an interpreter of its own: which modules do its first real steps import?

    python -m support.worker_steps MODEL DTYPE

Prints their names as JSON. Run by `test_rehearsal.py`: where other tests have run, everything is
imported already.
"""

import json
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any

from sgl_pipeline.args import StageArgs
from sgl_pipeline.pp_runner import stage_worker
from sgl_pipeline.pp_runner.worker_hello import WorkerSite
from sgl_pipeline.requests import GREEDY, LogprobSpec, SamplingSpec
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import (
    PoolSize,
    Shutdown,
    StageAssignment,
    StageReady,
    StageReport,
    WorkerFailed,
)
from sgl_pipeline.wire.stage_orders import OrderStream
from sgl_pipeline.wire.step_order import ChunkOrder, RequestOpen, StepOrder

SAMPLED = SamplingSpec(top_p=0.8, top_k=5, min_p=0.01, presence_penalty=0.5, logit_bias=((1, 2.0),))
PROMPT, NEXT = b"\1\0\0\0" * 7, b"\2\0\0\0"


class Channel:
    """Gives `messages`; notes what was imported when the worker got ready, and after each step."""

    def __init__(self, messages: list[Any]) -> None:
        self.modules: list[set[str]] = []
        self._messages = deque(messages)

    def send(self, message: Any) -> None:
        assert not isinstance(message, WorkerFailed), message
        if isinstance(message, StageReady | StageReport):
            self.modules.append(set(sys.modules))

    def wait(self, descriptors: Iterable[int], timeout_s: float | None = None) -> None:
        pass

    def receive(self, timeout_ms: int | None = None) -> Any:
        return self._messages.popleft() if self._messages else None


def steps() -> list[StepOrder]:
    """A prompt and a decode of it, greedy, and the same drawn with everything that can be asked."""
    plans = []
    for handle, sampling in enumerate((GREEDY, SAMPLED)):
        opened = RequestOpen(handle, sampling, 7, LogprobSpec(0, 2, (3,)) if handle else None)
        page = handle.to_bytes(4, "little")
        plans += [
            StepOrder(
                len(plans), 0, (), (opened,), (ChunkOrder(handle, 0, 7, True, PROMPT, page),)
            ),
            StepOrder(len(plans) + 1, 0, (), (), (ChunkOrder(handle, 7, 1, True, NEXT),)),
        ]
    return plans


def main(model: str, dtype: str) -> None:
    assignment = StageAssignment(
        stage=0,
        plan=StagePlan(0, (6,)),
        args=StageArgs(model_path=model, dtype=dtype, max_total_tokens=160),
        page_size=16,
        links=(),
        cpu_threads=1,
        cpu_cores=(),
    )
    stream = OrderStream()
    orders = [stream.seal(plan) for plan in steps()]
    stage_worker.pin_threads = lambda threads, cores: None
    channel = Channel([assignment, PoolSize(16), *orders, Shutdown()])
    stage_worker.StageWorker(channel, 0, WorkerSite("run")).run()  # type: ignore[arg-type]
    ready, *after = channel.modules
    assert len(after) == len(orders), f"{len(after)} of {len(orders)} steps were reported"
    print(json.dumps(sorted(set().union(*after) - ready)))


if __name__ == "__main__":
    main(*sys.argv[1:])
