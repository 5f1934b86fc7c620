"""Greedy tokens do not depend on how a request was served: transformers gives the same.

The whole runtime but its processes: the real scheduler, plan encoder, stages and attention, over
stages, layer splits, policies, page sizes, prefix cache and memory pressure.
"""

import random
from functools import cache

import pytest
from support.greedy_oracle import count_ties
from support.local_pipeline import FASTEST, LocalPipeline
from support.tiny_models import (
    NUM_LAYERS,
    VOCAB_SIZE,
    same_model_for_transformers,
    tiny_model,
)

from sgl_pipeline.args import ACCOUNTINGS, POLICIES, SchedulingArgs, ThrottleArgs
from sgl_pipeline.costs.step_costs import LayerCost, RowCost, StepCosts
from sgl_pipeline.records.move_record import MoveOutcome
from sgl_pipeline.requests import GREEDY, FinishReason, Request, SamplingSpec, StopRules

pytestmark = pytest.mark.slow

SPLITS = {1: [(6,)], 2: [(3, 3), (1, 5)], 4: [(2, 1, 1, 2), (3, 1, 1, 1)]}
# Every compiled kernel on, and off.
KERNELS = {"torch": ("torch", "torch"), "compiled": ("cpu", "cpu")}
# For what is nothing to a kernel, and is held to transformers in fp32.
FASTEST_IN_FP32 = FASTEST | {"dtype": "float32"}
# Small budgets, so that prompts of a few dozen tokens are cut into chunks.
CHUNKED = {"max_prefill_tokens": 24, "min_prefill_tokens": 4, "prefill_spread_steps": 3}
# Known from the first step on. A row and what it attends to cost much beside a layer's base, so
# that `throttle-time` cuts prompts of a few dozen tokens too.
COSTS = StepCosts(
    layer=LayerCost(RowCost((1.0,), (1.0,), 0.2), 0.1, 0.02, 0.01),
    embedding=RowCost((1.0,), (0.0,), 0.0),
    tail=RowCost((1.0,), (2.0,), 0.1),
    layer_weights=(1.0,) * NUM_LAYERS,
)


def make_requests(count: int, *, max_new_tokens: int = 12) -> list[Request]:
    """Prompts of 1 to 60 tokens; every other one begins like the first."""
    numbers = random.Random(count)
    shared = [numbers.randrange(VOCAB_SIZE) for _ in range(40)]
    requests = []
    for index in range(count):
        own = [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.randrange(1, 20))]
        prompt = shared + own if index % 2 else own
        stops = StopRules(max_new_tokens=max_new_tokens)
        requests.append(Request(f"request-{index}", prompt, GREEDY, stops))
    return requests


def assert_greedy(name: str, requests: list[Request]) -> None:
    path = same_model_for_transformers(name)
    ties = sum(
        count_ties(path, request.prompt_ids, request.output_ids, request.sampling)
        for request in requests
    )
    num_tokens = sum(len(request.output_ids) for request in requests)
    print(f"{name}: {num_tokens} greedy tokens, {ties} ties below 1e-4 that went the other way")


# Every policy with most steps in flight, and at another depth: with one step, or with two.
@pytest.mark.parametrize(
    ("policy", "num_stages"),
    [
        *((policy, 4) for policy in POLICIES),
        *((policy, 1 + number % 2) for number, policy in enumerate(POLICIES)),
    ],
)
def test_under_every_policy_and_number_of_stages(policy, num_stages):
    """One split each: which layers a stage has is nothing to a policy."""
    layer_counts = SPLITS[num_stages][0]
    assert sum(layer_counts) == NUM_LAYERS
    throttle = ThrottleArgs(policy=policy, **CHUNKED)
    pipeline = LocalPipeline(
        tiny_model("qwen3"), layer_counts, throttle=throttle, costs=COSTS, **FASTEST_IN_FP32
    )
    requests = make_requests(9)
    pipeline.run(requests)
    assert_greedy("qwen3", requests)
    by_time = {microbatch.budget.time is not None for microbatch in pipeline.microbatches}
    assert by_time == {policy == "throttle-time"}, "another policy was in force for some steps"
    assert max(len(microbatch.chunks) for microbatch in pipeline.microbatches) > 1
    chunked = [m for m in pipeline.microbatches if any(c.start for c in m.chunks)]
    assert chunked, "no prompt was cut into chunks"


@pytest.mark.parametrize(("num_stages", "target_tpot_ms"), [(1, 30.0), (2, 36.0), (4, 44.0)])
def test_though_one_target_binds_steps_and_the_other_is_missed(num_stages, target_tpot_ms):
    """A pool for about two requests: the others are retracted and computed again."""
    throttle = ThrottleArgs(
        policy="throttle-time",
        pause_free_share=0.0,
        target_tpot_ms=target_tpot_ms,
        target_ttft_ms=400.0,
        **CHUNKED,
    )
    pipeline = LocalPipeline(
        tiny_model("qwen3"),
        SPLITS[num_stages][0],
        num_pages=26,
        scheduling=SchedulingArgs(page_size=4),
        throttle=throttle,
        costs=COSTS,
        **FASTEST_IN_FP32,
    )
    requests = make_requests(8, max_new_tokens=24)
    pipeline.run(requests)
    assert_greedy("qwen3", requests)
    assert sum(request.num_retractions for request in requests) > 0
    budgets = [microbatch.budget for microbatch in pipeline.microbatches]
    assert all(budget.time is not None for budget in budgets)
    assert ("TPOT", "TTFT") in {(budget.bound_by, budget.missed) for budget in budgets}


FAMILIES = [
    *("qwen2-tied", "mixtral-sharded", "qwen2-moe", "qwen3-moe", "glm", "glm4", "chatglm"),
    "gpt-oss",
]


# Where layers are cut is nothing to a kernel, but a stage may be the first and the last; and it is
# nothing to a family, but a tied head is read on two stages, and once where they are one.
@pytest.mark.parametrize(
    ("name", "num_stages", "kernels"),
    [
        *((name, 4 if number % 2 else 2, "torch") for number, name in enumerate(FAMILIES)),
        *(
            pytest.param(name, 1 if number % 2 else 4, "compiled", marks=pytest.mark.compiler)
            for number, name in enumerate(FAMILIES)
        ),
        ("qwen2-tied", 1, "torch"),
        pytest.param("qwen2-tied", 1, "compiled", marks=pytest.mark.compiler),
    ],
)
def test_of_every_model_family(name, num_stages, kernels):
    """Prompts cut into chunks and steps of several requests, on uneven stages too."""
    attention_backend, layer_kernels = KERNELS[kernels]
    pipeline = LocalPipeline(
        tiny_model(name),
        SPLITS[num_stages][-1],
        throttle=ThrottleArgs(**CHUNKED),
        attention_backend=attention_backend,
        layer_kernels=layer_kernels,
    )
    requests = make_requests(9)
    pipeline.run(requests)
    assert_greedy(name, requests)
    assert any(chunk.start for m in pipeline.microbatches for chunk in m.chunks)


@pytest.mark.parametrize("accounting", ACCOUNTINGS)
@pytest.mark.parametrize("duplicate_prefills", [False, True])
def test_however_waiting_tokens_and_pages_are_counted(accounting, duplicate_prefills):
    pipeline = LocalPipeline(
        tiny_model("qwen3"),
        (2, 1, 1, 2),
        num_pages=80,
        scheduling=SchedulingArgs(
            page_size=4, accounting=accounting, duplicate_prefills=duplicate_prefills
        ),
        throttle=ThrottleArgs(**CHUNKED),
        **FASTEST_IN_FP32,
    )
    requests = make_requests(8)
    pipeline.run(requests)
    assert_greedy("qwen3", requests)


# Any two of page size, cache and kernels meet in all ways.
@pytest.mark.parametrize(
    ("page_size", "radix_cache", "kernels"),
    [
        (1, True, "torch"),
        (16, False, "torch"),
        pytest.param(16, True, "compiled", marks=pytest.mark.compiler),
        pytest.param(1, False, "compiled", marks=pytest.mark.compiler),
    ],
)
def test_with_and_without_radix_hits(page_size, radix_cache, kernels):
    attention_backend, layer_kernels = KERNELS[kernels]
    scheduling = SchedulingArgs(page_size=page_size, radix_cache=radix_cache)
    pipeline = LocalPipeline(
        tiny_model("llama3-rope"),
        (3, 3),
        num_pages=1024 // page_size,
        scheduling=scheduling,
        attention_backend=attention_backend,
        layer_kernels=layer_kernels,
    )
    first, second = make_requests(8), make_requests(8)
    pipeline.run(first)
    pipeline.run(second)
    assert_greedy("llama3-rope", first + second)
    hits = sum(request.cached_tokens for request in second)
    assert (hits > 0) == radix_cache


@pytest.mark.parametrize(
    ("num_stages", "radix_cache"), [(1, False), (2, True), (4, True), (4, False)]
)
def test_under_retraction(num_stages, radix_cache):
    """A pool for about two requests: the others are retracted and computed again."""
    scheduling = SchedulingArgs(page_size=4, radix_cache=radix_cache)
    pipeline = LocalPipeline(
        tiny_model("mistral-sharded"),
        SPLITS[num_stages][0],
        num_pages=26,
        scheduling=scheduling,
        throttle=ThrottleArgs(pause_free_share=0.0, **CHUNKED),
        **FASTEST_IN_FP32,
    )
    requests = make_requests(8, max_new_tokens=24)
    pipeline.run(requests)
    assert sum(request.num_retractions for request in requests) > 0
    assert_greedy("mistral-sharded", requests)


def test_after_an_abort_in_the_middle_of_a_prefill():
    """What the aborted request wrote must not poison the prefix cache."""
    pipeline = LocalPipeline(
        tiny_model("qwen3"), (3, 3), throttle=ThrottleArgs(**CHUNKED), **FASTEST_IN_FP32
    )
    aborted, *rest = make_requests(6)[1:]
    pipeline.scheduler.add(aborted)
    assert pipeline.schedule()
    pipeline.scheduler.abort(aborted.request_id, FinishReason("abort"))
    pipeline.complete()
    pipeline.run(rest)
    assert_greedy("qwen3", rest)


PLANS = {
    "two stages": [(3, 3), (4, 2), (1, 5)],
    "three stages": [(2, 2, 2), (4, 1, 1), (1, 4, 1), (1, 1, 4)],
}


# Both models meet both depths and both kinds of kernels.
@pytest.mark.parametrize(
    ("model", "plans", "kernels"),
    [
        ("qwen3", "three stages", "torch"),
        ("qwen2-moe-every-other-layer", "two stages", "torch"),
        pytest.param("qwen3", "two stages", "compiled", marks=pytest.mark.compiler),
        pytest.param(
            "qwen2-moe-every-other-layer",
            "three stages",
            "compiled",
            marks=pytest.mark.compiler,
        ),
    ],
)
def test_though_layers_move_while_requests_run(model, plans, kernels):
    """One move after the other: prompts in chunks, decodes and cached pages are on their way."""
    attention_backend, layer_kernels = KERNELS[kernels]
    splits = PLANS[plans]
    pipeline = LocalPipeline(
        tiny_model(model),
        splits[0],
        throttle=ThrottleArgs(**CHUNKED),
        attention_backend=attention_backend,
        layer_kernels=layer_kernels,
    )
    migration = pipeline.core.migration
    requests = make_requests(9)
    pipeline.run(requests[:3])  # their pages stay in the cache
    for request in requests[3:]:
        pipeline.scheduler.add(request)
    while not pipeline.scheduler.is_idle:
        while pipeline.schedule():
            if migration.coordinator.current is None:
                num_moves = len(migration.history)
                migration.move_to(splits[(num_moves + 1) % len(splits)], 0.0)
        pipeline.complete()
    done = [one for one in migration.history if one.outcome is MoveOutcome.DONE]
    assert len(done) >= len(splits)
    assert all(one.copied_bytes for one in done)
    assert any(one.patched_bytes for one in done)
    assert_greedy(model, requests)


def adjusted_requests(temperature: float) -> list[Request]:
    """Some with every penalty, bias and minimum, some with one of them, some with none; the second
    half draws among the likeliest tokens only.

    Half of the vocabulary stops a request, so that a minimum is needed to get anywhere.
    """
    stop_ids = tuple(range(0, VOCAB_SIZE, 2))
    features = [
        {},
        {"frequency_penalty": 0.9},
        {"presence_penalty": 2.0, "min_new_tokens": 20, "masked_token_ids": stop_ids},
        {"repetition_penalty": 1.5, "min_new_tokens": 30, "masked_token_ids": stop_ids},
        {"logit_bias": tuple((token, -100.0) for token in stop_ids)},
        {"frequency_penalty": -0.5, "logit_bias": ((7, -100.0),)},
        {"min_new_tokens": 25, "masked_token_ids": stop_ids},
        {
            "frequency_penalty": 0.3,
            "presence_penalty": 0.4,
            "repetition_penalty": 0.8,
            "logit_bias": ((11, 1.5), (12, -100.0)),
            "min_new_tokens": 35,
            "masked_token_ids": stop_ids,
        },
    ]
    requests = make_requests(2 * len(features), max_new_tokens=40)
    for number, request in enumerate(requests):
        request.sampling = SamplingSpec(
            temperature=temperature,
            seed=number,
            top_p=0.9 if temperature and number >= len(features) else 1.0,
            **features[number % len(features)],
        )
        request.stops = StopRules(max_new_tokens=40, stop_token_ids=frozenset(stop_ids))
    return requests


def crowded_pipeline(layer_counts: tuple[int, ...], dtype: str = "float32") -> LocalPipeline:
    """With a pool for about two requests: the others are retracted and computed again."""
    return LocalPipeline(
        tiny_model("qwen3"),
        layer_counts,
        num_pages=34,
        scheduling=SchedulingArgs(page_size=4),
        throttle=ThrottleArgs(pause_free_share=0.0, **CHUNKED),
        **FASTEST | {"dtype": dtype},
    )


# The last stage alone adjusts logits: it is the only one, or it draws for several steps in flight.
@pytest.mark.parametrize("num_stages", [1, 4])
def test_with_penalties_biases_and_minimums_under_retraction(num_stages):
    requests = adjusted_requests(temperature=0.0)
    crowded_pipeline(SPLITS[num_stages][0]).run(requests)
    assert any(r.num_retractions and r.sampling.penalises_output for r in requests)
    assert_greedy("qwen3", requests)
    for request in requests:
        ended_by_stop = request.output_ids[-1] % 2 == 0
        assert len(request.output_ids) == 40 or ended_by_stop
        assert len(request.output_ids) > request.sampling.min_new_tokens or not ended_by_stop
        if request.sampling.logit_bias and not request.sampling.penalises_output:
            assert not any(token % 2 == 0 for token in request.output_ids)
    assert min(len(r.output_ids) for r in requests if not r.sampling.min_new_tokens) < 20


@cache
def sampled_alone() -> list[list[int]]:
    """The tokens of `adjusted_requests(1.0)`, each by itself."""
    alone = LocalPipeline(tiny_model("qwen3"), (6,), **FASTEST)
    return [alone.run([request])[0] for request in adjusted_requests(temperature=1.0)]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_sampled_tokens_are_the_same_alone_and_in_company_and_after_retraction(num_stages):
    requests = adjusted_requests(temperature=1.0)
    crowded_pipeline(SPLITS[num_stages][0], "bfloat16").run(requests)
    retracted = [request.sampling for request in requests if request.num_retractions]
    assert any(sampling.penalises_output for sampling in retracted)
    assert any(sampling.top_p < 1.0 for sampling in retracted)
    assert [request.output_ids for request in requests] == sampled_alone()


def test_a_bias_forbids_a_token_or_forces_it():
    plain, forbidden, forced = (make_requests(1, max_new_tokens=6)[0] for _ in range(3))
    pipeline = LocalPipeline(tiny_model("qwen3"), (6,), **FASTEST)
    pipeline.run([plain])
    favourite = plain.output_ids[0]
    forbidden.sampling = SamplingSpec(temperature=0.0, logit_bias=((favourite, -100.0),))
    forced.sampling = SamplingSpec(temperature=1.0, logit_bias=((17, 100.0),))
    pipeline.run([forbidden])
    pipeline.run([forced])
    assert favourite not in forbidden.output_ids
    assert forced.output_ids == [17] * 6
