"""The identity of the keys and values that a server computes: who may use its objects."""

from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.cluster.model_digest import model_digest
from sgl_pipeline.kv_store.object_names import (
    MEMORY_LAYOUT,
    PLAIN_LAYOUT,
    model_id,
    namespace_digest,
)
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """`digest` stands for all that gives the same tokens other bytes (`object_names.py`). An object
    of one of the `num_layers` layers has at most `object_bytes`."""

    digest: str
    num_layers: int
    object_bytes: int


def store_identity(args: PipelineArgs, spec: ModelSpec) -> StoreIdentity:
    """The identity of a server's pages, whatever its depth and split.

    Reads a sample of the weights. Raises CheckpointError where they are missing or truncated.
    """
    stages, page_size = args.stages, args.scheduling.page_size
    computation = {
        "dtype": stages.dtype,
        "quantization": str(stages.quantization),
        "context_length": str(spec.context_length),
        "overrides": stages.rope_overrides,
        "layers": stages.generic_spec or "ours",
        "kernels": f"{stages.layer_kernels} {stages.attention_backend} {stages.prefill_kernels}",
        "device": f"{stages.device} {_instruction_set(stages.device)}",
    }
    is_plain = stages.kv_cache_dtype == "auto" and all(
        one.head_dim == one.value_dim for one in spec.attentions
    )
    shapes = spec.attention_shapes(
        page_size, getattr(torch, stages.dtype), torch.device("cpu"), stages.kv_cache_dtype
    )
    weights = model_digest(stages.model_path, stages.load_format)
    return StoreIdentity(
        digest=namespace_digest(
            model_id=model_id(spec.architecture, weights, computation),
            dtype=stages.kv_dtype,
            page_size=page_size,
            num_kv_heads=max(one.num_kv_heads for one in spec.attentions),
            layout=PLAIN_LAYOUT if is_plain else MEMORY_LAYOUT,
        ),
        num_layers=spec.num_layers,
        object_bytes=max(shape.page_bytes for shape in shapes),
    )


def _instruction_set(device: str) -> str:
    """The vector instructions of a CPU; two sets round sums differently."""
    if device != "cpu":
        return ""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = " ".join(line for line in lines if line.startswith("flags"))
    return " ".join(sorted({flag for flag in flags.split() if flag.startswith(("avx", "amx"))}))
