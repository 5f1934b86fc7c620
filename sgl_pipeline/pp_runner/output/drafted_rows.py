"""Takes chunks with drafts apart, so that all else at the end of the last stage sees one sampled
row of a chunk at most.

A row after some draft tokens is computed as if they had been drawn: then it is the row of a request
without drafts wherever they are right, and of no use elsewhere.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace

from sgl_pipeline.wire.step_order import INT32, MirroredChunk


def rows_apart(chunks: Sequence[MirroredChunk]) -> Sequence[MirroredChunk]:
    """The same rows in the same order, as chunks without drafts: each draft token is a chunk of its
    own, of a request that has it for output."""
    if not any(chunk.draft_ids for chunk in chunks):
        return chunks
    return [part for chunk in chunks for part in _parts(chunk)]


def _parts(chunk: MirroredChunk) -> Iterator[MirroredChunk]:
    if not chunk.draft_ids:
        yield chunk
        return
    tokens = chunk.request.tokens + array(INT32, chunk.draft_ids)
    request = replace(chunk.request, tokens=tokens)
    known_length = chunk.length - len(chunk.draft_ids)
    mask_bytes = len(chunk.token_mask) // chunk.num_samples
    start = chunk.start
    for index in range(chunk.num_samples):
        length = 1 if index else known_length
        mask = chunk.token_mask[index * mask_bytes : (index + 1) * mask_bytes]
        yield MirroredChunk(request, start, length, True, mask)
        start += length
