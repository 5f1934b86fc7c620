"""CUDA streams and events on a machine without a GPU, which find what no wait puts in order.

Tensors of torch's meta device stand in for the GPU's, so nothing is computed. Every launch notes
what it reads and writes. A stream, and the host, has a vector clock: how far it knows each stream,
and the host, to have come. An access is a race where the clock of whoever makes it has not reached
the accesses before it; so is memory that torch's allocator may give away while another stream than
the one it was allocated on has it in use. Graphs are recorded, and access what they did at each
replay. (Savage et al. and FastTrack, PLDI 2009, find races of threads like this.)
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.numberless_stage import META
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Give a tensor another shape and touch no number of it.
_NO_ACCESS = ("detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh")


class RaceError(Exception):
    """Names accesses of the same memory that no wait puts in order."""


@dataclass(eq=False)
class Lane:
    """The host or a stream. `known` maps each lane to how many of its launches are known to be
    over when the next one begins."""

    name: str
    known: dict["Lane", int] = field(default_factory=dict)
    num_launches: int = 0

    def learn(self, known: dict["Lane", int]) -> None:
        for lane, count in known.items():
            self.known[lane] = max(count, self.known.get(lane, 0))

    def launch(self) -> "Moment":
        self.num_launches += 1
        self.known[self] = self.num_launches
        return Moment(self, self.num_launches)


@dataclass(frozen=True)
class Moment:
    lane: Lane
    number: int

    def is_before(self, lane: Lane) -> bool:
        return lane.known.get(self.lane, 0) >= self.number


@dataclass(eq=False)
class Memory:
    """Of one storage. `owner` allocated it; `shared_with` are the streams that `record_stream`
    named. Reads are those since the last write."""

    words: str
    owner: Lane
    is_pinned: bool = False
    written: Moment | None = None
    read: dict[Lane, Moment] = field(default_factory=dict)
    shared_with: set[Lane] = field(default_factory=set)

    @property
    def accesses(self) -> list[Moment]:
        return [*([self.written] if self.written else []), *self.read.values()]


@dataclass(frozen=True)
class Access:
    """What one launch does."""

    name: str
    reads: tuple[Memory, ...]
    writes: tuple[Memory, ...]


class Stream(Lane):
    """`torch.cuda.Stream`."""

    def __init__(self, streams: "EmulatedStreams", name: str) -> None:
        super().__init__(name)
        self._host = streams.host

    def wait_stream(self, other: Lane) -> None:
        self.learn(other.known)

    def wait_event(self, event: "Event") -> None:
        self.learn(event.known)

    def synchronize(self) -> None:
        self._host.learn(self.known)


class Event:
    """`torch.cuda.Event`; it is never over by itself: only who has waited knows that it is."""

    def __init__(self, streams: "EmulatedStreams") -> None:
        self._streams = streams
        self.known: dict[Lane, int] = {}

    def record(self, stream: Lane | None = None) -> None:
        self.known = dict((stream or self._streams.current).known)

    def synchronize(self) -> None:
        self._streams.host.learn(self.known)

    def query(self) -> bool:
        return all(Moment(*each).is_before(self._streams.host) for each in self.known.items())


class Graph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, streams: "EmulatedStreams") -> None:
        self._streams = streams
        self._accesses: list[Access] = []

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self._streams.recording = self._accesses

    def capture_end(self) -> None:
        self._streams.recording = None

    def replay(self) -> None:
        for access in self._accesses:
            self._streams.book(access)


class EmulatedStreams(TorchDispatchMode):
    """Inside of `watching`, `races` fills with what nothing puts in order."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Lane("the host")
        self.computing = self.current = Stream(self, "the computing stream")
        self._streams = [self.computing]
        self.recording: list[Access] | None = None
        self.races: list[str] = []
        self._memory: dict[int, Memory] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """With this in the place of torch.cuda's own. Raises RaceError where there were races."""
        stands_in: dict[str, Any] = {
            "Stream": lambda device=None: self.stream(f"stream {len(self._streams)}"),
            "stream": self._using,
            "current_stream": lambda device=None: self.current,
            "synchronize": self._synchronize,
            "Event": lambda **options: Event(self),
            "CUDAGraph": lambda: Graph(self),
            "MemPool": _MemPool,
        }
        methods: dict[str, Any] = {
            "record_stream": lambda tensor, stream: self.of(tensor).shared_with.add(stream),
            "pin_memory": lambda tensor: self._pinned(tensor),
            "tolist": self._reading(torch.Tensor.tolist),
            "numpy": self._reading(torch.Tensor.numpy),
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, stand_in in stands_in.items():
                patch.setattr(torch.cuda, name, stand_in)
            for name, method in methods.items():
                patch.setattr(torch.Tensor, name, method)
            with self:
                yield
        if self.races:
            raise RaceError("\n".join(self.races))

    def stream(self, name: str) -> Stream:
        """Another one."""
        self._streams.append(Stream(self, name))
        return self._streams[-1]

    def launch(
        self, name: str, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()
    ) -> None:
        """A kernel of a library, on the current stream."""
        self.book(Access(name, self._all_of(reads), self._all_of(writes)))

    def book(self, access: Access) -> None:
        """On the current stream, now or at each replay."""
        if self.recording is not None:
            self.recording.append(access)
        else:
            self.current.learn(self.host.known)
            self._check(access, self.current)

    def of(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            is_on_card = tensor.device == META
            words = f"{'' if is_on_card else 'host '}memory of {tuple(tensor.shape)} {tensor.dtype}"
            # What a recording allocates stays its graphs': it is as the host's, never given away.
            is_given_away = is_on_card and self.recording is None
            owner = self.current if is_given_away else self.host
            self._memory[key] = Memory(words, owner)
            weakref.finalize(storage, self._free, key)
        return self._memory[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_composite(func):
            with self:  # in inference mode they come as a whole
                return func.decompose(*args, **kwargs)
        is_pinned = bool(kwargs.pop("pin_memory", False))  # which needs a GPU
        taken = _tensors((args, kwargs))
        name = func.overloadpacket.__name__
        is_to_host = name == "copy_" and args[0].device != META and args[1].device == META
        made = args[0] if is_to_host else func(*args, **kwargs)
        if func.is_view or name in _NO_ACCESS:
            return made
        results = _tensors(made)
        known = {id(self.of(tensor)) for tensor in taken}
        for tensor in results:
            self.of(tensor).is_pinned |= is_pinned
        if not name.startswith(("empty", "new_empty")):
            written = [each for each, is_out in _arguments(func, args, kwargs) if is_out]
            new = [each for each in results if id(self.of(each)) not in known]
            may_return_early = _is_asynchronous(name, args, kwargs)
            self._book_operator(name, taken, [*written, *new], may_return_early)
        return made

    def _book_operator(
        self,
        name: str,
        taken: list[torch.Tensor],
        written: list[torch.Tensor],
        may_return_early: bool,
    ) -> None:
        reads = [each for each in taken if all(each is not other for other in written)]
        devices = {each.device for each in (*taken, *written)}
        if META not in devices:
            self._check(Access(name, self._all_of(reads), self._all_of(written)), self.host)
            return
        # The host reads pageable memory before the call returns, and waits for what is written.
        pageable = [each for each in reads if self._is_pageable(each)]
        self._check(Access(name, self._all_of(pageable), ()), self.host)
        self.launch(name, [each for each in reads if not self._is_pageable(each)], written)
        if len(devices) > 1 and not (may_return_early and not any(map(self._is_pageable, written))):
            self.current.synchronize()

    def _check(self, access: Access, lane: Lane) -> None:
        def has_raced(memory: Memory, moments: Iterable[Moment], what: str) -> None:
            for moment in moments:
                if not moment.is_before(lane):
                    self.races.append(
                        f"{access.name} of {lane.name} {what} {memory.words}, and nothing waits "
                        f"for {moment.lane.name}"
                    )

        for memory in access.reads:
            has_raced(memory, [memory.written] if memory.written else [], "reads")
        for memory in access.writes:
            has_raced(memory, memory.accesses, "writes")
        moment = lane.launch()
        for memory in access.reads:
            memory.read[lane] = moment
        for memory in access.writes:
            memory.written, memory.read = moment, {}

    def _free(self, key: int) -> None:
        """The owner's next allocation may be this memory. Page-locked memory is given away when its
        copies are done, which torch's allocator of it notes itself."""
        memory = self._memory.pop(key)
        if memory.owner is self.host:
            return
        for moment in memory.accesses:
            is_over = moment.is_before(memory.owner) or moment.is_before(self.host)
            if not is_over and moment.lane not in memory.shared_with:
                self.races.append(
                    f"{memory.words} of {memory.owner.name} is free, and {moment.lane.name} has "
                    "it in use"
                )

    def _all_of(self, tensors: Iterable[torch.Tensor]) -> tuple[Memory, ...]:
        return tuple(map(self.of, tensors))

    def _is_pageable(self, tensor: torch.Tensor) -> bool:
        return tensor.device != META and not self.of(tensor).is_pinned

    @contextmanager
    def _using(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def _synchronize(self, device: object = None) -> None:
        for stream in self._streams:
            stream.synchronize()

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.clone()
        self.of(copied).is_pinned = True
        return copied

    def _reading(self, method: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def read(tensor: torch.Tensor) -> Any:
            self._check(Access(method.__name__, (self.of(tensor),), ()), self.host)
            return method(tensor)

        return read


class _MemPool:
    id = (0, 1)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """The tensors that an operator is given, and whether it writes to them, by its schema."""
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value):
            yield tensor, is_written


def _is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def _is_asynchronous(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a copy is asked not to wait; what else reads numbers of both sides does."""
    third = args[2] if name == "copy_" and len(args) > 2 else False
    return name in ("copy_", "_to_copy") and bool(kwargs.get("non_blocking", third))
