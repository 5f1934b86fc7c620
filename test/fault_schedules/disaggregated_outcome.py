"""What happened in a run with prefill and decode apart that held, in numbers."""

from collections import Counter
from dataclasses import dataclass

from fault_schedules.virtual_server import VirtualServer

from sgl_pipeline.disaggregation.decode_rooms import DecodeRooms
from sgl_pipeline.records.move_record import MoveOutcome


@dataclass(frozen=True, slots=True)
class DisaggregatedOutcome:
    """A run that held. `digest` is over all that happened: equal runs have equal ones."""

    seed: int
    digest: int
    counts: Counter[str]


def counts_of(server: VirtualServer) -> Counter[str]:
    """What has happened on one server."""
    assert server.core is not None and server.recovery is not None and server.rooms is not None
    scheduler, ends = server.core.scheduler, server.rooms.rooms
    rooms, offloaded, ended_early = ends.counts, 0, 0
    if isinstance(ends, DecodeRooms):
        offloaded, ended_early = ends.offloading.num_offloaded, ends.offloading.num_ended_early
    moves = [one.outcome for one in server.core.migration.history]
    return Counter(
        steps=scheduler.next_step_id,
        retractions=scheduler.num_retractions,
        moves=moves.count(MoveOutcome.DONE),
        lost_workers=len(server.pool.lost),
        recoveries=sum(not one.is_planned for one in server.recovery.history),
        handovers=sum(one.is_planned for one in server.recovery.history),
        transferred=rooms.num_transferred,
        bootstrap_failed=rooms.num_bootstrap_failed,
        transfer_failed=rooms.num_transfer_failed,
        computed_here=rooms.num_computed_here,
        offloaded=offloaded,
        ended_early=ended_early,
        stores=server.tier is not None,
        wrong_drafts=scheduler.drafts.num_drafted - scheduler.drafts.num_accepted,
        accepted_drafts=scheduler.drafts.num_accepted,
    )
