"""How many kernels a layer launches on a GPU: operators are counted on torch's meta device.

A function of FlashInfer, a rounding and an attention are one kernel each, an operator of torch that
writes numbers is one. (`grouped_mm` and sorts may be more, so experts are not counted.)
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.numberless_stage import META, QueriesAsTheyAre, RoundingWithoutNumbers
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_pipeline.pp_runner.attention.attention_backend import SameAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.flashinfer.flashinfer_kernels import FlashInferKernels
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import Linear, Rotation
from sgl_pipeline.pp_runner.model.decoder import DecoderLayer
from sgl_pipeline.pp_runner.model.model_spec import model_spec
from sgl_pipeline.pp_runner.weights.checkpoint import DummyWeights
from sgl_pipeline.pp_runner.weights.quantization_config import choose_quantization
from sgl_pipeline.pp_runner.weights.quantized_weights import Fp8Weight, Int8Weight, Matrix

SPEC = model_spec(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 128,
    }
)
NUM_ROWS = 16
# Norm, query and key norm, rotation, append, attention, norm of the sum, gate; four products, and
# the sum at the layer's end.
PLAIN = 8 + 4 + 1


class Launches(TorchDispatchMode):
    """Inside, `names` fills with what would be launched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach", "_unsafe_v")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class CountedFunctions:
    """FlashInfer's, which note that they were called."""

    def __init__(self, launches: Launches) -> None:
        self._launches = launches

    def rmsnorm(self, input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        self._launches.names.append("rmsnorm")
        return torch.empty(input.shape, dtype=input.dtype, device=META)

    def fused_add_rmsnorm(self, *arguments: Any) -> None:
        self._launches.names.append("fused_add_rmsnorm")

    def silu_and_mul(self, input: torch.Tensor) -> torch.Tensor:
        self._launches.names.append("silu_and_mul")
        return input.new_empty(len(input), input.shape[1] // 2)

    def apply_rope_with_cos_sin_cache(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._launches.names.append("rope")
        return torch.empty_like(query), torch.empty_like(key)

    def append_paged_kv_cache(self, *arguments: Any) -> None:
        self._launches.names.append("append")


class CountedRounding(RoundingWithoutNumbers):
    def __init__(self, launches: Launches) -> None:
        self._launches = launches

    def to_fp8(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._launches.names.append("to_fp8")
        return super().to_fp8(*arguments)

    def to_int8(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._launches.names.append("to_int8")
        return super().to_int8(*arguments)

    def append_fp8(self, *arguments: Any) -> None:
        self._launches.names.append("append_fp8")


class NumberlessKernels(FlashInferKernels):
    """Takes the numbers of a layer's matrices away once they are quantized."""

    def linear(self, weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
        if isinstance(weight, torch.Tensor):
            return super().linear(weight.to(META), bias)
        assert isinstance(weight, Fp8Weight | Int8Weight)
        values, scales = weight.values.to(META), weight.scales.to(META)
        return super().linear(replace(weight, values=values, scales=scales), bias)


def launches_of_a_layer(quantization: str | None, kv_cache_dtype: str) -> list[str]:
    """Of any layer of a step but the first, which makes the step's tables."""
    spec = SPEC
    if quantization is not None:
        chosen = choose_quantization(quantization, None, SPEC.names.head)
        spec = replace(SPEC, quantization=chosen)
    shapes = spec.attention_shapes(16, torch.bfloat16, META, kv_cache_dtype)
    launches, attention = Launches(), SameAttention(QueriesAsTheyAre())
    kernels = NumberlessKernels(
        lambda: CountedFunctions(launches), lambda: CountedRounding(launches)
    )
    weights = DummyWeights(torch.bfloat16, torch.device("cpu"))
    layer = DecoderLayer.load(spec, 0, weights, kernels)
    pool = KvPool([0], shapes, num_pages=4)
    stream = torch.empty(NUM_ROWS, spec.hidden_size, dtype=torch.bfloat16, device=META)
    angles = torch.empty(NUM_ROWS, spec.head_dim // 2, device=META)
    rotation = Rotation(angles, angles, interleaved=False)
    slots = torch.empty(NUM_ROWS, dtype=torch.int64, device=META)
    for _ in range(2):
        launches.names.clear()
        with launches:
            # The stand-in's copy is the one kernel of the attention.
            layer.forward(stream, rotation, slots, pool, attention, may_overwrite=True)
    return launches.names


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("quantization", "more_a_product"), [(None, 0), ("fp8", 1), ("w8a8_int8", 5)]
)
def test_a_layer_launches_no_more_kernels_than_it_needs(
    quantization: str | None, more_a_product: int, kv_cache_dtype: str
) -> None:
    """In FP8 a product is two: rows are rounded, then multiplied. In int8 its exact sums become
    numbers by four more."""
    names = launches_of_a_layer(quantization, kv_cache_dtype)
    assert len(names) == PLAIN + 4 * more_a_product, names
    assert names.count("append_fp8") == (kv_cache_dtype == "fp8_e4m3")
