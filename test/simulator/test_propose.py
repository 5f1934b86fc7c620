"""Proposals are held to what they promise: on the pipeline that the records are of, not the fit."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from random import Random

import msgspec
import pytest
from support.pipelines import new_scheduler

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.draft_runs import DraftRuns
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.goodput import LatencyTarget
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.pipeline.recent_load import PastRequest, RecentWork
from sgl_pipeline.pipeline.throttle_control import ThrottleControl
from sgl_pipeline.records.throttle_change import Knob
from sgl_pipeline.simulator.experiment import Cluster
from sgl_pipeline.simulator.past_load import past_requests
from sgl_pipeline.simulator.propose import KnobProposal, Prediction, TuneTask, predict, propose
from sgl_pipeline.simulator.virtual_drafts import NEVER_RIGHT, DraftAcceptance
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import SimulatedRequest, TokenIds, poisson_arrivals
from sgl_pipeline.stage_plan import StagePlan

pytestmark = pytest.mark.slow

CLUSTER = Cluster(model="Qwen2.5-32B", device="a100-40g-pcie", num_stages=4, pool_tokens=1)
POOL_TOKENS = 100_000
BAD = ThrottleArgs(max_prefill_tokens=64, prefill_spread_steps=32)
A_FEW = 10  # requests, where what is proposed does not matter
TARGET = LatencyTarget(ttft_ms=800.0, tpot_ms=200.0)


def load(
    num_requests: int = 60, rate_per_s: float = 5.0, acceptance: DraftAcceptance = NEVER_RIGHT
) -> list[SimulatedRequest]:
    random, ids = Random(5), TokenIds()
    requests = [
        SimulatedRequest(
            arrival_s=0.0,
            prompt=(ids.fresh(random.randint(200, 1500)),),
            output=ids.fresh(random.randint(10, 60)),
            acceptance=acceptance,
        )
        for _ in range(num_requests)
    ]
    return poisson_arrivals(requests, rate_per_s, random)


class Server:
    """A pipeline with knobs that serves `load`, and keeps its past. With drafts it learns what its
    steps take."""

    def __init__(self, throttle: ThrottleArgs, page_size: int = 16, draft_tokens: int = 0) -> None:
        args = SchedulingArgs(page_size=page_size, draft_tokens=draft_tokens)
        scheduler = new_scheduler(
            args,
            throttle,
            num_pages=POOL_TOKENS // page_size,
            num_stages=4,
            context_length=POOL_TOKENS,
        )
        costs = CLUSTER.costs()
        forecast = StepForecast(StagePlan(0, costs.layer_counts)) if draft_tokens else None
        self.pipeline = VirtualPipeline(scheduler, costs, forecast)
        self.core = self.pipeline._core
        self.core.throttle = ThrottleControl(scheduler, throttle, args.accounting, 4096)

    def serve(self, requests: Sequence[SimulatedRequest] | None = None) -> Prediction:
        return predict(self.pipeline.run(requests or load()), TARGET)

    def work(self) -> RecentWork:
        now_s = self.core.recent_load.steps[-1].finished_s
        return self.core.recent_work(1e9, now_s)


def task_of(work: RecentWork, timeout_s: float = 1e9, ttft_ms: float = TARGET.ttft_ms) -> TuneTask:
    return TuneTask(
        work=work,
        ttft_ms=ttft_ms,
        tpot_ms=TARGET.tpot_ms,
        policies=("throttle",),
        timeout_s=timeout_s,
    )


@pytest.fixture(scope="module")
def bad_server() -> tuple[Server, Prediction]:
    server = Server(BAD)
    return server, server.serve()


@pytest.fixture(scope="module")
def proposal(bad_server: tuple[Server, Prediction]) -> KnobProposal:
    return propose(task_of(bad_server[0].work()))


def throttle_with(knobs: dict[str, Knob]) -> ThrottleArgs:
    return replace(BAD, **{name: value for name, value in knobs.items() if name != "accounting"})  # type: ignore[arg-type]


def test_a_task_arrives_as_it_was_sent(bad_server: tuple[Server, Prediction]) -> None:
    """With numbers of all kinds among the flags."""
    flags = asdict(SchedulingArgs(waiting_timeout_s=2.5, fair_step_cost=0.1))
    task = task_of(msgspec.structs.replace(bad_server[0].work(), scheduling=flags))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=TuneTask) == task


def test_a_proposal_keeps_its_promise_on_the_real_pipeline(
    bad_server: tuple[Server, Prediction], proposal: KnobProposal
) -> None:
    measured = bad_server[1]
    assert proposal.is_complete and proposal.knobs and proposal.proposed is not None
    # Near saturation a first token's queue grows with any error of the steps before it.
    assert proposal.now.ttft_ms.p50 == pytest.approx(measured.ttft_ms.p50, rel=0.15)
    assert proposal.now.tpot_ms.p50 == pytest.approx(measured.tpot_ms.p50, rel=0.15)
    applied = Server(throttle_with(proposal.knobs)).serve()
    promised = proposal.proposed
    assert applied.target_share == pytest.approx(promised.target_share, abs=0.08)
    # Its steps are larger than any that were measured.
    assert applied.ttft_ms.p50 == pytest.approx(promised.ttft_ms.p50, rel=0.3)
    assert applied.tpot_ms.p50 == pytest.approx(promised.tpot_ms.p50, rel=0.2)
    assert applied.target_share > measured.target_share + 0.3


def test_knobs_that_are_the_best_stay(
    bad_server: tuple[Server, Prediction], proposal: KnobProposal
) -> None:
    work = bad_server[0].work()
    knobs = work.knobs | proposal.knobs
    again = propose(task_of(msgspec.structs.replace(work, knobs=knobs)))
    assert again.knobs == {} and again.proposed is None


def test_steps_beyond_all_that_were_measured_are_marked(
    bad_server: tuple[Server, Prediction], proposal: KnobProposal
) -> None:
    work = bad_server[0].work()
    largest = max(one.prefill_tokens + one.decodes for one in work.steps)
    limit = proposal.knobs["max_prefill_tokens"]
    assert isinstance(limit, int) and limit > 2 * largest
    assert proposal.is_extrapolated
    large = [msgspec.structs.replace(one, prefill_tokens=limit) for one in work.steps[:2]]
    proposed = msgspec.structs.replace(work, knobs=work.knobs | proposal.knobs)
    wide = msgspec.structs.replace(proposed, steps=[*work.steps, *large])
    assert propose(task_of(proposed, timeout_s=0.0)).is_extrapolated
    assert not propose(task_of(wide, timeout_s=0.0)).is_extrapolated


def test_a_task_ends_with_its_time_and_says_so(bad_server: tuple[Server, Prediction]) -> None:
    ticks = iter(range(10**9))
    work = bad_server[0].work()
    short = msgspec.structs.replace(work, requests=work.requests[:A_FEW])
    proposal = propose(task_of(short, timeout_s=500.0), lambda: next(ticks))
    assert not proposal.is_complete
    assert 1 <= proposal.num_trials < 18


def test_too_few_steps_are_refused(bad_server: tuple[Server, Prediction]) -> None:
    work = bad_server[0].work()
    with pytest.raises(ConfigurationError, match="200 of different sizes"):
        propose(task_of(msgspec.structs.replace(work, steps=work.steps[:100])))


def test_drafts_are_served_again() -> None:
    """Texts of two kinds, one of which repeats itself in runs."""
    runs = DraftAcceptance((0.4, 0.9), found=0.8)
    seldom = DraftAcceptance((0.1,), found=0.3)
    requests = load(50, 0.8)
    texts = [
        replace(one, acceptance=(runs, seldom)[number % 2]) for number, one in enumerate(requests)
    ]
    server = Server(ThrottleArgs(), draft_tokens=7)
    measured, plain = server.serve(texts), Server(ThrottleArgs()).serve(requests)
    assert measured.tpot_ms.mean < 0.8 * plain.tpot_ms.mean
    work = server.work()
    foreseen = propose(task_of(work, timeout_s=0.0)).now
    assert foreseen.tpot_ms.mean == pytest.approx(measured.tpot_ms.mean, rel=0.1)


def test_a_text_without_drafts_is_like_the_others() -> None:
    counts = DraftRuns(lookups=4, found=2)
    counts.checked[0], counts.right[0] = 8, 2
    past = [
        PastRequest(10.0, 100, 0, 20, 5.0, 50.0, counts),
        PastRequest(11.0, 100, 0, 20, 5.0, 50.0),
    ]
    _, first, second = past_requests(past)
    for acceptance in (first.acceptance, second.acceptance):
        assert (acceptance.chance(0), acceptance.found) == (0.25, 0.5)
    _, alone = past_requests(past[1:])
    assert (alone.acceptance.chance(0), alone.acceptance.found) == (0.0, 0.0)


def test_hits_are_as_long_as_they_were_and_live_answers_get_lengths() -> None:
    past = [
        PastRequest(10.0, 100, 64, 20, 5.0, 50.0),
        PastRequest(12.5, 80, 0, 30, 5.0, 60.0),
        PastRequest(13.0, 200, 128, 7),
        PastRequest(14.0, 50, 0, 0),
    ]
    warm_up, *requests = past_requests(past)
    assert warm_up.input_tokens == 129 and warm_up.output_tokens == 1
    assert [one.arrival_s - requests[0].arrival_s for one in requests] == [0.0, 2.5, 3.0, 4.0]
    assert [one.input_tokens for one in requests] == [100, 80, 200, 50]
    for one, told in zip(requests, past, strict=True):
        shared = one.prompt_ids()[: told.cached_tokens]
        assert shared == warm_up.prompt_ids()[: told.cached_tokens]
        rest = one.prompt_ids()[told.cached_tokens :]
        assert not set(rest) & set(warm_up.prompt_ids())
    assert [one.output_tokens for one in requests[:2]] == [20, 30]
    assert 7 < requests[2].output_tokens <= 60 and 1 <= requests[3].output_tokens <= 60


def test_two_knobs_that_hold_each_other_are_both_turned(
    bad_server: tuple[Server, Prediction], proposal: KnobProposal
) -> None:
    """With so many steps to spread over, the fewest tokens of a step are the most, too."""
    work = bad_server[0].work()
    held = work.knobs | {"max_prefill_tokens": 64, "min_prefill_tokens": 64}
    held["prefill_spread_steps"] = 1024
    fewer = work.requests[:30]
    freed = propose(task_of(msgspec.structs.replace(work, knobs=held, requests=fewer)))
    assert {"max_prefill_tokens", "prefill_spread_steps"} <= set(freed.knobs)
    assert freed.proposed is not None and proposal.proposed is not None
    assert freed.proposed.lateness < freed.now.lateness / 2
    for name in ("max_prefill_tokens", "prefill_spread_steps"):
        assert freed.knobs[name] == proposal.knobs[name]
