"""Rooms of a prefill server of which a half is missing: not here yet, or ended already.

A room is wanted before its request is here; a half that comes late hears how the other one has
ended. Each is remembered for as long as halves may come, up to a bound.
"""

from sgl_pipeline.disaggregation.room_messages import End

MOST_REMEMBERED = 10_000


class HalfRooms:
    """By their numbers. `wanted`: the session, and since when."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.wanted: dict[int, tuple[int, float]] = {}
        self._failures: dict[int, tuple[End, float]] = {}
        # Rooms that no server will read, though their requests may go on.
        self._unneeded: dict[int, float] = {}

    @property
    def is_full(self) -> bool:
        """True if too many rooms are wanted whose requests are not here."""
        return len(self.wanted) >= MOST_REMEMBERED

    def want(self, number: int, session: int, now_s: float) -> None:
        """The first session that asks for a room has it."""
        self.wanted.setdefault(number, (session, now_s))

    def take_wanted(self, number: int) -> int | None:
        """The session that wants a room whose request is here now, if there is one."""
        wanted = self.wanted.pop(number, None)
        return None if wanted is None else wanted[0]

    def fail(self, end: End, now_s: float) -> None:
        """A room has failed."""
        self._failures[end.room] = end, now_s

    def failure(self, number: int) -> End | None:
        """The end of a room that has failed."""
        failure = self._failures.get(number)
        return None if failure is None else failure[0]

    def need_not(self, number: int, now_s: float) -> None:
        """A room whose request is not here will not be read."""
        if number not in self._failures:
            self.wanted.pop(number, None)
            self._unneeded[number] = now_s

    def take_unneeded(self, number: int) -> bool:
        """True if a room whose request is here now will not be read."""
        return self._unneeded.pop(number, None) is not None

    def wanted_by(self, session: int) -> list[int]:
        """The rooms that a session wants."""
        return [number for number, (other, _) in self.wanted.items() if other == session]

    def forget_old(self, now_s: float) -> list[tuple[int, int]]:
        """Forgets what is too old, or too much. Returns the wanted rooms whose requests have not
        come, each with its session."""
        oldest_s = now_s - self._patience_s
        late = [
            (number, session)
            for number, (session, since_s) in self.wanted.items()
            if since_s < oldest_s
        ]
        for number, _ in late:
            del self.wanted[number]
        for number, (_, since_s) in [*self._failures.items()]:
            if since_s >= oldest_s and len(self._failures) <= MOST_REMEMBERED:
                break
            del self._failures[number]
        for number, since_s in [*self._unneeded.items()]:
            if since_s >= oldest_s and len(self._unneeded) <= MOST_REMEMBERED:
                break
            del self._unneeded[number]
        return late
