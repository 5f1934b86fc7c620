"""Layers give a row the same bits wherever the stages are cut."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.fake_flashinfer import FakeFlashInferFunctions
from support.paged_attention import ChunkExtent, layout_of
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_pipeline.pp_runner.attention.attention_backend import StageAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.attention.torch_attention import TorchAttention
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.flashinfer.flashinfer_kernels import FlashInferKernels
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.model.held_layers import HeldLayers
from sgl_pipeline.pp_runner.model.model_spec import model_spec
from sgl_pipeline.pp_runner.model.native_stage import NativeStageModel
from sgl_pipeline.pp_runner.weights.checkpoint import DummyWeights

CPU = torch.device("cpu")
PAGE_SIZE, NUM_PAGES, NUM_ROWS = 4, 3, 11
SPEC = model_spec(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 256,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 128,
    }
)


class LoudWeights(DummyWeights):
    """Large enough for the layers to add as much to the stream as there is in it."""

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        weights = super().read(name, shape)
        return weights if name.endswith("norm.weight") else weights * 5


def prefill() -> StepInputs:
    rows = torch.arange(NUM_ROWS)
    return StepInputs(
        token_ids=rows * 17 % 300,
        positions=rows,
        slots=rows,
        layout=layout_of([ChunkExtent(0, NUM_ROWS)], [range(NUM_PAGES)], PAGE_SIZE),
        sample_rows=rows[:0],
        sample_positions=rows[:0],
        sampling=(),
    )


def run_stages(kernels: LayerKernels, layer_counts: Sequence[int]) -> torch.Tensor:
    """What comes out of the last stage; no stage may change what it was given."""
    inputs, hidden, first = prefill(), None, 0
    shapes = SPEC.attention_shapes(PAGE_SIZE, torch.bfloat16, CPU)
    attention = StageAttention(shapes, TorchAttention)
    attention.plan(inputs.layout)
    for count in layer_counts:
        layers = range(first, first + count)
        model = NativeStageModel.build(
            SPEC,
            LoudWeights(torch.bfloat16, CPU),
            device=CPU,
            kernels=kernels,
            layers=layers,
            is_first=first == 0,
            is_last=False,
        )
        pool = KvPool(layers, shapes, NUM_PAGES)
        given = None if hidden is None else hidden.clone()
        output = HeldLayers(model, pool).forward(layers, inputs, hidden, attention)
        assert given is None or torch.equal(given, hidden)
        hidden, first = output, first + count
    assert hidden is not None
    return hidden


@pytest.mark.parametrize("leaf", ["torch", "flashinfer"])
def test_bits_do_not_depend_on_where_stages_are_cut(leaf: str) -> None:
    kernels = TorchKernels() if leaf == "torch" else FlashInferKernels(FakeFlashInferFunctions)
    whole = run_stages(kernels, (4,))
    assert whole.isfinite().all()
    for layer_counts in ((1, 3), (2, 2), (1, 1, 1, 1)):
        assert torch.equal(run_stages(kernels, layer_counts), whole)


class StreamCopies(TorchDispatchMode):
    """Counts copies of a tensor as large as the residual stream."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default and args[0].shape == (NUM_ROWS, SPEC.hidden_size):
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_flashinfer_copies_the_stream_only_where_a_stage_got_it_from_another() -> None:
    kernels = FlashInferKernels(FakeFlashInferFunctions)
    for layer_counts in ((4,), (1, 3), (1, 2, 1)):
        handed_over = len(layer_counts) - 1
        with StreamCopies() as copies:
            run_stages(kernels, layer_counts)
        assert copies.count == 2 * handed_over  # the other one is this test's own
