import json
from typing import Any

import pytest

from benchmark.models.make_model import FIRST_FILLER
from benchmark.speculation.draft_speed import (
    Answers,
    Load,
    loads_of,
    main,
    random_ids,
    ratio_table,
    ratios,
    unequal,
    whole_answer,
)
from benchmark.speculation.prompts import KINDS, PROMPTS_EACH, SCHEMAS
from benchmark.support.engine import EngineFailure


def answers(drafts: str, number: int, seconds: float, *outputs: tuple[int, ...]) -> Answers:
    return Answers(drafts, "chat, 1 client", number, seconds, outputs)


def test_ratios_are_of_tokens_a_second_in_one_round() -> None:
    tokens = ((1, 2, 3), (4,))
    runs = [
        answers("off", 1, 4.0, *tokens),
        answers("on", 1, 2.0, *tokens),
        answers("on", 2, 1.0, *tokens),
        answers("off", 2, 3.0, *tokens),
    ]
    assert ratios(runs) == {"chat, 1 client": [2.0, 3.0]}
    assert not unequal(runs)
    assert "| chat, 1 client | 1 | 3 | 2.50 (2.00 to 3.00) |" in ratio_table(runs)


def test_other_tokens_are_told() -> None:
    runs = [answers("off", 1, 1.0, (1, 2)), answers("on", 1, 1.0, (1, 3))]
    assert unequal(runs) == ["chat, 1 client, round 1, drafts on: other tokens"]


def test_one_client_asks_each_kind_by_itself_and_several_share_all() -> None:
    (kind, schema), *_ = SCHEMAS.items()
    prompts = {"chat": [[1], [2]], kind: [[3], [4]]}
    assert loads_of(prompts, 1) == [
        Load("chat", 1, ((1,), (2,)), ("", "")),
        Load(kind, 1, ((3,), (4,)), (schema, schema)),
    ]
    shared = Load("all kinds", 4, ((1,), (3,), (2,), (4,)), ("", schema) * 2)
    assert loads_of(prompts, 4) == [shared]


def test_each_of_many_clients_has_a_prompt() -> None:
    (load,) = loads_of({"chat": [[1], [2]], "JSON": [[3], [4]]}, 6)
    assert load.prompts == ((1,), (3,), (2,), (4,), (1,), (3,))


def test_clients_that_share_one_kind_do_not_share_all() -> None:
    assert [one.name for one in loads_of({"chat": [[1], [2]]}, 2)] == ["chat, 2 clients"]


def test_each_kind_has_as_many_prompts() -> None:
    assert {kind: len(prompts()) for kind, prompts in KINDS.items()} == dict.fromkeys(
        KINDS, PROMPTS_EACH
    )


def test_random_weights_are_asked_no_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "0.27b", "--kind", "JSON by schema", "--no-save"]) == 1
    assert "0.27b has random weights" in capsys.readouterr().err


SCHEMA = json.dumps({"type": "object", "required": ["city"]})


def reply(text: str, reason: str = "stop") -> dict[str, Any]:
    return {"text": text, "output_ids": [1, 2], "meta_info": {"finish_reason": {"type": reason}}}


@pytest.mark.parametrize(
    ("of_server", "schema"),
    [
        (reply("In Rome."), ""),
        (reply('{"city": "Rome"}'), SCHEMA),
        # An answer that was cut cannot be read.
        (reply('{"city": "Ro', "length"), SCHEMA),
    ],
)
def test_a_whole_answer_is_its_tokens(of_server: dict[str, Any], schema: str) -> None:
    assert whole_answer("ours", of_server, schema) == (1, 2)


@pytest.mark.parametrize(
    ("of_server", "message"),
    [
        (reply("", "abort"), "ours: an answer ended by"),
        (reply("In Rome."), "ours: an answer has no city: In Rome."),
        (reply('{"town": "Rome"}'), "an answer has no city"),
        (reply("3"), "an answer has no city"),
    ],
)
def test_an_answer_that_was_aborted_or_keeps_no_schema_ends_the_run(
    of_server: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineFailure, match=message):
        whole_answer("ours", of_server, SCHEMA)


def test_random_prompts_are_equal_from_run_to_run_and_fit_the_vocabulary() -> None:
    prompts = random_ids(300)
    assert prompts == random_ids(300)
    (of_kind,) = prompts.values()
    assert {token for prompt in of_kind for token in prompt} <= set(range(FIRST_FILLER, 300))
    assert len({tuple(prompt) for prompt in of_kind}) == len(of_kind)
