"""Divides the idle time of the stages of a simulated run into parts that add up to it.

Three steps, in seconds of stages. The slowest stage is busy the longest: what the others are busy
less is idle in any order of work, because layers are whole. All stages are idle as long as the
slowest is. That time is divided twice:

- `causes`: what would take it away. The same steps run back to back: all alike, then with their
  prefill, their decodes, the links and the host as they were, one after the other; what the run
  itself adds is lack of work. Each part is what its cause adds to those before it.
- `moments`: what the next step was doing. Not decided, because the pipeline was full or because
  nothing could run; on its way through the host, the links, or the stages before.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sgl_pipeline.simulator.pipeline_costs import HostCosts, PipelineCosts, SimulatedLink
from sgl_pipeline.simulator.simulation import SimulatedStep
from sgl_pipeline.simulator.step_shape import StepShape

Seconds = tuple[float, ...]  # of one step on each stage

CAUSES = (
    "whole layers",
    "ends of the window",
    "prefill differs",
    "decodes differ",
    "links",
    "host",
    "lack of work",
)
MOMENTS = (
    "full, work waits",
    "full, none waits",
    "room, work waits",
    "room, none waits",
    "host on the way",
    "links on the way",
    "stages before",
)


@dataclass(frozen=True, slots=True)
class LeftOver:
    """Decodes that are ready and prompt tokens that wait once a step is decided."""

    ready_decodes: int
    waiting_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All steps of a run by their ids, what each left over, the arrivals in order, and the costs of
    its pipeline; `limit` steps may be in flight."""

    steps: Sequence[SimulatedStep]
    left_over: Sequence[LeftOver]
    arrivals_s: Sequence[float]
    costs: PipelineCosts
    limit: int


def idle_parts(run: Run, first: int, end: int) -> dict[str, float]:
    """Shares of the stages' time over the steps [first, end), without the time in which nothing
    was on its way: `idle`, then `CAUSES` and `MOMENTS`. Causes add up to `idle`; moments to what is
    idle beyond the first two causes."""
    steps = run.steps[first:end]
    stages = range(run.costs.num_stages)
    busy_s = [sum(step.ends_s[i] - step.starts_s[i] for step in steps) for i in stages]
    slowest = max(stages, key=busy_s.__getitem__)
    empty_s = sum(end_s - start_s for start_s, end_s in map(_empty, steps, steps[1:]))
    spans_s = [steps[-1].ends_s[i] - steps[0].starts_s[i] - empty_s for i in stages]
    seconds = {
        "idle": sum(spans_s) - sum(busy_s),
        "whole layers": sum(busy_s[slowest] - one for one in busy_s),
        "ends of the window": sum(one - spans_s[slowest] for one in spans_s),
    }
    before_s = 0.0
    for cause, idle_s in _back_to_back(run, steps, slowest).items():
        seconds[cause] = len(stages) * (idle_s - before_s)
        before_s = idle_s
    idle_s = spans_s[slowest] - busy_s[slowest]
    seconds["lack of work"] = len(stages) * (idle_s - before_s)
    for number in range(first + 1, end):
        for moment, moment_s in _moments(run, number, slowest):
            seconds[moment] = seconds.get(moment, 0.0) + len(stages) * moment_s
    return {name: seconds.get(name, 0.0) / sum(spans_s) for name in ("idle", *CAUSES, *MOMENTS)}


def _empty(last: SimulatedStep, step: SimulatedStep) -> tuple[float, float]:
    """From when on nothing was on its way between two steps, and until when."""
    return last.ends_s[-1], max(last.ends_s[-1], step.starts_s[0])


# Back to back


def _back_to_back(run: Run, steps: Sequence[SimulatedStep], stage: int) -> dict[str, float]:
    """Idle seconds of the stage if no step ever waited for work, with one cause after the other."""
    costs = run.costs
    bare = replace(costs, host=HostCosts(), link=SimulatedLink(), links=())
    shapes = [step.shape for step in steps]
    wholes_s = [costs.stage_seconds(shape, 0) for shape in shapes]
    decodes_s = [_decode_seconds(costs, shape) for shape in shapes]
    mean_s = _mean(wholes_s)
    mean_decode_s = _mean(decodes_s)
    even_decodes_s = [
        tuple(w - d + mean for w, d, mean in zip(whole_s, own_s, mean_decode_s, strict=True))
        for whole_s, own_s in zip(wholes_s, decodes_s, strict=True)
    ]
    alike = _idle_s(run.limit, bare, shapes, [mean_s] * len(shapes), stage)
    assert alike < 1e-6 * len(shapes), "equal steps leave the slowest stage idle"
    return {
        "prefill differs": _idle_s(run.limit, bare, shapes, even_decodes_s, stage),
        "decodes differ": _idle_s(run.limit, bare, shapes, wholes_s, stage),
        "links": _idle_s(run.limit, replace(costs, host=HostCosts()), shapes, wholes_s, stage),
        "host": _idle_s(run.limit, costs, shapes, wholes_s, stage),
    }


def _decode_seconds(costs: PipelineCosts, shape: StepShape) -> Seconds:
    """Seconds of the decodes of a step by themselves on each stage."""
    if not shape.num_decodes:
        return (0.0,) * costs.num_stages
    return costs.stage_seconds(replace(shape, prefills=(), num_samples=shape.num_decodes), 0)


def _mean(steps_s: Sequence[Seconds]) -> Seconds:
    return tuple(sum(column) / len(steps_s) for column in zip(*steps_s, strict=True))


def _idle_s(
    limit: int,
    costs: PipelineCosts,
    shapes: Sequence[StepShape],
    steps_s: Sequence[Seconds],
    stage: int,
) -> float:
    """Idle seconds of the stage between its first and its last step, if each step is decided once
    there is room for it. As `VirtualPipeline` has it, with a scheduler that works in turns: the
    oldest result, then a step."""
    host, last = costs.host, costs.num_stages - 1
    free_s, link_free_s = [0.0] * costs.num_stages, [0.0] * costs.num_stages
    backs_s: list[float] = []
    scheduler_s = idle_s = 0.0
    for number, (shape, step_s) in enumerate(zip(shapes, steps_s, strict=True)):
        chunks = len(shape.prefills) + shape.num_decodes
        if number >= limit:
            result_s = host.result_s(shapes[number - limit].num_samples)
            scheduler_s = max(scheduler_s, backs_s[number - limit]) + result_s
        scheduler_s += host.schedule_s(chunks)
        input_s = scheduler_s
        for at, seconds in enumerate(step_s):
            start_s = host.start_s(free_s[at], scheduler_s, input_s, host.prepare_s(chunks))
            if at == stage and number:
                idle_s += start_s - free_s[at]
            free_s[at] = start_s + seconds
            if at < last:
                link = costs.link_after(at)
                begin_s = max(free_s[at], link_free_s[at])
                link_free_s[at] = begin_s + link.transfer_s(shape.num_tokens)
                input_s = link_free_s[at] + link.latency_s
        backs_s.append(free_s[last] + costs.link_after(last).latency_s + host.transit_s)
    return idle_s


# Moments


def _moments(run: Run, number: int, stage: int) -> Iterator[tuple[str, float]]:
    """The seconds for which the stage was idle before a step, by what that step was doing."""
    last, step = run.steps[number - 1], run.steps[number]
    empty_s = _empty(last, step)
    from_s = last.ends_s[stage]
    for moment, until_s in _way(run, number, stage):
        until_s = min(max(until_s, from_s), step.starts_s[stage])
        overlap_s = min(until_s, empty_s[1]) - max(from_s, empty_s[0])
        yield moment, until_s - from_s - max(0.0, overlap_s)
        from_s = until_s


def _way(run: Run, number: int, stage: int) -> Iterator[tuple[str, float]]:
    """The way of a step to its start on the stage: what it did, and until when."""
    last, step = run.steps[number - 1], run.steps[number]
    decided_s = step.record.scheduled_s
    room_s = last.record.scheduled_s
    if number >= run.limit:
        oldest = run.steps[number - run.limit].record
        room_s = max(room_s, oldest.finished_s + oldest.result_ms * 1e-3)
    waits_s = _waits_from(run, last.record.scheduled_s, run.left_over[number - 1])
    for place, until_s in (("full", room_s), ("room", decided_s)):
        yield f"{place}, none waits", min(waits_s, until_s)
        yield f"{place}, work waits", until_s
    yield "host on the way", step.starts_s[0]
    for at in range(stage):
        yield "stages before", step.ends_s[at]
        link = run.costs.link_after(at)
        carried_s = link.latency_s + link.transfer_s(step.shape.num_tokens)
        yield "links on the way", step.ends_s[at] + carried_s
        yield "host on the way", step.starts_s[at + 1]


def _waits_from(run: Run, decided_s: float, left: LeftOver) -> float:
    """From when on work waits after the decision of a step."""
    if left.ready_decodes or left.waiting_tokens:
        return decided_s
    place = bisect_right(run.arrivals_s, decided_s)
    return run.arrivals_s[place] if place < len(run.arrivals_s) else float("inf")
