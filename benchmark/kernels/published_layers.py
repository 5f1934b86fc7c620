"""Layers of published shapes with random weights, beside transformers' and the core's limits.

    python -m benchmark.kernels.published_layers
    python -m benchmark.kernels.published_layers --without-transformers --rounds 15

Two layers of gpt-oss-20b, one with a window, with experts in MXFP4 as published; transformers'
have them in bf16, which is what it computes with on a CPU, and take 3.3 GB. One thread, CPU time.
The limit of a step is the longer of two: reading the attention's weights and those of the experts
that its rows go to, once, or the products of its rows.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmark.kernels.stage_step import CPU, PAGE_SIZE, random_inputs
from benchmark.support.command import Command, Options, Report, progress
from benchmark.support.turns import Row, flops_per_ms, read_bytes_per_ms, row_table, take_turns
from sgl_pipeline.pp_runner.attention.attention_backend import StageAttention
from sgl_pipeline.pp_runner.attention.cpu_attention import CpuAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.cpu_kernels.library import load_cpu_kernels
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.model.decoder import DecoderLayer
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, model_spec
from sgl_pipeline.pp_runner.model.rotary import RotaryEmbedding

DTYPE = torch.bfloat16
LAYERS = range(2)
# config.json of gpt-oss-20b but for the number of layers and the size of the vocabulary.
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": len(LAYERS),
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 64,
    "dtype": "bfloat16",
}
STEPS = {  # (start, length) of each chunk
    "1 decode": [(200, 1)],
    "8 decodes": [(200, 1)] * 8,
    "32 decodes": [(200, 1)] * 32,
    "prefill 64": [(0, 64)],
    "prefill 256": [(0, 256)],
}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, rounds=9)
    command.add("--without-transformers", action="store_true", help="ours and the limits alone")
    return command.run(_measure, argv)


def _measure(options: Options) -> Report:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    ours = _OurLayers()
    theirs = None if options.without_transformers else _TransformersLayers()
    bytes_per_ms = read_bytes_per_ms(options.rounds)
    rate = flops_per_ms(CompiledKernels(load_cpu_kernels()), DTYPE, options.rounds)
    table: list[Row] = []
    with progress(len(STEPS), "steps") as bar:
        for name, chunks in STEPS.items():
            inputs = random_inputs(chunks)
            hidden = torch.randn(inputs.num_tokens, GPT_OSS["hidden_size"]).to(DTYPE)
            turns: dict[str, Callable[[], object]] = {"ours": partial(ours.step, inputs, hidden)}
            if theirs is not None:
                turns["transformers"] = theirs.step(chunks)
            with torch.inference_mode():
                row = take_turns(turns, options.rounds)
            row["limit_ms"] = ours.limit_ms(inputs.num_tokens, bytes_per_ms, rate)
            row["limit_to_ours"] = row["limit_ms"] / row["ours_ms"]
            if theirs is not None:
                row["transformers_to_ours"] = row["transformers_ms"] / row["ours_ms"]
            table.append({"step": name, **row})
            bar.update()
    text = f"One core reads {bytes_per_ms / 1e6:.3g} GB/s and multiplies {rate / 1e6:.4g} GFLOP/s."
    return Report(
        name="published_layers",
        texts=[row_table(table), text],
        facts={"model": {"gpt-oss-20b": f"{len(LAYERS)} layers, MXFP4 experts; random weights"}},
        record={"table": table},
    )


class _RandomWeights:
    """A `WeightSource` of random numbers, also of MXFP4's blocks, which are cheap to draw."""

    is_made_up = False
    dtype = DTYPE

    def __init__(self) -> None:
        self.loaded: dict[str, int] = {}

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Of the spread of trained weights."""
        return torch.empty(shape, dtype=DTYPE).normal_(0.0, 0.02)

    def read_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Any codes, all with one scale."""
        assert dtype == torch.uint8
        if name.endswith("scales"):
            return torch.full(shape, 120, dtype=dtype)
        return torch.randint(0, 256, shape, dtype=dtype)

    def has(self, name: str) -> bool:
        return True

    def names(self) -> tuple[str, ...]:
        return ()

    def shape_of(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError


class _OurLayers:
    """The layers with pages of random keys and values."""

    def __init__(self) -> None:
        config = GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}
        self._spec = spec = model_spec(config)
        kernels = load_cpu_kernels()
        weights = _RandomWeights()
        self._layers = [
            DecoderLayer.load(spec, layer, weights, CompiledKernels(kernels)) for layer in LAYERS
        ]
        shapes = spec.attention_shapes(PAGE_SIZE, DTYPE, CPU)
        self._attention = StageAttention(shapes, lambda shape: CpuAttention(shape, kernels))
        most_pages = max(random_inputs(step).layout.page_indices.numel() for step in STEPS.values())
        self._pool = KvPool(LAYERS, shapes, most_pages)
        for layer in LAYERS:
            for pages in self._pool.pages(layer):
                pages.normal_()
        self._rotary = RotaryEmbedding(spec.rope, spec.head_dim, CPU)

    def step(self, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor:
        """All layers, as a stage without recorded calls runs them."""
        self._attention.plan(inputs.layout)
        rotation = self._rotary.at(inputs.positions)
        for layer in self._layers:
            hidden = layer.forward(hidden, rotation, inputs.slots, self._pool, self._attention)
        return hidden

    def limit_ms(self, num_rows: int, bytes_per_ms: float, rate: float) -> float:
        """The longer of reading and multiplying; see above."""
        attention, expert = _numbers(self._spec)
        experts = self._spec.experts
        assert experts is not None
        # Of random rows.
        missed = (1 - experts.experts_per_token / experts.num_experts) ** num_rows
        touched = experts.num_experts * (1 - missed)
        read = attention * DTYPE.itemsize + touched * expert * (4 / 8 + 1 / 32)
        products = num_rows * (attention + experts.experts_per_token * expert)
        return len(LAYERS) * max(read / bytes_per_ms, 2 * products / rate)


def _numbers(spec: DecoderSpec) -> tuple[int, int]:
    """Weights of a layer's attention, and of one expert."""
    assert spec.experts is not None
    heads = spec.num_query_heads + spec.num_kv_heads
    return (
        2 * spec.hidden_size * heads * spec.head_dim,
        3 * spec.hidden_size * spec.experts.inner_size,
    )


class _TransformersLayers:
    """transformers' model of the same layers in bf16, with its own way to attend to a cache."""

    def __init__(self) -> None:
        from transformers import AutoModel, GptOssConfig

        names = {name: value for name, value in GPT_OSS.items() if name != "architectures"}
        self._model = AutoModel.from_config(GptOssConfig(**names), dtype=DTYPE).eval()

    def step(self, chunks: list[tuple[int, int]]) -> Callable[[], object]:
        """A call that runs chunks of equal lengths, decodes behind what a cache has."""
        (start, length), *_ = chunks
        hidden = torch.randn(len(chunks), length, GPT_OSS["hidden_size"]).to(DTYPE)
        if not start:
            return partial(self._model, inputs_embeds=hidden, use_cache=False)
        before = torch.randn(len(chunks), start, GPT_OSS["hidden_size"]).to(DTYPE)
        with torch.inference_mode():
            cache = self._model(inputs_embeds=before, use_cache=True).past_key_values
        return partial(self._model, inputs_embeds=hidden, past_key_values=cache)


if __name__ == "__main__":
    sys.exit(main())
