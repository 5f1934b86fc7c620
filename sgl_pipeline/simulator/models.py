"""The shapes of the models that can be simulated, and how much KV fits beside their weights."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from sgl_pipeline.errors import ConfigurationError

BYTES_PER_NUMBER = 2  # weights, activations and KV of 16 bits

# Of the layers' matrices; embedding and lm_head keep 16 bits, as with the server's flag.
Quantization = Literal["none", "fp8"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

# Of keys and values, as with the server's flag; `auto` has 16 bits.
KvCacheDtype = Literal["auto", "fp8_e4m3"]
KV_CACHE_DTYPES: tuple[KvCacheDtype, ...] = get_args(KvCacheDtype)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The fields of the models' config.json, with its layers' matrices in `quantization` and its
    keys and values in `kv_cache_dtype`."""

    name: str
    num_layers: int
    hidden_size: int
    num_query_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    head_dim: int = 128
    quantization: Quantization = "none"
    kv_cache_dtype: KvCacheDtype = "auto"

    @property
    def layer_weight_bytes(self) -> int:
        """Without the scales of FP8, a thousandth of it."""
        heads = 2 * self.num_query_heads + 2 * self.num_kv_heads
        numbers = self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)
        return numbers * (1 if self.quantization == "fp8" else BYTES_PER_NUMBER)

    @property
    def end_weight_bytes(self) -> int:
        """Bytes of the embedding, and as many of lm_head."""
        return self.vocab_size * self.hidden_size * BYTES_PER_NUMBER

    @property
    def kv_bytes_per_layer_token(self) -> int:
        numbers = 2 * self.num_kv_heads * self.head_dim
        return numbers * (1 if self.kv_cache_dtype == "fp8_e4m3" else BYTES_PER_NUMBER)

    @property
    def hidden_bytes_per_token(self) -> int:
        return self.hidden_size * BYTES_PER_NUMBER

    def weight_bytes(self, num_layers: int, num_ends: int) -> int:
        """Bytes of `num_layers` layers and of `num_ends` of embedding and lm_head."""
        return num_layers * self.layer_weight_bytes + num_ends * self.end_weight_bytes

    def kv_pool_tokens(self, layer_counts: tuple[int, ...], usable_bytes: float) -> int:
        """Tokens whose KV fits on every stage, given the bytes each has for weights and KV.

        Raises ConfigurationError when a stage cannot even hold its weights.
        """
        tokens = []
        for stage, count in enumerate(layer_counts):
            num_ends = (stage == 0) + (stage == len(layer_counts) - 1)
            weights = self.weight_bytes(count, num_ends)
            if usable_bytes <= weights:
                raise ConfigurationError(
                    f"stage {stage} needs {weights / 1e9:.1f} GB for {count} layers of "
                    f"{self.name}, but has {usable_bytes / 1e9:.1f} GB; use more stages"
                )
            tokens.append(int((usable_bytes - weights) / (count * self.kv_bytes_per_layer_token)))
        return min(tokens)


# Layers, hidden size, query heads, KV heads, intermediate size, vocabulary.
_SIZES = {
    "Qwen2.5-14B": (48, 5120, 40, 8, 13824, 152064),
    "Qwen2.5-32B": (64, 5120, 40, 8, 27648, 152064),
    "Qwen3-32B": (64, 5120, 64, 8, 25600, 151936),
    "Llama-3.1-70B": (80, 8192, 64, 8, 28672, 128256),
    "Llama-3.1-8B": (32, 4096, 32, 8, 14336, 128256),
    "Llama-2-13B": (40, 5120, 40, 40, 13824, 32000),
}
MODELS = {name: ModelShape(name, *sizes) for name, sizes in _SIZES.items()}


def model_shape(
    name: str, quantization: Quantization, kv_cache_dtype: KvCacheDtype = "auto"
) -> ModelShape:
    """The shape of a model of MODELS, with layers, keys and values quantized so."""
    return replace(MODELS[name], quantization=quantization, kv_cache_dtype=kv_cache_dtype)
