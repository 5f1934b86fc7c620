"""Small model directories of safetensors files, made without torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_pipeline.model_directory import INDEX_FILE, SINGLE_FILE

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "rms_norm_eps": 1e-6}


def write_config(directory: Path, **changes: Any) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))


def write_weights(path: Path, tensors: Mapping[str, bytes], dtype: str = "U8") -> None:
    """Vectors of bytes; safetensors files are a header's length, a header and the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, content in tensors.items():
        start, end = end, end + len(content)
        header[name] = {"dtype": dtype, "shape": [len(content)], "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(tensors.values()))


def whole_model(directory: Path, tensors: Mapping[str, bytes]) -> Path:
    """A model in one file."""
    write_config(directory)
    write_weights(directory / SINGLE_FILE, tensors)
    return directory


def sharded_model(directory: Path, *shards: Mapping[str, bytes]) -> Path:
    """The same in several, with their index."""
    write_config(directory)
    weight_map = {}
    for number, tensors in enumerate(shards):
        write_weights(directory / f"model-{number}.safetensors", tensors)
        weight_map |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return directory
