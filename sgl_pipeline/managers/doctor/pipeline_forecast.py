"""Forecasts the throughput of a pipeline over the hosts and links that were found.

The arithmetic is that of `sgl_pipeline plan --hosts`; hosts and links are those measured, and a
host's speed is by the costs that `sgl_pipeline fit` has saved on it.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sgl_pipeline.args import ClusterArgs, StageArgs, require_stage_on_each
from sgl_pipeline.costs.stage_costs import TYPICAL_STEP, MadeUpStep, StageCosts
from sgl_pipeline.costs.step_costs import CostFile
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.host_network import HostNetwork, HostPair, PaperHost
from sgl_pipeline.managers.command_line.model_files import find_model
from sgl_pipeline.managers.doctor.doctor_messages import HostFacts
from sgl_pipeline.managers.doctor.findings import Findings, MeasuredLink
from sgl_pipeline.managers.planning.cost_files import find_costs
from sgl_pipeline.managers.planning.fit_command import stages_of
from sgl_pipeline.managers.planning.hosts_report import HostPlanner, bound_by, describe_route
from sgl_pipeline.managers.planning.plan_command import step_costs_here
from sgl_pipeline.managers.planning.stage_flags import stage_words
from sgl_pipeline.migration.cost_model import predicted_costs
from sgl_pipeline.migration.host_order import Route
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.pipeline.assignment import workers_of_host
from sgl_pipeline.pp_runner.kv_capacity import DEFAULT_CPU_KV_TOKENS
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class SavedCosts:
    """Costs of `step` for this host's `stages` of a model, as they were fitted here."""

    stages: StageArgs
    spec: ModelSpec
    file: CostFile
    step: MadeUpStep
    costs: StageCosts


def saved_costs(options: argparse.Namespace, cluster: ClusterArgs) -> SavedCosts:
    """The costs that hold for a server's stages on this host.

    Raises ConfigurationError where there are none, with how to get them.
    """
    here = len(workers_of_host(num_stages(options, cluster), cluster.num_hosts, cluster.rank))
    path = find_model(options.model, None, None, may_fetch=False)
    own_options = argparse.Namespace(**vars(options) | {"model": path, "pp": here})
    stages, spec = stages_of(own_options, options.max_mamba_cache_size)
    if (file := find_costs(stages, spec.num_layers)) is None:
        raise ConfigurationError(
            f"host {cluster.rank} has no saved costs of {here} stages of this model in "
            f"{stages.precision}; run there: {_how_to_fit(options, here)}"
        )
    step = TYPICAL_STEP.within(spec.context_length)
    costs = predicted_costs(StepPredictor(file.costs), step.work)
    return SavedCosts(stages, spec, file, step, costs)


def num_stages(options: argparse.Namespace, cluster: ClusterArgs) -> int:
    """`--pp`, by default one stage a host. Raises ConfigurationError where a host has none."""
    count = options.pp or cluster.num_hosts
    require_stage_on_each(count, cluster.num_hosts)
    return int(count)


@dataclass(frozen=True, slots=True)
class PipelineForecast:
    """`as_ranked` is the best split with the hosts in the order of their ranks, as a server would
    have them; `best` that in the best order. `notes` say what was assumed."""

    planner: HostPlanner
    step: MadeUpStep
    best: Route
    as_ranked: Route | None
    notes: tuple[str, ...]

    def tokens_per_s(self, route: Route) -> float:
        """Output tokens: one for each decode of a step."""
        return self.step.decodes * 1e3 / route.period_ms

    def lines(self) -> list[str]:
        """The forecast, to print."""
        lines = [f"forecast, while every step has {self.step}:"]
        if self.as_ranked is not None:
            lines += self._route("as ranked", self.as_ranked)
        if self.as_ranked is None or self.best.order != self.as_ranked.order:
            lines += self._route("best order", self.best)
        return [*lines, *(f"  {note}" for note in self.notes)]

    def facts(self) -> dict[str, Any]:
        """The forecast as JSON types."""
        return {
            "step": {"decodes": self.step.decodes, "prompt_tokens": self.step.prompt_tokens},
            "as_ranked": None if self.as_ranked is None else self._facts_of(self.as_ranked),
            "best": self._facts_of(self.best),
            "notes": list(self.notes),
        }

    def _route(self, name: str, route: Route) -> list[str]:
        first, *rest = describe_route(name, self.planner, route)
        prompt_tokens = self.step.prompt_tokens * 1e3 / route.period_ms
        counts = ",".join(map(str, route.layer_counts))
        return [
            f"  {first}",
            f"    {self.tokens_per_s(route):.0f} output tokens/s beside {prompt_tokens:.0f} prompt "
            f"tokens/s, with --pp-layer-partition {counts}",
            *(f"  {line}" for line in rest),
        ]

    def _facts_of(self, route: Route) -> dict[str, Any]:
        return {
            "ranks": list(route.order),
            "layer_counts": list(route.layer_counts),
            "output_tokens_per_s": self.tokens_per_s(route),
            "period_ms": route.period_ms,
            "slowest_stage_ms": route.slowest_ms,
            "busiest_link_ms": route.busiest_ms,
            "round_ms": route.round_ms,
            "bound_by": bound_by(self.planner, route),
        }


def make_forecast(saved: SavedCosts, findings: Findings, stages: int) -> PipelineForecast:
    """The forecast for `stages` stages on the hosts of `findings`, all of whose links are known.

    Raises ConfigurationError where the model does not fit.
    """
    hosts = findings.hosts
    costs, sizes, memory_bytes = step_costs_here(saved.stages, saved.spec, saved.step, saved.file)
    row_bytes = saved.spec.hidden_size * getattr(torch, saved.stages.dtype).itemsize
    planner = HostPlanner(
        measured_network(hosts, findings.links, stages),
        costs,
        sizes,
        step_bytes=saved.step.work.tokens * row_bytes,
        memory_bytes=memory_bytes,
        memory_fraction=1.0,  # of what is available
        num_tokens=DEFAULT_CPU_KV_TOKENS,
        extra_steps=0,
    )
    notes = [f"times are those fitted on {saved.file.machine}, {saved.file.date}"]
    notes += [
        f"host {rank} is assumed to be as fast as rank 0: {facts.costs_missing}"
        for rank, facts in hosts.items()
        if facts.step_ms is None
    ]
    return PipelineForecast(planner, saved.step, planner.best(), planner.as_listed(), tuple(notes))


def measured_network(
    hosts: Mapping[int, HostFacts], links: list[MeasuredLink], stages: int
) -> HostNetwork:
    """The hosts in the order of their ranks, with equal runs of `stages` stages in all."""
    names = {rank: f"host {rank} ({facts.hello.name})" for rank, facts in hosts.items()}
    head_ms = hosts[0].step_ms
    paper = []
    for rank, facts in hosts.items():
        own_stages = len(workers_of_host(stages, len(hosts), rank))
        speed = head_ms / facts.step_ms if head_ms and facts.step_ms else 1.0
        memory = f"{facts.available_bytes // own_stages // 2**20}MiB"
        paper.append(PaperHost(name=names[rank], stages=own_stages, speed=speed, memory=memory))
    pairs = [
        HostPair(
            between=(names[link.one], names[link.other]),
            gbit_per_s=link.gbit_per_s,
            delay_ms=link.median_ms / 2,
        )
        for link in links
    ]
    return HostNetwork(hosts=tuple(paper), links=tuple(pairs))


def _how_to_fit(options: argparse.Namespace, here: int) -> str:
    words = ["sgl-pipeline fit --model", options.model, "--pp", str(here), *stage_words(options)]
    return " ".join(words)
