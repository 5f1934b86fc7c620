"""Stage times from published kernel measurements (data/README.md has their origin).

Two kinds of table. `OperatorCosts`: every operator of a layer, attention for mixed steps, lm_head
and sampler, all measured on one card (LLMServingSim, RTX PRO 6000). `GemmCosts`: the products of
a layer and attention of prefill and decode apart (aiconfigurator, A100, L40S, H100, H200), where
the rest is assumed; each assumption is a named number below.
"""

import csv
import gzip
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.simulator.interpolation import Grid
from sgl_pipeline.simulator.models import MODELS, ModelShape, model_shape
from sgl_pipeline.simulator.pipeline_costs import AttentionSeconds
from sgl_pipeline.simulator.step_shape import StepShape

DATA = Path(__file__).parent / "data" / "kernels"

# Elementwise operators cost 4.3 to 5.7 % of the products (Vidur's A100 tables, 34B and 70B).
ELEMENTWISE_SHARE = 0.05
# Sampling after lm_head, assumed from Vidur's engine measurements on A100 with large vocabularies
# (0.65 + 0.009 b to 0.99 + 0.012 b ms, of which about half is the product).
SAMPLING_STEP_S = 0.4e-3
SAMPLING_ROW_S = 0.01e-3
# Decodes of unequal length take longer than their mean suggests (LLMServingSim's fit at TP 1).
LENGTH_SKEW = 0.057

Row = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A card. `memory_bytes` is what it has, `slow_memory` multiplies the times that reading
    memory bounds, where the card is slower than the one that was measured."""

    name: str
    tables: str
    memory_bytes: float
    slow_memory: float = 1.0


DEVICES = {
    device.name: device
    for device in (
        Device(name="a100-80g", tables="a100_sxm", memory_bytes=80e9),
        # 1,555 GB/s against the 2,039 GB/s of the card in the tables.
        Device(name="a100-40g-pcie", tables="a100_sxm", memory_bytes=40e9, slow_memory=1.3),
        Device(name="l40s", tables="l40s", memory_bytes=48e9),
        Device(name="h100", tables="h100_sxm", memory_bytes=80e9),
        Device(name="h200", tables="h200_sxm", memory_bytes=141e9),
        Device(name="rtxpro6000", tables="rtxpro6000", memory_bytes=96e9),
    )
}

# The operator tables of the RTX PRO 6000, by model and tensor-parallel size.
_OPERATOR_TABLES = {
    ("Qwen3-32B", 1): "rtxpro6000_qwen3-32b_tp1",
    ("Qwen3-32B", 2): "rtxpro6000_qwen3-32b_tp2",
    ("Llama-3.1-8B", 1): "rtxpro6000_llama-3.1-8b_tp1",
}
# Models that were not measured, and the one with their hidden and intermediate sizes that was.
_MEASURED_AS = {"Llama-2-13B": "Qwen2.5-14B"}
# Cards with times of FP8: products (SGLang's fp8_scaled_mm), and decodes of such keys and values.
_FP8_TABLES = ("h100_sxm", "h200_sxm", "l40s")
# PCIe between two RTX PRO 6000 as the tables' authors describe their machine (LLMServingSim,
# bench/examples/configs/Qwen3-32B.json: link_bw 16 GB/s, link_latency 20,000 ns).
_PCIE_LATENCY_S = 20e-6
_PCIE_BYTES_PER_S = 16e9


def part_seconds(device: Device, model: ModelShape, tensor_parallel: int = 1) -> AttentionSeconds:
    """The times of `model` on `device`. Raises ConfigurationError where nothing was measured."""
    in_fp8 = [
        what
        for what, is_used in (
            ("products", model.quantization == "fp8"),
            ("keys and values", model.kv_cache_dtype == "fp8_e4m3"),
        )
        if is_used
    ]
    if in_fp8 and (device.tables not in _FP8_TABLES or tensor_parallel > 1):
        known = [own.name for own in DEVICES.values() if own.tables in _FP8_TABLES]
        raise ConfigurationError(
            f"there are no times of FP8 {' or '.join(in_fp8)} on {device.name} at tensor "
            f"parallelism {tensor_parallel}, only on {', '.join(known)} at 1"
        )
    measured = (model.name, tensor_parallel) in _OPERATOR_TABLES
    if device.tables == "rtxpro6000" and measured:
        return OperatorCosts.load(model, tensor_parallel)
    if device.tables != "rtxpro6000" and tensor_parallel == 1:
        return GemmCosts.load(device, model)
    raise ConfigurationError(
        f"there are no kernel times of {model.name} on {device.name} at tensor parallelism "
        f"{tensor_parallel}; models are {', '.join(MODELS)}, devices {', '.join(DEVICES)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """The cost that tensor parallelism adds to a layer: two ring all-reduces over two cards, each
    of which passes the link twice and moves the whole tensor once."""

    latency_s: float
    bytes_per_s: float
    bytes_per_token: int

    def layer_s(self, num_tokens: int) -> float:
        return 2 * (2 * self.latency_s + num_tokens * self.bytes_per_token / self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class OperatorCosts:
    """All operators measured; attention for prefill beside decodes as vLLM runs it."""

    layer_tokens_us: Grid
    embedding_us: Grid
    final_norm_us: Grid
    head_us: Grid
    prefill_us: Grid
    decode_us: Grid
    mixed_us: Grid
    all_reduce: AllReduce | None

    @classmethod
    @lru_cache
    def load(cls, model: ModelShape, tensor_parallel: int) -> "OperatorCosts":
        name = _OPERATOR_TABLES[model.name, tensor_parallel]
        dense = list(_rows(f"{name}_dense_us"))
        attention = list(_rows(f"{name}_attention_us"))
        per_layer = {
            row["layer"]: 2.0 if row["layer"] == "layernorm" else 1.0
            for row in dense
            if row["layer"] not in ("embedding", "final_layernorm")
        }
        return cls(
            layer_tokens_us=_summed(dense, "tokens", per_layer),
            embedding_us=_summed(dense, "tokens", {"embedding": 1.0}),
            final_norm_us=_summed(dense, "tokens", {"final_layernorm": 1.0}),
            head_us=_summed(
                list(_rows(f"{name}_per_sequence_us")),
                "sequences",
                {"lm_head": 1.0, "sampler": 1.0},
            ),
            prefill_us=_attention(attention, ("prefill_chunk", "kv_prefill")),
            decode_us=_attention(attention, ("n_decode", "kv_decode")),
            mixed_us=_attention(
                attention, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
            ),
            all_reduce=AllReduce(
                latency_s=_PCIE_LATENCY_S,
                bytes_per_s=_PCIE_BYTES_PER_S,
                bytes_per_token=model.hidden_bytes_per_token,
            )
            if tensor_parallel == 2
            else None,
        )

    def layer_s(self, shape: StepShape) -> float:
        compute_us = self.layer_tokens_us.at(shape.num_tokens) + self._attention_us(shape)
        if self.all_reduce is None:
            return compute_us * 1e-6
        return compute_us * 1e-6 + self.all_reduce.layer_s(shape.num_tokens)

    def embedding_s(self, shape: StepShape) -> float:
        return self.embedding_us.at(shape.num_tokens) * 1e-6

    def tail_s(self, shape: StepShape) -> float:
        if not shape.num_samples:
            return 0.0
        norm_us = self.final_norm_us.at(shape.num_tokens)
        return (norm_us + self.head_us.at(shape.num_samples)) * 1e-6

    def attention_s(self, shape: StepShape) -> float:
        """The part of `layer_s` that is attention."""
        return self._attention_us(shape) * 1e-6

    def _attention_us(self, shape: StepShape) -> float:
        """The longest chunk beside the decodes, as measured; further chunks by themselves."""
        contexts = shape.decode_contexts
        if not shape.num_tokens:
            return 0.0
        if not shape.prefills:
            return self.decode_us.at(len(contexts), _skewed_mean(contexts))
        longest = max(shape.prefills)
        others = sum(self.prefill_us.at(*chunk) for chunk in shape.prefills)
        others -= self.prefill_us.at(*longest)
        if not contexts:
            return others + self.prefill_us.at(*longest)
        return others + self.mixed_us.at(*longest, len(contexts), _skewed_mean(contexts))


@dataclass(frozen=True, slots=True)
class GemmCosts:
    """Products and attention measured apart; elementwise operators and sampling assumed.

    A decode with n times the measured KV heads takes what n decodes take (`decode_heads`).
    Elementwise operators are a share of `plain_linear_ms`, the products of 16 bits: those in FP8
    leave them as slow as they are. Rounding the rows for FP8 products is in no table. Prompts take
    as long with keys and values in FP8: their arithmetic has 16 bits.
    """

    linear_ms: Grid
    plain_linear_ms: Grid
    head_ms: Grid
    prefill_ms: Grid
    decode_ms: Grid
    slow_memory: float
    decode_heads: float = 1.0

    @classmethod
    @lru_cache
    def load(cls, device: Device, model: ModelShape) -> "GemmCosts":
        name = _MEASURED_AS.get(model.name, model.name)
        measured = model_shape(name, model.quantization, model.kv_cache_dtype)

        def of_model(table: str, points: str, value: str, scale: float) -> Grid:
            rows = [row for row in _rows(f"{device.tables}_{table}") if row["model"] == name]
            if not rows:
                raise ConfigurationError(f"there are no kernel times of {model.name}")
            return Grid.of(((float(row[points]),), scale * float(row[value])) for row in rows)

        def heads(row: Row, query: int, key: int) -> bool:
            return (row["q_heads"], row["kv_heads"]) == (str(query), str(key))

        products = "layer_gemm_fp8_ms" if model.quantization == "fp8" else "layer_gemm_ms"
        context = _rows(f"{device.tables}_attn_context_ms")
        in_fp8 = model.kv_cache_dtype == "fp8_e4m3"
        decodes = "attn_generation_fp8_ms" if in_fp8 else "attn_generation_ms"
        generation = _rows(f"{device.tables}_{decodes}")
        # Products of other sizes take what their weights are larger.
        layers = model.layer_weight_bytes / measured.layer_weight_bytes
        ends = model.end_weight_bytes / measured.end_weight_bytes
        return cls(
            linear_ms=of_model(products, "num_tokens", "linear_ms", layers),
            plain_linear_ms=of_model("layer_gemm_ms", "num_tokens", "linear_ms", layers),
            head_ms=of_model("lm_head_ms", "num_seqs", "lm_head_ms", ends),
            prefill_ms=Grid.of(
                ((float(row["seq_tokens"]),), float(row["latency_ms"]))
                for row in context
                if heads(row, measured.num_query_heads, measured.num_kv_heads)
            ),
            # Reading K and V bounds it: query heads hardly matter, and 40/8 was not measured.
            decode_ms=Grid.of(
                ((float(row["batch_size"]), float(row["kv_tokens_each"])), float(row["latency_ms"]))
                for row in generation
                if heads(row, 32, measured.num_kv_heads)
                and int(row["batch_size"]) <= 128
                and int(row["kv_tokens_each"]) <= 4096
            ),
            slow_memory=device.slow_memory,
            decode_heads=model.num_kv_heads / measured.num_kv_heads,
        )

    def layer_s(self, shape: StepShape) -> float:
        linear_ms, plain_ms = (
            self._bounded_by_memory(table, shape.num_tokens)
            for table in (self.linear_ms, self.plain_linear_ms)
        )
        return (linear_ms + ELEMENTWISE_SHARE * plain_ms + self._attention_ms(shape)) * 1e-3

    def attention_s(self, shape: StepShape) -> float:
        """The part of `layer_s` that is attention."""
        return self._attention_ms(shape) * 1e-3

    def _attention_ms(self, shape: StepShape) -> float:
        attention_ms = sum(self._prefill_ms(*chunk) for chunk in shape.prefills)
        contexts = shape.decode_contexts
        if contexts:
            mean = sum(contexts) / len(contexts)
            rows = len(contexts) * self.decode_heads
            attention_ms += self.slow_memory * self.decode_ms.at(rows, mean)
        return attention_ms

    def embedding_s(self, shape: StepShape) -> float:
        """A gather of rows: below a hundredth of a layer in every table that has it."""
        return 0.0

    def tail_s(self, shape: StepShape) -> float:
        if not shape.num_samples:
            return 0.0
        head_ms = self._bounded_by_memory(self.head_ms, shape.num_samples)
        return head_ms * 1e-3 + SAMPLING_STEP_S + shape.num_samples * SAMPLING_ROW_S

    def _bounded_by_memory(self, table: Grid, rows: int) -> float:
        """Reading the weights once, which one row costs, is the least that a product takes."""
        return max(table.at(rows), self.slow_memory * table.at(1))

    def _prefill_ms(self, chunk: int, before: int) -> float:
        """A chunk after `before` tokens does the work of the longer prompt less the shorter."""
        alone = self.prefill_ms.at(chunk)
        if not before:
            return alone
        return max(alone, self.prefill_ms.at(chunk + before) - self.prefill_ms.at(before))


def _skewed_mean(contexts: tuple[int, ...]) -> float:
    mean = sum(contexts) / len(contexts)
    return mean + LENGTH_SKEW * (max(contexts) - mean)


def _rows(name: str) -> Iterator[Row]:
    with gzip.open(DATA / f"{name}.csv.gz", "rb") as file:
        yield from csv.DictReader(io.TextIOWrapper(file, "utf-8"))


def _summed(rows: list[Row], points: str, weights: dict[str, float]) -> Grid:
    """The weighted sum of the operators of a table, over one axis."""
    totals: dict[float, float] = {}
    for row in rows:
        if row["layer"] in weights:
            point = float(row[points])
            cost = weights[row["layer"]] * float(row["time_us"])
            totals[point] = totals.get(point, 0.0) + cost
    return Grid.of(((point,), total) for point, total in totals.items())


def _attention(rows: list[Row], axes: tuple[str, ...]) -> Grid:
    """The rows that have what `axes` name and nothing else."""
    has: Callable[[Row], bool] = lambda row: (  # noqa: E731
        (int(row["prefill_chunk"]) > 0) == ("prefill_chunk" in axes)
        and (int(row["n_decode"]) > 0) == ("n_decode" in axes)
    )
    return Grid.of(
        (tuple(float(row[axis]) for axis in axes), float(row["time_us"]))
        for row in rows
        if has(row)
    )
