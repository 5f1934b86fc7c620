"""The doctor's forecast beside what a server does, over links of several speeds.

    python -m benchmark.hosts.doctor_forecast

Run by hand, as root, some eleven minutes. The hosts are two namespaces of this machine with one
core each (`benchmark/hosts`). The model's costs are fitted on one of them; then the doctor measures
each link and forecasts; then a server with the layer split that it names serves a closed loop of
clients whose steps are about those of the forecast (`TYPICAL_STEP`). The trace says what the steps
were, and by what factor the stages took longer than the fitted costs say, since other work shares
the cores (`slowness`).
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from benchmark.hosts.link_speeds import LINKS, link_name
from benchmark.hosts.namespaces import Network, hosts, why_no_hosts
from benchmark.hosts.servers import cluster_flags, served
from benchmark.moves.move_gains import Clients, ClosedLoop
from benchmark.support.command import Command, Options, Report, say
from benchmark.support.dated_result import markdown_table
from benchmark.support.engine import EngineFailure
from benchmark.support.machine import usable_cores
from benchmark.support.measured_runs import DEFAULT_PRESET, make_model
from benchmark.support.paths import SCRATCH
from sgl_pipeline.costs.stage_costs import TYPICAL_STEP
from sgl_pipeline.costs.step_costs import CostFile
from sgl_pipeline.managers.planning.cost_files import DIRECTORY_VARIABLE
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.records.trace import StepRecord, read_trace

NUM_HOSTS = 2
# With a step for each stage in flight: as many decodes in each as a typical step has, prompts of as
# many tokens for each one drawn, and contexts as long in the mean.
LOAD = ClosedLoop(
    clients=NUM_HOSTS * TYPICAL_STEP.decodes,
    input_tokens=TYPICAL_STEP.context_tokens * 9 // 10,
    output_tokens=TYPICAL_STEP.context_tokens // 5,
)
_DOCTOR_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The doctor's findings on one link: its rate and delay as it found them, and output tokens/s
    of hosts in the order of their ranks, with what binds them."""

    gbit_per_s: float
    delay_ms: float
    found_gbit_per_s: float
    found_round_trip_ms: float
    layer_counts: tuple[int, ...]
    bound_by: str
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A forecast and the server: `decodes` and `prompt_tokens` are of its mean step."""

    forecast: Forecast
    output_tokens_per_s: float
    decodes: float
    prompt_tokens: float
    slowness: float

    @property
    def error(self) -> float:
        """The forecast's error, as a share of what was measured."""
        return self.forecast.output_tokens_per_s / self.output_tokens_per_s - 1.0


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__)
    command.add("--fill-s", type=float, default=75.0, help="until all clients have had an answer")
    command.add("--settle-s", type=float, default=10.0)
    command.add("--measured-s", type=float, default=30.0)
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    if reason := why_no_hosts():
        raise EngineFailure(reason)
    model = make_model(DEFAULT_PRESET)
    costs_directory = SCRATCH / "doctor_costs"
    os.environ[DIRECTORY_VARIABLE] = str(costs_directory)
    first, second, *_ = usable_cores()
    with hosts(NUM_HOSTS, cores=[(first,), (second,)]) as network:
        predictor = _fit(network, model, costs_directory)
        forecasts = []
        for gbit_per_s, delay_ms in LINKS:
            _set_cables(network, gbit_per_s, delay_ms)
            forecasts.append(_forecast(network, model, gbit_per_s, delay_ms))
            say(f"{link_name(gbit_per_s, delay_ms)}: {forecasts[-1].output_tokens_per_s:.0f}")
        compared: list[Compared] = []
        by_split = sorted(forecasts, key=lambda one: one.layer_counts)
        for counts, group in groupby(by_split, key=lambda one: one.layer_counts):
            compared += _serve(network, model, counts, [*group], predictor, options)
    compared.sort(key=lambda one: forecasts.index(one.forecast))
    return Report(
        name="doctor_forecast",
        texts=[table(compared)],
        facts={
            "model": {"preset": DEFAULT_PRESET, "stages": "2", "hosts": "2 of one core each"},
            "load": {"clients": str(LOAD)},
            "figures": {"rates": f"output tokens/s, of {options.measured_s:g} s each, one round"},
        },
        record={"compared": [asdict(one) for one in compared]},
    )


def table(compared: Sequence[Compared]) -> str:
    """In Markdown."""
    rows = [
        [
            link_name(one.forecast.gbit_per_s, one.forecast.delay_ms),
            ",".join(map(str, one.forecast.layer_counts)),
            one.forecast.bound_by,
            f"{one.forecast.output_tokens_per_s:.0f}",
            f"{one.output_tokens_per_s:.0f}",
            f"{one.error:+.1%}",
            f"{one.slowness:.2f}",
            f"{one.decodes:.0f} + {one.prompt_tokens:.0f}",
        ]
        for one in compared
    ]
    heads = ["link", "layers", "bound by", "forecast output tokens/s", "measured", "error"]
    step = f"decodes + prompt tokens a step ({TYPICAL_STEP.decodes} + {TYPICAL_STEP.prompt_tokens})"
    return markdown_table([*heads, "slowness", step], rows)


def _set_cables(network: Network, gbit_per_s: float, delay_ms: float) -> None:
    for host in network.hosts:
        host.cable(gbit_per_s=gbit_per_s, delay_ms=delay_ms / NUM_HOSTS)


def _fit(network: Network, model: Path, directory: Path) -> StepPredictor:
    """Fits the model's costs on the first host, into `directory`, where the doctor finds them."""
    shutil.rmtree(directory, ignore_errors=True)
    fit = [sys.executable, "-m", "sgl_pipeline", "fit", "--model", str(model), "--pp", "1"]
    try:
        network.hosts[0].run(*fit)
    except subprocess.CalledProcessError as error:
        raise EngineFailure(f"fit: {error.stderr.strip()}") from error
    (path,) = directory.iterdir()
    return StepPredictor(msgspec.json.decode(path.read_bytes(), type=CostFile).costs)


def _forecast(network: Network, model: Path, gbit_per_s: float, delay_ms: float) -> Forecast:
    doctor = [sys.executable, "-m", "sgl_pipeline", "doctor", "--json", "--model-path", str(model)]
    processes = [
        host.start(*doctor, *cluster_flags(network, rank), stdout=subprocess.PIPE)
        for rank, host in enumerate(network.hosts)
    ]
    text, *_ = [process.communicate(timeout=_DOCTOR_TIMEOUT_S)[0] for process in processes]
    facts: dict[str, Any] = json.loads(text)
    if not facts["is_well"] or facts["forecast"] is None:
        raise EngineFailure("; ".join([*facts["faults"], facts["forecast_missing"]]))
    (link,), ranked = facts["links"], facts["forecast"]["as_ranked"]
    return Forecast(
        gbit_per_s=gbit_per_s,
        delay_ms=delay_ms,
        found_gbit_per_s=link["gbit_per_s"],
        found_round_trip_ms=link["median_ms"],
        layer_counts=tuple(ranked["layer_counts"]),
        bound_by=ranked["bound_by"],
        output_tokens_per_s=ranked["output_tokens_per_s"],
    )


def _serve(
    network: Network,
    model: Path,
    counts: tuple[int, ...],
    forecasts: Sequence[Forecast],
    predictor: StepPredictor,
    options: Options,
) -> Iterator[Compared]:
    """Measures a server of that split over the links of `forecasts`."""
    trace = SCRATCH / "doctor_forecast.jsonl"
    trace.unlink(missing_ok=True)
    rates, times = [], []
    flags = ["--pp-layer-partition", ",".join(map(str, counts)), "--trace-path", str(trace)]
    with served(network, model, *flags) as url:
        clients = Clients(url, LOAD)
        time.sleep(options.fill_s)
        for forecast in forecasts:
            _set_cables(network, forecast.gbit_per_s, forecast.delay_ms)
            _, tokens_out = clients.rates(options.settle_s, options.measured_s)
            rates.append(tokens_out)
            times.append((time.monotonic() - options.measured_s, time.monotonic()))
            name = link_name(forecast.gbit_per_s, forecast.delay_ms)
            say(f"{name}: {tokens_out:.0f} output tokens/s")
        clients.stop()
    records = [*read_trace(trace)]
    for forecast, rate, (start_s, end_s) in zip(forecasts, rates, times, strict=True):
        ran = [one for one in records if start_s <= one.scheduled_s < end_s]
        yield Compared(
            forecast=forecast,
            output_tokens_per_s=rate,
            decodes=fmean(one.decodes for one in ran),
            prompt_tokens=fmean(one.prefill_tokens for one in ran),
            slowness=slowness(ran, predictor, counts),
        )


def slowness(
    records: Sequence[StepRecord], predictor: StepPredictor, counts: tuple[int, ...]
) -> float:
    """The stages' time for these steps, divided by the time that the costs give."""
    measured_ms = sum(stage.compute_ms for one in records for stage in one.stages)
    predicted_ms = sum(
        sum(predictor.stage_times_ms(predictor.parts_ms(one.work), counts)) for one in records
    )
    return measured_ms / predicted_ms


if __name__ == "__main__":
    sys.exit(main())
