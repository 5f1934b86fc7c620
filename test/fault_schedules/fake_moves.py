"""What a layer move needs of a fake worker: its layers, and ways of pages in virtual time."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from fault_schedules.fake_model import FakeStage, LayerPages
from fault_schedules.virtual_time import DelayedPipe, EventLoop

from sgl_pipeline.errors import CheckpointError
from sgl_pipeline.pp_runner.layer_moves.incoming_layers import IncomingLayers
from sgl_pipeline.pp_runner.layer_moves.move_site import Awaited, Parcel, StageGone
from sgl_pipeline.pp_runner.layer_moves.outgoing_layers import MAX_READING
from sgl_pipeline.stage_plan import StagePlan


class FakeRows(NamedTuple):
    """Some of a layer's pages, or of its states, by their numbers."""

    layer: int
    places: dict[int, Any]
    are_states: bool


# Of pages: (move, source, target), or the address of a handover.
Way = tuple[int, int, int] | str
MAX_UNREAD = 2


@dataclass(frozen=True, slots=True)
class LoadTempo:
    """How long weights take, in virtual seconds, and how often they cannot be read."""

    load_s: float
    failure_chance: float


class FakeSite:
    """A `MoveSite` over a `FakeStage`."""

    def __init__(
        self,
        layers: FakeStage,
        stage: int,
        plan: StagePlan,
        loop: EventLoop,
        rng: Random,
        tempo: LoadTempo,
    ) -> None:
        self._layers = layers
        self._stage = stage
        self._loop, self._rng, self._tempo = loop, rng, tempo
        self._plans = {plan.epoch: plan}
        self._loaded_s = 0.0
        self._awaited: list[IncomingLayers[FakeRows]] = []
        self._places_per_parcel = rng.choice((1, 3, 100))

    def has_states(self, layer: int) -> bool:
        return self._layers.has_states(layer)

    def places_per_parcel(self, layer: int) -> int:
        return self._places_per_parcel

    def layers_of(self, epoch: int) -> range:
        return self._plans[epoch].layers_of(self._stage)

    def can_run(self, epoch: int) -> bool:
        """Whether all pages of the layers of `epoch` are there."""
        layers = self.layers_of(epoch)
        assert all(layer in self._layers.pages for layer in layers), "a step of a layer not held"
        return all(incoming.has_all for incoming in self._awaited)

    def begin_loading(self, layers: Sequence[int]) -> None:
        self._loaded_s = self._loop.now_s + self._rng.random() * self._tempo.load_s

    def has_loaded(self) -> bool:
        if self._loop.now_s < self._loaded_s:
            return False
        if self._rng.random() < self._tempo.failure_chance:
            raise CheckpointError("this layer is unreadable")
        return True

    def hold(self, layers: Iterable[int]) -> None:
        for layer in layers:
            assert layer not in self._layers.pages, f"layer {layer} is held already"
            self._layers.pages[layer] = {}

    def drop(self, layers: Iterable[int]) -> None:
        for layer in layers:
            self._layers.pages.pop(layer, None)
            self._layers.states.drop(layer)

    def read(self, layer: int, places: Sequence[int]) -> "FakeLeavingPages":
        copies: LayerPages | dict[int, int]
        are_states = self.has_states(layer)
        if are_states:
            copies = self._layers.states.read(layer, places)
        else:
            held = self._layers.pages[layer]
            copies = {page: dict(held[page]) for page in places if page in held}
        parcel = Parcel(FakeRows(layer, copies, are_states), len(copies), is_last=False)
        return FakeLeavingPages(parcel, self._rng.choice((0, 0, 1, 3)))

    def write(self, rows: FakeRows) -> None:
        assert rows.are_states == self.has_states(rows.layer)
        if rows.are_states:
            self._layers.states.write(rows.layer, rows.places)
        else:
            self._layers.pages[rows.layer] |= rows.places

    def know_plan(self, plan: StagePlan) -> None:
        self._plans[plan.epoch] = plan
        self._awaited = []

    def wait_before(self, layers: Iterable[int], incoming: Awaited) -> None:
        assert isinstance(incoming, IncomingLayers)
        self._awaited.append(incoming)

    def stop_waiting(self) -> None:
        self._awaited = []

    def attend(self, timeout_s: float) -> None:
        raise AssertionError("in virtual time nothing waits")

    def close(self) -> None:
        """Nothing runs beside the steps."""


@dataclass(slots=True)
class FakeLeavingPages:
    """Read after some looks, as a GPU's may be."""

    read: Parcel[FakeRows]
    looks_left: int

    def is_read(self) -> bool:
        self.looks_left -= 1
        return self.looks_left < 0

    def parcel(self) -> Parcel[FakeRows]:
        return self.read


class FakeReceiver:
    """A `PageReceiver`: what has come through its pipe, until it is closed. None in the queue says
    that the source has closed its end."""

    def __init__(self, on_arrival: Callable[[], None]) -> None:
        self.queue: deque[Parcel[FakeRows] | None] = deque()
        self.is_closed = False
        self._on_arrival = on_arrival

    def arrive(self, parcel: Parcel[FakeRows] | None) -> None:
        if not self.is_closed:
            self.queue.append(parcel)
            self._on_arrival()

    def receive(self, timeout_s: float) -> Parcel[FakeRows] | None:
        assert timeout_s == 0.0, "in virtual time nothing waits"
        if not self.queue:
            return None
        parcel = self.queue.popleft()
        if parcel is None:
            raise StageGone
        return parcel

    def close(self) -> None:
        self.is_closed = True


class FakeSender:
    """A `PageSender` to a receiver that may not be there yet. `note_full` is called when states
    have to wait for it."""

    def __init__(
        self,
        find: Callable[[], FakeReceiver | None],
        make_pipe: Callable[..., DelayedPipe],
        note_full: Callable[[], None],
    ) -> None:
        self._find = find
        self._note_full = note_full
        self._num_on_way = 0
        self._pipe = make_pipe(self._deliver)

    def can_send(self) -> bool:
        receiver = self._find()
        return receiver is not None and self._num_unread(receiver) < MAX_UNREAD

    def send(self, parcel: Parcel[FakeRows]) -> None:
        receiver = self._find()
        assert receiver is not None, "sent before the target listens"
        if parcel.rows is not None and parcel.rows.are_states and not receiver.is_closed:
            # Those that were being read when there was room last.
            most = MAX_UNREAD + MAX_READING
            assert self._num_unread(receiver) < most, "states fill the memory of a link"
        self._num_on_way += 1
        self._pipe.send(parcel)

    def has_room(self) -> bool:
        receiver = self._find()
        assert receiver is not None, "nobody has listened"
        if receiver.is_closed or self._num_unread(receiver) < MAX_UNREAD:
            return True
        self._note_full()
        return False

    def _num_unread(self, receiver: FakeReceiver) -> int:
        return self._num_on_way + len(receiver.queue)

    def close(self) -> None:
        self._num_on_way += 1
        self._pipe.send(None)

    def _deliver(self, parcel: Parcel[FakeRows] | None) -> None:
        self._num_on_way -= 1
        receiver = self._find()
        if receiver is not None:
            receiver.arrive(parcel)


class FakePageLinks:
    """The ways between all stages; `make_pipe` makes one with its own delays. `num_full`: how often
    states had to wait for room."""

    def __init__(self, make_pipe: Callable[..., DelayedPipe]) -> None:
        self._make_pipe = make_pipe
        self._receivers: dict[Way, FakeReceiver] = {}
        self.num_full = 0

    def of_stage(self, stage: int, on_arrival: Callable[[], None]) -> "StagePageLinks":
        return StagePageLinks(self, stage, on_arrival)

    def open(self, way: Way, on_arrival: Callable[[], None]) -> FakeReceiver:
        self._receivers[way] = receiver = FakeReceiver(on_arrival)
        return receiver

    def sender(self, way: Way) -> FakeSender:
        return FakeSender(lambda: self._receivers.get(way), self._make_pipe, self._count_full)

    def _count_full(self) -> None:
        self.num_full += 1


class StagePageLinks:
    """The `PageLinks` of one stage."""

    def __init__(self, links: FakePageLinks, stage: int, on_arrival: Callable[[], None]) -> None:
        self._links = links
        self._stage = stage
        self._on_arrival = on_arrival

    def sender(self, move: int, target: int) -> FakeSender:
        return self._links.sender((move, self._stage, target))

    def receiver(self, move: int, source: int) -> FakeReceiver:
        return self._links.open((move, source, self._stage), self._on_arrival)

    def sender_at(self, address: str) -> FakeSender:
        return self._links.sender(address)

    def receiver_at(self, address: str) -> FakeReceiver:
        return self._links.open(address, self._on_arrival)
