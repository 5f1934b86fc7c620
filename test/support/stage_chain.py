"""A pipeline in one process: stage models chained by hand, fed through the real plan encoder.

Tests give it requests and say which chunks run in which step; it keeps pages, mirrors and tokens
as the server does, without processes, scheduling or links.
"""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch
from support.microbatches import microbatch_of

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.pp_runner.attention.kv_pool import KvPool
from sgl_pipeline.pp_runner.base.step_inputs import build_step_inputs
from sgl_pipeline.pp_runner.kernel_choice import (
    choose_attention_backend,
    choose_layer_kernels,
    make_layer_kernels,
    make_stage_attention,
)
from sgl_pipeline.pp_runner.model.held_layers import HeldLayers
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec, read_model_spec
from sgl_pipeline.pp_runner.model.stage_model import StageModel
from sgl_pipeline.pp_runner.stage_model_choice import load_stage_model
from sgl_pipeline.requests import GREEDY, Request, SamplingSpec, StopRules
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.step_order import RequestMirror, StepOrderEncoder

CPU = torch.device("cpu")


def new_request(prompt_ids: Sequence[int], sampling: SamplingSpec = GREEDY) -> Request:
    """A request with no stop rules but its length, which the tests do not use."""
    return Request("test", list(prompt_ids), sampling, StopRules(max_new_tokens=1_000))


class StageChain:
    """All stages of a model on a CPU, each with its own KV pool.

    `spec` is that of our own layers by default, `stages` are loaded where none are given. `logits`
    holds, for each request, the logits row [V] of every token that was sampled from it.
    """

    def __init__(
        self,
        path: Path,
        layer_counts: tuple[int, ...],
        *,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        num_pages: int = 256,
        load_format: str = "safetensors",
        attention: str = "torch",
        kernels: str = "torch",
        kv_cache_dtype: str = "auto",
        quantization: str | None = None,
        context_length: int | None = None,
        spec: ModelSpec | None = None,
        stages: Sequence[StageModel] = (),
    ) -> None:
        if spec is None:
            spec = read_model_spec(path, quantization, context_length=context_length)
        self.spec = spec
        self.logits: dict[Request, list[torch.Tensor]] = {}
        self._page_size = page_size
        self._plan = plan = StagePlan(0, layer_counts)
        shapes = self.spec.attention_shapes(page_size, dtype, CPU, kv_cache_dtype)
        choice = choose_attention_backend(attention, shapes[0])
        layer_kernels = choose_layer_kernels(kernels, dtype, CPU, self.spec.quantization)
        self._attention = make_stage_attention(choice, shapes)
        self.stages = stages or [
            load_stage_model(
                self.spec,
                path,
                layers=plan.layers_of(stage),
                is_first=stage == 0,
                is_last=stage == plan.num_stages - 1,
                dtype=dtype,
                device=CPU,
                kernels=make_layer_kernels(layer_kernels, shapes[0]),
                load_format=load_format,
            )
            for stage in range(plan.num_stages)
        ]
        self._held = [
            HeldLayers(stage, KvPool(stage.layers, shapes, num_pages)) for stage in self.stages
        ]
        # Pages are handed out from the back, so that page ids do not follow token order.
        self._free_pages = list(range(num_pages))
        self._encoder = StepOrderEncoder()
        self._mirror = RequestMirror()
        self._step_ids = count()

    def step(self, *lengths: tuple[Request, int]) -> None:
        """Runs the next `length` tokens of each request in one microbatch and appends the greedy
        token to those that reached their last known one. Decodes must come first."""
        chunks = [self._chunk(request, length) for request, length in lengths]
        hidden, sample_rows = self._run(chunks)
        sampled = [chunk.request for chunk in chunks if chunk.samples]
        rows = self.stages[-1].logits(hidden[sample_rows])
        for request, logits in zip(sampled, rows, strict=True):
            self.logits.setdefault(request, []).append(logits.clone())
            request.output_ids.append(int(logits.argmax()))

    def generate(self, request: Request, num_tokens: int, chunk_length: int = 10_000) -> list[int]:
        """Prefills in chunks of `chunk_length`, then decodes alone; returns the output ids."""
        while len(request.output_ids) < num_tokens:
            left = request.num_tokens - request.num_scheduled
            self.step((request, min(left, chunk_length)))
        return request.output_ids

    def log_likelihoods(self, token_ids: Sequence[int]) -> torch.Tensor:
        """That of each token [T - 1] after those before it, in one step; keeps no pages."""
        request = new_request(token_ids)
        hidden, _ = self._run([self._chunk(request, len(token_ids))])
        self._free_pages += reversed(request.pages)
        scores = self.stages[-1].logits(hidden[:-1]).log_softmax(dim=1)
        return scores.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]

    def _run(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream behind the last layer, and its rows that are sampled from."""
        plan = self._encoder.encode(microbatch_of(next(self._step_ids), tuple(chunks)))
        inputs = build_step_inputs(self._mirror.apply(plan), self._page_size, CPU)
        self._attention.plan(inputs.layout)
        hidden = None
        for stage, held in enumerate(self._held):
            hidden = held.forward(self._plan.layers_of(stage), inputs, hidden, self._attention)
        assert hidden is not None
        return hidden, inputs.sample_rows

    def _chunk(self, request: Request, length: int) -> Chunk:
        start = request.num_scheduled
        end = start + length
        while len(request.pages) * self._page_size < end:
            request.pages.append(self._free_pages.pop())
        request.num_scheduled = end
        return Chunk(request, start, length, length == 1, samples=end == request.num_tokens)
