"""Pages in a store, as stages and scheduler write and find them."""

import array
import itertools
import random
from collections.abc import Callable
from pathlib import Path

from sgl_pipeline.kv_store.disk_guard import DiskGuard
from sgl_pipeline.kv_store.file_store import FileStore
from sgl_pipeline.kv_store.folder_bounds import StoreBounds
from sgl_pipeline.kv_store.object_files import ObjectFiles
from sgl_pipeline.kv_store.object_names import namespace_digest, object_name
from sgl_pipeline.kv_store.page_store import ObjectStore, PageStore
from sgl_pipeline.kv_store.store_folder import open_folder
from sgl_pipeline.object_layers import Cuts, object_layers
from sgl_pipeline.page_record import PageRecord

NUM_LAYERS = 3
DIGEST = namespace_digest(model_id="m", dtype="bfloat16", page_size=16, num_kv_heads=2)

UNBOUNDED = StoreBounds(min_free_bytes=0)


def page_hash(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def page_content(number: int, layer: int, num_bytes: int = 96) -> bytes:
    return random.Random(number * 1000 + layer).randbytes(num_bytes)


def open_store(
    path: Path,
    *,
    bounds: StoreBounds = UNBOUNDED,
    clock: Callable[[], float] | None = None,
    digest: str = DIGEST,
) -> tuple[FileStore, ObjectFiles]:
    """Both ends of a store, on any machine however full its disk."""
    folder = open_folder(path)
    times = {} if clock is None else {"clock": clock}
    guard = DiskGuard(folder, min_free_bytes=0, **times)
    return FileStore(folder, digest, NUM_LAYERS, bounds, **times), ObjectFiles(folder, guard)


def write_objects(
    objects: ObjectStore, number: int, digest: str = DIGEST, cuts: Cuts | None = None
) -> PageRecord:
    """The record to commit of a page whose objects it writes, by default as two stages do where
    layers can be grouped."""
    if cuts is None:
        cuts = (0, 1) if objects.groups_layers else ()
    checksums = array.array("I")
    for layers in object_layers(cuts, NUM_LAYERS):
        contents = [page_content(number, layer) for layer in layers]
        checksums.extend(objects.write(object_name(page_hash(number), digest, layers), contents))
    return PageRecord(page_hash(number), (96,) * NUM_LAYERS, checksums.tobytes(), cuts)


def save_page(
    store: PageStore,
    objects: ObjectStore,
    number: int,
    digest: str = DIGEST,
    cuts: Cuts | None = None,
) -> None:
    store.commit([write_objects(objects, number, digest, cuts)])


def read_page(objects: ObjectStore, record: PageRecord) -> list[bytes]:
    """The content of each layer of a page. Raises BrokenObject."""
    checksums = array.array("I", record.checksums)
    contents = [bytearray(size) for size in record.sizes]
    for layers in record.objects:
        of_object = slice(layers.start, layers.stop)
        objects.read_into(
            object_name(record.page_hash, DIGEST, layers),
            contents[of_object],
            checksums[of_object],
            sum(record.sizes[of_object]),
        )
    return [*map(bytes, contents)]


def contents_of(number: int) -> list[bytes]:
    return [page_content(number, layer) for layer in range(NUM_LAYERS)]


def tend_until_idle(store: PageStore) -> None:
    for _ in itertools.takewhile(lambda wait_s: wait_s == 0.0, iter(store.tend, None)):
        pass
