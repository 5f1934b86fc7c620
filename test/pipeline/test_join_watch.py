"""A newcomer's silence is measured against the longest that came to an end."""

from sgl_pipeline.pipeline.join_watch import PATIENCE, JoinWatch


def silent(watch: JoinWatch, now_s: float) -> list[int]:
    return [worker for worker, _ in watch.silent_workers(now_s)]


def test_the_first_may_take_as_long_as_the_limit() -> None:
    watch = JoinWatch(5.0, 120.0)
    watch.asked(0, "start", 10.0)
    assert silent(watch, 130.0) == [] and silent(watch, 130.1) == [0]


def test_who_says_that_it_gets_on_is_waited_for() -> None:
    watch = JoinWatch(5.0, 120.0)
    watch.asked(0, "load", 0.0)
    watch.heard(0, 0.5, is_done=True)
    watch.asked(1, "load", 0.0)
    for half_second in range(1, 100):
        watch.heard(1, half_second / 2, is_done=False)
        assert silent(watch, half_second / 2 + 4.9) == []
    ((worker, reason),) = watch.silent_workers(49.5 + 5.1)
    assert worker == 1
    assert "silent for 5.1 s while it loaded" in reason and "may take 5.0 s" in reason
    watch.heard(1, 54.0, is_done=True)
    assert silent(watch, 1000.0) == []


def test_what_others_needed_is_granted_to_the_next() -> None:
    watch = JoinWatch(5.0, 120.0)
    watch.asked(0, "load", 0.0)
    watch.heard(0, 3.0, is_done=True)
    assert watch.bound_s("load") == 3.0 * PATIENCE
    assert watch.bound_s("start") == 120.0
    watch.asked(1, "load", 0.0)
    watch.heard(1, 100.0, is_done=True)
    assert watch.bound_s("load") == 120.0


def test_a_lost_worker_is_not_waited_for_and_an_unasked_word_counts_nothing() -> None:
    watch = JoinWatch(5.0, 10.0)
    watch.asked(0, "load", 0.0)
    watch.forget(0)
    watch.heard(0, 1.0, is_done=True)
    assert silent(watch, 1000.0) == [] and watch.bound_s("load") == 10.0


def test_who_had_no_core_was_not_silent_meanwhile() -> None:
    waits_s = {7: 100.0}
    watch = JoinWatch(5.0, 10.0, lambda worker: dict(waits_s))
    watch.asked(0, "load", 0.0)
    waits_s[7] = 104.0
    assert silent(watch, 13.9) == [] and silent(watch, 14.1) == [0]
    watch.heard(0, 14.0, is_done=False)
    assert silent(watch, 23.9) == [] and silent(watch, 24.1) == [0]
