"""Builds the parts of a `StepScheduler` and wires them to each other: queue and order, pages and
their tiers, shares, drafts.

A new part is made in `build_parts`. It has a field of `SchedulerParts` only if the scheduler itself
calls it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.requests import FinishReason, Request
from sgl_pipeline.scheduling.admission import Admission
from sgl_pipeline.scheduling.age_limit import RequestAges
from sgl_pipeline.scheduling.cache_order import order_maker
from sgl_pipeline.scheduling.decode_reserve import DecodeReserve
from sgl_pipeline.scheduling.drafts import Drafts
from sgl_pipeline.scheduling.entry_rules import EntryRules
from sgl_pipeline.scheduling.explanation import RequestExplainer
from sgl_pipeline.scheduling.fair_shares import FairShares
from sgl_pipeline.scheduling.kv_tier import KvTier
from sgl_pipeline.scheduling.load_meter import LoadMeter
from sgl_pipeline.scheduling.lost_pages import LostPages
from sgl_pipeline.scheduling.offloaded_requests import OffloadedRequests
from sgl_pipeline.scheduling.page_pool import PagePool
from sgl_pipeline.scheduling.pausing import Pausing
from sgl_pipeline.scheduling.preemption import Preemption
from sgl_pipeline.scheduling.radix_demand import RadixDemand
from sgl_pipeline.scheduling.radix_storage import RadixStorage
from sgl_pipeline.scheduling.radix_tree import RadixTree
from sgl_pipeline.scheduling.recovery_log import RecoveryLog
from sgl_pipeline.scheduling.request_limits import RequestLimits
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.scheduling.snapshot_demand import SnapshotDemand
from sgl_pipeline.scheduling.snapshot_slots import SnapshotSlots
from sgl_pipeline.scheduling.snapshot_storage import SnapshotStorage
from sgl_pipeline.scheduling.state_slots import StateSlots
from sgl_pipeline.scheduling.state_snapshots import StateSnapshots
from sgl_pipeline.scheduling.step_results import StepResults
from sgl_pipeline.scheduling.steps_in_flight import StepsInFlight
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue
from sgl_pipeline.scheduling.waiting_reasons import WaitingReasons


@dataclass(frozen=True)
class SchedulerParts:
    """The parts that a `StepScheduler` calls; `shares` is None where there is one tenant."""

    entry_rules: EntryRules
    admission: Admission
    waiting: WaitingQueue
    running: RunningRequests
    pages: RequestPages
    in_flight: StepsInFlight
    preemption: Preemption
    decode_reserve: DecodeReserve
    meter: LoadMeter
    explainer: RequestExplainer
    results: StepResults
    ages: RequestAges
    pausing: Pausing
    lost_pages: LostPages
    tier: KvTier
    offloaded: OffloadedRequests
    shares: FairShares | None
    drafts: Drafts
    state_slots: StateSlots


def build_parts(
    args: SchedulingArgs,
    *,
    num_pages: int,
    num_stages: int,
    context_length: int,
    log: RecoveryLog | None,
    finish: Callable[[Request, FinishReason], None],
) -> SchedulerParts:
    """The parts of one scheduler, empty.

    Args:
        num_pages: pages of the pool.
        context_length: most tokens of a request, prompt and output.
        log: as `StepScheduler` has it.
        finish: ends a request that a step's result completes.
    """
    limits = RequestLimits(context_length, num_pages * args.page_size)
    in_flight = StepsInFlight(num_stages + args.extra_steps_in_flight)
    tree = RadixTree(args.page_size, enabled=args.radix_cache)
    demand, pages = _demand_and_pages(args, tree, PagePool(num_pages))
    storage = pages.storage
    own_order = order_maker(args, tree, demand)
    shares = FairShares.of(args, own_order)
    order = own_order() if shares is None else shares.order
    waiting = WaitingQueue(demand, parks=not args.duplicate_prefills, order=order)
    running = RunningRequests()
    held = waiting, running, pages
    victims = None if shares is None else shares.share_out(*held)
    preemption = Preemption(running, waiting, pages, victims)
    tier = KvTier(tree, demand, storage, pages, waiting, running, log)
    offloaded = OffloadedRequests(waiting, running, preemption, tier.arrivals)
    drafts = Drafts(args.draft_tokens, pages, running)
    reserve = DecodeReserve(args.page_size, in_flight.limit)
    ages = RequestAges(args.waiting_timeout_s, args.running_timeout_s)
    return SchedulerParts(
        entry_rules=EntryRules(args, limits, waiting),
        admission=Admission(
            *held,
            preemption,
            args.max_running_requests,
            args.preemption_threshold,
            tier.on_hit,
            tier.held,
            shares,
        ),
        waiting=waiting,
        running=running,
        pages=pages,
        in_flight=in_flight,
        preemption=preemption,
        decode_reserve=reserve,
        meter=LoadMeter(*held, in_flight, reserve, tier),
        explainer=RequestExplainer(WaitingReasons(args, *held, tier, shares)),
        results=StepResults(in_flight, running, pages, offloaded, drafts, finish),
        ages=ages,
        pausing=Pausing(running, preemption),
        lost_pages=LostPages(running, preemption, pages, ages, log),
        tier=tier,
        offloaded=offloaded,
        shares=shares,
        drafts=drafts,
        state_slots=pages.state_slots,
    )


def _demand_and_pages(
    args: SchedulingArgs, tree: RadixTree, pool: PagePool
) -> tuple[RadixDemand, RequestPages]:
    """The demand and the pages of a cache with snapshots, where the model has states."""
    slots = StateSlots(args.num_state_slots)
    if not args.num_state_slots or not args.radix_cache:
        demand = RadixDemand(tree)
        return demand, RequestPages(pool, RadixStorage(tree, demand), demand, slots)
    snapshot_demand = SnapshotDemand(tree)
    storage = SnapshotStorage(tree, snapshot_demand, slots)
    giving = SnapshotSlots(slots, storage, pool.free)
    snapshots = StateSnapshots(slots, giving, storage, snapshot_demand, args.snapshot_interval)
    return snapshot_demand, RequestPages(pool, storage, snapshot_demand, slots, snapshots)
