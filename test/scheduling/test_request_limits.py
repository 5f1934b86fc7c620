"""What can never be served is refused with the limit and the knob."""

import pytest
from support.pipelines import make_request

from sgl_pipeline.errors import RequestError
from sgl_pipeline.scheduling.request_limits import RequestLimits

LIMITS = RequestLimits(context_length=100, pool_tokens=64)


@pytest.mark.parametrize(
    ("prompt_tokens", "new_tokens", "words"),
    [
        (0, 4, ["empty"]),
        (4, -1, ["-1", "negative"]),
        (101, 0, ["101", "100", "--context-length"]),
        (50, 51, ["50", "51", "100", "at most 50", "--context-length"]),
        (60, 6, ["60", "6", "64", "--max-total-tokens"]),
        (65, 0, ["65", "64", "--max-total-tokens"]),
    ],
)
def test_a_refusal_names_limit_and_knob(
    prompt_tokens: int, new_tokens: int, words: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        LIMITS.check(make_request("r", [1] * prompt_tokens, new_tokens))
    assert caught.value.status_code == 400
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("prompt_tokens", "new_tokens"), [(64, 0), (64, 1), (60, 5), (1, 64)])
def test_what_fits_alone_is_accepted(prompt_tokens: int, new_tokens: int) -> None:
    LIMITS.check(make_request("r", [1] * prompt_tokens, new_tokens))
