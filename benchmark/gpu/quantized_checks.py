"""Are products with weights of 8 bits right on the card, with each scheme that it has a kernel for?

Called by `part_checks.py`. Attention to e4m3 pages and whole stages in FP8 are checked by
`checks.py`, as those of 16 bits are.
"""

import torch

from benchmark.gpu.checks import Check, row_error
from sgl_pipeline.pp_runner.layer_kernels.gpu_quantized import GpuProducts
from sgl_pipeline.pp_runner.layer_kernels.row_rounding import open_row_rounding
from sgl_pipeline.pp_runner.layer_kernels.torch_quantized import TorchQuantizedLinear
from sgl_pipeline.pp_runner.weights.schemes import Fp8Scheme, Int8Scheme, Scheme

SCHEMES: dict[str, Scheme] = {
    "int8": Int8Scheme(),
    "fp8": Fp8Scheme((1, None)),
    "fp8 in blocks": Fp8Scheme((128, 128)),
}
# Results are rounded to bf16, within 2^-9 of each; Hopper adds FP8 products up with some 14 bits.
PRODUCT_BOUND = 1e-2
_REHEARSED_CAPABILITY = (8, 9)
# Some that graphs have and one more: where cuBLAS refuses a number of rows, it is a small one.
_ROWS = (1, 17, 64, 256, 300)
_TRIED_SIZE = 128


def capability_of(device: torch.device) -> tuple[int, int]:
    """The card's compute capability; where a CPU stands in for one, that of a card without
    block-wise products, which torch has on Hopper alone."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return _REHEARSED_CAPABILITY


def why_not_rehearsed(name: str) -> str:
    """The reason why this torch cannot rehearse products in the scheme `name`; empty where it can.
    FP8 on CPUs is newer than FP8 on GPUs: torch 2.11 lacks it."""
    try:
        check_product(name, _TRIED_SIZE, _TRIED_SIZE, torch.device("cpu"))
    except NotImplementedError as error:
        return f"needs a GPU, or a torch with that product for CPUs: {str(error).partition('.')[0]}"
    return ""


def check_product(name: str, outputs: int, inputs: int, device: torch.device) -> Check:
    """The product of random rows with a matrix in the scheme `name`, against plain torch in fp32;
    the error is that of the worst row."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    weight, bias = SCHEMES[name].quantize(random(outputs, inputs)), random(outputs)
    products = GpuProducts(lambda: open_row_rounding(device))
    linear, expected = products.linear(weight, bias), TorchQuantizedLinear(weight, bias)
    rows = [random(count, inputs) for count in _ROWS]
    error = max(row_error(linear(x), expected(x)) for x in rows)
    return Check(f"product in {name}, {outputs} x {inputs}", error, PRODUCT_BOUND)
