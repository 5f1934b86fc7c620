"""What happened in a run that held, in numbers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.recovery import RecoveryRecord
from sgl_pipeline.records.move_record import MoveOutcome


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that held. `digest` is over all that happened: equal runs have equal ones."""

    seed: int
    digest: int
    num_events: int
    num_steps: int
    num_retractions: int
    num_aborts: int
    num_moves: int
    num_abandoned_moves: int
    num_lost_workers: int
    num_leaves: int
    num_handovers: int
    num_recoveries: int
    num_refusals: int
    num_unfit: int
    num_shrunk: int
    num_grown: int
    num_replayed_tokens: int
    has_given_up: bool
    has_tier: bool
    num_saved_tokens: int
    num_loaded_tokens: int
    num_broken_pages: int
    # Turns in which a layer move began and cut transfers off, and transfers that other stages lost.
    num_moves_in_transfers: int
    num_lost_transfers: int
    # Pages that the store evicted between an answer and the load, nodes to be saved that lost their
    # tails to eviction, and tokens that were not loaded because a stage owed pages before them.
    num_evicted_reads: int
    num_cut_due_nodes: int
    num_owed_tokens: int
    num_drafted_tokens: int
    num_accepted_drafts: int
    # How often states had to wait for their target when layers moved or a stage was handed over.
    num_full_links: int

    @property
    def counts(self) -> Counter[str]:
        """All numbers that add up over seeds, by their names."""
        return Counter({name: value for name, value in asdict(self).items() if name not in _OF_ONE})


_OF_ONE = ("seed", "digest")


def outcome_of(
    core: PipelineCore,
    recoveries: Sequence[RecoveryRecord],
    *,
    has_given_up: bool,
    has_tier: bool,
    **counted: int,
) -> Outcome:
    """What `core` and its `recoveries` have counted, and what the driver has `counted` itself."""
    scheduler = core.scheduler
    log = scheduler.lost_pages.log
    moves = [one.outcome for one in core.migration.history]
    tier = scheduler.tier.counts
    return Outcome(
        num_steps=scheduler.next_step_id,
        num_retractions=scheduler.num_retractions,
        num_moves=moves.count(MoveOutcome.DONE),
        num_abandoned_moves=moves.count(MoveOutcome.ABANDONED),
        num_recoveries=sum(not one.is_planned for one in recoveries),
        num_handovers=sum(one.is_planned for one in recoveries),
        num_shrunk=sum(one.num_stages < one.stages_before for one in recoveries),
        num_grown=sum(one.num_stages > one.stages_before for one in recoveries),
        num_replayed_tokens=sum(log.replayed_tokens) if log is not None else 0,
        has_given_up=has_given_up,
        has_tier=has_tier,
        num_saved_tokens=tier.saved_tokens,
        num_loaded_tokens=tier.loaded_tokens,
        num_broken_pages=tier.num_broken_pages,
        num_owed_tokens=tier.unfulfilled.get("owed", 0),
        num_drafted_tokens=scheduler.drafts.num_drafted,
        num_accepted_drafts=scheduler.drafts.num_accepted,
        **counted,
    )
