"""The most decodes of a step under any policy (`--pp-max-micro-batch-size`).

A policy never gives a step more decodes than are ready, so the wrapper shows it fewer ready ones.
A policy whose prefill gets what the decodes leave then counts with the fewer, too.
"""

from collections.abc import Callable
from dataclasses import replace

from sgl_pipeline.pipeline_load import PipelineLoad, TokenBudget


def limit_decodes(
    policy: Callable[[PipelineLoad], TokenBudget], most_decodes: int | None
) -> Callable[[PipelineLoad], TokenBudget]:
    """`policy` with at most `most_decodes` in a step; `policy` itself where that is None."""
    if most_decodes is None:
        return policy
    return lambda load: policy(
        replace(load, ready_decodes=min(load.ready_decodes, most_decodes)),
    )
