"""What must hold of the pages of transfers, whatever else happens."""

from sgl_pipeline.scheduling import StepScheduler


def check_transfers(scheduler: StepScheduler) -> None:
    """Asserts that no page of a transfer is given out: a load's is nobody else's, a save's is
    cached and written by nobody, and so is one that is held for peers or being withdrawn."""
    tier = scheduler.tier
    loads, saves, held = tier.loads._loads, tier.saves._saves, tier.held
    if not (loads or saves or held._held or held._withdrawn):
        return
    pages = scheduler._pages
    runs = [node.run for node in pages.storage.cached_nodes() if node.run is not None]
    locked = {page for run in runs if run.lock_count for page in run.pages}
    kept = {page for save in saves.values() for page in save.pages}
    assert locked.issuperset(kept), "a page that is saved may be evicted"
    offered = {page for one in held._held.values() for page in one.pages}
    offered.update(*map(pages.storage.pages_of, held._withdrawn.values()))
    assert locked.issuperset(offered), "a page that a peer may read may be evicted"
    if not loads:
        return
    cached = [page for run in runs for page in run.pages]
    owned = [page for one in pages._holdings for page in one.pages]
    in_use = set(pages.pages_in_use())
    loading = [page for load in loads.values() for page in load.pages]
    assert len(loading) == len(set(loading)), "two loads fill one page"
    assert in_use.issuperset(loading), "a page that is loaded is free"
    assert set(loading).isdisjoint([*cached, *owned]), "a page is used before it is loaded"
