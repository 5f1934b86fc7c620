"""Hashes that name a page by its tokens and all before it.

The scheme is SGLang's, so that stores can be shared (0.5.23, `mem_cache/cpp_utils/hash_binding.cpp`
and `mem_cache/utils.py`): the SHA-256 of the hash before it and of the page's tokens as
little-endian uint32. The first page of the default namespace has nothing before it; that of another
one has the digest of the namespace.
"""

import hashlib
from array import array
from collections.abc import Sequence

HASH_BYTES = hashlib.sha256().digest_size


def page_hashes(tokens: Sequence[int], page_size: int, prior: bytes = b"") -> list[bytes]:
    """The hash of each whole page of `tokens`, which follow the page whose hash is `prior`."""
    hashes = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        content = array("I", tokens[start : start + page_size]).tobytes()
        prior = hashlib.sha256(prior + content).digest()
        hashes.append(prior)
    return hashes


def split_hashes(hashes: bytes) -> list[bytes]:
    """The hashes that lie one behind the other in `hashes`."""
    return [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]


def namespace_hash(parts: Sequence[str | None]) -> bytes:
    """The hash before the first page of a namespace; empty for the default one.

    `parts` are the strings that keep prefixes apart, upstream's `extra_key` first.
    """
    if not any(part is not None for part in parts):
        return b""
    digest = hashlib.sha256(b"sglang-cache-namespace-v1")
    for part in parts:
        if part is None:
            digest.update(b"\x00")
        else:
            text = part.encode()
            digest.update(b"\x01" + len(text).to_bytes(8, "little") + text)
    return digest.digest()
