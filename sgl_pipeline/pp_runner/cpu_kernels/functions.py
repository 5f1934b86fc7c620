"""The C functions of the compiled library. Signatures come from exports.h."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from sgl_pipeline.errors import KernelBuildError
from sgl_pipeline.pp_runner.cpu_kernels.signatures import PREFIX, Signature, read_signatures

HEADER = Path(__file__).with_name("exports.h")
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
        self.signatures = read_signatures(HEADER)
        try:
            # torch's OpenMP runtime is in the process already, so both share one pool of threads.
            loaded = ctypes.CDLL(str(library))
            self._functions = {name: loaded[f"{PREFIX}{name}"] for name in self.signatures}
        except (OSError, AttributeError) as error:
            raise KernelBuildError(
                f"the compiled kernels in {library} do not load: {error}; delete the file"
            ) from error
        for name, signature in self.signatures.items():
            self._functions[name].argtypes = list(signature.parameters.values())
            self._functions[name].restype = signature.result

    def plain(self, name: str) -> Callable[..., Any]:
        """The function `name`, which takes its arguments by position and which no profile shows."""
        function: Callable[..., Any] = self._functions[name]
        return function

    def kernel(self, name: str) -> Callable[..., None]:
        """The kernel `name` as a function of keywords, which have the names in the header.

        A pointer takes a tensor, and None where the header allows null. A `CallListener` hears of
        each call, and a running torch profiler (`/start_profile`) sees it.
        """
        function = self.plain(name)

        def call_aloud(*arguments: Any) -> None:
            listener: CallListener | None = getattr(_thread, "listener", None)
            if listener is not None:
                listener.hear(self, name, arguments)
            with record_function(f"{PREFIX}{name}") if _profiler_enabled() else nullcontext():
                function(*arguments)

        return _by_keywords(name, self.signatures[name], function, call_aloud)


def _is_heard() -> bool:
    return getattr(_thread, "listener", None) is not None or _profiler_enabled()  # 0.1 us


def _by_keywords(
    name: str,
    signature: Signature,
    call: Callable[..., None],
    call_aloud: Callable[..., None],
) -> Callable[..., None]:
    """A function whose keywords are the parameters of `signature`. It passes numbers as they are
    and addresses of tensors by position: to `call`, or where a listener is set, to `call_aloud`.

    It is compiled from text, as dataclasses are: a general function of `**arguments` takes several
    microseconds longer for each call.
    """
    passed = [_as_argument(one, signature) for one in signature.parameters]
    text = (
        f"def {name}(*, {', '.join(signature.parameters)}):\n"
        f"    (_call_aloud if _is_heard() else _call)({', '.join(passed)})\n"
    )
    scope: dict[str, Any] = {"_call": call, "_call_aloud": call_aloud, "_is_heard": _is_heard}
    exec(compile(text, f"<{name} of {HEADER.name}>", "exec"), scope)
    made: Callable[..., None] = scope[name]
    return made


def _as_argument(name: str, signature: Signature) -> str:
    """The expression that passes the argument `name`."""
    if signature.parameters[name] is not ctypes.c_void_p:
        return name
    address = f"{name}.data_ptr()"
    return f"None if {name} is None else {address}" if name in signature.optional else address
