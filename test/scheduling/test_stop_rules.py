"""When a request ends."""

from collections.abc import Sequence

from support.pipelines import make_request

from sgl_pipeline.requests import GREEDY, FinishReason, Request, StopCheck, StopRules
from sgl_pipeline.scheduling.stop_rules import finish_reason


def request_with(
    output_ids: list[int], max_new_tokens: int, check: StopCheck | None = None
) -> Request:
    stops = StopRules(max_new_tokens, frozenset({2}), check)
    return Request("r", [5], GREEDY, stops, output_ids=output_ids)


def test_a_stop_token_ends_the_request_and_is_named() -> None:
    assert finish_reason(request_with([7, 2], 10)) == FinishReason("stop", matched=2)


def test_only_the_last_token_counts() -> None:
    assert finish_reason(request_with([2, 7], 10)) is None


def test_the_length_limit_ends_the_request() -> None:
    assert finish_reason(request_with([7, 8], 3)) is None
    assert finish_reason(request_with([7, 8, 9], 3)) == FinishReason("length")


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    assert finish_reason(request_with([7, 8, 2], 3)) == FinishReason("stop", matched=2)


def test_no_new_tokens_ends_after_prefill() -> None:
    assert finish_reason(request_with([], 0)) == FinishReason("length")


def test_a_stop_string_goes_before_a_stop_token() -> None:
    found = FinishReason("stop", matched="end")
    seen: list[list[int]] = []

    def check(output_ids: list[int]) -> FinishReason:
        seen.append(list(output_ids))
        return found

    assert finish_reason(request_with([7, 2], 2, check)) is found
    assert seen == [[7, 2]]


def test_a_failing_stop_check_ends_its_own_request_only() -> None:
    def check(output_ids: list[int]) -> FinishReason | None:
        raise ValueError("bad bytes")

    reason = finish_reason(request_with([7], 5, check))
    assert reason is not None
    assert (reason.kind, reason.status_code) == ("abort", 500)
    assert "bad bytes" in reason.message


def test_without_stop_tokens_only_the_length_counts() -> None:
    request = make_request("r", [1], 2)
    request.output_ids = [2]
    assert finish_reason(request) is None


class ScriptedConstraint:
    """Takes any token and gives what it was made with."""

    def __init__(self, answer: FinishReason | None) -> None:
        self.answer = answer
        self.accepted: list[int] = []

    def allowed_tokens_masks(self, draft_ids: Sequence[int] = ()) -> list[bytes]:
        return [b""] * (1 + len(draft_ids))

    def accept(self, token_id: int) -> FinishReason | None:
        self.accepted.append(token_id)
        return self.answer

    def forced_tokens(self) -> tuple[int, ...]:
        return ()

    def try_token(self, token_id: int) -> bool:
        return True

    def take_back(self) -> None: ...


def finish_under(answer: FinishReason | None, output_ids: list[int], limit: int):
    request = request_with(output_ids, limit)
    request.constraint = ScriptedConstraint(answer)
    finish = finish_reason(request)
    assert request.constraint.accepted == output_ids[-1:]
    return finish


def test_a_complete_constraint_ends_the_request_after_all_other_reasons() -> None:
    complete = FinishReason("stop", matched=9)
    assert finish_under(complete, [7, 9], 10) == complete
    assert finish_under(complete, [7, 9], 2) == FinishReason("length")
    assert finish_under(None, [7, 9], 10) is None
    assert finish_under(None, [], 0) == FinishReason("length")


def test_a_constraint_that_cannot_go_on_ends_the_request_before_all_other_reasons() -> None:
    failed = FinishReason("abort", None, "too slow", 400)
    assert finish_under(failed, [7, 2], 2) == failed
