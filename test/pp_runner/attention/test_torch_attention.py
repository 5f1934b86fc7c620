"""The reference backend against attention written out for one row and one head at a time."""

import math
from array import array

import pytest
import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.attention.torch_attention import TorchAttention
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs, build_step_inputs
from sgl_pipeline.requests import GREEDY
from sgl_pipeline.wire.step_order import MirroredChunk, MirroredRequest

CPU = torch.device("cpu")
NUM_PAGES = 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def shape(page_size: int, dtype: torch.dtype = torch.float32) -> AttentionShape:
    return AttentionShape(HEADS, KV_HEADS, HEAD_DIM, page_size, 0.3, dtype, CPU)


def step(page_size: int, *chunks: tuple[int, int]) -> StepInputs:
    """Inputs of chunks (start, length) with shuffled pages, none of them shared."""
    pages = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(1)).tolist()
    mirrored = []
    for start, length in chunks:
        end = start + length
        own = [pages.pop() for _ in range(-(-end // page_size))]
        request = MirroredRequest(0, GREEDY, end, array("i", range(end)), array("i", own))
        mirrored.append(MirroredChunk(request, start, length, False))
    return build_step_inputs(mirrored, page_size, CPU)


def random_tensors(inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    pages = (NUM_PAGES, inputs.layout.page_size, KV_HEADS, HEAD_DIM)
    query = torch.randn((inputs.num_tokens, HEADS, HEAD_DIM), generator=generator)
    return query, torch.randn(pages, generator=generator), torch.randn(pages, generator=generator)


def one_at_a_time(
    inputs: StepInputs, query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor
) -> torch.Tensor:
    """softmax(scale * q k) v, in Python floats up to the weights."""
    layout, output = inputs.layout, torch.zeros_like(query)
    for chunk in range(layout.num_chunks):
        first, end = layout.query_indptr[chunk : chunk + 2].tolist()
        pages = layout.page_indices[layout.page_indptr[chunk] : layout.page_indptr[chunk + 1]]
        for row in range(first, end):
            num_keys = int(layout.kv_lengths[chunk]) - (end - 1 - row)
            places = [divmod(position, layout.page_size) for position in range(num_keys)]
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                keys = [key_pages[pages[page], offset, kv_head] for page, offset in places]
                values = [value_pages[pages[page], offset, kv_head] for page, offset in places]
                weights = [math.exp(0.3 * float(query[row, head] @ key)) for key in keys]
                weighted = [w * value for w, value in zip(weights, values, strict=True)]
                output[row, head] = torch.stack(weighted).sum(0) / sum(weights)
    return output


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    "chunks",
    [[(0, 9)], [(6, 5)], [(11, 1), (0, 1), (20, 1)], [(3, 1), (15, 1), (0, 4), (7, 10), (8, 1)]],
    ids=["whole", "continued", "decodes", "mixed"],
)
def test_output_equals_attention_row_by_row(page_size, chunks):
    inputs = step(page_size, *chunks)
    tensors = random_tensors(inputs)
    attention = TorchAttention(shape(page_size))
    attention.plan(inputs.layout)
    torch.testing.assert_close(attention.attend(*tensors), one_at_a_time(inputs, *tensors))


def test_bf16_output_is_that_of_fp32_rounded_once():
    inputs = step(4, (11, 1), (3, 7))
    rounded = [tensor.bfloat16() for tensor in random_tensors(inputs)]
    outputs = []
    for tensors in (rounded, [tensor.float() for tensor in rounded]):
        attention = TorchAttention(shape(4, tensors[0].dtype))
        attention.plan(inputs.layout)
        outputs.append(attention.attend(*tensors))
    assert torch.equal(outputs[0], outputs[1].bfloat16())


def test_a_nan_of_one_request_reaches_no_other():
    inputs = step(4, (3, 1), (9, 1), (0, 6))
    query, key_pages, value_pages = random_tensors(inputs)
    attention = TorchAttention(shape(4))
    attention.plan(inputs.layout)
    clean = attention.attend(query, key_pages, value_pages)
    layout = inputs.layout
    own_pages = set(layout.page_indices[: layout.page_indptr[1]].tolist())
    own_pages |= set(layout.page_indices[layout.page_indptr[2] :].tolist())
    for page in set(range(NUM_PAGES)) - own_pages:
        key_pages[page] = value_pages[page] = torch.nan
    dirty = attention.attend(query, key_pages, value_pages)
    assert torch.equal(dirty[[0, *range(2, 8)]], clean[[0, *range(2, 8)]])
    assert dirty[1].isnan().all()
