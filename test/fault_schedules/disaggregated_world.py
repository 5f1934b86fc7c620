"""Prefill and decode apart in virtual time, made from one seed: whole servers, streams between
their schedulers and between their stages, and clients that send a half of each request to either.

In the end every half has ended exactly once, with the tokens that it gets alone or with an error
that has a name; nothing is held, promised or remembered. A world in which nothing goes wrong but
that memory is short and layers move answers all requests.
"""

import math
import zlib
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from random import Random

from fault_schedules.disaggregated_outcome import DisaggregatedOutcome, counts_of
from fault_schedules.fake_front import FakeFront
from fault_schedules.fake_offers import FakePeers, PeerTempo
from fault_schedules.fake_transfers import FakeStores
from fault_schedules.faulty_store import RightPages
from fault_schedules.random_args import random_args
from fault_schedules.room_clients import Half, make_pairs
from fault_schedules.room_driver import RoomDriver
from fault_schedules.room_errors import REFUSED, SERVER_DIED, name_of
from fault_schedules.room_streams import RoomStreams
from fault_schedules.room_verdict import judge
from fault_schedules.tier_driver import random_stores
from fault_schedules.virtual_server import VirtualServer
from fault_schedules.virtual_time import EventLoop
from fault_schedules.worker_pool import PoolSizes

from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.disaggregation.decode_rooms import DecodeRooms
from sgl_pipeline.disaggregation.identity import ServerIdentity
from sgl_pipeline.disaggregation.prefill_rooms import PrefillRooms
from sgl_pipeline.disaggregation.room_limits import RoomLimits
from sgl_pipeline.managers.disaggregation.offering_stages import OfferingStages
from sgl_pipeline.pipeline.offload_rule import OffloadRule
from sgl_pipeline.throttle.attention_offload import Reading

MAX_EVENTS = 150_000
MOST_PAIRS = 8
MOST_STAGES = 3
# Nobody waits so long in a world of faults, and none that is clean takes so long.
LONGEST_S = 400.0
WATCH_S = 0.5
CLEAN_SHARE = 0.15
PATIENT_SHARE = 0.2
# Of the seeds, those in which pages are lent, by most prefill servers, to most decode servers.
LEASE_SHARE = 0.6
READINGS: tuple[Reading, ...] = ("either", "both")
OFFLOAD_RATIOS = (*[math.inf] * 5, 1.0, 0.3, 0.0, None, None)


def has_leases(seed: int) -> bool:
    """True if pages are lent in the world of `seed`."""
    return Random(f"leases {seed}").random() < LEASE_SHARE


def run_disaggregated_seed(seed: int) -> DisaggregatedOutcome:
    """Makes the world of `seed` and lets it run to its end.

    Raises AssertionError or ProtocolError where a server did what it may not.
    """
    return DisaggregatedWorld(seed).run()


class DisaggregatedWorld:
    """One seed's servers and their clients."""

    def __init__(self, seed: int) -> None:
        self._seed, self._digest = seed, 0
        self._rng = rng = Random(f"prefill and decode apart {seed}")
        self._loop = EventLoop()
        kind = rng.random()
        # Nothing goes wrong; or nothing for which anybody has to wait until a time is over.
        self._is_clean = kind < CLEAN_SHARE
        self._is_patient = kind < CLEAN_SHARE + PATIENT_SHARE
        patience_s = 10_000.0 if self._is_patient else rng.choice((3.0, 8.0))
        self._limits = RoomLimits(
            bootstrap_timeout_s=patience_s,
            waiting_timeout_s=patience_s,
            reserved_tokens=rng.choice((1, 4, 32)),
            held_share=rng.choice((0.2, 0.5)),
            falls_back=rng.random() < 0.3,
        )
        # Its own, so that seeds without leases are what they would be without this part.
        self._lease_rng = Random(f"worlds with leases {seed}")
        self._has_leases = has_leases(seed)
        # Now and then a server is given another model. What it says last may be lost in a stream
        # that breaks, and the other half then waits for its time limit.
        self._other_digests = 0.0
        if not self._is_patient:
            self._other_digests = self._lease_rng.choice((*[0.0] * 9, 0.4))
        self._page_size = rng.choice((1, 2, 4))
        self._num_layers = MOST_STAGES + rng.choice((0, 1, 2))
        max_tokens, max_new_tokens = rng.choice((6, 12, 20)), rng.choice((4, 12, 24))
        if self._has_leases:
            max_new_tokens = self._lease_rng.choice((12, 24, 40))
        prefills = [f"p:{number}" for number in range(rng.choice((1, 1, 1, 2)))]
        decodes = [f"d:{number}" for number in range(rng.choice((1, 1, 1, 2)))]
        num_pairs = rng.randint(2, MOST_PAIRS)
        self._pairs = make_pairs(
            rng,
            num_pairs,
            prefills,
            decodes,
            max_tokens,
            max_new_tokens,
            may_leave=not self._is_clean,
            may_err=not self._is_patient,
        )
        self._clients = [half.client for pair in self._pairs for half in pair.halves]
        self._most_tokens = max(
            len(client.request.prompt_ids) + client.request.stops.max_new_tokens
            for client in self._clients
        )
        self._whole_pages: defaultdict[int, set[int]] = defaultdict(set)
        for client in self._clients:
            room, prompt = client.request.room, client.request.prompt_ids
            assert room is not None
            self._whole_pages[room.number].add(len(prompt) // self._page_size)
        loss = 0.0 if self._is_patient else rng.choice((0.0, 0.0, 0.0, 0.1))
        # Whatever one end of a stream says, the other one hears.
        self._is_joined = not loss
        self._streams = RoomStreams(self._loop, rng, loss=loss)
        self._peers = FakePeers(
            rng, self._peer_tempo(), RightPages(self._clients, self._num_layers, self._page_size)
        )
        self._servers: dict[str, VirtualServer] = {}
        self._all_servers: list[VirtualServer] = []
        self._refused: list[Half] = []
        self._num_deaths = 0
        self._has_begun = self._is_over = False
        self._quiet_since_s: float | None = None
        for name in (*prefills, *decodes):
            self._start_server(name)

    def run(self) -> DisaggregatedOutcome:
        """Lets everything happen, and judges it."""
        self._loop.after(WATCH_S, self._watch)
        self._loop.run(MAX_EVENTS, self._check)
        for server in self._servers.values():
            server.check_end()
        for server in self._all_servers:
            server.front.check()
        for half in self._refused:
            assert half.client.ends == [REFUSED] and not half.client.tokens
        for pair in self._pairs:
            judge(pair, self._limits, is_joined=self._is_joined)
        ends = [client.ends[0] for client in self._clients]
        assert not self._is_clean or all(end.kind != "abort" for end in ends), "nothing went wrong"
        self._note([client.ends for client in self._clients])
        return DisaggregatedOutcome(self._seed, self._digest, self._counts())

    def _check(self) -> None:
        for server in self._servers.values():
            server.check()

    def _note(self, *facts: object) -> None:
        text = f"{self._loop.now_s!r} {facts!r}".encode()
        self._digest = zlib.crc32(text, self._digest)

    # Servers

    def _peer_tempo(self) -> PeerTempo:
        rng = self._rng
        lost_lease_chance, wait_share = 0.0, 0.0
        if self._has_leases:
            lost_lease_chance = self._lease_rng.choice((0.0, 0.0, 0.01, 0.1))
            wait_share = self._lease_rng.choice((0.0, 0.05, 0.5))
        return PeerTempo(
            read_s=rng.choice((0.001, 0.01, 0.1)),
            failure_chance=0.0 if self._is_clean else rng.choice((0.0, 0.05)),
            hang_chance=0.0 if self._is_patient else rng.choice((0.0, 0.0, 0.02, 0.1)),
            lost_lease_chance=lost_lease_chance,
            wait_share=wait_share,
        )

    def _random_args(self, rng: Random, *, decodes: bool) -> PipelineArgs:
        args = random_args(rng)
        stages, scheduling = args.stages, args.scheduling
        num_stages = min(stages.num_stages, MOST_STAGES)
        stages = replace(stages, num_stages=num_stages)
        recovery = replace(args.recovery, min_stages=min(args.recovery.min_stages, num_stages))
        scheduling = replace(scheduling, page_size=self._page_size, radix_cache=True)
        if decodes:
            scheduling = replace(scheduling, draft_tokens=rng.choice((0, 1, 4, 4)))
        if self._is_clean or rng.random() < 0.5:
            scheduling = replace(
                scheduling,
                max_queued_requests=None,
                waiting_timeout_s=None,
                running_timeout_s=None,
            )
        return replace(args, stages=stages, scheduling=scheduling, recovery=recovery)

    def _start_server(self, name: str) -> None:
        """Another process at the address `name`, which has nothing."""
        rng = Random(self._rng.random())
        tier_rng = Random(rng.random())
        args = self._random_args(rng, decodes=name.startswith("d"))
        num_pages = -(-self._most_tokens // self._page_size) * rng.choice((1, 1, 2, 8))
        num_pages += rng.randint(0, 3)
        if self._has_leases and name.startswith("p"):
            num_pages *= self._lease_rng.choice((1, 2, 2, 4))
        stores = FakeStores(tier_rng)
        if tier_rng.random() < 0.15:
            stores = random_stores(tier_rng, self._clients, self._num_layers, self._page_size)
        server = VirtualServer(
            name,
            self._loop,
            rng,
            tier_rng,
            args,
            PoolSizes(
                num_pages,
                is_room_short=rng.random() < 0.5,
                log_pages=rng.choice((None, num_pages, num_pages // 2, 4, 0)),
            ),
            FakeFront([], self._num_layers, self._loop),
            num_layers=self._num_layers,
            stores=stores,
            peers=self._peers,
            hurt_chance=0.0 if self._is_patient else tier_rng.choice((0.0, 0.0, 0.05, 0.2)),
            note=self._note,
            has_faults=rng.random() < 0.5 and not self._is_patient,
            open_rooms=self._open_rooms,
            on_up=self._begin_when_all_are_up,
            on_end=partial(self._after_death, name),
        )
        self._servers[name] = server
        self._all_servers.append(server)
        server.start()

    def _open_rooms(self, server: VirtualServer) -> RoomDriver:
        core = server.core
        assert core is not None
        identity = ServerIdentity(
            name=server.name,
            digest="other" if self._lease_rng.random() < self._other_digests else "fake",
            page_size=self._page_size,
            num_layers=self._num_layers,
            kv_dtype="fake",
        )
        rooms: PrefillRooms | DecodeRooms
        stages = None
        leases = self._lease_rng
        lends = self._has_leases and leases.random() < 0.9
        limits = replace(self._limits, lends=lends)
        if server.name.startswith("p"):
            stages = OfferingStages(core, server.roster)
            rooms = PrefillRooms(core.scheduler, identity, limits, stages())
        else:
            if lends:
                ratio = leases.choice(OFFLOAD_RATIOS)
                reading = leases.choice(READINGS)
                core.offload = OffloadRule(core.scheduler, ratio, reading)
            rooms = DecodeRooms(core.scheduler, identity, limits, core.offload)
        driver = RoomDriver(
            server.name,
            core.scheduler,
            rooms,
            stages,
            self._streams,
            server.front,
            self._loop,
            self._rng,
            turn=server.turn,
            turn_soon=server.turn_soon,
            needs_clock=lambda: not self._is_over,
            whole_pages=self._whole_pages,
            forgets=not self._is_patient,
        )
        if stages is not None:
            self._streams.listen(driver)
        return driver

    def _after_death(self, name: str) -> None:
        """A server is dead; mostly another one takes its place."""
        self._num_deaths += 1
        self._is_joined = False
        server = self._servers[name]
        if server.rooms is not None:
            server.rooms.close()
        if self._rng.random() < 0.8:
            self._loop.after(self._rng.random() * 3.0, partial(self._start_server, name))

    def _kill_server(self) -> None:
        server = self._servers[self._rng.choice([*self._servers])]
        if server.core is not None and not server.has_ended:
            self._note("dies", server.name)
            server.end(SERVER_DIED)

    # What comes from outside

    def _begin_when_all_are_up(self) -> None:
        if self._has_begun or any(one.rooms is None for one in self._servers.values()):
            return
        self._has_begun = True
        for pair in self._pairs:
            for half in pair.halves:
                self._loop.after(half.client.arrives_s, partial(self._send, half))
        if self._is_clean:
            return
        rng = self._rng
        for _ in range(rng.choice((0, 0, 1, 3, 6))):
            self._is_joined = False
            self._loop.after(rng.random() * 6.0, self._streams.harm)
        for _ in range(0 if self._is_patient else rng.choice((0, 0, 0, 0, 1, 2))):
            self._loop.after(rng.random() * 6.0, self._kill_server)

    def _send(self, half: Half) -> None:
        half.was_sent = True
        client, server = half.client, self._servers[half.server]
        outsiders = server.outsiders
        if outsiders is None or server.has_ended:
            client.ends.append(REFUSED)
            self._refused.append(half)
            return
        client.request.arrival_s = self._loop.now_s
        server.front.add(client)
        self._loop.after(client.compile_s, partial(outsiders.arrive, client))
        if client.leaves_after_s is not None:
            self._loop.after(client.leaves_after_s, partial(outsiders.leave, client))

    # The end

    def _watch(self) -> None:
        """Lets the clock stand when nothing can be remembered any more."""
        now_s = self._loop.now_s
        assert now_s < LONGEST_S, "a request never ended, or a room"
        if not self._is_quiet():
            self._quiet_since_s = None
        elif self._quiet_since_s is None:
            self._quiet_since_s = now_s
        # An end is said again for as long as it is remembered, and then remembered there.
        memory_s = 0.0 if self._is_patient else 2.0 * self._limits.bootstrap_timeout_s + 2.0
        if self._quiet_since_s is not None and now_s - self._quiet_since_s >= memory_s:
            self._is_over = True
            return
        self._loop.after(WATCH_S, self._watch)

    def _is_quiet(self) -> bool:
        """True if all requests and rooms have ended."""
        if not all(client.ends for client in self._clients):
            return False
        rooms = [one.rooms for one in self._servers.values() if not one.has_ended]
        return all(one is not None and one.rooms.num_rooms == 0 for one in rooms)

    def _counts(self) -> Counter[str]:
        counts: Counter[str] = Counter(
            deaths=self._num_deaths,
            breaks=self._streams.num_breaks,
            pages=self._peers.num_read,
            failed_loads=self._peers.num_failed,
            clean=self._is_clean,
            patient=self._is_patient,
            aborts=sum(client.ends[0].kind == "abort" for client in self._clients),
            halves=len(self._clients),
        )
        ends = [client.ends[0] for client in self._clients]
        counts.update(name_of(end) for end in ends if end.kind == "abort")
        for server in self._all_servers:
            if server.rooms is not None:
                counts += counts_of(server)
        return counts
