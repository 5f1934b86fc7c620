"""What must have become of both halves of a request."""

from fault_schedules.fake_front import Client
from fault_schedules.room_clients import Pair
from fault_schedules.room_errors import is_its_own

from sgl_pipeline.disaggregation.room_limits import RoomLimits

# Within this time a server has met another one and told it of an end.
HEARSAY_S = 2.0


def judge(pair: Pair, limits: RoomLimits, *, is_joined: bool) -> None:
    """Asserts that no tokens came of a prompt that was not computed, and, where `is_joined`, that
    the end of a half has ended the other one.

    Args:
        is_joined: whatever one end of a stream said, the other one has heard.
    """
    if pair.prefill is None or pair.decode is None or not pair.is_alone:
        return
    first, second = pair.prefill.client, pair.decode.client
    has_tokens = second.ends[0].kind != "abort"
    is_read = first.ends[0].kind != "abort"
    assert is_read or not has_tokens or limits.falls_back, "whose prompt is it?"
    if is_joined and not (limits.falls_back and has_tokens):
        _check_told(first, second, limits.bootstrap_timeout_s)
        _check_told(second, first, limits.bootstrap_timeout_s)


def _check_told(one: Client, other: Client, memory_s: float) -> None:
    """Asserts that `other` has ended as `one` has, unless it ended before it could know, came when
    that was forgotten, or has a reason of its own."""
    end, other_end = one.ends[0], other.ends[0]
    could_know = one.ended_s + HEARSAY_S < other.ended_s
    comes_s = other.request.arrival_s + other.compile_s
    remembers = comes_s < one.ended_s + memory_s - HEARSAY_S
    if end.kind == "abort" and could_know and remembers:
        words = (end.message, end.status_code or 500)
        other_words = (other_end.message, other_end.status_code or 500)
        is_told = words == other_words or is_its_own(other_end)
        assert is_told, f"{end} here, and {other_end} there"
