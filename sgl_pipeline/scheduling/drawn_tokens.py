"""Takes the tokens that a step drew for a request: one, or more where its drafts were right.

A token that was drawn after a draft token is the request's own if that one is, because a token is a
function of its request. So drafts change no token.
"""

from collections.abc import Sequence

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.requests import FinishReason
from sgl_pipeline.scheduling.stop_rules import finish_reason


def take_drawn(
    chunk: Chunk, drawn_ids: Sequence[int]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Appends the tokens of `chunk` to its request's output, up to the first that ends it or that
    differs from its draft. Returns them, and the reason why the request ends now, if it does.

    Args:
        drawn_ids: `Chunk.num_samples` tokens.
    """
    request = chunk.request
    if not drawn_ids or request.stops.max_new_tokens == 0:
        return (), finish_reason(request)
    for count, token_id in enumerate(drawn_ids, start=1):
        request.output_ids.append(token_id)
        finish = finish_reason(request)
        if finish is not None or chunk.draft_ids[count - 1 : count] != (token_id,):
            break
    if chunk.draft_ids:
        request.drafts.note(len(chunk.draft_ids), count - 1)
    return tuple(drawn_ids[:count]), finish
