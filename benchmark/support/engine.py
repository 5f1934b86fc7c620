"""A benchmark's view of one server, and the input to the builder of its command line.

Used by `engines.py`, which starts servers, and by `peer_engines.py`, which has those of the peers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmark.models.make_gguf import TYPES as GGUF_TYPES
from sgl_pipeline.errors import ConfigurationError, SglPipelineError


class EngineFailure(SglPipelineError):
    """Raised when a server did not come up or ended while it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One server to measure. Without a command it runs already and is left running.

    `client_backend` is what `load_client --backend` calls its protocol; `trace_path` is
    where the server writes its StepRecords, for ours. `directory` is where the command runs: Python
    takes the package from there.
    """

    label: str
    client_backend: str
    base_url: str
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    trace_path: Path | None = None
    directory: Path | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """The input to every engine: the model, the format of the weights to serve instead of it, the
    address to listen on, the number of stages, further flags, and whether equal prefixes are
    computed once."""

    label: str
    model: Path
    weights: str | None
    port: int
    num_stages: int
    flags: tuple[str, ...]
    prefix_cache: bool

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def address_flags(self) -> tuple[str, ...]:
        return ("--host", "127.0.0.1", "--port", str(self.port))

    @property
    def checkpoint(self) -> Path:
        """The model, or its copy in the format `weights`: a GGUF file, or a directory that
        `quantize_model` has written."""
        if self.weights is None:
            return self.model
        if self.weights in GGUF_TYPES:
            return self.gguf_file(self.weights)
        return self.copy(self.weights, "quantize_model", f"--format {self.weights}")

    def gguf_file(self, type_name: str) -> Path:
        """The copy of the model whose weights have that one of `make_gguf`'s types."""
        return self.copy(f"{type_name}.gguf", "make_gguf", f"--type {type_name}")

    def cache_flags(self, turn_off: str) -> tuple[str, ...]:
        """`turn_off` unless the prefix cache is wanted; it is on by default in all engines."""
        return () if self.prefix_cache else (turn_off,)

    def copy(self, suffix: str, maker: str, flags: str) -> Path:
        """The copy of the model beside it that `benchmark.models.<maker>` writes.

        Raises ConfigurationError where it is missing, with the command.
        """
        path = self.model.with_name(f"{self.model.name}-{suffix}")
        if not path.exists():
            command = f"python -m benchmark.models.{maker} {self.model} {path} {flags}"
            raise ConfigurationError(f"{self.label}: {path} is missing; run {command}")
        return path


Builder = Callable[[Served, Path, Sequence[int]], Engine]
