"""Layers that come and go: what they compute, what they leave behind, what is refused."""

import random
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from support.local_pipeline import QueueLink, open_stage
from support.microbatches import microbatch_of
from support.stage_chain import new_request
from support.tiny_models import NUM_LAYERS, VOCAB_SIZE, tiny_model

from sgl_pipeline.errors import CheckpointError, ProtocolError
from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.model.held_layers import HeldLayers
from sgl_pipeline.pp_runner.model.model_spec import read_model_spec
from sgl_pipeline.pp_runner.model.native_stage import NativeStageModel
from sgl_pipeline.pp_runner.stage_runner import StageRunner
from sgl_pipeline.pp_runner.weights.checkpoint import Checkpoint, WeightSource
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.step_order import StepOrder, StepOrderEncoder

CPU = torch.device("cpu")
HIDDEN_SIZE = 64
KERNELS = pytest.mark.parametrize(
    "kernels", ["torch", pytest.param("cpu", marks=pytest.mark.compiler)]
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class MiddleStage:
    """Stage 1 of 3, fed by hand: `layers` is what it runs at first."""

    def __init__(self, name: str, layers: range, kernels: str = "torch", dtype: str = "float32"):
        self._dtype = getattr(torch, dtype)
        self._fed: deque = deque()
        self._sent: deque = deque()
        self.runner: StageRunner = open_stage(
            tiny_model(name),
            plan_of(0, layers),
            1,
            QueueLink(self._fed, self._sent),
            attention_backend=kernels,
            layer_kernels=kernels,
            dtype=dtype,
        )

    def run(self, plan: StepOrder) -> torch.Tensor:
        """What it sends downstream, given rows that the step's id makes up."""
        num_rows = sum(chunk.length for chunk in plan.chunks)
        generator = torch.Generator().manual_seed(plan.step_id)
        rows = torch.randn(num_rows, HIDDEN_SIZE, generator=generator).to(self._dtype)
        self._fed.append((plan.step_id, rows))
        self.runner.launch(self.runner.prepare(plan))
        _, hidden = self._sent.pop()
        return hidden


def plan_of(epoch: int, layers: range) -> StagePlan:
    """A plan of three stages of which the middle one runs `layers`."""
    return StagePlan(epoch, (layers.start, len(layers), NUM_LAYERS - layers.stop))


def steps_of_a_request(epoch: int, seed: int = 0) -> Iterator[StepOrder]:
    """A prefill in two chunks and a few decodes of a new request."""
    numbers = random.Random(seed)
    request = new_request([numbers.randrange(VOCAB_SIZE) for _ in range(25)])
    request.pages.extend(numbers.sample(range(256), 3))
    encoder = StepOrderEncoder()
    start = 0
    for step_id, length in enumerate((14, 11, 1, 1)):
        chunk = Chunk(request, start, length, length == 1, samples=start + length >= 25)
        plan = encoder.encode(microbatch_of(step_id, (chunk,)))
        yield msgspec.structs.replace(plan, epoch=epoch)
        start += length
        if start >= 25:
            request.output_ids.append(numbers.randrange(VOCAB_SIZE))


def outputs(stage: MiddleStage, epoch: int, seed: int = 0) -> list[torch.Tensor]:
    return [stage.run(plan) for plan in steps_of_a_request(epoch, seed)]


def same_bits(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "glm4", "chatglm", "mistral-sharded"])
@KERNELS
def test_a_layer_that_came_later_computes_the_bits_of_one_that_was_there(
    name: str, kernels: str
) -> None:
    grown, whole = MiddleStage(name, range(2, 4), kernels), MiddleStage(name, range(1, 4), kernels)
    expected = outputs(whole, 0)
    before = outputs(grown, 0)
    grown.runner.held_layers.hold(1)
    assert same_bits(outputs(grown, 0), before), "it ran a layer that its plan does not have"
    grown.runner.know_plan(plan_of(1, range(1, 4)))
    assert same_bits(outputs(grown, 1), expected)
    pools = [stage.runner.held_layers.kv_pool for stage in (grown, whole)]
    assert same_bits(*(list(pool.pages(1)) for pool in pools))


@KERNELS
def test_after_any_holds_and_drops_a_stage_computes_what_a_fresh_one_does(kernels: str) -> None:
    numbers = random.Random(5)
    dtype = "bfloat16" if kernels == "cpu" else "float32"
    stage = MiddleStage("qwen3", range(2, 4), kernels, dtype)
    held, epoch, checked = {2, 3}, 0, set()
    for _ in range(120):
        layer = numbers.randrange(NUM_LAYERS)
        if layer in held:
            stage.runner.held_layers.drop(layer)
        else:
            stage.runner.held_layers.hold(layer)
        held ^= {layer}
        assert stage.runner.held_layers.held == tuple(sorted(held))
        start = numbers.randrange(NUM_LAYERS)
        layers = range(start, numbers.randint(start, NUM_LAYERS))
        if not held.issuperset(layers):
            with pytest.raises(ProtocolError, match="runs layer"):
                stage.runner.know_plan(plan_of(epoch + 1, layers))
            continue
        epoch += 1
        stage.runner.know_plan(plan_of(epoch, layers))
        fresh = MiddleStage("qwen3", layers, kernels, dtype)
        assert same_bits(outputs(stage, epoch, epoch), outputs(fresh, 0, epoch)), layers
        checked.add(layers)
    assert len({len(layers) for layers in checked}) >= 4, "hardly any range was wholly held"


def held_layers(source: WeightSource | None = None, layers: range = range(2, 4)) -> HeldLayers:
    path = tiny_model("qwen3")
    spec = read_model_spec(path)
    model = NativeStageModel.build(
        spec,
        source or Checkpoint(path, torch.float32, CPU),
        device=CPU,
        kernels=TorchKernels(),
        layers=layers,
        is_first=False,
        is_last=False,
    )
    pool = KvPool(layers, spec.attention_shapes(16, torch.float32, CPU), 8)
    return HeldLayers(model, pool)


def tensors_in(thing: object) -> list[torch.Tensor]:
    """All tensors that an object of ours keeps."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, list | tuple):
        return [tensor for part in thing for tensor in tensors_in(part)]
    if type(thing).__module__.startswith("sgl_pipeline."):
        return [tensor for part in vars(thing).values() for tensor in tensors_in(part)]
    return []


def test_a_dropped_layer_leaves_no_weights_and_no_pages() -> None:
    layers = held_layers()
    one_layer_bytes = layers.kv_pool.num_bytes // 2
    kept = layers.model.layers[3]
    tensors = [*tensors_in(layers.model.layers[2]), *layers.kv_pool.pages(2)]
    assert len(tensors) > 8
    gone = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    layers.drop(2)
    assert [reference() for reference in gone] == [None] * len(gone)
    assert layers.held == layers.kv_pool.layers == (3,)
    assert layers.kv_pool.num_bytes == one_layer_bytes
    assert layers.model.layers[3] is kept


def test_the_books_are_those_of_a_stage_that_was_loaded_so() -> None:
    moved, loaded = held_layers(), held_layers(layers=range(3, 6))
    moved.drop(2)
    moved.hold(5)
    moved.hold(4)
    assert moved.model.loaded == loaded.model.loaded
    assert moved.model.weight_bytes == loaded.model.weight_bytes > 0
    assert moved.kv_pool.num_bytes == loaded.kv_pool.num_bytes
    assert moved.held == loaded.held == (3, 4, 5)


def test_the_pages_of_a_layer_that_comes_back_are_zeros() -> None:
    layers = held_layers()
    for pages in layers.kv_pool.pages(2):
        pages.fill_(7.0)
    layers.drop(2)
    layers.hold(2)
    assert not any(pages.any() for pages in layers.kv_pool.pages(2))


def test_what_cannot_be_held_or_dropped_is_refused_and_changes_nothing() -> None:
    layers = held_layers()
    with pytest.raises(ProtocolError, match=r"layer 3 cannot be loaded: .* holds it already"):
        layers.hold(3)
    for absent in (-1, NUM_LAYERS):
        with pytest.raises(ProtocolError, match=rf"layer {absent} .* the model has layers 0 to 5"):
            layers.hold(absent)
    with pytest.raises(ProtocolError, match=r"layer 1 .*: this stage holds layers 2, 3"):
        layers.drop(1)
    assert layers.held == tuple(sorted(layers.kv_pool.layers)) == (2, 3)
    layers.drop(2)
    layers.drop(3)
    with pytest.raises(ProtocolError, match="this stage holds no layer"):
        layers.drop(2)


class TornCheckpoint(Checkpoint):
    """Lacks `missing`."""

    missing: str | None = None

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name == self.missing:
            raise CheckpointError(f"{name} is unreadable")
        return super().read(name, shape)


def test_a_layer_that_cannot_be_loaded_leaves_nothing() -> None:
    source = TornCheckpoint(tiny_model("qwen3"), torch.float32, CPU)
    layers = held_layers(source)
    num_bytes, loaded = layers.kv_pool.num_bytes, dict(layers.model.loaded)
    source.missing = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(CheckpointError, match="down_proj"):
        layers.hold(1)
    assert (layers.held, layers.kv_pool.num_bytes) == ((2, 3), num_bytes)
    assert layers.model.loaded == loaded
    source.missing = None
    layers.hold(1)
    assert layers.held == (1, 2, 3)


def mapped_files() -> set[str]:
    return {
        line.split(maxsplit=5)[5].strip()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(".safetensors")
    }


def test_an_idle_stage_keeps_no_file_of_weights_mapped() -> None:
    """What has been read would count as its memory."""
    path = tiny_model("mistral-sharded")
    before = mapped_files()
    model = NativeStageModel.load(
        read_model_spec(path),
        path,
        layers=range(2, 4),
        is_first=True,
        is_last=True,
        dtype=torch.float32,
        device=CPU,
        kernels=TorchKernels(),
    )
    assert mapped_files() == before
    model.add_layer(model.read_layer(1))
    assert mapped_files() == before
