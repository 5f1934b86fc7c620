"""What a viewer of the live page gets of a tick."""

import json
from typing import Any

import msgspec
from support.moves import movable_core, stages_get_ready, stages_switch
from support.step_records import rooms_state, step_record, tier_state

from sgl_pipeline.managers.channels.live_channel import LiveTick, QueueLine
from sgl_pipeline.managers.reports.live_events import describe_tick, server_sent_event
from sgl_pipeline.pipeline.draft_state import DraftState
from sgl_pipeline.pipeline.pipeline_state import OffloadState, PipelineState
from sgl_pipeline.records.recovery_record import LostWorker, RecoveryRecord
from sgl_pipeline.scheduling.tenant_state import TenantState
from sgl_pipeline.throttle.step_curve import CURVE_DECODES

# The order in which the page's model.js takes a step and its stages apart.
STEP = (
    *("id", "epoch", "prefill", "decodes", "drafts", "waiting", "running", "free"),
    *("prefill_budget", "decode_budget", "budget_ms", "bound", "start", "booked", "stages"),
)


def told(state: PipelineState, queue: tuple[QueueLine, ...] | None = None) -> dict[str, Any]:
    tick = LiveTick(state=state, queue=queue, followed=(), carried=(), missed_ticks=3)
    event = server_sent_event("tick", describe_tick(tick, num_viewers=2))
    name, data, *rest = event.decode().split("\n")
    assert name == "event: tick" and rest == ["", ""]
    return dict(json.loads(data.removeprefix("data: ")))


def test_a_step_has_its_moments_in_microseconds_since_it_was_scheduled() -> None:
    core = movable_core(2, 2)
    event = told(core.state(50.0).showing((step_record(7),), ()))
    (values,) = event["steps"]
    step = dict(zip(STEP, values, strict=True))
    assert (step["id"], step["prefill"], step["decodes"], step["drafts"]) == (7, 5, 1, 0)
    assert (step["start"], step["booked"]) == (10_000_000, 11_000_500)
    # free, inputs, activations, done, sent: of `step_records.timing`
    assert step["stages"] == [[0, 0, 500, 2500, 2500], [0, 0, 1500, 3500, 3500]]
    assert event["now"] == 50_000_000 and event["viewers"] == 2 and event["missed"] == 3


def test_drafts_are_told_where_the_server_has_any() -> None:
    state = movable_core(2, 2).state(50.0)
    assert "drafts" not in told(state)
    counts = {"most_each": 11, "steps": 4}
    drafts = DraftState(**counts, drafted_tokens=20, accepted_tokens=6, rule="time", reason="why")
    event = told(msgspec.structs.replace(state, drafts=drafts, decodes=100))
    assert event["decoded"] == 106
    numbers = counts | {"drafted": 20, "accepted": 6}
    assert event["drafts"] == numbers | {"rule": "time", "why": "why"}


def test_state_slots_are_told_where_the_model_has_states() -> None:
    state = movable_core(2, 2).state(50.0)
    assert "state_slots" not in told(state)
    state = msgspec.structs.replace(
        state, state_slots=8, free_state_slots=3, evictable_state_slots=2
    )
    event = told(state)
    assert event["state_slots"] == [3, 2, 8]


def test_an_ended_request_has_its_times_and_nothing_that_it_said() -> None:
    event = told(movable_core(2, 2).state(50.0).showing((step_record(7),), ()))
    assert event["ended"] == [["d", 11_000_000, 3, 1, 2, 0, 1000.0, 1500.0, 3000.0]]


def test_the_step_curve_is_there_once_step_times_are_known() -> None:
    state = movable_core(2, 2).state(50.0)
    for curve in (None, ()):
        tick = LiveTick(
            state=state, queue=None, curve=curve, followed=(), carried=(), missed_ticks=0
        )
        assert "curve" not in describe_tick(tick, 1)
    known = tuple(float(decodes) + 0.12345 for decodes in CURVE_DECODES)
    tick = LiveTick(state=state, queue=None, curve=known, followed=(), carried=(), missed_ticks=0)
    decodes, times_ms = describe_tick(tick, 1)["curve"]
    assert decodes == CURVE_DECODES
    assert times_ms == [round(one + 0.123, 3) for one in CURVE_DECODES]


def test_moves_and_queue_are_there_only_when_told() -> None:
    core = movable_core(2, 2)
    assert not {"moves", "queue"} & set(told(core.state(50.0)))
    core.migration.move_to((1, 3), 50.0)
    core.orders_before_step(50.0)
    line = QueueLine("a", 1.5, 8, 0, "order", "1 waiting request comes first", "b")
    event = told(core.state(50.5), (line,))
    assert event["queue"] == [["a", 1.5, 8, 0, "order", "1 waiting request comes first", "b"]]
    (move,) = event["moves"]
    assert (move["began"], move["switched"], move["over"]) == (50_000_000, None, None)
    stages_get_ready(core, 51.0)
    core.orders_before_step(51.0)
    stages_switch(core, 52.0)
    (move,) = told(core.state(53.0))["moves"]
    assert (move["switched"], move["over"], move["after"]) == (51_000_000, 52_000_000, [1, 3])


def test_a_recovery_is_a_mark_that_says_what_was_lost() -> None:
    lost = LostWorker(3, 1, "it has ended")
    under_way = RecoveryRecord(began_s=49.0, incarnation=1, lost=(lost,))
    over = msgspec.structs.replace(under_way, ended_s=49.5, num_tokens=80)
    core = movable_core(2, 2)
    assert "recoveries" not in told(core.state(50.0))
    marks = told(core.state(50.0, recoveries=(over, under_way)))["recoveries"]
    assert [(mark["began"], mark["over"]) for mark in marks] == [
        (49_000_000, 49_500_000),
        (49_000_000, None),
    ]
    assert marks[0]["text"] == "stage 1 lost, 80 tokens again"
    fewer = msgspec.structs.replace(over, num_stages=1, stages_before=2)
    more = msgspec.structs.replace(over, lost=(), num_stages=2, stages_before=1)
    marks = told(core.state(50.0, recoveries=(fewer, more)))["recoveries"]
    assert marks[0]["text"] == "stage 1 lost, 1 stages in place of 2, 80 tokens again"
    assert marks[1]["text"] == "a worker came, 2 stages in place of 1, 80 tokens again"


def test_a_store_is_told_while_one_is_attached() -> None:
    state = movable_core(2, 2).state(50.0)
    assert "store" not in told(state)
    assert "store" not in told(msgspec.structs.replace(state, tier=tier_state(backend=None)))
    store = told(msgspec.structs.replace(state, tier=tier_state()))["store"]
    assert store == {
        "backend": "file",
        "waiting": [10, 20, 30],
        "loading_ms": 250.0,
        "under_way": [4, 5],
        "lookups": 8,
        "hits": 6,
        "tokens": [800, 700],
        "bytes": [3_000_000_000, 1_000_000_000],
        "seconds": [1.5, 4.0],
        "missed": {"deadline": 60, "slower_than_compute": 40},
        "dropped": {"pressure": 50, "failed": 6},
        "broken_pages": 2,
    }


def test_rooms_are_told_of_a_server_that_has_a_role() -> None:
    state = movable_core(2, 2).state(50.0)
    assert "rooms" not in told(state)
    rooms = told(msgspec.structs.replace(state, rooms=rooms_state()))["rooms"]
    assert rooms == {
        "mode": "decode",
        "peers": 2,
        "waiting": 3,
        "moving": 4,
        "held_pages": 0,
        "promised_pages": 25,
        "pending_pages": 10,
        "done": 8,
        "done_ms": 250.0,
        "loaded_pages": 160,
        "failed": [2, 1],
        "computed_here": 1,
        "offload": None,
    }
    offload = OffloadState(requests=2, tokens=60, offloaded=5, ended_early=1)
    state_with = msgspec.structs.replace(state, rooms=rooms_state(offload=offload))
    assert told(state_with)["rooms"]["offload"] == {
        "rooms": 0,
        "pages": 0,
        "requests": 2,
        "tokens": 60,
        "offloaded": 5,
        "ended_early": 1,
    }
    before = rooms_state(transferred=0, transfer_s=0.0)
    assert told(msgspec.structs.replace(state, rooms=before))["rooms"]["done_ms"] == 0.0


def test_tenants_are_told_of_where_they_share_the_server() -> None:
    state = movable_core(2, 2).state(50.0)
    assert "tenants" not in told(state)
    tenants = (
        TenantState(name="a", weight=3.0, unit="ms", service=1234.56, lead=7.89, waiting=1),
        TenantState(name="other", weight=1.0, unit="ms", service=2.0, running=4, pages=9),
    )
    assert told(msgspec.structs.replace(state, tenants=tenants))["tenants"] == [
        ["a", 3.0, "ms", 1234.6, 7.9, 1, 0, 0],
        ["other", 1.0, "ms", 2.0, None, 0, 4, 9],
    ]
