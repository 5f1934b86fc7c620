"""The KV pages that replaced stages must recompute before a step reads them, and those that they
can.

Every stage but the last keeps the rows that it has sent, by KV page (`pp_runner/boundary_log.py`).
A replaced stage owes the keys and values of every page that holds any. Before a step reads an owed
page, the owing stage alone recomputes it, from the rows that the stage before it has kept; stage 0
has the tokens. Pages that no step reads stay owed.
"""

from collections.abc import Iterable, Sequence

from sgl_pipeline.microbatch import REPLAY_TOKENS, Chunk, Replay
from sgl_pipeline.requests import Request
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.logged_pages import LogContents, LoggedPages, begun_pages


class RecoveryLog:
    """`replayed_tokens` counts the tokens that each stage was ordered to compute again since the
    start, also for stages that do not serve any more; each log has room for `capacity` pages.

    Args:
        capacity: pages that each stage's log has room for.
    """

    def __init__(self, num_stages: int, page_size: int, capacity: int) -> None:
        self.replayed_tokens: list[int] = []
        self._page_size = page_size
        self.capacity = capacity
        self.use_stages(num_stages)

    def use_stages(self, num_stages: int) -> None:
        """`num_stages` stages with empty pages and logs run the next steps."""
        self.replayed_tokens += [0] * (num_stages - len(self.replayed_tokens))
        self._logged = LoggedPages(self.capacity)
        self._owed: list[set[int]] = [set() for _ in range(num_stages)]
        # Pages of `_logged` without the rows that this stage has sent: it was lost, or sent rows
        # of another layer then.
        self._unlogged: list[set[int]] = [set() for _ in range(num_stages)]
        # Requests that own no page that is owed.
        self._settled: set[Request] = set()
        self._has_displaced_owed = False

    def use_capacity(self, capacity: int) -> None:
        """Each stage's log has room for `capacity` pages; if that is new, all logs are empty."""
        if capacity != self.capacity:
            assert not self._logged, "the logs hold pages"
            self.capacity = capacity
            self._logged = LoggedPages(capacity)

    @property
    def owes(self) -> bool:
        """True if any stage owes any page, in use or not."""
        return any(self._owed)

    def contents(self) -> LogContents:
        """The contents of every stage's log from now on."""
        return self._logged.contents()

    def lose(self, stages: Iterable[int], pages_in_use: Sequence[int]) -> None:
        """The keys and values of `stages` are gone, with their logs."""
        for stage in stages:
            self._owed[stage] = set(pages_in_use)
            self._unlogged[stage] = set(pages_in_use)
        self._settled.clear()

    def lose_rows(self, stage: int, pages_in_use: Sequence[int]) -> None:
        """The log of `stage` is gone, its keys and values are not."""
        self._unlogged[stage] = set(pages_in_use)

    def move(self, old: StagePlan, new: StagePlan, pages_in_use: Sequence[int]) -> None:
        """The next steps run under `new`: the kept rows of a stage that now ends with another layer
        are of no use."""
        for stage in range(old.num_stages - 1):
            if old.layers_of(stage).stop != new.layers_of(stage).stop:
                self._unlogged[stage] = set(pages_in_use)

    def fill(self, pages: Iterable[int]) -> None:
        """Each stage has new keys and values in `pages`, and kept no rows of them."""
        for owed in self._owed:
            owed.difference_update(pages)
        for unlogged in self._unlogged:
            unlogged.update(pages)

    def take_up(self, chunks: Sequence[Chunk], released: Iterable[Request]) -> tuple[Replay, ...]:
        """Prepares a step that is about to be sent: returns the recomputations before it, and
        enters its new pages in the log."""
        replays: list[Replay] = []
        if self.owes:
            self._settled.difference_update(released)
            for chunk in chunks:
                if chunk.request.lease is None and chunk.request not in self._settled:
                    replays += self._settle(chunk.request, chunk.start)
        else:
            self._settled.clear()
        for chunk in chunks:
            if chunk.request.lease is not None:
                continue  # its keys and values are elsewhere
            for page in begun_pages(chunk.request.pages, chunk.start, chunk.end, self._page_size):
                self._enter(page)
        return tuple(replays)

    def take_back(self, replays: Iterable[Replay]) -> None:
        """Steps that were sent with `replays` are taken back."""
        for replay in replays:
            for stage in replay.stages:
                self._owed[stage].update(replay.pages)
                self._unlogged[stage].update(replay.pages)

    def unreachable(self) -> set[int]:
        """Owed pages that the owing stage cannot recompute alone, because the stage before it has
        not kept their rows."""
        self._has_displaced_owed = False
        found: set[int] = set()
        for stage in range(1, len(self._owed)):
            before, unlogged = self._owed[stage - 1], self._unlogged[stage - 1]
            found.update(
                page
                for page in self._owed[stage] - before
                if page in unlogged or page not in self._logged
            )
        return found

    @property
    def has_displaced_owed(self) -> bool:
        """True if `unreachable` has grown, because an owed page left the log."""
        return self._has_displaced_owed

    def all_owed(self) -> set[int]:
        """The pages that any stage owes."""
        return set().union(*self._owed)

    def forgive(self, pages: set[int]) -> None:
        """Forgets debts on `pages`, which no step will read any more."""
        for owed in self._owed:
            owed -= pages

    def _settle(self, request: Request, end: int) -> list[Replay]:
        """The owed positions of the request before `end`, in runs that end with a page."""
        self._settled.add(request)
        size = self._page_size
        longest = max(1, REPLAY_TOKENS // size)
        replays: list[Replay] = []
        run: list[int] = []
        run_stages: tuple[int, ...] = ()
        pages = request.pages[: -(-end // size)]
        for index, page in enumerate(pages):
            stages = tuple(stage for stage, owed in enumerate(self._owed) if page in owed)
            if run and (stages != run_stages or len(run) == longest):
                replays.append(self._replay(request, index, run, run_stages, end))
                run = []
            if stages:
                run.append(page)
            run_stages = stages
        if run:
            replays.append(self._replay(request, len(pages), run, run_stages, end))
        return replays

    def _replay(
        self, request: Request, end_index: int, run: list[int], stages: tuple[int, ...], end: int
    ) -> Replay:
        """The replay of the pages `run`, which end before the request's page `end_index`."""
        start = (end_index - len(run)) * self._page_size
        length = min(end_index * self._page_size, end) - start
        for stage in stages:
            self._owed[stage].difference_update(run)
            self._unlogged[stage].difference_update(run)
            self.replayed_tokens[stage] += length
        return Replay(request, start, length, stages, tuple(run))

    def _enter(self, page: int) -> None:
        """Forgets the page's earlier contents."""
        _, left = self._logged.enter(page)
        for pages in (*self._owed, *self._unlogged):
            pages.discard(page)
        if left is not None and any(left in owed for owed in self._owed):
            self._has_displaced_owed = True
