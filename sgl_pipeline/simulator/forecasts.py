"""What a simulated pipeline's planner and policy know of its steps: costs fitted to its tables.

Used by `experiment.py`; as a server has them from `sgl-pipeline fit`.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from sgl_pipeline.costs.stage_costs import PartSample
from sgl_pipeline.costs.step_costs import FitErrors, StepCosts
from sgl_pipeline.migration.step_fit import errors_on, fit_parts
from sgl_pipeline.simulator.pipeline_costs import PartSeconds
from sgl_pipeline.simulator.step_shape import StepShape
from sgl_pipeline.step_work import StepWork, attended_tokens

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
    costs = fit_parts(list(_samples(parts, _made_up_steps())), (0,) * num_layers, _CURVE_ROWS)
    if layer_weights:
        return StepCosts(costs.layer, costs.embedding, costs.tail, layer_weights)
    return costs


def fit_errors(parts: PartSeconds, num_layers: int, steps: Iterable[StepShape]) -> FitErrors:
    """How far `fitted_costs` are from the tables on other steps."""
    samples = list(_samples(parts, steps))
    return errors_on(fitted_costs(parts, num_layers), samples, (0,) * num_layers)


def work_of(shape: StepShape) -> StepWork:
    """What the planner would see of such a step."""
    return StepWork(
        tokens=shape.num_tokens,
        decodes=shape.num_decodes,
        decode_attended_tokens=sum(shape.decode_contexts),
        prefill_attended_tokens=sum(
            attended_tokens(before, before + length) for length, before in shape.prefills
        ),
        samples=shape.num_samples,
    )


def _made_up_steps() -> Iterator[StepShape]:
    for decodes, context, chunk, start in product(_DECODES, _CONTEXTS, _CHUNKS, _STARTS):
        is_repeated = (not decodes and context != _CONTEXTS[0]) or (not chunk and start)
        if is_repeated or not decodes + chunk:
            continue
        prefills = ((chunk, start),) if chunk else ()
        yield StepShape(prefills, (context,) * decodes, decodes + (chunk > 0))


def _samples(parts: PartSeconds, steps: Iterable[StepShape]) -> Iterator[PartSample]:
    for shape in steps:
        yield PartSample(
            work_of(shape),
            (parts.layer_s(shape) * 1e3,),
            parts.embedding_s(shape) * 1e3,
            parts.tail_s(shape) * 1e3,
        )
