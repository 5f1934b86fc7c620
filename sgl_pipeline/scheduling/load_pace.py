"""The pace of loads, as measured, and whether computing is faster."""

from sgl_pipeline.args import ACCOUNTINGS
from sgl_pipeline.scheduling.waiting_queue import WaitingQueue
from sgl_pipeline.step_work import StepTimes, StepWork, attended_tokens

_ACCOUNTING = ACCOUNTINGS["radix"]
# A load that is declined makes the next one look faster by this.
FORGOTTEN = 0.9
# The newest load's share in the measured time of a page.
NEWEST_SHARE = 0.25


class LoadPace:
    """Seconds of a page on the slowest stage; none before a load was measured."""

    def __init__(self, waiting: WaitingQueue, page_size: int) -> None:
        self._waiting, self._page_size = waiting, page_size
        self._page_s: float | None = None

    def load_s(self, num_pages: int) -> float:
        """Predicted seconds of a load; 0 before any was measured."""
        return num_pages * (self._page_s or 0.0)

    def measured(self, num_pages: int, busy_s: float) -> None:
        """A load of `num_pages` pages has kept the slowest stage busy for so long."""
        page_s = busy_s / num_pages
        before = page_s if self._page_s is None else self._page_s
        self._page_s = before + NEWEST_SHARE * (page_s - before)

    def declines(self, start: int, num_pages: int, load_s: float, times: StepTimes | None) -> bool:
        """True if a load of `num_pages` pages from position `start` on, which takes `load_s` with
        those before it, is slower than the computation of all that waits, and of its tokens.

        Each time it looks faster to the next, so that a slow hour of the store does not last for
        ever.
        """
        if times is None or self._page_s is None:
            return False
        pending = StepWork(
            self._waiting.tokens_to_compute(_ACCOUNTING),
            0,
            0,
            self._waiting.attended_to_compute(_ACCOUNTING),
            0,
        )
        tokens = num_pages * self._page_size
        own = StepWork(tokens, 0, 0, attended_tokens(start, start + tokens), 0)
        is_slower = load_s * 1e3 > times.step_ms(own) + times.step_ms(pending)
        if is_slower:
            self._page_s *= FORGOTTEN
        return is_slower
