"""The capacity of the ready pipeline: its plan, pages and memory."""

from dataclasses import dataclass

from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import StageLoaded


@dataclass(frozen=True, slots=True)
class PipelineCapacity:
    """Its plan, pages and state slots (minima over stages) and each stage's report of its load.
    `predicted_ms` is each stage's time in a typical step, if it was measured; `layer_page_bytes`
    the bytes of a page in one layer, the mean over them; each boundary log has room for `log_pages`
    pages."""

    plan: StagePlan
    predicted_ms: tuple[float, ...] | None
    num_pages: int
    stages: tuple[StageLoaded, ...]
    attention_backend: str
    layer_kernels: str
    layer_page_bytes: int
    log_pages: int = 0
    num_state_slots: int = 0
