"""Greedy tokens do not depend on how a request was served: transformers gives the same.

The whole runtime but its processes: the real scheduler, plan encoder, stages and attention, over
stages, layer splits, policies, page sizes, prefix cache and memory pressure.
"""

import random

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
with_and_without_kernels = pytest.mark.parametrize(
    "kernels", ["torch", pytest.param("compiled", marks=pytest.mark.compiler)]
)
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


def make_requests(
    count: int, *, max_new_tokens: int = 12, sampling: SamplingSpec = GREEDY
) -> list[Request]:
    """Prompts of 1 to 60 tokens; every other one begins like the first."""
    numbers = random.Random(count)
    shared = [numbers.randrange(VOCAB_SIZE) for _ in range(40)]
    requests = []
    for index in range(count):
        own = [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.randrange(1, 20))]
        prompt = shared + own if index % 2 else own
        stops = StopRules(max_new_tokens=max_new_tokens)
        requests.append(Request(f"request-{index}", prompt, sampling, stops))
    return requests


def assert_greedy(name: str, requests: list[Request]) -> None:
    path = same_model_for_transformers(name)
    ties = sum(
        count_ties(path, request.prompt_ids, request.output_ids, request.sampling)
        for request in requests
    )
    num_tokens = sum(len(request.output_ids) for request in requests)
    print(f"{name}: {num_tokens} greedy tokens, {ties} ties below 1e-4 that went the other way")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_stages", SPLITS)
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
        num_pages=34,
        scheduling=SchedulingArgs(page_size=4),
        throttle=throttle,
        costs=COSTS,
        **FASTEST_IN_FP32,
    )
    requests = make_requests(8, max_new_tokens=40)
    pipeline.run(requests)
    assert_greedy("qwen3", requests)
    assert sum(request.num_retractions for request in requests) > 0
    budgets = [microbatch.budget for microbatch in pipeline.microbatches]
    assert all(budget.time is not None for budget in budgets)
    assert ("TPOT", "TTFT") in {(budget.bound_by, budget.missed) for budget in budgets}


@pytest.mark.parametrize(
    "name",
    [
        *("qwen2-tied", "mixtral-sharded", "qwen2-moe", "qwen3-moe", "glm", "glm4", "chatglm"),
        "gpt-oss",
    ],
)
@pytest.mark.parametrize(
    ("num_stages", "kernels"),
    [
        *((num_stages, "torch") for num_stages in SPLITS),
        # Where layers are cut is nothing to a kernel, but a stage may be the first and the last.
        pytest.param(1, "compiled", marks=pytest.mark.compiler),
        pytest.param(4, "compiled", marks=pytest.mark.compiler),
    ],
)
def test_of_every_model_family(kernels, num_stages, name):
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


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("radix_cache", [True, False])
@with_and_without_kernels
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


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("radix_cache", [True, False])
def test_under_retraction(num_stages, radix_cache):
    """A pool for about two requests: the others are retracted and computed again."""
    scheduling = SchedulingArgs(page_size=4, radix_cache=radix_cache)
    pipeline = LocalPipeline(
        tiny_model("mistral-sharded"),
        SPLITS[num_stages][0],
        num_pages=34,
        scheduling=scheduling,
        throttle=ThrottleArgs(pause_free_share=0.0, **CHUNKED),
        **FASTEST_IN_FP32,
    )
    requests = make_requests(8, max_new_tokens=40)
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


@pytest.mark.parametrize("model", ["qwen3", "qwen2-moe-every-other-layer"])
@pytest.mark.parametrize(
    "splits",
    [[(3, 3), (4, 2), (1, 5)], [(2, 2, 2), (4, 1, 1), (1, 4, 1), (1, 1, 4)]],
    ids=["two stages", "three stages"],
)
@with_and_without_kernels
def test_though_layers_move_while_requests_run(splits, kernels, model):
    """One move after the other: prompts in chunks, decodes and cached pages are on their way."""
    attention_backend, layer_kernels = KERNELS[kernels]
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
    """Some with every penalty, bias and minimum, some with one of them, some with none.

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
            temperature=temperature, seed=number, **features[number % len(features)]
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


@pytest.mark.parametrize("num_stages", [1, 2, 4])
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


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_sampled_tokens_with_penalties_are_the_same_alone_and_after_retraction(num_stages):
    requests = adjusted_requests(temperature=1.0)
    crowded_pipeline(SPLITS[num_stages][0], "bfloat16").run(requests)
    assert any(r.num_retractions and r.sampling.penalises_output for r in requests)
    alone = LocalPipeline(tiny_model("qwen3"), (6,), **FASTEST)
    for request, again in zip(requests, adjusted_requests(temperature=1.0), strict=True):
        assert alone.run([again]) == [request.output_ids]


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


def test_sampled_tokens_are_the_same_alone_and_in_company_and_after_retraction():
    sampling = SamplingSpec(temperature=1.0, top_p=0.9, seed=11)
    requests = make_requests(8, max_new_tokens=40, sampling=sampling)
    crowded_pipeline((2, 4), "bfloat16").run(requests)
    assert sum(request.num_retractions for request in requests) > 0
    alone = LocalPipeline(tiny_model("qwen3"), (6,), **FASTEST)
    for request, again in zip(
        requests, make_requests(8, max_new_tokens=40, sampling=sampling), strict=True
    ):
        assert alone.run([again]) == [request.output_ids]
