"""The device of a stage, and the transport of inputs to it and outputs from it.

`kernel_choice.py` chooses the kernels on the device, `kv_capacity.py` measures its room.
"""

from collections.abc import Callable

import torch

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.base.download import Download, NoDownload
from sgl_pipeline.pp_runner.base.step_inputs import Upload
from sgl_pipeline.pp_runner.cuda.input_staging import (
    CopyBesideKernels,
    CopyBetweenKernels,
    InputStaging,
)
from sgl_pipeline.pp_runner.cuda.output_staging import DownloadBesideKernels


def open_device(name: str, gpu: int) -> torch.device:
    """The device that `--device cpu|cuda` means; `gpu` is the index of the GPU on this host.

    Raises ConfigurationError when the name is unknown or there is no such device.
    """
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise ConfigurationError(f"--device {name!r} is not supported; choose cpu or cuda")
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "--device cuda: torch finds no NVIDIA GPU here (or is a CPU build); use --device cpu"
        )
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    return device


def count_gpus() -> int:
    """The GPUs that this process may use; touches none of them."""
    return torch.cuda.device_count()


def release_memory(device: torch.device) -> None:
    """Gives back GPU memory that torch keeps for tensors that are gone."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def make_upload(device: torch.device) -> Upload | None:
    """The transport of a step's index tensors to `device`; None if they need not move."""
    return InputStaging(CopyBetweenKernels(device)) if device.type == "cuda" else None


def make_copy(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """A copy of the host's tensors to `device`, beside its kernels and apart from `make_upload`."""
    return CopyBesideKernels(device) if device.type == "cuda" else lambda values: values


def make_download(device: torch.device) -> Download:
    """The transport of a step's results from `device` to the host."""
    return DownloadBesideKernels(device) if device.type == "cuda" else NoDownload()
