"""Are the experts of a layer right on the card: their products, and who goes to whom?

Called by `part_checks.py`. Whole stages with experts are checked by `checks.py`, against a model
that uses the same grouped products; here nothing is shared but the router.
"""

import torch

from benchmark.gpu.checked_weights import UpcastWeights
from benchmark.gpu.checks import Check, row_error
from benchmark.gpu.lone_stage import kernels_for
from sgl_pipeline.pp_runner.layer_kernels.torch_router import TorchRouter
from sgl_pipeline.pp_runner.model.layer_tensors import LayerTensors
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec
from sgl_pipeline.pp_runner.model.moe import SeparateExperts, SparseMlp, StackedExperts
from sgl_pipeline.pp_runner.weights.checkpoint import DummyWeights

# A row of bf16: the gated products and the results of each expert are rounded to it.
EXPERTS_BOUND = 1e-2
# One row leaves most experts without any; 300 are more than a tile for none.
_ROWS = (1, 17, 64, 256, 300)


def check_experts(spec: DecoderSpec, name: str, device: torch.device) -> Check:
    """The experts of a layer as a GPU runs them, in two grouped products of bf16, against each
    expert for itself in plain torch in fp32; the error is that of the worst row of random ones."""
    experts = spec.layer_experts(0)
    assert experts is not None and not experts.shared_inner_size
    weights = DummyWeights(torch.bfloat16, device)
    prefix = spec.names.layer.format(layer=0) + "."
    stacked = LayerTensors(prefix, weights, kernels_for(device, torch.bfloat16))
    separate = LayerTensors(
        prefix, UpcastWeights(weights), kernels_for(device, torch.float32, "torch")
    )
    gate = stacked.weight(spec.names.router, (experts.num_experts, spec.hidden_size))
    router, sizes = TorchRouter(experts, gate), (spec.names, spec.hidden_size, experts)
    found, expected = (
        SparseMlp(router, kind.load(tensors, *sizes), None)
        for kind, tensors in ((StackedExperts, stacked), (SeparateExperts, separate))
    )
    generator = torch.Generator().manual_seed(0)
    error = 0.0
    for count in _ROWS:
        rows = torch.randn(count, spec.hidden_size, generator=generator)
        rows = rows.to(device, torch.bfloat16)
        error = max(error, row_error(found(rows), expected(rows.float())))
    shape = f"{experts.experts_per_token} of {experts.num_experts} of {experts.inner_size}"
    return Check(f"experts of {name}, {shape}", error, EXPERTS_BOUND)
