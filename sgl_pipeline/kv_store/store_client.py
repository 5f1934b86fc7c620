"""The scheduler process's way to the pages of a store: a thread that asks, commits and removes,
and keeps the store within its bounds. No call waits for the store."""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sgl_pipeline.errors import StoreError
from sgl_pipeline.kv_store.page_store import PageStore
from sgl_pipeline.page_record import PageRecord

MAX_QUEUED = 256
# So many lookups without a hit call for a look at the configuration.
SUSPECT_LOOKUPS = 1000
RETRY_S = 10.0


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to `ask`: the records of the longest prefix that the store has."""

    lookup: int
    records: Sequence[PageRecord]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The answer to `clear`; None: it failed."""

    num_pages: int | None


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something to log. It is logged again when other trouble has come between."""

    message: str


Answer = Found | Cleared | Trouble


@dataclass(slots=True)
class ClientCounts:
    """Since the start; `refused` are the calls for which the queue had no room."""

    lookups: int = 0
    lookups_with_hits: int = 0
    pages_found: int = 0
    pages_committed: int = 0
    pages_dropped: int = 0
    errors: int = 0
    refused: int = 0


class StoreClient:
    """One thread of the scheduler process calls it; another, its own, uses the store.

    Args:
        max_queued: calls that may wait for the store.
    """

    def __init__(self, store: PageStore, max_queued: int = MAX_QUEUED) -> None:
        self._store = store
        self._max_queued = max_queued
        self._calls: deque[Callable[[], None]] = deque()
        self._has_call = threading.Condition()
        self._answers: deque[Answer] = deque()
        self._is_closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._last_message = ""
        self._counts = ClientCounts()
        self._thread = threading.Thread(target=self._run, name="kv-store", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """A descriptor that can be read when `take_answers` has something."""
        return self._wake

    @property
    def has_room(self) -> bool:
        """True if `ask`, `commit` and `drop` would be taken."""
        return len(self._calls) < self._max_queued

    @property
    def counts(self) -> ClientCounts:
        return self._counts

    def ask(self, lookup: int, hashes: Sequence[bytes]) -> bool:
        """Looks for the longest prefix of these pages; False where the queue is full. Each call
        that is taken gets one `Found`."""
        return self._queue(lambda: self._look_up(lookup, hashes))

    def commit(self, records: Sequence[PageRecord]) -> bool:
        """Makes pages found whose objects are all written; False where the queue is full: the
        pages are then not in the store."""
        return self._queue(lambda: self._commit(records))

    def drop(self, page_hash: bytes) -> bool:
        """Removes a page, such as one that turned out to be broken; False where the queue is
        full."""
        return self._queue(lambda: self._drop(page_hash))

    def clear(self) -> None:
        """Removes all pages of this server's digest; answered by `Cleared`. Also taken by a full
        queue."""
        self._append(self._clear)

    def take_answers(self) -> list[Answer]:
        """The answers since the last call, in sequence."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        answers = []
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    def close(self) -> None:
        """Does what is queued, then ends the thread."""
        with self._has_call:
            self._is_closing = True
            self._has_call.notify()
        self._thread.join()
        os.close(self._wake)

    def _queue(self, call: Callable[[], None]) -> bool:
        if not self.has_room:
            self._counts.refused += 1
            return False
        self._append(call)
        return True

    def _append(self, call: Callable[[], None]) -> None:
        with self._has_call:
            self._calls.append(call)
            self._has_call.notify()

    def _run(self) -> None:
        wait_s = 0.0
        while True:
            with self._has_call:
                if not self._calls and not self._is_closing:
                    self._has_call.wait(wait_s)
                if not self._calls and self._is_closing:
                    return
                call = self._calls.popleft() if self._calls else None
            if call is not None:
                self._try(call)
            # Calls in an endless row must not keep the store from evicting.
            wait_s = self._try(self._store.tend)

    def _try(self, call: Callable[[], float | None]) -> float:
        """The result of `call`, or RETRY_S: nothing that a store raises ends the thread."""
        try:
            return call() or 0.0
        except (OSError, StoreError) as error:
            self._report(f"the store of pages failed: {error}")
        except Exception as error:
            self._report(f"the store of pages failed, by a fault of its code: {error!r}")
        return RETRY_S

    def _report(self, message: str) -> None:
        self._counts.errors += 1
        if message != self._last_message:
            self._last_message = message
            self._answer(Trouble(message))

    def _answer(self, answer: Answer) -> None:
        self._answers.append(answer)
        os.eventfd_write(self._wake, 1)

    def _look_up(self, lookup: int, hashes: Sequence[bytes]) -> None:
        records: Sequence[PageRecord] = ()
        try:
            records = self._store.lookup(hashes)
        finally:
            self._answer(Found(lookup, records))
        counts = self._counts
        counts.lookups += 1
        counts.lookups_with_hits += bool(records)
        counts.pages_found += len(records)
        if counts.lookups == SUSPECT_LOOKUPS and counts.lookups_with_hits == 0:
            self._answer(
                Trouble(
                    f"{SUSPECT_LOOKUPS} lookups in the store of pages found nothing: no prefix "
                    f"comes back, or pages are not saved ({counts.pages_committed} were)"
                )
            )

    def _commit(self, records: Sequence[PageRecord]) -> None:
        self._store.commit(records)
        self._counts.pages_committed += len(records)

    def _drop(self, page_hash: bytes) -> None:
        self._store.drop(page_hash)
        self._counts.pages_dropped += 1

    def _clear(self) -> None:
        num_pages = None
        try:
            num_pages = self._store.clear()
        finally:
            self._answer(Cleared(num_pages))
