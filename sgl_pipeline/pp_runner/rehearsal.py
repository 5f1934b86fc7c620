"""The steps that a stage runs before it is ready, so that no request pays for one-time work.

This work is imports, recording, the compiling of products, and the first touch of memory. The
requests are made up, and their pages are the pool's first ones, which belong to no request yet.
"""

from array import array
from collections.abc import Iterator

from sgl_pipeline.requests import GREEDY, LogprobSpec, SamplingSpec
from sgl_pipeline.wire.step_order import INT32, MirroredChunk, MirroredRequest

_PROMPT_TOKENS = 33  # more than a page of the usual size, and no multiple of one
# Sampling options that run code of their own.
_SAMPLINGS = (
    GREEDY,
    SamplingSpec(top_p=0.9, top_k=4, min_p=0.01, frequency_penalty=0.1, logit_bias=((0, 1.0),)),
)


def rehearsed_steps(
    num_pages: int, page_size: int, context_length: int, num_state_slots: int | None = None
) -> Iterator[list[MirroredChunk]]:
    """The chunks of each step: a prompt's, decodes, and both together, on as many of the pool's
    pages as there are of `num_pages`. None where the pool cannot hold two tokens.

    Args:
        num_state_slots: those of the pool of states; None: the model has no states.
    """
    num_requests = min(len(_SAMPLINGS), num_pages)
    if num_state_slots is not None:
        num_requests = min(num_requests, num_state_slots)
    if num_requests < 1:
        return
    most_tokens = min(num_pages // num_requests * page_size, context_length)
    num_tokens = min(_PROMPT_TOKENS, most_tokens - 1)
    if num_tokens < 1:
        return
    requests = [
        _made_up_request(
            number, num_tokens + 1, page_size, None if num_state_slots is None else number
        )
        for number in range(num_requests)
    ]
    prompts = [MirroredChunk(request, 0, num_tokens, samples=True) for request in requests]
    decodes = [MirroredChunk(request, num_tokens, 1, samples=True) for request in requests]
    yield prompts
    yield decodes
    yield [*decodes[:-1], prompts[-1]]


def _made_up_request(
    number: int, num_tokens: int, page_size: int, state_slot: int | None
) -> MirroredRequest:
    """The request `number`, with `num_tokens` tokens on pages of its own."""
    pages_each = -(-num_tokens // page_size)
    first_page = number * pages_each
    return MirroredRequest(
        handle=number,
        sampling=_SAMPLINGS[number],
        prompt_length=num_tokens - 1,
        tokens=array(INT32, [0] * num_tokens),
        pages=array(INT32, range(first_page, first_page + pages_each)),
        logprobs=LogprobSpec(0, 1, (0,)) if number else None,
        state_slot=state_slot,
    )
