"""The same requests at every rate, others in every round."""

from pathlib import Path

import pytest

from sgl_pipeline.capacity.load import CapacityLoad, LengthRange, tokens_per_s
from sgl_pipeline.errors import ConfigurationError

LENGTHS = LengthRange(input_tokens=100, output_tokens=20, ratio=0.5)
LOAD = CapacityLoad(source=LENGTHS, num_requests=50, seed=3)


def shape(load: CapacityLoad, rate_per_s: float, number: int) -> list[tuple[int, int]]:
    return [(one.input_tokens, one.output_tokens) for one in load.requests(rate_per_s, number)]


@pytest.mark.parametrize("source", [LENGTHS, "sharegpt"])
def test_a_round_is_the_same_at_every_rate_but_for_a_factor(source: LengthRange | str) -> None:
    load = CapacityLoad(source=source, num_requests=50, seed=3)
    assert shape(load, 1.0, 0) == shape(load, 4.0, 0) != shape(load, 1.0, 1)
    slow, fast = (load.requests(rate, 0) for rate in (1.0, 4.0))
    assert [one.arrival_s for one in slow] == pytest.approx([4 * one.arrival_s for one in fast])
    assert {one.arrival_s for one in load.requests(float("inf"), 0)} == {0.0}


def test_lengths_are_within_their_range() -> None:
    for number in range(5):
        for inputs, outputs in shape(LOAD, 1.0, number):
            assert 50 <= inputs <= 100 and 10 <= outputs <= 20


def test_requests_that_are_served_alone_are_those_of_the_first_round() -> None:
    alone = LOAD.apart(4, 100.0)
    assert [one.input_tokens for one in alone] == [inputs for inputs, _ in shape(LOAD, 1.0, 0)[:4]]
    assert [one.arrival_s for one in alone] == [0.0, 100.0, 200.0, 300.0]


def test_prefixes_are_shared_as_asked() -> None:
    load = CapacityLoad(source=LENGTHS, num_requests=8, hit_rate=0.8, sharing_requests=8)
    requests = load.requests(1.0, 0)
    assert len({one.prompt[0].first for one in requests}) == 1
    assert all(one.prompt[0].length == int(0.8 * one.input_tokens) for one in requests)


def test_conversations_are_refused() -> None:
    load = CapacityLoad(source="sharegpt_multiturn", num_requests=5)
    with pytest.raises(ConfigurationError, match="sharegpt_multiturn holds conversations"):
        load.requests(1.0, 0)


def test_a_trace_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no trace"):
        CapacityLoad(source=str(tmp_path / "none.csv"), num_requests=5).requests(1.0, 0)


def test_tokens_of_failed_requests_do_not_count() -> None:
    requests = LOAD.requests(1.0, 0)[:2]
    first = requests[0].input_tokens + requests[0].output_tokens
    assert tokens_per_s(requests, [True, False], 2.0) == first / 2
    assert tokens_per_s(requests, [False, False], 0.0) == 0.0
