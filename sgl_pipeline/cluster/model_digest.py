"""Identifies a model, for hosts to compare: its config, its tensors, and a sample of their bytes.

The digest is that of what the stages load, however it is split into files. Imports neither torch
nor safetensors.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from sgl_pipeline.cluster.digest_cache import cached_samples
from sgl_pipeline.cluster.tensor_samples import TensorSample, sample_content
from sgl_pipeline.errors import CheckpointError
from sgl_pipeline.gguf_index import open_gguf, read_gguf_index, weights_file
from sgl_pipeline.model_directory import SINGLE_FILE, indexed_files, read_json_object

# Fields of config.json that say who wrote it; all others may decide what is computed.
_ORIGIN_FIELDS = ("_commit_hash", "_name_or_path", "transformers_version")
_MADE_UP = "dummy"


def model_digest(model_path: str, load_format: str = "safetensors") -> str:
    """Identifies the model in a directory: hexadecimal digits for config.json (with its
    quantization), for names, dtypes and shapes of the tensors, and for their bytes, joined by `-`.

    Hosts compare it, and whatever keeps keys and values beyond a server's life, or hands them to
    another server, keys them by it. To that key it adds what flags decide of keys and values:
    `--dtype`, `--quantization`, `--kv-cache-dtype`, `--page-size`, and the device. Bytes are
    sampled (`tensor_samples.py` says which): it tells models apart that are not made to deceive.

    Args:
        load_format: as `weight_opener`'s; weights that are `dummy` follow from the config, and no
            file of them is read.

    Raises ConfigurationError where config.json is unreadable, CheckpointError where weights are
    missing or truncated.
    """
    directory = Path(model_path)
    config = read_json_object(directory / "config.json")
    config_digits = _digits({name: config[name] for name in config.keys() - {*_ORIGIN_FIELDS}})
    if load_format == _MADE_UP:
        return f"{config_digits}-{_MADE_UP}"
    loaded = _gguf_tensors(directory) if load_format == "gguf" else _loaded_tensors(directory)
    tensors = sorted(loaded.items())
    listing = [(name, sample and (sample.dtype, sample.shape)) for name, sample in tensors]
    contents = [(name, sample and sample.content) for name, sample in tensors]
    return "-".join((config_digits, _digits(listing), _digits(contents)))


def digest_difference(digest: str, other: str) -> str:
    """Describes how models with these digests differ; a host without a model has none, ""."""
    if not digest or not other:
        return "one of them names no model"
    (config, *weights), (other_config, *other_weights) = digest.split("-"), other.split("-")
    differences = ["config.json differs"] if config != other_config else []
    if (weights == [_MADE_UP]) != (other_weights == [_MADE_UP]):
        differences.append("one has the made-up weights of --load-format dummy")
    elif weights[:1] != other_weights[:1]:
        differences.append("the names, dtypes or shapes of tensors differ")
    elif weights != other_weights:
        differences.append("tensors of the same names and shapes have other values")
    return " and ".join(differences)


def _loaded_tensors(directory: Path) -> dict[str, TensorSample | None]:
    """The tensors that a stage could load, by name; None for one that the index places in a file
    which does not have it."""
    file_of = indexed_files(directory)
    if file_of is None:
        return {**cached_samples(directory / SINGLE_FILE)}
    samples = {name: cached_samples(directory / name) for name in sorted({*file_of.values()})}
    return {name: samples[file_name].get(name) for name, file_name in file_of.items()}


def _gguf_tensors(directory: Path) -> dict[str, TensorSample | None]:
    """Samples of the tensors of a GGUF file, unchanged as they lie in it."""
    index, path = read_gguf_index(directory), str(weights_file(directory))
    with open_gguf(directory, index) as file:
        try:
            return {
                name: TensorSample(
                    f"ggml type {tensor.ggml_type}",
                    tensor.shape,
                    sample_content(file, tensor.offset, tensor.num_bytes, path),
                )
                for name, tensor in index.tensors.items()
            }
        except OSError as error:
            raise CheckpointError(f"weights file {path}: {error.strerror}") from None


def _digits(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
