"""One stage with its weights, pages and links: launches one step after the other.

In tests several runners share one process. On a CPU a step has run when it was launched; the last
stage on a GPU gets its tokens later, which is why a step returns a `PendingReport`. It never
schedules or matches prefixes, and reads a clock only for the moments it reports.
"""

import time
from collections.abc import Callable, Sequence

import torch

from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.attention.state_pool import state_pool_of
from sgl_pipeline.pp_runner.base.layer_counts import most_layers
from sgl_pipeline.pp_runner.base.step_inputs import StepInputs, build_step_inputs, written_pages
from sgl_pipeline.pp_runner.boundary_log import BoundaryLog
from sgl_pipeline.pp_runner.device import make_download, make_upload
from sgl_pipeline.pp_runner.kernel_choice import (
    choose_attention_backend,
    choose_graphs,
    make_stage_attention,
    make_step_layers,
)
from sgl_pipeline.pp_runner.known_plans import KnownPlans
from sgl_pipeline.pp_runner.lent_attention.offloaded_attention import OffloadedAttention
from sgl_pipeline.pp_runner.links.activation_link import ActivationLink
from sgl_pipeline.pp_runner.model.held_layers import HeldLayers
from sgl_pipeline.pp_runner.model.stage_model import StageModel
from sgl_pipeline.pp_runner.output.output_tail import OutputTail, PendingOutputs, Tail
from sgl_pipeline.pp_runner.pending_reports import PendingReport, PreparedStep, StepClock
from sgl_pipeline.pp_runner.rehearsal import rehearsed_steps
from sgl_pipeline.pp_runner.stage_replays import Attend, StageReplays, attend_idle
from sgl_pipeline.pp_runner.step_layers import EagerLayers, StepLayers
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import StageAssignment
from sgl_pipeline.wire.step_order import MirroredChunk, MirrorSnapshot, RequestMirror, StepOrder


class StageRunner:
    """Owns the layers that the stage holds and its view of the open requests.

    Args:
        tail: for tests, replaces the last stage's own.
        log: keeps the rows that the stage sends; None: they are not kept.
        run_directory: where the keys for streams to peers are.
        num_state_slots: of the pool of states; 0 in a model without.

    `stage` is its position, `attention_backend` and `graphs` name those in use, `shapes` are those
    of all layers' attention and pages, `offload` knows the peers. `held_layers` may change between
    two steps; the plan of a step's epoch selects the layers that it runs.
    """

    def __init__(
        self,
        assignment: StageAssignment,
        model: StageModel,
        shapes: Sequence[AttentionShape],
        num_pages: int,
        link: ActivationLink,
        tail: Tail | None = None,
        log: BoundaryLog | None = None,
        run_directory: str = "",
        num_state_slots: int = 0,
    ) -> None:
        self.stage = assignment.stage
        self._is_first = assignment.stage == 0
        self.shapes = shapes
        self.page_size, self.device = shapes[0].page_size, shapes[0].device
        args = assignment.args
        self.attention_backend = choose_attention_backend(args.attention_backend, shapes[0])
        attention = make_stage_attention(self.attention_backend, shapes, args.prefill_kernels)
        self.graphs = choose_graphs(args.graphs, self.attention_backend, shapes, model.has_experts)
        states = model.spec.states
        most = most_layers([one is not None for one in states], assignment.max_layers or 0)
        self.held_layers = HeldLayers(
            model,
            KvPool(
                model.layers,
                shapes,
                num_pages,
                has_padding_page=self.graphs.is_on,
                max_layers=most.with_pages,
            ),
            state_pool_of(
                model.layers,
                states,
                num_state_slots,
                shapes[0].dtype,
                self.device,
                max_layers=most.with_states,
            ),
        )
        first_plan = assignment.plan
        self._plans = KnownPlans(first_plan)
        self._layers = make_step_layers(
            self.graphs.is_on,
            first_plan.epoch,
            first_plan.layers_of(self.stage),
            self.held_layers,
            attention,
            shapes[0],
        )
        self.offload = OffloadedAttention(attention, run_directory)
        self._layers_beside_peers = EagerLayers(self.held_layers, self.offload)
        self._upload = make_upload(self.device)
        self._link = link
        if tail is None and model.is_last:
            tail = OutputTail(model.logits, self.device, make_download(self.device))
        self._tail = tail
        self._plans_tail_late = plans_tail_late(self.device, self._is_first)
        self._log = log
        self._replays = StageReplays(self.stage, self.page_size, self.device, self._layers, log)
        self._mirror = RequestMirror()
        self._clock = StepClock(time.monotonic())

    def know_plan(self, plan: StagePlan) -> None:
        """Prepares for steps of the epoch of `plan`, which is newer than all known ones.

        On a GPU that epoch's graphs are recorded as its steps need them, and steps of an older one
        run without graphs from here on.

        Raises ProtocolError when the epoch is not newer, when the plan is not of this pipeline, or
        when the stage does not hold its layers.
        """
        self._plans.check(plan)
        layers = plan.layers_of(self.stage)
        self.held_layers.require(layers, f"the plan of epoch {plan.epoch}")
        self._layers.prepare(plan.epoch, layers)
        self._plans.add(plan)

    def restore(self, snapshot: MirrorSnapshot) -> None:
        """Takes over the scheduler's view of all open requests, and of the log."""
        self._mirror.restore(snapshot)
        if self._log is not None and snapshot.log is not None:
            self._log.restore(snapshot.log)

    def prepare(self, plan: StepOrder, attend: Attend = attend_idle) -> PreparedStep:
        """Applies `plan`, runs the recomputations for lost stages, and does all work of the step
        that needs no activations and that the layers wait for.

        Raises ProtocolError when the stage does not know the step's epoch, does not hold the layers
        that it runs or lacks its state slots, and as `StageReplays.run`.
        """
        layers = self._layers_of(plan)
        chunks = self._mirror.apply(plan)
        replays = [*self._mirror.replays(plan)]
        if replays:
            self._replays.run(plan, replays, layers, self._link, attend)
        again = [one for stages, batch in replays if self.stage in stages for one in batch]
        plan_s = time.monotonic()
        return self._prepared(plan.step_id, plan.epoch, layers, chunks, plan_s, again)

    def _prepared(
        self,
        step_id: int,
        epoch: int,
        layers: range,
        chunks: Sequence[MirroredChunk],
        plan_s: float,
        again: Sequence[MirroredChunk] = (),
    ) -> PreparedStep:
        inputs = build_step_inputs(chunks, self.page_size, self.device, self._upload)
        if self.held_layers.state_pool is not None:
            self.held_layers.state_pool.check(inputs)
        if inputs.lent is not None:
            self.offload.begin(inputs, layers)
        self._layers_for(inputs).plan(epoch, layers, inputs)
        if self._tail is not None and not self._plans_tail_late:
            self._tail.plan(chunks, inputs)
        return PreparedStep(step_id, epoch, layers, chunks, inputs, plan_s, time.monotonic(), again)

    @property
    def rows_descriptor(self) -> int | None:
        """A file descriptor that can be read when `can_launch` may have come true, if there is
        one."""
        return self._link.descriptor

    def regroup(self, link: ActivationLink) -> None:
        """Drops all requests and the link to neighbors, one of which was lost, for `link`. A step
        that was prepared is never launched."""
        self._link.close()
        self._link = link
        self._mirror = RequestMirror()

    def can_launch(self) -> bool:
        """True if `launch` would find its activations there."""
        return self._is_first or self._link.has_rows()

    def launch(self, step: PreparedStep) -> PendingReport:
        """Waits for the activations of the step that was prepared last, runs the layers, sends the
        result on.

        Raises ProtocolError when the activations belong to another step, and NeighborGone when they
        will never come.
        """
        hidden = None
        if not self._is_first:
            hidden = self._link.receive(step.step_id, step.inputs.num_tokens)
        activations_s = time.monotonic()
        hidden = self._run_layers(step, hidden)
        layers_s = time.monotonic()
        outputs = None
        if self._tail is not None:
            outputs = self._draw(self._tail, step, hidden)
        else:
            self._link.send(step.step_id, hidden)
            if self._log is not None:
                self._log.begin(step.chunks)
                self._log.write(step.inputs.slots, hidden)
        moments = (step.plan_s, step.inputs_s, activations_s, layers_s)
        offloaded = None if step.inputs.lent is None else self.offload.end()
        return PendingReport(
            self._clock, self.stage, step, moments, time.monotonic(), outputs, offloaded
        )

    def _run_layers(self, step: PreparedStep, hidden: torch.Tensor | None) -> torch.Tensor:
        if self.graphs.is_on:
            self.held_layers.await_layers(step.layers)
        return self._layers_for(step.inputs).run(step.inputs, hidden)

    def _draw(self, tail: Tail, step: PreparedStep, hidden: torch.Tensor) -> PendingOutputs:
        if self._plans_tail_late:
            tail.plan(step.chunks, step.inputs)
        return tail.draw(hidden)

    def _layers_for(self, inputs: StepInputs) -> StepLayers:
        """The way in which a step runs the layers: kernel by kernel, if peers attend to rows."""
        return self._layers if inputs.lent is None else self._layers_beside_peers

    def rehearse(self, on_step: Callable[[], None] = lambda: None) -> None:
        """Runs made-up steps like real ones, except the links. To be called before the first order;
        leaves no trace: the pages are zeros again, and a request's states begin as zeros.

        Args:
            on_step: called before each step.
        """
        page_size, model = self.page_size, self.held_layers.model
        plan = self._plans.newest
        kv_pool = self.held_layers.kv_pool
        used_pages: set[int] = set()
        state_pool = self.held_layers.state_pool
        num_state_slots = None if state_pool is None else state_pool.num_slots
        for chunks in rehearsed_steps(
            kv_pool.num_pages, page_size, model.spec.context_length, num_state_slots
        ):
            on_step()
            layers = plan.layers_of(self.stage)
            step = self._prepared(0, plan.epoch, layers, chunks, time.monotonic())
            rows = (step.inputs.num_tokens, model.spec.hidden_size)
            ones = torch.ones(rows, dtype=self.shapes[0].dtype, device=self.device)
            hidden = self._run_layers(step, None if self._is_first else ones)
            if self._tail is not None:
                self._draw(self._tail, step, hidden).result()
            elif self._log is not None:
                self._log.write(step.inputs.slots, hidden)  # of pages that it does not keep
            used_pages.update(written_pages(chunks, page_size))
        for layer in kv_pool.layers:
            for pages in kv_pool.pages(layer):
                pages[sorted(used_pages)] = 0
        self._clock.free_s = time.monotonic()

    def close(self) -> None:
        self.offload.close()
        self._link.close()

    def _layers_of(self, step: StepOrder) -> range:
        """The layers that the stage runs in `step`, all of them held."""
        layers = self._plans.of(step.step_id, step.epoch).layers_of(self.stage)
        self.held_layers.require(layers, f"step {step.step_id}")
        return layers


def plans_tail_late(device: torch.device, is_first: bool) -> bool:
    """True if a last stage plans its tail behind the launch of its layers: a GPU that waits for no
    rows computes them meanwhile. Another one has time while it waits, a CPU has none behind."""
    return device.type == "cuda" and is_first
