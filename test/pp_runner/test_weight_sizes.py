"""The bytes of weights that are counted before a start are those that a stage then loads."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.quantized_models import quantized_model
from support.tiny_models import HYBRID_MODELS, tiny_model

from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, read_model_spec
from sgl_pipeline.pp_runner.model.native_stage import NativeStageModel
from sgl_pipeline.pp_runner.weight_sizes import WeightSizes

CPU = torch.device("cpu")
# Layers, and whether they come with embedding and head.
STAGES = [
    ((0, 1, 2, 3, 4, 5), True, True),
    ((0, 1, 2), True, False),
    ((3, 4), False, False),
    ((5,), False, True),
]


def loaded_bytes(
    spec: DecoderSpec,
    path: Path,
    dtype: torch.dtype,
    layers: tuple[int, ...],
    is_first: bool,
    is_last: bool,
) -> int:
    return NativeStageModel.load(
        spec,
        path,
        layers=layers,
        is_first=is_first,
        is_last=is_last,
        dtype=dtype,
        device=CPU,
        kernels=TorchKernels(),
    ).weight_bytes


@pytest.mark.parametrize("name", [*HYBRID_MODELS, "qwen3-tied-sharded", "qwen3-moe"])
def test_each_part_of_a_split_and_the_whole_model(name: str) -> None:
    """A multimodal checkpoint's tower, and its experts in stacks, among them."""
    path = tiny_model(name)
    spec = read_model_spec(path)
    sizes = WeightSizes(spec, torch.float32)
    for layers, is_first, is_last in STAGES:
        counted = sizes.of_stage(layers, is_first=is_first, is_last=is_last)
        assert counted == loaded_bytes(spec, path, torch.float32, layers, is_first, is_last)


@pytest.mark.parametrize("quantization", ["w8a8_int8", "fp8"])
@pytest.mark.parametrize("name", ["qwen3.5-tied-biases", "qwen3-next", "qwen3.5-moe-multimodal"])
def test_matrices_that_are_rounded_when_they_are_loaded(name: str, quantization: str) -> None:
    path = tiny_model(name)
    spec = read_model_spec(path, quantization)
    sizes = WeightSizes(spec, torch.float32)
    plain = WeightSizes(read_model_spec(path), torch.float32)
    for layers, is_first, is_last in STAGES:
        counted = sizes.of_stage(layers, is_first=is_first, is_last=is_last)
        assert counted == loaded_bytes(spec, path, torch.float32, layers, is_first, is_last)
        assert counted < plain.of_stage(layers, is_first=is_first, is_last=is_last)


def test_a_checkpoint_in_four_bits_takes_what_its_tensors_do() -> None:
    """Scales are held in fp32, zero points in a byte each: the file has fewer bytes of these."""
    model = quantized_model("pack-quantized", "qwen3.5")
    spec = read_model_spec(model.path)
    sizes = WeightSizes(spec, torch.bfloat16)
    for layers, is_first, is_last in STAGES:
        loaded = loaded_bytes(spec, model.path, torch.bfloat16, layers, is_first, is_last)
        counted = sizes.of_stage(layers, is_first=is_first, is_last=is_last)
        assert counted == pytest.approx(loaded, rel=0.05)


def test_nothing_is_allocated() -> None:
    """As many bytes as no machine has."""
    spec = read_model_spec(tiny_model("qwen3.5"))
    huge = replace(spec, vocab_size=2**38)
    assert WeightSizes(huge, torch.float32).of_stage((), is_first=True, is_last=False) == 2**46
