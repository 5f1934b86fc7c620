"""Which requests are offloaded: by a ratio, and by what is measured."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from sgl_pipeline.pipeline.offload_rates import WINDOW_S
from sgl_pipeline.pipeline.offload_rule import REST_S, OffloadRule
from sgl_pipeline.requests import GREEDY, Lease, Request, StopRules
from sgl_pipeline.throttle.attention_offload import Reading
from sgl_pipeline.wire.lease_orders import OffloadedWork

# Local attention reads twice as fast as an executor, the way takes 1 ms.
WORK = OffloadedWork(
    num_layers=2,
    local_tokens=1000,
    remote_tokens=500,
    local_s=0.02,
    remote_s=0.02,
    trip_s=0.022,
    wait_s=1e-6,
)


def request(num_tokens: int, *, is_leased: bool = False) -> Request:
    one = Request(f"r{num_tokens}", [1] * num_tokens, GREEDY, StopRules(max_new_tokens=100))
    one.lease = Lease("p:1", 1) if is_leased else None
    return one


@dataclass
class Scheduler:
    """The part of a scheduler that the rule looks at; no prompt is awaited."""

    here: list[Request] = field(default_factory=list)
    elsewhere: list[Request] = field(default_factory=list)
    pipeline_depth: int = 2
    step_times: Any = None

    @property
    def tier(self) -> Any:
        return self

    @property
    def arrivals(self) -> Any:
        return self

    @property
    def limits(self) -> Any:
        return self

    pool_tokens: int = 10_000

    def awaits_prompt(self, request: Request) -> bool:
        return False

    def requests(self) -> tuple[Request, ...]:
        return (*self.here, *self.elsewhere)


def rule_of(
    ratio: float | None, *, here: int = 10, elsewhere: int = 0, reading: Reading = "either"
) -> OffloadRule:
    """With so many requests of a thousand tokens, and rates that are known."""
    scheduler: Any = Scheduler(
        [request(1000) for _ in range(here)],
        [request(1000, is_leased=True) for _ in range(elsewhere)],
    )
    rule = OffloadRule(scheduler, ratio, reading)
    rule.lent_tokens = (5000,)
    rule.rates.note(WORK, 1.0, -WINDOW_S)
    rule.rates.take_wait_share(0.0)
    return rule


def refusal(rule: OffloadRule, now_s: float = 0.0, new_tokens: int = 1000) -> str | None:
    return rule.refusal(request(new_tokens), frozenset(), now_s)


def test_a_ratio_by_hand_bounds_the_offloaded_tokens() -> None:
    assert refusal(rule_of(0.5, elsewhere=3)) is None
    assert refusal(rule_of(0.5, elsewhere=5)) is None, "they are within it"
    assert (
        refusal(rule_of(0.5, elsewhere=6))
        == "6000 tokens are offloaded, the bound is 0.50 of 10000"
    )
    assert refusal(rule_of(0.0)) is not None
    assert refusal(rule_of(0.5, here=0)) is not None
    assert refusal(rule_of(float("inf"), here=0, elsewhere=100)) is None


def test_both_readings_can_be_had() -> None:
    # With one more of 1,100 tokens they would be beyond the bound.
    assert refusal(rule_of(0.5, elsewhere=4, reading="both")) is not None
    assert refusal(rule_of(0.5, elsewhere=4, reading="either")) is None
    assert refusal(rule_of(0.5, elsewhere=3, reading="both")) is None


def test_requests_that_ask_for_a_lease_count_as_offloaded() -> None:
    rule = rule_of(0.5, elsewhere=5)
    scheduler: Any = rule._scheduler
    asked = request(1000)
    scheduler.here.append(asked)
    assert rule.refusal(request(1000), {asked}, 0.0) is not None


def test_one_request_measures_the_rates() -> None:
    rule = rule_of(None)
    rule.rates.forget()
    assert refusal(rule) is None and rule.bound() is None
    scheduler: Any = rule._scheduler
    scheduler.elsewhere.append(request(1000, is_leased=True))
    assert refusal(rule) == "the rates are being measured with another one"
    scheduler.here.clear()
    assert refusal(rule) == "no request decodes here whose attention could hide that of another one"


def test_the_measured_bound_is_kept() -> None:
    """Memory holds half as much elsewhere, and executors read half as fast."""
    assert rule_of(None).bound() == pytest.approx(0.5)
    assert refusal(rule_of(None, elsewhere=3)) is None
    scarce = rule_of(None, elsewhere=3)
    scarce.lent_tokens = (2000,)
    assert refusal(scarce) == "3000 tokens are offloaded, the bound is 0.20 of 10000"


def test_what_cannot_be_hidden_is_declined() -> None:
    # A step has 5 here: 50 ms a layer; 3 elsewhere would take 60 ms, and 1 ms for the way.
    here, elsewhere = 5 * 1000 / 1e5, 3 * 1000 / 5e4
    assert here < elsewhere + 1e-3
    assert refusal(rule_of(None, elsewhere=4)) == (
        "its attention would take longer than that of the requests here"
    )
    assert refusal(rule_of(None, elsewhere=4), new_tokens=1000) is not None
    assert refusal(rule_of(None, elsewhere=3)) is None


def waits(rule: OffloadRule, share: float, now_s: float) -> bool:
    """A window in which stages wait for that share ends at `now_s`."""
    work = OffloadedWork(2, 1000, 500, 0.02, 0.02, 0.022, share)
    rule.rates.note(work, 1.0, now_s - WINDOW_S)
    return rule.must_give_up(now_s)


def test_steps_that_wait_end_offloading_for_a_while_and_then_leases() -> None:
    rule = rule_of(None)
    assert not waits(rule, 0.05, 1.0) and refusal(rule, 1.0) is None
    assert rule.wait_share == pytest.approx(0.05)
    assert not waits(rule, 0.3, 3.0)
    assert refusal(rule, 3.0) == "steps waited for it for more than 10% of their time"
    assert not rule.must_give_up(3.1), "nothing was measured since"
    assert refusal(rule, 3.0 + REST_S - 0.1) is not None
    assert refusal(rule, 3.0 + REST_S) is None, "one request measures again"
    # They still wait: leases are given up, one for each window.
    assert not waits(rule, 0.3, 12.9)
    assert waits(rule, 0.3, 13.9) and waits(rule, 0.2, 14.9)
    assert not waits(rule, 0.1, 15.9)
    assert refusal(rule, 15.9) is not None, "for a while after the last time"
    assert refusal(rule, 14.9 + REST_S) is None
    assert not waits(rule, 0.3, 26.0), "it begins anew"


def test_a_ratio_by_hand_ignores_waits() -> None:
    rule = rule_of(0.5)
    for second in range(1, 30):
        assert not waits(rule, 0.9, float(second))
    assert refusal(rule, 30.0) is None and rule.wait_share > 0.8


def test_rates_follow_what_is_measured() -> None:
    rates = rule_of(None).rates
    faster = OffloadedWork(2, 1000, 1000, 0.02, 0.02, 0.02, 0.0)
    for _ in range(400):
        rates.note(faster, 1.0, 0.0)
    assert rates.remote_rate == pytest.approx(1e5, rel=0.01)
    assert rates.exchange_s == pytest.approx(1e-3), "nothing is known of trips that were hidden"
