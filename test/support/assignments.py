"""What a worker of a tiny model is assigned."""

from typing import Any

import msgspec
from support.tiny_models import tiny_model

from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import StageAssignment


def tiny_assignment(stage: int, *layer_counts: int, **options: Any) -> StageAssignment:
    """Stage `stage` of a split of the tiny Llama's 6 layers, in fp32 and plain torch."""
    first = StageAssignment(
        stage=stage,
        plan=StagePlan(0, layer_counts),
        model_path=str(tiny_model("llama")),
        load_format="safetensors",
        dtype="float32",
        device="cpu",
        attention_backend="torch",
        layer_kernels="torch",
        page_size=16,
        max_total_tokens=160,
        memory_fraction=0.5,
        links=(),
        cpu_threads=1,
        cpu_cores=(),
    )
    return msgspec.structs.replace(first, **options)
