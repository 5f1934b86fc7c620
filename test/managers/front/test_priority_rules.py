import pytest

from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.front.priority_rules import PriorityRules


def test_larger_priorities_go_first_and_a_missing_one_last() -> None:
    priority = PriorityRules(True).priority
    assert priority(2) > priority(-1) > priority(-(2**63)) > priority(None)


def test_lower_priorities_go_first_when_asked_for_and_a_missing_one_still_last() -> None:
    priority = PriorityRules(True, schedule_low_priority_values_first=True).priority
    assert priority(-1) > priority(2) > priority(None)
    assert priority(2**63 - 1) > priority(None)


def test_without_priority_scheduling_all_are_alike() -> None:
    priority = PriorityRules().priority
    assert priority(5) == priority(None) == priority(-5)


def test_a_priority_is_refused_where_upstream_would_abort_it() -> None:
    priority = PriorityRules(abort_on_priority_when_disabled=True).priority
    priority(None)
    with pytest.raises(RequestError, match="priority is disabled") as caught:
        priority(0)
    assert caught.value.status_code == 503
