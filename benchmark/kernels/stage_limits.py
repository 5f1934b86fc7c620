"""Compares our stages with the limits of two cores, and finds where the rest of their time goes.

    python -m benchmark.kernels.stage_limits
    python -m benchmark.kernels.stage_limits --load decode-heavy --policies throttle --layers 8,8

Run by hand, some five minutes. Policies take turns at one load, each on a server started for it.
What a core can do is measured before each round, as a shared machine drifts: how fast it reads, and
how fast it multiplies. A step's limit is the longer of the two: the stage's weights read once (and
the keys and values of a step of decodes alone), or its products.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmark.kernels.stage_step import competitors
from benchmark.models.make_model import PRESETS
from benchmark.models.preset import Preset
from benchmark.serving.against_peers import USUAL_LOADS, WARM_UP
from benchmark.support.command import Command, Options, Report, names_of, progress
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import Engine
from benchmark.support.engines import parse_engine, running
from benchmark.support.loads import Load
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import DEFAULT_PRESET, MeasuredLoad, make_model, measure
from benchmark.support.paths import SCRATCH
from benchmark.support.serving_report import spread
from benchmark.support.turns import flops_per_ms, read_bytes_per_ms
from sgl_pipeline.records.stage_timing import bubble_shares
from sgl_pipeline.records.trace import StepRecord

POLICIES = ("throttle", "sarathi", "greedy-queue")
LOADS = {name: load for name, load in USUAL_LOADS.items() if isinstance(load, Load)}
RATE_ROUNDS = 9
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class CoreRates:
    """The rates that one core reaches at most while nothing else runs."""

    read_bytes_per_ms: float
    flops_per_ms: float

    @classmethod
    def measured(cls) -> "CoreRates":
        torch.set_num_threads(1)
        kernels = competitors().values()
        flops = max(flops_per_ms(each, DTYPE, RATE_ROUNDS) for each in kernels)
        return cls(read_bytes_per_ms(RATE_ROUNDS), flops)


@dataclass(frozen=True, slots=True)
class StageWork:
    """The bytes that a stage of a `preset` has to read, and its products."""

    preset: Preset
    num_layers: int
    has_head: bool

    def limit_ms(self, step: StepRecord, rates: CoreRates) -> float:
        """The least time that a core needs for the step."""
        preset = self.preset
        width = preset.head_dim * preset.num_attention_heads
        kv_width = preset.head_dim * preset.num_key_value_heads
        projections = 2 * preset.hidden_size * (width + kv_width)
        layer = projections + 3 * preset.hidden_size * preset.intermediate_size
        head = preset.hidden_size * preset.vocab_size if self.has_head else 0
        num_rows = step.prefill_tokens + step.decodes
        products = num_rows * self.num_layers * layer + step.samples * head
        products += 2 * step.attended_tokens * self.num_layers * width
        read = self.num_layers * layer + (head if step.samples else 0)
        if not step.prefill_tokens:
            read += 2 * step.attended_tokens * self.num_layers * kv_width
        return max(
            2 * products / rates.flops_per_ms, read * DTYPE.itemsize / rates.read_bytes_per_ms
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShares:
    """Shares of the time from a run's first step to its last token, on one stage under one policy.

    `limit` is what a core needs at least, `beyond_limit` what the stage computed besides; the rest
    are the causes of `stage_timing.BubbleShares`. They add up to 1.
    """

    policy: str
    stage: int
    duration_s: float
    limit: float
    beyond_limit: float
    activations: float
    metadata: float
    slot: float


def stage_shares(
    policy: str, records: Sequence[StepRecord], work: Sequence[StageWork], rates: CoreRates
) -> list[StageShares]:
    """The shares of one run, a row a stage."""
    shares = bubble_shares(records)
    rows = []
    for stage, (own_work, own) in enumerate(zip(work, shares, strict=True)):
        busy_s = sum(record.stages[stage].compute_ms for record in records) / 1e3
        limit_s = sum(own_work.limit_ms(record, rates) for record in records) / 1e3
        limit = own.busy * limit_s / busy_s
        rows.append(
            StageShares(
                policy=policy,
                stage=stage,
                duration_s=records[-1].finished_s - records[0].scheduled_s,
                limit=limit,
                beyond_limit=own.busy - limit,
                activations=own.activations,
                metadata=own.metadata,
                slot=own.slot,
            )
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=3, port=31900)
    command.add("--load", choices=[*LOADS], default="offline", help="default: offline")
    command.add("--policies", type=names_of(POLICIES), default=POLICIES, help=", ".join(POLICIES))
    command.add("--layers", type=_layer_counts, default=(9, 7), help="of each stage (default: 9,7)")
    return command.run(_measure_limits, argv)


def _layer_counts(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _measure_limits(options: Options) -> Report:
    preset, model = PRESETS[DEFAULT_PRESET], make_model(DEFAULT_PRESET)
    layers, load, policies = options.layers, LOADS[options.load], options.policies
    last = len(layers) - 1
    work = [StageWork(preset, count, stage == last) for stage, count in enumerate(layers)]
    rows: list[StageShares] = []
    rates: list[CoreRates] = []
    with progress(options.rounds * len(policies), "runs") as bar:
        for round_number in range(1, options.rounds + 1):
            rates.append(CoreRates.measured())
            for policy in policies:
                engine = _engine(policy, layers, model, options.port)
                records = _run(engine, model, load, round_number).records
                rows += stage_shares(policy, records, work, rates[-1])
                bar.update()
    read, flops = (
        spread([one.read_bytes_per_ms / 1e6 for one in rates]),
        spread([one.flops_per_ms / 1e6 for one in rates]),
    )
    text = f"One core alone reads {read} GB/s and multiplies {flops} GFLOP/s."
    return Report(
        name="stage_limits",
        texts=[shares_table(rows), text],
        facts={
            "model": {DEFAULT_PRESET: f"layers {','.join(map(str, layers))}; prefix caches off"},
            "load": {options.load: " ".join(load.client_flags())},
            "figures": {"medians": f"of {options.rounds} runs (smallest to largest)"},
        },
        record={"rows": [asdict(one) for one in rows], "rates": [asdict(one) for one in rates]},
    )


def _run(engine: Engine, model: Path, load: Load, round_number: int) -> MeasuredLoad:
    """One run of a server that is started for it, after one that is not counted."""
    with running(engine, SCRATCH / "stage_limits.log"):
        return measure(engine, model, [WARM_UP, load], round_number)[-1]


def _engine(policy: str, layers: Sequence[int], model: Path, port: int) -> Engine:
    partition = ",".join(map(str, layers))
    text = f"ours --pp {len(layers)} --policy {policy} --pp-layer-partition {partition}"
    return parse_engine(text, model, port, SCRATCH, usable_cores())


def shares_table(rows: Sequence[StageShares]) -> str:
    """Markdown: a row for each policy and stage, medians with the smallest and the largest."""
    grouped: dict[tuple[str, int], list[StageShares]] = {}
    for row in rows:
        grouped.setdefault((row.policy, row.stage), []).append(row)
    causes = ("limit", "beyond_limit", "activations", "metadata", "slot")
    heads = ["policy", "stage", "s", "at the core's limit %", "computing beyond it %"]
    heads += [f"waiting for {cause} %" for cause in ("activations", "plans", "a slot")]
    lines = []
    for (policy, stage), runs in grouped.items():
        columns = [[run.duration_s for run in runs]]
        columns += [[getattr(run, cause) * 100 for run in runs] for cause in causes]
        lines.append([policy, str(stage), *(str(spread(column)) for column in columns)])
    return markdown_table(heads, lines)


if __name__ == "__main__":
    sys.exit(main())
