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


class UseStore(msgspec.Struct, frozen=True, tag=True):
    """The transfers behind this order use the store at `place`; None: there are none."""

    place: StorePlace | None


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
    """

    transfer: int
    pages: bytes
    hashes: bytes
    checksums: bytes
    cuts: tuple[Cuts, ...]


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
    """The first `num_pages` pages of a `LoadPages` hold what the store has of the stage's layers.

    `message` says why the others do not; then `is_broken` tells whether the object behind them is
    missing, short or altered, which makes its page's record worthless. Reading took `busy_s` and
    brought `num_bytes`.
    """

    stage: Count
    transfer: int
    num_pages: Count
    num_bytes: Count
    busy_s: Seconds
    is_broken: bool = False
    message: str = ""


StoreOrder = UseStore | SavePages | LoadPages
StoreReport = PagesSaved | PagesLoaded
