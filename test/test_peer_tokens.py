"""Tokens do not depend on the server that computed a prompt: a pipeline that loads the pages of
another one, at any two depths and splits, goes on as if it had computed them itself.

The whole runtime of two servers but their processes and front ends, with real sockets and keys.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.clusters import host_directory, open_port
from support.forced_drafts import ForcedDrafts
from support.local_pipeline import FASTEST, LocalPipeline
from support.peer_pipelines import OfferingPipeline, ReadingPipeline
from support.tiny_models import VOCAB_SIZE, tiny_model

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.requests import GREEDY, Request, SamplingSpec, StopRules

pytestmark = pytest.mark.slow

CHUNKED = ThrottleArgs(max_prefill_tokens=24, min_prefill_tokens=4, prefill_spread_steps=3)
PAGES = SchedulingArgs(page_size=4)
# The second and the fifth begin with the same tokens.
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 61, 12
SEEDED = SamplingSpec(temperature=0.9, seed=5)
DEPTHS = [((6,), (6,)), ((2, 4), (6,)), ((6,), (1, 5)), ((4, 2), (1, 3, 2))]


def requests(num_tokens: int) -> list[Request]:
    made = []
    for number in range(NUM_REQUESTS):
        prompt = [(7 * number * at + at * at) % VOCAB_SIZE for at in range(PROMPT_TOKENS)]
        sampling = SEEDED if number % 2 else GREEDY
        stops = StopRules(max_new_tokens=num_tokens)
        made.append(Request(f"{number}", prompt, sampling, stops))
    return made


@cache
def alone(kv_cache_dtype: str = "auto", model: str = "qwen3") -> list[list[int]]:
    pipeline = LocalPipeline(tiny_model(model), (6,), kv_cache_dtype=kv_cache_dtype, **FASTEST)
    return pipeline.run(requests(OUTPUT_TOKENS))


class Pair:
    """A prefill server, whose run directory and port these are, and a decode server."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._runs = [host_directory(directory / name) for name in ("P", "D")]
        self._port = open_port(self._runs[0])
        self._address, _ = self._port.__enter__()
        self._started: list[OfferingPipeline | ReadingPipeline] = []

    def start(
        self,
        counts: tuple[tuple[int, ...], tuple[int, ...]],
        model: str = "qwen3",
        **arguments: Any,
    ) -> tuple[OfferingPipeline, ReadingPipeline]:
        path = tiny_model(model)
        prefill = OfferingPipeline(
            path, counts[0], self._directory / "saved", self._address,
            run_directory=self._runs[0], scheduling=PAGES, **FASTEST | arguments,
        )  # fmt: skip
        self._started.append(prefill)
        decode = ReadingPipeline(
            path, counts[1], self._directory / "unused", prefill,
            run_directory=self._runs[1], scheduling=PAGES, throttle=CHUNKED, **FASTEST | arguments,
        )  # fmt: skip
        self._started.append(decode)
        return prefill, decode

    def close(self) -> None:
        for server in reversed(self._started):
            server.close()
        self._port.__exit__(None, None, None)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def prefill_and_offer(prefill: OfferingPipeline) -> None:
    """Each request computes one token, then its whole pages are offered."""
    prompts = requests(1)
    prefill.serve(prompts)
    for number, request in enumerate(prompts):
        prefill.offer(number, request.prompt_ids)


def assert_loaded(decode: ReadingPipeline, num_requests: int = NUM_REQUESTS) -> None:
    """All whole pages came from the peer; the rest of each prompt is one token."""
    counts = decode.tier.counts
    assert counts.loaded_tokens >= num_requests * (PROMPT_TOKENS - 1) - PAGES.page_size, counts
    assert counts.num_broken_pages == 0


# Where layers are cut is nothing to a page's format: all depths with one, one with each.
@pytest.mark.parametrize(
    ("counts", "kv_cache_dtype"),
    [
        *((counts, "auto") for counts in DEPTHS),
        *((DEPTHS[-1], coded) for coded in ("int8", "fp8_e4m3")),
    ],
    ids=str,
)
def test_a_decode_server_goes_on_from_the_pages_of_a_prefill_server(
    pair: Pair, counts: tuple[tuple[int, ...], tuple[int, ...]], kv_cache_dtype: str
) -> None:
    prefill, decode = pair.start(counts, kv_cache_dtype=kv_cache_dtype)
    prefill_and_offer(prefill)
    assert decode.serve(requests(OUTPUT_TOKENS)) == alone(kv_cache_dtype)
    assert_loaded(decode)


@pytest.mark.parametrize("wrong_share", [0.0, 0.5, 1.0])
def test_a_decode_server_may_have_drafts(pair: Pair, wrong_share: float) -> None:
    prefill, decode = pair.start(((2, 4), (1, 3, 2)))
    prefill_and_offer(prefill)
    outputs = {str(number): tokens for number, tokens in enumerate(alone())}
    drafts = ForcedDrafts(decode.scheduler, outputs, wrong_share)
    assert decode.serve(requests(OUTPUT_TOKENS)) == alone()
    assert drafts.num_drafted > 20
    assert (drafts.num_accepted > 0) == (wrong_share < 1.0)
    assert (drafts.num_accepted == drafts.num_drafted) == (wrong_share == 0.0)
    assert_loaded(decode)


def test_experts_that_were_routed_on_one_server_are_the_same_on_another(pair: Pair) -> None:
    prefill, decode = pair.start(((2, 4), (3, 3)), "qwen3-moe")
    prefill_and_offer(prefill)
    assert decode.serve(requests(OUTPUT_TOKENS)) == alone(model="qwen3-moe")
    assert_loaded(decode)


def test_layers_move_on_the_prefill_server_between_loads(pair: Pair) -> None:
    prefill, decode = pair.start(((4, 2), (1, 3, 2)))
    prefill_and_offer(prefill)
    outputs = decode.serve(requests(OUTPUT_TOKENS)[:3])
    prefill.finish_move((1, 5))
    for number in prefill.offers:
        prefill.make_offer(number)
    decode.tier.use(decode.tier._place, decode.tier.rules)  # the peer's stages are others
    outputs += decode.serve(requests(OUTPUT_TOKENS)[3:])
    assert outputs == alone()
    assert_loaded(decode)


def test_layers_move_on_the_decode_server_while_pages_come(pair: Pair) -> None:
    prefill, decode = pair.start(((4, 2), (3, 3)))
    prefill_and_offer(prefill)
    plans = iter([(4, 2), (1, 5), (3, 3)])

    def move(step: int) -> None:
        is_free = step % 4 == 1 and not decode.core.migration.is_moving
        if is_free and (plan := next(plans, None)) is not None:
            decode.core.migration.move_to(plan, 0.0)

    outputs = []
    for request in requests(OUTPUT_TOKENS):
        outputs += decode.serve([request], move)
    assert outputs == alone()
    assert decode.core.plan.epoch == 3 and decode.tier.counts.loaded_tokens


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_of_the_decode_server_is_lost_among_loaded_pages(pair: Pair, stage: int) -> None:
    prefill, decode = pair.start(((4, 2), (3, 3)))
    prefill_and_offer(prefill)
    outputs = decode.serve(
        requests(OUTPUT_TOKENS), lambda step: decode.lose(stage) if step in (3, 9) else None
    )
    assert outputs == alone()
    assert decode.tier.counts.loaded_tokens


def test_what_a_peer_does_not_offer_any_more_is_computed(pair: Pair) -> None:
    prefill, decode = pair.start(((4, 2), (1, 3, 2)))
    prefill_and_offer(prefill)
    for number in range(0, NUM_REQUESTS, 2):
        prefill.withdraw(number)
    assert decode.serve(requests(OUTPUT_TOKENS)) == alone()
    assert 0 < decode.tier.counts.loaded_tokens <= NUM_REQUESTS // 2 * PROMPT_TOKENS
