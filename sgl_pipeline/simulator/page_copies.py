"""Pages and states of the layers that go from one stage to another, as time that passes.

Part of `virtual_moves.py`; the stages' own way is `pp_runner/layer_moves/outgoing_layers.py`: a
round of all pages, further rounds of what was written meanwhile until that is little, a patch after
the switch, and states behind the pages (`state_copies.py`). Bytes are a fluid here: no parcel is
cut.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sgl_pipeline.simulator.state_copies import MAX_ROUNDS, StateCopies

# As `pp_runner/layer_moves/outgoing_layers.py` has it.
SMALL_PATCH_PAGES = 64
# As `stage_site.py` and `links/page_link.py`: a parcel, and how many may be unread.
PARCEL_BYTES = 512 * 1024
MAX_UNREAD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCosts:
    """The costs of sending a layer to another stage.

    `kv_bytes_per_token` of a layer with pages; `state_bytes` of a request's state in each layer, 0
    in one with pages (empty: all have pages). `weight_bytes_per_s` is how fast a layer's weights
    are read when a move begins; infinite where they are resident. `copying` says whose time it is:
    the `stage`'s own, as ours do (its idle time and `MOVE_SHARE` of each step's; between two steps
    no more than `slice_bytes`, which the target has to take up first), or no stage's, `beside` its
    kernels (a card's copy engine, as DynaPipe's). With `shares_links` pages and activations use one
    port of each stage: activations wait for a parcel under way, pages for all activations.
    """

    kv_bytes_per_token: int = 0
    state_bytes: tuple[int, ...] = ()
    page_size: int = 16
    weight_bytes: int = 0
    weight_bytes_per_s: float = float("inf")
    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    copying: Literal["stage", "beside"] = "stage"
    slice_bytes: float = MAX_UNREAD * PARCEL_BYTES
    shares_links: bool = False

    def page_bytes(self, layers: Sequence[int]) -> int:
        """Bytes of a page in the `layers` that have pages."""
        num_layers = sum(not self._state_bytes(layer) for layer in layers)
        return num_layers * self.kv_bytes_per_token * self.page_size

    def slot_bytes(self, layers: Sequence[int]) -> int:
        """Bytes of a request's states in the `layers` that have states."""
        return sum(map(self._state_bytes, layers))

    def _state_bytes(self, layer: int) -> int:
        return self.state_bytes[layer] if self.state_bytes else 0

    def load_s(self, num_layers: int) -> float:
        return num_layers * self.weight_bytes / self.weight_bytes_per_s

    def copy_s(self, num_bytes: float) -> float:
        return num_bytes / self.bytes_per_s


@dataclass(slots=True)
class PageCopy:
    """The `layers` that go from `source` to `target`.

    Copying begins at `begins_s`, of `num_pages` pages and of the states in `slots`. `ready_s` is
    when what is left first was little, or would never become little; None until then.
    `arrived_s` is when the last byte of the patch is at the target, known from the switch on;
    `all_s` when the target has taken up everything, known once it has.
    """

    costs: MoveCosts
    layers: tuple[int, ...]
    source: int
    target: int
    num_pages: int
    slots: tuple[int, ...]
    begins_s: float
    copied_bytes: float = 0.0
    taken_bytes: float = 0.0
    patch_bytes: float = 0.0
    arrived_s: float = float("inf")
    all_s: float | None = None
    ready_s: float | None = None
    looked_s: float = field(init=False)  # for copies beside the steps: accounted for until then
    took_s: float = 0.0  # the target's time is accounted for until then
    debt_s: float = 0.0  # activations had the link
    _page_bytes: int = field(init=False)
    _left_of_pages: float = field(init=False)
    _states: StateCopies = field(init=False)
    _written: set[int] = field(default_factory=set)
    _rounds: int = 1

    def __post_init__(self) -> None:
        self._page_bytes = self.costs.page_bytes(self.layers)
        self._left_of_pages = self._bytes_of(self.num_pages)
        self._states = StateCopies(self.costs.slot_bytes(self.layers), self.slots)
        self.looked_s = self.begins_s

    @property
    def queued_bytes(self) -> float:
        """Bytes that are to be sent before the switch, as far as is known now."""
        return self._left_of_pages + self._states.queued_bytes

    @property
    def untaken_bytes(self) -> float:
        """Bytes that are on their way or lie at the target."""
        return self.copied_bytes + self.patch_bytes - self.taken_bytes

    def wrote(self, pages: Iterable[int], slots: Iterable[int]) -> None:
        """A step on the source has written to these."""
        if self._page_bytes:
            self._written.update(pages)
        self._states.wrote(slots)

    def send(self, since_s: float, until_s: float, most_bytes: float = float("inf")) -> float:
        """Sends what there is to send from one moment to another; returns when that ended, which is
        `since_s` where nothing was sent."""
        now_s = max(since_s, self.begins_s) + self.debt_s
        self.debt_s = max(0.0, min(self.debt_s, now_s - until_s))
        ended_s = since_s
        while now_s <= until_s:
            if not self._left_of_pages and self._has_more_rounds():
                self._rounds += 1
                self._left_of_pages = self._bytes_of(len(self._written))
                self._written.clear()
            self._states.begin_round()
            self._note_ready(now_s)
            num_bytes = min(self.queued_bytes, most_bytes, self._most_in(until_s - now_s))
            if not num_bytes:
                break
            self._count_sent(num_bytes)
            self.copied_bytes += num_bytes
            most_bytes -= num_bytes
            ended_s = now_s = now_s + self.costs.copy_s(num_bytes)
            self._note_ready(now_s)
            if self.queued_bytes > 0.0 or most_bytes <= 0.0:
                break
        return ended_s

    def sent_if_idle(self, since_s: float) -> float:
        """The moment at which all that the move waits for is sent, if the source does nothing else
        from now on."""
        left = self._awaited_bytes
        if self._has_more_rounds():
            left += self._bytes_of(len(self._written))
        return max(since_s, self.begins_s) + self.debt_s + self.costs.copy_s(left)

    def take(self, since_s: float, until_s: float, most_bytes: float = float("inf")) -> float:
        """The target takes up what has been sent; returns when that ended."""
        now_s = max(since_s, self.took_s)
        num_bytes = min(self.untaken_bytes, most_bytes, self._most_in(until_s - now_s))
        if num_bytes <= 0.0:
            return since_s
        self.taken_bytes += num_bytes
        now_s += self.costs.copy_s(num_bytes)
        if self.untaken_bytes <= 0.0:
            self._note_all(now_s)
        return now_s

    def finish(self, now_s: float) -> float:
        """The switch: all that the target lacks is sent. Returns when it is on its way."""
        of_pages = self._left_of_pages + self._bytes_of(len(self._written))
        self._left_of_pages = 0.0
        self.patch_bytes = of_pages + self._states.take_rest()
        sent_s = now_s + self.costs.copy_s(self.patch_bytes)
        self.arrived_s = sent_s + self.costs.latency_s
        return sent_s

    def has_all_if_idle(self, since_s: float) -> float:
        """The moment at which the target has everything, if it does nothing else from `since_s` on.
        Infinity before the switch."""
        if self.all_s is not None:
            return self.all_s
        if self.costs.copying == "beside":
            return self.arrived_s
        taken_s = max(since_s, self.took_s) + self.costs.copy_s(self.untaken_bytes)
        return max(self.arrived_s, taken_s)

    def wait(self, since_s: float) -> float:
        """A step of the target does nothing else until it has everything; returns when."""
        self.all_s = self.has_all_if_idle(since_s)
        self.taken_bytes += self.untaken_bytes
        return max(since_s, self.all_s)

    @property
    def _awaited_bytes(self) -> float:
        """Queued bytes that the move waits for."""
        return self._left_of_pages + self._states.awaited_bytes

    def _note_ready(self, now_s: float) -> None:
        if self.ready_s is None and not (self._awaited_bytes or self._has_more_rounds()):
            self.ready_s = now_s

    def _note_all(self, now_s: float) -> None:
        if self.arrived_s < float("inf"):
            self.all_s = max(now_s, self.arrived_s)

    def _most_in(self, seconds: float) -> float:
        """The most bytes that can be copied in that time."""
        if self.costs.bytes_per_s == float("inf"):
            return float("inf") if seconds >= 0.0 else 0.0
        return max(0.0, seconds) * self.costs.bytes_per_s

    def _has_more_rounds(self) -> bool:
        return len(self._written) > SMALL_PATCH_PAGES and self._rounds < MAX_ROUNDS

    def _bytes_of(self, num_pages: int) -> float:
        return float(num_pages * self._page_bytes)

    def _count_sent(self, num_bytes: float) -> None:
        """Pages go first."""
        if num_bytes == self.queued_bytes:  # whatever the rounding of a sum of fractions
            self._left_of_pages = 0.0
            self._states.send(float("inf"))
            return
        of_pages = min(num_bytes, self._left_of_pages)
        self._left_of_pages -= of_pages
        self._states.send(num_bytes - of_pages)
