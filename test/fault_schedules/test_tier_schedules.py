"""Schedules with a store beyond the pool find what is broken on purpose."""

from collections.abc import Callable, Iterator, Set
from itertools import islice

import pytest
from fault_schedules.world import has_tier, run_seed
from support.mutations import Mutation, require_found

from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling import RecoveryLog, StepScheduler
from sgl_pipeline.scheduling.kv_tier import KvTier
from sgl_pipeline.scheduling.page_loads import PageLoad, PageLoads
from sgl_pipeline.scheduling.page_run import PageRun
from sgl_pipeline.scheduling.page_saves import PageSave, PageSaves
from sgl_pipeline.scheduling.page_wishes import PageWishes
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.wire.store_orders import SavePages, StoreOrder, StorePlace

# Every mutation below is found much sooner.
MOST_SEEDS = 300


def seeds_with_tiers(count: int) -> Iterator[int]:
    return islice(filter(has_tier, range(100 * count)), count)


def one_stage_is_enough_to_save(patch: pytest.MonkeyPatch) -> None:
    take = PageSaves.take
    patch.setattr(PageSaves, "take", lambda self, report, num_stages: take(self, report, 1))


def one_stage_is_enough_to_load(patch: pytest.MonkeyPatch) -> None:
    take = PageLoads.take
    patch.setattr(PageLoads, "take", lambda self, report, num_stages: take(self, report, 1))


def pages_that_one_stage_could_not_load_count(patch: pytest.MonkeyPatch) -> None:
    end = PageLoads._end

    def mutated(self: PageLoads, load: PageLoad) -> None:
        most = max(load.reports.values(), key=lambda report: report.num_pages)
        load.reports = {most.stage: most}
        end(self, load)

    patch.setattr(PageLoads, "_end", mutated)


def pages_that_one_stage_could_not_save_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("sgl_pipeline.scheduling.page_saves.min", max, raising=False)


def a_page_that_is_saved_may_be_evicted(patch: pytest.MonkeyPatch) -> None:
    start, end, cancel = PageSaves._start, PageSaves._end, PageSaves.cancel

    def started(self: PageSaves, *more: object) -> PageSave:
        save = start(self, *more)  # type: ignore[arg-type]
        self._storage.unlock(save.node)
        return save

    def ended(self: PageSaves, save: PageSave) -> None:
        if save.node.run is not None:
            self._storage.lock(save.node)
            end(self, save)

    def cancelled(self: PageSaves) -> None:
        for transfer, save in [*self._saves.items()]:
            if save.node.run is None:
                del self._saves[transfer]
            else:
                self._storage.lock(save.node)
        cancel(self)

    patch.setattr(PageSaves, "_start", started)
    patch.setattr(PageSaves, "_end", ended)
    patch.setattr(PageSaves, "cancel", cancelled)


def stages_do_not_hear_of_an_interrupt(patch: pytest.MonkeyPatch) -> None:
    interrupt = KvTier.interrupt

    def mutated(self: KvTier) -> None:
        interrupt(self)
        self._is_stale = False

    patch.setattr(KvTier, "interrupt", mutated)


def a_late_report_is_an_error(patch: pytest.MonkeyPatch) -> None:
    interrupt = KvTier.interrupt

    def mutated(self: KvTier) -> None:
        interrupt(self)
        self._first_transfer = 0

    patch.setattr(KvTier, "interrupt", mutated)


def transfers_go_on_while_layers_move(patch: pytest.MonkeyPatch) -> None:
    next_orders = KvTier.next_orders

    def mutated(
        self: KvTier, now_s: float, times: object, *, may_transfer: bool
    ) -> Iterator[StoreOrder]:
        return next_orders(self, now_s, times, may_transfer=True)  # type: ignore[arg-type]

    patch.setattr(KvTier, "next_orders", mutated)


def a_lost_stage_cuts_no_transfer_off(patch: pytest.MonkeyPatch) -> None:
    halt = PipelineCore.halt

    def mutated(self: PipelineCore, *more: object) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(KvTier, "interrupt", lambda tier: None)
            halt(self, *more)  # type: ignore[arg-type]

    patch.setattr(PipelineCore, "halt", mutated)


def a_flush_cuts_no_transfer_off(patch: pytest.MonkeyPatch) -> None:
    flush_cache = StepScheduler.flush_cache

    def mutated(self: StepScheduler) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(KvTier, "interrupt", lambda tier: None)
            return flush_cache(self)

    patch.setattr(StepScheduler, "flush_cache", mutated)


def loaded_pages_are_thought_to_have_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecoveryLog, "fill", lambda self, pages: None)


def pages_that_a_stage_owes_are_saved(patch: pytest.MonkeyPatch) -> None:
    next_orders = PageSaves.next_orders

    def mutated(
        self: PageSaves, owed: Set[int], room: int, next_transfer: Callable[[], int]
    ) -> Iterator[SavePages]:
        return next_orders(self, set(), room, next_transfer)

    patch.setattr(PageSaves, "next_orders", mutated)


def pages_are_filled_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """Each has what a page of the same request must have."""
    start = PageLoads._start_from_store

    def mutated(self: PageLoads, *more: object, is_owed: bool) -> PageLoad | None:
        load = start(self, *more, is_owed=is_owed)  # type: ignore[arg-type]
        if load is not None:
            load.records = load.records[::-1]
        return load

    patch.setattr(PageLoads, "_start_from_store", mutated)


def records_are_committed_to_another_store(patch: pytest.MonkeyPatch) -> None:
    use = KvTier.use

    def mutated(self: KvTier, place: StorePlace | None, rules: TierRules) -> None:
        commits = self.commits[:]
        use(self, place, rules)
        self.commits += commits

    patch.setattr(KvTier, "use", mutated)


def requests_wait_for_a_store_that_is_silent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageWishes, "give_up_late", lambda self, now_s, rules: None)


def requests_wait_for_a_load_that_hangs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageLoads, "give_up_late", lambda self, now_s, rules: None)


def a_load_that_ended_keeps_its_claim(patch: pytest.MonkeyPatch) -> None:
    end = PageLoads._end

    def mutated(self: PageLoads, load: PageLoad) -> None:
        load.is_claimed = False
        end(self, load)

    patch.setattr(PageLoads, "_end", mutated)


def a_cancelled_load_keeps_its_pages(patch: pytest.MonkeyPatch) -> None:
    cancel = PageLoads.cancel

    def mutated(self: PageLoads) -> list[Request]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self._pages, "take_back", lambda match, pages: None)
            return cancel(self)

    patch.setattr(PageLoads, "cancel", mutated)


def another_store_is_thought_to_have_the_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageSaves, "begin", lambda self, policy: self._due.clear())


def all_before_a_loaded_page_is_thought_to_be_saved(patch: pytest.MonkeyPatch) -> None:
    loaded = PageSaves.loaded
    patch.setattr(
        PageSaves, "loaded", lambda self, path, num_pages: loaded(self, path, num_pages + 1)
    )


def another_page_than_the_missing_one_is_dropped(patch: pytest.MonkeyPatch) -> None:
    end = PageLoads._end

    def mutated(self: PageLoads, load: PageLoad) -> None:
        load.records = [*load.records[1:], load.records[0]]
        end(self, load)

    patch.setattr(PageLoads, "_end", mutated)


def what_is_left_of_a_node_that_was_due_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    evicted = PageSaves.evicted

    def mutated(self: PageSaves, node: RadixNode, run: PageRun) -> None:
        self._due.pop(node, None)
        evicted(self, node, run)

    patch.setattr(PageSaves, "evicted", mutated)


def pages_that_are_due_are_forgotten_in_an_interrupt(patch: pytest.MonkeyPatch) -> None:
    cancel = PageSaves.cancel

    def mutated(self: PageSaves) -> None:
        cancel(self)
        self._due.clear()

    patch.setattr(PageSaves, "cancel", mutated)


MUTATIONS: tuple[Mutation, ...] = (
    one_stage_is_enough_to_save,
    one_stage_is_enough_to_load,
    pages_that_one_stage_could_not_load_count,
    pages_that_one_stage_could_not_save_count,
    a_page_that_is_saved_may_be_evicted,
    stages_do_not_hear_of_an_interrupt,
    a_late_report_is_an_error,
    transfers_go_on_while_layers_move,
    a_lost_stage_cuts_no_transfer_off,
    a_flush_cuts_no_transfer_off,
    loaded_pages_are_thought_to_have_rows,
    pages_that_a_stage_owes_are_saved,
    pages_are_filled_in_another_order,
    records_are_committed_to_another_store,
    requests_wait_for_a_store_that_is_silent,
    requests_wait_for_a_load_that_hangs,
    a_load_that_ended_keeps_its_claim,
    a_cancelled_load_keeps_its_pages,
    another_store_is_thought_to_have_the_pages,
    all_before_a_loaded_page_is_thought_to_be_saved,
    another_page_than_the_missing_one_is_dropped,
    what_is_left_of_a_node_that_was_due_is_forgotten,
    pages_that_are_due_are_forgotten_in_an_interrupt,
)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_what_is_broken_on_purpose_is_found(
    mutation: Mutation, request: pytest.FixtureRequest
) -> None:
    require_found(mutation, request, run_seed, seeds_with_tiers(MOST_SEEDS))
