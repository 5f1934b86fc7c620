"""Servers apart, whose prefill servers lend pages, under random operations and faults, over streams
that delay, lose, repeat and break: every request ends, with its right tokens or a named error, and
nothing is kept or lent for ever. `test/fault_schedules` has the same with whole workers."""

import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from support.mutations import require_found
from support.paired_servers import DecodeServer, PrefillServer, RoomWorld, room_request
from support.stored_pipeline import NUM_LAYERS, MemoryStore, shared_prompt

from sgl_pipeline.disaggregation.lent_rooms import LentRooms
from sgl_pipeline.disaggregation.room_limits import RoomLimits
from sgl_pipeline.requests import Request, RequestState, Room
from sgl_pipeline.scheduling.drafts import Drafts
from sgl_pipeline.scheduling.grammar_drafts import Draft
from sgl_pipeline.scheduling.lent_pages import LentPages
from sgl_pipeline.scheduling.offloaded_requests import OffloadedRequests

# All of what is counted happens in these often enough.
SEEDS = range(30, 100)
# Every mutation below is found much sooner.
MOST_SEEDS = 100
NUM_OPERATIONS = 240
MOST_REQUESTS = 24


def random_split(random: Random, num_stages: int) -> tuple[int, ...]:
    cuts = sorted(random.sample(range(1, NUM_LAYERS), num_stages - 1))
    return tuple(end - start for start, end in zip([0, *cuts], [*cuts, NUM_LAYERS], strict=True))


class RandomLeases:
    """One run, in which servers do what is due more often than anything happens to them. Where
    nothing is lost but streams and stages, no time is ever waited out."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.is_lossy = random.random() < 0.4
        patience_s = 6.0 if self.is_lossy else 1e6
        limits = RoomLimits(
            bootstrap_timeout_s=patience_s,
            waiting_timeout_s=patience_s,
            reserved_tokens=random.choice((1, 4, 32)),
            held_share=random.choice((0.2, 0.5)),
            falls_back=random.random() < 0.4,
            lends=True,
        )
        self.world = RoomWorld(
            limits,
            random,
            loss=0.1 if self.is_lossy else 0.0,
            delays_s=(0.0, 0.0, 0.01, 0.3),
            offload_ratio=random.choice((math.inf, math.inf, 1.0, None)),
        )
        # One folder, or none.
        self.store = random.choice((None, MemoryStore()))
        for number in range(random.choice((1, 1, 2))):
            self._add_server(PrefillServer, f"p:{number}")
        for number in range(random.choice((1, 1, 2))):
            self._add_server(DecodeServer, f"d:{number}")
        # The half of a request that is still to come, and where.
        self.halves: list[tuple[type, str, Request]] = []
        self.num_requests = 0

    def _add_server(self, kind: Any, name: str) -> None:
        random = self.random
        self.world.add(
            kind,
            name,
            random_split(random, random.choice((1, 2, 3))),
            num_pages=random.choice((14, 20, 40)),
            log_pages=random.choice((None, 8, 40)),
            store=self.store,
            draft_tokens=random.choice((0, 3)),
        )

    def operations(self) -> list[Callable[[], None]]:
        faults = (
            *(self.abort, self.cut, self.lose, self.regroup, self.move, self.silence),
            *(self.flush, self.go_out_of_reach, self.restart),
        )
        return [
            *([self.submit] * 4),
            *([self.submit_half] * 6),
            *([self.world.step] * 16),
            *([self.turn] * 12),
            *([self.run_orders] * 12),
            *([self.end_transfer] * 4),
            *self.random.sample(faults, self.random.randrange(len(faults))),
        ]

    def run(self) -> None:
        operations = self.operations()
        for _ in range(NUM_OPERATIONS):
            self.random.choice(operations)()
        self.world.unreachable.clear()
        while self.halves:
            self.submit_half()
        for server in self.world.servers:
            server.core.is_held = False
        self.world.loss = 0.0
        self.world.run()
        self.world.check()

    def server(self) -> Any:
        return self.random.choice(self.world.servers)

    def submit(self) -> None:
        """One half of a request now, the other one later."""
        random, world = self.random, self.world
        if self.num_requests == MOST_REQUESTS:
            return
        self.num_requests += 1
        prefill, decode = random.choice(world.prefills()), random.choice(world.decodes())
        number, prompt = world.new_room(), shared_prompt(random, 30)
        namespace = random.choice(("", "", "00" * 32))
        first = room_request(f"p{number}", prompt, 1, Room(number), namespace)
        room = Room(number, prefill.name)
        num_tokens = random.randrange(1, 25)
        second = room_request(f"d{number}", prompt, num_tokens, room, namespace)
        halves = [(PrefillServer, prefill.name, first), (DecodeServer, decode.name, second)]
        random.shuffle(halves)
        self.halves += halves[1:]
        self._submit(*halves[0])

    def submit_half(self) -> None:
        if self.halves:
            self._submit(*self.halves.pop(self.random.randrange(len(self.halves))))

    def _submit(self, kind: type, name: str, request: Request) -> None:
        server = next(one for one in self.world.servers if one.name == name)
        self.world.submit(server, request)

    def turn(self) -> None:
        self.world.turn(self.server())

    def run_orders(self) -> None:
        server = self.server()
        for _ in range(self.random.randrange(1, 6)):
            server.run_order(self.random.randrange(len(server.stages)))

    def end_transfer(self) -> None:
        server = self.server()
        stage = self.random.randrange(len(server.stages))
        if server.stages[stage].transfers:
            index = self.random.randrange(len(server.stages[stage].transfers))
            server.end_transfer(stage, index, can_write=self.random.random() < 0.9)

    def silence(self) -> None:
        """Longer than some rooms wait, or streams."""
        self.world.now_s += self.random.choice((2.0, 5.0))

    def abort(self) -> None:
        server = self.server()
        live = [one for one in server.requests if one.state is not RequestState.FINISHED]
        if live:
            self.world.abort(server, self.random.choice(live))

    def cut(self) -> None:
        if self.world.streams:
            self.random.choice(self.world.streams).is_cut = True

    def lose(self) -> None:
        """A stage is replaced."""
        server = self.server()
        server.now_s = self.world.now_s
        server.core.is_held = False
        server.lose(self.random.randrange(len(server.stages)))

    def regroup(self) -> None:
        server = self.server()
        server.now_s = self.world.now_s
        server.core.is_held = False
        server.regroup(random_split(self.random, self.random.choice((1, 2, 3))))

    def move(self) -> None:
        """Layers are held for a while, and then are elsewhere."""
        server = self.server()
        if not server.core.is_held:
            server.core.is_held = True
            return
        self.world.turn(server)
        self.world.run_stages(server, transfers=False)
        self.world.turn(server)
        self.world.run_stages(server, transfers=False)
        server.move_layers(random_split(self.random, len(server.stages)))
        server.core.is_held = False

    def flush(self) -> None:
        self.server().core.scheduler.flush_cache()

    def go_out_of_reach(self) -> None:
        """A decode server that reaches none cannot say that a room has failed."""
        if self.is_lossy:
            self.world.unreachable ^= {self.random.choice(self.world.prefills()).name}

    def restart(self) -> None:
        """A server dies with all that it has, and another one takes its place."""
        if not self.is_lossy or self.random.random() < 0.5:
            return
        world, old = self.world, self.server()
        world.servers.remove(old)
        for stream in world.streams:
            if old in (stream.decode, stream.prefill):
                stream.is_cut = True
                (stream.to_decode if old is stream.decode else stream.to_prefill).clear()
                world.cuts_noticed.append(stream)  # by the dead end
        self._add_server(type(old), old.name)


def test_every_request_ends_and_nothing_is_lent_for_ever() -> None:
    num_offloaded = num_ended_early = num_drafted = num_accepted = 0
    for seed in SEEDS:
        one = RandomLeases(seed)
        one.run()
        for decode in one.world.decodes():
            num_offloaded += decode.rooms.offloading.num_offloaded
            num_ended_early += decode.rooms.offloading.num_ended_early
            num_drafted += decode.core.scheduler.drafts.num_drafted
            num_accepted += decode.core.scheduler.drafts.num_accepted
    assert num_accepted > 2 * len(SEEDS) and num_drafted > num_accepted + 2 * len(SEEDS)
    assert num_offloaded > 2 * len(SEEDS) and num_ended_early > len(SEEDS) // 4


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of what must be done."""


def _return_at_once(lent: LentPages, room: int) -> None:
    lease = lent._forget(room)
    if lease is not None:
        lent._to_lend.pop(room, None)
        lent._pages.take_back(lease.end, lease.own)


def _draft_as_if_it_had_none(
    drafts: Drafts, request: Request, least: float, grammar_most: int
) -> Draft:
    lease, request.lease = request.lease, None
    draft = _DRAFT(drafts, request, least, grammar_most)
    request.lease = lease
    return draft


_DRAFT = Drafts._draft
MUTATIONS: dict[str, tuple[type, str, Any]] = {
    "pages are given out before the lease is over": (LentPages, "end", _return_at_once),
    "a lease outlives what makes the stages forget it": (LentPages, "forget", _nothing),
    "a lease outlives its room": (LentRooms, "end", _nothing),
    "what a lost lease has drawn is kept": (OffloadedRequests, "lose", _nothing),
    "a request with a lease has drafts": (Drafts, "_draft", _draft_as_if_it_had_none),
    "a request whose lease is over goes on with it": (OffloadedRequests, "retract_lost", _nothing),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_rule_is_noticed(mutation: str, request: pytest.FixtureRequest) -> None:
    require_found(
        lambda patch: patch.setattr(*MUTATIONS[mutation]),
        request,
        lambda seed: RandomLeases(seed).run(),
        range(MOST_SEEDS),
    )
