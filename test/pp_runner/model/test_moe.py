"""The expert layer against a sum by hand, rows alone and in company, and both ways to store it."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.layer_kernels.torch_router import TorchRouter
from sgl_pipeline.pp_runner.model.families import TensorNames
from sgl_pipeline.pp_runner.model.layer_tensors import LayerTensors
from sgl_pipeline.pp_runner.model.model_spec import ExpertSpec
from sgl_pipeline.pp_runner.model.moe import SeparateExperts, SparseMlp, StackedExperts

HIDDEN, INNER, SHARED, NUM_EXPERTS = 64, 48, 80, 8
NAMES = TensorNames()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class RandomWeights:
    """A WeightSource of tensors of unit scale, which it keeps, or only watches."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, keep: bool = True) -> None:
        self.loaded: dict[str, int] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.storages: list[weakref.ref] = []
        self._dtype, self._keep = dtype, keep

    def has(self, name: str) -> bool:
        return True

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(len(self.loaded))
        tensor = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        tensor = tensor.to(self._dtype)
        self.loaded[name] = tensor.nbytes
        if self._keep:
            self.tensors[name] = tensor
        self.storages.append(weakref.ref(tensor.untyped_storage()))
        return tensor


def expert_spec(*, normalized: bool = True, shared: bool = True, per_token: int = 3) -> ExpertSpec:
    return ExpertSpec(
        num_experts=NUM_EXPERTS,
        experts_per_token=per_token,
        inner_size=INNER,
        normalized=normalized,
        shared_inner_size=SHARED if shared else 0,
        layers=frozenset({0}),
    )


def load(spec: ExpertSpec, weights: RandomWeights) -> SparseMlp:
    return SparseMlp.load(LayerTensors("", weights, TorchKernels()), NAMES, HIDDEN, spec)


def rows(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(dtype)


def by_hand(spec: ExpertSpec, tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Token by token, in fp64."""

    def mlp(prefix: str, row: torch.Tensor) -> torch.Tensor:
        gate, up, down = (
            tensors[f"{prefix}.{part}_proj.weight"].double() for part in ("gate", "up", "down")
        )
        return down @ (F.silu(gate @ row) * (up @ row))

    results = []
    for row in x.double():
        shares = (tensors["mlp.gate.weight"].double() @ row).softmax(dim=0)
        best = shares.sort(descending=True).indices[: spec.experts_per_token]
        total = shares[best].sum() if spec.normalized else 1.0
        mixed = sum(shares[e] / total * mlp(f"mlp.experts.{e}", row) for e in best)
        if spec.shared_inner_size:
            gate = (tensors["mlp.shared_expert_gate.weight"].double() @ row).sigmoid()
            mixed = mixed + gate * mlp("mlp.shared_expert", row)
        results.append(mixed)
    return torch.stack(results)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("num_rows", "per_token"), [(1, 3), (2, 1), (33, 3), (5, NUM_EXPERTS)])
def test_result_is_the_weighted_sum_of_the_chosen_experts(normalized, shared, num_rows, per_token):
    spec = expert_spec(normalized=normalized, shared=shared, per_token=per_token)
    weights = RandomWeights()
    result = load(spec, weights)(rows(num_rows))
    expected = by_hand(spec, weights.tensors, rows(num_rows))
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_row_is_bitwise_the_same_in_every_microbatch():
    layer = load(expert_spec(), RandomWeights())
    x = rows(130)
    whole = layer(x)
    for start, length in [(0, 1), (5, 1), (0, 2), (3, 3), (7, 4), (1, 8), (20, 31), (2, 100)]:
        part = layer(x[start : start + length])
        assert torch.equal(part, whole[start : start + length]), (start, length)
    shuffled = torch.randperm(130, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer(x[shuffled]), whole[shuffled])


class Numbered:
    """`Experts` of any kind: expert e answers a row with the sum of its numbers, times e + 1."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        sums = x.float().sum(dim=1)[:, None] * (experts + 1)
        return sums[..., None].expand(-1, -1, HIDDEN)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_layer_asks_its_experts_once_and_weighs_what_they_answer(num_rows):
    spec, weights = expert_spec(shared=False), RandomWeights()
    router = TorchRouter(spec, weights.read("mlp.gate.weight", (NUM_EXPERTS, HIDDEN)))
    experts, x = Numbered(), rows(num_rows)
    found = SparseMlp(router, experts, None)(x)
    routing = router(x)
    expected = (routing.weights * (routing.experts + 1)).sum(dim=1) * x.sum(dim=1)
    torch.testing.assert_close(found, expected[:, None].expand(-1, HIDDEN))
    assert experts.num_calls == 1


class SortCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_sorts = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_sorts += "sort" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("num_rows", "sorts"), [(1, False), (2, True)])
def test_separate_experts_sort_nothing_for_a_row_alone(num_rows, sorts):
    experts = SeparateExperts.load(
        LayerTensors("", RandomWeights(), TorchKernels()), NAMES, HIDDEN, expert_spec()
    )
    with SortCounter() as counter:
        experts(rows(num_rows), torch.tensor([[6, 0, 3], [1, 2, 6]])[:num_rows])
    assert bool(counter.num_sorts) is sorts


def test_experts_that_nobody_goes_to_are_not_run():
    class Unused:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("ran without rows")

    class Doubling:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    experts = SeparateExperts([Unused(), Doubling(), Unused(), Doubling(), Unused()])
    ends = torch.tensor([0, 2, 2, 5, 5], dtype=torch.int32)
    assert torch.equal(experts.of_groups(rows(5), ends), 2 * rows(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_stacked_experts_compute_what_separate_ones_do(dtype):
    """`StackedExperts` is what a GPU runs; `grouped_mm` has a slow form for CPUs."""
    spec = expert_spec()
    separate, stacked = (
        kind.load(LayerTensors("", RandomWeights(dtype), TorchKernels()), NAMES, HIDDEN, spec)
        for kind in (SeparateExperts, StackedExperts)
    )
    x = rows(11, dtype)
    ends = torch.tensor([0, 2, 2, 3, 7, 7, 10, 11], dtype=torch.int32)
    found, expected = (experts.of_groups(x, ends) for experts in (stacked, separate))
    assert found.dtype == expected.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}[dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", [SeparateExperts, StackedExperts])
def test_loaded_experts_keep_one_copy_of_their_weights(kind):
    """None of the tensors as they were read is left: their packed or stacked copies are."""
    weights = RandomWeights(keep=False)
    experts = kind.load(LayerTensors("", weights, TorchKernels()), NAMES, HIDDEN, expert_spec())
    gc.collect()
    assert len(weights.storages) == 3 * NUM_EXPERTS
    assert [storage for storage in weights.storages if storage() is not None] == []
    assert experts is not None


def test_routing_is_in_fp32_for_a_model_in_bf16():
    """Experts whose logits round to one bf16 number are still told apart."""
    weight = torch.zeros(4, HIDDEN)
    weight[:, 0] = torch.tensor([1.0, 1.0, 0.0, 0.0])
    weight[:, 1] = torch.tensor([0.0, 2.0**-7, 0.0, 0.0])
    x = torch.zeros(1, HIDDEN)
    x[0, 0], x[0, 1] = 64.0, 1.0
    spec = ExpertSpec(
        num_experts=4,
        experts_per_token=1,
        inner_size=INNER,
        normalized=False,
        shared_inner_size=0,
        layers=frozenset(),
    )
    routing = TorchRouter(spec, weight.bfloat16())(x.bfloat16())
    assert routing.experts.tolist() == [[1]]
    assert routing.weights.dtype == torch.float32
    assert routing.weights.item() == pytest.approx(0.5 + 2.0**-7 / 4, abs=1e-4)
