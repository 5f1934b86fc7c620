"""A virtual server goes on where a real one does, whose loop looks at everything ten times a
second."""

from random import Random

import pytest
from fault_schedules.fake_front import Client, FakeFront
from fault_schedules.fake_moves import FakeSite
from fault_schedules.fake_offers import FakePeers
from fault_schedules.fake_transfers import FakeStores
from fault_schedules.faulty_store import FaultyStore, RightPages, StoreTempo
from fault_schedules.outsiders import Outsiders
from fault_schedules.tier_driver import TierDriver
from fault_schedules.virtual_server import VirtualServer
from fault_schedules.virtual_time import EventLoop
from fault_schedules.worker_pool import PoolSizes

from sgl_pipeline.args import MigrationArgs, PipelineArgs, SchedulingArgs, StageArgs
from sgl_pipeline.records.move_record import MoveOutcome
from sgl_pipeline.requests import GREEDY, Request, StopRules
from sgl_pipeline.wire.store_orders import StorePlace

NUM_LAYERS = 4
SOUND = StoreTempo(
    read_s=0.01,
    write_s=0.01,
    answer_s=0.01,
    failure_chance=0.0,
    hang_chance=0.0,
    silence_chance=0.0,
    eviction_chance=0.0,
)


def test_pages_are_saved_after_a_move_that_took_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    place = StorePlace(backend="file", address="here", digest="fake", save_bytes_per_s=10**9)
    monkeypatch.setattr(FakeSite, "has_loaded", lambda self: False)
    monkeypatch.setattr(Outsiders, "begin", lambda self: None)
    monkeypatch.setattr(TierDriver, "begin", lambda self: self._begin_use(place))
    request = Request("0", list(range(1, 5)), GREEDY, StopRules(max_new_tokens=2))
    client = Client(request, arrives_s=0.0, leaves_after_s=None, compile_s=0.0)
    loop, rng = EventLoop(), Random(0)
    front, stores = FakeFront([client], NUM_LAYERS, loop), FakeStores(rng)
    right = RightPages([client], NUM_LAYERS, page_size=1)
    stores.by_address["here"] = FaultyStore(rng, right, SOUND, groups_layers=False)
    server = VirtualServer(
        "",
        loop,
        rng,
        rng,
        PipelineArgs(
            stages=StageArgs(num_stages=2, model_path="fake", dtype="float32"),
            scheduling=SchedulingArgs(page_size=1),
            migration=MigrationArgs(mode="manual", timeout_s=2.0),
            run_directory="virtual",
        ),
        PoolSizes(num_pages=16, is_room_short=False, log_pages=None),
        front,
        num_layers=NUM_LAYERS,
        stores=stores,
        peers=FakePeers(rng),
        hurt_chance=0.0,
        note=lambda *facts: None,
        has_faults=False,
    )

    def ask_while_layers_move() -> None:
        assert server.outsiders is not None
        server.outsiders._move_layers()
        server.outsiders.arrive(client)

    loop.after(10.0, ask_while_layers_move)
    server.start()
    loop.run(10_000, server.check)
    assert server.core is not None
    assert [one.outcome for one in server.core.migration.history] == [MoveOutcome.ABANDONED]
    server.check_end()
    front.check()
    assert server.core.scheduler.tier.counts.saved_tokens == 5
