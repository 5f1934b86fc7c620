"""The stages of a server without its scheduler: a test says what each step has.

Pages, handles and leases are the test's, so that it can also order what a scheduler would not.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.local_pipeline import make_links, open_stage
from support.tiered_pipeline import DIGEST

from sgl_pipeline.pp_runner.kernel_choice import make_stage_attention
from sgl_pipeline.pp_runner.lent_attention.stage_leases import StageLeases
from sgl_pipeline.pp_runner.output.output_tail import OutputTail
from sgl_pipeline.pp_runner.page_store.page_transfers import PageTransfers
from sgl_pipeline.pp_runner.page_store.stage_offers import PeerSite
from sgl_pipeline.requests import GREEDY, Lease, SamplingSpec
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.attention_messages import attention_door
from sgl_pipeline.wire.lease_orders import EndLease, LendPages, PagesLent
from sgl_pipeline.wire.stage_messages import StageReport
from sgl_pipeline.wire.step_order import INT32, ChunkOrder, RequestOpen, StepOrder
from sgl_pipeline.wire.store_orders import PeerPlace, PeerStage, offer_door


@dataclass(eq=False)
class Driven:
    """A request of `tokens`; `num_computed` have keys and values in `pages`, or in its lease."""

    handle: int
    tokens: list[int]
    num_prompt: int
    pages: list[int]
    num_computed: int = 0
    lease: Lease | None = None
    sampling: SamplingSpec = GREEDY
    num_sent: int = 0  # of its tokens
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class DrivenStages:
    """Stages of `layer_counts` layers, whose rows take the compiled kernels or plain torch."""

    def __init__(
        self,
        model_path: Path,
        layer_counts: Sequence[int],
        run_directory: str = "",
        *,
        page_size: int = 4,
        num_pages: int = 256,
        **stage: Any,
    ) -> None:
        self.page_size, self.plan = page_size, StagePlan(0, tuple(layer_counts))
        self.runners = [
            open_stage(
                model_path,
                self.plan,
                number,
                link,
                num_pages=num_pages,
                page_size=page_size,
                run_directory=run_directory,
                **stage,
            )
            for number, link in enumerate(make_links(self.plan.num_stages))
        ]
        self.run_directory = run_directory
        self.reports: list[StageReport] = []
        self._num_pages_used = self._num_steps = self._num_requests = 0
        self._step_logits = torch.empty(0)
        tail = self.runners[-1]._tail
        assert isinstance(tail, OutputTail)
        head = tail._head

        def keep(rows: torch.Tensor) -> torch.Tensor:
            self._step_logits = head(rows)
            return self._step_logits.clone()

        tail._head = keep

    def take_pages(self, count: int) -> list[int]:
        self._num_pages_used += count
        return [*range(self._num_pages_used - count, self._num_pages_used)]

    def new_request(
        self,
        prompt: list[int],
        num_tokens: int,
        sampling: SamplingSpec = GREEDY,
        lease: Lease | None = None,
        num_lent: int = 0,
    ) -> Driven:
        """With pages for a prompt and `num_tokens` more; of a lease the first `num_lent` tokens are
        computed."""
        self._num_requests += 1
        num_pages = -(-(len(prompt) + num_tokens) // self.page_size)
        pages = self.take_pages(num_pages if lease is None else 1)
        number = self._num_requests
        return Driven(number, [*prompt], len(prompt), pages, num_lent, lease, sampling)

    def step(self, requests: Sequence[Driven], most_tokens: int = 9) -> set[int]:
        """One step with the next tokens of each request. Returns the leases that are lost; their
        tokens are not taken, and would be computed again."""
        ordered = sorted(requests, key=lambda one: one.lease is not None)
        opens = tuple(
            RequestOpen(one.handle, one.sampling, one.num_prompt, None, one.lease)
            for one in ordered
            if not one.num_sent
        )
        chunks = tuple(self._chunk(one, most_tokens) for one in ordered)
        order = StepOrder(self._num_steps, self.plan.epoch, (), opens, chunks)
        self._num_steps += 1
        reports = [runner.launch(runner.prepare(order)).report() for runner in self.runners]
        self.reports += reports
        lost = {lease for report in reports for lease in report.lost_leases}
        drawn = iter(zip(reports[-1].token_ids or (), self._step_logits, strict=True))
        for one, chunk in zip(ordered, chunks, strict=True):
            token, logits = next(drawn) if chunk.samples else (None, None)
            if one.lease is not None and one.lease.number in lost:
                continue
            one.num_computed += chunk.length
            if token is not None and logits is not None:
                one.tokens.append(token)
                one.logits.append(logits)
        return lost

    def run(self, requests: Sequence[Driven], num_tokens: int, most_tokens: int = 9) -> None:
        """Steps until each request has `num_tokens`; fails where a lease is lost."""
        while left := [one for one in requests if len(one.output_ids) < num_tokens]:
            assert not self.step(left, most_tokens)

    def close(self) -> None:
        for runner in self.runners:
            runner.close()

    def _chunk(self, request: Driven, most_tokens: int) -> ChunkOrder:
        start, end = request.num_computed, len(request.tokens)
        length = end - start if request.lease else min(end - start, most_tokens)
        new_tokens = array(INT32, request.tokens[request.num_sent :])
        new_pages = array(INT32, [] if request.num_sent else request.pages)
        request.num_sent = end
        return ChunkOrder(
            request.handle,
            start,
            length,
            start + length == end,
            new_tokens.tobytes(),
            new_pages.tobytes(),
        )


class LendingStages(DrivenStages):
    """Stages that lend their pages.

    Args:
        address: of the port of their host.
    """

    def __init__(
        self,
        model_path: Path,
        layer_counts: Sequence[int],
        run_directory: str,
        address: str,
        name: str = "P",
        **stage: Any,
    ) -> None:
        super().__init__(model_path, layer_counts, run_directory, **stage)
        self.address, self.name = address, name
        self.leases = [self._leases(number) for number in range(self.plan.num_stages)]
        self.transfers = [
            PageTransfers(
                number,
                self.runners[number].held_layers.kv_pool,
                lambda: self.plan,
                lambda: True,
                PeerSite(run_directory, offer_door(number)),
                leases=leases,
            )
            for number, leases in enumerate(self.leases)
        ]
        self.num_lent = 0

    @property
    def place(self) -> PeerPlace:
        layers = map(self.plan.layers_of, range(self.plan.num_stages))
        stages = tuple(
            PeerStage(f"{self.address}/{offer_door(stage)}", (own.start, own.stop))
            for stage, own in enumerate(layers)
        )
        return PeerPlace(name=self.name, digest=DIGEST, stages=stages)

    def lend(self, prompt: list[int], num_tokens: int) -> tuple[Lease, int]:
        """A lease with all whole pages of a prompt, which is computed first, for `num_tokens` more,
        and how many tokens they hold."""
        request = self.new_request(prompt, 1)
        self.run([request], 1)
        num_held = (len(prompt) - 1) // self.page_size
        num_own = -(-(len(prompt) + num_tokens) // self.page_size) - num_held
        pages = request.pages[:num_held] + self.take_pages(num_own)
        self.num_lent += 1
        order = LendPages(self.num_lent, array(INT32, pages).tobytes(), num_held, DIGEST)
        for number, transfers in enumerate(self.transfers):
            transfers.obey_lease(order)
            assert transfers.is_open
            assert transfers.take_reports() == [(PagesLent(number, self.num_lent), ())]
            assert not transfers.is_open
        return Lease(self.name, self.num_lent), num_held * self.page_size

    def end(self, lease: Lease) -> None:
        for transfers in self.transfers:
            transfers.obey_lease(EndLease(lease.number))

    def close(self) -> None:
        for transfers in self.transfers:
            transfers.close()
        super().close()

    def _leases(self, number: int) -> StageLeases:
        runner = self.runners[number]
        return StageLeases(
            number,
            runner.held_layers.kv_pool,
            runner.shapes,
            lambda: make_stage_attention(runner.attention_backend, runner.shapes, num_threads=1),
            lambda: self.plan.layers_of(number),
            self.run_directory,
            attention_door(offer_door(number)),
        )
