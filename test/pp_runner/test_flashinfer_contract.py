"""Our calls of FlashInfer, our protocols and our stand-ins, against the signatures of the library.

They are recorded (`test_recorded_signatures.py`), so it need not be installed; and nothing of it
runs here: `real_flashinfer.py` runs its Python.
"""

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_flashinfer import (
    FakeDecodeWrapper,
    FakeFlashInferFunctions,
    FakeGraphDecodeWrapper,
    FakePrefillWrapper,
    Recorder,
)
from support.paged_attention import ChunkExtent, attention_shape, random_problem
from support.recorded_signatures import recorded, signature_of

from benchmark.gpu.kernel_wheels import CUDA_REQUIREMENTS, pins
from sgl_pipeline.pp_runner.flashinfer.flashinfer_attention import (
    FlashInferAttention,
    open_flashinfer,
)
from sgl_pipeline.pp_runner.flashinfer.flashinfer_kernels import (
    FlashInferFunctions,
    FlashInferKernels,
)
from sgl_pipeline.pp_runner.flashinfer.flashinfer_parts import FlashInferParts, Wrapper
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import HeadNorms, RmsNorm, Rotation

DECODE = "BatchDecodeWithPagedKVCacheWrapper"
PREFILL = "BatchPrefillWithPagedKVCacheWrapper"
FUNCTIONS = [name for name in vars(FlashInferFunctions) if not name.startswith("_")]


LIBRARY = recorded()[f"flashinfer {pins(CUDA_REQUIREMENTS)['flashinfer-python']}"]


def real(path: str) -> inspect.Signature:
    """That of a function, or of a class's method without `self`."""
    (text,) = LIBRARY[path]
    return signature_of(text)


def assert_same_parameters(ours: Callable[..., Any], theirs: inspect.Signature) -> None:
    """Positional ones have the library's names in its order, keywords are among its own, and it has
    a default for all that we leave out. A default of ours is its default."""
    mine = [p for name, p in inspect.signature(ours).parameters.items() if name != "self"]
    positional = [p.name for p in mine if p.kind is not p.KEYWORD_ONLY]
    others = dict(theirs.parameters)
    assert positional == list(others)[: len(positional)]
    for parameter in mine:
        other = others.pop(parameter.name)
        assert other.kind is not other.POSITIONAL_ONLY
        if parameter.kind is not parameter.KEYWORD_ONLY:
            assert other.kind is other.POSITIONAL_OR_KEYWORD
        if parameter.default is not parameter.empty:
            assert parameter.default == other.default
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for other in others.values():
        assert other.kind in unnamed or other.default is not other.empty


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("ours", [FlashInferFunctions, FakeFlashInferFunctions])
def test_functions_have_the_parameters_of_the_library(ours: type, name: str) -> None:
    assert_same_parameters(getattr(ours, name), real(name))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        # What decode's plan takes by `**kwargs` it hands to `_plan_impl`.
        (FakeDecodeWrapper.plan, f"{DECODE}._plan_impl"),
        (FakePrefillWrapper.plan, f"{PREFILL}.plan"),
        (FakeDecodeWrapper.run, f"{DECODE}.run"),
        (FakeGraphDecodeWrapper.run, f"{DECODE}.run"),
        (FakePrefillWrapper.run, f"{PREFILL}.run"),
        (Wrapper.run, f"{DECODE}.run"),
        (Wrapper.run, f"{PREFILL}.run"),
    ],
    ids=lambda of: of if isinstance(of, str) else of.__qualname__,
)
def test_wrappers_have_the_parameters_of_the_library(ours: Callable[..., Any], theirs: str) -> None:
    assert_same_parameters(ours, real(theirs))


class BoundCalls:
    """Passes calls on to `ours` when they bind to the library's signatures; `names` are theirs.

    Args:
        signatures: of each method that may be called, one or more.
    """

    def __init__(self, ours: Any, signatures: dict[str, list[inspect.Signature]]) -> None:
        self._ours = ours
        self._signatures = signatures
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._ours, name)

        def call(*arguments: Any, **options: Any) -> Any:
            for signature in self._signatures[name]:
                signature.bind(*arguments, **options)
            self.names.add(name)
            return method(*arguments, **options)

        return call


def bound_wrapper(ours: Any, theirs: str) -> BoundCalls:
    plans = ["plan", "_plan_impl"] if theirs == DECODE else ["plan"]
    signatures = {
        "plan": [real(f"{theirs}.{name}") for name in plans],
        "run": [real(f"{theirs}.run")],
    }
    return BoundCalls(ours, signatures)


def test_every_call_of_the_wrappers_binds() -> None:
    recorder, indices = Recorder(), torch.zeros(9, dtype=torch.int32)
    prefill = bound_wrapper(FakePrefillWrapper(recorder), PREFILL)
    decode = bound_wrapper(FakeDecodeWrapper(recorder), DECODE)
    graph_decode = bound_wrapper(
        FakeGraphDecodeWrapper(recorder, num_rows=2, indices_buffer=indices), DECODE
    )
    parts = FlashInferParts(prefill, decode, lambda: recorder, lambda rows, indices: graph_decode)
    shape = attention_shape(4, 2, 64, 16, torch.bfloat16)
    attention = FlashInferAttention(shape, open_parts=lambda shape, prefill_kernels: parts)
    problem = random_problem([ChunkExtent(20, 1), ChunkExtent(0, 5)], shape)
    attention.plan(problem.layout)
    attention.attend(problem.query, problem.key_pages, problem.value_pages)
    problem = random_problem([ChunkExtent(20, 1), ChunkExtent(3, 1)], shape)
    graph = attention.decode_for_graph(2, 0, indices)
    graph.plan(problem.layout)
    graph.attend(problem.query, problem.key_pages, problem.value_pages)
    for wrapper in (prefill, decode, graph_decode):
        assert wrapper.names == {"plan", "run"}


def test_every_call_of_the_functions_binds() -> None:
    library = BoundCalls(FakeFlashInferFunctions(), {name: [real(name)] for name in FUNCTIONS})
    kernels = FlashInferKernels(lambda: library)
    rows = torch.randn(3, 256)
    norm = RmsNorm(torch.ones(256), 1e-6)
    angles = torch.randn(3, 32)
    rotation = Rotation(angles.cos(), angles.sin(), interleaved=False)
    head_norms = HeadNorms(torch.ones(64), torch.ones(64), 1e-6)
    pages = (torch.zeros(2, 4, 1, 64), torch.zeros(2, 4, 1, 64))
    kernels.norm(rows, norm)
    kernels.add_norm(rows, rows.clone(), norm)
    kernels.gate(rows)
    kernels.place_heads(rows, head_norms, rotation, torch.arange(3), pages)
    assert library.names == set(FUNCTIONS)


def test_every_call_of_the_constructors_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    monkeypatch.setenv("FLASHINFER_USE_CUDA_NORM", "1")
    opened = list[str]()
    wrappers = {
        name: constructor(name, real(f"{name}.__init__"), opened) for name in (DECODE, PREFILL)
    }
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**wrappers))
    for prefill_kernels in ("auto", "fa2", "fa3"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(multi_processor_count=78),
        )
        shape = attention_shape(4, 2, 64, 16, torch.bfloat16)
        parts = open_flashinfer(shape, prefill_kernels)
        parts.open_graph_decode(2, torch.zeros(9, dtype=torch.int32))
    assert opened == [PREFILL, *(3 * [PREFILL, DECODE, DECODE])], "auto opens both"


def constructor(
    name: str, signature: inspect.Signature, opened: list[str]
) -> Callable[..., object]:
    def construct(*arguments: Any, **options: Any) -> object:
        signature.bind(*arguments, **options)
        opened.append(name)
        return object()

    return construct
