"""The work ahead of one request's next token: the requests before it, and what each needs.

An outlook is rare and about one request, so it may look at all requests. It changes nothing;
`pipeline/request_forecast.py` estimates the time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from sgl_pipeline.pipeline_load import PipelineLoad
from sgl_pipeline.requests import Request, RequestState
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue
from sgl_pipeline.throttle import Policy


@dataclass(frozen=True, slots=True)
class Demand:
    """The work that one request needs. `prefill_tokens` are not scheduled yet; they exclude cached
    tokens and those that a request before it computes. They need `new_pages`; `held_pages` come
    back when the request ends, except pages that another request uses now."""

    request: Request
    prefill_tokens: int
    new_pages: int
    held_pages: int

    @classmethod
    def in_flight(cls, request: Request, page_size: int) -> "Demand":
        """The demand of a running request whose prompt has been scheduled."""
        return cls(request, 0, 0, len(request.pages) - _num_cached(request, page_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The requests that are served before `request` ends its wait, each list in order of service.

    `waiting` ends with `request` if it waits. `decoding` has all decodes, the ready ones first and
    in their turn; a request whose last prefill chunk is in flight is in neither list. `policy` sees
    `load`. `available_pages` are free or evictable.
    """

    request: Request
    waiting: tuple[Demand, ...]
    prefilling: tuple[Demand, ...]
    decoding: tuple[Demand, ...]
    load: PipelineLoad
    policy: Policy
    available_pages: int
    num_running: int
    max_running_requests: int
    page_size: int

    @property
    def tokens_ahead(self) -> int:
        """Prompt tokens to be scheduled before the first token of `request`."""
        before = self.prefilling
        if self.waiting:  # running prefills come before all that wait
            before = (*self.prefilling, *self.waiting[:-1])
        else:
            before = tuple(one for one in before if one.request.order < self.request.order)
        return sum(one.prefill_tokens for one in before)

    @property
    def own(self) -> Demand:
        """The work that `request` itself needs; none if its last chunk is in flight."""
        demands = (*self.waiting, *self.prefilling, *self.decoding)
        found = (one for one in demands if one.request is self.request)
        return next(found, Demand.in_flight(self.request, self.page_size))


def look_ahead(
    request: Request,
    waiting: WaitingQueue,
    running: RunningRequests,
    pages: RequestPages,
    load: PipelineLoad,
    policy: Policy,
    max_running_requests: int,
) -> Outlook:
    """The outlook of a live request."""
    queue: list[Demand] = []
    if request.state is RequestState.WAITING:
        queue = _queued((*waiting.ahead_of(request), request), waiting, pages)
    in_flight = [one for one in running.decoding if one not in running.ready]
    prefilling = sorted(running.prefilling, key=lambda one: one.order)
    return Outlook(
        request=request,
        waiting=tuple(queue),
        prefilling=tuple(_running(one, pages) for one in prefilling),
        decoding=tuple(_running(one, pages) for one in (*running.ready, *in_flight)),
        load=load,
        policy=policy,
        available_pages=pages.num_available,
        num_running=len(running),
        max_running_requests=max_running_requests,
        page_size=pages.page_size,
    )


def _queued(
    requests: Iterable[Request], waiting: WaitingQueue, pages: RequestPages
) -> list[Demand]:
    """The demand of each of these after all before it have been served."""
    counted: set[RadixNode] = set()
    demands = []
    for request in requests:
        path = waiting.path_of(request)
        tokens = request.prefill_end - max(path.end, request.leased_tokens)
        node, hit, is_claimed = path, pages.storage.match(path), False
        while node is not hit and node not in counted:
            counted.add(node)
            # Tokens that a running request prefills count as its own, and those before them too.
            is_claimed = is_claimed or node.num_prefilling > 0
            tokens += 0 if is_claimed else len(node.tokens)
            assert node.parent is not None
            node = node.parent
        new_pages = pages.pages_of(request, tokens)
        demands.append(Demand(request, tokens, new_pages, new_pages))
    return demands


def _running(request: Request, pages: RequestPages) -> Demand:
    remaining = request.remaining_prefill
    pages_in_all = max(pages.pages_of(request, request.prefill_end), len(request.pages))
    held_pages = pages_in_all - _num_cached(request, pages.page_size)
    return Demand(request, remaining, pages_in_all - len(request.pages), held_pages)


def _num_cached(request: Request, page_size: int) -> int:
    """Pages of a running request that were cached before it: none here if it has a lease."""
    return request.cached_tokens // page_size if request.lease is None else 0
