"""The links between the fake stages: activations on their way, in virtual time."""

from collections.abc import Callable, Sequence

from fault_schedules.virtual_time import DelayedPipe

# The rows that leave a stage, with the id of their step.
Rows = tuple[int, Sequence[int]]


class FakeRowLinks:
    """Who listens at which address for rows; `make_pipe` makes a way with its own delays."""

    def __init__(self, make_pipe: Callable[..., DelayedPipe]) -> None:
        self._make_pipe = make_pipe
        self._listeners: dict[str, Callable[[Rows], None]] = {}

    def open(self, address: str, take: Callable[[Rows], None]) -> None:
        assert address not in self._listeners, f"{address} is in use"
        self._listeners[address] = take

    def close(self, address: str) -> None:
        """What is sent there is lost."""
        self._listeners[address] = lambda rows: None

    def to(self, address: str) -> DelayedPipe:
        """A way there; a stage must listen when the first rows arrive."""
        return self._make_pipe(lambda rows: self._listeners[address](rows))
