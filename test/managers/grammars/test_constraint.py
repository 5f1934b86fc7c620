"""Masks and endings equal SGLang's own, and a grammar that is too slow ends its request alone."""

import random

import numpy as np
import pytest
import torch
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from support.front_model import END_OF_TEXT, TURN_END, VOCAB_SIZE, byte_tokenizer
from support.grammars import AMBIGUOUS, EXAMPLES, LIMITS, Example, compiled, vocabulary

from sgl_pipeline.managers.grammars.constraint import GrammarConstraint
from sgl_pipeline.managers.grammars.reasoning import AfterReasoning
from sgl_pipeline.requests import FinishReason

MAX_TOKENS = 60
VOCABULARY = vocabulary()
every_example = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)


def constraint_of(example: Example) -> GrammarConstraint:
    return GrammarConstraint(compiled(example.spec), VOCABULARY, ms_per_token=1000.0)


def upstream_grammar(example: Example):
    """SGLang's own object for the same request, at the same server arguments."""
    backend = XGrammarGrammarBackend(
        byte_tokenizer(), VOCAB_SIZE, sorted(LIMITS.eos_token_ids), max_whitespace_cnt=1
    )
    kind = {"json_schema": "json"}.get(example.field, example.field)
    return getattr(backend, f"dispatch_{kind}")(example.text)


def upstream_mask(grammar) -> bytes:
    mask = grammar.allocate_vocab_mask(VOCAB_SIZE, 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    return mask.numpy().tobytes()


def allowed_ids(mask: bytes) -> list[int]:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


@every_example
def test_a_random_walk_has_upstreams_masks_and_ends_in_a_match(example: Example) -> None:
    numbers = random.Random(example.field)
    num_complete = 0
    for _ in range(12):
        ours, theirs = constraint_of(example), upstream_grammar(example)
        output_ids: list[int] = []
        finish = None
        while finish is None and len(output_ids) < MAX_TOKENS:
            mask = ours.allowed_tokens_masks()[0]
            assert mask == upstream_mask(theirs)
            choices = allowed_ids(mask)
            ending = [token for token in choices if token in LIMITS.eos_token_ids]
            output_ids.append(numbers.choice(ending or choices))
            finish = ours.accept(output_ids[-1])
            theirs.accept_token(output_ids[-1])
            assert (finish is not None) == theirs.is_terminated()
        if finish is not None:
            assert finish == FinishReason("stop", matched=output_ids[-1])
            assert example.is_match(byte_tokenizer().decode(output_ids[:-1]))
            num_complete += 1
    assert num_complete >= 3


def test_every_eos_id_and_nothing_else_ends_a_complete_output() -> None:
    constraint = constraint_of(Example("regex", "ab", bool))
    for token in byte_tokenizer().encode("ab"):
        assert constraint.accept(token) is None
    assert allowed_ids(constraint.allowed_tokens_masks()[0]) == [END_OF_TEXT, TURN_END]


def test_ids_without_a_text_are_never_allowed() -> None:
    """The model's vocabulary is larger than the tokenizer's."""
    constraint = constraint_of(Example("regex", "(.|\n)*", bool))
    assert max(allowed_ids(constraint.allowed_tokens_masks()[0])) < len(byte_tokenizer())


def test_a_token_that_the_grammar_forbids_ends_the_request_with_a_500() -> None:
    constraint = constraint_of(Example("regex", "ab", bool))
    finish = constraint.accept(byte_tokenizer().encode("x")[0])
    assert finish is not None
    assert (finish.kind, finish.status_code) == ("abort", 500)
    assert constraint.accept(byte_tokenizer().encode("a")[0]) is finish


class _Clock:
    """Every call of the matcher seems to take `step_s`."""

    def __init__(self, step_s: float) -> None:
        self._now_s, self._step_s = 0.0, step_s

    def __call__(self) -> float:
        self._now_s += self._step_s
        return self._now_s


def test_matching_that_takes_too_long_for_its_tokens_is_a_400_that_names_the_knob() -> None:
    grammar = compiled(EXAMPLES["regex"].spec)
    token = byte_tokenizer().encode("(")[0]
    slow = GrammarConstraint(grammar, VOCABULARY, ms_per_token=20.0, clock=_Clock(0.3))
    other = constraint_of(EXAMPLES["regex"])
    assert slow.allowed_tokens_masks() == other.allowed_tokens_masks()
    finish = slow.accept(token)
    assert finish is not None
    assert (finish.kind, finish.status_code) == ("abort", 400)
    assert "300 ms" in finish.message
    assert "--grammar-match-ms-per-token" in finish.message
    quick = GrammarConstraint(grammar, VOCABULARY, ms_per_token=20.0, clock=_Clock(0.009))
    quick.allowed_tokens_masks()[0]
    assert quick.accept(token) is None


def test_an_ambiguous_grammar_is_ended_within_a_few_tokens() -> None:
    """Real time, real grammar; how many tokens it takes depends on the machine."""
    constraint = GrammarConstraint(
        compiled(Example("ebnf", AMBIGUOUS, bool).spec), VOCABULARY, ms_per_token=0.01
    )
    token = byte_tokenizer().encode("a")[0]
    for _ in range(200):
        constraint.allowed_tokens_masks()[0]
        if (finish := constraint.accept(token)) is not None:
            break
    assert finish is not None
    assert "make it less ambiguous" in finish.message


def test_thinking_is_free_and_the_grammar_holds_from_its_end_as_upstream_has_it() -> None:
    example = EXAMPLES["regex"]
    end_ids = byte_tokenizer().encode("</t>")
    ours = AfterReasoning(constraint_of(example), end_ids)
    theirs = ReasonerGrammarObject(upstream_grammar(example), end_ids)
    theirs.maybe_init_reasoning(True)
    text = "hm<</t</t>(123) 456-7890"
    for token in [*byte_tokenizer().encode(text), TURN_END]:
        mask = torch.full((1, -(-VOCAB_SIZE // 32)), -1, dtype=torch.int32)
        theirs.fill_vocab_mask(mask, 0)
        free = b"\xff" * len(mask.numpy().tobytes())
        assert (ours.allowed_tokens_masks()[0] or free) == mask.numpy().tobytes()
        finish = ours.accept(token)
        theirs.accept_token(token)
        assert (finish is not None) == theirs.is_terminated()
    assert finish == FinishReason("stop", matched=TURN_END)
