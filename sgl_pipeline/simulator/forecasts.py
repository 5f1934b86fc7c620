"""Fits costs to a simulated pipeline's kernel tables, for its planner and policy to predict by; a
server has them from `sgl-pipeline fit`."""

from collections.abc import Iterable, Iterator
from itertools import product

from sgl_pipeline.costs.stage_costs import PartSample
from sgl_pipeline.costs.step_costs import StepCosts
from sgl_pipeline.migration.step_fit import fit_parts
from sgl_pipeline.simulator.pipeline_costs import PartSeconds
from sgl_pipeline.simulator.step_shape import StepShape

# Steps that costs are fitted to: decodes, what each attends to, a chunk and what is before it.
_DECODES = (0, 1, 4, 16, 32, 64, 96, 128, 192, 256)
_CONTEXTS = (128, 512, 1536)
_CHUNKS = (0, 32, 128, 256, 512, 1024, 2048)
_STARTS = (0, 1024)
# Where a card's times may bend.
_CURVE_ROWS = (1.0, 16.0, 32.0, 64.0, 96.0, 128.0, 192.0, 256.0, 512.0, 1024.0)


def fitted_costs(
    parts: PartSeconds, num_layers: int, layer_weights: tuple[float, ...] = ()
) -> StepCosts:
    """The costs that come nearest to the tables' times of made-up steps."""
    costs = fit_parts(part_samples(parts, _made_up_steps()), (0,) * num_layers, _CURVE_ROWS)
    if layer_weights:
        return StepCosts(costs.layer, costs.embedding, costs.tail, layer_weights)
    return costs


def _made_up_steps() -> Iterator[StepShape]:
    for decodes, context, chunk, start in product(_DECODES, _CONTEXTS, _CHUNKS, _STARTS):
        is_repeated = (not decodes and context != _CONTEXTS[0]) or (not chunk and start)
        if is_repeated or not decodes + chunk:
            continue
        prefills = ((chunk, start),) if chunk else ()
        yield StepShape(prefills, (context,) * decodes, decodes + (chunk > 0))


def part_samples(parts: PartSeconds, steps: Iterable[StepShape]) -> list[PartSample]:
    """The tables' times of `steps`, part by part."""
    return [
        PartSample(
            shape.work,
            (parts.layer_s(shape) * 1e3,),
            parts.embedding_s(shape) * 1e3,
            parts.tail_s(shape) * 1e3,
        )
        for shape in steps
    ]
