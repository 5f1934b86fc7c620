"""The reference backend against attention written out for one row and one head at a time."""

import math
from array import array
from types import SimpleNamespace

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


def shape(
    page_size: int,
    dtype: torch.dtype = torch.float32,
    *,
    value_dim: int = HEAD_DIM,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> AttentionShape:
    return AttentionShape(
        num_query_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        value_dim=value_dim,
        scale=0.3,
        window=window,
        softcap=softcap,
        has_sinks=has_sinks,
        page_size=page_size,
        dtype=dtype,
        device=CPU,
    )


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


def random_tensors(
    inputs: StepInputs, value_dim: int = HEAD_DIM
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    slots = (NUM_PAGES, inputs.layout.page_size, KV_HEADS)
    query = torch.randn((inputs.num_tokens, HEADS, HEAD_DIM), generator=generator)
    keys = torch.randn((*slots, HEAD_DIM), generator=generator)
    return query, keys, torch.randn((*slots, value_dim), generator=generator)


def one_at_a_time(
    inputs: StepInputs,
    shape: AttentionShape,
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q k) v as `LayerAttention` has it, in Python floats up to the weights."""
    layout = inputs.layout
    output = torch.zeros(inputs.num_tokens, HEADS, shape.value_dim)
    for chunk in range(layout.num_chunks):
        first, end = layout.query_indptr[chunk : chunk + 2].tolist()
        pages = layout.page_indices[layout.page_indptr[chunk] : layout.page_indptr[chunk + 1]]
        for row in range(first, end):
            position = int(layout.kv_lengths[chunk]) - (end - row)
            window = shape.window or position + 1
            seen = [key for key in range(position + 1) if position - window < key]
            places = [divmod(key, layout.page_size) for key in seen]
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                keys = [key_pages[pages[page], offset, kv_head] for page, offset in places]
                values = [value_pages[pages[page], offset, kv_head] for page, offset in places]
                scores = [shape.scale * float(query[row, head] @ key) for key in keys]
                if shape.softcap is not None:
                    scores = [shape.softcap * math.tanh(s / shape.softcap) for s in scores]
                weights = [math.exp(score) for score in scores]
                weighted = [w * value for w, value in zip(weights, values, strict=True)]
                total = sum(weights) + (0 if sinks is None else math.exp(sinks[head]))
                output[row, head] = torch.stack(weighted).sum(0) / total
    return output


any_step = pytest.mark.parametrize(
    "chunks",
    [[(0, 9)], [(6, 5)], [(11, 1), (0, 1), (20, 1)], [(3, 1), (15, 1), (0, 4), (7, 10), (8, 1)]],
    ids=["whole", "continued", "decodes", "mixed"],
)
SINKS = torch.tensor([-30.0, -1.0, 0.5, 5.0])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@any_step
def test_output_equals_attention_row_by_row(page_size, chunks):
    inputs = step(page_size, *chunks)
    tensors = random_tensors(inputs)
    attention = TorchAttention(shape(page_size))
    attention.plan(inputs.layout)
    expected = one_at_a_time(inputs, shape(page_size), *tensors)
    torch.testing.assert_close(attention.attend(*tensors), expected)


@pytest.mark.parametrize("value_dim", [8, 5])
@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 12, 100])
@any_step
def test_windows_sinks_softcaps_and_narrow_values_row_by_row(
    chunks, window, sinks, softcap, value_dim
):
    inputs = step(4, *chunks)
    of_layer = shape(
        4, value_dim=value_dim, window=window, softcap=softcap, has_sinks=sinks is not None
    )
    tensors = (*random_tensors(inputs, value_dim), sinks)
    attention = TorchAttention(of_layer)
    attention.plan(inputs.layout)
    expected = one_at_a_time(inputs, of_layer, *tensors)
    torch.testing.assert_close(attention.attend(*tensors), expected)


def eager_attention(
    family: str, inputs: StepInputs, of_layer: AttentionShape, tensors: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """[T, Hq, D] by transformers' code for the one chunk of `inputs`, which is a whole prompt."""
    from transformers import AutoConfig
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.gemma3 import modeling_gemma3
    from transformers.models.gpt_oss import modeling_gpt_oss

    modeling = {
        "gpt_oss": modeling_gpt_oss,
        "gemma2": modeling_gemma2,
        "gemma3_text": modeling_gemma3,
    }[family]
    config = AutoConfig.for_model(family, sliding_window=of_layer.window)
    config._attn_implementation = "eager"
    make_mask = create_causal_mask
    if of_layer.window is not None:
        make_mask = create_sliding_window_causal_mask
    query, key_pages, value_pages, *sinks = tensors
    mask = make_mask(
        config=config,
        inputs_embeds=torch.zeros(1, inputs.num_tokens, config.hidden_size),
        attention_mask=None,
        past_key_values=None,
    )
    keys, values = (
        pages[inputs.layout.page_indices.long()].flatten(0, 1)[: inputs.num_tokens]
        for pages in (key_pages, value_pages)
    )
    module = SimpleNamespace(
        num_key_value_groups=HEADS // KV_HEADS, training=False, sinks=sinks[0] if sinks else None
    )
    output, _ = modeling.eager_attention_forward(
        module,
        *(rows[None].transpose(1, 2) for rows in (query, keys, values)),
        mask,
        scaling=of_layer.scale,
        **({} if of_layer.softcap is None else {"softcap": of_layer.softcap}),
    )
    return output[0]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("family", "sinks", "softcap"),
    [("gpt_oss", SINKS, None), ("gemma2", None, 2.0), ("gemma3_text", None, None)],
    ids=["gpt-oss", "gemma2", "gemma3"],
)
def test_output_equals_the_eager_attention_of_transformers(family, sinks, softcap, window):
    inputs = step(4, (0, 19))
    of_layer = shape(4, window=window, softcap=softcap, has_sinks=sinks is not None)
    tensors = random_tensors(inputs) + (() if sinks is None else (sinks,))
    attention = TorchAttention(of_layer)
    attention.plan(inputs.layout)
    expected = eager_attention(family, inputs, of_layer, tensors)
    torch.testing.assert_close(attention.attend(*tensors), expected)


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


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_nan_before_the_window_reaches_no_row(softcap):
    """Decodes and a prefill, of which the first row sees keys from 6 on."""
    inputs, of_layer = step(4, (11, 1), (9, 5)), shape(4, window=4, softcap=softcap)
    query, key_pages, value_pages = random_tensors(inputs)
    attention = TorchAttention(of_layer)
    attention.plan(inputs.layout)
    clean = attention.attend(query, key_pages, value_pages)
    layout = inputs.layout
    for chunk, first_seen in enumerate((8, 6)):
        pages = layout.page_indices[layout.page_indptr[chunk] :]
        for key in range(first_seen):
            slot = int(pages[key // 4]), key % 4
            key_pages[slot] = value_pages[slot] = torch.nan
    assert torch.equal(attention.attend(query, key_pages, value_pages), clean)


def test_sinks_are_wanted_where_the_layer_has_them():
    inputs = step(4, (0, 3))
    tensors = random_tensors(inputs)
    for has_sinks, sinks in ((True, None), (False, SINKS)):
        attention = TorchAttention(shape(4, has_sinks=has_sinks))
        attention.plan(inputs.layout)
        with pytest.raises(AssertionError):
            attention.attend(*tensors, sinks)
