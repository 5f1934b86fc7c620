"""What joins a virtual server's scheduler with its stores, and what befalls both.

It does what the server does between `KvTier` and a store: asks, commits, drops, each a while later
and in any order; operators attach, detach and clear; a store loses and alters what it has.
"""

from collections.abc import Callable
from functools import partial
from random import Random

from fault_schedules.fake_front import Client
from fault_schedules.fake_transfers import FakeStores
from fault_schedules.faulty_store import FaultyStore, RightPages, random_tempo
from fault_schedules.outsiders import flush_cache
from fault_schedules.random_args import random_rules
from fault_schedules.transfer_checks import check_transfers
from fault_schedules.virtual_time import EventLoop

from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.scheduling.page_hashing import hashes_of
from sgl_pipeline.scheduling.page_run import PageRun
from sgl_pipeline.scheduling.page_wishes import Lookup
from sgl_pipeline.scheduling.radix_tree import RadixNode
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.wire.store_orders import StorePlace

ADDRESSES = ("here", "there")
# Requests that wait for a store are let go by the clock.
POLL_S = 0.2
# No request waits for so many polls without a step, whatever is lost meanwhile.
MOST_POLLS = 1_000
MOST_CHANGES = 5
MOST_HARMS = 6


def random_stores(
    rng: Random, clients: list[Client], num_layers: int, page_size: int
) -> FakeStores:
    """The stores, of which other servers may have filled some."""
    right = RightPages(clients, num_layers, page_size)
    stores = FakeStores(rng)
    for address in ADDRESSES:
        stores.by_address[address] = store = FaultyStore(
            rng, right, random_tempo(rng), groups_layers=rng.random() < 0.5
        )
        if rng.random() < 0.8:
            store.fill()
    return stores


class TierDriver:
    """The scheduler process's side of the stores.

    Args:
        turn: lets the scheduler go on.
        note: takes what happened into the run's digest.
    """

    def __init__(
        self,
        core: PipelineCore,
        stores: FakeStores,
        loop: EventLoop,
        rng: Random,
        *,
        turn: Callable[[], None],
        note: Callable[..., None],
    ) -> None:
        self._core, self._tier = core, core.scheduler.tier
        self._stores, self._loop, self._rng = stores, loop, rng
        self._turn, self._note = turn, note
        self._place: StorePlace | None = None
        self._rules = TierRules()
        # The store's client has room for more calls from then on; how often it gets full.
        self._full_until_s = 0.0
        self._full_chance = rng.choice((0.0, 0.0, 0.7))
        self._polls = False
        self._num_polls = 0  # since the last step was decided
        self._next_step_id = 0
        # Pages that were found or committed since the store came into use.
        self._in_store: set[bytes] = set()
        self._is_clearing = False
        self.num_cut_due_nodes = 0
        self._evicted = self._tier.saves.evicted
        self._tier.saves.evicted = self._on_evicted  # type: ignore[method-assign]

    def begin(self) -> None:
        """Decides what happens when: the scheduler begins to serve now."""
        rng = self._rng
        if rng.random() < 0.9:
            self._use(ADDRESSES[0])
        for _ in range(rng.choice((0, 0, 2, MOST_CHANGES))):
            self._loop.after(rng.random() * 4.0, self._change)
        for _ in range(rng.choice((0, 1, MOST_HARMS))):
            self._loop.after(rng.random() * 4.0, self._harm)
        for _ in range(rng.choice((0, 2, 6))):
            self._loop.after(rng.random() * 4.0, self._flush)

    def go_on(self) -> None:
        """In each turn of the scheduler, before it decides."""
        for lookup in self._tier.take_lookups():
            self._ask(lookup)
        if self._place is None:
            assert not self._tier.commits and not self._tier.broken, "pages of no store"
        elif self._has_room():
            self._write_records(self._stores.at(self._place))
        scheduler = self._core.scheduler
        if scheduler.next_step_id != self._next_step_id:
            self._next_step_id, self._num_polls = scheduler.next_step_id, 0
        waits = scheduler.num_waiting or self._num_pages_on_way
        is_needed = self._tier.is_on and waits and not scheduler.is_idle
        if is_needed and not self._polls and self._num_polls < MOST_POLLS:
            self._polls = True
            self._num_polls += 1
            self._loop.after(POLL_S, self._poll)

    def check(self) -> None:
        """Asserts that no page of a transfer is given out, and that pages will be saved where all
        are."""
        self._check_due()
        check_transfers(self._core.scheduler)

    def _check_due(self) -> None:
        """Asserts that each page that counts as unsaved is before the end of a node that is due, if
        no save has failed."""
        saves, has_failed = self._tier.saves, self._tier.counts.num_failed_saves > 0
        if self._place is None or self._rules.write_policy != "write_through" or has_failed:
            return
        covered: set[RadixNode] = set()
        for due in saves._due:
            node: RadixNode | None = due
            while node is not None and node not in covered:
                covered.add(node)
                node = node.parent
        for node in self._core.scheduler._pages.storage.cached_nodes():
            assert node.run is not None
            is_saved = node.run.num_saved == len(node.run.pages)
            assert is_saved or node in covered, "a page will never be saved"

    def check_end(self) -> None:
        """Asserts that no transfer is left when nothing happens any more, but for one that hangs;
        that pages that count as saved were; and that all are where each can be. Then detaches the
        store, after which no page is kept."""
        store = None if self._place is None else self._stores.at(self._place)
        if store is not None and not store.has_hung:
            assert self._num_pages_on_way == 0, "a transfer never ended"
            self._check_saved(store)
        self._tier.use(None, self._rules)
        assert self._num_pages_on_way == 0

    def _check_saved(self, store: FaultyStore) -> None:
        scheduler, page_size = self._core.scheduler, self._core.scheduler.args.page_size
        log = scheduler.lost_pages.log
        can_save_all = (
            self._rules.write_policy == "write_through"
            and store.tempo.failure_chance == 0.0
            and self._tier._rests_until_s == float("-inf")
            and int(self._rules.save_share * scheduler._pages.num_pages) > 0
            and not (log is not None and log.owes)
        )
        in_store = self._in_store.union(record.page_hash for record in self._tier.commits)
        for node in scheduler._pages.storage.cached_nodes():
            assert node.run is not None
            num_saved = node.run.num_saved
            assert in_store.issuperset(hashes_of(node, page_size)[:num_saved])
            assert num_saved == len(node.run.pages) or not can_save_all, "a page was never saved"

    @property
    def _num_pages_on_way(self) -> int:
        return self._tier.loads.loading_pages + self._tier.saves.saving_pages

    def _on_evicted(self, node: RadixNode, run: PageRun) -> None:
        """Counts the nodes that were due, and lose a tail while the rest is not saved."""
        due, above = self._tier.saves._due, node.parent
        if node in due and above is not None and above.run is not None and above not in due:
            self.num_cut_due_nodes += above.run.num_saved < len(above.run.pages)
        self._evicted(node, run)

    # Between the scheduler and a store

    def _ask(self, lookup: Lookup) -> None:
        assert self._place is not None, "a question without a store"
        store = self._stores.at(self._place)
        # A request that waits as long as it takes needs an answer.
        may_be_silent = self._rules.wait_policy != "wait_complete"
        if may_be_silent and self._rng.random() < store.tempo.silence_chance:
            return
        answer = partial(self._answer, store, lookup)
        self._loop.after(self._rng.random() * store.tempo.answer_s, answer)

    def _answer(self, store: FaultyStore, lookup: Lookup) -> None:
        records = store.look_up(lookup.hashes)
        if self._place is not None and store is self._stores.at(self._place):
            self._in_store.update(record.page_hash for record in records)
        if records and self._rng.random() < store.tempo.eviction_chance:
            evicted = partial(store.evict, self._rng.choice(records).page_hash)
            self._loop.after(self._rng.random() * store.tempo.read_s, evicted)
        self._tier.found(lookup.number, records)
        self._turn()

    def _write_records(self, store: FaultyStore) -> None:
        for record in self._tier.commits:
            store.check(record)
            self._in_store.add(record.page_hash)
            self._later(store, partial(store.commit, record))
        for page_hash in self._tier.broken:
            store.check_broken(page_hash)
            self._later(store, partial(store.drop, page_hash))
        self._tier.commits.clear()
        self._tier.broken.clear()

    def _has_room(self) -> bool:
        now_s = self._loop.now_s
        if now_s >= self._full_until_s and self._rng.random() < self._full_chance:
            self._full_until_s = now_s + self._rng.random()
        return now_s >= self._full_until_s

    def _later(self, store: FaultyStore, call: Callable[[], None]) -> None:
        self._loop.after(self._rng.random() * store.tempo.answer_s, call)

    def _poll(self) -> None:
        self._polls = False
        self._turn()

    # From outside

    def _use(self, address: str | None) -> None:
        """From now on; also another way to use the store that is in use."""
        if self._is_clearing:
            return
        place = None
        if address is not None:
            rate = self._rng.choice((500, 10_000, 1_000_000_000))
            place = StorePlace(
                backend="file", address=address, digest="fake", save_bytes_per_s=rate
            )
        self._rules = random_rules(self._rng)
        self._begin_use(place)

    def _begin_use(self, place: StorePlace | None) -> None:
        self._note("store", place)
        self._place = place
        self._in_store.clear()
        for store in self._stores.by_address.values():
            store.may_hang = self._rules.wait_policy != "wait_complete"
        self._tier.use(place, self._rules)
        self._turn()

    def _change(self) -> None:
        rng, now = self._rng, self._place
        kind = rng.choice(("detach", "attach", "clear"))
        if kind == "attach":
            self._use(rng.choice(ADDRESSES))
        elif kind == "clear" and now is not None:
            self._begin_use(None)
            self._is_clearing = True
            self._loop.after(rng.random() * 0.1, partial(self._clear, now))
        elif kind == "detach":
            self._use(None)
            if rng.random() < 0.8:
                self._loop.after(rng.random(), partial(self._use, rng.choice(ADDRESSES)))

    def _clear(self, place: StorePlace) -> None:
        self._is_clearing = False
        self._stores.at(place).clear()
        self._begin_use(place)

    def _harm(self) -> None:
        store = self._stores.by_address[self._rng.choice(ADDRESSES)]
        if self._rng.random() < 0.3:
            store.fill()
        else:
            store.harm()

    def _flush(self) -> None:
        flush_cache(self._core.scheduler, self._note)
        self._turn()
