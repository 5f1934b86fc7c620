"""The streams of the decode servers that a prefill server serves: who may say what, who is gone.

Each is a session with a number of its own.
"""

from dataclasses import dataclass

from sgl_pipeline.disaggregation.heartbeat import Heartbeat
from sgl_pipeline.disaggregation.identity import ServerIdentity
from sgl_pipeline.disaggregation.room_messages import (
    End,
    FromDecode,
    FromPrefill,
    Got,
    PeerHello,
    PeerRejected,
    PeerStages,
    PeerWelcome,
    Ping,
)
from sgl_pipeline.scheduling.lent_pages import LentPages
from sgl_pipeline.wire.store_orders import PeerStage


@dataclass(slots=True, eq=False)
class _Session:
    """A decode server. Until `is_known` it has not said who it is, or it `is_rejected`: then it can
    end rooms and do nothing else."""

    heartbeat: Heartbeat
    is_known: bool = False
    is_rejected: bool = False

    def may_say(self, message: FromDecode) -> bool:
        """True if this is the moment for the message."""
        if isinstance(message, PeerHello):
            return True
        return self.is_known or (self.is_rejected and isinstance(message, Got | End))


class DecodeSessions:
    """All sessions. What is to be sent goes into `outbox`.

    Args:
        silence_s: after it a session is dead.
        stages: those that offer pages now.
        lent: the pages that decode servers may borrow.
    """

    def __init__(
        self,
        identity: ServerIdentity,
        silence_s: float,
        stages: tuple[PeerStage, ...],
        lent: LentPages,
        outbox: list[tuple[int, FromPrefill]],
    ) -> None:
        self._identity, self._silence_s = identity, silence_s
        self._stages, self._epoch = stages, 0
        self._lent, self._outbox = lent, outbox
        self._sessions: dict[int, _Session] = {}

    @property
    def num_known(self) -> int:
        """Decode servers that have said who they are."""
        return sum(session.is_known for session in self._sessions.values())

    def use_stages(self, stages: tuple[PeerStage, ...]) -> None:
        """Pages are offered by `stages` from now on; all sessions hear of a change."""
        if stages == self._stages:
            return
        self._stages = stages
        self._epoch += 1
        news = PeerStages(epoch=self._epoch, stages=stages, lent_tokens=self._lent.most_tokens)
        self._outbox += [(one, news) for one, session in self._sessions.items() if session.is_known]

    def connected(self, number: int, now_s: float) -> None:
        """A decode server has dialed."""
        self._sessions[number] = _Session(Heartbeat(now_s, self._silence_s))

    def disconnected(self, number: int) -> bool:
        """A stream has ended. Returns True if its session had not."""
        return self._sessions.pop(number, None) is not None

    def hear(self, number: int, message: FromDecode, now_s: float) -> bool:
        """Takes a message as far as it is about the session. Returns True if it is about a room,
        and the session may send it."""
        session = self._sessions.get(number)
        if session is None:
            return False
        session.heartbeat.heard(now_s)
        if not session.may_say(message):
            self._reject(number, "it has not said who it is")
            return False
        if isinstance(message, PeerHello):
            self._greet(number, session, message)
            return False
        return True

    def end_silent(self, now_s: float) -> list[int]:
        """Ends the sessions that are silent, and returns them; pings the others when it is time."""
        silent = []
        for number, session in [*self._sessions.items()]:
            if session.heartbeat.is_dead(now_s):
                silent.append(number)
                del self._sessions[number]
            elif session.heartbeat.is_due(now_s):
                self._outbox.append((number, Ping()))
        return silent

    def _greet(self, number: int, session: _Session, hello: PeerHello) -> None:
        refusal = self._identity.refusal(hello)
        if refusal is not None:
            session.is_rejected = True
            self._reject(number, refusal)
            return
        session.is_known = True
        welcome = PeerWelcome(
            name=self._identity.name,
            epoch=self._epoch,
            stages=self._stages,
            lent_tokens=self._lent.most_tokens,
        )
        self._outbox.append((number, welcome))

    def _reject(self, number: int, reason: str) -> None:
        """The decode server closes the stream when it has read why, or is silent."""
        self._outbox.append((number, PeerRejected(reason)))
