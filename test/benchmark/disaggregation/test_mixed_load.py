"""The loads that prefill and decode apart are measured with."""

import pytest

from benchmark.disaggregation.mixed_load import LOADS, Kind, Place, arrivals_s

STREAMS = Kind(name="streams", input_tokens=8, output_tokens=100, clients=4)
PROMPTS = Kind(name="prompts", input_tokens=64, output_tokens=8, prefill_share=0.5)


def test_first_answers_are_of_all_lengths() -> None:
    assert [STREAMS.output_tokens_of(client, 0) for client in range(4)] == [25, 50, 75, 100]
    assert STREAMS.output_tokens_of(0, 1) == 100
    assert PROMPTS.output_tokens_of(0, 0) == 8


def test_prompts_arrive_evenly_at_their_share_of_a_core() -> None:
    assert arrivals_s(PROMPTS, 10.0, {"prompts": 1.0}) == [1.0, 3.0, 5.0, 7.0, 9.0]


def test_a_prompt_depends_on_its_place_alone_and_no_two_begin_alike() -> None:
    place = Place("load", 1, "streams", 2, 3)
    prompt = place.prompt(16, 32_000)
    assert place.prompt(64, 32_000)[:16] == prompt
    others = [
        Place("other", 1, "streams", 2, 3),
        Place("load", 2, "streams", 2, 3),
        Place("load", 1, "prompts", 2, 3),
        Place("load", 1, "streams", 3, 2),
        Place("load", 1, "streams", 2, 4),
    ]
    assert all(other.prompt(16, 32_000)[0] != prompt[0] for other in others)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_each_kind_either_has_clients_or_arrives(load) -> None:
    assert all(bool(kind.clients) != bool(kind.prefill_share) for kind in load.kinds)
