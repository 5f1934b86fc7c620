"""The record that commits a page to a store."""

from typing import Annotated

import msgspec

from sgl_pipeline.object_layers import Cuts, object_layers

Size = Annotated[int, msgspec.Meta(ge=0)]


class PageRecord(msgspec.Struct, frozen=True, array_like=True):
    """A page whose layers are all in the store.

    `sizes` has the bytes of each layer, `checksums` is a uint32 array of their CRC-32. `cuts` says
    which layers share an object.
    """

    page_hash: bytes
    sizes: tuple[Size, ...]
    checksums: bytes
    cuts: Cuts = ()

    @property
    def objects(self) -> tuple[range, ...]:
        """The layers of each object."""
        return object_layers(self.cuts, len(self.sizes))
