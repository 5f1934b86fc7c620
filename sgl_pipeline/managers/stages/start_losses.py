"""Workers that were lost with their host before the server was ready: the start waits for the host.

As many workers are requested again once all hosts are there. Reads no clock.
"""

import logging

from sgl_pipeline.errors import ConfigurationError

logger = logging.getLogger(__name__)


class StartLosses:
    """Args:
    limit_s: seconds that a lost host may take to come back.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._num_workers = 0
        self._reason = ""
        self._since_s = 0.0

    def add(self, reason: str, now_s: float) -> None:
        """A worker was lost with its host; `reason` names the host."""
        self._num_workers += 1
        if reason != self._reason:
            self._reason, self._since_s = reason, now_s
            logger.warning(
                "%s; the start waits for it: run its command again within %g s "
                "(--stage-join-limit-s)",
                reason,
                self._limit_s,
            )

    def num_wanted(self, are_hosts_there: bool, now_s: float) -> int:
        """Number of workers to request now; they count as requested from then on.

        Raises ConfigurationError if a host has not come back in time.
        """
        if not self._num_workers:
            return 0
        if are_hosts_there:
            num_wanted, self._num_workers, self._reason = self._num_workers, 0, ""
            return num_wanted
        if now_s - self._since_s > self._limit_s:
            raise ConfigurationError(
                f"{self._reason}; it has not come back within {self._limit_s:g} s "
                "(--stage-join-limit-s), and the server was not ready yet; start all hosts again"
            )
        return 0
