"""Attention offload of a decode server in virtual time: who is offloaded, and the lent pages.

The pages of an offloaded request stay in a prefill server's pool. The decode server's scheduler
counts the lent pages as its own, and those that no offloaded request fills are set aside.
"""

from dataclasses import dataclass

from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.scheduling.request_pages import RequestPages
from sgl_pipeline.simulator.remote_attention import RemoteAttention
from sgl_pipeline.throttle.attention_offload import AttentionWork, Reading, should_offload


class LendingScheduler(StepScheduler):
    """A scheduler whose pages can be taken out of use."""

    @property
    def pages(self) -> RequestPages:
        """The pool, with all that is in it."""
        return self._pages


@dataclass(frozen=True, slots=True)
class OffloadSetting:
    """The offload bound, and the reading of the paper's rule. With `only_hidden` a request is
    declined whose attention elsewhere would make layers wait."""

    bound: float
    reading: Reading = "either"
    only_hidden: bool = True


class VirtualOffload:
    """The offload of one decode server, whose scheduler has `lent_pages` in its pool: all requests
    that are not offloaded must fit in the rest. `remote` computes the attention."""

    def __init__(
        self,
        scheduler: LendingScheduler,
        remote: RemoteAttention,
        rule: OffloadSetting,
        lent_pages: int,
    ) -> None:
        self.remote = remote
        self.num_offloaded = 0
        self._scheduler, self._rule, self._lent_pages = scheduler, rule, lent_pages
        # Requests whose prompts are computed, and that have not ended; True: offloaded.
        self._requests: dict[Request, bool] = {}
        self._aside: list[int] = []

    def decide(self, request: Request) -> bool:
        """True if `request`, whose prompt is computed, is offloaded."""
        is_offloaded = self._should_offload(request)
        self._requests[request] = is_offloaded
        if is_offloaded:
            self.num_offloaded += 1
            self.remote.requests.add(request)
        return is_offloaded

    def ended(self, request: Request) -> None:
        """`request` has ended."""
        self._requests.pop(request, None)
        self.remote.requests.discard(request)

    def set_aside(self) -> None:
        """Keeps from all others the lent pages that offloaded requests do not fill, as far as they
        can be had now."""
        pages = self._scheduler.pages
        filled = sum(pages.pages_for(request.num_tokens) for request in self.remote.requests)
        wanted = max(0, self._lent_pages - filled)
        more = min(wanted - len(self._aside), pages.num_available)
        if more > 0:
            self._aside += pages.take_out(more)
        elif more < 0:
            pages.put_back(self._aside[more:])
            del self._aside[more:]

    def _should_offload(self, request: Request) -> bool:
        here, elsewhere, rule = AttentionWork(), AttentionWork(), self._rule
        for other, is_offloaded in self._requests.items():
            work = AttentionWork(1, other.num_tokens)
            if is_offloaded:
                elsewhere += work
            else:
                here += work
        most_tokens = request.num_tokens + request.stops.max_new_tokens
        if not should_offload(elsewhere, here, most_tokens, rule.bound, rule.reading):
            return False
        with_it = elsewhere + AttentionWork(1, request.num_tokens)
        return not rule.only_hidden or self.remote.hides(with_it, here)
