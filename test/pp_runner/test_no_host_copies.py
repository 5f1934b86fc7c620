"""No step makes the host wait for the GPU before its tokens are copied.

Such code would be slow, and an error where it is captured. It runs on torch's meta device, whose
tensors have no numbers to read: any read fails. Operators are not looked into (`grouped_mm` may
copy the ends of its groups to the host: see `kernel_choice.choose_graphs`).
"""

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from support.tiny_models import VOCAB_SIZE, tiny_model

from sgl_pipeline.pp_runner.kv_pool import KvPool
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.logit_adjustments import plan_logit_adjustments
from sgl_pipeline.pp_runner.model_spec import ModelSpec, read_model_spec
from sgl_pipeline.pp_runner.sampler import Sampler
from sgl_pipeline.pp_runner.stage_model import StageModel
from sgl_pipeline.pp_runner.step_inputs import PagedLayout, build_step_inputs
from sgl_pipeline.pp_runner.token_masks import plan_token_masks
from sgl_pipeline.requests import GREEDY, SamplingSpec
from sgl_pipeline.step_plan import INT32, MirroredChunk, MirroredRequest

META = torch.device("meta")
PAGE_SIZE = 4
SPECS = (
    GREEDY,
    SamplingSpec(),
    SamplingSpec(min_p=0.1),
    SamplingSpec(top_p=0.9),
    SamplingSpec(top_k=20),
    SamplingSpec(top_k=200, top_p=0.5),
    SamplingSpec(top_k=2000),
    SamplingSpec(frequency_penalty=0.5, repetition_penalty=1.1, logit_bias=((3, 1.0),)),
    SamplingSpec(min_new_tokens=9, masked_token_ids=(2,)),
)


class QueriesAsTheyAre:
    """Stands in for the attention, whose kernels on a GPU are no operators of torch."""

    def plan(self, layout: PagedLayout) -> None:
        pass

    def attend(
        self, query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor
    ) -> torch.Tensor:
        return query.clone()


class WeightsWithoutNumbers:
    """A `WeightSource` of the meta device."""

    def __init__(self) -> None:
        self.loaded: dict[str, int] = {}

    def has(self, name: str) -> bool:
        return True

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)


def mixed_step(sampling: Sequence[SamplingSpec]) -> list[MirroredChunk]:
    """A decode for each of `sampling`, one more under a mask, and a chunk of a prompt."""
    chunks = []
    for handle, (spec, length) in enumerate([*((spec, 1) for spec in sampling), (GREEDY, 7)]):
        request = MirroredRequest(
            handle=handle,
            sampling=spec,
            prompt_length=5,
            tokens=array(INT32, range(10)),
            pages=array(INT32, range(3 * handle, 3 * handle + 3)),
        )
        mask = b"\x0f" * (4 * -(-VOCAB_SIZE // 32)) if length > 1 else b""
        chunks.append(MirroredChunk(request, 10 - length, length, samples=True, token_mask=mask))
    return chunks


def whole_model(spec: ModelSpec) -> StageModel:
    return StageModel.build(
        spec,
        WeightsWithoutNumbers(),
        device=META,
        kernels=TorchKernels(),
        layers=range(spec.num_layers),
        is_first=True,
        is_last=True,
    )


@pytest.mark.parametrize("name", ["qwen3", "glm4", "qwen2-moe", "qwen3-moe", "mixtral-sharded"])
def test_layers_head_and_sampler_read_nothing_back(name: str) -> None:
    spec = read_model_spec(tiny_model(name))
    pool = KvPool(
        range(spec.num_layers),
        num_pages=64,
        page_size=PAGE_SIZE,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=torch.bfloat16,
        device=META,
    )

    def upload(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return [torch.from_numpy(values).to(META) for values in arrays]

    chunks = mixed_step(SPECS)
    inputs = build_step_inputs(chunks, PAGE_SIZE, META, upload)
    adjustments, masks = plan_logit_adjustments(chunks, META), plan_token_masks(chunks, META)
    assert adjustments is not None and masks is not None
    model = whole_model(spec)
    hidden = model.forward(inputs, None, pool, QueriesAsTheyAre())
    logits = model.logits(hidden[inputs.sample_rows])
    adjustments.apply_to(logits)
    masks.apply_to(logits)
    drawn = Sampler().draw(logits, inputs.sampling, inputs.sample_positions)
    assert hidden.device == logits.device == drawn.token_ids.device == META
    assert drawn.token_ids.shape == (len(chunks),)


@pytest.mark.parametrize(
    "read",
    [
        lambda rows: rows.sum().item(),
        lambda rows: bool((rows > 0).all()),
        lambda rows: rows.tolist(),
        lambda rows: rows.cpu(),
        lambda rows: rows.numpy(),
        lambda rows: rows.nonzero(),
        lambda rows: rows[rows > 0],
        lambda rows: torch.empty(3, 4).copy_(rows),
        lambda rows: list(range(rows.argmax())),
    ],
)
def test_reading_a_number_of_a_tensor_without_numbers_fails(
    read: Callable[[torch.Tensor], object],
) -> None:
    with pytest.raises((RuntimeError, NotImplementedError, TypeError), match="meta"):
        read(torch.zeros(3, 4, device=META))
