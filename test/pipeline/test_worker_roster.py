"""Workers come in any order and at any time; each is told what its next thing is, once."""

import json
import random

import msgspec
import pytest
from support.served_steps import flat_costs
from support.worker_messages import COSTS, NUM_LAYERS, hello, loaded, measured, ready

from sgl_pipeline.args import ClusterArgs, PipelineArgs, StageArgs
from sgl_pipeline.errors import ConfigurationError, ProtocolError
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.pipeline.worker_roster import WorkerRoster
from sgl_pipeline.records.stage_timing import StageTiming
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import (
    FromWorker,
    MeasureCosts,
    MeasuredCosts,
    PoolSize,
    StageAssignment,
    StageReport,
    ToWorker,
)


def roster_of(
    num_stages: int,
    layer_partition: str = "even",
    predictor: StepPredictor | None = None,
    generic_spec: str = "",
) -> WorkerRoster:
    stages = StageArgs(
        num_stages=num_stages,
        layer_partition=layer_partition,
        model_path="m",
        dtype="float32",
        generic_spec=generic_spec,
    )
    return WorkerRoster(PipelineArgs(stages=stages, run_directory="run"), NUM_LAYERS, predictor)


def answer(
    worker: int, message: ToWorker, num_pages: int = 10, memory_bytes: int = 10**9
) -> FromWorker:
    """What a healthy worker says to `message`; the worker of stage s has room for s pages more."""
    if isinstance(message, MeasureCosts):
        return measured(worker, message, memory_bytes=memory_bytes)
    if isinstance(message, StageAssignment):
        return loaded(message.stage, num_pages + message.stage)
    assert isinstance(message, PoolSize)
    raise AssertionError("the test answers this itself, as it must know the stage")


def bring_up(roster: WorkerRoster, workers: list[int], rng: random.Random) -> list[ToWorker]:
    """Lets all workers greet and answer, in random order; returns all that they were told."""
    told: list[ToWorker] = []
    stage_of: dict[int, int] = {}
    pending: list[FromWorker] = [hello(worker) for worker in workers]
    while pending:
        message = pending.pop(rng.randrange(len(pending)))
        for worker, order in roster.take(message):
            told.append(order)
            if isinstance(order, StageAssignment):
                stage_of[worker] = order.stage
            if isinstance(order, PoolSize):
                pending.append(ready(stage_of[worker], "one notice"))
            else:
                pending.append(answer(worker, order))
    return told


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("layer_partition", ["even", "auto", "2,3,3"])
def test_workers_get_ready_whatever_the_order_of_their_messages(
    layer_partition: str, seed: int
) -> None:
    roster = roster_of(3, layer_partition)
    told = bring_up(roster, [0, 1, 2], random.Random(seed))
    assert sum(isinstance(order, StageAssignment) for order in told) == 3
    assert [order for order in told if isinstance(order, PoolSize)] == [PoolSize(10)] * 3
    capacity = roster.capacity()
    assert capacity is not None
    # Two layers' time for the head: the last stage has two fewer where times decide.
    counts = {"even": (3, 3, 2), "auto": (4, 3, 1), "2,3,3": (2, 3, 3)}[layer_partition]
    assert capacity.plan == StagePlan(0, counts)
    assert (capacity.predicted_ms is not None) == (layer_partition == "auto")
    assert [report.stage for report in capacity.stages] == [0, 1, 2]
    assert (capacity.num_pages, capacity.attention_backend) == (10, "torch")
    assert list(roster.notices()) == ["one notice"]
    assert roster.workers_of_stages == [0, 1, 2]


def test_workers_that_share_a_gpu_measure_one_after_the_other() -> None:
    """Four stages on two GPUs; one of the workers is lost before it has answered."""
    stages = StageArgs(num_stages=4, model_path="m", dtype="bfloat16", device="cuda")
    roster = WorkerRoster(PipelineArgs(stages=stages, run_directory="run"), NUM_LAYERS)
    asked = [order for worker in range(5) for order in roster.take(hello(worker, num_gpus=2))]
    gpus = [order.assignment.gpu for _, order in asked if isinstance(order, MeasureCosts)]
    assert [worker for worker, _ in asked] == [0, 1] and gpus == [0, 1]
    (after_one,) = roster.take(answer(*asked[1]))
    assert after_one[0] == 3
    roster.lose(0)
    assert roster.fill() == [], "cards are dealt anew, and worker 3 is still busy on the second one"
    message = answer(*after_one)
    for number in (2, 4):
        ((worker, order),) = roster.take(message)
        assert isinstance(order, MeasureCosts)
        assert (worker, order.assignment.gpu) == (number, 1)
        message = answer(worker, order)
    assert roster.plan is None
    assert roster.take(message) and roster.plan is not None


def test_known_costs_are_not_measured_again() -> None:
    """A tail of four layers, not of the two that the workers would measure."""
    roster = roster_of(3, "auto", StepPredictor(flat_costs(NUM_LAYERS, tail_ms=4.0)))
    told = bring_up(roster, [0, 1, 2], random.Random(0))
    asked = [order for order in told if isinstance(order, MeasureCosts)]
    assert [order.steps for order in asked] == [()] * 3
    assert roster.plan == StagePlan(0, (4, 3, 1))
    assert roster.predicted_ms == (4.0, 3.0, 5.0)


def told_of_memory(*memory_bytes: int) -> WorkerRoster:
    """A roster whose workers, one for each stage, have measured; each has that much memory."""
    roster = roster_of(len(memory_bytes), "auto")
    asked = [order for worker in range(len(memory_bytes)) for order in roster.take(hello(worker))]
    for worker, order in asked:
        roster.take(answer(worker, order, memory_bytes=memory_bytes[worker]))
    return roster


def test_a_stage_is_not_given_layers_that_it_cannot_hold() -> None:
    # Each of the eight takes 100 bytes and one for its page; the ends take 10 more.
    assert told_of_memory(10**9, 10**9).plan == StagePlan(0, (5, 3))
    assert told_of_memory(10 + 4 * 101, 10**9).plan == StagePlan(0, (4, 4))
    assert told_of_memory(10 + 4 * 101 - 1, 10**9).plan == StagePlan(0, (3, 5))


def test_a_model_that_fits_in_no_split_ends_the_start() -> None:
    with pytest.raises(ConfigurationError, match="memory of 2 stages"):
        told_of_memory(300, 300)


def test_nothing_is_told_before_every_stage_can_be_filled() -> None:
    roster = roster_of(2)
    assert roster.take(hello(1)) == []
    told = roster.take(hello(0))
    assert [(worker, type(order)) for worker, order in told] == [
        (0, StageAssignment),
        (1, StageAssignment),
    ]
    assert roster.capacity() is None


@pytest.mark.parametrize(("link", "can_regroup"), [("auto", False), ("host", True)])
def test_gpus_of_several_hosts_are_joined_for_life_unless_over_tcp(
    link: str, can_regroup: bool
) -> None:
    stages = StageArgs(
        num_stages=2,
        layer_partition="even",
        model_path="m",
        dtype="float32",
        device="cuda",
        link=link,
    )
    cluster = ClusterArgs(num_hosts=2, head_address="10.0.0.0:5000")
    args = PipelineArgs(stages=stages, cluster=cluster, run_directory="run")
    roster = WorkerRoster(args, NUM_LAYERS)
    for worker in range(2):
        one = hello(worker, num_gpus=1)
        roster.take(msgspec.structs.replace(one, host_address=f"10.0.0.{worker}:5000"))
    assert roster.can_regroup == can_regroup


def test_ray_places_no_gpus() -> None:
    stages = StageArgs(num_stages=2, model_path="m", dtype="float32", device="cuda")
    cluster = ClusterArgs(num_hosts=2, head_address="10.0.0.0:5000", use_ray=True)
    with pytest.raises(ConfigurationError, match=r"--use-ray.*--device cuda"):
        PipelineArgs(stages=stages, cluster=cluster)


def test_a_worker_more_than_there_are_stages_stays_a_spare() -> None:
    roster = roster_of(2)
    bring_up(roster, [0, 1], random.Random(0))
    assert roster.take(hello(7)) == []
    assert roster.spare_workers == (7,)


def test_a_spare_takes_the_stage_of_a_lost_worker_with_the_pages_that_are_in_use() -> None:
    roster = roster_of(2)
    bring_up(roster, [0, 1], random.Random(0))
    roster.take(hello(7))
    assert roster.lose(1) == 1
    assert roster.capacity() is None and roster.workers_of_stages == [0]
    # The next message of anybody, here a newcomer's, fills the stage.
    ((worker, order),) = roster.take(hello(9))
    assert worker == 7 and isinstance(order, StageAssignment)
    assert (order.stage, order.plan) == (1, StagePlan(0, (4, 4)))
    assert roster.take(loaded(1, 64)) == [(7, PoolSize(10))]
    assert roster.take(ready(1)) == []
    capacity = roster.capacity()
    assert capacity is not None and capacity.stages[1].num_pages == 64
    assert (roster.workers_of_stages, roster.spare_workers) == ([0, 7], (9,))
    assert (roster.stage_of(7), roster.stage_of(9), roster.stage_of(1)) == (1, 9, 1)


def test_a_replacement_without_room_for_the_pages_in_use_is_refused() -> None:
    roster = roster_of(2)
    bring_up(roster, [0, 1], random.Random(0))
    roster.take(hello(7))
    roster.lose(1)
    roster.take(hello(9))
    assert roster.take(loaded(1, 3)) == []
    ((worker, reason),) = roster.unfit_workers
    assert worker == 7 and "room for 3 KV pages of stage 1, the pipeline uses 10" in reason
    # Another one may have it.
    roster.lose(7)
    ((worker, assignment),) = roster.fill()
    assert isinstance(assignment, StageAssignment) and (worker, assignment.stage) == (9, 1)
    assert roster.unfit_workers == [] and roster.take(loaded(1, 64)) == [(9, PoolSize(10))]


def test_all_stages_keep_the_rows_of_as_many_pages() -> None:
    roster = roster_of(2)
    for message in (hello(0), hello(1), loaded(0), loaded(1)):
        roster.take(message)
    roster.take(msgspec.structs.replace(ready(0), log_pages=7))
    with pytest.raises(ProtocolError, match=r"stage 1 .* 6 pages.* 7"):
        roster.take(msgspec.structs.replace(ready(1), log_pages=6))
    roster.take(msgspec.structs.replace(ready(1), log_pages=7))
    capacity = roster.capacity()
    assert capacity is not None and capacity.log_pages == 7


def test_a_worker_of_another_version_is_refused_by_name() -> None:
    other = msgspec.structs.replace(hello(0), version="9.9")
    with pytest.raises(ConfigurationError, match=r"worker 0 on here .* 9\.9"):
        roster_of(1).take(other)


def test_a_worker_with_another_transformers_is_refused_where_its_code_computes_layers() -> None:
    probed = json.dumps({"transformers_version": "5.19.0"})
    same, other = (
        msgspec.structs.replace(hello(0), transformers=one) for one in ("5.19.0", "5.20.0")
    )
    roster_of(1).take(other)
    roster_of(1, generic_spec=probed).take(same)
    with pytest.raises(ConfigurationError, match=r"worker 0 on here has transformers 5\.20\.0"):
        roster_of(1, generic_spec=probed).take(other)


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([hello(0), hello(0)], "worker 0 greeted twice"),
        ([hello(0), loaded(1)], "StageLoaded arrived from a worker that is unknown; assigned"),
        ([hello(0), ready(0)], "StageReady arrived from a worker that is assigned; sized was due"),
        ([hello(0), loaded(0), loaded(0)], "StageLoaded .* is sized; assigned was due"),
        ([MeasuredCosts(0, COSTS)], "MeasuredCosts .* is unknown; measuring was due"),
        (
            [
                StageReport(
                    stage=0, step_id=0, epoch=0, timing=StageTiming(*[0.0] * 7), token_ids=()
                )
            ],
            "a worker that is not ready sent StageReport",
        ),
    ],
)
def test_a_message_that_is_not_the_workers_next_is_a_protocol_error(
    messages: list[FromWorker], found: str
) -> None:
    roster = roster_of(1)
    with pytest.raises(ProtocolError, match=found):
        for message in messages:
            roster.take(message)


def test_all_stages_use_as_many_state_slots_as_the_one_with_the_least_room() -> None:
    roster = roster_of(2)
    for message in (hello(0), hello(1)):
        roster.take(message)
    one, other = (
        msgspec.structs.replace(loaded(stage), num_state_slots=slots)
        for stage, slots in ((0, 8), (1, 3))
    )
    roster.take(one)
    assert [size for _, size in roster.take(other)] == [PoolSize(10, 3)] * 2
    roster.take(ready(0))
    roster.take(ready(1))
    capacity = roster.capacity()
    assert capacity is not None and capacity.num_state_slots == 3
    roster.take(hello(7))
    roster.lose(1)
    roster.take(hello(9))
    assert roster.take(msgspec.structs.replace(loaded(1, 64), num_state_slots=2)) == []
    ((_, reason),) = roster.unfit_workers
    assert "room for 64 KV pages and 2 state slots of stage 1, the pipeline uses 10 KV" in reason
