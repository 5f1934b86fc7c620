"""The source of a stage's weights: safetensors files, or random numbers for measurements.
`gguf_weights.py` has that of GGUF files.

Layers ask for one tensor after the other by its Hugging Face name. Must never read a tensor that
was not asked for: a stage holds its own layers and no others.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from sgl_pipeline.errors import CheckpointError, ConfigurationError
from sgl_pipeline.gguf_index import read_gguf_index
from sgl_pipeline.model_directory import SINGLE_FILE, indexed_files

# Standard deviation of dummy weights; the usual initializer_range of Hugging Face configs.
DUMMY_DEVIATION = 0.02


class WeightSource(Protocol):
    """Gives weights by name, in one dtype on one device.

    `loaded` maps the names of read tensors to bytes; with `is_made_up` the weights are in no file.
    """

    loaded: dict[str, int]

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def is_made_up(self) -> bool: ...

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`, a copy that the caller owns.

        Raises CheckpointError when it is missing or is not of `shape`.
        """

    def read_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The same in `dtype`: fp32 from any floats, otherwise as stored. Dimensions of 1 may be
        missing. Not for made-up weights."""

    def read_parts(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Iterator[torch.Tensor]:
        """The parts of the tensor `name` along the first of its dimensions, one after the other:
        copies that the caller owns, as of `read`, or in `dtype` as of `read_as`. Only the part that
        is asked for is in memory."""

    def has(self, name: str) -> bool:
        """True if a file holds the tensor `name`; dummy weights are in no file."""

    def names(self) -> Iterable[str]:
        """The names of all tensors that files hold."""

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor `name` in its file. Raises CheckpointError when it is missing."""


def weight_opener(
    path: str | Path, load_format: str, dtype: torch.dtype, device: torch.device
) -> Callable[[], WeightSource]:
    """Opens the weights of the model directory `path`, as often as it is called; `load_format` is
    `safetensors`, `gguf` or `dummy`.

    The index is read now and kept; no file of weights stays open. Raises CheckpointError as
    `tensor_files` and `read_gguf_index`.
    """
    if load_format == "dummy":
        return partial(DummyWeights, dtype, device)
    if load_format == "safetensors":
        return partial(Checkpoint, path, dtype, device, tensor_files(path))
    if load_format == "gguf":
        from sgl_pipeline.pp_runner.weights.gguf_weights import GgufWeights

        return partial(GgufWeights, path, dtype, device, read_gguf_index(Path(path)))
    raise ConfigurationError(
        f"load format {load_format!r} is unknown to a stage; known are safetensors, gguf and dummy"
    )


def tensor_files(path: str | Path) -> dict[str, str]:
    """The file of each tensor of a model directory, whole or sharded.

    Raises CheckpointError when it holds neither model.safetensors nor its index, or when that is
    unreadable.
    """
    directory = Path(path)
    file_of = indexed_files(directory)
    if file_of is None:
        return dict.fromkeys(_open(directory / SINGLE_FILE).keys(), SINGLE_FILE)
    return file_of


def _open(path: Path) -> safe_open:
    """Maps a safetensors file. Raises CheckpointError."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"weights file {path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or corrupt: {error}") from None


class Checkpoint:
    """The safetensors files of a model directory. A faulty shard is found when it is first read.

    Args:
        file_of: the file of each tensor; None: it is read now, and CheckpointError raised, as in
            `tensor_files`.
    """

    is_made_up = False

    def __init__(
        self,
        path: str | Path,
        dtype: torch.dtype,
        device: torch.device,
        file_of: Mapping[str, str] | None = None,
    ) -> None:
        self.loaded: dict[str, int] = {}
        self.dtype = dtype
        self._directory = Path(path)
        self._device = device
        self._opened: dict[str, safe_open] = {}
        self._file_of = tensor_files(path) if file_of is None else file_of

    def has(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._keep(name, self._find_plain(name, shape), self.dtype)

    def read_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._keep(name, self._find_as(name, shape, dtype), dtype)

    def read_parts(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Iterator[torch.Tensor]:
        if dtype is None:
            found = self._find_plain(name, shape)
        else:
            found = self._find_as(name, shape, dtype)
        # No variable keeps a part, whose memory the next one then takes.
        for mapped in found:
            yield self._keep(name, mapped, dtype or self.dtype)
        self.loaded[name] = found.numel() * (dtype or self.dtype).itemsize

    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._find(name, ()).shape)

    def _find(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as it lies in its file, which is mapped."""
        if name not in self._file_of:
            raise CheckpointError(
                f"{self._directory} holds no tensor {name} (expected with shape {list(shape)})"
            )
        file_name = self._file_of[name]
        if file_name not in self._opened:
            self._opened[file_name] = _open(self._directory / file_name)
        try:
            return self._opened[file_name].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{self._directory / file_name}: tensor {name} is unreadable: {error}"
            ) from None

    def _find_plain(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as it lies in its file, if it fits `read`. Raises CheckpointError."""
        found = self._find(name, shape)
        if tuple(found.shape) != shape or not _is_plain(found):
            raise self._misfit(name, found, shape, "floats")
        return found

    def _find_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The same for `read_as`."""
        found = self._find(name, shape)
        fits = _is_plain(found) if dtype == torch.float32 else found.dtype == dtype
        if _without_ones(found.shape) != _without_ones(shape) or not fits:
            wanted = "floats" if dtype == torch.float32 else str(dtype)
            raise self._misfit(name, found, shape, wanted)
        return found.reshape(shape)

    def _misfit(
        self, name: str, found: torch.Tensor, shape: tuple[int, ...], wanted: str
    ) -> CheckpointError:
        return CheckpointError(
            f"{self._directory / self._file_of[name]}: tensor {name} has shape "
            f"{list(found.shape)} of {found.dtype}, config.json asks for {list(shape)} of {wanted}"
        )

    def _keep(self, name: str, found: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # Copied, so that nothing keeps the file mapped (a file cut short later would kill us).
        tensor = found.to(self._device, dtype, copy=True)
        self.loaded[name] = tensor.nbytes
        return tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if `tensor` holds floats of 16 bits or more, which are meaningful without a scale."""
    return tensor.is_floating_point() and tensor.dtype.itemsize >= 2


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


class DummyWeights:
    """Random weights; a tensor is a function of its name alone, so any split gives one model."""

    is_made_up = True

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.loaded: dict[str, int] = {}
        self.dtype = dtype
        self.device = device

    def has(self, name: str) -> bool:
        return False

    def names(self) -> Iterable[str]:
        return ()

    def shape_of(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError("weights that are made up have the shape that is asked for")

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
            tensor.normal_(0.0, DUMMY_DEVIATION, generator=generator)
        self.loaded[name] = tensor.nbytes
        return tensor

    def read_as(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError("weights that are made up have no tensors of a layout")

    def read_parts(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Iterator[torch.Tensor]:
        if dtype is not None:
            raise NotImplementedError("weights that are made up have no tensors of a layout")
        num_bytes = 0
        for place in range(shape[0]):
            part = self.read(f"{name}[{place}]", shape[1:])
            num_bytes += self.loaded.pop(f"{name}[{place}]")
            yield part
        self.loaded[name] = num_bytes
