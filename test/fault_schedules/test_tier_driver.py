"""The driver of a virtual server's store looks at the clock as long as there is a reason to."""

from random import Random

import pytest
from fault_schedules.fake_transfers import FakeStores
from fault_schedules.faulty_store import FaultyStore, RightPages, random_tempo
from fault_schedules.tier_driver import ADDRESSES, TierDriver
from fault_schedules.virtual_time import EventLoop
from support.pipelines import FakePipeline, make_request, new_scheduler

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.wire.store_orders import StorePlace

MOST_POLLS, POLLS_A_STEP, MOST_STEPS = 20, 15, 5


def test_it_looks_as_long_as_steps_run_and_a_while_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fault_schedules.tier_driver.MOST_POLLS", MOST_POLLS)
    random, loop = Random(0), EventLoop()
    args = SchedulingArgs(page_size=4, max_running_requests=1)
    pipeline = FakePipeline(new_scheduler(args, num_pages=20, num_stages=1), args.page_size)
    store = FaultyStore(random, RightPages([], 1, 4), random_tempo(random), groups_layers=False)
    stores = FakeStores(random, {ADDRESSES[0]: store})
    num_turns = 0

    def turn() -> None:
        nonlocal num_turns
        num_turns += 1
        driver.go_on()
        if num_turns % POLLS_A_STEP == 0 and len(pipeline.microbatches) < MOST_STEPS:
            pipeline.fill()
            pipeline.complete()

    driver = TierDriver(pipeline.core, stores, loop, random, turn=turn, note=lambda *facts: None)
    place = StorePlace(backend="file", address=ADDRESSES[0], digest="fake", save_bytes_per_s=1)
    pipeline.scheduler.tier.use(place, TierRules(least_tokens=1_000))
    driver._place = place
    for name in ("runs", "waits"):
        pipeline.scheduler.add(make_request(name, [1, 2, 3], max_new_tokens=30))
    turn()
    loop.run(1_000, check=lambda: None)
    assert len(pipeline.microbatches) == MOST_STEPS
    # The next turn after the last step sees it.
    assert num_turns == MOST_STEPS * POLLS_A_STEP + 1 + MOST_POLLS
