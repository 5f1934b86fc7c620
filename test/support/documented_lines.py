"""Command lines of pipelines in SGLang's documentation, with what has to differ here left open.

MODEL and HEAD stand for a model and an address. A partition is for as many stages as its line has,
and for the layers of the demo model.
"""

import re
from dataclasses import dataclass, field

from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL

PIPELINES = "advanced_features/pipeline_parallelism"
DEEPSEEK = "basic_usage/deepseek_v32"

_LONG_CONTEXT = """--model-path MODEL --trust-remote-code --nnodes 4 --node-rank 0 --tp 8
    --pp-size 4 --port 30000 --dist-init-addr HEAD:5000 --disable-radix-cache
    --mem-fraction-static 0.8 --attention-backend fa3 --host 0.0.0.0 --watchdog-timeout 3600
    --max-running-requests 128"""
_LONG_CONTEXT_8 = _LONG_CONTEXT.replace("--tp 8", "--tp 4").replace("--pp-size 4", "--pp-size 8")
_CONTEXT_PARALLEL = """--enable-dsa-prefill-context-parallel --attn-cp-size 8
    --dsa-prefill-cp-mode round-robin-split"""
_WITH_CONTEXT_PARALLEL = f"""--model-path MODEL --nnodes 2 --node-rank 0
    --dist-init-addr HEAD:62001 --tp 8 --pp-size 2 --dp-size 1 --moe-dense-tp-size 1
    {_CONTEXT_PARALLEL} --trust-remote-code --disable-radix-cache --mem-fraction-static 0.8
    --max-running-requests 128 --chunked-prefill-size 16384 --cuda-graph-max-bs 8 --page-size 64
    --watchdog-timeout 3600 --host 0.0.0.0 --port 8000 --tool-call-parser deepseekv32"""
_PREFILL_SERVER = f"""--model-path MODEL --served-model-name deepseek-v32 --nnodes 2 --node-rank 0
    --dist-init-addr HEAD:20102 --tp 8 --pp-size 2 --dp-size 1 --moe-dense-tp-size 1
    {_CONTEXT_PARALLEL} --disaggregation-ib-device mlx5_bond_0,mlx5_bond_1 --trust-remote-code
    --disable-radix-cache --max-running-requests 512 --chunked-prefill-size 4096
    --context-length 131072 --mem-fraction-static 0.9 --page-size 64 --enable-metrics
    --host 0.0.0.0 --port 30000"""


@dataclass(frozen=True)
class DocumentedLine:
    """The flags after `python -m sglang.launch_server` on a page, and the variables before it."""

    page: str
    text: str
    environment: dict[str, str] = field(default_factory=dict)

    def flags(self, *, head: str = "10.0.0.1", tp_is_1: bool = True) -> list[str]:
        """Those of the page, for the demo model on CPUs and one device a stage."""
        text = self.text.replace("MODEL", str(DEMO_MODEL)).replace("HEAD", head)
        if tp_is_1:
            text = re.sub(r"--tp \d+", "--tp 1", text).replace(_CONTEXT_PARALLEL, "")
        return [*text.split(), "--device", "cpu"]


FIXED_CHUNKS = DocumentedLine(PIPELINES, _LONG_CONTEXT + " --chunked-prefill-size 4096")
DYNAMIC_CHUNKS = DocumentedLine(
    PIPELINES,
    _LONG_CONTEXT + " --chunked-prefill-size 12288 --enable-dynamic-chunking",
    {"SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR": "0.65"},
)
FIXED_CHUNKS_8 = DocumentedLine(PIPELINES, _LONG_CONTEXT_8 + " --chunked-prefill-size 6144")
DYNAMIC_CHUNKS_8 = DocumentedLine(
    PIPELINES,
    _LONG_CONTEXT_8 + " --chunked-prefill-size 18432 --enable-dynamic-chunking",
    {"SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR": "0.8"},
)
# The page's tip: the larger parts last.
LAYERS = DocumentedLine(PIPELINES, FIXED_CHUNKS.text, {"SGLANG_PP_LAYER_PARTITION": "3,4,4,5"})
LONGEST = DocumentedLine(DEEPSEEK, _WITH_CONTEXT_PARALLEL, {"SGLANG_PP_LAYER_PARTITION": "7,9"})
PREFILL_SERVER = DocumentedLine(DEEPSEEK, _PREFILL_SERVER)
