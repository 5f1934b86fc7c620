"""Steps that run from recorded calls give the bits of those that run kernel by kernel."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from support.instruction_sets import kernels_for
from support.paged_attention import ChunkExtent, layout_of
from support.quantized_models import FORMATS, quantized_model
from support.tiny_models import NUM_LAYERS, VOCAB_SIZE, tiny_model
from torch.profiler import ProfilerActivity, profile

from sgl_pipeline.pp_runner import recorded_layers
from sgl_pipeline.pp_runner.attention.attention_backend import StageAttention
from sgl_pipeline.pp_runner.attention.cpu_attention import CpuAttention
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs
from sgl_pipeline.pp_runner.cpu_kernels.library import CpuKernels
from sgl_pipeline.pp_runner.kernel_choice import make_step_layers
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.model.held_layers import HeldLayers
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec, read_model_spec
from sgl_pipeline.pp_runner.model.native_stage import NativeStageModel
from sgl_pipeline.pp_runner.model.stage_model import StageModel
from sgl_pipeline.pp_runner.recorded_layers import RecordedLayers
from sgl_pipeline.pp_runner.step_layers import EagerLayers, StepLayers

CPU = torch.device("cpu")
PAGE_SIZE, NUM_PAGES = 4, 200
ALL_LAYERS = range(NUM_LAYERS)
DENSE = ("llama", "llama-biases-linear-rope", "qwen2-tied", "qwen3", "glm4")
ONLINE = ("w8a8_int8 of qwen3", "w4a8_int8 of pack-quantized")

# Machines with AVX-512 test the products of those without it, too.
MACHINES = ["native"]
if torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
    MACHINES.append("without AVX-512")


@pytest.fixture(scope="module", params=MACHINES)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return kernels_for(request.param)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def read_spec(name: str) -> tuple[DecoderSpec, Path]:
    quantization, _, of = name.rpartition(" of ")
    path = quantized_model(of).path if of in FORMATS else tiny_model(of)
    return read_model_spec(path, quantization or None), path


class Stage:
    """The layers of a model, with pages of random keys and values; any two of them have the same.

    A stage that is not the first begins with rows of another, here random ones.
    """

    def __init__(
        self,
        name: str,
        kernels: CpuKernels,
        dtype: torch.dtype = torch.bfloat16,
        *,
        is_first: bool = True,
        kv_cache_dtype: str = "auto",
        model: StageModel | None = None,
    ) -> None:
        spec, path = read_spec(name)
        shapes = spec.attention_shapes(PAGE_SIZE, dtype, CPU, kv_cache_dtype)
        model = model or NativeStageModel.load(
            spec,
            path,
            layers=ALL_LAYERS,
            is_first=is_first,
            is_last=False,
            dtype=dtype,
            device=CPU,
            kernels=CompiledKernels(kernels),
        )
        self.pool = KvPool(ALL_LAYERS, shapes, NUM_PAGES)
        generator = torch.Generator().manual_seed(5)
        if kv_cache_dtype == "auto":
            for layer in ALL_LAYERS:
                for pages in self.pool.pages(layer):
                    pages.normal_(generator=generator)
        self.held = HeldLayers(model, self.pool)
        self.attention = StageAttention(shapes, lambda shape: CpuAttention(shape, kernels))
        self.shapes = shapes
        self.hidden_size, self.is_first, self.dtype = spec.hidden_size, is_first, dtype

    def run(self, layers: StepLayers, step: StepInputs, own: range = ALL_LAYERS) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step.num_tokens)
        hidden = None
        if not self.is_first:
            hidden = torch.randn(step.num_tokens, self.hidden_size, generator=generator)
            hidden = hidden.to(self.dtype)
        layers.plan(0, own, step)
        return layers.run(step, hidden)


def step_of(chunks: list[ChunkExtent], seed: int = 0) -> StepInputs:
    """Its requests share no pages."""
    generator = random.Random(seed)
    free = list(range(NUM_PAGES))
    generator.shuffle(free)
    pages, slots, positions = [], [], []
    for chunk in chunks:
        end = chunk.start + chunk.length
        pages.append([free.pop() for _ in range(-(-end // PAGE_SIZE))])
        positions += range(chunk.start, end)
        slots += [
            pages[-1][position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            for position in range(chunk.start, end)
        ]
    nobody = torch.empty(0, dtype=torch.int64)
    return StepInputs(
        token_ids=torch.tensor([generator.randrange(VOCAB_SIZE) for _ in positions]),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        layout=layout_of(chunks, pages, PAGE_SIZE),
        sample_rows=nobody,
        sample_positions=nobody,
        sampling=(),
    )


def random_step(seed: int) -> StepInputs:
    """Decodes and some prefill, of one row to more than a product packs at once."""
    generator = random.Random(seed)
    decodes = [ChunkExtent(generator.randrange(20), 1) for _ in range(generator.randrange(24))]
    prefills = [
        ChunkExtent(generator.randrange(9), generator.randrange(2, 40))
        for _ in range(generator.randrange(3))
    ]
    return step_of((decodes + prefills) or [ChunkExtent(7, 1)], seed)


def decode(seed: int = 0, count: int = 1) -> StepInputs:
    return step_of([ChunkExtent(5, 1)] * count, seed)


def hold_to_kernel_by_kernel(name: str, kernels: CpuKernels, **arguments) -> RecordedLayers:
    ours = Stage(name, kernels, **arguments)
    eager = Stage(name, kernels, **arguments, model=ours.held.model)
    recorded = RecordedLayers(ours.held, ours.attention)
    plain = EagerLayers(eager.held, eager.attention)
    # Threads that wait for each other take long: theirs are one row, few, and two prompts beside.
    for seed in range(12) if torch.get_num_threads() == 1 else (2, 1, 0, 9):
        step = random_step(seed)
        assert torch.equal(ours.run(recorded, step), eager.run(plain, step))
    for layer in ALL_LAYERS:
        for own, other in zip(ours.pool.pages(layer), eager.pool.pages(layer), strict=True):
            assert torch.equal(own, other)
    return recorded


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DENSE, *FORMATS, *ONLINE])
def test_bits_are_those_of_kernel_by_kernel(name: str, kernels: CpuKernels) -> None:
    recorded = hold_to_kernel_by_kernel(name, kernels)
    assert recorded.is_recorded is kernels.has_products


@pytest.mark.parametrize("name", ["glm4", "int-quantized", "fp8 blocks", "gptq v2, ordered"])
def test_so_they_are_with_two_threads(name: str, kernels: CpuKernels, two_threads: None) -> None:
    """Once for each kind of product."""
    recorded = hold_to_kernel_by_kernel(name, kernels)
    assert recorded.is_recorded is kernels.has_products


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_so_they_are_with_pages_of_codes(
    kv_cache_dtype: str, kernels: CpuKernels, two_threads: None
) -> None:
    recorded = hold_to_kernel_by_kernel("qwen3", kernels, kv_cache_dtype=kv_cache_dtype)
    assert recorded.is_recorded or not kernels.has_products


def test_so_they_are_where_rows_come_from_another_stage(kernels: CpuKernels) -> None:
    recorded = hold_to_kernel_by_kernel("qwen3", kernels, is_first=False)
    assert recorded.is_recorded or not kernels.has_products


@pytest.mark.parametrize(("name", "dtype"), [("qwen2-moe", "bfloat16"), ("qwen3", "float32")])
def test_what_is_not_kernels_alone_runs_as_it_is(
    name: str, dtype: str, kernels: CpuKernels
) -> None:
    recorded = hold_to_kernel_by_kernel(name, kernels, dtype=getattr(torch, dtype))
    assert not recorded.is_recorded


@pytest.fixture
def stage(kernels: CpuKernels) -> Stage:
    if not kernels.has_products:
        pytest.skip("neither AVX2 nor bf16 instructions: nothing is recorded")
    return Stage("qwen3", kernels)


def test_a_cpu_stage_makes_recorded_calls(stage: Stage) -> None:
    layers = make_step_layers(False, 0, ALL_LAYERS, stage.held, stage.attention, stage.shapes[0])
    stage.run(layers, decode())
    assert isinstance(layers, RecordedLayers) and layers.is_recorded


def test_a_result_is_the_callers_to_keep(stage: Stage) -> None:
    layers = RecordedLayers(stage.held, stage.attention)
    results = [stage.run(layers, decode(seed)) for seed in range(4)]
    kept = [result.clone() for result in results]
    stage.run(layers, decode(9, count=3))
    assert all(map(torch.equal, results, kept))
    assert not torch.equal(results[1], results[2])


def test_nothing_is_recorded_of_a_layer_that_has_gone(stage: Stage, kernels: CpuKernels) -> None:
    layers = RecordedLayers(stage.held, stage.attention)
    stage.run(layers, decode())
    assert layers.is_recorded
    stage.held.drop(3)
    assert not layers.is_recorded
    stage.held.hold(3)  # its weights and pages lie elsewhere
    other = Stage("qwen3", kernels)
    for pages, before in zip(stage.pool.pages(3), other.pool.pages(3), strict=True):
        pages.copy_(before)
    eager = EagerLayers(other.held, other.attention)
    other.run(eager, decode())
    for seed in range(1, 4):
        step = decode(seed)
        assert torch.equal(stage.run(layers, step), other.run(eager, step))
    assert layers.is_recorded


def test_a_layer_that_is_not_recorded_may_go(stage: Stage) -> None:
    layers = RecordedLayers(stage.held, stage.attention)
    stage.run(layers, decode(), range(2, 5))
    stage.held.drop(5)
    assert layers.is_recorded


def test_each_range_of_layers_gives_its_own_bits(stage: Stage, kernels: CpuKernels) -> None:
    layers, other = RecordedLayers(stage.held, stage.attention), Stage("qwen3", kernels)
    eager = EagerLayers(other.held, other.attention)
    ranges = [range(6), range(3), range(3, 6), range(6), range(3, 6), range(3, 6), range(0)]
    for seed, own in enumerate(ranges):
        step = decode(seed)
        assert torch.equal(stage.run(layers, step, own), other.run(eager, step, own))


def test_a_layer_is_waited_for_when_its_turn_comes(stage: Stage) -> None:
    layers, waited = RecordedLayers(stage.held, stage.attention), []
    stage.run(layers, decode())
    expected = stage.run(layers, decode())
    for layer in (4, 2):
        stage.held.before_run(layer, partial(waited.append, layer))
    assert torch.equal(stage.run(layers, decode()), expected)
    assert waited == [2, 4]
    assert torch.equal(stage.run(layers, decode()), expected)
    assert waited == [2, 4]


def test_a_long_step_keeps_no_memory(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_layers, "MOST_ROWS", 8)
    layers = RecordedLayers(stage.held, stage.attention)
    stage.run(layers, decode(count=9))
    assert not layers.is_recorded
    stage.run(layers, decode(count=8))
    assert layers.is_recorded


def test_a_profile_shows_the_kernels(stage: Stage) -> None:
    layers = RecordedLayers(stage.held, stage.attention)
    stage.run(layers, decode())
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        stage.run(layers, decode())
    names = {event.key for event in profiled.key_averages()}
    assert {"sglp_product", "sglp_paged_attention", "sglp_rms_norm"} <= names
