"""Is what the GPU computes right? The fast paths against plain torch in higher precision.

Called by `part_checks.py`. Each check gives the largest error and its bound; a NaN passes nothing.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmark.gpu.checked_weights import UpcastWeights, checked_weights
from benchmark.gpu.lone_stage import LoneStage, StagePlace, kernels_for
from benchmark.gpu.shapes import Extent, Step, decode_step, mixed_step, prefill_step
from sgl_pipeline.pp_runner.attention.attention_backend import AttentionShape
from sgl_pipeline.pp_runner.attention.torch_attention import TorchAttention
from sgl_pipeline.pp_runner.base.kv_format import encode
from sgl_pipeline.pp_runner.base.step_inputs import PagedLayout
from sgl_pipeline.pp_runner.kernel_choice import choose_attention_backend, make_attention_backend
from sgl_pipeline.pp_runner.model.model_spec import DecoderSpec
from sgl_pipeline.pp_runner.model.native_stage import NativeStageModel
from sgl_pipeline.pp_runner.output.sampler import Sampler
from sgl_pipeline.requests import SamplingSpec
from sgl_pipeline.stage_plan import StagePlan

# A row of attention: bf16 has 8 bits, and both weights and result are rounded to it.
ATTENTION_BOUND = 2e-2
# A stage in bf16 against one in fp32: at most this much worse than plain torch in bf16 does.
STAGE_FACTOR = 1.5
TOKEN_SHARE_BOUND = 0.99
_CHECKED_LAYERS = 4
_CHECKED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison; `error` must not exceed `bound`, an infinite one if nothing is judged."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound

    def cells(self) -> list[str]:
        verdict = "ok" if self.passed else "BAD"
        if self.bound == math.inf:
            verdict = "noted"
        return [self.name, f"{self.error:.2e}", f"{self.bound:.2e}", verdict]


def random_layout(chunks: Sequence[Extent], page_size: int, seed: int) -> PagedLayout:
    """The layout of `chunks` (those of one row first) on shuffled pages."""
    lengths = torch.tensor([chunk.length for chunk in chunks])
    ends = torch.tensor([chunk.start + chunk.length for chunk in chunks])
    page_counts = (ends + page_size - 1) // page_size
    zero = torch.zeros(1, dtype=torch.int64)
    order = torch.randperm(int(page_counts.sum()), generator=torch.Generator().manual_seed(seed))
    return PagedLayout(
        page_size=page_size,
        num_decodes=sum(chunk.length == 1 for chunk in chunks),
        query_indptr=torch.cat((zero, lengths.cumsum(0))).int(),
        page_indptr=torch.cat((zero, page_counts.cumsum(0))).int(),
        page_indices=order.int(),
        last_page_lengths=(ends - (page_counts - 1) * page_size).int(),
        kv_lengths=ends.int(),
    )


def check_attention(
    shape: AttentionShape,
    name: str,
    backend: str,
    *,
    prefill_kernels: str = "auto",
    rounds: int = 6,
    has_nan_in_unused_slots: bool = False,
) -> Check:
    """`backend` against `TorchAttention`, which computes in fp32, on random paged layouts.

    The error is that of the worst row: |difference| / |reference|. Each call follows a product of
    NaNs, which no kernel may find in shared memory and let into its result (FlashInfer's issue
    1046). With `has_nan_in_unused_slots` the slots after a request's last token hold NaN, where
    `KvPool` promises zeros: what comes of that is noted, not judged.
    """
    choice = choose_attention_backend(backend, shape)
    attention = make_attention_backend(choice, shape, prefill_kernels)
    reference = TorchAttention(shape)
    rng = random.Random(0)
    worst = 0.0
    for seed in range(rounds):
        layout = random_layout(_random_chunks(rng), shape.page_size, seed)
        query, keys, values = _random_inputs(shape, layout)
        if has_nan_in_unused_slots:
            for pages in (keys, values):
                pages[unused_slots(layout).to(shape.device)] = torch.nan
        outputs = []
        for one in (attention, reference):
            one.plan(layout)
            _leave_nans(shape.device)
            outputs.append(one.attend(query, keys, values))
        worst = max(worst, row_error(*outputs))
    if has_nan_in_unused_slots:
        return Check(f"attention, {name}, NaN in unused slots", worst, math.inf)
    return Check(f"attention, {name}", worst, ATTENTION_BOUND)


def unused_slots(layout: PagedLayout) -> torch.Tensor:
    """[P, S] bool: the slots of last pages that come after a request's last token."""
    is_unused = torch.zeros(layout.page_indices.numel(), layout.page_size, dtype=torch.bool)
    last_pages = layout.page_indices[layout.page_indptr[1:].long() - 1].long()
    slots = torch.arange(layout.page_size)
    is_unused[last_pages] = slots >= layout.last_page_lengths[:, None]
    return is_unused


def row_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|difference| / |expected| of the worst row, whose numbers are all dimensions but the first;
    infinite where one is not a number."""
    found, expected = (one.float().flatten(1) for one in (found, expected))
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    return float(errors.nan_to_num(nan=math.inf).max())


def _random_chunks(rng: random.Random) -> list[Extent]:
    """Decodes, prefills of fresh prompts and of later chunks, or some of these."""
    decodes = [Extent(rng.randrange(0, 3000), 1) for _ in range(rng.choice((0, 1, 7, 40)))]
    prefills = [
        Extent(rng.choice((0, rng.randrange(1, 1000))), rng.randrange(2, 400))
        for _ in range(rng.choice((0, 1, 3)) if decodes else 2)
    ]
    return [*decodes, *prefills]


def _random_inputs(shape: AttentionShape, layout: PagedLayout) -> list[torch.Tensor]:
    """Queries [T, Hq, D], key pages and value pages [P, S, Hkv, W] of normal random numbers."""
    num_rows = int(layout.query_indptr[-1])
    pages = (layout.page_indices.numel(), shape.page_size, shape.num_kv_heads, shape.head_dim)
    sizes = ((num_rows, shape.num_query_heads, shape.head_dim), pages, pages)
    query, keys, values = (torch.randn(size, device=shape.device).to(shape.dtype) for size in sizes)
    return [query, encode(keys, shape.page_dtype), encode(values, shape.page_dtype)]


def _leave_nans(device: torch.device) -> None:
    """On a GPU: a CPU has no shared memory."""
    if device.type != "cuda":
        return
    nans = torch.full((1024, 1024), torch.nan, dtype=torch.bfloat16, device=device)
    torch.mm(nans, nans)


def check_stage(spec: DecoderSpec, name: str, device: torch.device, backend: str) -> list[Check]:
    """A whole model of few layers, from token ids to logits: prefill, decodes and a mix.

    The judge is the same model in fp32 with attention in torch; the yardstick plain torch in bf16,
    which the fast path may exceed by `STAGE_FACTOR`. The error is that of the worst row's logits.
    """
    exact = _few_layers(spec, device, dtype=torch.float32, kernels="torch", backend="torch")
    plain = _few_layers(spec, device, kernels="torch", backend="torch")
    # From graphs, where the device has them, and kernel by kernel.
    fast = {
        graphs: _few_layers(spec, device, backend=backend, graphs=graphs)
        for graphs in ("auto", "off")
    }
    checks = []
    for step in (prefill_step(300), decode_step(6, 200), mixed_step(5, 100, 77)):
        expected = _logits(exact, step)
        bound = STAGE_FACTOR * row_error(_logits(plain, step), expected)
        for graphs, stage in fast.items():
            error = row_error(_logits(stage, step), expected)
            checks.append(Check(f"stage, {name}, graphs {graphs}, {step.name}", error, bound))
    return checks


def _few_layers(
    spec: DecoderSpec,
    device: torch.device,
    *,
    backend: str,
    dtype: torch.dtype = torch.bfloat16,
    kernels: str = "auto",
    graphs: str = "auto",
) -> LoneStage:
    """A stage with the first layers of a model and both its ends; see `LoneStage`. Its weights have
    the same values in every dtype."""
    spec = replace(spec, attentions=spec.attentions[:_CHECKED_LAYERS])
    weights = checked_weights(spec, device)
    model = NativeStageModel.build(
        spec,
        UpcastWeights(weights) if dtype == torch.float32 else weights,
        device=device,
        kernels=kernels_for(device, dtype, kernels, spec),
        layers=range(_CHECKED_LAYERS),
        is_first=True,
        is_last=True,
    )
    return LoneStage(
        StagePlace(spec, StagePlan(0, (_CHECKED_LAYERS,)), 0),
        device,
        num_pages=1024,
        max_rows=1024,
        dtype=dtype,
        backend=backend,
        graphs=graphs,
        model=model,
    )


def check_sampler(device: torch.device, vocab_size: int = 151_936, rows: int = 64) -> Check:
    """Tokens drawn on the device against those drawn on the CPU; the error is the share that
    differs, which rounding at a boundary between two tokens may make a little more than 0."""
    logits = 4 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0))
    specs = [
        SamplingSpec(
            temperature=(0.0, 0.7, 1.0, 1.3)[row % 4],
            top_k=(0, 40, 500)[row % 3],
            top_p=(1.0, 0.9)[row % 2],
            min_p=(0.0, 0.02)[row % 5 == 0],
            seed=row,
        )
        for row in range(rows)
    ]
    positions = torch.arange(rows)
    on_cpu, on_device = (
        Sampler().sample(logits.to(where), specs, positions) for where in ("cpu", device)
    )
    different = sum(one != other for one, other in zip(on_cpu, on_device, strict=True)) / rows
    return Check("sampler against the CPU's, share of tokens", different, 1 - TOKEN_SHARE_BOUND)


def _logits(stage: LoneStage, step: Step) -> torch.Tensor:
    """Logits [C, L] of each chunk's last row, for L tokens of the vocabulary, less their mean; all
    that comes before the step is prefilled first.

    They travel as log-probabilities do, which differ from logits by one number a row.
    """
    vocab_size = stage.place.spec.vocab_size
    token_ids = tuple(range(0, vocab_size, -(-vocab_size // _CHECKED_TOKENS)))
    history = tuple(Extent(0, chunk.start + chunk.length) for chunk in step.chunks)
    stage.prepare(Step("history", "prefill", history), 1)
    stage.run()
    stage.prepare(step, 1, logprob_ids=token_ids)
    rows = [
        torch.frombuffer(bytearray(rows.of_token_ids), dtype=torch.float32)
        for rows in stage.run().logprobs
    ]
    logprobs = torch.stack(rows)
    return logprobs - logprobs.mean(dim=1, keepdim=True)
