"""Tokens that are tried for drafts: masks and forced text behind them are those of an output that
has them, and nothing is left of them."""

import json
import string
from typing import Any

import numpy as np
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from support.front_model import END_OF_TEXT, TURN_END, TURN_START, VOCAB_SIZE, byte_tokenizer
from support.grammars import EXAMPLES, LIMITS, compiled, setup, vocabulary

from sgl_pipeline.managers.grammars.channel import CompiledJob, CompileJob
from sgl_pipeline.managers.grammars.compilation import Compilation
from sgl_pipeline.managers.grammars.constraint import MOST_PIECES, GrammarConstraint
from sgl_pipeline.managers.grammars.reasoning import AfterReasoning
from sgl_pipeline.managers.grammars.spec import GrammarSpec
from sgl_pipeline.managers.grammars.vocabulary import GrammarVocabulary, read_vocabulary
from sgl_pipeline.requests import FinishReason, TokenConstraint

VOCABULARY = vocabulary()
THINK_END = byte_tokenizer().encode("</t>")

WORDS = st.text(string.ascii_lowercase, min_size=1, max_size=5)
PLAIN: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "integer", "maximum": 99}]),
    st.lists(WORDS, min_size=1, max_size=3, unique=True).map(lambda words: {"enum": words}),
    WORDS.map(lambda word: {"const": f"ü{word}"}),
)


def object_of(properties: dict[str, Any]) -> dict[str, Any]:
    required = list(properties)[:2]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.dictionaries(WORDS, inner, min_size=1, max_size=3).map(object_of),
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 3}),
    ),
    max_leaves=5,
)
GRAMMARS = st.one_of(
    SCHEMAS.map(lambda schema: GrammarSpec("json", json.dumps(schema))),
    st.sampled_from([example.spec for example in EXAMPLES.values()]),
)


def new_constraint(
    grammar: xgrammar.CompiledGrammar, known: GrammarVocabulary = VOCABULARY, **options: Any
) -> GrammarConstraint:
    """One for which no time passes, unless `options` say otherwise."""
    timeless: dict[str, Any] = {"ms_per_token": 1.0, "clock": lambda: 0.0}
    return GrammarConstraint(grammar, known, **(timeless | options))


def regex(text: str, **options: Any) -> GrammarConstraint:
    return new_constraint(compiled(GrammarSpec("regex", text)), **options)


def allowed_ids(mask: bytes) -> list[int]:
    """All of the vocabulary where the mask is empty."""
    if not mask:
        return list(range(VOCAB_SIZE))
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def step_by_step(
    grammar: xgrammar.CompiledGrammar,
    known: GrammarVocabulary,
    thinks: bool,
    output_ids: list[int],
) -> TokenConstraint:
    """One that nothing was ever tried on."""
    constraint: TokenConstraint = new_constraint(grammar, known)
    if thinks:
        constraint = AfterReasoning(constraint, THINK_END)
    for token_id in output_ids:
        assert constraint.accept(token_id) is None
    return constraint


@settings(max_examples=40, deadline=None)
@given(spec=GRAMMARS, thinks=st.sampled_from([False, False, True]), data=st.data())
def test_tried_tokens_are_as_output_and_leave_nothing(
    spec: GrammarSpec, thinks: bool, data: st.DataObject
) -> None:
    # A vocabulary of its own, which no other example has taught how texts begin.
    grammar, known = compiled(spec), vocabulary()
    ours = step_by_step(grammar, known, thinks, [])
    output_ids: list[int] = []
    for _ in range(12):
        draft, behind = [], step_by_step(grammar, known, thinks, output_ids)
        masks = behind.allowed_tokens_masks()
        for _ in range(data.draw(st.integers(0, 5))):
            assert ours.forced_tokens() == behind.forced_tokens()
            token_id = data.draw(drafted(ours, masks[-1], thinks))
            is_allowed = token_id in allowed_ids(masks[-1])
            if is_allowed and token_id in LIMITS.eos_token_ids:
                is_allowed = not masks[-1]  # thinking is free
            assert ours.try_token(token_id) == is_allowed
            if not is_allowed:
                break
            draft.append(token_id)
            assert behind.accept(token_id) is None
            masks += behind.allowed_tokens_masks()
        ours.take_back()
        assert ours.allowed_tokens_masks(draft) == masks
        num_right = data.draw(st.integers(0, len(draft)))
        drawn = data.draw(st.sampled_from(allowed_ids(masks[num_right])[-40:]))
        finishes = [ours.accept(token_id) for token_id in [*draft[:num_right], drawn]]
        output_ids += [*draft[:num_right], drawn]
        assert finishes[:-1] == [None] * num_right
        if finishes[-1] is not None:
            assert finishes[-1] == FinishReason("stop", matched=drawn)
            return


def drafted(constraint: TokenConstraint, mask: bytes, thinks: bool) -> st.SearchStrategy[int]:
    """Forced tokens, those of the end of the thinking, allowed ones and any."""
    likely = [*constraint.forced_tokens()[:1], *(THINK_END if thinks else ())]
    return st.sampled_from([*likely * 9, *allowed_ids(mask)[:9], *allowed_ids(mask)[-9:], 5, 300])


def test_tokens_that_end_the_output_or_have_no_text_are_refused_silently(capfd) -> None:
    constraint = regex("ab?")
    assert constraint.try_token(byte_tokenizer().encode("a")[0])
    for token_id in (END_OF_TEXT, TURN_END, TURN_START, 300):
        assert not constraint.try_token(token_id)
    assert capfd.readouterr() == ("", "")
    constraint.take_back()
    assert constraint.accept(byte_tokenizer().encode("a")[0]) is None
    assert constraint.accept(TURN_END) == FinishReason("stop", matched=TURN_END)


def test_text_that_has_no_end_is_forced_in_part() -> None:
    endless = 'root ::= "x" loop\nloop ::= "ab" loop'
    constraint = new_constraint(compiled(GrammarSpec("ebnf", endless)))
    forced = tuple(byte_tokenizer().encode("x" + "ab" * MOST_PIECES))
    assert constraint.forced_tokens() == forced[:MOST_PIECES]
    assert all(constraint.try_token(token_id) for token_id in forced)
    constraint.take_back()
    assert allowed_ids(constraint.allowed_tokens_masks()[0]) == [forced[0]]


def test_forced_text_ends_with_a_whole_character() -> None:
    assert regex("ü[xy]").forced_tokens() == tuple(byte_tokenizer().encode("ü"))
    assert regex("[üö]x").forced_tokens() == ()  # they begin alike


class _Clock:
    """Every call of the matcher seems to take `step_s`."""

    def __init__(self, step_s: float) -> None:
        self._now_s, self._step_s = 0.0, step_s

    def __call__(self) -> float:
        self._now_s += self._step_s
        return self._now_s


def test_drafts_that_take_too_long_end_until_there_is_more_output() -> None:
    (token_id,) = byte_tokenizer().encode("a")
    constraint = regex("a{99}", clock=_Clock(0.01125))
    assert constraint.forced_tokens() == (token_id,) * MOST_PIECES
    assert constraint.try_token(token_id)
    assert not constraint.try_token(token_id)
    assert constraint.forced_tokens() == ()
    constraint.take_back()
    for _ in range(3):  # each gives one millisecond, of which 2.5 are owed
        assert not constraint.try_token(token_id)
        assert constraint.accept(token_id) is None
    assert constraint.try_token(token_id)


def test_drafts_are_not_charged_to_the_output() -> None:
    constraint = regex("a{99}", clock=_Clock(0.012), ms_per_token=0.1)
    (token_id,) = byte_tokenizer().encode("a")
    num_tokens = 0
    while constraint.allowed_tokens_masks([token_id]) and constraint.accept(token_id) is None:
        num_tokens += 1
    # A mask and a token take 24 ms of the allowance's 250.
    assert num_tokens == 10


Z = byte_tokenizer().encode("z")[0]


def renamed_z(text: str, regex_text: str) -> tuple[GrammarVocabulary, xgrammar.CompiledGrammar]:
    """A vocabulary whose token Z stands for `text`, and a grammar for it."""
    tokenizer = byte_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"] = {
        text if token_id == Z else known_text: token_id
        for known_text, token_id in state["model"]["vocab"].items()
    }
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))
    known = read_vocabulary(tokenizer, LIMITS, None)
    info = known.tokenizer_info
    job = Compilation(setup(vocabulary=info.serialize_json())).run(
        CompileJob(1, "regex", regex_text)
    )
    assert isinstance(job, CompiledJob)
    return known, xgrammar.CompiledGrammar.deserialize_json(job.grammar, info)


def test_forced_text_is_drafted_as_an_output_before_has_written_it() -> None:
    """The tokenizer never uses the token for `na`, but a model may draw it."""
    known, grammar = renamed_z("na", "[xy]: name(1|2)")
    x, *_ = byte_tokenizer().encode("x")
    name = byte_tokenizer().encode("name")
    first, second = (GrammarConstraint(grammar, known, 1.0, clock=lambda: 0.0) for _ in range(2))
    assert first.try_token(x)
    assert first.forced_tokens() == tuple(byte_tokenizer().encode(": name"))
    first.take_back()
    for token_id in (x, *byte_tokenizer().encode(": "), Z, *name[2:]):
        assert first.accept(token_id) is None
    assert second.accept(x) is None
    assert second.forced_tokens() == (*byte_tokenizer().encode(": "), Z, *name[2:])


@pytest.mark.parametrize("goes_there", [False, True])
def test_a_dead_end_behind_a_draft_fails_only_a_request_that_gets_there(goes_there: bool) -> None:
    """A vocabulary without z."""
    a, b, c = (byte_tokenizer().encode(letter)[0] for letter in "abc")
    known, grammar = renamed_z("zz-none", "a(bz|cb)")
    drafting, plain = (GrammarConstraint(grammar, known, 1000.0) for _ in range(2))
    masks = drafting.allowed_tokens_masks([a, b])
    assert [bool(mask) for mask in masks] == [True, True, False]
    for token_id in (a, b, c) if goes_there else (a, c, b, TURN_END):
        plain.allowed_tokens_masks()
        finish = drafting.accept(token_id)
        assert finish == plain.accept(token_id)
    assert finish is not None
    assert finish.status_code == (400 if goes_there else None)
    assert ("allows no token" in finish.message) == goes_there
