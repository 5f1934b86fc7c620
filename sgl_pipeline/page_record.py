"""The record that commits a page to a store."""

from typing import Annotated

import msgspec

Size = Annotated[int, msgspec.Meta(ge=0)]


class PageRecord(msgspec.Struct, frozen=True, array_like=True):
    """A page whose layers are all in the store.

    `sizes` has the bytes of each layer's object, `checksums` is a uint32 array of their CRC-32.
    """

    page_hash: bytes
    sizes: tuple[Size, ...]
    checksums: bytes
