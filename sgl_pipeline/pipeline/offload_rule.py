"""Decides which requests of a decode server leave their attention to prefill servers.

By the bound of Adrenaline (`throttle/attention_offload.py`) from measured rates, or by a fixed
ratio. Without a fixed ratio one request at a time is offloaded until the rates are known, none
where the wait could not be hidden, and none for a while after steps have waited. Pure: moments are
the caller's.
"""

import math
from collections.abc import Set

from sgl_pipeline.pipeline.offload_rates import OffloadRates
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.throttle.attention_offload import (
    AttentionWork,
    Reading,
    is_hidden,
    should_offload,
)
from sgl_pipeline.throttle.offload_limits import measured_bound

# Of the time of steps with offloaded rows: if stages wait longer, none is offloaded for REST_S, and
# afterwards, if they still do, leases are given up one by one.
MOST_WAIT_SHARE = 0.1
REST_S = 10.0


class OffloadRule:
    """The rule of the decode server with this `scheduler`.

    Args:
        ratio: of offloaded to local attention; None: by what is measured.
        reading: of the paper's rule.
    """

    def __init__(
        self, scheduler: StepScheduler, ratio: float | None, reading: Reading = "either"
    ) -> None:
        self._scheduler, self.ratio, self._reading = scheduler, ratio, reading
        self.rates = OffloadRates()
        self.lent_tokens: tuple[int, ...] = ()  # by each prefill server
        self.wait_share = 0.0  # of the newest window
        self._slow_since_s: float | None = None
        self._rests_until_s = -math.inf

    def refusal(self, request: Request, asked: Set[Request], now_s: float) -> str | None:
        """Says why `request`, whose prompt another server has computed, is not offloaded; None if
        it is. Of `asked` it is not known yet whether they can be."""
        if self.ratio == math.inf:
            return None
        here, elsewhere = self._work(request, asked)
        if not here.requests:
            return "no request decodes here whose attention could hide that of another one"
        bound = self.ratio
        if bound is None:
            if now_s < self._rests_until_s:
                return f"steps waited for it for more than {MOST_WAIT_SHARE:.0%} of their time"
            if not self.rates.are_known:
                return (
                    "the rates are being measured with another one" if elsewhere.requests else None
                )
            if not self._is_hidden(here, elsewhere + AttentionWork(1, request.num_tokens)):
                return "its attention would take longer than that of the requests here"
            bound = self._bound(here, elsewhere)
        most_tokens = len(request.prompt_ids) + request.stops.max_new_tokens
        if should_offload(elsewhere, here, most_tokens, bound, self._reading):
            return None
        return f"{elsewhere.tokens} tokens are offloaded, the bound is {bound:.2f} of {here.tokens}"

    def must_give_up(self, now_s: float) -> bool:
        """True if a lease is to be given up now, because steps have waited for long."""
        share = self.rates.take_wait_share(now_s)
        if share is None:
            return False
        self.wait_share = share
        if self.ratio is not None:
            return False
        if share <= MOST_WAIT_SHARE:
            self._slow_since_s = None
            return False
        self._rests_until_s = now_s + REST_S
        if self._slow_since_s is None:
            self._slow_since_s = now_s
            self.rates.forget()  # afterwards one request measures them again
        return now_s - self._slow_since_s >= REST_S

    def bound(self) -> float | None:
        """The largest ratio of offloaded to local attention now; None while it is not known, or if
        there is none."""
        if self.ratio is not None:
            return None if math.isinf(self.ratio) else self.ratio
        return self._bound(*self._work(None, frozenset())) if self.rates.are_known else None

    def _work(
        self, but: Request | None, asked: Set[Request]
    ) -> tuple[AttentionWork, AttentionWork]:
        """The attention of requests whose prompts are computed, here and elsewhere."""
        here, elsewhere = AttentionWork(), AttentionWork()
        arrivals = self._scheduler.tier.arrivals
        for request in self._scheduler.requests():
            if request is but:
                continue
            work = AttentionWork(1, request.num_tokens)
            if request.lease is not None or request in asked:
                elsewhere += work
            elif not arrivals.awaits_prompt(request):
                here += work
        return here, elsewhere

    def _bound(self, here: AttentionWork, elsewhere: AttentionWork) -> float:
        both = here + elsewhere
        return measured_bound(
            self.lent_tokens,
            self._scheduler.limits.pool_tokens,
            self.rates.remote_rate,
            self.rates.local_rate,
            both.tokens / max(1, both.requests),
            self._scheduler.pipeline_depth,
            self._scheduler.step_times,
        )

    def _is_hidden(self, here: AttentionWork, elsewhere: AttentionWork) -> bool:
        """True if no step would wait, its requests being shared out over the steps in flight."""
        depth, rates = self._scheduler.pipeline_depth, self.rates
        return is_hidden(
            _tokens_of_step(here, depth) / rates.local_rate,
            _tokens_of_step(elsewhere, depth) / rates.remote_rate,
            rates.exchange_s,
        )


def _tokens_of_step(work: AttentionWork, depth: int) -> float:
    """Tokens that the decodes of one of `depth` steps attend to."""
    rows = -(-work.requests // depth)
    return rows * work.tokens / max(1, work.requests)
