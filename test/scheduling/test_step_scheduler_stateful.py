"""Random traffic on tiny pools: whatever happens, each request gets the tokens it gets alone."""

from fault_schedules.fake_model import logprobs_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.pipelines import (
    FakePipeline,
    logprobs_when_alone,
    make_request,
    new_scheduler,
    output_when_alone,
)
from support.served_steps import card_costs, flat, flat_costs

from sgl_pipeline.args import (
    ACCOUNTINGS,
    POLICIES,
    SCHEDULE_POLICIES,
    SchedulingArgs,
    ThrottleArgs,
)
from sgl_pipeline.costs.step_costs import LayerCost, StepCosts
from sgl_pipeline.errors import QueueFullError, RequestError
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.requests import FinishReason, Request
from sgl_pipeline.scheduling.age_limit import RAN_TOO_LONG, WAITED_TOO_LONG
from sgl_pipeline.scheduling.entry_rules import DISPLACED

ABORTED = FinishReason("abort", message="the client went away")


# What is attended to takes all the time: a late chunk is much longer than an early one.
LONG_CONTEXTS = StepCosts(LayerCost(flat(0.0), 0.0, 1.0, 1.0), flat(0.0), flat(0.0), (1.0,))


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, schedules, completes, pauses, resumes and loses stages in any order."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(4, 14),
        num_stages=st.integers(1, 4),
        extra=st.integers(0, 1),
        radix_cache=st.booleans(),
        policy=st.sampled_from(POLICIES),
        accounting=st.sampled_from(list(ACCOUNTINGS)),
        schedule_policy=st.sampled_from(SCHEDULE_POLICIES),
        max_overtakes=st.sampled_from([0, 1, 4, 128]),
        duplicate_prefills=st.booleans(),
        max_prefill_tokens=st.sampled_from([1, 3, 8, 64]),
        max_running=st.sampled_from([1, 3, 16]),
        num_state_slots=st.sampled_from([0, 0, 1, 2, 5]),
        track_pages=st.sampled_from([None, 0, 1, 2]),
        max_queued=st.sampled_from([None, None, 2]),
        max_decodes=st.sampled_from([None, 1, 2]),
        preemption_threshold=st.sampled_from([None, 0]),
        draft_tokens=st.sampled_from([0, 1, 4]),
        fair_shares_by=st.sampled_from([None, "user"]),
        timeouts_s=st.sampled_from([(None, None), (5.0, 9.0)]),
        costs=st.sampled_from([None, flat_costs(1, 1.0), card_costs(1), LONG_CONTEXTS]),
        dynamic_chunking=st.booleans(),
        targets_ms=st.sampled_from([(None, None), (2.0, None), (1e-3, 1e-3), (5.0, 9.0)]),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        num_stages: int,
        extra: int,
        radix_cache: bool,
        policy: str,
        accounting: str,
        schedule_policy: str,
        max_overtakes: int,
        duplicate_prefills: bool,
        max_prefill_tokens: int,
        max_running: int,
        num_state_slots: int,
        track_pages: int | None,
        max_queued: int | None,
        max_decodes: int | None,
        preemption_threshold: int | None,
        draft_tokens: int,
        fair_shares_by: str | None,
        timeouts_s: tuple[float | None, float | None],
        costs: StepCosts | None,
        dynamic_chunking: bool,
        targets_ms: tuple[float | None, float | None],
    ) -> None:
        target_tpot_ms, target_ttft_ms = targets_ms if policy == "throttle-time" else (None, None)
        throttle = ThrottleArgs(
            policy=policy,
            max_prefill_tokens=max_prefill_tokens,
            min_prefill_tokens=min(2, max_prefill_tokens),
            prefill_spread_steps=2,
            dynamic_chunking=dynamic_chunking,
            target_tpot_ms=target_tpot_ms,
            target_ttft_ms=target_ttft_ms,
        )
        args = SchedulingArgs(
            page_size=page_size,
            # Rankings know pages, and no snapshots.
            schedule_policy="fcfs" if num_state_slots and radix_cache else schedule_policy,
            max_overtakes=max_overtakes,
            max_running_requests=max_running,
            num_state_slots=num_state_slots,
            track_interval=None if track_pages is None else track_pages * page_size,
            max_queued_requests=max_queued,
            max_decodes_per_step=max_decodes,
            radix_cache=radix_cache,
            accounting=accounting,
            duplicate_prefills=duplicate_prefills,
            extra_steps_in_flight=extra,
            preemption_threshold=preemption_threshold,
            draft_tokens=0 if num_state_slots else draft_tokens,
            fair_shares_by=fair_shares_by,
            tenant_weights=None if fair_shares_by is None else '{"b": 3}',
            waiting_timeout_s=timeouts_s[0],
            running_timeout_s=timeouts_s[1],
        )
        self.pool_tokens = num_pages * page_size
        self.max_queued = max_queued
        self.scheduler = new_scheduler(args, throttle, num_pages=num_pages, num_stages=num_stages)
        predictor = None if costs is None else StepPredictor(costs)
        self.pipeline = FakePipeline(self.scheduler, page_size, predictor)
        self.added: list[Request] = []

    @rule(
        prompt_ids=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_new_tokens=st.integers(0, 8),
        priority=st.sampled_from([0, 0, 0, 1]),
        namespace=st.sampled_from(["", "", "", "other"]),
        tenant=st.sampled_from("abc"),
        stops=st.booleans(),
        logprob_start=st.sampled_from([None, None, 0, 1, 3, 6, 99]),
        constrained=st.booleans(),
    )
    def add(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        priority: int,
        namespace: str,
        tenant: str,
        stops: bool,
        logprob_start: int | None,
        constrained: bool,
    ) -> None:
        request = make_request(
            str(len(self.added)),
            prompt_ids,
            max_new_tokens,
            stop_token_ids=frozenset({0} if stops else ()),
            priority=priority,
            namespace=namespace,
            tenant=tenant,
            logprob_start=logprob_start,
            constrained=constrained,
        )
        request.arrival_s = self.pipeline.now_s
        num_waiting = self.scheduler.num_waiting
        try:
            displaced = self.scheduler.add(request)
        except QueueFullError:
            assert num_waiting >= (self.max_queued or 0) > 0
        except RequestError:
            assert len(prompt_ids) + max(0, max_new_tokens - 1) > self.pool_tokens
        else:
            self.added.append(request)
            if displaced is not None:
                assert displaced.finish is DISPLACED and displaced.priority < priority

    @rule()
    def schedule(self) -> None:
        self.pipeline.schedule()

    @precondition(lambda self: self.pipeline.steps_in_flight)
    @rule()
    def complete(self) -> None:
        self.pipeline.complete()

    @rule(count=st.integers(1, 6))
    def run(self, count: int) -> None:
        for _ in range(count):
            self.pipeline.fill()
            if self.pipeline.steps_in_flight:
                self.pipeline.complete()
                self.scheduler.check_invariants()

    @precondition(
        lambda self: self.pipeline.steps_in_flight and not self.scheduler.state_slots.num_slots
    )
    @rule()
    def take_back_steps(self) -> None:
        self.pipeline.take_back_steps()

    @rule()
    def lose_stages(self) -> None:
        self.pipeline.lose_stages()
        load = self.scheduler.load()
        assert (self.scheduler.num_running, load.free_pages) == (0, load.total_pages)
        assert self.scheduler.num_free_pages == load.total_pages
        slots = self.scheduler.state_slots
        assert slots.num_free == slots.num_slots

    @precondition(lambda self: self.scheduler.requests())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.scheduler.requests()))
        assert self.scheduler.abort(request.request_id, ABORTED) is request

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.pipeline.now_s += seconds
        for request in self.scheduler.end_overdue(self.pipeline.now_s):
            assert request.finish in (WAITED_TOO_LONG, RAN_TOO_LONG)

    @rule(retract=st.booleans())
    def pause(self, retract: bool) -> None:
        self.scheduler.pausing.pause(retract=retract)

    @precondition(lambda self: self.scheduler.pausing.is_paused)
    @rule()
    def resume(self) -> None:
        self.scheduler.pausing.resume()

    @rule()
    def flush(self) -> None:
        # In a pause those that wait do not count.
        is_unused = self.scheduler.is_idle or (
            self.scheduler.pausing.is_paused
            and not self.scheduler.num_running
            and not self.pipeline.steps_in_flight
        )
        assert self.scheduler.flush_cache() == is_unused

    @invariant()
    def pages_are_conserved(self) -> None:
        self.scheduler.check_invariants()

    @invariant()
    def the_first_that_may_be_served_is_first(self) -> None:
        queue = self.scheduler._waiting
        passed_over = queue._parked | queue._held
        servable = [one for one in queue._paths if one not in passed_over]
        assert queue._order.first() is next(iter(queue._order.ranked(servable)), None)

    def teardown(self) -> None:
        if not hasattr(self, "pipeline"):
            return
        self.scheduler.pausing.resume()
        self.pipeline.drain()
        load = self.scheduler.load()
        assert load.free_pages == load.total_pages
        assert load.waiting_tokens == 0
        slots = self.scheduler.state_slots
        assert slots.num_free + slots.num_evictable == slots.num_slots
        most = self.scheduler.args.max_decodes_per_step
        if most is not None:
            assert all(one.num_decodes <= most for one in self.pipeline.microbatches)
        for request in self.added:
            expected = output_when_alone(request)
            assert request.finish is not None
            if request.constraint is not None:
                assert request.constraint.accepted == request.output_ids
            if request.finish.kind == "abort":
                assert request.output_ids == expected[: len(request.output_ids)]
                rows = logprobs_of(request)
                assert rows == logprobs_when_alone(request)[: len(rows)]
            else:
                assert request.output_ids == expected
                assert logprobs_of(request) == logprobs_when_alone(request)


TestSchedulerUnderRandomTraffic = SchedulerMachine.TestCase
TestSchedulerUnderRandomTraffic.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
