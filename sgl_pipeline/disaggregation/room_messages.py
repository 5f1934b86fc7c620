"""The messages between the schedulers of a decode server and a prefill server.

The decode server dials, says `PeerHello`, and hears `PeerWelcome` or `PeerRejected`. Then it asks
for rooms, and the other end says when the pages of each can be read from its stages; how they are
read is the matter of the stages (`pp_runner/page_store/`). Each end sends `Ping` once in a while,
and takes a peer that is silent for long for dead. What belongs to a stream ends with it.
"""

from typing import Annotated

import msgspec

from sgl_pipeline.wire.store_orders import PeerStage

# Of these messages, and of what stages say to each other.
VERSION = 2

Count = Annotated[int, msgspec.Meta(ge=0)]
RoomNumber = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# HTTP, of an error.
Status = Annotated[int, msgspec.Meta(ge=400, le=599)]


class PeerHello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The decode server `name`. All else must be as on the prefill server (`identity.py`)."""

    version: Count
    digest: str
    page_size: Count
    num_layers: Count
    kv_dtype: str
    name: str


class PeerWelcome(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The prefill server `name`, and its stages. The address of a stage may be a door alone, /DOOR:
    then it is behind the port at which this server was dialed, under whatever name. It can lend
    pages of `lent_tokens` tokens in all."""

    name: str
    epoch: Count
    stages: tuple[PeerStage, ...]
    lent_tokens: Count = 0


class PeerRejected(msgspec.Struct, frozen=True, tag=True):
    """The two cannot work together; `reason` says what to change."""

    reason: str


class PeerStages(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The prefill server has other stages, or layers have moved: its `epoch` is a later one."""

    epoch: Count
    stages: tuple[PeerStage, ...]
    lent_tokens: Count = 0


class Want(msgspec.Struct, frozen=True, tag=True):
    """A request of this room waits for its prompt."""

    room: RoomNumber


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first `num_pages` pages of the room's prompt are offered under its number. Of the prompt
    `cached_tokens` tokens did not have to be computed."""

    room: RoomNumber
    num_pages: Count
    cached_tokens: Count


class Borrow(msgspec.Struct, frozen=True, tag=True):
    """The first `num_pages` offered pages of a room that is ready shall stay where they are, with
    room for `num_tokens` tokens in all: the prefill server computes the attention over them. It
    answers `Lent` or `NotLent`, once. Said again now and then while the lease is used.

    `page_hash` is that of the last of these pages (`page_hash.py`), and so of all before it: a room
    of the same number may have another prompt. Where the lease is used it is empty.
    """

    room: RoomNumber
    num_pages: Count
    num_tokens: Count
    page_hash: bytes = b""


class Lent(msgspec.Struct, frozen=True, tag=True):
    """All stages know of a lease under the room's number; it ends with the room."""

    room: RoomNumber


class NotLent(msgspec.Struct, frozen=True, tag=True):
    """The room's pages are not lent. They can be read."""

    room: RoomNumber
    reason: str


class LeaseOver(msgspec.Struct, frozen=True, tag=True):
    """The lease of a room is over: what its request has computed since is lost. The prompt's pages
    can be read."""

    room: RoomNumber
    reason: str


class Got(msgspec.Struct, frozen=True, tag=True):
    """Nothing of the room is read any more, or ever: its prompt may go on for its own client."""

    room: RoomNumber


class End(msgspec.Struct, frozen=True, tag=True):
    """The room has failed, or its client is gone: its request ends with this on both servers."""

    room: RoomNumber
    reason: str
    status: Status


class Ping(msgspec.Struct, frozen=True, tag=True):
    """The sender lives."""


AboutRoom = Ready | Lent | NotLent | LeaseOver | End
FromDecode = PeerHello | Want | Borrow | Got | End | Ping
FromPrefill = PeerWelcome | PeerRejected | PeerStages | AboutRoom | Ping
