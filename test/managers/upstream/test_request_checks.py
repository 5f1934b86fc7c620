from typing import Any

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from sgl_pipeline.managers.upstream.request_checks import (
    MAX_SAMPLES_PER_PROMPT,
    RefusedRequestError,
    check_decodable,
    check_inputs,
    check_logprob_lists,
    check_rooms,
    check_sequences,
)


def request(text: Any = "x", **sampling: Any) -> GenerateReqInput:
    return GenerateReqInput(text=text, sampling_params=sampling)


@pytest.mark.parametrize("samples", [0, -1, MAX_SAMPLES_PER_PROMPT + 1, 10**9, "3", 1.5])
def test_the_number_of_samples_is_bounded(samples: Any) -> None:
    with pytest.raises(RefusedRequestError, match="n must be between"):
        check_sequences(request(n=samples))


def test_prompts_times_samples_are_bounded_together() -> None:
    with pytest.raises(RefusedRequestError, match="sequences"):
        check_sequences(request(["x"] * 200, n=100))
    check_sequences(request(["x"] * 100, n=100))


def test_the_token_ids_of_one_prompt_are_not_many_prompts() -> None:
    check_sequences(GenerateReqInput(input_ids=[1] * 20_000, sampling_params={"n": 2}))


@pytest.mark.parametrize("regex", ["(", ["a", "(?=b)"], 7, {"a": 1}, "(" * 120_000])
def test_a_bad_stop_regex_is_refused_before_upstream_parses_it(regex: Any) -> None:
    with pytest.raises(RefusedRequestError, match="stop_regex"):
        check_sequences(request(stop_regex=regex))
    check_sequences(request(stop_regex="a|b"))


def test_a_client_cannot_claim_that_its_parameters_were_checked() -> None:
    unchecked = {"is_normalized": True, "temperature": 1e-60, "stop_regex_strs": "("}
    with pytest.raises(RefusedRequestError, match="is_normalized"):
        check_sequences(GenerateReqInput(text="a", sampling_params=unchecked))


def test_sampling_params_per_prompt_are_all_checked() -> None:
    several = GenerateReqInput(text=["a", "b"], sampling_params=[{}, {"n": 10**6}])
    with pytest.raises(RefusedRequestError):
        check_sequences(several)
    with pytest.raises(RefusedRequestError, match="object"):
        check_sequences(GenerateReqInput(text=["a"], sampling_params=["n"]))  # type: ignore[list-item]


@pytest.mark.parametrize("options", [[], [{}], [{}] * 3])
def test_sampling_params_are_as_many_as_prompts(options: list[Any]) -> None:
    with pytest.raises(RefusedRequestError, match="for 2 prompts"):
        check_sequences(GenerateReqInput(text=["a", "b"], sampling_params=options))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("top_k", 1.5),
        ("max_new_tokens", [1]),
        ("logit_bias", [1, 2]),
        ("stop_token_ids", "ab"),
        ("stop", 7),
        ("stop", ["x" * 2000]),
        ("custom_params", {"a": [[1]]}),
    ],
)
def test_sampling_params_of_the_wrong_type_are_named(name: str, value: Any) -> None:
    with pytest.raises(RefusedRequestError, match=name.split("_")[0]):
        check_sequences(request(**{name: value}))


def test_nulls_ask_for_the_default() -> None:
    check_sequences(request(temperature=None, stop=None, stop_token_ids=[5, None], n=None))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text": 7}, "text"),
        ({"text": ["a", 7]}, "text"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": [2**70]}, "input_ids"),
        ({"rid": ""}, "rid"),
        ({"rid": ["a", "x" * 513]}, "rid"),
        ({"rid": "HEALTH_CHECK_1"}, "HEALTH_CHECK"),
        ({"text": ["a"], "rid": ["HEALTH_CHECK_1"]}, "HEALTH_CHECK"),
        ({"image_data": "file:///etc/passwd"}, "image"),
        ({"video_data": ["a"]}, "video"),
        ({"audio_data": b"a"}, "audio"),
        ({"input_embeds": [[]]}, "input_embeds"),
        ({"session_params": {"id": "a"}}, "sessions"),
        ({"http_worker_ipc": "ipc:///tmp/x"}, "http_worker_ipc"),
        ({"text": "x" * 161}, "160 characters"),
        ({"text": ["x", "x" * 161]}, "160 characters"),
    ],
)
def test_inputs_that_upstream_cannot_handle_are_refused(fields: Any, named: str) -> None:
    with pytest.raises(RefusedRequestError, match=named):
        check_inputs(GenerateReqInput(**fields), context_length=10, is_health_check=False)


def test_ordinary_inputs_pass() -> None:
    for fields in ({"text": "x" * 160}, {"text": ["a", "b"]}, {"input_ids": [[1], [2]]}):
        check_inputs(GenerateReqInput(rid="a", **fields), context_length=10, is_health_check=False)
    check_inputs(EmbeddingReqInput(text="x" * 500), context_length=10, is_health_check=False)


def test_upstreams_own_health_check_passes() -> None:
    obj = GenerateReqInput(rid="HEALTH_CHECK_1", input_ids=[0])
    check_inputs(obj, context_length=10, is_health_check=True)


@pytest.mark.parametrize("tokens", [[-1], [[5, 2**32]], [2**70]])
def test_ids_that_no_tokenizer_decodes_are_refused(tokens: Any) -> None:
    with pytest.raises(RefusedRequestError, match="token id"):
        check_decodable(tokens)
    check_decodable([5, [7]])
    check_decodable(None)


@pytest.mark.parametrize(
    ("prompts", "fields"),
    [
        ("x", {"return_logprob": [True]}),
        ("x", {"top_logprobs_num": [1]}),
        ("x", {"logprob_start_len": [0]}),
        ("x", {"token_ids_logprob": [[1]]}),
        (["x", "y"], {"top_logprobs_num": [1]}),
        (["x", "y"], {"return_logprob": [True] * 3}),
        (["x", "y"], {"token_ids_logprob": [[1]]}),
    ],
)
def test_lists_of_logprob_options_need_an_entry_per_prompt(prompts: Any, fields: Any) -> None:
    with pytest.raises(RefusedRequestError, match=next(iter(fields))):
        check_logprob_lists(GenerateReqInput(text=prompts, **fields))


def test_logprob_options_for_all_prompts_or_for_each_pass() -> None:
    for fields in (
        {},
        {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [1, 2, 3]},
        {"return_logprob": [True, False], "token_ids_logprob": [[1], []]},
    ):
        check_logprob_lists(GenerateReqInput(text=["x", "y"], **fields))
    check_logprob_lists(GenerateReqInput(input_ids=[5, 6], token_ids_logprob=[1, 2, 3]))
    check_logprob_lists(GenerateReqInput(text="x", token_ids_logprob=[]))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"bootstrap_host": 5}, "bootstrap_host"),
        ({"bootstrap_port": "80"}, "bootstrap_port"),
        ({"bootstrap_room": "7"}, "bootstrap_room"),
        ({"bootstrap_room": True}, "bootstrap_room"),
        ({"bootstrap_room": 2**63}, "bootstrap_room"),
        ({"bootstrap_room": [1, "2"]}, "bootstrap_room"),
        ({"bootstrap_room": []}, "bootstrap_room: 0 entries for 2 prompts"),
        ({"bootstrap_room": [1, 2, 3]}, "bootstrap_room: 3 entries for 2 prompts"),
        ({"bootstrap_port": [1] * 5}, "bootstrap_port: 5 entries for 2 prompts"),
    ],
)
def test_a_routers_fields_are_of_their_types_and_one_for_each(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(RefusedRequestError, match=named):
        check_rooms(GenerateReqInput(text=["a", "b"], sampling_params={"n": 2}, **fields))


@pytest.mark.parametrize("rooms", [None, 7, [1, 2], [1, None], [1, 2, 3, 4]])
def test_a_router_may_give_one_room_or_one_for_each_prompt_or_sample(rooms: Any) -> None:
    hosts = ["h"] * len(rooms) if isinstance(rooms, list) else "h"
    check_rooms(
        GenerateReqInput(
            text=["a", "b"],
            sampling_params=[{"n": 2}, {"n": 2}],
            bootstrap_host=hosts,
            bootstrap_room=rooms,
        )
    )
    check_rooms(GenerateReqInput(text="a", bootstrap_room=[5]))
    check_rooms(EmbeddingReqInput(text="a"))
