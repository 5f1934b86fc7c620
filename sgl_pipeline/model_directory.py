"""Reads a model directory in Hugging Face format: its JSON files, and the file of each tensor; and
tells one from a GGUF file.

It needs no torch.
"""

import json
from pathlib import Path
from typing import Any

from sgl_pipeline.errors import CheckpointError, ConfigurationError
from sgl_pipeline.gguf_index import INDEX_FILE as GGUF_INDEX_FILE

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model directory. Raises ConfigurationError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"--model-path {path.parent} holds no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


def indexed_files(directory: Path) -> dict[str, str] | None:
    """The file of each tensor in the index of a sharded model; None if there is no index, so that
    all tensors are in `SINGLE_FILE`.

    Raises CheckpointError if the index is unreadable or leads out of the directory.
    """
    index_path = directory / INDEX_FILE
    if not index_path.exists():
        return None
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        file_of = {str(name): str(file_name) for name, file_name in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index_path} is not an index of tensors: {error!r}") from None
    for file_name in set(file_of.values()):
        if Path(file_name).name != file_name:
            raise CheckpointError(f"{index_path} names {file_name!r}, outside the directory")
    return file_of


def weight_format(asked: str, model: str | Path | None) -> str:
    """The format that `--load-format asked` means for a stage: `auto` is `gguf` where `model` is a
    GGUF file, or a directory with GGUF files and no safetensors; else `safetensors`. A hub id has
    these."""
    if asked != "auto":
        return asked
    path = Path(model or "").expanduser()
    if not path.is_dir() or model is None:
        return "gguf" if path.is_file() else "safetensors"
    if (path / GGUF_INDEX_FILE).is_file():
        return "gguf"
    has_gguf = any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    return "gguf" if has_gguf else "safetensors"


def find_gguf_file(path: Path) -> Path:
    """The GGUF file that `path` is, or the only one in it. Raises ConfigurationError."""
    if path.is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(one.name for one in found) or "none"
        raise ConfigurationError(
            f"--model-path {path} must hold one GGUF file, and holds {names}; name a file"
        )
    return found[0]
