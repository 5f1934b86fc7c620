"""The page hashes of prefixes in the radix tree, each computed once and kept on its node."""

from collections.abc import Sequence

from sgl_pipeline.page_hash import page_hashes
from sgl_pipeline.scheduling.radix_tree import RadixNode


def hashes_of(node: RadixNode, page_size: int) -> Sequence[bytes]:
    """The hash of each page of `node`, which is not the root."""
    unknown: list[RadixNode] = []
    above = node
    while above.parent is not None and not above.page_hashes:
        unknown.append(above)
        above = above.parent
    for one in reversed(unknown):
        one.page_hashes = page_hashes(one.tokens, page_size, _prior(one))
    return node.page_hashes


def prefix_hashes(path: RadixNode, page_size: int) -> list[bytes]:
    """The hashes of all pages from the root to the end of `path`."""
    runs: list[Sequence[bytes]] = []
    node = path
    while node.parent is not None:
        runs.append(hashes_of(node, page_size))
        node = node.parent
    return [page_hash for run in reversed(runs) for page_hash in run]


def _prior(node: RadixNode) -> bytes:
    """The hash before the first page of `node`: of its parent's last page, or of its namespace."""
    assert node.parent is not None
    if node.parent.parent is not None:
        return node.parent.page_hashes[-1]
    assert isinstance(node.key, tuple)
    return bytes.fromhex(node.key[0])
