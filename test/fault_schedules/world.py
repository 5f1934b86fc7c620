"""A whole server in virtual time, made from one seed, and its clients.

After every event the scheduler's invariants must hold; in the end every request has ended exactly
once, with the tokens that it gets alone, and all pages are back.
"""

import zlib
from dataclasses import replace
from random import Random

from fault_schedules.fake_front import (
    MAX_NEW_TOKENS,
    FakeFront,
    make_clients,
    returning_clients,
)
from fault_schedules.fake_offers import FakePeers
from fault_schedules.fake_transfers import FakeStores
from fault_schedules.outcome import Outcome
from fault_schedules.random_args import random_args
from fault_schedules.tier_driver import random_stores
from fault_schedules.virtual_server import VirtualServer
from fault_schedules.virtual_time import EventLoop
from fault_schedules.worker_pool import PoolSizes

MAX_EVENTS = 150_000
# Of the seeds, those with a store beyond the pool.
TIER_SHARE = 1 / 3


def has_tier(seed: int) -> bool:
    """True if the world of `seed` has a store beyond the pool."""
    return Random(f"tiers {seed}").random() < TIER_SHARE


def slots_of(seed: int) -> int:
    """State slots of the world of `seed`; 0: its model has no states."""
    if has_tier(seed):
        return 0
    return random_args(Random(seed), may_have_states=True).scheduling.num_state_slots


def run_seed(seed: int) -> Outcome:
    """Makes the world of `seed` and lets it run to its end.

    Raises AssertionError or ProtocolError where the pipeline did what it may not.
    """
    return World(seed).run()


class World:
    """One seed's server and its clients."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        rng = Random(seed)
        self._loop = EventLoop()
        # Its own, so that seeds without tiers are what they would be without this part.
        tier_rng = Random(f"worlds with tiers {seed}")
        args = random_args(rng, may_have_states=not has_tier(seed))
        if has_tier(seed) and tier_rng.random() < 0.9:
            args = replace(args, scheduling=replace(args.scheduling, radix_cache=True))
        num_layers = args.stages.num_stages + rng.choice((0, 1, 2, 4))
        max_tokens = rng.choice((4, 12, 30))
        clients = make_clients(rng, rng.randint(1, 40), rng.choice((0.0, 1.0, 5.0)), max_tokens)
        stores = FakeStores(tier_rng)
        hurt_chance = tier_rng.choice((0.0, 0.0, 0.05, 0.2))
        page_size = args.scheduling.page_size
        if has_tier(seed):
            clients += returning_clients(tier_rng, clients, num_layers, 2 * max_tokens)
            stores = random_stores(tier_rng, clients, num_layers, page_size)
        self._front = FakeFront(clients, num_layers, self._loop)
        # Room for the largest request and little more, or for all of them.
        most = 2 * max_tokens + MAX_NEW_TOKENS
        num_pages = -(-most // page_size) * rng.choice((1, 1, 2, 16)) + rng.randint(0, 3)
        if has_tier(seed):
            num_pages *= tier_rng.choice((1, 1, 2, 3))
        is_room_short = rng.random() < 0.5
        log_pages = rng.choice((None, num_pages, num_pages, num_pages // 2, 4, 0))
        if has_tier(seed) and tier_rng.random() < 0.4:
            # Owed pages leave the log while others come from the store behind them.
            log_pages = max(1, num_pages // tier_rng.choice((2, 3, 4)))
        if args.scheduling.num_state_slots:
            log_pages = None
        self._digest = 0
        self._server = VirtualServer(
            "",
            self._loop,
            rng,
            tier_rng,
            args,
            PoolSizes(num_pages, is_room_short, log_pages),
            self._front,
            num_layers=num_layers,
            stores=stores,
            peers=FakePeers(tier_rng),
            hurt_chance=hurt_chance,
            note=self._note,
        )

    def run(self) -> Outcome:
        """Lets everything happen, and judges it."""
        self._server.start()
        self._loop.run(MAX_EVENTS, self._server.check)
        self._server.check_end()
        self._front.check()
        self._note([client.ends for client in self._front.clients])
        return self._server.outcome(self._seed, self._digest)

    def _note(self, *facts: object) -> None:
        text = f"{self._loop.now_s!r} {facts!r}".encode()
        self._digest = zlib.crc32(text, self._digest)
