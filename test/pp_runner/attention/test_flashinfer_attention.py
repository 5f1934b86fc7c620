"""What FlashInfer's wrappers are fed, checked on CPU; and on a GPU, what comes out of them.

On CPU, stand-ins compute attention from nothing but the arguments of plan and run, as FlashInfer's
documentation defines them, so a wrong index array is a wrong result.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged_attention import (
    ChunkExtent,
    attention_shape,
    exact_attention,
    random_problem,
)

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.attention.backend import AttentionShape
from sgl_pipeline.pp_runner.attention.flashinfer_attention import (
    FlashInferAttention,
    FlashInferParts,
)

Pages = tuple[torch.Tensor, torch.Tensor]


def attention_of_indices(
    q: torch.Tensor,
    pages: Pages,
    qo_indptr: list[int],
    kv_indptr: list[int],
    indices: torch.Tensor,
    last_page_len: list[int],
    sm_scale: float,
) -> torch.Tensor:
    """FlashInfer's tutorial on the KV layout: the last row of a request sees all of its keys."""
    out = torch.empty_like(q)
    group, page_size = q.shape[1] // pages[0].shape[2], pages[0].shape[1]
    for request, last in enumerate(last_page_len):
        own = indices[kv_indptr[request] : kv_indptr[request + 1]].long()
        length = (len(own) - 1) * page_size + last
        keys, values = (
            store[own].flatten(0, 1)[:length].repeat_interleave(group, dim=1).double()
            for store in pages
        )
        rows = q[qo_indptr[request] : qo_indptr[request + 1]].double()
        scores = torch.einsum("thd,khd->htk", rows, keys) * sm_scale
        hidden = torch.ones(len(rows), length).triu(length - len(rows) + 1).bool()
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[qo_indptr[request] : qo_indptr[request + 1]] = torch.einsum(
            "htk,khd->thd", weights, values
        ).to(q.dtype)
    return out


@dataclass
class Recorder:
    """Stands in for the event and keeps the order of calls."""

    calls: list[str] = field(default_factory=list)

    def record(self) -> None:
        self.calls.append("record")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


@dataclass
class FakeDecodeWrapper:
    recorder: Recorder
    arrays: tuple[torch.Tensor, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        self.recorder.calls.append("plan decode")
        self.arrays = (indptr, indices, last_page_len)
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self.options = {"sizes": sizes, **options}

    def run(self, q: torch.Tensor, paged_kv_cache: Pages, *, out: torch.Tensor) -> torch.Tensor:
        self.recorder.calls.append("run decode")
        indptr, indices, last_page_len = self.arrays
        assert len(q) == len(last_page_len)
        result = attention_of_indices(
            q,
            paged_kv_cache,
            list(range(len(q) + 1)),
            indptr.tolist(),
            indices,
            last_page_len.tolist(),
            self.options["sm_scale"],
        )
        return out.copy_(result)


@dataclass
class FakePrefillWrapper:
    recorder: Recorder
    arrays: tuple[torch.Tensor, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **options: Any,
    ) -> None:
        self.recorder.calls.append("plan prefill")
        self.arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.options = {"sizes": sizes, **options}

    def run(self, q: torch.Tensor, paged_kv_cache: Pages, *, out: torch.Tensor) -> torch.Tensor:
        self.recorder.calls.append("run prefill")
        qo_indptr, kv_indptr, indices, last_page_len = self.arrays
        assert int(qo_indptr[-1]) == len(q)
        result = attention_of_indices(
            q,
            paged_kv_cache,
            qo_indptr.tolist(),
            kv_indptr.tolist(),
            indices,
            last_page_len.tolist(),
            self.options["sm_scale"],
        )
        return out.copy_(result)


class Fakes:
    """A FlashInferAttention on stand-ins, which stay in reach."""

    def __init__(self, shape: AttentionShape) -> None:
        self.recorder = Recorder()
        self.prefill = FakePrefillWrapper(self.recorder)
        self.decode = FakeDecodeWrapper(self.recorder)
        self.attention = FlashInferAttention(shape, self.open)

    def open(self, shape: AttentionShape) -> FlashInferParts:
        return FlashInferParts(self.prefill, self.decode, self.recorder)


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


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_match_the_definition_on_a_gpu(
    heads: tuple[int, int], head_dim: int, page_size: int, dtype: torch.dtype
) -> None:
    pytest.importorskip("flashinfer")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
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
