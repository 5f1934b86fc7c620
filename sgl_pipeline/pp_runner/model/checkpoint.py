"""Where a stage's weights come from: safetensors files, or random numbers for measurements.

Opened by `StageModel.load`, whose layers ask for one tensor after the other by its Hugging Face
name. Must never read a tensor that was not asked for: a stage holds its own layers and no others.
"""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from sgl_pipeline.errors import CheckpointError, ConfigurationError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Standard deviation of dummy weights; the usual initializer_range of Hugging Face configs.
DUMMY_DEVIATION = 0.02


class WeightSource(Protocol):
    """Gives weights by name, in one dtype on one device. `loaded` maps what was read to bytes."""

    loaded: dict[str, int]

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`, a copy that the caller owns.

        Raises CheckpointError when it is missing or is not of `shape`.
        """

    def has(self, name: str) -> bool:
        """Whether a file holds the tensor `name`; dummy weights are in no file."""


def open_weights(
    path: str | Path, load_format: str, dtype: torch.dtype, device: torch.device
) -> WeightSource:
    """The weights of the model directory `path`; `load_format` is `safetensors` or `dummy`."""
    if load_format == "dummy":
        return DummyWeights(dtype, device)
    if load_format == "safetensors":
        return Checkpoint(path, dtype, device)
    raise ConfigurationError(
        f"load format {load_format!r} is unknown to a stage; known are safetensors and dummy"
    )


class Checkpoint:
    """The safetensors files of a model directory, whole or sharded.

    Raises CheckpointError when the directory holds neither model.safetensors nor its index, or
    when an index or a single file is unreadable; a faulty shard is found when it is first read.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype, device: torch.device) -> None:
        self.loaded: dict[str, int] = {}
        self._directory = Path(path)
        self._dtype = dtype
        self._device = device
        self._opened: dict[str, safe_open] = {}
        self._file_of = self._tensor_files()

    def has(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._file_of:
            raise CheckpointError(
                f"{self._directory} holds no tensor {name} (expected with shape {list(shape)})"
            )
        file_name = self._file_of[name]
        try:
            found = self._open(file_name).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{self._directory / file_name}: tensor {name} is unreadable: {error}"
            ) from None
        if tuple(found.shape) != shape or not found.is_floating_point():
            raise CheckpointError(
                f"{self._directory / file_name}: tensor {name} has shape {list(found.shape)} of "
                f"{found.dtype}, config.json asks for {list(shape)} of floats"
            )
        # Copied, so that nothing keeps the file mapped (a file cut short later would kill us).
        tensor = found.to(self._device, self._dtype, copy=True)
        self.loaded[name] = tensor.nbytes
        return tensor

    def _tensor_files(self) -> dict[str, str]:
        """The file of each tensor."""
        index_path = self._directory / INDEX_FILE
        if not index_path.exists():
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        try:
            weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
            file_of = {str(name): str(file_name) for name, file_name in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index_path} is no index of tensors: {error!r}") from None
        for file_name in set(file_of.values()):
            if Path(file_name).name != file_name:
                raise CheckpointError(f"{index_path} names {file_name!r}, outside the directory")
        return file_of

    def _open(self, file_name: str) -> safe_open:
        if file_name not in self._opened:
            path = self._directory / file_name
            try:
                self._opened[file_name] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise CheckpointError(f"weights file {path} is missing") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is truncated or corrupt: {error}") from None
        return self._opened[file_name]


class PacedWeights:
    """The tensors of `source`, with a `pause` before each."""

    def __init__(self, source: WeightSource, pause: Callable[[], None]) -> None:
        self._source = source
        self._pause = pause
        self.loaded = source.loaded

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self._pause()
        return self._source.read(name, shape)


class DummyWeights:
    """Random weights; a tensor is a function of its name alone, so any split gives one model."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.loaded: dict[str, int] = {}
        self._dtype = dtype
        self._device = device

    def has(self, name: str) -> bool:
        return False

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
            tensor.normal_(0.0, DUMMY_DEVIATION, generator=generator)
        self.loaded[name] = tensor.nbytes
        return tensor
