"""The scales by which a checkpoint wants a layer's keys and values to become FP8.

A layer whose keys are to be divided by k_scale before they are rounded, and multiplied by it when
they are read, is the same as one whose projection gives keys that are smaller by that factor, and
queries that are larger; likewise values and what multiplies them. So the scales go into the weights
when a layer is loaded, and pages, attention and kernels have none. They are rounded up to powers of
two: then the weights stay exact in every format, keys and values have the same bits before they are
rounded, no number exceeds the largest code that did not before, and e4m3, which has an exponent,
rounds as finely.

"""

import math
from dataclasses import dataclass

import torch

from sgl_pipeline.errors import CheckpointError
from sgl_pipeline.pp_runner.weights.checkpoint import WeightSource
from sgl_pipeline.pp_runner.weights.schemes import Quantization

_LARGEST_EXPONENT = 40  # far from where bf16 and fp32 end


@dataclass(frozen=True, slots=True)
class KvScales:
    """Powers of two that keys and values are divided by."""

    key: float = 1.0
    value: float = 1.0

    def of_projections(self, widths: tuple[int, int, int]) -> torch.Tensor | None:
        """Factors of the outputs of queries, keys and values, which have these `widths`; None for
        none. Scores stay what they are."""
        if self == KvScales():
            return None
        factors = (self.key, 1.0 / self.key, 1.0 / self.value)
        return torch.tensor(factors).repeat_interleave(torch.tensor(widths))


def read_kv_scales(
    source: WeightSource, quantization: Quantization | None, attention: str
) -> KvScales:
    """The scales of the module `attention`, such as `model.layers.0.self_attn`; 1 if the checkpoint
    has no scales, or there is no checkpoint. Only compressed-tensors declares them in its config.

    Raises CheckpointError for missing or invalid scales.
    """
    if quantization is None or source.is_made_up:
        return KvScales()
    names = [_name(source, attention, kind) for kind in ("k", "v")]
    if not quantization.has_kv_scales and not any(source.has(name) for name in names):
        return KvScales()
    return KvScales(*(_read(source, name) for name in names))


def _name(source: WeightSource, attention: str, kind: str) -> str:
    """The name of the scale of keys (`k`) or values (`v`): with the module, or with its projection,
    as other tools write it."""
    own, of_projection = f"{attention}.{kind}_scale", f"{attention}.{kind}_proj.{kind}_scale"
    return of_projection if source.has(of_projection) else own


def _read(source: WeightSource, name: str) -> float:
    scale = float(source.read_as(name, (1,), torch.float32))
    if not (0.0 < scale < math.inf):
        raise CheckpointError(f"tensor {name} is {scale}; a scale must be positive and finite")
    exponent = math.ceil(math.log2(scale))
    if abs(exponent) > _LARGEST_EXPONENT:
        raise CheckpointError(
            f"tensor {name} is {scale}; a scale must be within 2^-{_LARGEST_EXPONENT} and "
            f"2^{_LARGEST_EXPONENT}"
        )
    return 2.0**exponent
