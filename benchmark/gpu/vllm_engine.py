"""vLLM's engine in this process, as `vllm_beside.py` runs it.

vLLM comes as a pack on PYTHONPATH (`pack_vllm.py`). It has run on an H200.
"""

import importlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmark.gpu.script import Script
from benchmark.gpu.shapes import MODELS, PAGE_SIZE

MODEL = "Qwen3-8B"
# Sizes of graphs: what decodes here, and what vLLM's warm-up takes. Its default has 51.
_GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
EXECUTIONS: dict[str, dict[str, Any]] = {
    "compiled": {"compilation_config": {"cudagraph_capture_sizes": _GRAPH_SIZES}},
    "graphs": {
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": _GRAPH_SIZES,
        }
    },
    "eager": {"enforce_eager": True},
}
_MAX_TOKENS_A_STEP = 2048
_MEMORY_FRACTION = 0.85  # that must be free at the start
_POOL_SHARE = 1.25  # pages for the script's requests, and some for those of the load before
# No network, no other kernels than the pack's, and the engine in this process.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that has ended: the tokens that it drew, and those of its prompt that were hits."""

    num_tokens: int
    num_hits: int


class Engine(Protocol):
    """An engine that runs requests, as vLLM does."""

    def add(self, name: str, prompt: Sequence[int], num_tokens: int) -> None:
        """Hands over a request that draws `num_tokens`."""

    def step(self) -> list[Answer]:
        """Does what the engine does next; the requests that ended."""

    def is_busy(self) -> bool:
        """True while a request has not ended."""


class VllmEngine:
    """The `Engine` of vLLM 0.25.1 in this process; starting it took `start_s`.

    Raises ImportError where vLLM or a package that it needs is not there.
    """

    def __init__(self, execution: str) -> None:
        os.environ.update(_ENVIRONMENT)
        started_s = time.monotonic()
        arguments: Any = importlib.import_module("vllm.engine.arg_utils")
        engines: Any = importlib.import_module("vllm.v1.engine.llm_engine")
        self._sampling: Any = importlib.import_module("vllm.sampling_params")
        self.import_s = time.monotonic() - started_s
        with tempfile.TemporaryDirectory(prefix="sgl_pipeline_bench_") as directory:
            config = json.dumps(MODELS[MODEL].config("bfloat16"))
            Path(directory, "config.json").write_text(config, encoding="utf-8")
            options = arguments.EngineArgs(**engine_options(execution, directory))
            self._engine = engines.LLMEngine.from_engine_args(options)
        self.start_s = time.monotonic() - started_s

    def add(self, name: str, prompt: Sequence[int], num_tokens: int) -> None:
        """See `Engine`."""
        params = self._sampling.SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=num_tokens,
            detokenize=False,
            output_kind=self._sampling.RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)

    def step(self) -> list[Answer]:
        """See `Engine`."""
        return [
            Answer(len(output.outputs[0].token_ids), output.num_cached_tokens or 0)
            for output in self._engine.step()
            if output.finished
        ]

    def is_busy(self) -> bool:
        """See `Engine`."""
        return bool(self._engine.has_unfinished_requests())

    def facts(self) -> dict[str, str]:
        """The versions, modes and kernels that it runs with."""
        config = self._engine.vllm_config
        compilation = config.compilation_config
        layer = next(iter(compilation.static_forward_context.values()))
        backends: Any = importlib.import_module("vllm.v1.attention.backends.fa_utils")
        version: Any = importlib.import_module("vllm.version")
        return {
            "vllm": version.__version__,
            "compilation": str(compilation.mode),
            "CUDA graphs": str(compilation.cudagraph_mode),
            "graph sizes": str(compilation.cudagraph_capture_sizes),
            "attention": layer.attn_backend.get_name(),
            "flash attention": str(backends.get_flash_attn_version()),
            "asynchronous scheduling": str(config.scheduler_config.async_scheduling),
            "tokens a step": str(config.scheduler_config.max_num_batched_tokens),
            "runner": "2" if config.use_v2_model_runner else "1",
            "import s": f"{self.import_s:.1f}",
            "start s": f"{self.start_s:.1f}",
        }


def engine_options(execution: str, directory: str) -> dict[str, Any]:
    """The arguments of vLLM's engine for the model of `directory`; pages and their contexts are
    those of our pipeline."""
    script = Script()
    return {
        "model": directory,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": script.pages_a_request(PAGE_SIZE) * PAGE_SIZE,
        "max_num_seqs": script.num_requests,
        "max_num_batched_tokens": _MAX_TOKENS_A_STEP,
        "block_size": PAGE_SIZE,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": _MEMORY_FRACTION,
        # Without this vLLM records its graphs twice, to see what they take.
        "kv_cache_memory_bytes": int(_POOL_SHARE * pool_bytes(script)),
        "disable_log_stats": True,
        "seed": 0,
        **EXECUTIONS[execution],
    }


def pool_bytes(script: Script) -> int:
    """The keys and values of all requests of the script, in 16 bits."""
    model = MODELS[MODEL]
    numbers = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim
    return 2 * numbers * script.total_tokens(PAGE_SIZE)
