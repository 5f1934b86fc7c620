"""Layers of a published model with random weights: ours, transformers', and the limit of a step.

Called by `published_layers.py`. Never starts a process.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from benchmark.kernels.published_models import PublishedLayers, Step
from benchmark.kernels.stage_step import CPU, PAGE_SIZE, random_inputs
from sgl_pipeline.pp_runner.attention.attention_backend import StageAttention
from sgl_pipeline.pp_runner.attention.cpu_attention import CpuAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.attention.state_pool import StepStates, state_pool_of
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.cpu_kernels.library import load_cpu_kernels
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.made_up_weights import PATTERN_LENGTH, MadeUpWeights
from sgl_pipeline.pp_runner.model.decoder import DecoderLayer
from sgl_pipeline.pp_runner.model.model_spec import model_spec
from sgl_pipeline.pp_runner.model.rotary import RotaryEmbedding

DTYPE = torch.bfloat16
_MXFP4_BYTES = 4 / 8 + 1 / 32  # of a weight
_STATE_FLOPS = 7  # of a number of a state and a row: decayed, added to, and in two sums


class CoreRates(NamedTuple):
    """Rates of one core in a millisecond: bytes that it reads, and arithmetic of large products in
    bf16 and in fp32."""

    bytes_per_ms: float
    flops_per_ms: float
    fp32_flops_per_ms: float


class OurLayers:
    """The layers with pages of random keys and values, or random states."""

    def __init__(self, published: PublishedLayers) -> None:
        config = published.full_config(published.others)
        if published.quantization is not None:
            config["quantization_config"] = published.quantization
        self._spec = spec = model_spec(config)
        self._ids = range(len(published.layer_types))
        kernels, self._weights = load_cpu_kernels(), _RandomWeights()
        self._layers = [
            DecoderLayer.load(spec, layer, self._weights, CompiledKernels(kernels))
            for layer in self._ids
        ]
        shapes = spec.attention_shapes(PAGE_SIZE, DTYPE, CPU)
        self._attention = StageAttention(shapes, lambda shape: CpuAttention(shape, kernels))
        steps = published.steps.values()
        most_pages = max(random_inputs(step).layout.page_indices.numel() for step in steps)
        self._pool = KvPool(self._ids, shapes, most_pages)
        self._state_shapes = [spec.state_of(layer) for layer in range(spec.num_layers)]
        most_chunks = max(len(step) for step in steps)
        self._states = state_pool_of(self._ids, self._state_shapes, most_chunks, DTYPE, CPU)
        for layer in self._ids:
            if self._state_shapes[layer] is None:
                for pages in self._pool.pages(layer):
                    pages.normal_()
            elif self._states is not None:
                self._states.states(layer).recurrent.normal_()
        self._rotary = RotaryEmbedding(spec.rope, spec.head_dim, CPU)

    def inputs(self, chunks: Step) -> StepInputs:
        return random_inputs(chunks, with_states=self._states is not None)

    def step(self, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor:
        """All layers, as a stage without recorded calls runs them."""
        self._attention.plan(inputs.layout)
        rotation = self._rotary.at(inputs.positions)
        states = None if self._states is None else StepStates.of(inputs, self._states)
        for layer in self._layers:
            hidden = layer.forward(
                hidden, rotation, inputs.slots, self._pool, self._attention, states=states
            )
        return hidden

    def limit_ms(self, chunks: Step, rates: CoreRates) -> float:
        """The longer of reading and arithmetic: weights outside experts and of the experts that the
        rows go to, keys and values once, states once there and once back; products with weights,
        keys and values at the rate of bf16, and of states at that of fp32."""
        num_rows = sum(length for _, length in chunks)
        attended = sum(length * start + length * (length + 1) // 2 for start, length in chunks)
        plain = self._weights.num_plain
        moved = float(plain * DTYPE.itemsize)
        products, state_flops = float(num_rows * plain), 0
        for layer in self._ids:
            touched, passed = self._expert_weights(layer, num_rows)
            moved += touched * _MXFP4_BYTES
            products += passed
            shape = self._state_shapes[layer]
            if shape is None:
                read = sum(start + length for start, length in chunks)
                moved += 2 * read * self._spec.num_kv_heads * self._spec.head_dim * DTYPE.itemsize
                products += 2 * attended * self._spec.num_query_heads * self._spec.head_dim
            else:
                size = shape.num_value_heads * shape.key_dim * shape.value_dim
                read = sum(start > 0 for start, _ in chunks)
                moved += (read + len(chunks)) * size * 4
                state_flops += _STATE_FLOPS * num_rows * size
        arithmetic = 2 * products / rates.flops_per_ms + state_flops / rates.fp32_flops_per_ms
        return max(moved / rates.bytes_per_ms, arithmetic)

    def _expert_weights(self, layer: int, num_rows: int) -> tuple[float, int]:
        """Weights of the experts that random rows go to, and those that multiply a row, times
        rows."""
        experts = self._spec.layer_experts(layer)
        if experts is None:
            return 0, 0
        size = 3 * self._spec.hidden_size * experts.inner_size
        missed = (1 - experts.experts_per_token / experts.num_experts) ** num_rows
        touched = experts.num_experts * (1 - missed) * size
        return touched, num_rows * experts.experts_per_token * size


class TransformersLayers:
    """transformers' model of the same layers in bf16, with its own way to attend to a cache."""

    def __init__(self, published: PublishedLayers) -> None:
        import transformers
        from transformers.initialization import no_init_weights

        names = published.full_config(published.others)
        del names["architectures"]
        config = getattr(transformers, published.transformers_config)(**names)
        self._hidden_size = config.hidden_size
        with no_init_weights():
            self._model = transformers.AutoModel.from_config(config, dtype=DTYPE).eval()
        weights = MadeUpWeights(DTYPE, CPU)
        for name, parameter in self._model.named_parameters():
            parameter.data = weights.read(name, tuple(parameter.shape))
        for layer in range(len(published.layer_types), config.num_hidden_layers):
            self._model.layers[layer] = _Passed()

    def step(self, chunks: Step) -> Callable[[], object]:
        """A call that runs chunks of equal lengths, decodes behind what a cache has."""
        (start, length), *_ = chunks
        hidden = torch.randn(len(chunks), length, self._hidden_size).to(DTYPE)
        if not start:
            return partial(self._model, inputs_embeds=hidden, use_cache=True)
        before = torch.randn(len(chunks), start, self._hidden_size).to(DTYPE)
        with torch.inference_mode():
            cache = self._model(inputs_embeds=before, use_cache=True).past_key_values
        return partial(self._model, inputs_embeds=hidden, past_key_values=cache)


class _Passed(torch.nn.Module):
    """In place of a layer that is not measured: transformers' caches need its kind."""

    def forward(self, hidden: torch.Tensor, **_: object) -> torch.Tensor:
        return hidden


class _RandomWeights(MadeUpWeights):
    """Weights as from a file: repeated random numbers, and such bytes for MXFP4's blocks.

    `num_plain` counts the numbers outside experts.
    """

    is_made_up = False

    def __init__(self) -> None:
        super().__init__(DTYPE, CPU)
        self._codes = torch.randint(0, 256, (PATTERN_LENGTH,), dtype=torch.uint8)
        self.num_plain = 0

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        weight = super().read(name, shape)
        if "experts" not in name:
            self.num_plain += weight.numel()
        return weight

    def read_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Any codes, all with one scale; or small numbers in fp32."""
        if dtype != torch.uint8:
            return self.read(name, shape).to(dtype)
        if name.endswith("scales"):
            return torch.full(shape, 120, dtype=dtype)
        codes = torch.empty(math.prod(shape), dtype=dtype)
        for part in codes.split(PATTERN_LENGTH):
            part.copy_(self._codes[: part.numel()])
        return codes.view(shape)

    def read_parts(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Iterator[torch.Tensor]:
        if dtype is None:
            yield from super().read_parts(name, shape)
            return
        for _ in range(shape[0]):
            yield self.read_as(name, shape[1:], dtype)

    def has(self, name: str) -> bool:
        """True if it is no scale of keys or values."""
        return not name.endswith(("k_scale", "v_scale"))
