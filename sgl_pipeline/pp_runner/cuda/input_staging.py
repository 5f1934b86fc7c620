"""Brings a step's index tensors to the GPU in one copy, beside the kernels of the step before.

Layer moves use its copy too. It must never let a kernel read before the copy is done, nor a
page-locked buffer be filled again while it is still being read: torch's allocator of page-locked
memory ensures the latter: it makes as many buffers as there are copies under way. The packing is
tested on CPU; the copy has run on an H200, the test of its order has not.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch


class InputStaging:
    """Copies int64 arrays to the device together.

    Args:
        copy: copies one array, and makes later launches wait for it.
    """

    def __init__(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._copy = copy

    def __call__(self, arrays: Sequence[np.ndarray]) -> Sequence[torch.Tensor]:
        """The arrays on the device, as views of one tensor."""
        assert all(array.dtype == np.int64 for array in arrays)
        together = torch.from_numpy(np.concatenate(arrays))
        return self._copy(together).split([len(array) for array in arrays])


class CopyBesideKernels:
    """A copy on a stream of its own, out of page-locked memory."""

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
