"""Memory and events of a GPU that another process can open by a handle of 64 bytes.

Used by `links/cuda_ipc_link.py`. torch shares memory between processes by pickling; this calls the
driver's documented functions (CUDA driver API, memory management and unified addressing) instead,
so that nothing but fixed structs crosses a socket. Untested on hardware.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from sgl_pipeline.errors import ConfigurationError

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE, of memory and of events
_LAZY_ENABLE_PEER_ACCESS = 1


class SharedEvent(Protocol):
    """A moment of a stream that another process can make its streams wait for."""

    def record(self) -> None:
        """Marks this moment of the current stream."""

    def wait(self) -> None:
        """Makes the current stream wait for the last mark that was set when this is called."""

    def handle(self) -> bytes:
        """For `DeviceMemory.open_event` in another process."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedRegion:
    """Device memory. `data` is [bytes] uint8; `handle` opens it in another process."""

    data: torch.Tensor
    handle: bytes


class DeviceMemory(Protocol):
    """What a link needs of a GPU; tests put the host's memory in its place."""

    def allocate(self, num_bytes: int) -> SharedRegion:
        """New memory, which lives until the process ends."""

    def open(self, handle: bytes, num_bytes: int) -> torch.Tensor:
        """Another process's memory, [num_bytes] uint8; valid while that process lives."""

    def new_event(self) -> SharedEvent: ...

    def open_event(self, handle: bytes) -> SharedEvent: ...


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaMemory:
    """The memory of one GPU, by the driver that torch has loaded.

    Raises ConfigurationError when the driver cannot be called, or will not share.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)  # from here on the thread has torch's context
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigurationError(f"the CUDA driver cannot be loaded: {error}") from error

    def allocate(self, num_bytes: int) -> SharedRegion:
        address, handle = ctypes.c_uint64(), _Handle()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return SharedRegion(self._tensor(address.value, num_bytes), bytes(handle))

    def open(self, handle: bytes, num_bytes: int) -> torch.Tensor:
        address = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
        )
        return self._tensor(address.value, num_bytes)

    def new_event(self) -> "CudaEvent":
        return CudaEvent(torch.cuda.Event(interprocess=True))

    def open_event(self, handle: bytes) -> "CudaEvent":
        return CudaEvent.open(self._device, handle)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
            reason = (text.value or b"unknown").decode()
            raise ConfigurationError(
                f"{name} failed with {status} ({reason}): this GPU or container does not share "
                "memory between processes; use --stage-link host"
            )

    def _tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        return torch.as_tensor(_RawMemory(address, num_bytes), device=self._device)


class CudaEvent:
    """The `SharedEvent` of a GPU."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event
        self._handle: bytes | None = None

    @classmethod
    def open(cls, device: torch.device, handle: bytes) -> Self:
        """The event that another process made."""
        return cls(torch.cuda.Event.from_ipc_handle(device, handle))

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.wait()

    def handle(self) -> bytes:
        if self._handle is None:
            self._handle = bytes(self._event.ipc_handle())
        return self._handle


class _RawMemory:
    """Bytes at an address, in the form that torch takes over without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
