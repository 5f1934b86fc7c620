"""Tracks requested and arrived workers, and when to stop asking for more.

A source of workers fails a pipeline in one of these ways: it refuses (its process cannot be
started), the worker ends or is given up before it was ready, or it does not come within the join
limit. After one refusal, or `MOST_TRIES` workers in a row that did not get ready, no worker is
available for `retry_s` seconds. Reads no clock.
"""

from collections.abc import Iterator

from sgl_pipeline.args import RecoveryArgs

# One failure may be accidental; after two in a row the cause probably remains.
MOST_TRIES = 2
# A worker that comes and ends again stops the stages for a while: each time, the next rest is twice
# as long, up to 16 times the first.
_MOST_DOUBLINGS = 4


class WorkerSupply:
    """The state of the source. Moments are seconds of the driver's clock."""

    def __init__(self, args: RecoveryArgs) -> None:
        self._args = args
        # Workers that were asked for and have not greeted, and the moment of each request.
        self._asked_s: dict[int, float] = {}
        self._num_failures = 0
        self._num_rests = 0
        self._rests_until_s: float | None = None
        self.last_reason = ""

    @property
    def num_on_their_way(self) -> int:
        """Workers that were asked for and have not greeted."""
        return len(self._asked_s)

    def asked(self, worker: int, now_s: float) -> None:
        """The source was asked for a worker, which will greet with this number."""
        self._asked_s[worker] = now_s

    def greeted(self, worker: int) -> None:
        """A worker has greeted, asked for or not."""
        self._asked_s.pop(worker, None)

    def forget(self, worker: int) -> None:
        """A worker is not wanted any more."""
        self._asked_s.pop(worker, None)

    def got_ready(self) -> None:
        """A newcomer fills its stage: earlier failures no longer count."""
        self._num_failures = self._num_rests = 0

    def failed(self, worker: int, reason: str, now_s: float, *, is_refusal: bool = False) -> None:
        """A worker that was asked for will not come, or ended before it was ready."""
        self._asked_s.pop(worker, None)
        self.last_reason = reason
        self._num_failures += 1
        if is_refusal or self._num_failures >= MOST_TRIES:
            # After the rest, one more failure is enough.
            self._num_failures = MOST_TRIES - 1
            longer = 2 ** min(self._num_rests, _MOST_DOUBLINGS)
            self._num_rests += 1
            self._rests_until_s = now_s + longer * self._args.retry_s

    def try_again(self) -> None:
        """A stage was lost: in spite of earlier failures, there may be a worker for it."""
        self._num_failures = 0
        self._rests_until_s = None

    def rests(self, now_s: float) -> bool:
        """True if no worker should be asked for now."""
        return self._rests_until_s is not None and now_s < self._rests_until_s

    def late(self, now_s: float) -> Iterator[tuple[int, str]]:
        """Workers that should have greeted, and the reason to report for each."""
        for worker, asked_s in self._asked_s.items():
            if now_s - asked_s > self._args.join_limit_s:
                yield worker, f"it did not come within {self._args.join_limit_s:g} s"
