"""Times of steps by the number of their decodes: the curve says what sharing decodes out gains.

Decodes that are shared out over the steps in flight read the weights once for each step. That gains
where a step takes longer with more of them, costs nothing where it does not, and never loses, since
a step never takes less with more.
"""

from sgl_pipeline.pipeline_load import PipelineLoad
from sgl_pipeline.step_work import StepWork

CURVE_DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# What decodes attend to while none runs.
_TYPICAL_CONTEXT = 512


def step_curve(load: PipelineLoad) -> tuple[float, ...]:
    """Predicted milliseconds of the slowest stage in steps of `CURVE_DECODES` decodes, of the
    running ones' mean length; empty while step times are unknown."""
    times = load.step_times
    if times is None:
        return ()
    context = _TYPICAL_CONTEXT
    if load.running_decodes:
        context = load.decode_attended_tokens // load.running_decodes
    return tuple(
        times.step_ms(StepWork(decodes, decodes, decodes * context, 0, decodes))
        for decodes in CURVE_DECODES
    )
