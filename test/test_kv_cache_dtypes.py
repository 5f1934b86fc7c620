"""Keys and values in 8 bits: the same tokens however the work is cut, near to those of 16 bits."""

import random
from functools import cache
from itertools import cycle, product, repeat
from typing import Any

import pytest
import torch
from support.local_pipeline import LocalPipeline
from support.stage_chain import StageChain, new_request
from support.tiny_models import VOCAB_SIZE, tiny_model
from test_token_identity import CHUNKED, make_requests

from sgl_pipeline.args import KV_CACHE_DTYPES, SchedulingArgs, ThrottleArgs
from sgl_pipeline.records.move_record import MoveOutcome

pytestmark = pytest.mark.slow

SPLITS = [(6,), (2, 4), (1, 2, 2, 1)]  # pp 1, 2 and 4
LEAVES: dict[str, dict[str, Any]] = {
    "torch": {},
    "compiled": {"dtype": "bfloat16", "attention_backend": "cpu", "layer_kernels": "cpu"},
}
HEAD_DIM = 32  # of the tiny model
MEMORY_SHARE = {"fp8_e4m3": 0.5, "int8": (HEAD_DIM + 4) / (2 * HEAD_DIM)}  # of bfloat16's
# Relative, of this model's logits; bf16 in place of fp32 costs 0.024.
ERRORS = {"fp8_e4m3": (0.01, 0.08), "int8": (0.002, 0.02)}

CODED = tuple(name for name in KV_CACHE_DTYPES if name != "auto")
assert len(CODED) == 2, "pairs of formats and leaves below"
coded = pytest.mark.parametrize("kv_cache_dtype", CODED)
every_leaf = pytest.mark.parametrize(
    "leaf", ["torch", pytest.param("compiled", marks=pytest.mark.compiler)]
)


def pipeline(kv_cache_dtype: str, layer_counts: tuple[int, ...], **arguments: Any) -> LocalPipeline:
    arguments.setdefault("throttle", ThrottleArgs(**CHUNKED))
    return LocalPipeline(
        tiny_model("qwen3"), layer_counts, kv_cache_dtype=kv_cache_dtype, **arguments
    )


@cache
def alone(kv_cache_dtype: str, leaf: str) -> list[list[int]]:
    """The answers to six requests, each by itself: whole prompts, one stage, no hits."""
    by_itself = pipeline(
        kv_cache_dtype,
        (6,),
        throttle=ThrottleArgs(policy="throttle"),
        scheduling=SchedulingArgs(radix_cache=False),
        **LEAVES[leaf],
    )
    return [by_itself.run([request])[0] for request in make_requests(6)]


# Where layers are cut is nothing to plain torch: each depth with one format.
@pytest.mark.parametrize(
    ("layer_counts", "kv_cache_dtype", "leaf"),
    [
        *zip(SPLITS, cycle(CODED), repeat("torch")),
        *(
            pytest.param(counts, coded, "compiled", marks=pytest.mark.compiler)
            for counts, coded in product(SPLITS, CODED)
        ),
    ],
    ids=str,
)
def test_tokens_are_the_same_at_every_depth_with_chunks_and_hits(
    layer_counts: tuple[int, ...], kv_cache_dtype: str, leaf: str
) -> None:
    served = pipeline(kv_cache_dtype, layer_counts, **LEAVES[leaf])
    assert served.run(make_requests(6)) == alone(kv_cache_dtype, leaf)
    assert any(chunk.start for m in served.microbatches for chunk in m.chunks)
    again = make_requests(6)
    assert served.run(again) == alone(kv_cache_dtype, leaf)
    assert sum(request.cached_tokens for request in again) > 100


# Each format and each leaf meets both.
@pytest.mark.parametrize(
    ("page_size", "chunk_tokens", "kv_cache_dtype", "leaf"),
    [
        (1, 64, CODED[0], "torch"),
        (16, 5, CODED[1], "torch"),
        pytest.param(16, 5, CODED[0], "compiled", marks=pytest.mark.compiler),
        pytest.param(1, 64, CODED[1], "compiled", marks=pytest.mark.compiler),
    ],
)
def test_tokens_are_the_same_in_chunks_and_pages_of_any_size(
    page_size: int, chunk_tokens: int, kv_cache_dtype: str, leaf: str
) -> None:
    served = pipeline(
        kv_cache_dtype,
        (2, 4),
        num_pages=1024 // page_size,
        scheduling=SchedulingArgs(page_size=page_size),
        throttle=ThrottleArgs(max_prefill_tokens=chunk_tokens, min_prefill_tokens=1),
        **LEAVES[leaf],
    )
    assert served.run(make_requests(6)) == alone(kv_cache_dtype, leaf)


@every_leaf
@coded
def test_tokens_are_the_same_though_layers_move(kv_cache_dtype: str, leaf: str) -> None:
    moving = pipeline(kv_cache_dtype, (3, 3), **LEAVES[leaf])
    requests, migration = make_requests(6), moving.core.migration
    for request in requests:
        moving.scheduler.add(request)
    while not moving.scheduler.is_idle:
        while moving.schedule():
            if migration.coordinator.current is None:
                migration.move_to([(4, 2), (1, 5)][len(migration.history) % 2], 0.0)
        moving.complete()
    assert [request.output_ids for request in requests] == alone(kv_cache_dtype, leaf)
    assert any(move.outcome is MoveOutcome.DONE for move in migration.history)


# Each format and each leaf meets both.
@pytest.mark.parametrize(
    ("log_pages", "kv_cache_dtype", "leaf"),
    [
        (None, CODED[0], "torch"),
        (200, CODED[1], "torch"),
        pytest.param(200, CODED[0], "compiled", marks=pytest.mark.compiler),
        pytest.param(None, CODED[1], "compiled", marks=pytest.mark.compiler),
    ],
)
def test_a_lost_stage_changes_no_token(
    log_pages: int | None, kv_cache_dtype: str, leaf: str
) -> None:
    served = pipeline(kv_cache_dtype, (2, 1, 3), log_pages=log_pages, **LEAVES[leaf])

    def after_step(number: int) -> None:
        if number in (5, 12):
            served.lose(1)

    assert served.run(make_requests(6), after_step) == alone(kv_cache_dtype, leaf)
    assert (served.scheduler.num_retractions == 0) == (log_pages is not None)


@coded
def test_a_token_takes_about_half_the_memory(kv_cache_dtype: str) -> None:
    pools = [
        pipeline(name, (6,), dtype="bfloat16").runners[0].held_layers.kv_pool.num_bytes
        for name in ("auto", kv_cache_dtype)
    ]
    assert pools[1] == pools[0] * MEMORY_SHARE[kv_cache_dtype]


def logits(kv_cache_dtype: str, **arguments: Any) -> torch.Tensor:
    """After a prompt of 200 tokens, and after each of 20 that follow whatever was drawn."""
    numbers = random.Random(3)
    prompt = [numbers.randrange(VOCAB_SIZE) for _ in range(200)]
    chain = StageChain(tiny_model("qwen3"), (2, 4), kv_cache_dtype=kv_cache_dtype, **arguments)
    request = new_request(prompt)
    for _ in range(20):
        chain.step((request, request.num_tokens - request.num_scheduled))
        request.output_ids[-1] = numbers.randrange(VOCAB_SIZE)
    return torch.stack(chain.logits[request])


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@coded
def test_logits_are_near_those_of_keys_and_values_that_are_not_rounded(kv_cache_dtype: str) -> None:
    error = relative_error(logits(kv_cache_dtype), logits("auto"))
    least, most = ERRORS[kv_cache_dtype]
    assert least < error < most


@pytest.mark.compiler
@coded
def test_compiled_kernels_in_bf16_are_near_to_plain_torch_in_fp32(kv_cache_dtype: str) -> None:
    """Nearer than what bf16 and codes cost: rounding in bf16 can turn one code into the next."""
    plain, codes = logits("auto"), logits(kv_cache_dtype)
    bf16 = {"dtype": torch.bfloat16, "attention": "cpu", "kernels": "cpu"}
    most = relative_error(logits("auto", **bf16), plain) + relative_error(codes, plain)
    assert relative_error(logits(kv_cache_dtype, **bf16), codes) < most < 0.1
