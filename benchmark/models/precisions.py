"""The formats whose quality is measured, and the demo model's checkpoint for each.

Used by `quality/` and `clients/`, so that both measure the same. A name is that of the weights'
format, with `+kv-` and that of keys and values where these have a format of their own.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmark.models.quantize_model import FORMATS, quantize_model
from benchmark.support.paths import DEMO_MODEL
from sgl_pipeline.args import KV_CACHE_DTYPES
from sgl_pipeline.pp_runner.weights.quantization_config import FP8, W4A8_INT8, W8A8_INT8

SIXTEEN_BITS = "bf16"
DEMO_GROUP_SIZE = 32  # the demo model's matrices have no multiples of 128 inputs


@dataclass(frozen=True, slots=True)
class Precision:
    """A format of weights, and of keys and values.

    Args:
        weights: its name.
        stored: the checkpoint's format, one of FORMATS; None for 16 bits.
        quantization: `--quantization`; None for what the checkpoint says.
        kv_cache_dtype: `--kv-cache-dtype`.
    """

    weights: str
    stored: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str = "auto"

    @property
    def name(self) -> str:
        coded = "" if self.kv_cache_dtype == "auto" else f"+kv-{self.kv_cache_dtype}"
        return self.weights + coded

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags for a server of the checkpoint."""
        asked = ("--quantization", self.quantization) if self.quantization else ()
        coded = self.kv_cache_dtype != "auto"
        return (*asked, *(("--kv-cache-dtype", self.kv_cache_dtype) if coded else ()))

    def demo_checkpoint(self, directory: Path) -> Path:
        """The demo model in the format `stored`, written into `directory` unless it is there."""
        if self.stored is None:
            return DEMO_MODEL
        path = directory / self.stored
        if not path.exists():
            quantize_model(DEMO_MODEL, path, self.stored, DEMO_GROUP_SIZE)
        return path


PRECISIONS = {
    precision.name: precision
    for precision in (
        *(Precision(SIXTEEN_BITS, kv_cache_dtype=name) for name in KV_CACHE_DTYPES),
        *(Precision(name, quantization=name) for name in (W8A8_INT8, FP8)),
        *(Precision(name, stored=name) for name in FORMATS),
        Precision(W4A8_INT8, stored="pack-quantized", quantization=W4A8_INT8),
        Precision(W8A8_INT8, quantization=W8A8_INT8, kv_cache_dtype="int8"),
    )
}
