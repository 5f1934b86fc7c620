"""Whole engines with drafts and without: the same tokens, log-probabilities and ends."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sgl_pipeline import Engine

pytestmark = pytest.mark.multiproc

PROMPTS = [
    f"<|user|>{text}<|end|><|assistant|>" for text in ("Spell the word cat.", "3 + 4?", "Hi")
]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"first_name": {"enum": ["Ann", "Paul"]}, "is_member": {"type": "boolean"}},
        "required": ["first_name", "is_member"],
        "additionalProperties": False,
    }
)
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0, "max_new_tokens": 90, "ignore_eos": True},
    {"temperature": 0.9, "top_p": 0.9, "sampling_seed": 5, "max_new_tokens": 40},
    {"temperature": 0.5, "sampling_seed": 6, "max_new_tokens": 40, "frequency_penalty": 0.3},
    {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True, "stop": ["a", "e"]},
    {"temperature": 0, "max_new_tokens": 60, "json_schema": SCHEMA},
    {"temperature": 0.9, "sampling_seed": 7, "max_new_tokens": 60, "json_schema": SCHEMA},
    {"temperature": 0.9, "sampling_seed": 8, "max_new_tokens": 40, "regex": "It is [a-z]+\\."},
]


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    with (
        Engine(pp=1, device="cpu") as plain,
        Engine(pp=2, device="cpu", speculative_algorithm="NGRAM") as drafting,
    ):
        yield plain, drafting


def answers(engine: Engine, prompts: str | list[str], sampling: dict[str, Any]) -> list[Any]:
    replies = engine.generate(prompts, sampling, return_logprob=True, top_logprobs_num=2)
    one_by_one = replies if isinstance(replies, list) else [replies]
    fields = ("finish_reason", "output_token_logprobs", "output_top_logprobs")
    return [
        (reply["output_ids"], reply["text"], *(reply["meta_info"][field] for field in fields))
        for reply in one_by_one
    ]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_answers_are_those_without_drafts(
    engines: tuple[Engine, Engine], sampling: dict[str, Any]
) -> None:
    plain, drafting = engines
    for prompts in (PROMPTS[0], PROMPTS):
        assert answers(drafting, prompts, sampling) == answers(plain, prompts, sampling)


def test_an_answer_tells_of_its_drafts(engines: tuple[Engine, Engine]) -> None:
    plain, drafting = engines
    assert not any("spec" in name for name in plain.generate(PROMPTS[0], SAMPLINGS[0])["meta_info"])
    told = drafting.generate(PROMPTS[0], SAMPLINGS[0])["meta_info"]
    steps, drafted = told["spec_verify_ct"], told["spec_num_proposed_drafts"]
    right = told["spec_num_correct_drafts"]
    assert 0 < right < drafted and 0 < steps < told["completion_tokens"]
    assert told["spec_accept_rate"] == right / drafted
    assert told["spec_accept_length"] == 1 + right / steps
    assert told["spec_cap_length"] == 1 + drafted / steps
    assert sum(told["spec_correct_drafts_histogram"]) == steps


def test_drafts_are_counted(engines: tuple[Engine, Engine]) -> None:
    plain, drafting = engines
    answers(drafting, PROMPTS[0], SAMPLINGS[0])
    (facts,) = drafting.get_server_info()["internal_states"]
    assert facts["spec_num_proposed_drafts"] > facts["spec_num_correct_drafts"] > 0
    assert facts["avg_spec_accept_length"] > 1.0
    assert (facts["no_drafts"], facts["why_no_drafts"]) == ("idle", "no request decodes")
    (facts,) = plain.get_server_info()["internal_states"]
    assert facts["spec_num_proposed_drafts"] == facts["avg_spec_accept_length"] == 0
