"""Grammars through the whole runtime but its processes: every output matches, whoever is beside it.

Random weights and temperature 1, so that nothing but the mask keeps the output right.
"""

import pytest
from support.front_model import TURN_END, byte_tokenizer
from support.grammars import EXAMPLES, LIMITS, compiled, vocabulary
from support.local_pipeline import FASTEST, LocalPipeline
from support.tiny_models import tiny_model

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.managers.grammars.constraint import GrammarConstraint
from sgl_pipeline.requests import FinishReason, Request, SamplingSpec, StopRules

pytestmark = pytest.mark.slow

SPLITS = {1: (6,), 2: (2, 4), 4: (2, 1, 1, 2)}
CHUNKED = {"max_prefill_tokens": 24, "min_prefill_tokens": 4, "prefill_spread_steps": 3}
MAX_NEW_TOKENS = 60
# Each with a bounded length, but for white space.
NAMES = ("json", "regex", "ebnf", "structural_tag")
VOCABULARY = vocabulary()
GRAMMARS = {name: compiled(EXAMPLES[name].spec) for name in NAMES}


def make_request(
    number: int,
    grammar: str | None,
    *,
    ignore_eos: bool = False,
    max_new_tokens: int = MAX_NEW_TOKENS,
    **spec: object,
) -> Request:
    """With a seed of its own; every request begins with the same words."""
    sampling = SamplingSpec(**({"temperature": 1.0, "seed": number} | spec))  # type: ignore[arg-type]
    stop_ids = frozenset() if ignore_eos else LIMITS.eos_token_ids
    prompt = byte_tokenizer().encode(f"The same beginning for everyone. Request {number}: ")
    request = Request(f"r{number}", prompt, sampling, StopRules(max_new_tokens, stop_ids))
    if grammar is not None:
        request.constraint = GrammarConstraint(GRAMMARS[grammar], VOCABULARY, ms_per_token=1000.0)
    return request


def mixed_requests() -> list[Request]:
    """Twelve with a grammar each, every third one without."""
    return [make_request(n, None if n % 3 == 2 else NAMES[n % 4]) for n in range(18)]


def new_pipeline(layer_counts: tuple[int, ...]) -> LocalPipeline:
    return LocalPipeline(tiny_model("qwen3"), layer_counts, **FASTEST)


def crowded_pipeline(layer_counts: tuple[int, ...]) -> LocalPipeline:
    """With a pool for about two requests: the others are retracted and computed again."""
    return LocalPipeline(
        tiny_model("qwen3"),
        layer_counts,
        num_pages=64,
        scheduling=SchedulingArgs(page_size=4),
        throttle=ThrottleArgs(pause_free_share=0.0, **CHUNKED),
        **FASTEST,
    )


def assert_match(name: str, request: Request) -> None:
    text = byte_tokenizer().decode(request.output_ids[:-1])
    assert request.finish == FinishReason("stop", matched=request.output_ids[-1])
    assert EXAMPLES[name].is_match(text), text


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The tokens of `mixed_requests`, one after the other on a single stage."""
    pipeline = new_pipeline((6,))
    return [pipeline.run([request])[0] for request in mixed_requests()]


@pytest.mark.parametrize("num_stages", SPLITS)
def test_tokens_are_the_same_alone_and_in_company_at_every_depth(num_stages, alone) -> None:
    requests = mixed_requests()
    assert new_pipeline(SPLITS[num_stages]).run(requests) == alone
    for number, request in enumerate(requests):
        if request.constraint is not None and request.finish != FinishReason("length"):
            assert_match(NAMES[number % 4], request)
    finished = [r for r in requests if r.constraint is not None and r.finish.kind == "stop"]
    assert len(finished) >= 9


@pytest.mark.parametrize("num_stages", [1, 4])
def test_a_retraction_in_the_middle_of_a_grammar_changes_no_token(num_stages, alone) -> None:
    requests = mixed_requests()
    assert crowded_pipeline(SPLITS[num_stages]).run(requests) == alone
    assert any(r.num_retractions and r.constraint is not None for r in requests)


def test_a_request_without_a_grammar_gets_the_tokens_that_it_gets_without_such_neighbors() -> None:
    plain = [make_request(number, None) for number in range(2, 18, 3)]
    new_pipeline((3, 3)).run(plain)
    mixed = mixed_requests()
    new_pipeline((3, 3)).run(mixed)
    assert [r.output_ids for r in mixed[2::3]] == [r.output_ids for r in plain]


def test_a_complete_grammar_ends_the_request_although_eos_is_ignored_or_comes_too_early() -> None:
    ignoring = make_request(1, "regex", ignore_eos=True)
    minimum = make_request(
        2, "regex", min_new_tokens=40, masked_token_ids=tuple(sorted(LIMITS.eos_token_ids))
    )
    new_pipeline((3, 3)).run([ignoring, minimum])
    for request in (ignoring, minimum):
        assert_match("regex", request)
        assert len(request.output_ids) == len("(123) 456-7890") + 1


def test_every_other_adjustment_yields_to_the_grammar() -> None:
    """A bias towards what is forbidden, and against what is not; greedy as well as drawn."""
    forbidden, digit = byte_tokenizer().encode("x7")
    bias = ((forbidden, 1e30), (digit, -1e30), (TURN_END, 1e30))
    requests = [
        make_request(n, "regex", temperature=n * 0.5, logit_bias=bias, presence_penalty=2.0)
        for n in range(3)
    ]
    new_pipeline((3, 3)).run(requests)
    for request in requests:
        assert_match("regex", request)
        assert digit not in request.output_ids


def test_a_length_limit_cuts_a_grammar_short() -> None:
    request = make_request(3, "regex", max_new_tokens=5)
    new_pipeline((3, 3)).run([request])
    assert request.finish == FinishReason("length")
    assert len(request.output_ids) == 5


def test_a_grammar_that_fails_ends_its_request_alone() -> None:
    failing, other = make_request(1, "json"), make_request(0, "json")
    failing.constraint = GrammarConstraint(
        GRAMMARS["json"], VOCABULARY, ms_per_token=20.0, clock=iter(range(10**6)).__next__
    )
    new_pipeline((3, 3)).run([failing, other])
    assert failing.finish is not None
    assert failing.finish.status_code == 400
    assert "--grammar-match-ms-per-token" in failing.finish.message
    assert other.finish is not None
    assert other.finish.kind in ("stop", "length")
