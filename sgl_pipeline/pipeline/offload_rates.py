"""Measured rates of attention, here and by executors of prefill servers, and the wait for these."""

from sgl_pipeline.wire.lease_orders import OffloadedWork

# What a report weighs after one more; about fifty count.
_KEPT = 0.98
# How long waits are summed before they are judged.
WINDOW_S = 1.0


class OffloadRates:
    """Learns from each stage's report of a step with offloaded rows."""

    def __init__(self) -> None:
        self._window_began_s: float | None = None
        self._wait_s = self._compute_s = 0.0
        self.forget()

    def forget(self) -> None:
        """Nothing is known any more."""
        self._local_pairs = self._local_s = 0.0
        self._remote_pairs = self._remote_s = 0.0
        self._exchange_s = self._layers = 0.0

    def note(self, work: OffloadedWork, compute_s: float, now_s: float) -> None:
        """A stage computed for `compute_s`, with this attention in it."""
        if self._window_began_s is None:
            self._window_began_s = now_s
        self._wait_s += work.wait_s
        self._compute_s += compute_s
        layers = work.num_layers
        self._local_pairs = _KEPT * self._local_pairs + layers * work.local_tokens
        self._local_s = _KEPT * self._local_s + (work.local_s if work.local_tokens else 0.0)
        self._remote_pairs = _KEPT * self._remote_pairs + layers * work.remote_tokens
        self._remote_s = _KEPT * self._remote_s + work.remote_s
        if work.wait_s > 0.0:  # else it is not known when the results were there
            self._exchange_s = _KEPT * self._exchange_s + max(0.0, work.trip_s - work.remote_s)
            self._layers = _KEPT * self._layers + layers

    @property
    def are_known(self) -> bool:
        """True if both rates have been measured."""
        return self._local_s > 0.0 and self._remote_s > 0.0

    @property
    def local_rate(self) -> float:
        """Tokens a second that one stage attends to, in one layer; they must be known."""
        return self._local_pairs / self._local_s

    @property
    def remote_rate(self) -> float:
        """As `local_rate`, of one executor."""
        return self._remote_pairs / self._remote_s

    @property
    def exchange_s(self) -> float:
        """Seconds of the way to an executor and back, for one layer; 0 while no stage has waited
        behind its own attention."""
        return self._exchange_s / self._layers if self._layers else 0.0

    def take_wait_share(self, now_s: float) -> float | None:
        """The share of computing time that stages have waited, of the window that ends now; None
        while it goes on. A window begins with a report."""
        if self._window_began_s is None or now_s - self._window_began_s < WINDOW_S:
            return None
        share = self._wait_s / self._compute_s if self._compute_s > 0.0 else 0.0
        self._window_began_s = None
        self._wait_s = self._compute_s = 0.0
        return share
