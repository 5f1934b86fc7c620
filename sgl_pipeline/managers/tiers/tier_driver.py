"""Drives the store of a server: between the scheduler, which decides, and the store's client.

The scheduler's loop calls it once a turn. It never waits for the store: questions, records and
changes of the store are the work of other threads, whose descriptors wake the loop.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import zmq

from sgl_pipeline.args import TierArgs
from sgl_pipeline.errors import SglPipelineError
from sgl_pipeline.kv_store.store_client import Answer, Cleared, Found, StoreClient
from sgl_pipeline.managers.tiers.open_tier import OpenTier, StoreOpener
from sgl_pipeline.managers.tiers.side_thread import SideThread
from sgl_pipeline.pipeline.pipeline_state import TierState
from sgl_pipeline.scheduling.kv_tier import KvTier
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.wire.store_orders import StoreReport

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class TierOutcome:
    """The end of a change: `message` says why it was not made, or what is so now."""

    succeeded: bool
    message: str


Then = Callable[[TierOutcome], None]


class TierDriver:
    """The store of `tier`, which can be changed while the server runs. Each change calls its `then`
    once, in the scheduler's loop: at once, or when it is made.

    Args:
        args: those in force; their `backend` is None while no store is attached.
        open_store: used beside the loop.
        poller: watches what the other threads have to say.
    """

    def __init__(
        self,
        tier: KvTier,
        args: TierArgs,
        open_store: StoreOpener,
        poller: zmq.Poller,
    ) -> None:
        self.args = _detached(args)
        self._tier, self._open_store, self._poller = tier, open_store, poller
        self._opened: OpenTier | None = None
        self._beside = SideThread()
        poller.register(self._beside.fileno(), zmq.POLLIN)
        self._on_cleared: list[Callable[[Cleared], None]] = []
        self._next_log_s = float("-inf")

    # The loop

    def serve(self) -> None:
        """Takes the store's answers, asks it, and tells it what is saved and what is broken."""
        self._beside.finish()
        if self._opened is None:
            return
        client = self._opened.client
        for answer in client.take_answers():
            self._take(answer)
        self._ask(client)
        self._tell(client)

    def heard(self, report: StoreReport, now_s: float) -> None:
        """Logs why a stage could not save or load, once in `LOG_INTERVAL_S`: each object that a
        broken disk has is another reason."""
        if report.message and now_s >= self._next_log_s:
            self._next_log_s = now_s + LOG_INTERVAL_S
            logger.warning("stage %d, pages of the store: %s", report.stage, report.message)

    def check(self) -> None:
        """Detaches a store whose process has ended. To be called now and then."""
        if self._opened is None or self._opened.process is None:
            return
        if self._opened.process.has_ended:
            logger.error(
                "the process of --hicache-storage-backend %s has ended: pages are neither saved "
                "nor loaded until a store is attached, by PUT /hicache/storage-backend",
                self.args.backend,
            )
            self._leave()

    def close(self) -> None:
        """Ends what belongs to the store, at the end of the server."""
        if self._opened is not None:
            self._opened.close()

    def state(self) -> TierState:
        """The state now."""
        tier, counts = self._tier, self._tier.counts
        cached, loading, to_compute = tier.waiting_tokens()
        return TierState(
            backend=self.args.backend,
            cached_tokens=cached,
            loading_tokens=loading,
            compute_tokens=to_compute,
            loading_s=tier.loads.load_s(0),
            loading_pages=tier.loads.loading_pages,
            saving_pages=tier.saves.saving_pages,
            lookups=counts.num_lookups,
            hits=counts.num_hits,
            found_tokens=counts.found_tokens,
            loaded_tokens=counts.loaded_tokens,
            missed_tokens=dict(counts.unfulfilled.items()),
            saved_tokens=counts.saved_tokens,
            dropped_tokens={"pressure": counts.unsaved_tokens},
            broken_pages=counts.num_broken_pages,
            loaded_bytes=counts.loaded_bytes,
            saved_bytes=counts.saved_bytes,
            load_s=counts.load_s,
            save_s=counts.save_s,
        )

    # Changes

    def use(self, opened: OpenTier, args: TierArgs) -> None:
        """Uses a store that is open, by the rules of `args`."""
        self._opened, self.args = opened, args
        self._poller.register(opened.client.fileno(), zmq.POLLIN)
        self._tier.use(opened.place, TierRules.of(args))

    def attach(self, args: TierArgs, then: Then) -> None:
        """Uses the store of `args`, or its new rules where it is in use already."""
        if self._opened is not None and args.store == self.args.store:
            self.args = args
            self._tier.use(self._opened.place, TierRules.of(args))
            then(TierOutcome(True, "HiCache storage backend has new rules."))
            return
        self._leave()
        self._beside.submit(
            lambda: self._open_store(args), lambda end: self._opening(end, args, then)
        )

    def detach(self, then: Then) -> None:
        """Uses no store any more; what it holds stays there."""
        self._leave()
        then(TierOutcome(True, "HiCache storage backend is detached."))

    def clear(self, then: Then) -> None:
        """Removes all that this server's kind of store holds in its place, and goes on with it."""
        opened = self._opened
        assert opened is not None

        def go_on(cleared: Cleared) -> None:
            if self._opened is opened:
                self._tier.use(opened.place, TierRules.of(self.args))
            removed = cleared.num_pages
            message = "it cannot be cleared" if removed is None else f"{removed} pages are removed"
            then(TierOutcome(removed is not None, message))

        # What is on its way to the store belongs to before.
        self._tier.use(None, TierRules.of(self.args))
        self._on_cleared.append(go_on)
        opened.client.clear()

    def _opening(self, end: Any, args: TierArgs, then: Then) -> None:
        """`end` is the open store, or why there is none."""
        if isinstance(end, OpenTier):
            self.use(end, args)
            then(TierOutcome(True, "HiCache storage backend is attached."))
            return
        is_ours = isinstance(end, SglPipelineError)
        then(TierOutcome(False, str(end) if is_ours else f"{type(end).__name__}: {end}"))

    def _leave(self) -> None:
        """Uses no store from here on; the one that was used is closed beside the loop."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        self._tier.use(None, TierRules.of(self.args))
        self.args = _detached(self.args)
        self._poller.unregister(opened.client.fileno())
        self._beside.submit(opened.close, lambda end: None)
        for go_on in self._on_cleared:
            go_on(Cleared(None))
        self._on_cleared.clear()

    # Inside

    def _take(self, answer: Answer) -> None:
        if isinstance(answer, Found):
            self._tier.found(answer.lookup, answer.records)
        elif isinstance(answer, Cleared):
            self._on_cleared.pop(0)(answer)
        else:
            logger.warning("%s", answer.message)

    def _ask(self, client: StoreClient) -> None:
        for lookup in self._tier.take_lookups():
            if not client.ask(lookup.number, lookup.hashes):
                self._tier.found(lookup.number, ())

    def _tell(self, client: StoreClient) -> None:
        """Records wait while the client has no room for them."""
        tier = self._tier
        if tier.commits and client.commit(tuple(tier.commits)):
            tier.commits.clear()
        while tier.broken and client.drop(tier.broken[-1]):
            tier.broken.pop()


def _detached(args: TierArgs) -> TierArgs:
    """`args` without a store."""
    return dataclasses.replace(args, backend=None, is_attachable=True)
