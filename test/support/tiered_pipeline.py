"""A `LocalPipeline` with a store: real stages, real objects, real records.

In place of the store's client the pipeline asks and tells the store itself, between steps.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from support.local_pipeline import LocalPipeline

from sgl_pipeline.kv_store.open_store import open_pages
from sgl_pipeline.pp_runner.page_store.page_transfers import PageTransfers
from sgl_pipeline.pp_runner.page_store.stage_offers import PeerSite
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.step_work import StepTimes
from sgl_pipeline.wire.move_orders import SwitchPlan
from sgl_pipeline.wire.store_orders import LoadPages, SavePages, StorePlace, UseStore, offer_door

DIGEST = "ukv1-00000000000000aa"
RULES = TierRules(least_tokens=4, wait_policy="wait_complete")


def file_place(folder: Path) -> StorePlace:
    return StorePlace(backend="file", address=str(folder), digest=DIGEST, save_bytes_per_s=1 << 30)


def host_place(num_pages: int) -> StorePlace:
    return StorePlace(
        backend="host", address="", digest=DIGEST, save_bytes_per_s=1 << 30, host_pages=num_pages
    )


def _never(start: int, num_pages: int, load_s: float, times: StepTimes | None) -> bool:
    return False


class TieredPipeline(LocalPipeline):
    """Requests come back to what earlier pipelines have left in a folder, or this one elsewhere.

    Args:
        store: the folder, or another store.
        run_directory: where peers find the doors of the stages.
    """

    def __init__(
        self,
        model_path: Path,
        layer_counts: Sequence[int],
        store: Path | StorePlace,
        *,
        rules: TierRules = RULES,
        run_directory: str = "",
        **arguments: Any,
    ) -> None:
        super().__init__(model_path, layer_counts, **arguments)
        self._run_directory = run_directory
        place = file_place(store) if isinstance(store, Path) else store
        self.pages = open_pages(place, self.core.plan.num_layers)
        self.transfers = [self._transfers(stage) for stage in range(self.core.plan.num_stages)]
        self.tier = self.scheduler.tier
        self.tier.use(place, rules)
        # What is loaded must not depend on how busy the machine is: computing is never faster.
        self.tier.loads._pace.declines = _never  # type: ignore[method-assign]

    def work_at_moves(self) -> None:
        self.serve_store()
        super().work_at_moves()

    def obey(self, order: Any) -> None:
        if isinstance(order, UseStore | SavePages | LoadPages):
            for transfers in self.transfers:
                transfers.obey(order)
            return
        if isinstance(order, SwitchPlan):
            self._cancel()
        super().obey(order)

    def has_more(self) -> bool:
        return not self.scheduler.is_idle

    def lose(self, *stages: int) -> None:
        self._cancel()
        super().lose(*stages)
        for stage in stages:
            self.transfers[stage].close()
            self.transfers[stage] = self._transfers(stage)

    def serve_store(self) -> None:
        """Passes on what stages and files have to say."""
        for transfers, mover in zip(self.transfers, self.movers, strict=True):
            for report, filled_pages in transfers.take_reports():
                mover.wrote(filled_pages, ())
                self.core.take_store_report(report)
        self.pages.commit(self.tier.commits)
        self.tier.commits.clear()
        for page_hash in self.tier.broken:
            self.pages.drop(page_hash)
        self.tier.broken.clear()
        for lookup in self.tier.take_lookups():
            self.tier.found(lookup.number, self.pages.lookup(lookup.hashes))

    def settle(self) -> None:
        """Saves all that is due."""
        before = -1
        while self.tier.saves.saving_pages or before != self.tier.counts.saved_tokens:
            before = self.tier.counts.saved_tokens
            self.work_at_moves()

    def serve(
        self, requests: Sequence[Request], after_step: Callable[[int], None] | None = None
    ) -> list[list[int]]:
        """`run`, then `settle`."""
        outputs = self.run(requests, after_step)
        self.settle()
        return outputs

    def close(self) -> None:
        for transfers in self.transfers:
            transfers.close()

    def _transfers(self, stage: int) -> PageTransfers:
        # The stage's runner and mover may be replaced.
        return PageTransfers(
            stage,
            self.runners[stage].held_layers.kv_pool,
            lambda: self.movers[stage].plan,
            partial(self._may_start, stage),
            PeerSite(self._run_directory, offer_door(stage)),
        )

    def _may_start(self, stage: int) -> bool:
        return not self.movers[stage].awaits_pages

    def _cancel(self) -> None:
        for transfers in self.transfers:
            transfers.cancel()
