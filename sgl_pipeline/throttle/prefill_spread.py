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
    load: PipelineLoad,
    times: StepTimes,
    most_steps: int,
    ttft_weight: float,
    in_flight_ms: float = 0.0,
) -> tuple[int, float]:
    """The number of steps, at most `most_steps`, and the milliseconds of one of them.

    Args:
        ttft_weight: milliseconds of a running decode that are worth one until a first token.
        in_flight_ms: of the longest step in flight.
    """
    decodes = decode_work(load)
    alone_ms = times.step_ms(decodes)
    if not load.waiting_tokens:
        return most_steps, alone_ms
    level_ms = max(alone_ms, in_flight_ms)
    best_steps, best_ms, least_delay_ms = most_steps, alone_ms, float("inf")
    for num_steps in _candidates(most_steps):
        step_ms = times.step_ms(with_waiting(decodes, load, 1, num_steps))
        rise_ms = max(0.0, step_ms - level_ms)
        delay_ms = ttft_weight * first_tokens_ms(load, num_steps, step_ms)
        delay_ms += late_decodes_ms(load, num_steps, step_ms - alone_ms, rise_ms)
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


def first_tokens_ms(load: PipelineLoad, num_steps: int, step_ms: float) -> float:
    """Milliseconds until the first tokens of all waiting prompts, in sum, if prefill takes
    `num_steps` steps.

    The prompt that is begun ends after its own share of these steps, the others evenly over the
    rest, all of one step with it, and the last chunk of each has to pass the pipeline.
    """
    prompts = max(1, load.prompts)  # a forecast for one request leaves out those behind it
    first_share = max(load.first_prompt_tokens / load.waiting_tokens, 1.0 / prompts)
    first_steps = max(1.0, num_steps * first_share)
    mean_steps = 0.5 * (first_steps + num_steps) + load.pipeline_depth - 1
    return prompts * mean_steps * step_ms


def late_decodes_ms(load: PipelineLoad, num_steps: int, extra_ms: float, rise_ms: float) -> float:
    """Milliseconds by which all running decodes are late, in sum, if prefill makes `num_steps`
    steps longer by `extra_ms`, and by `rise_ms` longer than any in flight.

    They lose what the steps take longer, and the rise once more for each stage that waits for a
    longer step to pass. Where a step is as long as those in flight, none waits.
    """
    pass_steps = load.pipeline_depth - 1
    return load.running_decodes * (num_steps * extra_ms + pass_steps * rise_ms)
