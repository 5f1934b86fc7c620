"""Transfers of pages with small pools and a store in memory."""

import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from sgl_pipeline.errors import BrokenObject
from sgl_pipeline.kv_store.atomic_files import Buffer
from sgl_pipeline.kv_store.object_names import object_name
from sgl_pipeline.object_layers import Cuts
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.base.kv_format import encode, head_dim_of
from sgl_pipeline.pp_runner.page_store.page_transfers import PageTransfers
from sgl_pipeline.pp_runner.page_store.stage_offers import PeerSite
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.step_order import INT32
from sgl_pipeline.wire.store_orders import (
    UINT32,
    LoadPages,
    PagesSaved,
    SavePages,
    StorePlace,
    StoreReport,
)

DIGEST = "ukv1-0123456789abcdef"
PLACE = StorePlace(backend="memory", address="", digest=DIGEST, save_bytes_per_s=10**12)
# No peer reaches this stage.
NOWHERE = PeerSite("", "")
NUM_PAGES = 8
WAIT_S = 60.0

_SHAPE = AttentionShape(
    num_query_heads=2,
    num_kv_heads=2,
    head_dim=6,
    value_dim=6,
    page_size=3,
    scale=1.0,
    dtype=torch.float32,
    device=torch.device("cpu"),
)


def shapes_of(dtype: torch.dtype, num_layers: int = 3) -> list[AttentionShape]:
    """The shapes of a model whose layers are not alike: layer 1 has wider values."""
    if dtype in (torch.int8, torch.float8_e4m3fn):
        shape = replace(_SHAPE, dtype=torch.bfloat16, coded_dtype=dtype)
    else:
        shape = replace(_SHAPE, dtype=dtype)
    return [replace(shape, value_dim=10) if layer == 1 else shape for layer in range(num_layers)]


def filled_pool(layers: Iterable[int], shapes: Sequence[AttentionShape], seed: int) -> KvPool:
    """A pool of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    kv_pool = KvPool(layers, shapes, NUM_PAGES)
    for layer in kv_pool.layers:
        for pages in kv_pool.pages(layer):
            numbers = torch.randn(*pages.shape[:3], head_dim_of(pages), generator=generator)
            pages.copy_(encode(numbers.to(shapes[layer].dtype), pages.dtype))
    return kv_pool


def page_content(kv_pool: KvPool, layer: int, page: int) -> bytes:
    """Its keys, then its values."""
    parts = (pages[page].cpu().view(torch.uint8) for pages in kv_pool.pages(layer))
    return b"".join(part.numpy().tobytes() for part in parts)


def pool_content(kv_pool: KvPool) -> list[bytes]:
    return [page_content(kv_pool, *at) for at in _places(kv_pool)]


def _places(kv_pool: KvPool) -> list[tuple[int, int]]:
    return [(layer, page) for layer in kv_pool.layers for page in range(kv_pool.num_pages)]


def hash_of(number: int) -> bytes:
    """The page hash of a made-up page."""
    return number.to_bytes(32, "big")


def save_order(transfer: int, pages: Sequence[int], numbers: Sequence[int]) -> SavePages:
    hashes = b"".join(map(hash_of, numbers))
    return SavePages(transfer, array(INT32, pages).tobytes(), hashes)


def load_order(
    transfer: int,
    pages: Sequence[int],
    numbers: Sequence[int],
    checksums: Sequence[int],
    cuts: Cuts = (),
) -> LoadPages:
    """`checksums` are those of all layers of a page, page by page; all pages have these `cuts`."""
    save = save_order(transfer, pages, numbers)
    return LoadPages(
        transfer,
        save.pages,
        save.hashes,
        array(UINT32, checksums).tobytes(),
        (cuts,) * len(pages),
    )


class MemoryStore:
    """Objects in memory.

    Args:
        on_access: called before each read and write, in the thread of the transfer.
        groups_layers: whether an object has all layers of the stage that writes it.
    """

    def __init__(
        self, on_access: Callable[[], None] = lambda: None, *, groups_layers: bool = False
    ) -> None:
        self.objects: dict[str, bytes] = {}
        self.log: list[str] = []
        self.groups_layers = groups_layers
        self._on_access = on_access

    def write(self, name: str, parts: Sequence[Buffer]) -> list[int]:
        self._on_access()
        self.objects[name] = b"".join(map(bytes, parts))
        self.log.append("write")
        return [zlib.crc32(part) for part in parts]

    def read_into(
        self,
        name: str,
        parts: Sequence[Buffer],
        checksums: Sequence[int],
        num_bytes: int,
        offset: int = 0,
    ) -> None:
        self._on_access()
        content = self.objects.get(name, b"")
        for part in map(memoryview, parts):
            read = content[offset : offset + len(part)]
            part[: len(read)] = read
            offset += len(part)
        self.log.append("read")
        if len(content) != num_bytes or [*map(zlib.crc32, parts)] != [*checksums]:
            raise BrokenObject(f"object {name} is not what was written")

    def delete(self, name: str) -> bool:
        return self.objects.pop(name, None) is not None

    def checksums(self, numbers: Sequence[int], num_layers: int) -> list[int]:
        """Of all objects of these pages, page by page, each of one layer."""
        return [
            zlib.crc32(self.objects.get(layer_object(number, layer), b""))
            for number in numbers
            for layer in range(num_layers)
        ]


def layer_object(number: int, layer: int) -> str:
    """The name of the object of one layer of a page."""
    return object_name(hash_of(number), DIGEST, range(layer, layer + 1))


def open_transfers(
    kv_pool: KvPool,
    plan: StagePlan,
    stage: int,
    store: MemoryStore,
    may_start: Callable[[], bool] = lambda: True,
) -> PageTransfers:
    """The transfers of a stage, to `store` at any place."""
    return PageTransfers(
        stage, kv_pool, lambda: plan, may_start, NOWHERE, lambda place, sizes: store
    )


def await_reports(transfers: PageTransfers, count: int = 1) -> list[StoreReport]:
    """The next `count` reports; fails when they do not come."""
    reports: list[StoreReport] = []
    end_s = time.monotonic() + WAIT_S
    while len(reports) < count:
        assert time.monotonic() < end_s, f"{len(reports)} of {count} reports came"
        reports += [report for report, _ in transfers.take_reports()]
        time.sleep(0.001)
    return reports


def checksums_of(report: StoreReport) -> list[int]:
    assert isinstance(report, PagesSaved)
    return [*array(UINT32, report.checksums)]


class Gate:
    """Holds up the threads that pass it while it is shut."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.arrived = threading.Semaphore(0)

    def __call__(self) -> None:
        self.arrived.release()
        assert self._opened.wait(WAIT_S)

    def open(self) -> None:
        self._opened.set()

    def await_one(self) -> None:
        """Returns when one more thread has come."""
        assert self.arrived.acquire(timeout=WAIT_S)
