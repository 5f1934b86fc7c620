"""Pages that a prefill server lends to requests of decode servers, which attend over them here.

A lease has the held pages of a prompt, which no step writes any more, and fresh pages for all
tokens to come. The stages learn of it by an order in the stream (`wire/lease_orders.py`), and its
pages come back after the order that ends it, so none is given out that a peer may still touch.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.scheduling.held_pages import HeldPages
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.scheduling.running_requests import RunningRequests
from sgl_pipeline.wire.lease_orders import EndLease, LeaseOrder, LendPages, PagesLent
from sgl_pipeline.wire.step_order import INT32

# Prefill keeps the other half of the pool, however much decode servers could use.
MOST_LENT_SHARE = 0.5


@dataclass(slots=True, eq=False)
class _Lease:
    """The prompt's pages and then the `own` ones. The prefix that ends with `end` is locked for it.
    `stages` have said that they know of it."""

    end: RadixNode
    prompt: list[int]
    own: list[int]
    stages: set[int] = field(default_factory=set)

    @property
    def num_pages(self) -> int:
        return len(self.prompt) + len(self.own)


class LentPages:
    """The leases, by the numbers of their rooms; each number is lent once.

    A driver takes `lent`, leases that all stages know of, and `over`, those that the stages have
    forgotten, and empties them.
    """

    def __init__(self, held: HeldPages, pages: RequestPages, running: RunningRequests) -> None:
        self._held, self._pages, self._running = held, pages, running
        self._digest: str | None = None
        self._leases: dict[int, _Lease] = {}
        self._to_lend: dict[int, None] = {}
        self._ending: dict[int, _Lease] = {}
        self.has_leases = False  # the stages know of one
        self.num_pages = 0
        self.lent: list[int] = []
        self.over: list[int] = []

    def begin(self, digest: str) -> None:
        """From now on pages are lent, to servers with this `digest`."""
        self._digest = digest

    @property
    def is_on(self) -> bool:
        """True if pages are lent."""
        return self._digest is not None

    @property
    def most_pages(self) -> int:
        """Pages that may be lent in all, those of prompts counted for each lease; 0: none is."""
        return 0 if self._digest is None else int(MOST_LENT_SHARE * self._pages.num_pages)

    @property
    def most_tokens(self) -> int:
        """Tokens of these pages."""
        return self.most_pages * self._pages.page_size

    @property
    def num_leases(self) -> int:
        """Leases that are not over."""
        return len(self._leases)

    def page_hash(self, room: int, index: int) -> bytes | None:
        """The hash of a page that is held for the room; None if there is none."""
        return self._held.page_hash(room, index)

    def lend(self, room: int, num_pages: int, num_tokens: int) -> str | None:
        """Lends the first `num_pages` held pages of the room and as many more as `num_tokens`
        tokens need. Returns why not, if it does not."""
        if self._digest is None:
            return "it lends no pages (--enable-attention-offload)"
        prompt = self._held.prompt_of(room)
        if prompt is None or not 0 < num_pages <= len(prompt.pages) or room in self._leases:
            return "it holds no such pages that it could lend"
        in_all = self._pages.pages_for(num_tokens)
        num_fresh, num_available = in_all - num_pages, self._num_available
        if num_fresh <= 0:
            return f"a lease of {num_tokens} tokens has no page to write into"
        if self.num_pages + in_all > self.most_pages:
            return (
                f"{self.num_pages} pages are lent, with {in_all} more they would be more than "
                f"{self.most_pages}"
            )
        if num_fresh > num_available:
            return f"{num_fresh} free pages are needed, it has {num_available}"
        own = self._pages.lend(prompt.end, num_fresh)
        self._leases[room] = _Lease(prompt.end, prompt.pages[:num_pages], own)
        self._to_lend[room] = None
        self.num_pages += in_all
        self._held.count_lent(room, is_lent=True)
        return None

    @property
    def _num_available(self) -> int:
        """A page for each running request stays out of reach, as in `Admission`."""
        return max(0, self._pages.num_available - self._running.num_growing)

    def end(self, room: int) -> None:
        """Ends a lease, if there is one."""
        lease = self._forget(room)
        if lease is None:
            return
        if room in self._to_lend:
            del self._to_lend[room]
            self._pages.take_back(lease.end, lease.own)
        else:
            self._ending[room] = lease

    def next_orders(self) -> Iterator[LeaseOrder]:
        """Ends and makes leases. An order is in the stream when the next one is asked for."""
        for room, lease in [*self._ending.items()]:
            yield EndLease(room)
            del self._ending[room]
            self._pages.take_back(lease.end, lease.own)
        for room in [*self._to_lend]:
            del self._to_lend[room]
            lease = self._leases[room]
            self.has_leases = True
            pages = array(INT32, lease.prompt + lease.own).tobytes()
            assert self._digest is not None
            yield LendPages(room, pages, len(lease.prompt), self._digest)

    def take(self, report: PagesLent, num_stages: int) -> None:
        """Applies a stage's report; that of a lease that is over has no effect. Raises
        ProtocolError for one that no stage could send now."""
        lease = self._leases.get(report.lease)
        if lease is None:
            return
        if (
            report.stage >= num_stages
            or report.stage in lease.stages
            or report.lease in self._to_lend
        ):
            raise ProtocolError(f"stage {report.stage} may not report lease {report.lease} now")
        lease.stages.add(report.stage)
        if len(lease.stages) == num_stages:
            self.lent.append(report.lease)

    def forget(self) -> None:
        """The next order makes the stages forget all leases: they are over."""
        for room in [*self._leases]:
            lease = self._forget(room)
            assert lease is not None
            self._ending[room] = lease
            self.over.append(room)
        for lease in self._ending.values():
            self._pages.take_back(lease.end, lease.own)
        self._ending.clear()
        self._to_lend.clear()
        self.lent.clear()

    def _forget(self, room: int) -> _Lease | None:
        lease = self._leases.pop(room, None)
        if lease is not None:
            self.num_pages -= lease.num_pages
            self._held.count_lent(room, is_lent=False)
        return lease

    def check_end(self) -> None:
        """Asserts that nothing is lent; for tests."""
        assert not self._leases and not self._ending and not self._to_lend and not self.num_pages
