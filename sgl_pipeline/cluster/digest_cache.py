"""Keeps the samples of a weights file, so that the next start of a host need not read it again.

One file of JSON for each weights file, in `digests/` of the user's cache. A record holds as long as
path, size and times of the file are what they were. Whatever is wrong with the cache costs the time
that it would have saved, and no more.
"""

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import msgspec

from sgl_pipeline.cluster.tensor_samples import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    WHOLE_BYTES,
    TensorSample,
    sample_tensors,
)
from sgl_pipeline.decoding import decode
from sgl_pipeline.errors import CheckpointError, MalformedData
from sgl_pipeline.user_cache import make_private, user_cache_directory

logger = logging.getLogger(__name__)

# Records of samples that were taken otherwise are not used.
_SAMPLING = f"1: {NUM_BLOCKS} x {BLOCK_BYTES}, whole up to {WHOLE_BYTES}"


class _Stamp(msgspec.Struct, frozen=True):
    """Identifies one state of a file, whose path makes the record's name. Unpackers and
    `rsync --times` set the modification time; the time of the inode's change still differs, also
    where hosts share this cache."""

    sampling: str
    size: int
    mtime_ns: int
    ctime_ns: int


class _Record(msgspec.Struct, frozen=True):
    stamp: _Stamp
    tensors: dict[str, TensorSample]


def cached_samples(path: Path) -> dict[str, TensorSample]:
    """The tensors of a safetensors file by name, read only where no record of them holds.

    Raises CheckpointError where the file is missing, unreadable, or no whole safetensors file.
    """
    real_path = os.path.realpath(path)
    try:
        file = os.open(real_path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointError(f"weights file {path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"weights file {path}: {error.strerror}") from None
    try:
        # Taken before the content, so that a later change is one.
        status = os.fstat(file)
        stamp = _Stamp(_SAMPLING, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        record_path = _record_path(real_path)
        if record_path is not None and (tensors := _read(record_path, stamp)) is not None:
            return tensors
        tensors = sample_tensors(file, str(path))
    except OSError as error:
        raise CheckpointError(f"weights file {path}: {error.strerror}") from None
    finally:
        os.close(file)
    if record_path is not None:
        _write(record_path, _Record(stamp, tensors))
    return tensors


def _record_path(real_path: str) -> Path | None:
    """The path of a weights file's record; None, with a warning, where no cache can be trusted."""
    try:
        cache = user_cache_directory()
        for directory in (cache, cache / "digests"):
            make_private(directory)
    except (OSError, RuntimeError) as error:  # the latter where there is no home directory
        _warn(error)
        return None
    return cache / "digests" / f"{hashlib.sha256(os.fsencode(real_path)).hexdigest()}.json"


def _read(record_path: Path, stamp: _Stamp) -> dict[str, TensorSample] | None:
    """The tensors of the record, where it holds for `stamp`."""
    try:
        record = decode(msgspec.json.Decoder(_Record), record_path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, MalformedData) as error:
        logger.info("%s is damaged, and made anew: %s", record_path, error)
        return None
    return record.tensors if record.stamp == stamp else None


def _write(record_path: Path, record: _Record) -> None:
    """A reader sees all of it or none."""
    try:
        with tempfile.NamedTemporaryFile(dir=record_path.parent, delete=False) as draft:
            try:
                draft.write(msgspec.json.encode(record))
                draft.flush()
                os.replace(draft.name, record_path)
            except OSError:
                os.unlink(draft.name)
                raise
    except OSError as error:
        _warn(error)


def _warn(error: Exception) -> None:
    logger.warning(
        "samples of the model's weights are not kept, so each start reads them again: %s; "
        "point XDG_CACHE_HOME elsewhere",
        error,
    )
