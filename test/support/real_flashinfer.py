"""FlashInfer's own Python on a machine without a GPU, over stand-ins for what it compiles.

Its wrappers and functions check, copy and choose; what they hand to their compiled modules is
computed by `flashinfer_arithmetic`. Written against flashinfer-python 0.7.2: the parameters of the
stand-ins are in the order of its calls. `make test` installs it (requirements/contract.txt).
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support import flashinfer_arithmetic as arithmetic
from support.emulated_graphs import EmulatedRecorder
from support.fake_flashinfer import Recorder

FOLDER = Path(sys.prefix) / "contract"
HOPPER = (9, 0)
NHD = 0
NOT_CAUSAL, CAUSAL = 0, 1

_cache_of_kernels = tempfile.TemporaryDirectory(prefix="flashinfer-")


@cache
def import_flashinfer() -> ModuleType:
    """The installed one, or that of the tests; skips the test where there is neither."""
    before = os.environ.get("FLASHINFER_WORKSPACE_BASE")
    os.environ["FLASHINFER_WORKSPACE_BASE"] = _cache_of_kernels.name  # not the home directory
    sys.path.append(str(FOLDER))
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        pytest.skip(f"`make test` installs FlashInfer for this test: {error}")
    finally:
        sys.path.remove(str(FOLDER))
        if before is None:
            del os.environ["FLASHINFER_WORKSPACE_BASE"]
        else:
            os.environ["FLASHINFER_WORKSPACE_BASE"] = before


@dataclass
class EmulatedCard:
    """`attention_modules` are those that were asked for: `decode`, or FlashInfer's name of its
    prefill kernels. What they launch goes to `graphs`, if there are any."""

    graphs: EmulatedRecorder | None = None
    attention_modules: list[str] = field(default_factory=list)

    def decode_module(self, *variant: Any) -> "CompiledAttention":
        return self._attention_module("decode", variant)

    def prefill_module(self, kernels: str, *variant: Any) -> "CompiledAttention":
        assert not variant[9], "products of queries and keys in fp16"
        return self._attention_module(kernels, variant)

    def _attention_module(self, name: str, variant: tuple[Any, ...]) -> "CompiledAttention":
        q_dtype, kv_dtype, out_dtype, index_dtype, head_dim, head_dim_of_values = variant[:6]
        assert q_dtype == out_dtype and index_dtype == torch.int32
        assert kv_dtype == q_dtype or (kv_dtype == arithmetic.FP8 and name != "fa3")
        assert head_dim == head_dim_of_values
        rotary, has_window, has_soft_cap = variant[6:9]
        assert rotary == 0
        self.attention_modules.append(name)
        return CompiledAttention(self, name, q_dtype, kv_dtype, head_dim, has_window, has_soft_cap)


@contextmanager
def emulated_card(capability: tuple[int, int] = HOPPER) -> Iterator[EmulatedCard]:
    """Lets FlashInfer run on CPU tensors as if they were on a GPU of this compute capability."""
    flashinfer, card = import_flashinfer(), EmulatedCard()
    utils, decode, prefill, norm, rope, page, activation = (
        importlib.import_module(f"{flashinfer.__name__}.{name}")
        for name in ("utils", "decode", "prefill", "norm", "rope", "page", "activation")
    )
    empty = torch.empty

    def empty_without_pinning(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*size, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_DISABLE_JIT", "1")  # what is not stood in for is an error
        patch.setenv("FLASHINFER_USE_CUDA_NORM", "1")
        patch.setattr(torch, "empty", empty_without_pinning)
        patch.setattr(torch.cuda, "Event", Recorder)
        patch.setattr(torch.cuda, "current_stream", lambda device: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(multi_processor_count=132),
        )
        for module in (utils, decode):
            patch.setattr(module, "get_compute_capability", lambda device: capability)
        patch.setattr(utils, "is_sm90a_supported", lambda device: capability[0] == 9)
        patch.setattr(decode, "get_batch_decode_module", card.decode_module)
        for module in (decode, prefill):
            patch.setattr(module, "get_batch_prefill_module", card.prefill_module)
        patch.setattr(norm, "_use_cuda_norm", lambda device: True)
        patch.setattr(norm, "get_norm_module", CompiledFunctions)
        patch.setattr(rope, "get_rope_module", CompiledFunctions)
        patch.setattr(page, "get_page_module", CompiledFunctions)
        patch.setattr(activation, "get_act_and_mul_module", CompiledFunctions)
        yield card


class FunctionsOnEmulatedCard:
    """FlashInfer's own functions, each call on an emulated card."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(import_flashinfer(), name)

        def call(*arguments: Any, **options: Any) -> Any:
            with emulated_card():
                return function(*arguments, **options)

        return call


class CompiledAttention:
    """Stands in for a compiled module of decode or prefill attention."""

    def __init__(
        self,
        card: EmulatedCard,
        name: str,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        head_dim: int,
        has_window: bool,
        has_soft_cap: bool,
    ) -> None:
        self._card = card
        self._has_window, self._has_soft_cap = has_window, has_soft_cap
        self._is_decode = name == "decode"
        self._num_fa2_options = 4 if name == "fa2" else 0
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self._head_dim = head_dim
        self._sizes: tuple[int, ...] = ()
        self._plans: list[int] = []

    def plan(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor,
        pin_memory_int_workspace_buffer: torch.Tensor,
        *step: Any,
    ) -> list[int]:
        for buffer in (float_workspace_buffer, int_workspace_buffer):
            assert buffer.dtype == torch.uint8 and buffer.numel() >= 2**23
        assert pin_memory_int_workspace_buffer.shape == int_workspace_buffer.shape
        if self._is_decode:
            indptr, num_requests, *sizes, _, window, soft_cap, dim, dim_of_values, _, _ = step
            assert (soft_cap > 0) is self._has_soft_cap
        else:
            end = len(step) - self._num_fa2_options
            (_, indptr, kv_lengths, _, num_requests, *sizes, _, dim, dim_of_values, _, window) = (
                step[:end]
            )
            assert len(kv_lengths) == num_requests
            assert kv_lengths.dtype == torch.int32
        assert dim == dim_of_values == self._head_dim
        assert (window >= 0) is self._has_window
        assert indptr.dtype == torch.int32 and len(indptr) == num_requests + 1
        self._sizes = (num_requests, *sizes)
        self._plans = [len(self._plans)]
        return self._plans

    def run(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor,
        plan_info_vec: list[int],
        q: torch.Tensor,
        paged_k_cache: torch.Tensor,
        paged_v_cache: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        o: torch.Tensor,
        maybe_lse: torch.Tensor | None,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        alibi_slopes: torch.Tensor | None,
        logits_soft_cap: float,
        sm_scale: float,
        rope_scale: float,
        rope_theta: float,
    ) -> None:
        assert self._is_decode and len(q) == len(paged_kv_last_page_len)
        assert (maybe_lse, layout) == (None, NHD)
        assert (window_left >= 0, logits_soft_cap > 0) == (self._has_window, self._has_soft_cap)
        self._launch(
            plan_info_vec,
            q,
            (paged_k_cache, paged_v_cache),
            torch.arange(len(q) + 1, dtype=torch.int32),
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            sm_scale,
            False,
            o,
            window_left,
            logits_soft_cap,
        )

    def paged_run(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor,
        plan_info_vec: list[int],
        q: torch.Tensor,
        paged_k_cache: torch.Tensor,
        paged_v_cache: torch.Tensor,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        o: torch.Tensor,
        maybe_lse: torch.Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        maybe_custom_mask: torch.Tensor | None,
        maybe_mask_indptr: torch.Tensor | None,
        maybe_alibi_slopes: torch.Tensor | None,
        maybe_prefix_len_ptr: torch.Tensor | None,
        maybe_token_pos_in_items_ptr: torch.Tensor | None,
        maybe_max_item_len_ptr: torch.Tensor | None,
        logits_soft_cap: float,
        sm_scale: float,
        *of_other_kernels: Any,
    ) -> None:
        assert not self._is_decode and mask_mode in (NOT_CAUSAL, CAUSAL)
        assert (maybe_lse, layout) == (None, NHD)
        assert (window_left >= 0, logits_soft_cap > 0) == (self._has_window, self._has_soft_cap)
        assert maybe_custom_mask is maybe_prefix_len_ptr is None
        self._launch(
            plan_info_vec,
            q,
            (paged_k_cache, paged_v_cache),
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            sm_scale,
            mask_mode == CAUSAL,
            o,
            window_left,
            logits_soft_cap,
        )

    def _launch(
        self,
        plan_info: list[int],
        q: torch.Tensor,
        pages: arithmetic.Pages,
        *rest: Any,
    ) -> None:
        page_size, num_kv_heads = pages[0].shape[1:3]
        num_requests = len(rest[3])
        assert plan_info is self._plans, "another step's plan"
        assert self._sizes == (num_requests, q.shape[1], num_kv_heads, page_size)
        assert q.dtype == self._dtype and pages[0].dtype == self._kv_dtype

        def kernel() -> None:
            arithmetic.attention_of_indices(q, pages, *rest)

        if self._card.graphs is None:
            kernel()
        else:
            self._card.graphs.launch(kernel)


class CompiledFunctions:
    """Stands in for the compiled modules of norm, rope, page and activation, which are asked for
    with the activation's name."""

    def __init__(self, activation: str = "silu") -> None:
        assert activation == "silu"

    def rmsnorm(
        self,
        out: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        enable_pdl: bool,
    ) -> None:
        arithmetic.norm(out, input, weight, eps)

    def fused_add_rmsnorm(
        self,
        input: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        enable_pdl: bool,
    ) -> None:
        arithmetic.add_and_norm(input, residual, weight, eps)

    def silu_and_mul(self, out: torch.Tensor, input: torch.Tensor, enable_pdl: bool) -> None:
        arithmetic.silu_and_mul(out, input)

    def apply_rope_pos_ids_cos_sin_cache(self, *arguments: Any) -> None:
        arithmetic.rotate(*arguments)

    def append_paged_kv_cache(
        self,
        append_key: torch.Tensor,
        append_value: torch.Tensor,
        batch_indices: torch.Tensor,
        positions: torch.Tensor,
        paged_k_cache: torch.Tensor,
        paged_v_cache: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_last_page_len: torch.Tensor,
        layout: int,
    ) -> None:
        assert layout == NHD
        arithmetic.append(
            append_key,
            append_value,
            batch_indices,
            positions,
            (paged_k_cache, paged_v_cache),
            kv_indices,
            kv_indptr,
            kv_last_page_len,
        )
