"""The leases of a prefill server's rooms: requested, sent to decode servers, over with the room."""

from sgl_pipeline.disaggregation.room_messages import (
    Borrow,
    FromPrefill,
    LeaseOver,
    Lent,
    NotLent,
)
from sgl_pipeline.scheduling.lent_pages import LentPages

# A decode server says now and then that it uses a lease; without a word for so long it is over.
REPEAT_S = 10.0
UNUSED_S = 60.0
_FORGOTTEN = "the stages have forgotten it: one of them was replaced, or layers move"


class LentRooms:
    """By the numbers of rooms. Messages go to `outbox`, each with its session."""

    def __init__(self, lent: LentPages, outbox: list[tuple[int, FromPrefill]]) -> None:
        self._lent, self._outbox = lent, outbox
        # The session of each room that has asked, and when it was last heard of.
        self._sessions: dict[int, int] = {}
        self._heard_s: dict[int, float] = {}
        # Those that know that they have a lease.
        self._told: set[int] = set()

    def borrow(self, session: int, message: Borrow, now_s: float) -> None:
        """Lends pages of a held room, or says why not; once."""
        room = message.room
        self._heard_s[room] = now_s
        if room in self._sessions:
            return
        self._sessions[room] = session
        if self._lent.page_hash(room, message.num_pages - 1) != message.page_hash:
            reason: str | None = "the prompt that it holds for the room is another one"
        else:
            reason = self._lent.lend(room, message.num_pages, message.num_tokens)
        if reason is not None:
            self._outbox.append((session, NotLent(room, reason)))

    def end(self, room: int) -> None:
        """The room is over, and its lease with it, if it has one."""
        self._lent.end(room)
        self._sessions.pop(room, None)
        self._heard_s.pop(room, None)
        self._told.discard(room)

    def is_lent(self, room: int) -> bool:
        """True if a decode server uses the room's pages here."""
        return room in self._told

    def is_late(self, room: int, now_s: float) -> bool:
        """True if it is, and has not said so for too long."""
        return room in self._told and now_s - self._heard_s[room] > UNUSED_S

    def serve(self) -> None:
        """Tells of leases that all stages know of, or know of no more."""
        lent, over = self._lent.lent[:], self._lent.over[:]
        self._lent.lent.clear()
        self._lent.over.clear()
        for room in over:
            if room not in self._sessions:
                continue
            kind = LeaseOver if room in self._told else NotLent
            self._told.discard(room)
            self._outbox.append((self._sessions[room], kind(room, _FORGOTTEN)))
        for room in lent:
            if room in self._sessions:
                self._told.add(room)
                self._outbox.append((self._sessions[room], Lent(room)))
