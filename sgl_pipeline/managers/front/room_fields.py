"""The room of a request, from upstream's `bootstrap_*` fields and the role of this server.

A router sends one body to a prefill and a decode server, and adds the fields in which they meet.
"""

from dataclasses import dataclass

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

from sgl_pipeline.args.disaggregation_args import Mode
from sgl_pipeline.cluster.doors import join_address
from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.upstream.upstream_messages import GenerateMessage
from sgl_pipeline.requests import Room

MAX_HOST_LENGTH = 255
MAX_PORT = 65535
MAX_ROOM_NUMBER = 2**63 - 1


@dataclass(frozen=True, slots=True)
class RoomFields:
    """Reads them for a server of role `mode`; `default_port` is the bootstrap port of a prefill
    server where a request names none."""

    mode: Mode = "null"
    default_port: int = 8998

    def room(self, message: GenerateMessage) -> Room | None:
        """The place where the request's two servers meet; None without a role, and for a health
        check, which has no peer.

        Raises RequestError (400) for a request that has no room and needs one, or that has one and
        is not at its place here, and for fields that make no room.
        """
        if self.mode == "null":
            self._refuse_rooms(message)
            return None
        if message.bootstrap_host == FAKE_BOOTSTRAP_HOST:
            return None
        if message.bootstrap_room is None:
            raise RequestError(
                f"this is a {self.mode} server (--disaggregation-mode {self.mode}), and the "
                "request has no bootstrap_room, which a router adds: send it to the router "
                "(sglang-router launch --pd-disaggregation), or to a server without "
                "--disaggregation-mode"
            )
        if message.disagg_prefill_dp_rank not in (None, 0):
            raise RequestError(
                f"disagg_prefill_dp_rank: {message.disagg_prefill_dp_rank} is not a rank of a "
                "prefill server, which has rank 0 alone"
            )
        host, port = message.bootstrap_host, message.bootstrap_port
        if not isinstance(host, str) or not 1 <= len(host) <= MAX_HOST_LENGTH:
            raise RequestError(
                f"bootstrap_host must be a name or an address of the prefill server, of up to "
                f"{MAX_HOST_LENGTH} characters"
            )
        if port is None:
            port = self.default_port
        peer = join_address(
            host.removeprefix("[").removesuffix("]"),
            _integer("bootstrap_port", port, 1, MAX_PORT),
        )
        number = _integer("bootstrap_room", message.bootstrap_room, 0, MAX_ROOM_NUMBER)
        return Room(number, peer if self.mode == "decode" else "")

    def room_of_refused(self, message: GenerateMessage) -> Room | None:
        """The room of a request that was refused, as far as its fields make one: its other server
        may have taken it."""
        try:
            return self.room(message)
        except RequestError:
            return None

    def _refuse_rooms(self, message: GenerateMessage) -> None:
        for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
            if getattr(message, name) is not None:
                raise RequestError(
                    f"{name}: this server runs without --disaggregation-mode (prefill/decode "
                    "disaggregation), and no other one takes part in its requests; leave it out"
                )


# For a server that prefills and decodes.
NO_ROLE = RoomFields()


def _integer(name: str, value: int, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RequestError(f"{name} must be between {least} and {most}, got {value!r:.40}")
    return value
