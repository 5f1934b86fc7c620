"""Matrices of all experts in one tensor, plain and made up; those of files are held to
transformers in test_mxfp4_models.py."""

import pytest
import torch

from sgl_pipeline.pp_runner.weights.checkpoint import DummyWeights
from sgl_pipeline.pp_runner.weights.quantization_config import read_quantization
from sgl_pipeline.pp_runner.weights.quantized_weights import Mxfp4Weight
from sgl_pipeline.pp_runner.weights.schemes import Int8Scheme
from sgl_pipeline.pp_runner.weights.stacked_matrices import read_plain_stack, read_stacked_matrices

NAME = "model.layers.3.mlp.experts.down_proj"


def test_made_up_experts_have_four_bits_if_the_config_says_so() -> None:
    quantization = read_quantization({"quant_method": "mxfp4"}, "lm_head")
    weights = DummyWeights(torch.bfloat16, torch.device("cpu"))
    packed = list(read_stacked_matrices(weights, quantization, NAME, (3, 40, 64)))
    plain = list(read_stacked_matrices(weights, None, NAME, (3, 40, 64)))
    for weight, matrix in zip(packed, plain, strict=True):
        assert isinstance(weight, Mxfp4Weight) and isinstance(matrix, torch.Tensor)
        assert weight.shape == matrix.shape == (40, 64) and matrix.is_contiguous()
        # Half of the widest gap, 2, of numbers whose largest lies between 4 and 8.
        errors = (weight.dequantized() - matrix.float()).abs()
        assert float(errors.max()) <= 0.5 * float(matrix.abs().max())


def test_only_experts_are_in_four_bits() -> None:
    quantization = read_quantization({"quant_method": "mxfp4"}, "lm_head")
    assert quantization is not None
    assert quantization.scheme_of(NAME) is not None
    for name in ("lm_head", "model.layers.3.mlp.router", "model.layers.3.self_attn.q_proj"):
        assert quantization.scheme_of(name) is None


def test_experts_are_copied_out_of_their_stack_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = DummyWeights(torch.bfloat16, torch.device("cpu"))
    for matrix in read_plain_stack(weights, None, NAME, (3, 40, 64)):
        assert isinstance(matrix, torch.Tensor)
        assert matrix.untyped_storage().nbytes() == matrix.nbytes  # the stack may go
    clones = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda own: clones.append(own) or clone(own))
    assert len(list(read_plain_stack(weights, Int8Scheme(), NAME, (3, 40, 64)))) == 3
    assert not clones
