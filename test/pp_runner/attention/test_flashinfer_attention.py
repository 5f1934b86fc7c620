"""What FlashInfer's wrappers are fed, checked on CPU; and on a GPU, what comes out of them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_flashinfer import Fakes
from support.paged_attention import (
    ChunkExtent,
    attention_shape,
    exact_attention,
    random_problem,
)

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.attention.flashinfer_attention import (
    FlashInferAttention,
    workspace_bytes,
)


@settings(max_examples=60, deadline=None)
@given(
    decodes=st.lists(st.integers(0, 70), max_size=4),
    prefills=st.lists(
        st.builds(ChunkExtent, start=st.integers(0, 40), length=st.integers(2, 30)), max_size=3
    ),
    late_decodes=st.lists(st.integers(0, 40), max_size=2),
    page_size=st.sampled_from([1, 16, 64]),
)
def test_wrappers_are_fed_what_gives_the_right_answer(
    decodes: list[int], prefills: list[ChunkExtent], late_decodes: list[int], page_size: int
) -> None:
    """One-row chunks behind a longer one are not counted as decodes: they must go to prefill."""
    chunks = [ChunkExtent(start, 1) for start in decodes]
    chunks += prefills + [ChunkExtent(start, 1) for start in late_decodes]
    if not chunks:
        return
    problem = random_problem(chunks, attention_shape(4, 2, 64, page_size, torch.bfloat16))
    fakes = Fakes(problem.shape)
    fakes.attention.plan(problem.layout)
    out = fakes.attention.attend(problem.query, problem.key_pages, problem.value_pages)
    torch.testing.assert_close(out.double(), exact_attention(problem), rtol=2.0**-7, atol=2.0**-7)
    for fake in (fakes.decode, fakes.prefill):
        for array in fake.arrays:
            assert array.dtype == torch.int32
            assert array.is_contiguous()
            assert array.device.type == "cpu"


def test_plan_says_sizes_types_scale_and_causality() -> None:
    shape = replace(attention_shape(8, 2, 128, 16, torch.float16), scale=0.25)
    problem = random_problem([ChunkExtent(20, 1), ChunkExtent(0, 5)], shape)
    fakes = Fakes(shape)
    fakes.attention.plan(problem.layout)
    common = {
        "sizes": (8, 2, 128, 16),
        "q_data_type": torch.float16,
        "kv_data_type": torch.float16,
        "sm_scale": 0.25,
    }
    assert fakes.decode.options == common
    assert fakes.prefill.options == {**common, "causal": True}


def test_one_plan_serves_all_layers_and_waits_for_the_copies_of_the_last() -> None:
    problem = random_problem([ChunkExtent(20, 1)], attention_shape(2, 2, 64, 16, torch.bfloat16))
    fakes = Fakes(problem.shape)
    for _ in range(2):
        fakes.attention.plan(problem.layout)
        for _layer in range(2):
            fakes.attention.attend(problem.query, problem.key_pages, problem.value_pages)
    step = ["synchronize", "plan decode", "record", "run decode", "run decode"]
    assert fakes.recorder.calls == 2 * step


def test_a_step_without_decodes_leaves_the_decode_wrapper_alone() -> None:
    problem = random_problem([ChunkExtent(3, 4)], attention_shape(2, 2, 64, 16, torch.bfloat16))
    fakes = Fakes(problem.shape)
    fakes.attention.plan(problem.layout)
    fakes.attention.attend(problem.query, problem.key_pages, problem.value_pages)
    assert fakes.recorder.calls == ["synchronize", "plan prefill", "record", "run prefill"]


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float32), (80, torch.bfloat16)])
def test_a_shape_without_a_kernel_is_refused_by_name(head_dim: int, dtype: torch.dtype) -> None:
    shape = attention_shape(2, 2, head_dim, 16, dtype)
    with pytest.raises(ConfigurationError, match=f"head_dim {head_dim}.*attention-backend torch"):
        Fakes(shape)


@settings(max_examples=40, deadline=None)
@given(
    decodes=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 16]),
)
def test_a_decode_graph_is_filled_up_with_rows_that_touch_nobody(
    decodes: list[int], page_size: int
) -> None:
    """The problem's last two pages hold NaN: the padding page must be finite, as in the pool."""
    problem = random_problem(
        [ChunkExtent(start, 1) for start in decodes],
        attention_shape(4, 2, 64, page_size, torch.bfloat16),
    )
    num_pages = len(problem.key_pages)
    pages = [
        torch.cat((store, torch.zeros_like(store[:1])))
        for store in (problem.key_pages, problem.value_pages)
    ]
    indices = torch.zeros(200 + 6, dtype=torch.int32)
    fakes = Fakes(problem.shape)
    graph = fakes.attention.decode_for_graph(6, num_pages, indices)
    if not graph.fits(problem.layout):
        assert problem.layout.page_indices.numel() + 6 - len(decodes) > 206
        return
    graph.plan(problem.layout)
    query = torch.cat((problem.query, torch.randn(6, 4, 64)))[:6].bfloat16()
    out = graph.attend(query, *pages)
    assert out.isfinite().all()
    torch.testing.assert_close(
        out[: len(decodes)].double(), exact_attention(problem), rtol=2.0**-7, atol=2.0**-7
    )


def test_a_decode_graph_takes_decodes_alone_and_no_more_than_its_rows() -> None:
    shape = attention_shape(2, 2, 64, 16, torch.bfloat16)
    graph = Fakes(shape).attention.decode_for_graph(2, 9, torch.zeros(8, dtype=torch.int32))
    for chunks, fits in (
        ([ChunkExtent(20, 1)], True),
        ([ChunkExtent(20, 1)] * 2, True),
        ([ChunkExtent(20, 1)] * 3, False),
        ([ChunkExtent(20, 2)], False),
        ([ChunkExtent(5 * 16, 1)] * 2, False),  # twelve page references
    ):
        assert graph.fits(random_problem(chunks, shape).layout) is fits


def test_the_workspace_holds_the_partial_results_of_a_whole_graph() -> None:
    """64 query heads over 8: 256 rows are 128 tiles of 16, and a last one for each row."""
    shape = attention_shape(64, 8, 128, 16, torch.bfloat16)
    assert workspace_bytes(shape) >= 64 * (128 + 255) * 16 * 129 * 4
    assert workspace_bytes(attention_shape(4, 4, 64, 16, torch.bfloat16)) == 128 * 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_match_the_definition_on_a_gpu(
    heads: tuple[int, int], head_dim: int, page_size: int, dtype: torch.dtype
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    pytest.importorskip("flashinfer")
    cuda = torch.device("cuda")
    attention = None
    for chunks in (
        [ChunkExtent(0, 1), ChunkExtent(700, 1), ChunkExtent(0, 40), ChunkExtent(90, 33)],
        [ChunkExtent(15, 1), ChunkExtent(16, 1)],
        [ChunkExtent(0, 200), ChunkExtent(50, 1)],
    ):
        problem = random_problem(chunks, attention_shape(*heads, head_dim, page_size, dtype))
        if attention is None:
            attention = FlashInferAttention(replace(problem.shape, device=cuda))
        attention.plan(problem.layout)
        # The kernels read unused slots of a page with weight 0, so the pool holds no NaN.
        pages = [
            store.nan_to_num(0.0).to(cuda) for store in (problem.key_pages, problem.value_pages)
        ]
        out = attention.attend(problem.query.to(cuda), *pages)
        torch.testing.assert_close(
            out.cpu().double(), exact_attention(problem), rtol=2.0**-7, atol=2.0**-7
        )
