"""Knobs change between two steps, within their ranges, for a time or for good."""

from dataclasses import fields

import pytest
from support.pipelines import FakePipeline, make_request, new_scheduler

from sgl_pipeline.args import POLICIES, ThrottleArgs
from sgl_pipeline.errors import RequestError
from sgl_pipeline.pipeline.throttle_control import ThrottleControl
from sgl_pipeline.records.throttle_change import Author, ThrottleChange

ME = Author("admin", "10.0.0.1")
START = ThrottleArgs(policy="no-ut", max_prefill_tokens=64, min_prefill_tokens=4)


class Wheel:
    """A control over a pipeline in which a long prompt waits."""

    def __init__(self) -> None:
        scheduler = new_scheduler(throttle=START, num_pages=512, num_stages=2, context_length=2000)
        self.control = ThrottleControl(scheduler, START, "radix", most_prefill_tokens=4096)
        self.pipeline = FakePipeline(scheduler, 4)
        self.pipeline.core.throttle = self.control
        scheduler.add(make_request("long", [1] * 1200, 1))

    def step_tokens(self, now_s: float = 0.0) -> int:
        """Of the next step."""
        self.pipeline.now_s = now_s
        microbatch = self.pipeline.schedule()
        assert microbatch is not None
        self.pipeline.complete()
        return microbatch.num_tokens

    def take_changes(self) -> list[ThrottleChange]:
        """The changes since the last call."""
        events, self.control.events = self.control.events, []
        return [event for event in events if isinstance(event, ThrottleChange)]

    def set(self, now_s: float = 0.0, revert_after_s: float | None = None, **knobs: object) -> None:
        self.control.change(knobs, ME, now_s, revert_after_s)  # type: ignore[arg-type]


@pytest.fixture
def wheel() -> Wheel:
    return Wheel()


def test_every_field_of_the_throttle_is_a_knob(wheel: Wheel) -> None:
    names = {field.name for field in fields(ThrottleArgs)} | {"accounting"}
    assert set(wheel.control.knobs) == set(wheel.control.ranges) == names


def test_the_next_step_is_decided_by_the_new_knobs(wheel: Wheel) -> None:
    assert wheel.step_tokens() == 64
    wheel.set(max_prefill_tokens=16)
    assert wheel.step_tokens() == 16
    wheel.set(policy="sarathi", max_prefill_tokens=128)
    assert wheel.step_tokens() == 128
    wheel.set(policy="no-ut", max_prefill_tokens=None, prefill_spread_steps=100)
    assert wheel.step_tokens() == -(-(1200 - 64 - 16 - 128) // 100)


def test_the_accounting_is_what_the_policy_is_told(wheel: Wheel) -> None:
    wheel.set(accounting="naive", prefill_spread_steps=100, max_prefill_tokens=2048)
    seen = wheel.pipeline.scheduler
    seen.add(make_request("same", [1] * 1200, 1))
    assert wheel.step_tokens() == 24
    wheel.set(accounting="radix")
    assert wheel.step_tokens() == 12


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"prefill_spread_steps": 0}, "prefill_spread_steps is 0; it must be between 1 and 1024"),
        ({"prefill_spread_steps": 1025}, "must be between 1 and 1024"),
        ({"max_prefill_tokens": 4097}, "must be between 1 and 4096"),
        ({"max_prefill_tokens": 0}, "must be between 1 and 4096"),
        ({"min_prefill_tokens": 0}, "must be between 1 and 4096"),
        ({"min_prefill_tokens": None}, "min_prefill_tokens is None; it must be between"),
        ({"min_prefill_tokens": 65}, "between 1 and --chunked-prefill-size 64"),
        ({"pause_free_share": -0.1}, "must be between 0.0 and 0.999"),
        ({"pause_free_share": 1.0}, "must be between 0.0 and 0.999"),
        ({"pause_free_share": float("nan")}, "must be between 0.0 and 0.999"),
        ({"policy": "fast"}, "it must be one of throttle, throttle-time, throttle-adaptive"),
        ({"accounting": "none"}, "it must be one of radix, radix-unshared"),
        ({"pp": 3}, "there is no knob 'pp'; there are policy,"),
        (
            {"policy": "throttle-adaptive", "max_prefill_tokens": None},
            "would give a step 8192 prefill tokens, the stages have memory for 4096",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_range_and_changes_nothing(
    wheel: Wheel, knobs: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=r"must be|there (is|are)|have memory") as refused:
        wheel.set(**knobs)
    assert refused.value.status_code == 400 and message in str(refused.value)
    assert wheel.control.knobs["max_prefill_tokens"] == 64 and not wheel.control.state().history
    assert wheel.step_tokens() == 64


def test_every_policy_can_be_chosen(wheel: Wheel) -> None:
    for policy in POLICIES:
        wheel.set(policy=policy)
        assert wheel.step_tokens() > 0


def test_a_change_knows_who_when_what_and_from_which_step_on(wheel: Wheel) -> None:
    wheel.step_tokens()
    wheel.set(7.5, 30.0, prefill_spread_steps=4, min_prefill_tokens=4)
    (change,) = wheel.take_changes()
    assert (change.change, change.cause, change.author) == (0, "operator", ME)
    assert (change.changed_s, change.first_step, change.revert_after_s) == (7.5, 1, 30.0)
    assert (change.before, change.after) == (
        {"prefill_spread_steps": 8},
        {"prefill_spread_steps": 4},
    )
    assert wheel.control.state().history == (change,)
    assert not wheel.take_changes()


def test_equal_knobs_are_no_change(wheel: Wheel) -> None:
    wheel.set(1.0, 5.0, max_prefill_tokens=64)
    state = wheel.control.state()
    assert not state.history and state.reverts_at_s is None


def test_a_change_goes_back_when_its_time_is_over(wheel: Wheel) -> None:
    wheel.set(10.0, 5.0, max_prefill_tokens=16)
    assert wheel.control.state().reverts_to == {"max_prefill_tokens": 64}
    assert wheel.step_tokens(14.9) == 16
    assert wheel.step_tokens(15.0) == 64
    causes = [change.cause for change in wheel.take_changes()]
    assert causes == ["operator", "revert"]
    assert wheel.step_tokens(30.0) == 64 and not wheel.take_changes()


def test_trials_one_after_the_other_go_back_to_where_the_first_began(wheel: Wheel) -> None:
    wheel.set(10.0, 5.0, max_prefill_tokens=16)
    wheel.set(12.0, 5.0, prefill_spread_steps=2)
    assert wheel.step_tokens(16.0) == 16
    wheel.step_tokens(17.0)
    assert wheel.control.knobs == wheel.control.at_start


def test_a_change_that_stays_keeps_the_trial_before_it(wheel: Wheel) -> None:
    wheel.set(10.0, 5.0, max_prefill_tokens=16)
    wheel.set(12.0, max_prefill_tokens=16)
    assert wheel.step_tokens(60.0) == 16


def test_undo_goes_back_and_forth(wheel: Wheel) -> None:
    with pytest.raises(RequestError, match="nothing to undo") as refused:
        wheel.control.undo(ME, 1.0)
    assert refused.value.status_code == 409
    wheel.set(2.0, 50.0, max_prefill_tokens=16)
    wheel.control.undo(ME, 3.0)
    assert wheel.step_tokens(100.0) == 64
    wheel.control.undo(ME, 101.0)
    assert wheel.step_tokens(200.0) == 16


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_the_time_of_a_trial_has_bounds(wheel: Wheel, seconds: float) -> None:
    with pytest.raises(RequestError, match=r"revert_after_s .*0 .*604800"):
        wheel.set(0.0, seconds, max_prefill_tokens=16)
    assert not wheel.control.state().history
