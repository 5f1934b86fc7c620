"""The waiting requests, best first, and the number of tokens that they still need.

The prefix that a request wants is registered in the radix tree when it arrives, so neither the
count nor a hit needs a walk over the queue. It never decides whether a request fits.
"""

from collections.abc import Callable

from sgl_pipeline.args import Accounting
from sgl_pipeline.requests import Lease, Request
from sgl_pipeline.scheduling.queue_order import FixedOrder, QueueOrder
from sgl_pipeline.scheduling.radix_demand import RadixDemand
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.step_work import attended_tokens

# Bounds the time of one `head` when very many waiting requests share one prefix.
MAX_PARKED_PER_CALL = 64


class WaitingQueue:
    """Served in `order` (by `Request.order` if there is none), except for requests that are parked.

    A request is parked while another one prefills pages that it needs too: they are computed once,
    unless parking is switched off. A request is held until it is known whether its prefix can be
    loaded. `on_add` hears of each request that enters.
    """

    def __init__(
        self, demand: RadixDemand, *, parks: bool = True, order: QueueOrder | None = None
    ) -> None:
        self._demand = demand
        self._parks = parks
        self._paths = demand.paths
        self._parked: set[Request] = set()
        # Requests that may not be served yet.
        self._held: set[Request] = set()
        self.on_add: Callable[[Request], None] | None = None
        # Every waiting request that is neither parked nor held.
        self._order = order or FixedOrder()
        # Tokens that no page of a radix node will hold, and the number that they attend to.
        self._tail_tokens = 0
        self._tail_attended = 0
        # Tokens to prefill of all waiting requests, hits or not.
        self.num_tokens = 0
        self._num_attended = 0

    def __len__(self) -> int:
        return len(self._paths)

    def ahead_of(self, request: Request) -> list[Request]:
        """The waiting requests that are served before `request`, parked ones too, in order; looks
        at all."""
        ranked = self._order.ranked(self._paths)
        return ranked[: ranked.index(request)]

    def first(self, num_requests: int) -> list[Request]:
        """The waiting requests that are served first, parked ones too, in order; looks at all."""
        return self._order.ranked(self._paths)[:num_requests]

    def why_before(self, first: Request, second: Request) -> str:
        """The order's reason why `first` is served before `second`."""
        return self._order.why_before(first, second)

    def awaited_node(self, request: Request) -> RadixNode | None:
        """The node that another request prefills and `request` waits for, parked there or to be
        parked when it comes to the front; None if it need not wait."""
        return self._demand.claimed_node(self._paths[request]) if self._parks else None

    def tokens_to_compute(self, accounting: Accounting) -> int:
        """Tokens of all waiting requests, counted by `accounting`; each request counts for at least
        one."""
        if accounting.shared_once:
            return self._tail_tokens + self._demand.pending_tokens
        if accounting.hits:
            return self._tail_tokens + self._demand.missing_tokens
        return self.num_tokens

    def attended_to_compute(self, accounting: Accounting) -> int:
        """Number of tokens that those of `tokens_to_compute` attend to, earlier tokens included."""
        if accounting.shared_once:
            return self._tail_attended + self._demand.pending_attended
        if accounting.hits:
            return self._tail_attended + self._demand.missing_attended
        return self._num_attended

    def add(self, request: Request) -> None:
        """Enters a request; its `prefill_end` must not change while it waits."""
        self._want(request)
        self._order.add(request)
        if self.on_add is not None:
            self.on_add(request)

    def use_lease(self, request: Request, lease: Lease | None, num_tokens: int) -> None:
        """The waiting `request` has this lease from now on, with the keys and values of its first
        `num_tokens` tokens; None: it has none any more."""
        may_be_served = request not in self._held and request not in self._parked
        self._order.discard(request)
        path = self._paths[request]
        self._count(request, path, -1)
        self._demand.unwant(path)
        request.lease, request.leased_tokens = lease, num_tokens
        self._want(request)
        if may_be_served:
            self._order.add(request)

    def __contains__(self, request: Request) -> bool:
        return request in self._paths

    def hold(self, request: Request) -> None:
        """`head` passes over the waiting `request` until `let_go`."""
        self._held.add(request)
        self._order.discard(request)

    def let_go(self, request: Request) -> None:
        """Ends a `hold`, if there is one."""
        if request in self._held:
            self._held.remove(request)
            if request not in self._parked:
                self._order.add(request)

    def is_held(self, request: Request) -> bool:
        """True if `head` passes over it until `let_go`."""
        return request in self._held

    def discard(self, request: Request) -> None:
        """Removes a request that will never run."""
        self._order.discard(request)
        self._demand.unwant(self._forget(request))
        self._parked.discard(request)
        self._held.discard(request)

    def head(self) -> Request | None:
        """The first request that need not wait for another one's prefill; it stays in the queue."""
        self._return_unparked()
        for _ in range(MAX_PARKED_PER_CALL):
            request = self._order.first()
            if request is None:
                return None
            claimed = self.awaited_node(request)
            if claimed is None:
                return request
            self._order.discard(request)
            self._demand.park(request, claimed)
            self._parked.add(request)
        return None

    def last(self) -> Request | None:
        """The request that is served last; looks at all of them."""
        return self._order.ranked(self._paths)[-1] if self._paths else None

    def newest(self) -> Request | None:
        """The waiting request that joined the queue last."""
        return next(reversed(self._paths), None)

    def path_of(self, request: Request) -> RadixNode:
        """The nodes of the radix tree that the request wants."""
        return self._paths[request]

    def pop_head(self) -> None:
        """Removes the request that `head` returned last; its path in the tree now belongs to the
        caller."""
        request = self._order.first()
        assert request is not None
        self._order.serve(request)
        self._forget(request)

    def _want(self, request: Request) -> None:
        # A hit ends before the first position whose logits are needed: the last, or sooner. What is
        # cached here is of no use to a request with a lease.
        end = request.first_logits_position if request.lease is None else 0
        path = self._demand.want(request.tokens(0, end), request.cache_namespace)
        self._paths[request] = path
        self._count(request, path, 1)

    def _forget(self, request: Request) -> RadixNode:
        path = self._paths.pop(request)
        self._count(request, path, -1)
        return path

    def _count(self, request: Request, path: RadixNode, sign: int) -> None:
        """Adds (`sign` 1) or subtracts (-1) the tokens that `request` has to prefill."""
        end = request.prefill_end
        if request.lease is not None:  # attention is computed elsewhere
            self._tail_tokens += sign * (end - request.leased_tokens)
            self.num_tokens += sign * (end - request.leased_tokens)
            return
        self._tail_tokens += sign * (end - path.end)
        self._tail_attended += sign * attended_tokens(path.end, end)
        self.num_tokens += sign * end
        self._num_attended += sign * attended_tokens(0, end)

    def _return_unparked(self) -> None:
        for request in self._demand.take_unparked():
            if request in self._parked:
                self._parked.remove(request)
                if request not in self._held:
                    self._order.add(request)
