"""Stand-ins for FlashInfer's wrappers and functions, on a CPU.

They compute from nothing but the arguments of plan and run, so a wrong index array is a wrong
result. `test_flashinfer_contract.py` holds their parameters to the library's.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from support import flashinfer_arithmetic as arithmetic
from support.emulated_graphs import EmulatedRecorder
from support.flashinfer_arithmetic import Pages

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.flashinfer.flashinfer_attention import FlashInferAttention
from sgl_pipeline.pp_runner.flashinfer.flashinfer_parts import FlashInferParts, SplitPrefill

DataType = torch.dtype | str


@dataclass
class Recorder:
    """Stands in for the event and keeps the order of calls."""

    calls: list[str] = field(default_factory=list)

    def record(self, stream: object = None) -> None:
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
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: DataType | None = "float16",
        kv_data_type: DataType | None = None,
        sm_scale: float | None = None,
        seq_lens: torch.Tensor | None = None,
    ) -> None:
        self.recorder.calls.append("plan decode")
        lengths = (indptr.diff() - 1) * page_size + last_page_len
        assert seq_lens is not None and torch.equal(seq_lens, lengths), "other keys than its pages'"
        self._keep(indptr, indices, last_page_len)
        self.options = {
            "sizes": (num_qo_heads, num_kv_heads, head_dim, page_size),
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
        }

    def _keep(self, *arrays: torch.Tensor) -> None:
        self.arrays = arrays

    def run(
        self, q: torch.Tensor, paged_kv_cache: Pages, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.recorder.calls.append("run decode")
        assert out is not None, "an output of its own would not be the caller's"
        assert len(q) == len(self.arrays[2])
        one_row_each = torch.arange(len(q) + 1, dtype=torch.int32)
        attend(q, paged_kv_cache, one_row_each, self.arrays, self.options, False, out)
        return out


@dataclass
class FakePrefillWrapper:
    recorder: Recorder
    name: str = "prefill"
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
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: DataType = "float16",
        kv_data_type: DataType | None = None,
    ) -> None:
        self.recorder.calls.append(f"plan {self.name}")
        self.arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.options = {
            "sizes": (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            "causal": causal,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
        }

    def run(
        self, q: torch.Tensor, paged_kv_cache: Pages, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.recorder.calls.append(f"run {self.name}")
        assert out is not None, "an output of its own would not be the caller's"
        is_causal = self.options["causal"]
        attend(q, paged_kv_cache, self.arrays[0], self.arrays[1:], self.options, is_causal, out)
        return out


def attend(
    q: torch.Tensor,
    pages: Pages,
    qo_indptr: torch.Tensor,
    arrays: tuple[torch.Tensor, ...],
    options: dict[str, Any],
    is_causal: bool,
    out: torch.Tensor,
) -> None:
    """The attention of what was planned; what is run must have its sizes and types."""
    page_size, num_kv_heads, head_dim = pages[0].shape[1:]
    assert options["sizes"] == (q.shape[1], num_kv_heads, head_dim, page_size)
    assert options["q_data_type"] == q.dtype
    assert (options["kv_data_type"] or options["q_data_type"]) == pages[0].dtype
    scale = options["sm_scale"] or head_dim**-0.5
    window_left, soft_cap = options["window_left"], options["logits_soft_cap"] or 0.0
    arithmetic.attention_of_indices(
        q, pages, qo_indptr, *arrays, scale, is_causal, out, window_left, soft_cap
    )


@dataclass
class FakeGraphDecodeWrapper(FakeDecodeWrapper):
    """One in CUDA-graph mode: a fixed number of rows, arrays in buffers that plan fills and a
    recorded run reads when it is replayed."""

    num_rows: int = 0
    indices_buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    graphs: EmulatedRecorder | None = None

    def __post_init__(self) -> None:
        device = self.indices_buffer.device
        self.indptr_buffer = torch.zeros(self.num_rows + 1, dtype=torch.int32, device=device)
        self.last_page_buffer = torch.zeros(self.num_rows, dtype=torch.int32, device=device)

    def _keep(self, *arrays: torch.Tensor) -> None:
        _, indices, last_page_len = arrays
        assert len(last_page_len) == self.num_rows, "the batch size is fixed"
        assert len(indices) <= len(self.indices_buffer)
        assert indices.device == self.indices_buffer.device, "the copy would wait for the GPU"
        self.arrays = (self.indptr_buffer, self.indices_buffer, self.last_page_buffer)
        for buffer, array in zip(self.arrays, arrays, strict=True):
            # A copy would convert other types.
            assert buffer.dtype == array.dtype == torch.int32
            buffer[: len(array)].copy_(array)

    def run(
        self, q: torch.Tensor, paged_kv_cache: Pages, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        run = super().run
        if self.graphs is None:
            return run(q, paged_kv_cache, out=out)
        assert out is not None
        self.graphs.launch(lambda: run(q, paged_kv_cache, out=out))
        return out


class Fakes:
    """A FlashInferAttention on stand-ins, which stay in reach.

    Args:
        has_split: as on a Hopper, with the multiprocessors of an H200.
    """

    def __init__(
        self,
        shape: AttentionShape,
        graphs: EmulatedRecorder | None = None,
        *,
        has_split: bool = False,
    ) -> None:
        self.recorder = Recorder()
        self.prefill = FakePrefillWrapper(self.recorder)
        self.split = FakePrefillWrapper(self.recorder, "split") if has_split else None
        self.decode = FakeDecodeWrapper(self.recorder)
        self.graph_decodes: dict[int, FakeGraphDecodeWrapper] = {}
        self._graphs = graphs
        self.attention = FlashInferAttention(shape, open_parts=self.open)

    def open(self, shape: AttentionShape, prefill_kernels: str) -> FlashInferParts:
        return FlashInferParts(
            self.prefill,
            self.decode,
            lambda: self.recorder,
            self.open_graph_decode,
            self.split and SplitPrefill(self.split, 132),
        )

    def open_graph_decode(self, num_rows: int, indices: torch.Tensor) -> FakeGraphDecodeWrapper:
        wrapper = FakeGraphDecodeWrapper(
            self.recorder, num_rows=num_rows, indices_buffer=indices, graphs=self._graphs
        )
        self.graph_decodes[num_rows] = wrapper
        return wrapper


class FakeFlashInferFunctions:
    """FlashInfer's functions by their documentation."""

    def __init__(self) -> None:
        self.cos_sin_tables: list[torch.Tensor] = []

    def rmsnorm(self, input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        out = torch.empty_like(input)
        arithmetic.norm(out, input, weight, eps)
        return out

    def fused_add_rmsnorm(
        self, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
    ) -> None:
        arithmetic.add_and_norm(input, residual, weight, eps)

    def silu_and_mul(self, input: torch.Tensor) -> torch.Tensor:
        out = input.new_empty(len(input), input.shape[1] // 2)
        arithmetic.silu_and_mul(out, input)
        return out

    def apply_rope_with_cos_sin_cache(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        head_size: int,
        cos_sin_cache: torch.Tensor,
        is_neox: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.cos_sin_tables.append(cos_sin_cache)
        rotated = (torch.empty_like(query), torch.empty_like(key))
        tensors = [heads.view(len(heads), -1, head_size) for heads in (query, key, *rotated)]
        arithmetic.rotate(*tensors, cos_sin_cache, positions, not is_neox)
        return rotated

    def append_paged_kv_cache(
        self,
        append_key: torch.Tensor,
        append_value: torch.Tensor,
        batch_indices: torch.Tensor,
        positions: torch.Tensor,
        paged_kv_cache: Pages,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_last_page_len: torch.Tensor,
    ) -> None:
        arithmetic.append(
            append_key,
            append_value,
            batch_indices,
            positions,
            paged_kv_cache,
            kv_indices,
            kv_indptr,
            kv_last_page_len,
        )
