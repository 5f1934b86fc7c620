"""Layers are shared by what the workers measured at the start, then and after a loss."""

import msgspec
import pytest
from support.served_steps import flat_costs
from support.worker_messages import COSTS, NUM_LAYERS, hello

from sgl_pipeline.args import StageArgs
from sgl_pipeline.costs.stage_costs import PartCosts, PartSample
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.pipeline.known_worker import Worker
from sgl_pipeline.pipeline.plan_by_time import counts_for_fewer, plan_by_time


def worker(
    number: int, host: str = "a", costs: PartCosts | None = None, memory_bytes: int = 10**9
) -> Worker:
    if costs is not None:
        costs = msgspec.structs.replace(costs, memory_bytes=memory_bytes)
    return Worker(hello(number, host=host), costs=costs)


def slower(factor: float) -> PartCosts:
    (one,) = COSTS.samples
    kinds_ms = tuple(factor * kind_ms for kind_ms in one.kinds_ms)
    sample = PartSample(one.work, kinds_ms, one.embedding_ms, factor * one.tail_ms)
    return msgspec.structs.replace(COSTS, samples=(sample,))


def counts(
    chosen: list[Worker], known: list[Worker], predictor: StepPredictor | None = None
) -> tuple[int, ...]:
    return counts_for_fewer(chosen, known, "cpu", NUM_LAYERS, predictor)


def test_the_stage_with_the_head_gets_fewer_layers() -> None:
    workers = [worker(number, costs=COSTS) for number in range(3)]
    assert counts([workers[0], workers[2]], workers) == (5, 3)
    assert counts(workers[:1], workers) == (8,)


def test_where_nothing_was_measured_layers_are_shared_evenly() -> None:
    workers = [worker(number) for number in range(3)]
    assert counts(workers[1:], workers) == (4, 4)


def test_a_saved_file_of_costs_counts_before_what_was_measured() -> None:
    workers = [worker(number, costs=COSTS) for number in range(3)]
    predictor = StepPredictor(flat_costs(NUM_LAYERS, tail_ms=4.0))
    assert counts(workers[1:], workers, predictor) == (6, 2)


@pytest.mark.parametrize("newcomers_host", ["slow", "new"])
def test_a_worker_that_came_later_counts_as_those_of_its_host(newcomers_host: str) -> None:
    """Half as fast, it takes as long for a layer and the head as the other one for six layers."""
    fast, lost = worker(0, "fast", COSTS), worker(1, "slow", slower(2.0))
    newcomer = worker(7, newcomers_host)
    expected = {"slow": (7, 1), "new": (5, 3)}[newcomers_host]
    assert counts([fast, newcomer], [fast, lost, newcomer]) == expected


def test_memory_that_was_measured_bounds_the_split_where_any_split_keeps_to_it() -> None:
    # Each layer takes 100 bytes and one for its page, embedding and head 10.
    small = worker(0, costs=COSTS, memory_bytes=10 + 3 * 101)
    large, lost = worker(1, costs=COSTS), worker(2, costs=COSTS)
    assert counts([small, large], [small, large, lost]) == (3, 5)
    # What the lost one has left of the memory counts too, and loading looks at it.
    both = [worker(number, costs=COSTS, memory_bytes=3 * 101) for number in range(2)]
    assert counts(both, both) == (5, 3)


@pytest.mark.parametrize(("state_bytes", "is_named"), [(0, False), (400, True)])
def test_a_start_without_room_names_the_slots_where_states_take_memory(
    state_bytes: int, is_named: bool
) -> None:
    sizes = msgspec.structs.replace(COSTS.sizes, state_layers=(0, 1), state_bytes=state_bytes)
    found = [msgspec.structs.replace(COSTS, sizes=sizes, memory_bytes=300)] * 2
    stages = StageArgs(model_path="m", dtype="float32", num_stages=2)
    with pytest.raises(ConfigurationError, match="do not fit") as refused:
        plan_by_time(found, ["a", "a"], stages, None)
    assert ("--max-mamba-cache-size" in str(refused.value)) is is_named
