import math
from array import array
from typing import Any, get_type_hints

import msgspec
import pytest
from sglang.srt.managers import io_struct
from sglang.srt.mem_cache.utils import storage_namespace_seed
from sglang.srt.sampling.sampling_params import SamplingParams
from support.front_model import CONTEXT_LENGTH, TURN_END, VOCAB_SIZE, byte_tokenizer
from support.upstream_front import LIMITS, POOL_TOKENS, generate

from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.command_line.model_files import ModelLimits
from sgl_pipeline.managers.front import sglang_requests
from sgl_pipeline.managers.front.priority_rules import PriorityRules
from sgl_pipeline.managers.front.sglang_requests import RequestIntake
from sgl_pipeline.managers.upstream.stop_text import StopTextCheck
from sgl_pipeline.managers.upstream.upstream_messages import GenerateMessage, SamplingMessage
from sgl_pipeline.requests import LogprobSpec, Request


def intake(
    random_seed: int | None = None,
    pool_tokens: int = POOL_TOKENS,
    priorities: PriorityRules | None = None,
) -> RequestIntake:
    rules = priorities or PriorityRules()
    return RequestIntake(LIMITS, pool_tokens, byte_tokenizer(), random_seed, rules)


def build(sampling: Any = None, prompt: Any = "hello", **fields: Any) -> Request:
    return intake().build(generate("r1", prompt, sampling=sampling, **fields), now_s=2.5)


def refusal(sampling: Any = None, prompt: Any = "hello", **fields: Any) -> str:
    with pytest.raises(RequestError) as caught:
        build(sampling, prompt, **fields)
    assert caught.value.status_code == 400
    return str(caught.value)


def altered(**fields: Any) -> io_struct.TokenizedGenerateReqInput:
    """A request whose sampling parameters were changed behind the HTTP layer's back."""
    message = generate("r1", "hello")
    for name, value in fields.items():
        setattr(message.sampling_params, name, value)
    return message


def test_a_plain_request_keeps_what_the_user_asked() -> None:
    request = build(
        {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "sampling_seed": 3}
    )
    assert request.prompt_ids == byte_tokenizer().encode("hello")
    assert (request.request_id, request.arrival_s) == ("r1", 2.5)
    spec = request.sampling
    assert (spec.temperature, spec.top_p, spec.top_k, spec.min_p) == (0.5, 0.9, 7, 0.1)
    assert spec.seed == 3
    assert request.stops.max_new_tokens == 8
    assert request.stops.stop_token_ids == {TURN_END}
    assert request.stops.check_text is None


def test_temperature_zero_is_greedy_and_no_top_k_means_all() -> None:
    assert build({"temperature": 0}).sampling.is_greedy
    assert not build({"temperature": 1.0}).sampling.is_greedy
    assert build({"top_k": -1}).sampling.top_k == 0


def test_a_stop_id_outside_the_vocabulary_is_legal_and_never_matches() -> None:
    request = intake().build(altered(stop_token_ids={VOCAB_SIZE + 7}), 0.0)
    assert VOCAB_SIZE + 7 in request.stops.stop_token_ids


def test_the_default_maximum_is_cut_near_the_end_of_the_context() -> None:
    prompt = "x" * (CONTEXT_LENGTH - 20)
    assert build({"max_new_tokens": 128}, prompt).stops.max_new_tokens == 20


def test_asking_for_nothing_is_no_feature() -> None:
    nothing = build({"logit_bias": {}, "min_new_tokens": 0, "sampling_seed": 3}).sampling
    assert nothing == build({"sampling_seed": 3}).sampling
    assert build({"logit_bias": {"5": 0.0}}).sampling.logit_bias == ()


def test_penalties_are_kept_as_asked() -> None:
    asked = {"frequency_penalty": -2, "presence_penalty": 0.5, "repetition_penalty": 1.25}
    spec = build(asked).sampling
    assert {name: getattr(spec, name) for name in asked} == asked
    assert spec.penalises_output
    assert not build().sampling.penalises_output


def test_a_logit_bias_names_each_token_once_and_the_last_one_counts() -> None:
    spec = build({"logit_bias": {"5": 1, "07": -100.0, "05": 2.5}}).sampling
    assert spec.logit_bias == ((5, 2.5), (7, -100.0))


def test_min_new_tokens_masks_stop_and_eos_ids_even_where_those_are_ignored() -> None:
    for ignore_eos in (False, True):
        message = altered(
            min_new_tokens=8, stop_token_ids={9, VOCAB_SIZE + 7, -1}, ignore_eos=ignore_eos
        )
        spec = intake().build(message, 0.0).sampling
        assert spec.min_new_tokens == 8
        assert spec.masked_token_ids == tuple(sorted({9, TURN_END}))
    assert build({"stop_token_ids": [9]}).sampling.masked_token_ids == ()


def test_the_prompt_that_goes_ahead_of_several_samples_may_carry_their_min_new_tokens() -> None:
    """The front sends it with `max_new_tokens` 0 and everything else as the samples have it."""
    message = generate("r1", "hello", sampling={"max_new_tokens": 0, "min_new_tokens": 8})
    assert intake().build(message, 0.0).stops.max_new_tokens == 0


def test_min_new_tokens_is_free_where_no_maximum_is_named() -> None:
    message = generate("r1", "hello", sampling={"max_new_tokens": None, "min_new_tokens": 10_000})
    assert intake().build(message, 0.0).sampling.min_new_tokens == 10_000


def test_stop_ids_join_the_eos_ids_unless_those_are_ignored() -> None:
    assert build({"stop_token_ids": [9]}).stops.stop_token_ids == {9, TURN_END}
    assert build({"stop_token_ids": [9], "ignore_eos": True}).stops.stop_token_ids == {9}


def test_stop_strings_and_expressions_become_a_text_check() -> None:
    assert isinstance(build({"stop": ["x", "yy"]}).stops.check_text, StopTextCheck)
    assert isinstance(build({"stop_regex": "x|yy"}).stops.check_text, StopTextCheck)


def test_without_a_maximum_the_room_is_the_smaller_of_pool_and_context() -> None:
    message = generate("r1", "hello", sampling={"max_new_tokens": None})
    assert intake().build(message, 0.0).stops.max_new_tokens == POOL_TOKENS - 5
    large = intake(pool_tokens=10_000).build(message, 0.0)
    assert large.stops.max_new_tokens == CONTEXT_LENGTH - 5


def test_a_request_without_a_seed_gets_its_own_and_random_seed_repeats_them() -> None:
    message = generate("r1", "hello")
    drawn = {intake().build(message, 0.0).sampling.seed for _ in range(4)}
    assert len(drawn) == 4
    again = [intake(random_seed=5).build(message, 0.0).sampling.seed for _ in range(2)]
    assert again[0] == again[1]


def test_a_negative_seed_is_taken_as_a_non_negative_one() -> None:
    assert 0 <= build({"sampling_seed": -(2**63)}).sampling.seed < 2**63


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *((("a", "bc"), ("ab", "c")), (("a", None), (None, "a")), (("a", None), (None, None))),
        *((("", None), (None, None)), (("", None), (None, "")), (("ä", None), ("a", None))),
    ],
)
def test_different_cache_keys_never_share_a_namespace(first: Any, second: Any) -> None:
    namespaces = [
        build(extra_key=key, cache_salt=salt).cache_namespace for key, salt in (first, second)
    ]
    assert namespaces[0] != namespaces[1]
    assert namespaces == [storage_namespace_seed(key, salt) or "" for key, salt in (first, second)]


def test_a_request_gets_the_priority_that_the_rules_give_it() -> None:
    message = generate("r1", "hello", priority=7)
    assert intake().build(message, 0.0).priority == 0
    assert intake(priorities=PriorityRules(True)).build(message, 0.0).priority == 7


def wanted(prompt: str = "hello", sampling: Any = None, **fields: Any) -> LogprobSpec | None:
    return build(sampling, prompt, return_logprob=True, **fields).logprobs


def test_log_probabilities_are_kept_as_asked_and_none_are_the_default() -> None:
    assert build(top_logprobs_num=5, token_ids_logprob=[3], logprob_start_len=1).logprobs is None
    assert wanted() == LogprobSpec(5)
    assert wanted(logprob_start_len=5) == LogprobSpec(5)
    assert wanted(top_logprobs_num=3, token_ids_logprob=[7, 7, 0], logprob_start_len=2) == (
        LogprobSpec(2, 3, (7, 7, 0))
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"top_logprobs_num": 129}, "top_logprobs_num .* between 0 and 128"),
        ({"top_logprobs_num": -1}, "top_logprobs_num"),
        ({"top_logprobs_num": 10**12}, "top_logprobs_num"),
        ({"token_ids_logprob": [5, VOCAB_SIZE]}, f"{VOCAB_SIZE} is outside the vocabulary"),
        ({"token_ids_logprob": [-1]}, "-1 is outside the vocabulary"),
        ({"token_ids_logprob": [5] * 1025}, "1024 ids, got 1025"),
        ({"logprob_start_len": 6}, "logprob_start_len must be between 0 and 5, got 6"),
        ({"logprob_start_len": -2}, "logprob_start_len"),
        ({"logprob_start_len": -(2**62)}, "logprob_start_len"),
    ],
)
def test_log_probabilities_are_bounded(fields: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        build(return_logprob=True, **fields)


def test_those_of_a_prompt_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_requests, "MAX_PROMPT_LOGPROBS", 20)
    assert wanted(top_logprobs_num=3, logprob_start_len=0) == LogprobSpec(0, 3)
    with pytest.raises(RequestError, match=r"25 .* 20;"):
        wanted(top_logprobs_num=4, logprob_start_len=0)


def test_no_more_are_asked_for_than_the_vocabulary_has() -> None:
    limits = ModelLimits(CONTEXT_LENGTH, 100, LIMITS.eos_token_ids)
    small = RequestIntake(limits, POOL_TOKENS, byte_tokenizer(), None, PriorityRules())
    message = generate("r1", [5], return_logprob=True, top_logprobs_num=101)
    with pytest.raises(RequestError, match="between 0 and 100"):
        small.build(message, 0.0)


@pytest.mark.parametrize(
    ("prompt", "named"),
    [([], "empty"), ([3, VOCAB_SIZE], f"token id {VOCAB_SIZE}"), ([-1], "token id -1")],
)
def test_a_prompt_that_is_no_list_of_known_tokens_is_refused(prompt: Any, named: str) -> None:
    assert named in refusal(prompt=prompt)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.5),
        ("min_p", 2.0),
        ("top_k", 0),
        ("top_k", 2**40),
        ("max_new_tokens", -1),
        ("max_new_tokens", 2**40),
        ("sampling_seed", 2**80),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.1),
        ("repetition_penalty", True),
        ("min_new_tokens", -1),
        ("min_new_tokens", 9),
        ("logit_bias", {"5": math.inf}),
        ("logit_bias", {"5": 1e31}),
        ("logit_bias", {"five": 1.0}),
        ("logit_bias", {"-1": 1.0}),
        ("logit_bias", {str(VOCAB_SIZE): 1.0}),
        ("logit_bias", {"9" * 5000: 1.0}),
        ("logit_bias", {"0" * number + "1": 1.0 for number in range(1025)}),
        ("stop_token_ids", set(range(1025))),
    ],
)
def test_every_number_is_bounded_whatever_the_http_layer_let_through(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        intake().build(altered(**{name: value}), 0.0)


@pytest.mark.parametrize("stops", [[""], ["x" * 5000], ["x"] * 33])
def test_stop_strings_are_bounded_in_number_and_length(stops: list[str]) -> None:
    with pytest.raises(RequestError, match="stop string"):
        intake().build(altered(stop_strs=stops), 0.0)


@pytest.mark.parametrize("regexes", ["(", [""], ["x" * 300], ["x"] * 33, [7]])
def test_stop_expressions_are_checked_whatever_the_http_layer_let_through(regexes: Any) -> None:
    with pytest.raises(RequestError, match="stop_regex"):
        intake().build(altered(stop_regex_strs=regexes), 0.0)


def test_a_namespace_is_bounded() -> None:
    assert "extra_key" in refusal(extra_key="x" * 5000)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"input_embeds": [[0.5]]}, "input_embeds"),
        ({"session_id": "s"}, "sessions"),
        ({"lora_id": "l"}, "LoRA"),
        ({"custom_logit_processor": "{}"}, "custom_logit_processor"),
        ({"bootstrap_room": 0}, "disaggregation"),
    ],
)
def test_a_feature_that_is_not_built_is_refused_by_name(fields: Any, named: str) -> None:
    assert named in refusal(**fields)


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"beam_width": 2}, "beam"),
    ],
)
def test_a_sampling_option_that_is_not_built_is_refused_by_name(sampling: Any, named: str) -> None:
    assert named in refusal(sampling)


# Fields that do nothing upstream either, at the configuration that this server runs with.
WITHOUT_EFFECT = {
    "input_text": "the ids are what counts",
    "return_flat_raw_top_logprobs": "the front flattens what it gets",
    "sampling_logprobs_mode": "only with return_sampling_mask",
    "routed_experts_start_len": "only with return_routed_experts",
    "bootstrap_pair_key": "read by nothing of upstream's",
    "decode_tp_size": "read by nothing of upstream's",
    "routed_dp_rank": "upstream's front refuses all but the only rank",
    "routing_key": "only with a schedule policy that is refused at start",
    "no_logs": "the scheduler logs no request",
    "num_items_assigned": "only with multimodal input",
    "encoder_urls": "only with multimodal input",
    "time_stats": "metrics are refused at start",
    "pp_prefetch_ticketed": "internal to upstream's pipeline",
    "lora_name": "only with lora_id",
}

SAMPLING_WITHOUT_EFFECT = {
    "n": "fanned out by upstream's front",
    "stop": "normalized into stop_strs",
    "stop_regex": "normalized into stop_regex_strs",
    "stop_str_max_len": "derived",
    "stop_regex_max_len": "derived",
    "is_normalized": "derived",
}


def test_no_field_of_a_request_is_accepted_and_ignored() -> None:
    fields = {field.name for field in msgspec.structs.fields(io_struct.TokenizedGenerateReqInput)}
    read = set(get_type_hints(GenerateMessage))
    assert fields == read | set(WITHOUT_EFFECT) | set(sglang_requests._UNBUILT_FIELDS)
    sampling = {field.name for field in msgspec.structs.fields(SamplingParams)}
    unbuilt = set(sglang_requests._UNBUILT_SAMPLING)
    read = set(get_type_hints(SamplingMessage))
    assert sampling == read | set(SAMPLING_WITHOUT_EFFECT) | unbuilt


def test_the_wire_carries_token_ids_as_an_array() -> None:
    assert isinstance(generate("r1", "hello").input_ids, array)
