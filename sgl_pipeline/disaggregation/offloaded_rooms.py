"""The rooms of a decode server whose prompts stay on the prefill server: asked for, used, over.

When a prompt can be read, a rule decides whether its pages are read, or borrowed for the life of
the request. A room with a lease ends with its request, or with the lease.
"""

from collections.abc import Iterable
from typing import Protocol

from sgl_pipeline.disaggregation.lent_rooms import REPEAT_S
from sgl_pipeline.disaggregation.prefill_servers import PrefillServers
from sgl_pipeline.disaggregation.room_messages import Borrow
from sgl_pipeline.pipeline.offload_rule import OffloadRule
from sgl_pipeline.pipeline.pipeline_state import OffloadState
from sgl_pipeline.requests import Lease, Request, RequestState
from sgl_pipeline.scheduling import StepScheduler

# How long the prefill server may take to lend: until its stages have ended their steps.
ANSWER_S = 5.0


class BorrowingRoom(Protocol):
    """A room as far as it matters here. Of its pages `num_pages` can be read; the prefill server
    was last asked to lend them at `asked_s`."""

    request: Request
    peer: str
    num_pages: int
    asked_s: float | None

    @property
    def number(self) -> int: ...


class OffloadedRooms:
    """The rooms of `scheduler` that have a lease, or ask for one.

    Args:
        rule: None: none is offloaded.
    """

    def __init__(
        self, scheduler: StepScheduler, servers: PrefillServers, rule: OffloadRule | None
    ) -> None:
        self._offloaded, self._servers = scheduler.offloaded, servers
        self._arrivals = scheduler.tier.arrivals
        self._page_size = scheduler.args.page_size
        self.rule = rule
        self.num_offloaded = 0  # since the start, and of these those that had to go on without
        self.num_ended_early = 0
        self.last_refusal = ""

    def ask(self, room: BorrowingRoom, rooms: Iterable[BorrowingRoom], now_s: float) -> bool:
        """Asks for the pages of a room that can be read, if the rule says so; `rooms` are all."""
        if self.rule is None:
            return False
        request = room.request
        num_pages = self._pages_to_borrow(room)
        reason = self._obstacle(room, num_pages)
        if reason is None:
            asked = {one.request for one in rooms if one.asked_s is not None}
            self.rule.lent_tokens = self._servers.lent_tokens()
            reason = self.rule.refusal(request, asked, now_s)
        if reason is not None:
            self.last_refusal = reason
            return False
        self._arrivals.ask_to_lend(request, room.peer)
        self._ask(room, now_s, self._arrivals.page_hash(request, num_pages - 1))
        return True

    def keep(self, room: BorrowingRoom, now_s: float) -> None:
        """Says now and then that the lease of a room is used."""
        if room.asked_s is None or now_s - room.asked_s > REPEAT_S:
            self._ask(room, now_s)

    def _ask(self, room: BorrowingRoom, now_s: float, page_hash: bytes = b"") -> None:
        room.asked_s = now_s
        prompt_ids, stops = room.request.prompt_ids, room.request.stops
        # The last new token is never fed back, so its key and value are never stored.
        num_tokens = len(prompt_ids) + max(0, stops.max_new_tokens - 1)
        num_pages = self._pages_to_borrow(room)
        self._servers.send(room.peer, Borrow(room.number, num_pages, num_tokens, page_hash))

    def _pages_to_borrow(self, room: BorrowingRoom) -> int:
        """The number of pages that can be read before the first token to compute."""
        return min(room.num_pages, room.request.first_logits_position // self._page_size)

    def _obstacle(self, room: BorrowingRoom, num_pages: int) -> str | None:
        """Says why the room's pages cannot stay where they are; None if they can."""
        request = room.request
        if not self._servers.lent_tokens_of(room.peer):
            return f"{room.peer} lends no pages (--enable-attention-offload)"
        if not num_pages:
            return "the prompt has no whole page"
        if len(request.prompt_ids) - num_pages * self._page_size > self._page_size:
            return "more than a page of the prompt is to be computed here"
        return None

    def begin(self, room: BorrowingRoom) -> None:
        """The pages that were asked for are lent."""
        lease = Lease(room.peer, room.number)
        num_tokens = self._pages_to_borrow(room) * self._page_size
        self._offloaded.begin(room.request, lease, num_tokens)
        self.num_offloaded += 1

    def refused(self, room: BorrowingRoom, reason: str) -> None:
        """The pages that were asked for are not lent."""
        room.asked_s = None
        self.last_refusal = f"{room.peer}: {reason}"

    def end(self, room: BorrowingRoom) -> bool:
        """The lease of a room is over. True if its request runs, and goes on without; else it is
        held again."""
        room.asked_s = None
        runs = room.request.state is RequestState.RUNNING
        self._offloaded.end(room.request)
        self.num_ended_early += not runs
        return runs

    def take_ended(self) -> list[tuple[Request, Lease]]:
        """Requests that were running with a lease and go on without, each with it."""
        ended = self._offloaded.take_ended()
        self.num_ended_early += len(ended)
        return ended

    def state(self) -> OffloadState | None:
        """The state as an operator sees it; None where none is offloaded."""
        if self.rule is None:
            return None
        sizes = [request.num_tokens for request in self._offloaded]
        return OffloadState(
            requests=len(sizes),
            tokens=sum(sizes),
            bound=self.rule.bound(),
            wait_share=self.rule.wait_share,
            offloaded=self.num_offloaded,
            ended_early=self.num_ended_early,
            last_refusal=self.last_refusal,
        )

    def tick(self, now_s: float) -> None:
        """Gives up a lease where steps wait too long for leases."""
        if self.rule is not None and self.rule.must_give_up(now_s):
            self._offloaded.end_last()
