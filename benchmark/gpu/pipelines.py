"""Whole pipelines of real stage processes, driven by scripted steps in place of a scheduler.

As many steps are in flight as the driver is asked for. With as many groups of decodes as that, a
group's next step leaves when its last one is back, as the server's does; what the server adds is
the time of its decision. Stage processes that share a card take turns on it: what a depth costs
over one stage is the price of the split, not a gain.
"""

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from benchmark.gpu.shapes import MODELS, PAGE_SIZE, spec_of
from sgl_pipeline.args import PipelineArgs, SchedulingArgs, StageArgs
from sgl_pipeline.errors import StageFailure
from sgl_pipeline.managers.stages.stage_launcher import StageLauncher
from sgl_pipeline.managers.stages.stage_processes import StageProcesses
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.wire.stage_messages import StageReport
from sgl_pipeline.wire.stage_orders import OrderStream
from sgl_pipeline.wire.step_order import StepOrder

_POLL_MS = 200
_REPORT_TIMEOUT_S = 60.0
_MEMORY_FRACTION = 0.8


@dataclass(slots=True)
class DrivenStep:
    """The result of one step: the moments of each stage by its number, the tokens that the last one
    drew, and when the driver had them (`back_s`, monotonic)."""

    timings: dict[int, StageTiming] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()
    back_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """The times of rounds of decodes; the first round fills the pipeline and is left out.

    In a round every request draws one token, in a step one group of them. `turnaround_ms` is how
    long after a group's tokens were drawn the first stage begins to compute its next step, and
    `wait_shares` the share of the time that each stage waits for activations.
    """

    round_ms: float
    step_ms: float
    turnaround_ms: float
    wait_shares: tuple[float, ...]


class ScriptedPipeline:
    """A pipeline of stage processes that is up; starting it took `start_s`."""

    def __init__(self, launcher: StageLauncher, start_s: float) -> None:
        self.start_s = start_s
        self._launcher = launcher
        self._orders = OrderStream()
        self._steps: dict[int, DrivenStep] = {}
        self._num_reports = 0
        self._num_back = 0

    def run(self, plans: Sequence[StepOrder], in_flight: int) -> list[DrivenStep]:
        """Sends `plans`, keeping at most `in_flight` of them under way, and waits for the last.

        Raises StageFailure or ConfigurationError where a stage does, and TimeoutError.
        """
        orders = [self._orders.seal(plan) for plan in plans]
        self._steps = {plan.step_id: DrivenStep() for plan in plans}
        self._num_reports = self._num_back = 0
        for num_sent, order in enumerate(orders):
            while num_sent - self._num_back >= in_flight:
                self._collect()
            self._launcher.broadcast(order)
        while self._num_reports < len(plans) * len(self._launcher.stages):
            self._collect()
        return list(self._steps.values())

    def _collect(self) -> None:
        """Waits for messages and books them; raises what a stage died of."""
        deadline_s = time.monotonic() + _REPORT_TIMEOUT_S
        while not self._launcher.channel.socket.poll(_POLL_MS):
            self._launcher.check({})
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no stage reported for {_REPORT_TIMEOUT_S:.0f} s")
        for _, message in self._launcher.receive():
            assert isinstance(message, StageReport)
            self._book(message)
        self._launcher.check({})

    def _book(self, report: StageReport) -> None:
        step = self._steps[report.step_id]
        step.timings[report.stage] = report.timing
        self._num_reports += 1
        if report.token_ids is not None:
            step.token_ids = report.token_ids
            step.back_s = time.monotonic()
            self._num_back += 1


def decode_times(steps: Sequence[DrivenStep], num_groups: int) -> DecodeTimes:
    """The times of the rounds of `steps`, each of `num_groups`; at least two rounds."""
    num_stages = len(steps[0].timings)
    counted = steps[num_groups:]
    seconds = steps[-1].back_s - steps[num_groups - 1].back_s
    turnarounds_s = [
        later.timings[0].activations_s - before.timings[num_stages - 1].done_s
        for before, later in zip(steps, counted, strict=False)
    ]
    waits_s = [
        sum(step.timings[stage].activations_s - step.timings[stage].inputs_s for step in counted)
        for stage in range(num_stages)
    ]
    return DecodeTimes(
        round_ms=seconds * 1e3 * num_groups / len(counted),
        step_ms=seconds * 1e3 / len(counted),
        turnaround_ms=statistics.fmean(turnarounds_s) * 1e3,
        wait_shares=tuple(wait_s / seconds for wait_s in waits_s),
    )


def same_tokens_share(steps: Sequence[DrivenStep], others: Sequence[DrivenStep]) -> float:
    """The share of tokens that two runs of the same plans drew alike."""
    pairs = [
        (one, two)
        for mine, theirs in zip(steps, others, strict=True)
        for one, two in zip(mine.token_ids, theirs.token_ids, strict=True)
    ]
    return sum(one == two for one, two in pairs) / len(pairs)


def links_between(device: str, num_stages: int, num_gpus: int) -> tuple[str, ...]:
    """The links to try between `num_stages` on a machine with `num_gpus`: `none` for one stage."""
    if num_stages == 1:
        return ("none",)
    if device == "cuda" and num_gpus >= num_stages:
        return ("nccl", "host")
    return ("host",)


@dataclass(frozen=True, slots=True)
class PipelineChoice:
    """The pipeline to start: `link` is one of `links_between`. It gets `start_timeout_s` to be
    ready."""

    model: str
    num_stages: int
    link: str
    max_total_tokens: int
    device: str
    start_timeout_s: float

    def args(self, directory: str) -> PipelineArgs:
        """The server's arguments for it. `directory` has the model's config.json."""
        return PipelineArgs(
            stages=StageArgs(
                num_stages=self.num_stages,
                layer_partition="even",
                model_path=directory,
                load_format="dummy",
                dtype="bfloat16",
                device=self.device,
                link="auto" if self.link == "none" else self.link,
                max_total_tokens=self.max_total_tokens,
                memory_fraction=_MEMORY_FRACTION,
            ),
            scheduling=SchedulingArgs(page_size=PAGE_SIZE),
            run_directory=directory,
        )


@contextmanager
def started_pipeline(choice: PipelineChoice) -> Iterator[ScriptedPipeline]:
    """The stages of a model with random weights, each in a process, until the block ends.

    Raises ConfigurationError or StageFailure where a stage does, and TimeoutError.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sgl_pipeline_bench_") as directory:
        config = json.dumps(MODELS[choice.model].config("bfloat16"))
        Path(directory, "config.json").write_text(config, encoding="utf-8")
        with _stages(choice, choice.args(directory)) as launcher:
            yield ScriptedPipeline(launcher, time.monotonic() - started_s)


@contextmanager
def _stages(choice: PipelineChoice, args: PipelineArgs) -> Iterator[StageLauncher]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    processes = StageProcesses(args.run_directory)
    processes.start(args.stages.num_stages, args.stages.cpu_threads)
    num_layers = spec_of(choice.model).num_layers
    launcher = StageLauncher(args, num_layers, processes.pids, context)
    try:
        with killed_after(choice.start_timeout_s, processes.close):
            launcher.start()
        yield launcher
    finally:
        launcher.stop()
        processes.close()
        context.destroy(linger=0)


@contextmanager
def killed_after(timeout_s: float, kill: Callable[[], None]) -> Iterator[None]:
    """Calls `kill` where the block has not ended in time, and turns the error that this makes of
    the block into a TimeoutError."""
    is_killed = threading.Event()

    def end() -> None:
        is_killed.set()
        kill()

    timer = threading.Timer(timeout_s, end)
    timer.start()
    try:
        yield
    except StageFailure as error:
        if is_killed.is_set():
            message = f"the stages were not ready after {timeout_s:.0f} s, and were killed"
            raise TimeoutError(message) from error
        raise
    finally:
        timer.cancel()
