"""Tells for which chunks of prompts FA2, which splits their keys, is faster than FA3.

FA3 gives each head's tile of 128 queries to one multiprocessor. Where there are few of them, most
of the card waits for a long context. Times are fitted to those of an H200 with 16, 32 and 40 heads
(`benchmark/results/2026-11-27_1954_gpu.json`), and only their order matters; other Hoppers have
other numbers of multiprocessors, which are taken to be as fast. It has chosen on an
H200 alone.
"""

from itertools import pairwise

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout

TILE_ROWS = 128
# Of a launch, and of a key for the queries of a tile on one multiprocessor. FA2's keys are of all
# multiprocessors, as are FA3's where there are tiles enough.
_FA3_US, _FA3_KEY_US = 5.0, 0.0138
_FA2_US, _FA2_KEY_US = 20.0, 0.0343


def split_keys_are_faster(
    layout: PagedLayout, shape: AttentionShape, num_multiprocessors: int
) -> bool:
    """True if FA2 takes less time than FA3 on a card of `num_multiprocessors`, for the chunks of
    `layout` behind its decodes, at least one."""
    first = layout.num_decodes
    lengths = [end - begin for begin, end in pairwise(layout.query_indptr[first:].tolist())]
    ends = layout.kv_lengths[first:].tolist()
    # A tile reads the keys up to its last row, from the window of its first row on.
    most_keys = max(ends) if shape.window is None else shape.window + TILE_ROWS - 1
    tiles = [
        min(end - length + min(row + TILE_ROWS, length), most_keys)
        for length, end in zip(lengths, ends, strict=True)
        for row in range(0, length, TILE_ROWS)
    ]
    even_share = shape.num_query_heads * sum(tiles) / num_multiprocessors
    fa3_us = _FA3_US + _FA3_KEY_US * max(max(tiles), even_share)
    return _FA2_US + _FA2_KEY_US * even_share < fa3_us
