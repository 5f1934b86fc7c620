"""Decode servers are told where each layer of a prefill server is."""

from types import SimpleNamespace

from sgl_pipeline.managers.disaggregation.offering_stages import OfferingStages
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import PeerStage


def test_stages_are_where_their_workers_are_and_have_the_layers_of_the_plan() -> None:
    core = SimpleNamespace(plan=StagePlan(0, (2, 4)))
    hosts = {3: "", 5: "other:20000", 6: ""}
    roster = SimpleNamespace(workers_of_stages=[3, 5], host_address=hosts.get)
    stages = OfferingStages(core, roster)  # type: ignore[arg-type]
    before = stages()
    assert before == (
        PeerStage("/offers-3", (0, 2)),
        PeerStage("other:20000/offers-5", (2, 6)),
    )
    roster.workers_of_stages = [5]
    assert stages() == before
    core.plan, roster.workers_of_stages = StagePlan(1, (5, 1)), [6, 5]
    assert [one.layers for one in stages()] == [(0, 5), (5, 6)]
    assert stages()[0].address == "/offers-6"
