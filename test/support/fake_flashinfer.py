"""Stand-ins for FlashInfer's wrappers and functions, on a CPU.

They compute attention from nothing but the arguments of plan and run, as FlashInfer's documentation
defines them, so a wrong index array is a wrong result.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from support.emulated_graphs import EmulatedRecorder

from sgl_pipeline.pp_runner.attention.backend import AttentionShape
from sgl_pipeline.pp_runner.attention.flashinfer_attention import FlashInferAttention
from sgl_pipeline.pp_runner.attention.flashinfer_parts import FlashInferParts

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


@dataclass
class FakeGraphDecodeWrapper(FakeDecodeWrapper):
    """One in CUDA-graph mode: a fixed number of rows, arrays in buffers that plan fills and a
    recorded run reads when it is replayed."""

    num_rows: int = 0
    indices_buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    graphs: EmulatedRecorder | None = None

    def __post_init__(self) -> None:
        self.indptr_buffer = torch.zeros(self.num_rows + 1, dtype=torch.int32)
        self.last_page_buffer = torch.zeros(self.num_rows, dtype=torch.int32)

    def plan(self, *arrays: Any, **options: Any) -> None:
        super().plan(*arrays, **options)
        indptr, indices, last_page_len = self.arrays
        assert len(last_page_len) == self.num_rows, "the batch size is fixed"
        assert len(indices) <= len(self.indices_buffer)
        self.indptr_buffer.copy_(indptr)
        self.last_page_buffer.copy_(last_page_len)
        self.indices_buffer[: len(indices)].copy_(indices)
        self.arrays = (self.indptr_buffer, self.indices_buffer, self.last_page_buffer)

    def run(self, q: torch.Tensor, paged_kv_cache: Pages, *, out: torch.Tensor) -> torch.Tensor:
        run = super().run
        if self.graphs is None:
            return run(q, paged_kv_cache, out=out)
        self.graphs.launch(lambda: run(q, paged_kv_cache, out=out))
        return out


class Fakes:
    """A FlashInferAttention on stand-ins, which stay in reach."""

    def __init__(self, shape: AttentionShape, graphs: EmulatedRecorder | None = None) -> None:
        self.recorder = Recorder()
        self.prefill = FakePrefillWrapper(self.recorder)
        self.decode = FakeDecodeWrapper(self.recorder)
        self.graph_decodes: dict[int, FakeGraphDecodeWrapper] = {}
        self._graphs = graphs
        self.attention = FlashInferAttention(shape, open_parts=self.open)

    def open(self, shape: AttentionShape, prefill_kernels: str) -> FlashInferParts:
        return FlashInferParts(
            self.prefill, self.decode, lambda: self.recorder, self.open_graph_decode
        )

    def open_graph_decode(self, num_rows: int, indices: torch.Tensor) -> FakeGraphDecodeWrapper:
        wrapper = FakeGraphDecodeWrapper(
            self.recorder, num_rows=num_rows, indices_buffer=indices, graphs=self._graphs
        )
        self.graph_decodes[num_rows] = wrapper
        return wrapper


class FakeFlashInferFunctions:
    """FlashInfer's functions by their documentation, in fp64 with one rounding."""

    def __init__(self) -> None:
        self.cos_sin_tables: list[torch.Tensor] = []

    def rmsnorm(self, input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert len(input), "a launch without a block fails"
        assert input.stride(-1) == 1
        x = input.double()
        normed = x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight.double()
        return normed.to(input.dtype)

    def silu_and_mul(self, input: torch.Tensor) -> torch.Tensor:
        assert len(input), "a launch without a block fails"
        gate, up = input.double().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(input.dtype)

    def apply_rope_with_cos_sin_cache(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        head_size: int,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert cos_sin_cache.dtype == torch.float32
        assert cos_sin_cache.is_contiguous()
        assert positions.is_contiguous()
        self.cos_sin_tables.append(cos_sin_cache)
        table = cos_sin_cache[positions.long()].double()[:, None]
        cosine, sine = table.chunk(2, dim=-1)
        pairs = cosine.shape[-1]

        def rotated(heads: torch.Tensor) -> torch.Tensor:
            assert heads.view(len(heads), -1, head_size).shape == heads.shape
            turned = heads.double()
            first, second = turned[..., :pairs], turned[..., pairs : 2 * pairs]
            if not is_neox:
                first, second = turned[..., 0 : 2 * pairs : 2], turned[..., 1 : 2 * pairs : 2]
            first_turned = first * cosine - second * sine
            second.copy_(second * cosine + first * sine)
            first.copy_(first_turned)
            return turned.to(heads.dtype)

        return rotated(query), rotated(key)

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
        tables = (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
        assert all(table.dtype == torch.int32 and table.is_contiguous() for table in tables)
        assert len(kv_indptr) == len(kv_last_page_len) + 1
        page_size = paged_kv_cache[0].shape[1]
        assert (positions < (len(kv_indices) - 1) * page_size + kv_last_page_len[-1]).all()
        first_pages = kv_indptr[batch_indices.long()].long()
        pages = kv_indices[first_pages + positions // page_size].long()
        for store, rows in zip(paged_kv_cache, (append_key, append_value), strict=True):
            store[pages, (positions % page_size).long()] = rows
