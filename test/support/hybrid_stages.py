"""The stages of a model with states in one process, under orders that a test gives by hand.

Each request has a state slot and pages of its own; a test says which rows run in each step.
"""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.local_pipeline import make_links, open_stage

from sgl_pipeline.microbatch import StateSnapshot
from sgl_pipeline.requests import GREEDY
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.step_order import INT32, ChunkOrder, RequestOpen, StepOrder

PAGE_SIZE = 16


class HandledRequest:
    """A prompt and the tokens drawn so far, of which `num_computed` were computed."""

    def __init__(self, handle: int, prompt_ids: Sequence[int], state_slot: int | None) -> None:
        self.handle = handle
        self.prompt_ids = list(prompt_ids)
        self.output_ids: list[int] = []
        self.state_slot = state_slot
        self.num_computed = 0
        self.pages: list[int] = []
        self.state_source: int | None = None
        self.is_open = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def num_left(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.tokens) - self.num_computed


class HybridStages:
    """`settings` are those of `open_stage`."""

    def __init__(
        self,
        path: Path,
        layer_counts: Sequence[int],
        *,
        num_state_slots: int = 4,
        pages_each: int = 16,
        **settings: Any,
    ) -> None:
        plan = StagePlan(0, tuple(layer_counts))
        self._pages_each = pages_each
        self.runners = [
            open_stage(
                path,
                plan,
                stage,
                link,
                num_pages=num_state_slots * pages_each,
                page_size=PAGE_SIZE,
                num_state_slots=num_state_slots,
                **settings,
            )
            for stage, link in enumerate(make_links(plan.num_stages))
        ]
        self._step_id = 0
        self._num_requests = 0

    def open(self, prompt_ids: Sequence[int], state_slot: int) -> HandledRequest:
        """A new request; its pages go with the slot."""
        self._num_requests += 1
        request = HandledRequest(self._num_requests, prompt_ids, state_slot)
        first = state_slot * self._pages_each
        request.pages = [*range(first, first + self._pages_each)]
        return request

    def open_behind(
        self, snapshot: StateSnapshot, other: HandledRequest, rest: Sequence[int], state_slot: int
    ) -> HandledRequest:
        """A new request that has the tokens of `other` up to its `snapshot`, with their pages, and
        then `rest`."""
        shared = snapshot.num_tokens
        request = self.open([*other.tokens[:shared], *rest], state_slot)
        request.pages[: shared // PAGE_SIZE] = other.pages[: shared // PAGE_SIZE]
        request.num_computed, request.state_source = shared, snapshot.slot
        return request

    def step(
        self,
        *chunks: tuple[HandledRequest, int],
        closes: Sequence[int] = (),
        snapshots: Sequence[StateSnapshot] = (),
    ) -> None:
        """Computes so many more tokens of each request, and draws where none is left. The first one
        takes the snapshots."""
        opens, orders = [], []
        for request, length in chunks:
            start = request.num_computed
            new = request.tokens
            pages: list[int] = []
            if not request.is_open:
                opens.append(
                    RequestOpen(
                        request.handle,
                        GREEDY,
                        len(request.prompt_ids),
                        state_slot=request.state_slot,
                    )
                )
                pages = request.pages
            else:
                new = new[-1:] if request.output_ids else []
            request.is_open = True
            samples = length == request.num_left
            orders.append(
                ChunkOrder(
                    request.handle,
                    start,
                    length,
                    samples,
                    array(INT32, new).tobytes(),
                    array(INT32, pages).tobytes(),
                    state_source=request.state_source,
                    snapshots=() if orders else tuple(snapshots),
                )
            )
            request.state_source = None
            request.num_computed += length
        order = StepOrder(self._step_id, 0, tuple(closes), tuple(opens), tuple(orders))
        self._step_id += 1
        for runner in self.runners:
            report = runner.launch(runner.prepare(order)).report()
        drawn = iter(report.token_ids or ())
        for request, _ in chunks:
            if request.num_left == 0:
                request.output_ids.append(next(drawn))

    def finish(self, request: HandledRequest, chunk: int, num_outputs: int) -> None:
        """Computes the prompt in chunks of so many tokens, and draws so many."""
        while len(request.output_ids) < num_outputs:
            self.step((request, min(chunk, request.num_left)))
