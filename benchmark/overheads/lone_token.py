"""Measures where a lone request's token takes its time: the parts of a step, and what else the
cores do.

    python -m benchmark.overheads.lone_token
    python -m benchmark.overheads.lone_token --model smollm2 --engine "ours --pp 1 --weights bf16"

Run by hand on a quiet machine, a minute for each engine. Requests come one after the other; the
steps are from the server's own trace. Beside them stands what each process takes of the cores
meanwhile: a compute thread that another process takes from its core is waited for by all.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import psutil
import requests

from benchmark.overheads.feature_overhead import stream
from benchmark.support.command import Command, Options, Report, at_least_one, say
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import Engine
from benchmark.support.engines import parse_engine, running
from benchmark.support.machine import usable_cores
from benchmark.support.measured_models import NAMES, measured_model
from benchmark.support.measured_runs import DEFAULT_PRESET, trace_of
from benchmark.support.paths import SCRATCH
from benchmark.support.process_kinds import process_kind
from sgl_pipeline.records.trace import StepRecord

ENGINES = ("ours --pp 1",)
PROMPT_TOKENS = 64
_VOCABULARY = 30_000  # ids below are tokens of every model here
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class TokenParts:
    """A step of one decode on one stage, in ms: together from one decision to the next."""

    decide: float  # until the order is sent
    order: float  # until the stage has taken it
    inputs: float  # until its inputs are built and it begins to compute
    layers: float
    head: float  # logits, and the token drawn from them
    report: float  # until the scheduler has it
    book: float  # until the next decision

    @property
    def whole(self) -> float:
        return sum(getattr(self, one.name) for one in fields(self))


def parts_of(step: StepRecord, next_scheduled_s: float) -> TokenParts:
    """The parts of a step of a single stage that the next one follows at `next_scheduled_s`."""
    (stage,) = step.stages
    sent_s = min(step.scheduled_s + step.schedule_ms / 1e3, stage.plan_s)
    moments_s = [
        step.scheduled_s,
        sent_s,
        stage.plan_s,
        stage.activations_s,
        stage.layers_s,
        stage.done_s,
        step.finished_s,
        next_scheduled_s,
    ]
    return TokenParts(*((later - earlier) * 1e3 for earlier, later in pairwise(moments_s)))


def lone_decodes(steps: Sequence[StepRecord]) -> list[TokenParts]:
    """The parts of each step of one decode that another such step follows, of the same request."""
    return [
        parts_of(step, after.scheduled_s)
        for step, after in pairwise(steps)
        if all((one.prefill_tokens, one.decodes) == (0, 1) for one in (step, after))
        and not step.ended
    ]


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """The work of a process of the server meanwhile: its processor time, and how often its threads
    were taken from their core by another."""

    name: str
    seconds: float
    preemptions: int

    def since(self, before: "ProcessUse") -> "ProcessUse":
        return ProcessUse(
            self.name, self.seconds - before.seconds, self.preemptions - before.preemptions
        )


def uses_of(server: psutil.Process) -> dict[int, ProcessUse]:
    """By process id, of `server` and its descendants."""
    return {one.pid: _use_of(one) for one in (server, *server.children(recursive=True))}


def _use_of(process: psutil.Process) -> ProcessUse:
    with process.oneshot():
        times, kind = process.cpu_times(), process_kind(process.cmdline(), process.pid)
    preemptions = 0
    for thread in process.threads():
        with open(f"/proc/{process.pid}/task/{thread.id}/status", encoding="utf-8") as status:
            counts = [one for one in status if one.startswith("nonvoluntary_ctxt_switches")]
        preemptions += int(counts[0].split()[1])
    return ProcessUse(kind, times.user + times.system, preemptions)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, port=31970)
    command.add("--engine", action="append", help=f"of one stage (default: {ENGINES})")
    command.add("--model", default=DEFAULT_PRESET, help=f"{NAMES} (default: {DEFAULT_PRESET})")
    command.add("--requests", type=at_least_one, default=8)
    command.add("--output-tokens", type=at_least_one, default=128)
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    model = measured_model(options.model)
    texts = options.engine or ENGINES
    engines = [
        parse_engine(text, model.path, options.port, SCRATCH, usable_cores()) for text in texts
    ]
    tables, record = [], {}
    for engine in engines:
        found = _profile(engine, options.requests, options.output_tokens)
        record[engine.label] = {
            "tpot_ms": found.tpot_ms,
            "tpot_unstreamed_ms": found.tpot_unstreamed_ms,
            "weight_bytes": found.weight_bytes,
            "parts_ms": [[getattr(one, part.name) for part in fields(one)] for one in found.parts],
            "uses": [[one.name, one.seconds, one.preemptions] for one in found.uses],
        }
        tables += [parts_table(engine.label, found), use_table(found)]
        say(f"{engine.label}: {statistics.median(found.tpot_ms):.2f} ms a token")
    return Report(
        name="lone_token",
        texts=tables,
        facts={
            "load": {
                "model": options.model,
                "requests": f"{options.requests} one after the other, "
                f"{PROMPT_TOKENS} tokens in, {options.output_tokens} out",
            },
        },
        record={"engines": record},
    )


@dataclass(frozen=True, slots=True)
class Profile:
    """Measurements of an engine: TPOT of each streamed request, of one that is answered at its
    end, the steps of the streamed ones, and what each process did during them."""

    tpot_ms: list[float]
    tpot_unstreamed_ms: list[float]
    weight_bytes: int
    parts: list[TokenParts]
    uses: list[ProcessUse]

    @property
    def num_tokens(self) -> int:
        return len(self.parts) + len(self.tpot_ms)  # a request's last step has no part


def _profile(engine: Engine, num_requests: int, output_tokens: int) -> Profile:
    def body(number: int) -> dict[str, Any]:
        prompt = [(7 + 131 * number + 17 * place) % _VOCABULARY for place in range(PROMPT_TOKENS)]
        sampling = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": sampling, "stream": True}

    def unstreamed_ms(number: int) -> float:
        """From the end of the prompt's step to the answer, for each further token."""
        asked = body(number) | {"stream": False}
        first = asked | {"sampling_params": asked["sampling_params"] | {"max_new_tokens": 1}}
        seconds = []
        for one in (first, asked):
            began_s = time.perf_counter()
            reply = requests.post(f"{engine.base_url}/generate", json=one, timeout=_TIMEOUT_S)
            reply.raise_for_status()
            seconds.append(time.perf_counter() - began_s)
        return (seconds[1] - seconds[0]) * 1e3 / (output_tokens - 1)

    with running(engine, SCRATCH / "lone_token.log") as server:
        assert server is not None
        reply = requests.get(f"{engine.base_url}/server_info", timeout=_TIMEOUT_S)
        facts = reply.json()["internal_states"][0]
        for number in range(2):  # of which nothing counts
            stream(engine.base_url, body(number))
        num_before, before = len(trace_of(engine)), uses_of(server)
        tpot_ms = [stream(engine.base_url, body(number))[0] for number in range(num_requests)]
        after, steps = uses_of(server), trace_of(engine)[num_before:]
        tpot_unstreamed_ms = [unstreamed_ms(number) for number in range(num_requests)]
    uses = [use.since(before[pid]) for pid, use in after.items() if pid in before]
    return Profile(
        tpot_ms,
        tpot_unstreamed_ms,
        sum(facts["weight_bytes_of_stages"]),
        lone_decodes(steps),
        uses,
    )


def parts_table(label: str, found: Profile) -> str:
    """Markdown: medians, tenths and means of the steps' parts, and what they add up to."""
    columns = {
        one.name: [getattr(parts, one.name) for parts in found.parts] for one in fields(TokenParts)
    }
    columns["whole"] = [parts.whole for parts in found.parts]
    rows = []
    for name, values in columns.items():
        tenths = statistics.quantiles(values, n=10)
        numbers = (tenths[0], statistics.median(values), tenths[-1], statistics.fmean(values))
        rows.append([name, *(f"{number:.3f}" for number in numbers)])
    note = (
        f"TPOT of a streamed answer {statistics.median(found.tpot_ms):.2f} ms, of one that comes "
        f"whole {statistics.median(found.tpot_unstreamed_ms):.2f} ms. Weights with embedding: "
        f"{found.weight_bytes / 2**20:.0f} MiB."
    )
    table = markdown_table(["part, ms", "p10", "median", "p90", "mean"], rows)
    return f"**{label}**\n\n{table}\n\n{note}"


def use_table(found: Profile) -> str:
    """Markdown: what each process took of the cores for each token of a streamed answer."""
    rows = [
        [
            one.name,
            f"{one.seconds * 1e3 / found.num_tokens:.3f}",
            f"{one.preemptions / found.num_tokens:.3f}",
        ]
        for one in found.uses
    ]
    return markdown_table(["process", "core ms a token", "preempted a token"], rows)


if __name__ == "__main__":
    sys.exit(main())
