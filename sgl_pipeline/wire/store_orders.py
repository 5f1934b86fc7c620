"""The orders and reports about pages that outlive the pool: their way to a store and back.

The scheduler decides, the stages read and write beside their steps, each its own layers. An object
holds one page of one layer or, where the store can keep several, of all layers of the stage that
saved it; a stage of another split reads its part. A page is in the store when the scheduler has
written its record, which it does when all stages have saved their layers; until then no lookup
finds it.

`SavePages` names pages that no step writes any more and that are not given away before each stage
has reported. `LoadPages` names pages that no step reads or writes before each stage has reported.
Transfers of one kind run in the sequence of their orders; loads go before saves. A stage forgets
all transfers, without reports, when it gets `UseStore`, a `SwitchPlan`, a `Regroup` or another
assignment, and the scheduler does not wait for them any more. At a `FinishHandover` it refuses
them, with reports.

A server can also read pages out of another server's pool (a peer): that one's scheduler offers
them by `OfferPages`, and this one's orders a `LoadPages` with a source. The offered pages are
locked from before the offer until after `WithdrawPages` is in the stream: a stage that has obeyed
it lets no peer read them any more. A stage forgets offers where it forgets transfers, also at a
`FinishHandover`; the scheduler makes them again behind it, under the same numbers.
"""

from typing import Annotated

import msgspec

from sgl_pipeline.object_layers import Cuts

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]

# array typecode of checksums on the wire: uint32
UINT32 = "I"


class StorePlace(msgspec.Struct, frozen=True, kw_only=True):
    """The store of a server, as its stages find it.

    `backend` is "file", whose `address` is a folder; "host", without an address, for which each
    stage keeps `host_pages` pages in memory of its own; or the name of another storage backend,
    whose `address` is the Unix socket of the host's storage process. `digest` names model, weights,
    dtype and layout (`kv_store/object_names.py`). A stage saves at most
    `save_bytes_per_s`, and leaves `min_free_bytes` of a folder's disk free.
    """

    backend: str
    address: str
    digest: str
    save_bytes_per_s: Annotated[int, msgspec.Meta(gt=0)]
    host_pages: Count = 0
    min_free_bytes: Count = 1 << 30


class PeerStage(msgspec.Struct, frozen=True):
    """A stage of a peer: its first layer and the one after its last, and the port of its host with
    its door there, `HOST:PORT/DOOR` (`offer_door`)."""

    address: str
    layers: tuple[Count, Count]


class PeerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A server that offers pages. `digest` is as in `StorePlace`, and equal on both servers;
    `stages` have all layers of the model, split in any way."""

    name: str
    digest: str
    stages: tuple[PeerStage, ...]


class UseStore(msgspec.Struct, frozen=True, tag=True):
    """The transfers behind this order use the store at `place`, and read pages of `peers`; None,
    and no peers: there are no transfers."""

    place: StorePlace | None
    peers: tuple[PeerPlace, ...] = ()


class SavePages(msgspec.Struct, frozen=True, tag=True):
    """Write what `pages` hold to the store.

    `transfer` is unique for the life of the server. `pages` is an int32 array, `hashes` has the
    page hash of each (`page_hash.py`), one after the other.
    """

    transfer: int
    pages: bytes
    hashes: bytes


class LoadPages(msgspec.Struct, frozen=True, tag=True):
    """Fill `pages` from the store, the fields as in `SavePages`.

    `checksums` is a uint32 array [pages, layers of the model]: of each layer the CRC-32, or the
    number that host memory gave it. `cuts` says of each page which layers share an object.

    With a `source` the pages come from the peer of that name, as part of what it has offered under
    the number `offer`; `checksums` and `cuts` are then empty, since each frame brings its own sum.
    """

    transfer: int
    pages: bytes
    hashes: bytes
    checksums: bytes
    cuts: tuple[Cuts, ...]
    source: str = ""
    offer: Count = 0


class EndLoad(msgspec.Struct, frozen=True, tag=True):
    """Read no more of a `LoadPages` with a source: its report follows soon, of the pages that have
    come. Without effect behind the report."""

    transfer: int


class OfferPages(msgspec.Struct, frozen=True, tag=True):
    """Let peers whose `digest` is this one read `pages`, the fields as in `SavePages`, until the
    offer is withdrawn or forgotten.

    `offer` is unique, as a room of two servers is: what was withdrawn is never offered again under
    its number. A peer that asks for an offer early waits for it a while.
    """

    offer: Count
    pages: bytes
    hashes: bytes
    digest: str


class WithdrawPages(msgspec.Struct, frozen=True, tag=True):
    """Let no peer read what was offered under `offer`, if anything was."""

    offer: Count


class PagesSaved(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The stage has written its layers of the first `num_pages` pages of a `SavePages`.

    `layers` are the first layer of the stage and the one after its last; they share an object if
    `is_grouped`. `checksums` is a uint32 array [num_pages, layers of the stage] as that of
    `LoadPages`, `sizes` the bytes of a page of each layer. `message` says why pages are missing; it
    is empty when none is. Writing took `busy_s`, the pauses that keep its rate aside.
    """

    stage: Count
    transfer: int
    num_pages: Count
    layers: tuple[Count, Count]
    sizes: tuple[Count, ...]
    checksums: bytes
    busy_s: Seconds
    is_grouped: bool = False
    message: str = ""


class PagesLoaded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first `num_pages` pages of a `LoadPages` hold what its source has of the stage's layers.

    `message` says why the others do not; then `is_broken` says whether the object behind them is
    missing, short or altered, which makes its page's record worthless. A peer has no records: of
    its pages none is broken. Reading took `busy_s` and brought `num_bytes`.
    """

    stage: Count
    transfer: int
    num_pages: Count
    num_bytes: Count
    busy_s: Seconds
    is_broken: bool = False
    message: str = ""


def offer_door(worker: int) -> str:
    """The door at its host's port behind which a worker's stage offers pages."""
    return f"offers-{worker}"


StoreOrder = UseStore | SavePages | LoadPages | EndLoad
OfferOrder = OfferPages | WithdrawPages
StoreReport = PagesSaved | PagesLoaded
