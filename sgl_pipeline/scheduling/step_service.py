"""The service that one step gives to each tenant.

The time of a step is divided among its rows, and the time of its attention among the tokens that
they attend to, so that the parts add up to the step. Tokens from the cache are in no step: they are
free.
"""

from collections.abc import Sequence

from sgl_pipeline.microbatch import Chunk, work_of
from sgl_pipeline.step_work import StepTimes, StepWork, attended_tokens

# While no time is known, in tokens: VTC's weights of an output token and a prompt token.
OUTPUT_TOKEN_SERVICE = 2.0
PROMPT_TOKEN_SERVICE = 1.0


def service_of(
    chunks: Sequence[Chunk], work: StepWork, times: StepTimes | None
) -> dict[str, float]:
    """The service of each tenant in a step with `chunks`, of which `work` is the sum: in predicted
    milliseconds, or in weighted tokens while `times` is None."""
    services: dict[str, float] = {}
    if times is None:
        for chunk in chunks:
            tenant = chunk.request.tenant
            services[tenant] = services.get(tenant, 0.0) + _weighted_tokens(work_of((chunk,)))
        return services
    rows_ms = times.step_ms(work._replace(decode_attended_tokens=0, prefill_attended_tokens=0))
    decodes_ms = times.step_ms(work._replace(prefill_attended_tokens=0))
    row_ms = rows_ms / work.tokens
    decode_pair_ms = (decodes_ms - rows_ms) / max(1, work.decode_attended_tokens)
    prefill_pair_ms = (times.step_ms(work) - decodes_ms) / max(1, work.prefill_attended_tokens)
    for chunk in chunks:
        request = chunk.request
        if chunk.is_decode and chunk.length == 1 and request.lease is None:
            # Most chunks are such, and `work_of` would take longer than all the rest.
            service = row_ms + decode_pair_ms * (chunk.start + 1)
        else:
            tokens, _, by_decodes, by_prefill, _ = work_of((chunk,))
            service = row_ms * tokens + decode_pair_ms * by_decodes + prefill_pair_ms * by_prefill
        services[request.tenant] = services.get(request.tenant, 0.0) + service
    return services


def prefill_service(start: int, end: int, times: StepTimes | None) -> float:
    """An estimate of the service that prompt positions [start, end) are, before their step is
    known: what they add to a step that reads the weights anyway."""
    if times is None:
        return PROMPT_TOKEN_SERVICE * (end - start)
    alone_ms = times.step_ms(StepWork(end - start, 0, 0, attended_tokens(start, end), 1))
    return alone_ms - times.step_ms(StepWork(1, 0, 0, 0, 1))


def _weighted_tokens(work: StepWork) -> float:
    prompt_tokens = work.tokens - work.decodes
    return OUTPUT_TOKEN_SERVICE * work.decodes + PROMPT_TOKEN_SERVICE * prompt_tokens
