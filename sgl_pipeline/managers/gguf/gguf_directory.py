"""The model directory of a GGUF file: made once, in the user's cache, and found there later.

It holds config.json, the index of the tensors and a link to the file, so that whatever reads a
model directory reads a GGUF model, too; the tokenizer's files come when they are asked for. Its
name tells one content of a file from another by path, size and times.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.gguf_index import WEIGHTS_FILE, write_gguf_index
from sgl_pipeline.managers.gguf.gguf_config import config_of
from sgl_pipeline.managers.gguf.gguf_file import read_gguf_file
from sgl_pipeline.managers.gguf.gguf_tensors import index_of
from sgl_pipeline.managers.gguf.gguf_tokenizer import write_tokenizer
from sgl_pipeline.pp_runner.model.model_spec import model_spec
from sgl_pipeline.user_cache import make_private, user_cache_directory

# To be raised when other content is written for the same file.
_VERSION = 1
_TOKENIZER_FILE = "tokenizer.json"


def gguf_directory(path: Path) -> Path:
    """The model directory of the GGUF file `path`, made now unless it was before.

    Raises CheckpointError where it is not a whole GGUF file, UnsupportedModelError for unknown
    contents, ConfigurationError where there is no place for the directory.
    """
    source = path.resolve()
    target = _place(source)
    if target.is_dir():
        return target
    file = read_gguf_file(source)
    config = config_of(file)
    index = index_of(file, model_spec(config))
    with _Draft(target) as draft:
        (draft / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        write_gguf_index(draft, index)
        (draft / WEIGHTS_FILE).symlink_to(source)
    return target


def add_tokenizer(directory: Path) -> None:
    """Writes the tokenizer of a directory made by `gguf_directory`, unless it is there.

    Raises UnsupportedModelError as `write_tokenizer`.
    """
    if (directory / _TOKENIZER_FILE).is_file():
        return
    file = read_gguf_file((directory / WEIGHTS_FILE).resolve())
    with tempfile.TemporaryDirectory(dir=directory) as draft:
        write_tokenizer(file, Path(draft))
        # The one that is looked for comes last.
        written = sorted(Path(draft).iterdir(), key=lambda one: one.name == _TOKENIZER_FILE)
        for one in written:
            os.replace(one, directory / one.name)


def _place(source: Path) -> Path:
    try:
        status = source.stat()
        cache = user_cache_directory()
        for directory in (cache, cache / "gguf"):
            make_private(directory)
    except (OSError, RuntimeError) as error:  # the latter where there is no home directory
        raise ConfigurationError(
            f"{source}: there is no place for its config and tokenizer: {error}; point "
            "XDG_CACHE_HOME elsewhere"
        ) from None
    facts = (_VERSION, str(source), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    digits = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return cache / "gguf" / f"{source.stem}-{digits}"


class _Draft:
    """A directory that becomes `target` at the end of the block, or vanishes with an error. Where
    another process was quicker, its directory stays: both have the same content."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __enter__(self) -> Path:
        self._draft = Path(tempfile.mkdtemp(dir=self._target.parent))
        return self._draft

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                os.rename(self._draft, self._target)
        except OSError:
            if not self._target.is_dir():
                raise
        finally:
            shutil.rmtree(self._draft, ignore_errors=True)
