"""Shared memory that looks to SGLang's storage backends like its host pool of keys and values.

Backends (SGLang 0.5.23, `mem_cache/storage/`) read and write pages of a `HostKVCache`
(`mem_cache/pool_host/base.py`). Here a page is one chunk: any object, as bytes. The pool claims to
be of the MLA kind, since backends then store one object under a key and not keys and values apart.
"""

import mmap
import os
from typing import Any

import torch

# Direct I/O wants chunks that begin at a multiple of it.
ALIGNMENT_BYTES = mmap.PAGESIZE


def aligned_bytes(num_bytes: int) -> int:
    """The size of the fewest whole memory pages that hold `num_bytes`."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class StagingPool:
    """`num_chunks` chunks of `chunk_bytes` each; upstream's names are those of its pools.

    Args:
        chunk_bytes: a multiple of ALIGNMENT_BYTES.
    """

    layout = "page_first"
    page_size = layer_num = head_num = 1
    dtype = torch.uint8
    device = "cpu"
    pin_memory = False
    storage_format_tag = None

    def __init__(self, chunk_bytes: int, num_chunks: int) -> None:
        assert chunk_bytes % ALIGNMENT_BYTES == 0
        self.descriptor = os.memfd_create("kv-staging", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, chunk_bytes * num_chunks)
        memory = mmap.mmap(self.descriptor, chunk_bytes * num_chunks)
        self.kv_buffer = torch.frombuffer(memory, dtype=torch.uint8).view(num_chunks, chunk_bytes)
        self.k_buffer = self.v_buffer = self.kv_buffer
        self.size = self.page_num = num_chunks
        self.head_dim = self.size_per_token = chunk_bytes

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """A view of chunk `index`: uint8 [chunk_bytes]."""
        return self.kv_buffer[int(index)]

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.head_dim, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.kv_buffer[int(index)].copy_(page)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Addresses and sizes of chunks."""
        base, size = self.kv_buffer.data_ptr(), self.head_dim
        return [base + int(index) * size for index in indices], [size] * len(indices)

    def get_ksize_per_token(self) -> int:
        return self.head_dim

    def get_size_per_token(self) -> int:
        return self.head_dim

    def is_stride_page_aligned(self, page_bytes: int = ALIGNMENT_BYTES) -> bool:
        return self.kv_buffer.data_ptr() % page_bytes == 0 and self.head_dim % page_bytes == 0

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return [self.kv_buffer]
