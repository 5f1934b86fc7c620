from benchmark.speculation.draft_speed import (
    Answers,
    Load,
    loads_of,
    ratio_table,
    ratios,
    unequal,
)
from benchmark.speculation.prompts import SCHEMAS


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
    shared = Load("all kinds", 16, ((1,), (3,), (2,), (4,)), ("", schema) * 2)
    assert loads_of(prompts, 16) == [shared]
