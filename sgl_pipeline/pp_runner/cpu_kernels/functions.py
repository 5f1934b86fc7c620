"""The C functions of the compiled library, which take their arguments by position.

Used by `library.py`, which gives every argument its name.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from sgl_pipeline.errors import KernelBuildError

_INT, _INT64, _FLOAT, _POINTER = (
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_float,
    ctypes.c_void_p,
)
# In the order of the definitions, to which a test holds them.
ARGUMENT_TYPES: dict[str, list[Any]] = {
    "has_arithmetic": [_INT],
    "best_bf16_arithmetic": [],
    "paged_attention": [_INT, _POINTER, _INT64, *7 * [_POINTER], *5 * [_INT], _FLOAT, *2 * [_INT]],
    "rms_norm": [_INT, _INT64, _INT, *3 * [_POINTER], _FLOAT, *2 * [_POINTER], _INT],
    "place_heads": [
        *(_INT, _INT64, *6 * [_INT], *3 * [_POINTER], _FLOAT, *2 * [_POINTER]),
        *(*4 * [_POINTER], _INT),
    ],
    "add": [_INT, _INT64, _INT, *3 * [_POINTER], _INT],
    "gate": [_INT, _INT64, _INT, *2 * [_POINTER], _INT],
    "reorder": [_INT64, _INT, *3 * [_POINTER], _INT],
    "has_products": [],
    "product": [*3 * [_INT64], _INT, *4 * [_POINTER], _INT],
    "has_int8_products": [],
    "int8_product": [*3 * [_INT64], _INT, *6 * [_POINTER], _INT],
    "int4_product": [*3 * [_INT64], _INT, _INT64, *6 * [_POINTER], _INT],
    "bind_threads": [_INT, _INT, _POINTER],
    "kernel_number": [_POINTER],
    "run_calls": [_INT64, *3 * [_POINTER], _INT],
    "expanded_product": [_INT, *3 * [_INT64], _INT, *2 * [_INT64], *6 * [_POINTER], _INT],
}
_ANSWERS = {
    *("has_arithmetic", "best_bf16_arithmetic", "has_products", "has_int8_products"),
    *("bind_threads", "kernel_number"),
}
# Of each kernel that a step calls, the argument that says how long the step is, and its place.
SIZE_PLACES = {
    "paged_attention": ("num_chunks", 10),
    "rms_norm": ("num_rows", 1),
    "add": ("num_rows", 1),
    "place_heads": ("num_rows", 1),
    "gate": ("num_rows", 1),
    "reorder": ("num_rows", 0),
    "product": ("num_rows", 0),
    "int8_product": ("num_rows", 0),
    "int4_product": ("num_rows", 0),
    "expanded_product": ("num_rows", 1),
}
_thread = threading.local()


class CallListener(Protocol):
    """Learns which kernels a thread calls."""

    def hear(self, functions: "CompiledFunctions", name: str, arguments: tuple[Any, ...]) -> None:
        """Takes note that the kernel `name` is called with `arguments`."""


@contextmanager
def heard_by(listener: CallListener) -> Iterator[None]:
    """Has `listener` hear of every kernel that this thread calls meanwhile."""
    _thread.listener = listener
    try:
        yield
    finally:
        del _thread.listener


class CompiledFunctions:
    """The functions of a library, by name without the prefix.

    Raises KernelBuildError when the file is not a library of ours.
    """

    def __init__(self, library: Path) -> None:
        try:
            # torch's OpenMP runtime is in the process already, so both share one pool of threads.
            loaded = ctypes.CDLL(str(library))
            self._functions = {name: getattr(loaded, f"sglp_{name}") for name in ARGUMENT_TYPES}
        except (OSError, AttributeError) as error:
            raise KernelBuildError(
                f"the compiled kernels in {library} do not load: {error}; delete the file"
            ) from error
        for name, function in self._functions.items():
            function.argtypes = ARGUMENT_TYPES[name]
            function.restype = _INT if name in _ANSWERS else None

    def plain(self, name: str) -> Callable[..., Any]:
        """The function `name`, which no profile shows."""
        function: Callable[..., Any] = self._functions[name]
        return function

    def kernel(self, name: str) -> Callable[..., None]:
        """The function `name`, of which a `CallListener` hears, and which a running torch profiler
        (`/start_profile`) sees. To be asked for before every call."""
        function: Callable[..., None] = self._functions[name]
        listener: CallListener | None = getattr(_thread, "listener", None)
        if listener is None and not _profiler_enabled():  # 0.1 us; a record_function takes 6
            return function

        def call(*arguments: Any) -> None:
            if listener is not None:
                listener.hear(self, name, arguments)
            with record_function(f"sglp_{name}") if _profiler_enabled() else nullcontext():
                function(*arguments)

        return call
