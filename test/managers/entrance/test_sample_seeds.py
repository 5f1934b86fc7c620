from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_pipeline.managers.entrance.sample_seeds import spread_samples


def spread(**fields: Any) -> GenerateReqInput:
    request = GenerateReqInput(**fields)
    spread_samples(request)
    # What follows in upstream's front must still take it.
    request.normalize_batch_and_arguments()
    return request


def seeds(request: GenerateReqInput) -> list[Any]:
    assert isinstance(request.sampling_params, list)
    return [one["sampling_seed"] for one in request.sampling_params]


def test_each_sample_of_a_prompt_gets_the_next_seed() -> None:
    request = spread(text="a", sampling_params={"n": 3, "sampling_seed": 7, "top_k": 4})
    assert request.text == ["a"] * 3
    assert seeds(request) == [7, 8, 9]
    assert request.parallel_sample_num == 1
    assert {one["top_k"] for one in request.sampling_params} == {4}


def test_samples_stay_in_the_order_of_the_prompts() -> None:
    request = spread(
        input_ids=[[1, 2], [3]],
        sampling_params={"n": 2, "sampling_seed": 0},
        rid=["x", "y"],
        cache_salt=["s", "t"],
    )
    assert request.input_ids == [[1, 2], [1, 2], [3], [3]]
    assert seeds(request) == [0, 1, 0, 1]
    assert request.rid == ["x_0", "x_1", "y_0", "y_1"]
    assert request.cache_salt == ["s", "s", "t", "t"]


def test_the_token_ids_of_one_prompt_are_one_prompt() -> None:
    assert (
        spread(input_ids=[5, 6], sampling_params={"n": 2, "sampling_seed": 1}).input_ids
        == [[5, 6]] * 2
    )


def test_parameters_of_each_prompt_keep_their_own_seed() -> None:
    request = spread(
        text=["a", "b"],
        sampling_params=[{"n": 2, "sampling_seed": 5}, {"n": 2, "temperature": 0.5}],
    )
    assert request.text == ["a", "a", "b", "b"]
    assert seeds(request) == [5, 6, None, None]


def test_seeds_wrap_where_upstreams_range_ends() -> None:
    request = spread(text="a", sampling_params={"n": 2, "sampling_seed": 2**63 - 1})
    assert seeds(request) == [2**63 - 1, -(2**63)]


@pytest.mark.parametrize(
    "sampling", [{}, {"n": 3}, {"sampling_seed": 3}, {"n": 1, "sampling_seed": 3}]
)
def test_what_needs_no_other_seed_is_left_alone(sampling: dict[str, Any]) -> None:
    request = GenerateReqInput(text="a", sampling_params=sampling)
    spread_samples(request)
    assert request.text == "a" and request.sampling_params is sampling


def test_a_seed_that_is_no_number_is_left_for_upstream_to_refuse() -> None:
    assert seeds(spread(text="a", sampling_params={"n": 2, "sampling_seed": "x"})) == ["x", "x"]


def test_a_request_without_a_prompt_is_left_for_upstream_to_refuse() -> None:
    spread_samples(GenerateReqInput(sampling_params={"n": 2, "sampling_seed": 1}))
    spread_samples(GenerateReqInput(text=[], sampling_params={"n": 2, "sampling_seed": 1}))


def test_log_probabilities_asked_for_each_prompt_stay_with_it() -> None:
    request = spread(
        text=["a", "b"],
        sampling_params={"n": 2, "sampling_seed": 1},
        return_logprob=[True, False],
        logprob_start_len=[0, -1],
        top_logprobs_num=[2, 0],
        token_ids_logprob=[[5, 6], [7]],
    )
    assert request.return_logprob == [True, True, False, False]
    assert request.logprob_start_len == [0, 0, -1, -1]
    assert request.top_logprobs_num == [2, 2, 0, 0]
    assert request.token_ids_logprob == [[5, 6], [5, 6], [7], [7]]


def test_token_ids_that_are_the_same_for_all_prompts_are_not_taken_for_prompts() -> None:
    request = spread(
        text=["a", "b"], sampling_params={"n": 2, "sampling_seed": 1}, token_ids_logprob=[5, 6]
    )
    assert request.token_ids_logprob == [[5, 6]] * 4


def test_each_sample_of_a_prompt_has_a_room_of_its_own() -> None:
    request = spread(
        text="a",
        sampling_params={"n": 3, "top_k": 4},
        bootstrap_host="h",
        bootstrap_port=None,
        bootstrap_room=2**63 - 2,
    )
    assert (request.text, request.parallel_sample_num) == (["a"] * 3, 1)
    assert request.bootstrap_room == [2**63 - 2, 2**63 - 1, 0]
    assert request.bootstrap_host == ["h"] * 3 and request.bootstrap_port == [None] * 3
    assert {one["top_k"] for one in request.sampling_params} == {4}
    assert seeds(request) == [None] * 3


def test_a_room_for_each_sample_stays() -> None:
    """As a router sends a chat of several choices."""
    request = spread(
        input_ids=[5, 6],
        sampling_params={"n": 2, "sampling_seed": 7},
        bootstrap_host=["h", "h"],
        bootstrap_port=[1, 1],
        bootstrap_room=[30, 40],
    )
    assert request.input_ids == [[5, 6]] * 2 and seeds(request) == [7, 8]
    assert request.bootstrap_room == [30, 40] and request.bootstrap_port == [1, 1]


def test_a_room_for_each_prompt_is_followed_by_those_of_its_samples() -> None:
    request = spread(
        text=["a", "b"],
        sampling_params={"n": 2},
        bootstrap_host=["h", "i"],
        bootstrap_port=[1, 2],
        bootstrap_room=[30, 40],
    )
    assert request.text == ["a", "a", "b", "b"]
    assert request.bootstrap_room == [30, 31, 40, 41]
    assert request.bootstrap_host == ["h", "h", "i", "i"]
    assert request.bootstrap_port == [1, 1, 2, 2]


def test_one_room_counts_on_over_prompts_of_one_sample() -> None:
    request = spread(text=["a", "b"], bootstrap_host="h", bootstrap_room=5)
    assert request.text == ["a", "b"] and request.bootstrap_room == [5, 6]


def test_a_list_for_a_single_sample_is_its_entry() -> None:
    request = spread(text="a", bootstrap_host=["h"], bootstrap_port=[1], bootstrap_room=[5])
    assert request.is_single
    assert (request.bootstrap_host, request.bootstrap_port, request.bootstrap_room) == ("h", 1, 5)
