"""Prefill and decode apart in virtual time: hand-made times, conservation, back-pressure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from support.pipelines import new_scheduler
from support.virtual_runs import TokenSeconds

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.page_hash import HASH_BYTES
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.simulator.disaggregated_fleet import DisaggregatedFleet
from sgl_pipeline.simulator.fleet import MixedFleet
from sgl_pipeline.simulator.peer_pages import PeerLink, PeerReads, VirtualOffers
from sgl_pipeline.simulator.pipeline_costs import PipelineCosts
from sgl_pipeline.simulator.room_servers import DecodeServer, PrefillServer
from sgl_pipeline.simulator.simulation import ServedRequest
from sgl_pipeline.simulator.virtual_pipeline import VirtualPipeline
from sgl_pipeline.simulator.workload import Segment, SimulatedRequest, TokenIds
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.store_orders import LoadPages, OfferPages, PagesLoaded, WithdrawPages

PAGE_TOKENS = 4
LAYER_PAGE_BYTES = 100
LATENCY_S = 0.25
LINK = PeerLink(latency_s=LATENCY_S, bytes_per_s=100.0)
PARTS = TokenSeconds(token=1.0)


class WatchedServer(DecodeServer):
    """Holds its scheduler to what must be true at any time."""

    def exchange(self, core: PipelineCore, now_s: float) -> None:
        super().exchange(core, now_s)
        core.scheduler.check_invariants()


@dataclass
class Deployment:
    """Servers of the given splits, all around one link speed."""

    prefills: Sequence[tuple[int, ...]] = ((1,),)
    decodes: Sequence[tuple[int, ...]] = ((1,),)
    link: PeerLink = LINK
    prefill_pages: int = 1000
    decode_pages: int = 1000
    reserved_tokens: int = 512
    fleet: DisaggregatedFleet = field(init=False)

    def __post_init__(self) -> None:
        prefills = [
            PrefillServer(
                str(number),
                self._scheduler(self.prefill_pages, len(layers)),
                PipelineCosts(PARTS, layers),
            )
            for number, layers in enumerate(self.prefills)
        ]
        sources = {one.name: one.offers for one in prefills}
        decodes = [
            WatchedServer(
                "a decode server",
                self._scheduler(self.decode_pages, len(layers)),
                PipelineCosts(PARTS, layers),
                PeerReads(self.link, LAYER_PAGE_BYTES, sources),
                reserved_tokens=self.reserved_tokens,
            )
            for layers in self.decodes
        ]
        self.fleet = DisaggregatedFleet(prefills, decodes)

    @property
    def loaded_bytes(self) -> int:
        return sum(one.reads.loaded_bytes for one in self.fleet.decodes)

    def _scheduler(self, num_pages: int, num_stages: int) -> StepScheduler:
        return new_scheduler(
            SchedulingArgs(page_size=PAGE_TOKENS),
            ThrottleArgs(policy="sarathi", max_prefill_tokens=64),
            num_pages=num_pages,
            num_stages=num_stages,
        )

    def serve(self, *workload: SimulatedRequest) -> list[ServedRequest]:
        """All requests, in order of arrival; nothing may be left in any pool but the cache."""
        self.fleet.run(workload)
        for pipeline in self.fleet.pipelines:
            scheduler = pipeline.scheduler
            scheduler.check_invariants()
            assert scheduler.tier.held.num_rooms == scheduler.tier.held.num_pages == 0
            scheduler.tier.arrivals.check_end()
            load = scheduler.load()
            assert load.free_pages == load.total_pages
        assert not any(one.rooms.num_rooms for one in self.fleet.decodes)
        return sorted(self.fleet.served, key=lambda one: (one.arrival_s, one.asked.output.first))


def ask(
    prompt: int, num_pages: int = 4, arrival_s: float = 0.0, num_tokens: int = 3, tail: int = 1
) -> SimulatedRequest:
    """A request for `num_tokens`, behind `num_pages` pages and `tail` tokens of prompt `prompt`."""
    first = 1000 * prompt
    return SimulatedRequest(
        arrival_s=arrival_s,
        prompt=(Segment(first, num_pages * PAGE_TOKENS + tail),),
        output=Segment(first + 500, num_tokens),
    )


def test_the_first_token_takes_prefill_transfer_and_the_rest_of_the_prompt() -> None:
    (one,) = Deployment().serve(ask(1))
    # 17 tokens; the news, the question and the first byte; four pages; a token.
    first_s = 17 + 3 * LATENCY_S + 4 + 1
    assert one.token_times_s == [first_s, first_s + 1, first_s + 2]
    # Nothing of the prompt was cached where it was computed.
    assert one.cached_tokens == 0


def test_stages_of_other_depths_get_their_layers_one_after_the_other() -> None:
    for prefill, decode in (((3,), (2, 1)), ((1, 2), (3,)), ((1, 1, 1), (2, 1))):
        (one,) = Deployment([prefill], [decode]).serve(ask(1))
        assert one.token_times_s[0] == 3 * 17 + 3 * LATENCY_S + 3 * 4 + 3


def test_less_than_a_page_is_computed_again() -> None:
    deployment = Deployment()
    (one,) = deployment.serve(ask(1, num_pages=0, tail=3))
    assert one.token_times_s[0] == 3 + LATENCY_S + 3
    assert deployment.loaded_bytes == 0


def test_whole_pages_but_the_last_token_cross() -> None:
    # Of exactly four pages the last is computed: its last token's logits are needed.
    deployment = Deployment()
    (one,) = deployment.serve(ask(1, tail=0))
    assert one.token_times_s[0] == 16 + 3 * LATENCY_S + 3 + 4
    assert deployment.loaded_bytes == 3 * LAYER_PAGE_BYTES


def test_transfers_queue_on_the_link() -> None:
    deployment = Deployment(link=PeerLink(latency_s=LATENCY_S, bytes_per_s=10.0))
    first, second = deployment.serve(ask(1, num_tokens=1), ask(2, num_tokens=1))
    # Both prompts are one step.
    assert first.token_times_s[0] == 34 + 3 * LATENCY_S + 40 + 1
    assert second.token_times_s[0] == 34 + 3 * LATENCY_S + 80 + 1


def test_a_prefill_server_sends_to_one_at_a_time_and_a_decode_server_gets_from_one() -> None:
    slow = PeerLink(latency_s=0.0, bytes_per_s=10.0)
    for prefills, decodes in (([(1,)], [(1,)] * 2), ([(1,)] * 2, [(1,)])):
        deployment = Deployment(prefills, decodes, slow)
        one, other = deployment.serve(ask(1, num_tokens=1), ask(2, num_tokens=1))
        assert other.token_times_s[0] - one.token_times_s[0] == 40
    apart = Deployment([(1,)] * 2, [(1,)] * 2, slow)
    one, other = apart.serve(ask(1, num_tokens=1), ask(2, num_tokens=1))
    assert one.token_times_s[0] == other.token_times_s[0] == 17 + 40 + 1


def test_the_decode_side_loads_only_what_it_lacks() -> None:
    first = ask(1, num_tokens=6)
    again = SimulatedRequest(
        arrival_s=0.0,
        prompt=(*first.prompt, first.output, Segment(900, 10)),
        output=Segment(950, 1),
    )
    deployment = Deployment()
    deployment.serve(first)
    before = deployment.loaded_bytes
    assert before == 4 * LAYER_PAGE_BYTES
    deployment.fleet.run([again])
    # 33 tokens are 8 pages; five were there: the prompt and the answer, whose last token was never
    # computed.
    assert deployment.loaded_bytes == before + 3 * LAYER_PAGE_BYTES


def test_requests_that_share_a_prompt_send_it_once() -> None:
    deployment = Deployment()
    shared = Segment(100, 16)
    load = [
        SimulatedRequest(
            arrival_s=0.0, prompt=(shared, Segment(1000 * n, 1)), output=Segment(1000 * n + 500, 2)
        )
        for n in (1, 2, 3)
    ]
    deployment.serve(*load)
    assert deployment.loaded_bytes == 4 * LAYER_PAGE_BYTES
    assert deployment.fleet.decodes[0].pipeline.scheduler.num_cached_tokens == 3 * 16


def test_a_load_waits_for_the_offers_of_the_stages_that_have_its_layers() -> None:
    offers, page = VirtualOffers(), b"h" * HASH_BYTES
    offers.take(OfferPages(7, b"", page, ""), StagePlan(0, (1, 2)), [5.0, 50.0])
    reads = PeerReads(LINK, LAYER_PAGE_BYTES, {"p": offers})
    order = LoadPages(0, b"", page, b"", (), "p", 7)
    reads.load(order, StagePlan(0, (1, 2)), [1.0, 1.0], crosses=True)
    # A page of one layer takes a second, and the wait for the other stage's takes no link's time.
    assert offers.free_s == reads.free_s == 1 + LATENCY_S + 3
    assert reads.next_report_s() == 5 + 1 + LATENCY_S
    first, second = reads.take_reports(50 + 2 + LATENCY_S)
    assert isinstance(first, PagesLoaded) and isinstance(second, PagesLoaded)
    assert [(one.num_pages, one.num_bytes, one.busy_s) for one in (first, second)] == [
        (1, 100, 5 + LATENCY_S),
        (1, 200, 51 + LATENCY_S),
    ]
    offers.take(WithdrawPages(7), StagePlan(0, (1, 2)), [60.0, 60.0])
    with pytest.raises(KeyError):
        offers.readable_s(7, range(1))


def test_an_offer_is_obeyed_behind_the_steps_in_flight() -> None:
    fast = PeerLink(latency_s=0.0, bytes_per_s=1e9)
    first, second = (ask(1, num_tokens=1), ask(2, num_pages=10, arrival_s=1.0, num_tokens=1))
    deployment = Deployment([(1, 1)], [(2,)], fast)
    one, _ = deployment.serve(first, second)
    # The second prompt is behind the first on both stages: 41 tokens on each of them.
    assert deployment.fleet.prefill_s[0] == 2 * 17
    assert one.token_times_s[0] == pytest.approx(17 + 41 + 41 + 2)
    (alone,) = Deployment([(1, 1)], [(2,)], fast).serve(first)
    assert alone.token_times_s[0] == pytest.approx(2 * 17 + 2)


def test_a_load_leaves_room_for_the_growth_of_others() -> None:
    first, second = ask(1, num_tokens=40), ask(2, arrival_s=1.0)
    times = []
    for reserved_tokens in (0, 512):
        # Room for both prompts, and not for all that the first may draw besides.
        deployment = Deployment(decode_pages=16, reserved_tokens=reserved_tokens)
        one, other = deployment.serve(first, second)
        times.append((one.finished_s, other.token_times_s[0]))
    (loaded_end_s, loaded_s), (held_end_s, held_s) = times
    assert loaded_end_s is not None and held_end_s is not None
    assert loaded_s < loaded_end_s and held_s > held_end_s - 40


def test_pages_that_are_held_throttle_prefill() -> None:
    slow = PeerLink(latency_s=0.0, bytes_per_s=1.0)
    # Room for one prompt at a time, and 400 s for its pages.
    deployment = Deployment(link=slow, prefill_pages=8)
    first, second = deployment.serve(ask(1, num_tokens=1), ask(2, num_tokens=1))
    assert first.token_times_s[0] == 17 + 400 + 1
    assert deployment.fleet.prefill_s == [17.0, 17.0 + 400 + 17]
    assert second.token_times_s[0] == 17 + 400 + 17 + 400 + 1
    assert deployment.fleet.prefills[0].most_held_pages == 4


def test_a_request_that_a_side_refuses_fails_alone() -> None:
    too_long = ask(9, num_pages=300)
    assert "context" in Deployment().serve(too_long)[0].error
    # It fits where it is computed, and not where it would decode.
    deployment = Deployment(decode_pages=6)
    failed, done = deployment.serve(ask(1, num_pages=6), ask(2))
    assert failed.error and not done.error


def test_a_follow_up_goes_through_both_servers_again() -> None:
    first = ask(1)
    again = SimulatedRequest(
        arrival_s=0.0, prompt=(Segment(7000, 9),), output=Segment(8000, 2), follow_up=None
    )
    chained = SimulatedRequest(
        arrival_s=0.0, prompt=first.prompt, output=first.output, follow_up=again, think_s=5.0
    )
    before, after = Deployment().serve(chained)
    assert before.finished_s is not None
    assert after.arrival_s == before.finished_s + 5.0
    assert after.token_times_s[0] == after.arrival_s + 9 + 3 * LATENCY_S + 2 + 1


def mixed_load(random: Random, num_requests: int) -> list[SimulatedRequest]:
    """Requests that share beginnings with others."""
    ids = TokenIds()
    shared = [ids.fresh(40) for _ in range(3)]
    load = []
    for _ in range(num_requests):
        beginning = Segment(random.choice(shared).first, random.randint(1, 40))
        load.append(
            SimulatedRequest(
                arrival_s=random.uniform(0, 300),
                prompt=(beginning, ids.fresh(random.randint(1, 20))),
                output=ids.fresh(random.randint(1, 20)),
            )
        )
    return load


@pytest.mark.parametrize("seed", range(6))
def test_under_pressure_all_are_served_and_equal_runs_are_equal(seed: int) -> None:
    """`serve` asserts that no page stays held."""
    load = mixed_load(Random(seed), 40)
    runs = []
    for _ in range(2):
        deployment = Deployment(
            prefills=[(2, 1), (3,)][: 1 + seed % 2],
            decodes=[(1, 1, 1), (1, 2)][: 1 + seed // 2 % 2],
            link=PeerLink(latency_s=0.5, bytes_per_s=60.0),
            prefill_pages=24,
            decode_pages=24,
        )
        served = deployment.serve(*load)
        assert len(served) == 40 and not any(one.error for one in served)
        runs.append([(one.arrival_s, one.token_times_s) for one in served])
    assert runs[0] == runs[1]


def test_a_worse_link_never_makes_a_lone_request_faster() -> None:
    def first_s(latency_s: float, bytes_per_s: float) -> float:
        deployment = Deployment(link=PeerLink(latency_s=latency_s, bytes_per_s=bytes_per_s))
        return deployment.serve(ask(1))[0].token_times_s[0]

    by_latency = [first_s(latency_s, 100.0) for latency_s in (0.0, 0.1, 1.0, 10.0)]
    by_speed = [first_s(0.1, speed) for speed in (1e9, 1e3, 1e2, 1e1)]
    assert by_latency == sorted(by_latency) and by_speed == sorted(by_speed)


def test_mixed_pipelines_share_the_requests() -> None:
    pipelines = [
        VirtualPipeline(
            new_scheduler(
                SchedulingArgs(page_size=PAGE_TOKENS),
                ThrottleArgs(policy="sarathi", max_prefill_tokens=64),
                num_pages=1000,
                num_stages=1,
            ),
            PipelineCosts(PARTS, (1,)),
        )
        for _ in range(2)
    ]
    fleet = MixedFleet(pipelines)
    fleet.run([ask(1), ask(2)])
    assert [one.token_times_s[0] for one in fleet.served] == [17.0, 17.0]
