"""Tokens and log-probabilities of requests with a grammar do not depend on drafts.

The whole runtime but its processes, in one process, as in `test_draft_tokens.py`. Random weights,
so that what a grammar leaves open is hard to guess, and what it forces is not.
"""

import json
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from support.forced_drafts import ForcedDrafts
from support.front_model import byte_tokenizer
from support.grammars import EXAMPLES, LIMITS, compiled, vocabulary
from support.local_pipeline import LocalPipeline
from support.served_steps import flat_costs
from support.tiny_models import VOCAB_SIZE, tiny_model

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.managers.grammars.constraint import GrammarConstraint
from sgl_pipeline.managers.grammars.reasoning import AfterReasoning
from sgl_pipeline.managers.grammars.spec import GrammarSpec
from sgl_pipeline.requests import (
    GREEDY,
    FinishReason,
    LogprobRows,
    LogprobSpec,
    Request,
    SamplingSpec,
    StopRules,
    TokenConstraint,
)

pytestmark = [pytest.mark.slow, pytest.mark.compiler]

SPLITS = {1: (6,), 2: (2, 4), 3: (1, 3, 2)}
COMPILED: dict[str, Any] = {
    "dtype": "bfloat16",
    "attention_backend": "cpu",
    "layer_kernels": "cpu",
}
NAMES = ("json", "regex", "ebnf", "structural_tag", "any_json")
VOCABULARY = vocabulary()
GRAMMARS = {name: compiled(EXAMPLES[name].spec) for name in NAMES}
(THINK_END,) = byte_tokenizer().encode("#")
(M,) = byte_tokenizer().encode("m")
SAMPLINGS = (
    GREEDY,
    SamplingSpec(temperature=1.0, seed=3, logit_bias=((THINK_END, 5.0),)),
    SamplingSpec(
        temperature=0.8,
        seed=4,
        top_p=0.9,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        min_new_tokens=9,
        masked_token_ids=tuple(sorted(LIMITS.eos_token_ids)),
    ),
)
# By the request's number: its grammar forces much; it thinks first; it ends at the m of "name"; it
# has no grammar.
FORCED, THINKS, STOPS_EARLY, PLAIN = 3, 4, 5, 8


def make_requests(count: int = 10) -> list[Request]:
    """Two of three with log-probabilities."""
    return [make_request(number) for number in range(count)]


def make_request(number: int) -> Request:
    stop_ids = LIMITS.eos_token_ids | ({M} if number == STOPS_EARLY else set())
    prompt = byte_tokenizer().encode(f"{number} is the number of this prompt. "[: 9 + 4 * number])
    constraint: TokenConstraint | None = None
    if number != PLAIN:
        grammar = GRAMMARS[NAMES[number % len(NAMES)]]
        constraint = GrammarConstraint(grammar, VOCABULARY, 1.0, clock=lambda: 0.0)
    if number == THINKS:
        constraint = AfterReasoning(constraint, [THINK_END])
    return Request(
        f"request-{number}",
        prompt,
        SAMPLINGS[number % len(SAMPLINGS)],
        StopRules(48, frozenset(stop_ids)),
        constraint=constraint,
        logprobs=LogprobSpec(number % 2 * len(prompt), 3, (1, 5)) if number % 3 else None,
    )


def new_pipeline(num_stages: int, draft_tokens: int = 0, **flags: Any) -> LocalPipeline:
    """With steps that take the same time with any number of rows."""
    return LocalPipeline(
        tiny_model("qwen3"),
        SPLITS[num_stages],
        scheduling=SchedulingArgs(page_size=4, draft_tokens=draft_tokens),
        throttle=ThrottleArgs(max_prefill_tokens=24, min_prefill_tokens=4, prefill_spread_steps=3),
        costs=flat_costs(6, 1.0),
        **COMPILED,
        **flags,
    )


def outcome(requests: Sequence[Request]) -> list[tuple[Any, ...]]:
    """Tokens, ends and all rows of log-probabilities, however these were cut into runs."""
    fields = LogprobRows.__struct_fields__[1:]
    return [
        (
            one.output_ids,
            one.finish,
            one.num_logprob_rows,
            [b"".join(getattr(run, field) for run in one.logprob_runs) for field in fields],
        )
        for one in requests
    ]


@pytest.fixture(scope="module")
def expected() -> list[Request]:
    """Without drafts, on a single stage."""
    requests = make_requests()
    new_pipeline(1).run(requests)
    assert requests[STOPS_EARLY].finish == FinishReason("stop", matched=M)
    assert THINK_END in requests[THINKS].output_ids
    return requests


def drafts_of(pipeline: LocalPipeline, number: int) -> list[tuple[int, ...]]:
    """Those that the request with this number had."""
    return [
        chunk.draft_ids
        for microbatch in pipeline.microbatches
        for chunk in microbatch.chunks
        if chunk.request.request_id == f"request-{number}" and chunk.draft_ids
    ]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_lone_request_has_the_bits_that_it_has_without_drafts(
    num_stages: int, expected: list[Request]
) -> None:
    """With the drafts that a server gives."""
    for number in range(len(expected)):
        pipeline, request = new_pipeline(num_stages, draft_tokens=11), make_request(number)
        pipeline.run([request])
        assert outcome([request]) == outcome(expected[number : number + 1])
        drafts = drafts_of(pipeline, number)
        if number in (FORCED, STOPS_EARLY):
            assert pipeline.scheduler.drafts.num_accepted
        if number == STOPS_EARLY:
            assert any(M in draft[:-1] for draft in drafts)


ODD_SCHEMA = {
    "$defs": {
        "place": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Zürich", "東京", 'a "quoted" town', "🚲"]},
                "floor": {"type": "integer", "minimum": -3, "maximum": 12},
            },
            "required": ["city", "floor"],
            "additionalProperties": False,
        }
    },
    "type": "object",
    "properties": {
        "größe": {"type": "integer", "minimum": 5, "maximum": 250},
        "places": {
            "type": "array",
            "items": {"$ref": "#/$defs/place"},
            "minItems": 2,
            "maxItems": 2,
        },
        "status": {"anyOf": [{"type": "null"}, {"const": "paid in full"}]},
    },
    "required": ["größe", "places", "status"],
    "additionalProperties": False,
}


def test_answers_by_an_odd_schema_are_those_without_drafts() -> None:
    """Nested, in a choice of forms, beyond ASCII, with numbers between bounds; several answers to
    one prompt, and one that has learned from those before it."""
    grammar = compiled(GrammarSpec("json", json.dumps(ODD_SCHEMA)))
    plain, drafting = new_pipeline(1), new_pipeline(2, draft_tokens=11)
    for number, sampling in enumerate((GREEDY, *SAMPLINGS[1:], SamplingSpec(1.5, seed=8))):
        ours, theirs = (
            Request(
                f"odd-{number}",
                byte_tokenizer().encode("Say it."),
                sampling,
                StopRules(180, LIMITS.eos_token_ids),
                constraint=GrammarConstraint(grammar, VOCABULARY, 1.0, clock=lambda: 0.0),
                logprobs=LogprobSpec(0, 3, (1, 5)),
            )
            for _ in range(2)
        )
        plain.run([theirs])
        drafting.run([ours])
        assert outcome([ours]) == outcome([theirs])
        answer = json.loads(byte_tokenizer().decode(ours.output_ids, skip_special_tokens=True))
        assert len(answer["places"]) == 2 and 5 <= answer["größe"] <= 250
    assert drafting.scheduler.drafts.num_accepted > 100


def test_forced_text_takes_a_step_for_as_many_tokens_as_a_draft_may_have() -> None:
    """The prompt's step draws the first token, each of the next two 12, the last one the rest."""
    text = "A grammar forces all of it."
    grammar = compiled(GrammarSpec("regex", text.replace(".", r"\.")))
    pipeline = new_pipeline(1, draft_tokens=11)
    request = Request(
        "forced",
        byte_tokenizer().encode("Say it."),
        GREEDY,
        StopRules(48, LIMITS.eos_token_ids),
        constraint=GrammarConstraint(grammar, VOCABULARY, 1.0, clock=lambda: 0.0),
    )
    pipeline.run([request])
    assert byte_tokenizer().decode(request.output_ids[: len(text)]) == text
    decodes = [one.num_samples for one in pipeline.microbatches if one.num_decodes]
    assert decodes == [12, 12, 3]


def test_so_have_requests_beside_others(expected: list[Request]) -> None:
    pipeline, requests = new_pipeline(2, draft_tokens=11), make_requests()
    pipeline.run(requests)
    assert outcome(requests) == outcome(expected)
    with_drafts = [number for number in range(len(requests)) if drafts_of(pipeline, number)]
    assert len(with_drafts) > len(requests) // 2
    assert 0 < pipeline.scheduler.drafts.num_accepted < pipeline.scheduler.drafts.num_drafted


@pytest.mark.parametrize(
    ("num_stages", "wrong_share"), [(1, 0.0), (1, 0.4), (2, 0.0), (2, 0.4), (2, 1.0), (3, 0.3)]
)
def test_however_many_drafts_are_right(
    num_stages: int, wrong_share: float, expected: list[Request]
) -> None:
    pipeline, requests = new_pipeline(num_stages), make_requests()
    drafts = force_drafts(pipeline, expected, wrong_share)
    pipeline.run(requests)
    assert outcome(requests) == outcome(expected)
    assert drafts.num_drafted > 50
    assert (drafts.num_accepted > 0) == (wrong_share < 1.0)
    assert (drafts.num_accepted == drafts.num_drafted) == (wrong_share == 0.0)


def test_though_pages_run_out_and_stages_are_lost(expected: list[Request]) -> None:
    """A pool for about two requests, and kills while drafts are in flight."""
    for seed in range(2):
        pipeline, requests = new_pipeline(2, num_pages=26, log_pages=12), make_requests()
        drafts = force_drafts(pipeline, expected, 0.3)
        pipeline.run(requests, partial(lose_some, pipeline, random.Random(seed)))
        assert outcome(requests) == outcome(expected)
        assert 0 < drafts.num_accepted < drafts.num_drafted
        assert sum(one.num_retractions for one in requests)
        assert pipeline._num_losses


def lose_some(pipeline: LocalPipeline, numbers: random.Random, step: int) -> None:
    if step % 9 == 5:
        chunks = pipeline.microbatches[-1].chunks
        if any(one.draft_ids and one.request.constraint is not None for one in chunks):
            pipeline.lose(*numbers.sample(range(2), numbers.choice((1, 2))))


def force_drafts(
    pipeline: LocalPipeline, expected: Sequence[Request], wrong_share: float
) -> ForcedDrafts:
    outputs = {one.request_id: one.output_ids for one in expected}
    return ForcedDrafts(pipeline.scheduler, outputs, wrong_share, vocab_size=VOCAB_SIZE)
