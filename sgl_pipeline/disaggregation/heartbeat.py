"""The pings of one end of a stream, and the silence after which the other end counts as dead."""

PING_S = 1.0


class Heartbeat:
    """The heartbeat of one stream, which begins at `now_s`; after `silence_s` without a message its
    other end is dead."""

    def __init__(self, now_s: float, silence_s: float) -> None:
        self._heard_s, self._silence_s = now_s, silence_s
        self._next_ping_s = now_s + PING_S

    def heard(self, now_s: float) -> None:
        """The other end has sent something."""
        self._heard_s = now_s

    def is_due(self, now_s: float) -> bool:
        """True once for each moment at which to send a ping."""
        if now_s < self._next_ping_s:
            return False
        self._next_ping_s = now_s + PING_S
        return True

    def is_dead(self, now_s: float) -> bool:
        """True if the other end has been silent for too long."""
        return now_s - self._heard_s > self._silence_s
