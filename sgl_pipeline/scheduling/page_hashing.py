"""The page hashes of prefixes in the radix tree, each computed once.

The hash at a node's end stays on the node. A node's pages follow from its parent's hash.
"""

from sgl_pipeline.page_hash import page_hashes
from sgl_pipeline.scheduling.radix_tree import RadixNode


def hashes_of(node: RadixNode, page_size: int) -> list[bytes]:
    """The hash of each page of `node`, which is not the root."""
    unknown = [node]
    while (above := unknown[-1].parent) is not None and above.page_hash is None:
        if above.parent is None:
            break
        unknown.append(above)
    hashes: list[bytes] = []
    for one in reversed(unknown):
        hashes = page_hashes(one.tokens, page_size, _prior(one))
        one.page_hash = hashes[-1]
    return hashes


def prefix_hashes(path: RadixNode, page_size: int) -> list[bytes]:
    """The hashes of all pages from the root to the end of `path`."""
    runs: list[list[bytes]] = []
    node = path
    while node.parent is not None:
        runs.append(hashes_of(node, page_size))
        node = node.parent
    return [page_hash for run in reversed(runs) for page_hash in run]


def _prior(node: RadixNode) -> bytes:
    """The hash before the first page of `node`: of its parent, or of its namespace."""
    assert node.parent is not None
    if node.parent.parent is not None:
        assert node.parent.page_hash is not None
        return node.parent.page_hash
    assert isinstance(node.key, tuple)
    return bytes.fromhex(node.key[0])
