"""Tells for which chunks of prompts FA2, which splits their keys, is faster than FA3.

FA3 gives each head's tile of 128 queries to one multiprocessor. Where there are few of them, most
of the card waits for a long context. Times are fitted to those of an H200 with 16, 32 and 40 heads
(`benchmark/results/2026-11-27_1954_gpu.json`), and only their order matters. Not run on hardware.
"""

from itertools import pairwise

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout

TILE_ROWS = 128
MULTIPROCESSORS = 132  # of an H100 SXM and an H200
# Of a launch, and of a key for the queries of a tile: in FA3 by one multiprocessor, in FA2 by all.
_FA3_US, _FA3_KEY_US = 5.0, 0.0138
_FA2_US, _FA2_KEY_US = 20.0, 0.00026


def split_keys_are_faster(layout: PagedLayout, shape: AttentionShape) -> bool:
    """True if FA2 takes less time than FA3 for the chunks of `layout` behind its decodes, at least
    one."""
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
    num_keys = shape.num_query_heads * sum(tiles)
    longest = max(max(tiles), num_keys / MULTIPROCESSORS)
    return _FA2_US + _FA2_KEY_US * num_keys < _FA3_US + _FA3_KEY_US * longest
