"""Whole engines with drafts and without: the same tokens, log-probabilities and ends."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from support.saved_costs import costs_of, flat

from sgl_pipeline import Engine
from sgl_pipeline.costs.step_costs import LayerCost, StepCosts
from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL
from sgl_pipeline.managers.planning.cost_files import DIRECTORY_VARIABLE, save_costs

pytestmark = pytest.mark.multiproc

# A draft token costs nothing: whether an answer has drafts does not hang on how long a step took.
FREE_ROWS = StepCosts(
    layer=LayerCost(flat(1.0), 0.0, 0.0, 0.0),
    embedding=flat(0.0),
    tail=flat(0.0),
    layer_weights=(1.0,) * 16,
)
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
    {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True, "stop_token_ids": [260, 265, 270]},
    {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True, "n": 2},
    {"temperature": 0.9, "sampling_seed": 4, "max_new_tokens": 13, "min_p": 0.1, "n": 3},
    {"temperature": 0, "max_new_tokens": 40, "min_new_tokens": 20, "logit_bias": {"262": 4.0}},
    {"temperature": 0, "max_new_tokens": 60, "json_schema": SCHEMA},
    {"temperature": 0.9, "sampling_seed": 7, "max_new_tokens": 60, "json_schema": SCHEMA},
    {"temperature": 0.9, "sampling_seed": 8, "max_new_tokens": 40, "regex": "It is [a-z]+\\."},
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    directory = tmp_path_factory.mktemp("costs")
    costs = costs_of(DEMO_MODEL.name, costs=FREE_ROWS, dtype="bfloat16")
    save_costs(costs, directory / costs.file_name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DIRECTORY_VARIABLE, str(directory))
        with (
            Engine(pp=1, device="cpu") as plain,
            Engine(
                pp=2,
                device="cpu",
                speculative_algorithm="NGRAM",
                cpu_threads_per_stage=costs.threads,
            ) as drafting,
        ):
            yield plain, drafting


def answers(engine: Engine, prompts: str | list[str], sampling: dict[str, Any]) -> list[Any]:
    replies = engine.generate(prompts, sampling, return_logprob=True, top_logprobs_num=2)
    one_by_one = replies if isinstance(replies, list) else [replies]
    for reply in one_by_one:
        told = reply["meta_info"]
        assert told["completion_tokens"] == len(reply["output_ids"]) <= sampling["max_new_tokens"]
        assert len(told["output_token_logprobs"]) == len(reply["output_ids"])
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


def test_an_answer_may_end_at_any_token_of_a_draft(engines: tuple[Engine, Engine]) -> None:
    plain, drafting = engines
    whole = plain.generate(PROMPTS[0], SAMPLINGS[0])
    text, tokens = whole["text"], whole["output_ids"]
    ends: list[dict[str, Any]] = [{"max_new_tokens": most} for most in range(40, 53)]
    ends += [{"stop": [text[at : at + 3]]} for at in range(4, len(text) - 3, 4)]
    ends += [{"stop_token_ids": [token], "min_new_tokens": 20} for token in set(tokens[20:40])]
    for end in ends:
        sampling = SAMPLINGS[0] | end
        assert answers(drafting, PROMPTS[0], sampling) == answers(plain, PROMPTS[0], sampling), end


def test_a_stream_has_every_token_once(engines: tuple[Engine, Engine]) -> None:
    """Several at a time, where drafts were right."""
    plain, drafting = engines
    expected = plain.generate(PROMPTS[0], SAMPLINGS[0])

    events = list(drafting.generate(PROMPTS[0], SAMPLINGS[0], stream=True))
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert [len(event["output_ids"]) for event in events] == counts == sorted(counts)
    assert any(after - before > 1 for before, after in pairwise(counts))
    assert (events[-1]["output_ids"], events[-1]["text"]) == (
        expected["output_ids"],
        expected["text"],
    )


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
