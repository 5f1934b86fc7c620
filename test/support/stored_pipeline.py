"""A virtual pipeline over a store: stages hold, for each page and layer, what was computed there.

A slot's content is the tokens up to its position, so a step that reads a page with other contents
than its request's is noticed at once. The token that follows is a function of all tokens before.
"""

import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from support.kept_pages import KeptPages
from support.pipelines import NO_TIME, make_request, new_scheduler

from sgl_pipeline.object_layers import object_parts, written_runs
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling import RecoveryLog
from sgl_pipeline.scheduling.page_wishes import Lookup
from sgl_pipeline.scheduling.tier_rules import TierRules
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import StageReport
from sgl_pipeline.wire.stage_orders import OrderReader, SealedOrder, StageOrder
from sgl_pipeline.wire.step_order import (
    INT32,
    MirroredChunk,
    MirrorSnapshot,
    RequestMirror,
    StepOrder,
)
from sgl_pipeline.wire.store_orders import (
    UINT32,
    LoadPages,
    PagesLoaded,
    PagesSaved,
    SavePages,
    StorePlace,
    StoreReport,
    UseStore,
)

PAGE_SIZE = 4
NUM_LAYERS = 6
RULES = TierRules(least_tokens=8, timeout_base_s=1.0)
PLACE = StorePlace(backend="file", address="/store", digest="d", save_bytes_per_s=1)
Slots = list[tuple[int, ...] | None]


def next_token(tokens: Sequence[int]) -> int:
    """Of a vocabulary of seven."""
    return (7 * len(tokens) + sum(place * token for place, token in enumerate(tokens))) % 7


def right_output(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that any pipeline must draw."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class MemoryStore(KeptPages[Slots]):
    """Shared by all servers of a test."""

    groups_layers: bool = True


def empty_pages(num_pages: int) -> list[Slots]:
    return [[None] * PAGE_SIZE for _ in range(num_pages)]


def checksum(slots: Slots) -> int:
    return zlib.crc32(repr(slots).encode())


def _write(
    slots: list[Slots], pages: Sequence[int], start: int, right: list[tuple[int, ...]]
) -> None:
    """Makes the positions from `start` on of a request, whose pages are `pages`, `right`."""
    for position in range(start, len(right)):
        slots[pages[position // PAGE_SIZE]][position % PAGE_SIZE] = right[position]


class StoredStage:
    """One stage: what it was sent, in order; its transfers run when the test says so."""

    def __init__(self, stage: int, layers: range, num_pages: int, store: MemoryStore) -> None:
        self.stage, self.layers, self._store = stage, layers, store
        self.inbox: deque[SealedOrder] = deque()
        self.transfers: list[SavePages | LoadPages] = []
        self._reader, self._mirror = OrderReader(), RequestMirror()
        self._is_used = False
        self._slots: dict[int, list[Slots]] = {layer: empty_pages(num_pages) for layer in layers}
        # The rows that it keeps, by page, and copies of those that it sent again, by step.
        self._rows = empty_pages(num_pages)
        self._sent: dict[int, dict[int, Slots]] = {}
        self.before: StoredStage | None = None
        # Of the newest step: each chunk's request's pages, and the positions that it computed.
        self.written: list[tuple[list[int], int, int]] = []

    def forget_stream(self) -> None:
        """As a stage does that regroups."""
        self.inbox.clear()
        self.transfers.clear()
        self._is_used = False

    def next_order(self) -> StageReport | None:
        """Applies the oldest order; a step is reported."""
        order = self._reader.open(self.inbox.popleft())
        if isinstance(order, UseStore):
            self.transfers.clear()
            self._is_used = order.place is not None
        elif isinstance(order, SavePages | LoadPages):
            assert self._is_used
            self.transfers.append(order)
        else:
            return self.obey(order)
        return None

    def obey(self, order: StageOrder) -> StageReport | None:
        """Applies an order about steps."""
        if isinstance(order, MirrorSnapshot):
            self._mirror.restore(order)
            return None
        assert isinstance(order, StepOrder)
        return self._run(order)

    def _run(self, order: StepOrder) -> StageReport:
        drawn: list[int] = []
        self.written.clear()
        chunks = self._mirror.apply(order)
        leased = [chunk.request.lease is not None for chunk in chunks]
        assert leased == sorted(leased), "chunks with a lease come last"
        self._replay(order)
        lost: set[int] = set()
        for chunk in chunks:
            tokens = (*chunk.request.tokens, *chunk.draft_ids)
            end = chunk.start + chunk.length
            if chunk.request.lease is not None:
                assert not chunk.draft_ids, "a lease has no place for rows that may be wrong"
                is_lost = not self.attend_elsewhere(chunk)
                lost |= {chunk.request.lease.number} if is_lost else set()
                if chunk.samples:
                    drawn.append(0 if is_lost else next_token(tokens[:end]))
                continue
            pages = chunk.request.pages
            self.written.append((list(pages), chunk.start, end))
            right = [tokens[: position + 1] for position in range(end)]
            for layer in self.layers:
                self._extend(layer, pages, chunk.start, right)
            _write(self._rows, pages, chunk.start, right)
            if chunk.samples:
                known_end = end - len(chunk.draft_ids)
                drawn += [next_token(tokens[:one]) for one in range(known_end, end + 1)]
        is_last = self.layers.stop == NUM_LAYERS
        return StageReport(
            stage=self.stage,
            step_id=order.step_id,
            epoch=order.epoch,
            timing=NO_TIME,
            token_ids=tuple(drawn) if is_last else None,
            lost_leases=tuple(lost),
        )

    def attend_elsewhere(self, chunk: MirroredChunk) -> bool:
        """Computes a chunk of a lease; False if the lease cannot be used."""
        raise AssertionError(f"this stage knows no leases: {chunk.request.lease}")

    def _replay(self, order: StepOrder) -> None:
        """Computes again what it has lost, from the rows that the stage before it has kept."""
        sent = self._sent.setdefault(order.step_id, {})
        for stages, chunks in self._mirror.replays(order):
            for chunk in chunks:
                for position in range(chunk.start, chunk.start + chunk.length):
                    page, slot = chunk.request.pages[position // PAGE_SIZE], position % PAGE_SIZE
                    right = tuple(chunk.request.tokens[: position + 1])
                    if self.stage in stages:
                        if self.before is not None:
                            assert self.before.sent(order.step_id, page)[slot] == right
                        for layer in self.layers:
                            self._slots[layer][page][slot] = right
                        self._rows[page][slot] = right
                    sent[page] = self._rows[page][:]

    def sent(self, step_id: int, page: int) -> Slots:
        """The rows of `page` that it sent again in a step."""
        return self._sent[step_id][page]

    def _extend(
        self, layer: int, pages: Sequence[int], start: int, right: list[tuple[int, ...]]
    ) -> None:
        """Writes the positions from `start` on of a request, of which all have to be `right`, and
        reads those before."""
        slots = self._slots[layer]
        seen = [slot for page in pages for slot in slots[page]][:start]
        assert seen == right[:start], (self.stage, layer)
        _write(slots, pages, start, right)

    def end_transfer(self, index: int, *, can_write: bool = True) -> StoreReport:
        """Carries out one transfer, whole, and reports it."""
        order = self.transfers.pop(index)
        pages = array(INT32, order.pages)
        hashes = [order.hashes[start : start + 32] for start in range(0, len(order.hashes), 32)]
        if isinstance(order, SavePages):
            return self._save(order, pages, hashes, len(pages) if can_write else len(pages) // 2)
        return self._load(order, pages, hashes)

    def _save(
        self, order: SavePages, pages: Sequence[int], hashes: list[bytes], count: int
    ) -> PagesSaved:
        checksums = array(UINT32)
        for page, page_hash in [*zip(pages, hashes, strict=True)][:count]:
            for run in written_runs(self.layers, is_grouped=self._store.groups_layers):
                contents = [self._slots[layer][page][:] for layer in run]
                assert not any(None in slots for slots in contents)
                self._store.objects[page_hash, run] = contents
                checksums.extend(map(checksum, contents))
        return PagesSaved(
            stage=self.stage,
            transfer=order.transfer,
            num_pages=count,
            layers=(self.layers.start, self.layers.stop),
            sizes=(8,) * len(self.layers),
            checksums=checksums.tobytes(),
            busy_s=0.01,
            is_grouped=self._store.groups_layers,
            message="" if count == len(pages) else "no space",
        )

    def _load(self, order: LoadPages, pages: Sequence[int], hashes: list[bytes]) -> PagesLoaded:
        checksums = array(UINT32, order.checksums)
        num_pages, is_broken = 0, False
        for index, (page, page_hash) in enumerate(zip(pages, hashes, strict=True)):
            contents: list[Slots] = []
            for part in object_parts(order.cuts[index], (1,) * NUM_LAYERS, self.layers):
                contents += self._store.part(page_hash, part) or []
            due = checksums[index * NUM_LAYERS :][self.layers.start : self.layers.stop]
            if [*map(checksum, contents)] != [*due]:
                is_broken = True
                break
            for layer, slots in zip(self.layers, contents, strict=True):
                self._slots[layer][page] = slots[:]
            num_pages += 1
        return PagesLoaded(
            stage=self.stage,
            transfer=order.transfer,
            num_pages=num_pages,
            num_bytes=8 * num_pages,
            busy_s=0.01,
            is_broken=is_broken,
        )


class StoredPipeline:
    """A core, its stages, and a driver that a test steps by hand."""

    def __init__(
        self,
        store: MemoryStore,
        layer_counts: tuple[int, ...] = (3, 3),
        num_pages: int = 32,
        rules: TierRules = RULES,
        log_pages: int | None = None,
    ) -> None:
        self.store, self.now_s = store, 0.0
        plan = StagePlan(0, layer_counts)
        scheduler = new_scheduler(
            num_pages=num_pages,
            num_stages=plan.num_stages,
            context_length=num_pages * PAGE_SIZE,
            log=None if log_pages is None else RecoveryLog(plan.num_stages, PAGE_SIZE, log_pages),
        )
        self.core = PipelineCore(scheduler, plan, vocab_size=7)
        self.tier = scheduler.tier
        self._num_pages = num_pages
        self.stages = [self._new_stage(stage) for stage in range(plan.num_stages)]
        self._join_stages()
        self.lookups: list[Lookup] = []
        self.requests: list[Request] = []
        self._incarnation = 0
        self.tier.use(PLACE, rules)

    def _new_stage(self, stage: int) -> StoredStage:
        layers = self.core.plan.layers_of(stage)
        return StoredStage(stage, range(layers.start, layers.stop), self._num_pages, self.store)

    def _join_stages(self) -> None:
        for stage in self.stages[1:]:
            stage.before = self.stages[stage.stage - 1]

    def add(self, prompt: Sequence[int], max_new_tokens: int = 3, namespace: str = "") -> Request:
        request = make_request(
            f"r{len(self.requests)}", prompt, max_new_tokens, namespace=namespace
        )
        self.requests.append(replace_arrival(request, self.now_s))
        self.core.scheduler.add(request)
        return request

    def fill(self) -> None:
        """A turn of the driver: asks the store, sends orders and steps."""
        self.lookups += self.tier.take_lookups()
        for order in self.core.orders_before_step(self.now_s):
            self._send(order)
        while (step := self.core.next_step(self.now_s)) is not None:
            self._send(step.order)
        for record in self.tier.commits:
            self.store.records[record.page_hash] = record
        self.tier.commits.clear()
        for page_hash in self.tier.broken:
            self.store.records.pop(page_hash, None)
        self.tier.broken.clear()
        self.core.scheduler.check_invariants()

    def _send(self, order: SealedOrder) -> None:
        for stage in self.stages:
            stage.inbox.append(order)

    def answer(self, index: int = 0) -> None:
        lookup = self.lookups.pop(index)
        self.tier.found(lookup.number, self.store.lookup(lookup.hashes))

    def run_order(self, stage: int) -> None:
        """The stage applies its next order, unless the stage before it has not yet."""
        inbox = self.stages[stage].inbox
        if inbox and (stage == 0 or len(self.stages[stage - 1].inbox) < len(inbox)):
            report = self.stages[stage].next_order()
            if report is not None:
                self.core.take_report(report, self.now_s)

    def end_transfer(self, stage: int, index: int = 0, *, can_write: bool = True) -> None:
        report = self.stages[stage].end_transfer(index, can_write=can_write)
        self.core.take_store_report(report)

    def lose(self, stage: int) -> None:
        """Another worker fills the stage; all begin anew."""
        self.core.halt([stage], "lost", self.now_s)
        self.stages[stage] = self._new_stage(stage)
        self._join_stages()
        for one in self.stages:
            one.forget_stream()
        self._incarnation += 1
        self._send(self.core.start_over(self._incarnation))

    def run(self, turns: int = 2_000, *, transfers: bool = True) -> None:
        """Everything that is due happens at once, until all requests have ended."""
        for _ in range(turns):
            self.now_s += 0.05
            while transfers and self.lookups:
                self.answer()
            self.fill()
            has_sent = any(stage.inbox for stage in self.stages)
            for stage in self.stages:
                while stage.inbox:
                    self.run_order(stage.stage)
                while transfers and stage.transfers:
                    self.end_transfer(stage.stage)
            if self.core.scheduler.is_idle and not (transfers and has_sent):
                return
        raise AssertionError("a request never ended")

    def check_outputs(self) -> None:
        for request in self.requests:
            assert request.finish is not None
            right = right_output(request.prompt_ids, len(request.output_ids))
            assert request.output_ids == right
            if request.finish.kind != "abort":
                assert len(request.output_ids) == request.stops.max_new_tokens


def replace_arrival(request: Request, now_s: float) -> Request:
    request.arrival_s = now_s
    return request


def shared_prompt(random: Random, length: int) -> list[int]:
    """Prompts of few beginnings, so that prefixes meet."""
    base = Random(random.randrange(4)).choices(range(7), k=64)
    return base[: random.randrange(length)] + random.choices(range(7), k=random.randrange(1, 9))
