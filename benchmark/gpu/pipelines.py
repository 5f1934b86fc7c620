"""Whole pipelines of real stage processes on one card, driven by scripted steps.

The driver stands in for the scheduler: it keeps as many steps in flight as there are stages, and
what each request's next token is was fixed before, so that every depth and link runs the same steps
and must draw the same tokens. Processes that share a card take turns on it: what a depth costs over
one stage is the price of the split, not a gain. Untested on hardware.
"""

import json
import statistics
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from benchmark.gpu.shapes import MODELS, spec_of
from sgl_pipeline.args import PipelineArgs, SchedulingArgs, StageArgs
from sgl_pipeline.managers.stage_launcher import StageLauncher, link_addresses
from sgl_pipeline.managers.stage_processes import StageProcesses
from sgl_pipeline.messages import StageReport
from sgl_pipeline.requests import GREEDY
from sgl_pipeline.step_plan import INT32, ChunkPlan, RequestOpen, StepPlan, running_checksum

_POLL_MS = 200
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Script:
    """`num_requests` prompts of `prompt_tokens`, each followed by `num_rounds` decodes.

    A step prefills `prefill_requests` prompts, or decodes one of `num_groups` equal groups.
    """

    num_requests: int = 128
    prompt_tokens: int = 512
    num_rounds: int = 24
    num_groups: int = 4
    prefill_requests: int = 4

    @property
    def tokens_a_request(self) -> int:
        return self.prompt_tokens + self.num_rounds

    def total_tokens(self, page_size: int) -> int:
        """What the KV pool must hold."""
        return self.num_requests * -(-self.tokens_a_request // page_size) * page_size

    def plans(self, page_size: int, vocab_size: int) -> list[StepPlan]:
        """All steps, prefills first."""
        pages_each = -(-self.tokens_a_request // page_size)
        steps: list[tuple[tuple[RequestOpen, ...], tuple[ChunkPlan, ...]]] = []
        handles = range(self.num_requests)
        for first in range(0, self.num_requests, self.prefill_requests):
            group = handles[first : first + self.prefill_requests]
            opens = tuple(RequestOpen(handle, GREEDY, self.prompt_tokens) for handle in group)
            chunks = tuple(
                ChunkPlan(
                    handle,
                    0,
                    self.prompt_tokens,
                    True,
                    _tokens(handle, 0, self.prompt_tokens, vocab_size),
                    array(INT32, range(handle * pages_each, (handle + 1) * pages_each)).tobytes(),
                )
                for handle in group
            )
            steps.append((opens, chunks))
        for position in range(self.prompt_tokens, self.tokens_a_request):
            for group_id in range(self.num_groups):
                chunks = tuple(
                    ChunkPlan(handle, position, 1, True, _tokens(handle, position, 1, vocab_size))
                    for handle in handles[group_id :: self.num_groups]
                )
                steps.append(((), chunks))
        plans, checksum = [], 0
        for step_id, (opens, chunks) in enumerate(steps):
            plan = StepPlan(step_id, 0, 0, (), opens, chunks)
            checksum = running_checksum(checksum, plan)
            plans.append(msgspec.structs.replace(plan, checksum=checksum))
        return plans

    @property
    def num_prefill_steps(self) -> int:
        return -(-self.num_requests // self.prefill_requests)


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """What a pipeline did. `round_ms`: every request drew one token; `wait_shares`: what share of
    the decodes' time each stage waited for activations; `tokens`: of each step, in order."""

    start_s: float
    prefill_ms: float
    round_ms: float
    wait_shares: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]

    def same_tokens_share(self, other: "PipelineRun") -> float:
        """The share of tokens that two runs of one script drew alike."""
        pairs = [
            (one, two)
            for mine, theirs in zip(self.tokens, other.tokens, strict=True)
            for one, two in zip(mine, theirs, strict=True)
        ]
        return sum(one == two for one, two in pairs) / len(pairs)


def run_pipeline(
    model: str,
    num_stages: int,
    link: str,
    script: Script,
    device: str,
    *,
    memory_fraction: float = 0.8,
) -> PipelineRun:
    """Starts the stages of `model`, runs `script`, ends them.

    Raises ConfigurationError or StageFailure where a stage does.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="sgl_pipeline_bench_") as directory:
        config = MODELS[model].config("bfloat16")
        Path(directory, "config.json").write_text(json.dumps(config), encoding="utf-8")
        page_size = SchedulingArgs().page_size
        args = PipelineArgs(
            stages=StageArgs(
                num_stages=num_stages,
                layer_partition="even",
                model_path=directory,
                load_format="dummy",
                dtype="bfloat16",
                device=device,
                link=link,
                max_total_tokens=script.total_tokens(page_size),
                memory_fraction=memory_fraction,
            ),
            run_directory=directory,
        )
        with _stages(args, model) as launcher:
            start_s = time.perf_counter() - started
            return _drive(launcher, script, page_size, spec_of(model).vocab_size, start_s)


@contextmanager
def _stages(args: PipelineArgs, model: str) -> Iterator[StageLauncher]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    processes = StageProcesses(args.run_directory)
    processes.start(args.stages.num_stages, args.stages.cpu_threads)
    launcher = StageLauncher(args, spec_of(model), link_addresses(args, 1), processes.pids, context)
    try:
        launcher.start()
        yield launcher
    finally:
        launcher.stop()
        processes.close()
        context.destroy(linger=0)


def _drive(
    launcher: StageLauncher, script: Script, page_size: int, vocab_size: int, start_s: float
) -> PipelineRun:
    plans = script.plans(page_size, vocab_size)
    depth = len(launcher.workers)
    reports: list[list[StageReport]] = [[] for _ in launcher.workers]
    moments: list[float] = []  # when the tokens of each step were here
    for plan in plans:
        while plan.step_id - len(reports[-1]) >= depth:
            _collect(launcher, reports, moments)
        launcher.channel.broadcast(launcher.workers, plan)
    while any(len(of_stage) < len(plans) for of_stage in reports):
        _collect(launcher, reports, moments)
    first_decode = script.num_prefill_steps
    # The first round fills the pipeline, and is not counted.
    counted = slice(first_decode + script.num_groups, None)
    decode_s = moments[-1] - moments[first_decode + script.num_groups - 1]
    return PipelineRun(
        start_s=start_s,
        prefill_ms=(moments[first_decode - 1] - moments[0]) * 1e3,
        round_ms=decode_s * 1e3 / (script.num_rounds - 1),
        wait_shares=tuple(
            statistics.fmean(
                report.timing.activations_s - report.timing.inputs_s for report in of_stage[counted]
            )
            * len(of_stage[counted])
            / decode_s
            for of_stage in reports
        ),
        tokens=tuple(report.token_ids or () for report in reports[-1]),
    )


def _collect(
    launcher: StageLauncher, reports: list[list[StageReport]], moments: list[float]
) -> None:
    """Waits for messages and books them; raises what a stage died of."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not launcher.channel.socket.poll(_POLL_MS):
        launcher.check({})
        if time.monotonic() > deadline:
            raise TimeoutError(f"no stage reported for {_TIMEOUT_S:.0f} s")
    for message in launcher.receive():
        assert isinstance(message, StageReport)
        reports[message.stage].append(message)
        if message.token_ids is not None:
            moments.append(time.monotonic())
    launcher.check({})


def _tokens(handle: int, first: int, count: int, vocab_size: int) -> bytes:
    """The scripted tokens of positions `first` on."""
    ids = [(handle * 7919 + position * 31) % vocab_size for position in range(first, first + count)]
    return array(INT32, ids).tobytes()
