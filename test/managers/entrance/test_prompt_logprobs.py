"""A decode server gives no log-probabilities of the prompt where a router adds those of prefill."""

from typing import Any

import pytest
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from sgl_pipeline.managers.entrance.prompt_logprobs import leave_to_prefill


def start_of(path: str = "/generate", **fields: Any) -> int | None:
    """`logprob_start_len` of a request to `path`, as upstream's front gets it."""
    values = {"text": "a", "return_logprob": True, "logprob_start_len": 0, "bootstrap_host": "h"}
    request = GenerateReqInput(**values | fields)
    leave_to_prefill(request, path)
    assert request.return_logprob
    request.normalize_batch_and_arguments()
    return request.logprob_start_len


def test_answers_that_a_router_merges_have_the_outputs_alone() -> None:
    assert start_of() == -1
    assert start_of(text=["a", "b"], logprob_start_len=[0, 1]) == [-1, -1]


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"bootstrap_host": None},
        {"bootstrap_host": FAKE_BOOTSTRAP_HOST},
        {"path": "/v1/completions"},
    ],
)
def test_elsewhere_the_decode_server_computes_what_is_asked_for(fields: dict[str, Any]) -> None:
    assert start_of(**fields) == 0


def test_other_requests_are_left_alone() -> None:
    leave_to_prefill(EmbeddingReqInput(text="a"), "/encode")
