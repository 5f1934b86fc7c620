"""The gated delta rule of all leaves against transformers' definition in fp32, and results of the
compiled kernel that depend neither on chunks nor on company nor on threads: torch's own functions
have other bits for rows at the end of a tensor.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pytest
import torch
from support.instruction_sets import INSTRUCTION_SETS, kernels_for
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNormGated,
    causal_conv1d_fn,
    torch_recurrent_gated_delta_rule,
)

from sgl_pipeline.pp_runner.base.state_rows import StateRows
from sgl_pipeline.pp_runner.layer_kernels.compiled_kernels import CompiledKernels
from sgl_pipeline.pp_runner.layer_kernels.gated_delta import GatedDeltaWeights, LayerStates
from sgl_pipeline.pp_runner.layer_kernels.layer_backend import LayerKernels
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels

COMPILED = [f"compiled {name}" for name in INSTRUCTION_SETS]
_compiled = [pytest.param(leaf, marks=pytest.mark.compiler) for leaf in COMPILED]
every_leaf = pytest.mark.parametrize("leaf", ["torch", *_compiled])
every_compiled_leaf = pytest.mark.parametrize("leaf", _compiled)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
EPSILON = 1e-6


class Shape(NamedTuple):
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def num_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


# Heads of Qwen3.5; of a tiny model; and of no multiple of any vector.
SHAPES = (Shape(1, 2, 128, 128, 4), Shape(2, 4, 16, 16, 4), Shape(2, 2, 20, 75, 3))
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kernels_of(leaf: str) -> LayerKernels:
    if leaf == "torch":
        return TorchKernels()
    return CompiledKernels(kernels_for(leaf.removeprefix("compiled ")))


class Layer:
    """Random weights, and the calls of a leaf."""

    def __init__(self, shape: Shape, dtype: torch.dtype, leaf: str = "torch") -> None:
        torch.manual_seed(1)
        self.shape, self.dtype = shape, dtype
        self.kernels = kernels_of(leaf)
        self.weights = GatedDeltaWeights(
            conv=torch.randn(shape.conv_width, shape.num_channels).to(dtype),
            a_log=torch.empty(shape.value_heads).uniform_(0.01, 16).log(),
            dt_bias=torch.randn(shape.value_heads) - 3,
            norm=torch.randn(shape.value_dim).to(dtype),
            epsilon=EPSILON,
        )

    def rows(self, count: int) -> "Rows":
        heads, values = self.shape.value_heads, self.shape.value_heads * self.shape.value_dim
        widths = (self.shape.num_channels, values, heads, heads)
        return Rows(*(torch.randn(count, width).to(self.dtype) for width in widths))

    def states(self, num_slots: int) -> LayerStates:
        """Slots with what no request may read."""
        heads, key_dim, value_dim = self.shape[1:4]
        last = (num_slots, self.shape.conv_width - 1, self.shape.num_channels)
        return LayerStates(
            torch.full((num_slots, heads, key_dim, value_dim), torch.nan),
            torch.full(last, torch.nan, dtype=self.dtype),
        )

    def run(
        self,
        chunks: Sequence["Rows"],
        slots: Sequence[int],
        starts_anew: Sequence[bool],
        pool: LayerStates,
    ) -> tuple[torch.Tensor, ...]:
        """The result of each chunk."""
        lengths = [chunk.qkv.shape[0] for chunk in chunks]
        runs = [
            [Run(slot, slot, length, is_new)]
            for slot, length, is_new in zip(slots, lengths, starts_anew, strict=True)
        ]
        return self.run_runs(joined(*chunks), runs, pool).split(lengths)

    def run_runs(
        self, rows: "Rows", chunks: Sequence[Sequence["Run"]], pool: LayerStates
    ) -> torch.Tensor:
        """The result of a step with `rows`, in the runs of each chunk."""
        runs = [run for chunk in chunks for run in chunk]
        states = StateRows(
            torch.tensor([run.read_slot for run in runs]),
            torch.tensor([run.write_slot for run in runs]),
            torch.tensor([run.starts_anew for run in runs]),
            torch.tensor([0, *(run.num_rows for run in runs)]).cumsum(0).int(),
            torch.tensor([0, *map(len, chunks)]).cumsum(0).int(),
        )
        return self.kernels.gated_delta(*rows, self.weights, states, pool)

    def run_in_turn(
        self, rows: "Rows", lengths: Iterable[int], slot: int, pool: LayerStates
    ) -> torch.Tensor:
        """The result of one request in chunks of `lengths`, one a step."""
        results: list[torch.Tensor] = []
        begin = 0
        for length in lengths:
            chunk = rows.part(begin, begin + length)
            results += self.run([chunk], [slot], [begin == 0], pool)
            begin += length
        return torch.cat(results)


class Rows(NamedTuple):
    """The projections of some rows."""

    qkv: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor

    def part(self, begin: int, end: int) -> "Rows":
        return Rows(*(each[begin:end] for each in self))


def joined(*parts: Rows) -> Rows:
    """One after the other."""
    return Rows(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


class Run(NamedTuple):
    """One of `StateRows`."""

    read_slot: int
    write_slot: int
    num_rows: int
    starts_anew: bool = False


def expected(layer: Layer, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' result in fp32 from position 0 on, and the recurrent state after it."""
    shape, weights = layer.shape, layer.weights
    rows = Rows(*(each.float() for each in rows))
    conv = weights.conv.float().T
    mixed = causal_conv1d_fn(rows.qkv.T[None], conv, None, activation="silu")[0].T
    keys = shape.key_heads * shape.key_dim
    query, key, value = mixed.split((keys, keys, shape.value_heads * shape.value_dim), 1)
    heads = shape.value_heads // shape.key_heads
    decay = -weights.a_log.exp() * torch.nn.functional.softplus(rows.a + weights.dt_bias)
    read, state = torch_recurrent_gated_delta_rule(
        query.unflatten(1, (-1, shape.key_dim)).repeat_interleave(heads, 1)[None],
        key.unflatten(1, (-1, shape.key_dim)).repeat_interleave(heads, 1)[None],
        value.unflatten(1, (-1, shape.value_dim))[None],
        decay[None],
        rows.b.sigmoid()[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    norm = Qwen3_5RMSNormGated(shape.value_dim, EPSILON)
    norm.weight.data = weights.norm.float()
    gate = rows.z.unflatten(1, (-1, shape.value_dim))
    return norm(read[0], gate).detach().flatten(1), state[0]


def tolerance(dtype: torch.dtype, size: torch.Tensor) -> torch.Tensor:
    """fp32 is off by sums in another order; what is rounded to bf16, by half a unit more."""
    exact = 2e-5 * (size + size.abs().mean())
    return exact if dtype == torch.float32 else exact + 2.0**-8 * size


@every_leaf
@every_dtype
@every_shape
def test_rows_are_those_of_transformers(leaf: str, dtype: torch.dtype, shape: Shape):
    layer = Layer(shape, dtype, leaf)
    rows, pool = layer.rows(70), layer.states(2)
    (result,) = layer.run([rows], [1], [True], pool)
    exact, state = expected(layer, rows)
    assert result.dtype == dtype
    assert ((result.float() - exact).abs() <= tolerance(dtype, exact.abs())).all()
    assert ((pool.recurrent[1] - state).abs() <= tolerance(torch.float32, state.abs())).all()
    assert pool.conv[1].equal(rows.qkv[-(shape.conv_width - 1) :])
    assert pool.recurrent[0].isnan().all() and pool.conv[0].isnan().all()


@every_leaf
def test_extreme_gates(leaf: str):
    layer = Layer(SHAPES[0], torch.float32, leaf)
    rows = layer.rows(8)
    rows.a[2], rows.a[5], rows.b[3], rows.b[6] = 200.0, -200.0, 200.0, -200.0
    rows.z[4, ::2], rows.z[4, 1::2] = 200.0, -200.0
    (result,) = layer.run([rows], [0], [True], layer.states(1))
    exact, _ = expected(layer, rows)
    assert ((result - exact).abs() <= tolerance(torch.float32, exact.abs())).all()


@every_compiled_leaf
@every_dtype
@every_shape
@pytest.mark.parametrize("length", [1, 7, 64])
def test_chunks_change_no_bit(leaf: str, dtype: torch.dtype, shape: Shape, length: int):
    layer = Layer(shape, dtype, leaf)
    rows, pool = layer.rows(130), layer.states(2)
    whole = layer.run_in_turn(rows, [130], 0, pool)
    lengths = [length] * (130 // length)
    lengths += [130 - sum(lengths)] * (sum(lengths) < 130)
    assert layer.run_in_turn(rows, lengths, 1, pool).equal(whole)
    assert pool.recurrent[1].equal(pool.recurrent[0]) and pool.conv[1].equal(pool.conv[0])


@every_compiled_leaf
@every_dtype
def test_company_changes_no_bit(leaf: str, dtype: torch.dtype):
    """Requests that begin, go on and decode in one step, in slots of any order."""
    layer = Layer(SHAPES[0], dtype, leaf)
    requests = [layer.rows(count) for count in (5, 30, 12, 1)]
    slots, cuts = [3, 0, 4, 1], [4, 11, 0, 0]  # rows before the common step
    alone, together = layer.states(5), layer.states(5)
    for rows, slot, cut in zip(requests, slots, cuts, strict=True):
        if cut:
            layer.run([rows.part(0, cut)], [slot], [True], together)
    chunks = [rows.part(cut, 99) for rows, cut in zip(requests, cuts, strict=True)]
    results = layer.run(chunks, slots, [cut == 0 for cut in cuts], together)
    for rows, slot, cut, result in zip(requests, slots, cuts, results, strict=True):
        (whole,) = layer.run([rows], [slot], [True], alone)
        assert result.equal(whole[cut:])
        assert together.recurrent[slot].equal(alone.recurrent[slot])
        assert together.conv[slot].equal(alone.conv[slot])
    assert together.recurrent[2].isnan().all() and together.conv[2].isnan().all()


@every_leaf
@every_dtype
@every_shape
def test_snapshots_are_the_states_of_shorter_chunks(leaf: str, dtype: torch.dtype, shape: Shape):
    """Of runs of a row, of more rows than are convolved at once, and of none; another request
    begins with one, and takes one itself. The slots that are read stay what they were."""
    layer = Layer(shape, dtype, leaf)
    rows, other = layer.rows(100), layer.rows(9)
    alone, pool = layer.states(8), layer.states(8)

    def assert_same(one: torch.Tensor, exact: torch.Tensor) -> None:
        if leaf != "torch":
            assert one.equal(exact)
        assert ((one - exact).abs() <= tolerance(dtype, exact.abs())).all()

    def assert_same_state(slot: int, slot_alone: int) -> None:
        assert_same(pool.recurrent[slot], alone.recurrent[slot_alone])
        assert pool.conv[slot].equal(alone.conv[slot_alone])

    whole = layer.run_in_turn(rows, [1, 69, 30], 0, alone)
    for lengths, slot in (([1], 1), ([1, 69], 2), ([1, 69, 30], 3)):
        layer.run_in_turn(rows, lengths, slot, alone)
    runs = [Run(7, 1, 1, True), Run(1, 2, 69), Run(2, 3, 30), Run(3, 0, 0)]
    assert_same(layer.run_runs(rows, [runs], pool), whole)
    for slot in range(4):
        assert_same_state(slot, slot)
    before = pool.recurrent[2].clone()
    both = joined(rows.part(70, 100), other)
    results = layer.run_runs(both, [[Run(2, 4, 30)], [Run(2, 5, 2), Run(5, 6, 7)]], pool)
    assert pool.recurrent[2].equal(before)
    assert_same(results[:30], whole[70:])
    assert_same_state(4, 0)
    exact = layer.run_in_turn(joined(rows.part(0, 70), other), [1, 69, 2, 7], 7, alone)
    assert_same(results[30:], exact[70:])
    assert_same_state(6, 7)


@pytest.mark.compiler
def test_snapshots_change_no_bit_on_two_threads():
    layer = Layer(SHAPES[1], torch.bfloat16, "compiled native")
    rows = layer.rows(80)
    runs = [[Run(slot, slot + 4, 13, True), Run(slot + 4, slot, 7)] for slot in range(4)]
    results, pools = [], []
    for count in (1, 2):
        torch.set_num_threads(count)
        pools.append(layer.states(8))
        results.append(layer.run_runs(rows, runs, pools[-1]))
    assert results[0].equal(results[1])
    assert pools[0].recurrent.equal(pools[1].recurrent)


@pytest.mark.compiler
@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_change_no_bit(num_threads: int):
    layer = Layer(SHAPES[0], torch.bfloat16, "compiled native")
    chunks = [layer.rows(count) for count in (40, 1, 3)]
    results, pools = [], []
    for count in (1, num_threads):
        torch.set_num_threads(count)
        pools.append(layer.states(3))
        results.append(layer.run(chunks, [2, 0, 1], [True] * 3, pools[-1]))
    assert all(one.equal(other) for one, other in zip(*results, strict=True))
    assert pools[0].recurrent.equal(pools[1].recurrent)
