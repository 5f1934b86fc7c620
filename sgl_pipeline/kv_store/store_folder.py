"""The folder of a store: who may use it, and where files lie in it.

Objects lie in the folder itself as `{object name}.bin`, where SGLang's `HiCacheFile` (0.5.23,
`mem_cache/hicache_storage.py`) finds and leaves them too. Records lie in `records/{digest}/`, out
of reach of its `clear`, and so does the marker that makes a folder ours.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sgl_pipeline.decoding import decode
from sgl_pipeline.errors import ConfigurationError, MalformedData
from sgl_pipeline.kv_store.atomic_files import DRAFT_NAME, write_atomically

FORMAT_VERSION = 1
# SGLang's key for the same thing.
FOLDER_SETTING = '"file_storage_path" of --hicache-storage-backend-extra-config'

_RECORDS = "records"
_MARKER = "format.json"


class _Marker(msgspec.Struct, frozen=True):
    format_version: int


@dataclass(frozen=True)
class StoreFolder:
    """A folder that is a store of this format."""

    path: str

    @property
    def records(self) -> str:
        """Has a folder of records for each digest."""
        return f"{self.path}/{_RECORDS}"

    def records_of(self, digest: str) -> str:
        return f"{self.records}/{digest}"

    def object_file(self, name: str) -> str:
        return f"{self.path}/{name}.bin"

    def free_bytes(self) -> int:
        """The bytes that this user can still write to the folder's file system."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize


def open_folder(path: str | Path) -> StoreFolder:
    """The store in a folder, which is made where it is missing or empty.

    Raises ConfigurationError where the folder is not this user's, has files but is not a store, or
    is a store of another format. It is then left as it is.
    """
    folder = StoreFolder(os.path.abspath(path))
    try:
        os.makedirs(folder.path, mode=0o700, exist_ok=True)
        _check_owner(folder.path)
        _check_marker(folder)
        os.chmod(folder.path, 0o700)
    except OSError as error:
        raise ConfigurationError(
            f"the folder {path} cannot hold a store of pages: {error.strerror}; "
            f"set {FOLDER_SETTING}"
        ) from None
    return folder


def _check_owner(path: str) -> None:
    if os.stat(path).st_uid != os.getuid():
        raise ConfigurationError(
            f"the folder {path} belongs to another user, who could read and alter cached prompts; "
            f"name one of yours in {FOLDER_SETTING}"
        )


def _check_marker(folder: StoreFolder) -> None:
    """Makes the marker in an empty folder; two servers may do so at once."""
    marker = Path(folder.records, _MARKER)
    if not marker.exists():
        _check_empty(folder.path)
        os.makedirs(folder.records, mode=0o700, exist_ok=True)
        content = msgspec.json.encode(_Marker(FORMAT_VERSION))
        write_atomically(folder.records, _MARKER, [content])
    try:
        version = decode(msgspec.json.Decoder(_Marker), marker.read_bytes()).format_version
    except MalformedData as error:
        raise ConfigurationError(
            f"{marker} cannot be read ({error}), so the store may be of another format; "
            f"remove {folder.path} or name another folder in {FOLDER_SETTING}"
        ) from None
    if version != FORMAT_VERSION:
        raise ConfigurationError(
            f"the folder {folder.path} is a store of format {version}, this version reads "
            f"{FORMAT_VERSION}; name another folder in {FOLDER_SETTING}"
        )


def _check_empty(path: str) -> None:
    names = {name for name in os.listdir(path) if not DRAFT_NAME.fullmatch(name)} - {_RECORDS}
    if names:
        raise ConfigurationError(
            f"the folder {path} holds files that are not of a store, such as {min(names)!r}; "
            f"name an empty or new folder in {FOLDER_SETTING}"
        )
