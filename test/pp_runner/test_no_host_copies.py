"""No step makes the host wait for the GPU before its tokens are copied.

Such code would be slow, and an error where it is captured. It runs on torch's meta device: any read
of a number fails. Operators are not looked into (`grouped_mm` may copy the ends of its groups to
the host: see `kernel_choice.choose_graphs`).
"""

import contextlib
from array import array
from collections.abc import Callable, Sequence

import pytest
import torch
from support.numberless_stage import META, NumberlessStage
from support.tiny_models import VOCAB_SIZE, tiny_model

from sgl_pipeline.pp_runner.base.download import Arrived
from sgl_pipeline.pp_runner.model.model_spec import read_model_spec
from sgl_pipeline.pp_runner.output.output_tail import OutputTail
from sgl_pipeline.requests import GREEDY, LogprobSpec, SamplingSpec
from sgl_pipeline.wire.step_order import INT32, MirroredChunk, MirroredRequest

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


class CopiesNothing:
    """A `Download` that keeps what it is given."""

    tensors: Sequence[torch.Tensor] = ()

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Arrived:
        self.tensors = tensors
        return Arrived(())

    def beside_kernels(self, *read: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        raise AssertionError("nothing is to be done again before the host has the tokens")


def num_wanted_rows(chunks: Sequence[MirroredChunk]) -> int:
    """Of log-probabilities."""
    return sum(chunk.length for chunk in chunks if chunk.request.logprobs is not None)


def mixed_step(sampling: Sequence[SamplingSpec]) -> list[MirroredChunk]:
    """A decode for each of `sampling`, and a chunk of a prompt that samples under a mask."""
    chunks = []
    for handle, (spec, length) in enumerate([*((spec, 1) for spec in sampling), (GREEDY, 7)]):
        request = MirroredRequest(
            handle=handle,
            sampling=spec,
            prompt_length=5,
            tokens=array(INT32, range(10)),
            pages=array(INT32, range(3 * handle, 3 * handle + 3)),
            logprobs=None if handle % 3 else LogprobSpec(0, 3, (1, 5)),
        )
        mask = b"\x0f" * (4 * -(-VOCAB_SIZE // 32)) if length > 1 else b""
        chunks.append(MirroredChunk(request, 10 - length, length, samples=True, token_mask=mask))
    return chunks


@pytest.mark.parametrize("name", ["qwen3", "glm4", "qwen2-moe", "qwen3-moe", "mixtral-sharded"])
def test_layers_head_and_sampler_read_nothing_back(name: str) -> None:
    stage, chunks = NumberlessStage(read_model_spec(tiny_model(name))), mixed_step(SPECS)
    inputs, download = stage.inputs(chunks), CopiesNothing()
    tail = OutputTail(stage.model.logits, META, download)
    tail.plan(chunks, inputs)
    hidden = stage.forward(inputs)
    tail.draw(hidden)
    assert {tensor.device for tensor in (hidden, *download.tensors)} == {META}
    num_rows = num_wanted_rows(chunks)
    assert [tuple(tensor.shape) for tensor in download.tensors] == [
        (len(chunks),), (num_rows,), (num_rows, 3), (num_rows, 3), (2 * num_rows,),
    ]  # fmt: skip


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
