"""Calls every FlashInfer kernel of a stage once, so that all are compiled when the stage starts.

Without it a missing compiler would end the server at the first request, and the first prompts would
wait for minutes.
"""

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionBackend, AttentionShape
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels, RmsNorm, Rotation

# If the contents of the stage's pages are not known.
ONE_HEAD = AttentionShape(
    num_query_heads=1,
    num_kv_heads=1,
    head_dim=64,
    value_dim=64,
    page_size=16,
    scale=1.0,
    dtype=torch.bfloat16,
    device=torch.device("cuda"),
)

# Enough for the kernels that split a long context, where heads are too few for the others.
_MANY_TOKENS = 32768


def plan_decode_and_prefill(attention: AttentionBackend, shape: AttentionShape) -> None:
    """Plans steps of a decode and a prefill of one row each, the latter behind many keys
    and behind none; a plan loads the kernels."""
    for num_pages in (-(-_MANY_TOKENS // shape.page_size), 1):
        ones = torch.ones(2, dtype=torch.int32)
        attention.plan(
            PagedLayout(
                page_size=shape.page_size,
                num_decodes=1,
                query_indptr=torch.arange(3, dtype=torch.int32),
                page_indptr=torch.tensor([0, 1, 1 + num_pages], dtype=torch.int32),
                page_indices=torch.zeros(1 + num_pages, dtype=torch.int32),
                last_page_lengths=ones,
                kv_lengths=torch.tensor(
                    [1, 1 + (num_pages - 1) * shape.page_size], dtype=torch.int32
                ),
            )
        )


@torch.inference_mode()
def call_layer_kernels(kernels: LayerKernels, shape: AttentionShape) -> None:
    """Runs norms, gate and heads on one row of zeros, and one page."""
    head_dim = shape.head_dim

    def zeros(*size: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device=shape.device)

    norm = RmsNorm(zeros(head_dim), 1e-6)
    kernels.norm(zeros(1, head_dim), norm)
    kernels.add_norm(zeros(1, head_dim), zeros(1, head_dim), norm)
    kernels.gate(zeros(1, 2 * head_dim))
    half = zeros(1, head_dim // 2, dtype=torch.float32)
    pages = (
        zeros(1, *shape.key_page_shape, dtype=shape.page_dtype),
        zeros(1, *shape.value_page_shape, dtype=shape.page_dtype),
    )
    kernels.place_heads(
        zeros(1, (shape.num_query_heads + 2 * shape.num_kv_heads) * head_dim),
        None,
        Rotation(half, half, interleaved=False),
        zeros(1, dtype=torch.int64),
        pages,
    )
