"""What must hold of leases, on both servers, whatever else happens."""

from sgl_pipeline.disaggregation.decode_rooms import DecodeRooms
from sgl_pipeline.disaggregation.prefill_rooms import PrefillRooms
from sgl_pipeline.requests import RequestState
from sgl_pipeline.scheduling import StepScheduler


def check_leases(scheduler: StepScheduler, rooms: PrefillRooms | DecodeRooms) -> None:
    """Asserts that pages which a peer may touch are given out to nobody else, and that requests
    whose pages are elsewhere have one page here, and a room."""
    if isinstance(rooms, PrefillRooms):
        _check_lent_pages(scheduler)
        assert {*rooms.leases._sessions} <= {*rooms._rooms}, "a lease of a room that has ended"
        return
    offloaded = scheduler.offloaded
    for request in offloaded._requests:
        assert request.room is not None and request.state is not RequestState.FINISHED
        assert request.lease is not None, "a request without a lease counts as offloaded"
        room = rooms._rooms.get(request.room.number)
        is_over = request in offloaded._lost
        assert is_over or (room is not None and room.request is request), "a lease without a room"
        assert len(request.pages) <= 1, "a request with a lease has pages here"
        is_running = request.state is RequestState.RUNNING
        assert len(request.pages) == is_running, "a request with a lease has no page to run in"
    for request in offloaded._lost:
        assert request in offloaded._requests and request.steps_in_flight, "it could go on"
    for room in rooms._rooms.values():
        request = room.request
        has_lease = request.lease is not None and request.state is not RequestState.FINISHED
        assert not has_lease or request in offloaded._requests, "a lease that nobody ends"


def _check_lent_pages(scheduler: StepScheduler) -> None:
    lent, pages = scheduler.tier.lent, scheduler._pages
    leases = [*lent._leases.values(), *lent._ending.values()]
    if not leases:
        assert lent.num_pages == 0, "pages count as lent that are not"
        return
    runs = [node.run for node in pages.storage.cached_nodes() if node.run is not None]
    cached = {page for run in runs for page in run.pages}
    locked = {page for run in runs if run.lock_count for page in run.pages}
    held = {page for one in pages._holdings for page in one.pages}
    loading = {page for load in scheduler.tier.loads._loads.values() for page in load.pages}
    own = [page for lease in leases for page in lease.own]
    assert len(own) == len({*own}), "two leases write into one page"
    assert {*pages.pages_in_use()}.issuperset(own), "a page that a peer writes is free"
    assert (cached | held | loading).isdisjoint(own), "a page that a peer writes is used here"
    prompts = {page for lease in leases for page in lease.prompt}
    assert locked.issuperset(prompts), "a page that a peer attends to may be evicted"
    assert lent.num_pages == sum(lease.num_pages for lease in lent._leases.values())
    assert lent.num_pages <= lent.most_pages, "more is lent than may be"


def check_leases_end(scheduler: StepScheduler, rooms: PrefillRooms | DecodeRooms) -> None:
    """Asserts that nothing is lent, offloaded or remembered of leases."""
    tier, offloaded = scheduler.tier, scheduler.offloaded
    tier.lent.check_end()
    assert not tier.lent.lent and not tier.lent.over, "nobody was told of a lease"
    assert not offloaded._requests and not offloaded._lost and not offloaded.has_ended
    if isinstance(rooms, PrefillRooms):
        leases = rooms.leases
        assert not leases._sessions and not leases._told and not leases._heard_s
