"""What a worker of a tiny model is assigned."""

from typing import Any

import msgspec
from support.tiny_models import tiny_model

from sgl_pipeline.args import StageArgs
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import StageAssignment


def tiny_assignment(
    stage: int, *layer_counts: int, kv_cache_dtype: str = "auto", **options: Any
) -> StageAssignment:
    """Stage `stage` of a split of the tiny Llama's 6 layers, in fp32 and plain torch."""
    first = StageAssignment(
        stage=stage,
        plan=StagePlan(0, layer_counts),
        args=StageArgs(
            model_path=str(tiny_model("llama")),
            dtype="float32",
            attention_backend="torch",
            layer_kernels="torch",
            kv_cache_dtype=kv_cache_dtype,
            max_total_tokens=160,
        ),
        page_size=16,
        links=(),
        cpu_threads=1,
        cpu_cores=(),
    )
    return msgspec.structs.replace(first, **options)
