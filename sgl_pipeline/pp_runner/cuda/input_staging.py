"""Brings a step's index tensors to the GPU in one copy, and the tensors of layer moves beside its
kernels.

It must never let a kernel read before the copy is done, nor page-locked memory be filled again
while it is still being read. The order is tested with emulated streams; the copy beside kernels has
run on an H200, the one between them on no hardware.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sgl_pipeline.pp_runner.base.stream_mark import StreamMark

# Two steps may be under way when the next is prepared, so that it need not wait.
_NUM_BUFFERS = 3


class InputStaging:
    """Copies arrays of int64 and int32 to the device together.

    Args:
        copy: copies one tensor of int64, and makes later launches wait for it.
    """

    def __init__(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._copy = copy

    def __call__(self, arrays: Sequence[np.ndarray]) -> Sequence[torch.Tensor]:
        """The arrays on the device, as views of one tensor."""
        parts = [_in_words(array) for array in arrays]
        copied = self._copy(torch.from_numpy(np.concatenate(parts)))
        places = copied.split_with_sizes([len(part) for part in parts])
        return [
            place if array.dtype == np.int64 else place.view(torch.int32)[: len(array)]
            for array, place in zip(arrays, places, strict=True)
        ]


def _in_words(array: np.ndarray) -> np.ndarray:
    """`array` as int64; two numbers of int32 are one of them."""
    if array.dtype == np.int64:
        return array
    assert array.dtype == np.int32
    if len(array) % 2:
        array = np.concatenate((array, array[:1]))
    return array.view(np.int64)


class CopyBetweenKernels:
    """A copy of int64 on the computing stream, out of page-locked buffers that are used in turn.

    The card waits for it a few microseconds. A stream of its own would take the host longer, and
    the card waits for the host wherever a step needs the tokens of the one before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [_LockedBuffer(device) for _ in range(_NUM_BUFFERS)]
        self._num_copies = 0

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """`values` [N], whose own memory may be used again, on the device."""
        buffer = self._buffers[self._num_copies % _NUM_BUFFERS]
        self._num_copies += 1
        return buffer.send(values)


class _LockedBuffer:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.int64)
        self._sent = StreamMark(device)

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """`values` on the device; waits for the copy of the call before."""
        self._sent.synchronize()
        count = len(values)
        if count > len(self._memory):
            self._memory = torch.empty(2 * count, dtype=torch.int64, pin_memory=True)
        copied = self._memory[:count].copy_(values).to(self._device, non_blocking=True)
        self._sent.record()
        return copied


class CopyBesideKernels:
    """A copy on a stream of its own, out of page-locked memory that torch's allocator uses again
    when the copy is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, whose own memory may be used again, on the device."""
        locked = values.pin_memory()
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copied = locked.to(self._device, non_blocking=True)
        computing.wait_stream(self._stream)
        # It is memory of the copying stream: the next copy may use it only when the kernels are
        # done.
        copied.record_stream(computing)
        return copied
