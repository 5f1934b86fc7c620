"""Bounds the decodes of a step so that all steps in flight carry about the same number.

It never asks which requests they are: admission draws them from one global ready set, so what one
step leaves over fills a later one that is short.
"""

from sgl_pipeline.pipeline_load import PipelineLoad


def balanced_decodes(load: PipelineLoad) -> int:
    """The share of one step: running decodes / pipeline depth (gLLM #RD / #PP_depth).

    The remainder rotates with the step id, so 26 decodes at depth 4 give 7, 7, 6, 6 in a row. Since
    the shares of any `pipeline_depth` consecutive steps add up to all running decodes, each step
    finds its share ready once that many steps have passed since the number of decodes last changed.
    With fewer ready it takes them all; while any is ready the share is at least one, because a step
    that stays empty would not advance the step id that turns the remainder.
    """
    share, remainder = divmod(load.running_decodes, load.pipeline_depth)
    share += load.step_id % load.pipeline_depth < remainder
    return min(load.ready_decodes, max(1, share))
