from support.pipelines import make_request

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.scheduling.age_limit import AgeLimit, RequestAges


def test_only_what_is_older_than_the_limit_is_overdue_and_only_once() -> None:
    ages = AgeLimit(10.0)
    first, second = make_request("first", [1]), make_request("second", [1])
    ages.start(first, 0.0)
    ages.start(second, 5.0)
    assert ages.overdue(10.0) == []
    assert ages.overdue(10.5) == [first]
    assert ages.overdue(10.5) == []
    assert ages.overdue(100.0) == [second]


def test_who_has_left_is_not_overdue_and_a_second_start_does_not_count() -> None:
    ages = AgeLimit(10.0)
    left, stayed = make_request("left", [1]), make_request("stayed", [1])
    ages.start(left, 0.0)
    ages.start(stayed, 0.0)
    ages.start(stayed, 9.0)
    ages.stop(left)
    ages.stop(left)
    assert ages.overdue(11.0) == [stayed]


def test_without_a_limit_nobody_is_overdue() -> None:
    ages = AgeLimit(None)
    ages.start(make_request("r", [1]), 0.0)
    assert ages.overdue(1e9) == []


def test_who_was_held_up_on_the_way_is_overdue_by_its_own_start() -> None:
    ages = AgeLimit(10.0)
    requests = {start: make_request(str(start), [1]) for start in (0.0, 4.0, 7.0, 2.0, 5.0)}
    for start, request in requests.items():
        ages.start(request, start)
    for now_s in (10.5, 12.5, 14.5, 15.5, 17.5):
        assert ages.overdue(now_s) == [requests[now_s - 10.5]]


def test_a_request_that_ended_has_no_clock_left_of_either_kind() -> None:
    ages = RequestAges(1.0, 1.0)
    waited, ran = make_request("a", [1]), make_request("b", [1])
    for request in (waited, ran):
        ages.waits(request, 0.0)
    ages.scheduled([Chunk(ran, 0, 1, is_decode=False, samples=True)], 0.0)
    assert len(ages.overdue(0.5)) == 0
    ages.ended(waited)
    ages.ended(ran)
    assert ages.overdue(9.0) == []
