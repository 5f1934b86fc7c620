"""What FlashInfer's wrappers are fed, checked on CPU; and on a GPU, what comes out of them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.emulated_graphs import EmulatedGraph, EmulatedRecorder
from support.fake_flashinfer import Fakes
from support.paged_attention import (
    ChunkExtent,
    attention_shape,
    coded_problem,
    decoded_problem,
    exact_attention,
    layout_of,
    random_problem,
)
from support.real_flashinfer import emulated_card

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.base.kv_format import FP8
from sgl_pipeline.pp_runner.flashinfer import flashinfer_attention
from sgl_pipeline.pp_runner.flashinfer.flashinfer_attention import (
    FlashInferAttention,
    workspace_bytes,
)
from sgl_pipeline.pp_runner.flashinfer.flashinfer_graph import GraphDecodeAttention

OpenAttention = Callable[[AttentionShape, EmulatedRecorder | None], FlashInferAttention]


@pytest.fixture(scope="module", params=["stand-ins", "auto", "fa2", "fa3"])
def open_attention(request: pytest.FixtureRequest) -> Iterator[OpenAttention]:
    """Over stand-ins for the wrappers, or over FlashInfer's own with these prefill kernels."""
    if request.param == "stand-ins":
        yield lambda shape, graphs=None: Fakes(shape, graphs).attention
        return
    with emulated_card() as card:
        # The wrappers of a shape serve one step after the other, as they do on a stage.
        @cache
        def opened(shape: AttentionShape) -> FlashInferAttention:
            # Dozens of shapes have a workspace each.
            with patch.object(flashinfer_attention, "_WORKSPACE_BYTES", 16 << 20):
                return FlashInferAttention(shape, request.param)

        def open_real(
            shape: AttentionShape, graphs: EmulatedRecorder | None = None
        ) -> FlashInferAttention:
            card.graphs = graphs
            return opened(shape)

        yield open_real


@settings(max_examples=60, deadline=None)
@given(
    heads=st.sampled_from([(4, 2), (8, 2), (4, 4)]),
    decodes=st.lists(st.integers(0, 70), max_size=4),
    prefills=st.lists(
        st.builds(ChunkExtent, start=st.integers(0, 40), length=st.integers(2, 30)), max_size=3
    ),
    late_decodes=st.lists(st.integers(0, 40), max_size=2),
    page_size=st.sampled_from([1, 16, 64]),
    window=st.sampled_from([None, 1, 20]),
    softcap=st.sampled_from([None, 5.0]),
)
def test_wrappers_are_fed_what_gives_the_right_answer(
    open_attention: OpenAttention,
    heads: tuple[int, int],
    decodes: list[int],
    prefills: list[ChunkExtent],
    late_decodes: list[int],
    page_size: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """One-row chunks behind a longer one are not counted as decodes: they must go to prefill."""
    chunks = [ChunkExtent(start, 1) for start in decodes]
    chunks += prefills + [ChunkExtent(start, 1) for start in late_decodes]
    if not chunks:
        return
    shape = attention_shape(*heads, 64, page_size, torch.bfloat16)
    problem = random_problem(chunks, shape)
    problem = replace(problem, shape=replace(shape, window=window, softcap=softcap))
    attention = open_attention(problem.shape)
    attention.plan(problem.layout)
    out = attention.attend(problem.query, problem.key_pages, problem.value_pages)
    torch.testing.assert_close(out.double(), exact_attention(problem), rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize("heads", [(4, 2), (8, 2)], ids=str)
@pytest.mark.parametrize("prefill_kernels", ["stand-ins", "auto", "fa2"])
def test_e4m3_pages_give_the_answer_of_the_numbers_in_them(
    prefill_kernels: str, heads: tuple[int, int]
) -> None:
    """Decodes and a prefill, and decodes in a graph; on a Hopper `auto` is not FA3 then."""
    shape = attention_shape(*heads, 64, 16, torch.bfloat16)
    decodes = [ChunkExtent(20, 1), ChunkExtent(3, 1)]
    mixed, alone = (
        coded_problem(random_problem(chunks, shape), FP8)
        for chunks in ([*decodes, ChunkExtent(30, 9)], decodes)
    )
    with contextlib.ExitStack() as stack:
        if prefill_kernels == "stand-ins":
            attention = Fakes(mixed.shape).attention
        else:
            card = stack.enter_context(emulated_card())
            attention = FlashInferAttention(mixed.shape, prefill_kernels)
        graph = attention.decode_for_graph(2, 0, torch.zeros(9, dtype=torch.int32))
        for problem, backend in ((mixed, attention), (alone, attention), (alone, graph)):
            backend.plan(problem.layout)
            out = backend.attend(problem.query, problem.key_pages, problem.value_pages)
            expected = exact_attention(decoded_problem(problem))
            torch.testing.assert_close(out.double(), expected, rtol=2.0**-7, atol=2.0**-7)
        if prefill_kernels != "stand-ins":
            assert "fa2" in card.attention_modules and "fa3" not in card.attention_modules


def test_fa3_is_refused_with_e4m3_pages() -> None:
    shape = replace(attention_shape(4, 2, 64, 16, torch.bfloat16), coded_dtype=FP8)
    with (
        emulated_card(),
        pytest.raises(ConfigurationError, match=r"fa3 .*float8.*choose fa2"),
    ):
        FlashInferAttention(shape, "fa3")


@pytest.mark.parametrize("kind", [{"has_sinks": True}, {"value_dim": 32}, {"head_dim": 512}])
def test_attention_that_flashinfer_is_not_called_for_is_refused(kind: dict[str, Any]) -> None:
    shape = replace(attention_shape(4, 2, 64, 16, torch.bfloat16), **kind)
    with pytest.raises(ConfigurationError, match="--stage-attention-backend torch"):
        Fakes(shape)


def test_plan_says_sizes_types_scale_and_what_a_row_sees() -> None:
    shape = attention_shape(8, 2, 128, 16, torch.float16)
    shape = replace(shape, scale=0.25, window=7, softcap=30.0)
    problem = random_problem([ChunkExtent(20, 1), ChunkExtent(0, 5)], shape)
    fakes = Fakes(shape)
    fakes.attention.plan(problem.layout)
    common = {
        "sizes": (8, 2, 128, 16),
        "q_data_type": torch.float16,
        "kv_data_type": torch.float16,
        "sm_scale": 0.25,
        "window_left": 6,
        "logits_soft_cap": 30.0,
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


@pytest.mark.parametrize(("start", "name"), [(0, "prefill"), (4000, "split")])
def test_decodes_beside_a_prompt_take_two_plans_a_step_and_two_kernels_a_layer(
    start: int, name: str
) -> None:
    """Of FA2 and FA3 one: the step is planned for the faster of them, whatever the other could."""
    shape = attention_shape(4, 2, 64, 16, torch.bfloat16)
    problem = random_problem([*[ChunkExtent(20, 1)] * 3, ChunkExtent(start, 5)], shape)
    fakes = Fakes(shape, has_split=True)
    for _ in range(2):
        fakes.attention.plan(problem.layout)
        for _layer in range(3):
            fakes.attention.attend(problem.query, problem.key_pages, problem.value_pages)
    plans = ["synchronize", "plan decode", f"plan {name}", "record"]
    assert fakes.recorder.calls == 2 * (plans + 3 * ["run decode", f"run {name}"])


def test_a_step_without_decodes_leaves_the_decode_wrapper_alone() -> None:
    problem = random_problem([ChunkExtent(3, 4)], attention_shape(2, 2, 64, 16, torch.bfloat16))
    fakes = Fakes(problem.shape)
    fakes.attention.plan(problem.layout)
    fakes.attention.attend(problem.query, problem.key_pages, problem.value_pages)
    assert fakes.recorder.calls == ["synchronize", "plan prefill", "record", "run prefill"]


@pytest.mark.parametrize(
    ("heads", "capability", "asked", "used"),
    [
        ((4, 2), (9, 0), "auto", ["decode", "fa3"]),
        ((4, 2), (9, 0), "fa2", ["decode", "fa2"]),
        ((4, 2), (9, 0), "fa3", ["decode", "fa3"]),
        ((8, 2), (9, 0), "fa3", ["fa2", "fa3"]),  # decodes of large groups, on tensor cores
        ((4, 2), (8, 9), "auto", ["decode", "fa2"]),
        ((4, 2), (8, 9), "fa2", ["decode", "fa2"]),
    ],
)
def test_flashinfer_prefills_with_the_kernels_that_were_asked_for(
    heads: tuple[int, int], capability: tuple[int, int], asked: str, used: list[str]
) -> None:
    """And decodes with the same ones in a graph and out of it."""
    shape = attention_shape(*heads, 64, 16, torch.bfloat16)
    decode, prefill = ChunkExtent(20, 1), ChunkExtent(0, 5)
    with emulated_card(capability) as card:
        attention = FlashInferAttention(shape, asked)
        attention.plan(random_problem([decode, prefill], shape).layout)
        graph = attention.decode_for_graph(1, 0, torch.zeros(9, dtype=torch.int32))
        graph.plan(random_problem([decode], shape).layout)
    assert card.attention_modules == [*used, used[0]]


def test_fa3_is_refused_where_the_card_is_no_hopper() -> None:
    shape = attention_shape(4, 2, 64, 16, torch.bfloat16)
    for capability, named in (((8, 9), "8.9"), ((10, 0), "10.0"), ((12, 0), "12.0")):
        with (
            emulated_card(capability),
            pytest.raises(ConfigurationError, match=f"fa3 needs.*this is {named}; choose fa2"),
        ):
            FlashInferAttention(shape, "fa3")


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float32), (80, torch.bfloat16)])
def test_a_shape_without_a_kernel_is_refused_by_name(head_dim: int, dtype: torch.dtype) -> None:
    shape = attention_shape(2, 2, head_dim, 16, dtype)
    with pytest.raises(ConfigurationError, match=f"head_dim {head_dim}.*attention-backend torch"):
        Fakes(shape)


def record_padding(
    recorder: EmulatedRecorder,
    graph: GraphDecodeAttention,
    query: torch.Tensor,
    pages: Sequence[torch.Tensor],
) -> tuple[EmulatedGraph, torch.Tensor]:
    """The graph of a step that is all padding, and where it writes what it computes."""
    with recorder.session():
        graph.plan(layout_of([], [], pages[0].shape[1]))
        graph.attend(query, *pages)
        recorder.begin()
        out = graph.attend(query, *pages)
        return recorder.end(), out


@settings(max_examples=40, deadline=None)
@given(
    heads=st.sampled_from([(4, 2), (8, 2)]),
    decodes=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 16]),
)
def test_a_decode_graph_is_filled_up_with_rows_that_touch_nobody(
    open_attention: OpenAttention, heads: tuple[int, int], decodes: list[int], page_size: int
) -> None:
    """The problem's last two pages hold NaN: the padding page must be finite, as in the pool."""
    problem = random_problem(
        [ChunkExtent(start, 1) for start in decodes],
        attention_shape(*heads, 64, page_size, torch.bfloat16),
    )
    num_pages = len(problem.key_pages)
    pages = [
        torch.cat((store, torch.zeros_like(store[:1])))
        for store in (problem.key_pages, problem.value_pages)
    ]
    indices = torch.zeros(200 + 6, dtype=torch.int32)
    recorder = EmulatedRecorder()
    graph = open_attention(problem.shape, recorder).decode_for_graph(6, num_pages, indices)
    if not graph.fits(problem.layout):
        assert problem.layout.page_indices.numel() + 6 - len(decodes) > 206
        return
    query = torch.cat((problem.query, torch.randn(6, heads[0], 64)))[:6].bfloat16()
    captured, out = record_padding(recorder, graph, query, pages)
    graph.plan(problem.layout)
    captured.replay()
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


@pytest.mark.parametrize("num_multiprocessors", [132, 148, 188], ids=["H200", "B200", "PRO 6000"])
def test_the_workspace_holds_the_partial_results_of_prefills_whose_keys_are_split(
    num_multiprocessors: int,
) -> None:
    """Two blocks for each multiprocessor, of 128 rows for each query head."""
    for query_heads, kv_heads, head_dim in ((32, 4, 128), (40, 8, 128), (16, 1, 256)):
        shape = attention_shape(query_heads, kv_heads, head_dim, 16, torch.bfloat16)
        num_blocks = 2 * num_multiprocessors // kv_heads
        assert workspace_bytes(shape) >= query_heads * num_blocks * 128 * (head_dim + 1) * 4
    assert workspace_bytes(attention_shape(32, 4, 128, 16, torch.bfloat16)) > 128 * 2**20


def card() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    pytest.importorskip("flashinfer")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_match_the_definition_on_a_gpu(
    heads: tuple[int, int], head_dim: int, page_size: int, dtype: torch.dtype
) -> None:
    cuda = card()
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


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("prefill_kernels", ["fa2", "fa3"])
@pytest.mark.parametrize("nan_in", ["kernels before", "unused slots"])
def test_no_nan_gets_into_attention_on_a_gpu(
    heads: tuple[int, int], prefill_kernels: str, nan_in: str
) -> None:
    """Kernels leave numbers in shared memory, where FlashInfer's issue 1046 found NaN of others.
    Unused slots of pages hold none (`KvPool`); that FlashInfer needs it is not known."""
    cuda = card()
    if prefill_kernels == "fa3" and torch.cuda.get_device_capability(cuda)[0] != 9:
        pytest.skip("fa3 is for Hopper")
    shape = attention_shape(*heads, 128, 16, torch.bfloat16)
    attention = FlashInferAttention(replace(shape, device=cuda), prefill_kernels)
    nan = torch.full((4096, 4096), torch.nan, dtype=torch.bfloat16, device=cuda)
    for chunks in (
        [ChunkExtent(0, 1), ChunkExtent(700, 1), ChunkExtent(0, 40), ChunkExtent(90, 33)],
        [ChunkExtent(15, 1), ChunkExtent(4, 1)],
        [ChunkExtent(0, 200), ChunkExtent(3, 7)],
    ):
        problem = random_problem(chunks, shape)
        pages = [
            (store if nan_in == "unused slots" else store.nan_to_num(0.0)).to(cuda)
            for store in (problem.key_pages, problem.value_pages)
        ]
        attention.plan(problem.layout)
        query = problem.query.to(cuda)
        if nan_in == "kernels before":
            assert (nan @ nan).isnan().all()
        out = attention.attend(query, *pages)
        torch.testing.assert_close(
            out.cpu().double(), exact_attention(problem), rtol=2.0**-7, atol=2.0**-7
        )
