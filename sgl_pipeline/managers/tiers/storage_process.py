"""The storage process of a host: runs a storage backend of SGLang for the host's stages and, on
the first host, for the scheduler process. Importing SGLang takes seconds and hundreds of MiB, so
none of these does.

Run by `storage_launch.py` as `python -m sgl_pipeline.managers.tiers.storage_process`.
"""

import argparse
import logging
import socket
import sys

import msgspec

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.tiers.staging_pool import StagingPool, aligned_bytes
from sgl_pipeline.managers.tiers.storage_server import READY, StorageServer, StorageSettings
from sgl_pipeline.managers.tiers.upstream_storage import UpstreamStorage
from sgl_pipeline.process_lifetime import die_with_parent


def serve_storage(settings: StorageSettings, parent: socket.socket) -> None:
    """Sets the backend up, reports to `parent` that it is ready or why not, and serves."""
    chunk_bytes = aligned_bytes(settings.object_bytes)
    try:
        pool = StagingPool(chunk_bytes, settings.max_clients * settings.chunks_each)
        storage = UpstreamStorage(settings.backend, settings.extra_config, settings.digest, pool)
        server = StorageServer(settings, storage, pool.descriptor, chunk_bytes)
    except (ConfigurationError, OSError) as error:
        parent.send(str(error).encode()[:4000])
        sys.exit(1)
    parent.send(READY)
    server.serve()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--socket", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    logging.basicConfig(level=logging.WARNING)
    parent = socket.socket(fileno=arguments.socket)
    settings = msgspec.json.decode(parent.recv(1 << 16), type=StorageSettings)
    serve_storage(settings, parent)


if __name__ == "__main__":
    main()
