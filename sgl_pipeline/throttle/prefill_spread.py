"""Spread or fill: the number of steps that share the waiting prefill.

In few long steps prompts are computed soon, but each running decode waits for them, and where steps
differ the stages wait for each other. In many short ones prefill rides beside the decodes, nearly
free while a step takes the time of reading the weights, and first tokens come late. Neither is best
everywhere, so the number is the one that delays all requests least in sum, by predicted times.
"""

from collections.abc import Iterator

from sgl_pipeline.pipeline_load import PipelineLoad
from sgl_pipeline.step_work import StepTimes
from sgl_pipeline.throttle.load_work import decode_work, with_waiting


def best_spread(
    load: PipelineLoad, times: StepTimes, most_steps: int, ttft_weight: float
) -> tuple[int, float]:
    """The number of steps, at most `most_steps`, and the milliseconds of one of them.

    Args:
        ttft_weight: milliseconds of a running decode that are worth one until a first token.
    """
    decodes = decode_work(load)
    alone_ms = times.step_ms(decodes)
    if not load.waiting_tokens:
        return most_steps, alone_ms
    best_steps, best_ms, least_delay_ms = most_steps, alone_ms, float("inf")
    for num_steps in _candidates(most_steps):
        step_ms = times.step_ms(with_waiting(decodes, load, 1, num_steps))
        delay_ms = total_delay_ms(load, num_steps, step_ms, step_ms - alone_ms, ttft_weight)
        if delay_ms < least_delay_ms:
            best_steps, best_ms, least_delay_ms = num_steps, step_ms, delay_ms
    return best_steps, best_ms


def _candidates(most_steps: int) -> Iterator[int]:
    """Numbers up to `most_steps`, all of the small ones."""
    num_steps = 1
    while num_steps < most_steps:
        yield num_steps
        num_steps += max(1, num_steps // 8)
    yield most_steps


def total_delay_ms(
    load: PipelineLoad, num_steps: int, step_ms: float, extra_ms: float, ttft_weight: float
) -> float:
    """Milliseconds until the first tokens of all waiting prompts, weighted, and by which all
    running decodes are late, if prefill takes `num_steps` steps, each longer by `extra_ms` for it.

    Prompts end evenly over these steps, all of one step with it, and the last chunk of each has to
    pass the pipeline. Decodes lose what the steps take longer, and as much again while stages wait
    for one to pass.
    """
    prompts, pass_steps = load.prompts, load.pipeline_depth - 1
    end_steps = 0.5 * (num_steps * prompts + max(num_steps, prompts))
    first_steps = end_steps + prompts * pass_steps
    late_ms = load.running_decodes * (num_steps + pass_steps) * extra_ms
    return ttft_weight * first_steps * step_ms + late_ms
