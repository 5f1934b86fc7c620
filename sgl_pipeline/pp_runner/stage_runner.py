"""One stage with its weights, pages and links: runs one step after the other.

Driven by `stage_worker.py` in a process of its own, and by tests with several stages in one
process. It never schedules or matches prefixes, and reads a clock only for the moments it reports.
"""

import time

from sgl_pipeline.messages import StageAssignment, StageReport
from sgl_pipeline.pp_runner.attention.backend import AttentionShape
from sgl_pipeline.pp_runner.device import make_upload
from sgl_pipeline.pp_runner.kernel_choice import (
    choose_attention_backend,
    make_attention_backend,
    make_step_layers,
    uses_graphs,
)
from sgl_pipeline.pp_runner.kv_pool import KvPool
from sgl_pipeline.pp_runner.links.activation_link import ActivationLink
from sgl_pipeline.pp_runner.logit_adjustments import plan_logit_adjustments
from sgl_pipeline.pp_runner.logprobs import plan_logprobs
from sgl_pipeline.pp_runner.sampler import Sampler
from sgl_pipeline.pp_runner.stage_model import StageModel
from sgl_pipeline.pp_runner.step_inputs import build_step_inputs
from sgl_pipeline.pp_runner.token_masks import plan_token_masks
from sgl_pipeline.requests import LogprobRows
from sgl_pipeline.stage_timing import StageTiming
from sgl_pipeline.step_plan import MirrorSnapshot, RequestMirror, StepPlan


class StageRunner:
    """Owns the stage's KV pool and its view of the open requests.

    `attention_backend` says which one is in use.
    """

    def __init__(
        self,
        assignment: StageAssignment,
        model: StageModel,
        attention_shape: AttentionShape,
        num_pages: int,
        link: ActivationLink,
    ) -> None:
        self._stage = assignment.stage
        self._is_first = assignment.stage == 0
        self._is_last = assignment.stage == assignment.plan.num_stages - 1
        self._model = model
        self._shape = attention_shape
        self.attention_backend = choose_attention_backend(
            assignment.attention_backend, attention_shape
        )
        attention = make_attention_backend(
            self.attention_backend, attention_shape, assignment.prefill_kernels
        )
        has_graphs = uses_graphs(assignment.graphs, self.attention_backend)
        kv_pool = KvPool(
            assignment.plan.layers_of(assignment.stage),
            num_pages=num_pages,
            page_size=attention_shape.page_size,
            num_kv_heads=attention_shape.num_kv_heads,
            head_dim=attention_shape.head_dim,
            dtype=attention_shape.dtype,
            device=attention_shape.device,
            has_padding_page=has_graphs,
        )
        self._layers = make_step_layers(
            has_graphs, assignment.plan.epoch, model, kv_pool, attention, attention_shape
        )
        self._upload = make_upload(attention_shape.device)
        self._link = link
        self._sampler = Sampler()
        self._mirror = RequestMirror()
        self._free_s = time.monotonic()

    def restore(self, snapshot: MirrorSnapshot) -> None:
        """Takes over the scheduler's view of all open requests."""
        self._mirror.restore(snapshot)

    def run_step(self, plan: StepPlan) -> StageReport:
        """Applies `plan`, waits for its activations, runs the layers, passes the result on.

        Raises ProtocolError when plan or activations are not the ones that come next.
        """
        plan_s = time.monotonic()
        chunks = self._mirror.apply(plan)
        inputs = build_step_inputs(chunks, self._shape.page_size, self._shape.device, self._upload)
        self._layers.plan(plan.epoch, inputs)
        adjustments = masks = logprob_plan = None
        if self._is_last:
            adjustments = plan_logit_adjustments(chunks, self._shape.device)
            masks = plan_token_masks(chunks, self._shape.device)
            logprob_plan = plan_logprobs(chunks)
        inputs_s = time.monotonic()
        hidden = None
        if not self._is_first:
            hidden = self._link.receive(plan.step_id, inputs.num_tokens)
        activations_s = time.monotonic()
        hidden = self._layers.run(inputs, hidden)
        layers_s = done_s = time.monotonic()
        token_ids = None
        logprobs: tuple[LogprobRows, ...] = ()
        if self._is_last:
            logits = self._model.logits(hidden[inputs.sample_rows])
            if adjustments is not None:
                adjustments.apply_to(logits)
            if masks is not None:
                masks.apply_to(logits)
            sampled = self._sampler.sample(logits, inputs.sampling, inputs.sample_positions)
            token_ids = tuple(sampled)
            if logprob_plan is not None:
                logprobs = logprob_plan.compute(self._model.logits, hidden, logits, token_ids)
            done_s = time.monotonic()
        else:
            self._link.send(plan.step_id, hidden)
        sent_s = time.monotonic()
        timing = StageTiming(
            self._free_s, plan_s, inputs_s, activations_s, layers_s, done_s, sent_s
        )
        self._free_s = sent_s
        return StageReport(
            stage=self._stage,
            step_id=plan.step_id,
            epoch=plan.epoch,
            timing=timing,
            token_ids=token_ids,
            logprobs=logprobs,
        )

    def close(self) -> None:
        self._link.close()
