"""Decodes share the steps evenly at pipeline depth, whatever joins or leaves."""

import random

import pytest
from support.pipelines import FakePipeline, make_request, new_scheduler

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.requests import FinishReason

STAGES = 4
ABORTED = FinishReason("abort")


class Decodes:
    """A full pipeline of endless decodes that can join and leave."""

    def __init__(self, policy: str = "throttle", accounting: str = "radix") -> None:
        scheduler = new_scheduler(
            SchedulingArgs(page_size=16, accounting=accounting),
            ThrottleArgs(policy=policy),
            num_pages=4000,
            num_stages=STAGES,
            context_length=10_000,
        )
        self.pipeline = FakePipeline(scheduler, 16)
        self.num_joined = 0

    def join(self, count: int) -> None:
        for _ in range(count):
            prompt = [self.num_joined, 7]
            self.pipeline.scheduler.add(make_request(str(self.num_joined), prompt, 1000))
            self.num_joined += 1

    def leave(self, count: int, rng: random.Random) -> None:
        for request in rng.sample(self.pipeline.scheduler.requests(), count):
            self.pipeline.scheduler.abort(request.request_id, ABORTED)

    def steps(self, count: int) -> list[int]:
        """Runs so many steps with the pipeline kept full; the decodes of each."""
        scheduler, counts = self.pipeline.scheduler, []
        while len(counts) < count:
            load = scheduler.load()
            microbatch = self.pipeline.schedule()
            if microbatch is None:
                # No slot stays empty while a decode is ready.
                assert load.ready_decodes == 0 or load.steps_in_flight == STAGES
                self.pipeline.complete()
            else:
                # Nothing is held back below an even share.
                even_share = load.running_decodes // STAGES
                assert microbatch.num_decodes >= min(load.ready_decodes, max(1, even_share))
                counts.append(microbatch.num_decodes)
        return counts


def assert_even(counts: list[int]) -> None:
    for start in range(len(counts) - STAGES + 1):
        window = counts[start : start + STAGES]
        assert max(window) - min(window) <= 1, counts


@pytest.mark.parametrize("accounting", ["radix", "naive"])
@pytest.mark.parametrize(
    "policy", ["throttle", "throttle-adaptive", "no-wt", "no-ut", "no-threshold"]
)
def test_26_decodes_at_four_stages_run_7_7_6_6(policy: str, accounting: str) -> None:
    decodes = Decodes(policy, accounting)
    decodes.join(26)
    decodes.steps(3 * STAGES)
    counts = decodes.steps(20)
    assert_even(counts)
    assert sorted(counts[:STAGES]) == [6, 6, 7, 7]
    assert all(sum(counts[n : n + STAGES]) == 26 for n in range(16))


def test_balance_returns_within_two_rounds_after_every_drain_and_burst() -> None:
    rng = random.Random(0)
    decodes = Decodes()
    for _ in range(30):
        running = decodes.pipeline.scheduler.num_running
        if running > 8 and rng.random() < 0.5:
            decodes.leave(rng.randrange(1, running - 2), rng)
        else:
            decodes.join(rng.randrange(1, 30))
        # A newcomer decodes when its prefill has come back; that is when it has joined.
        scheduler = decodes.pipeline.scheduler
        while scheduler.load().running_decodes < len(scheduler.requests()):
            decodes.steps(1)
        decodes.steps(STAGES)
        assert_even(decodes.steps(3 * STAGES))


def test_every_decode_gets_its_turn_once_a_round() -> None:
    decodes = Decodes()
    decodes.join(26)
    decodes.steps(4 * STAGES)
    first = len(decodes.pipeline.microbatches)
    decodes.steps(5 * STAGES)
    turns = [
        [chunk.request.request_id for chunk in microbatch.chunks]
        for microbatch in decodes.pipeline.microbatches[first:]
    ]
    for start in range(len(turns) - STAGES):
        round_ids = [name for step in turns[start : start + STAGES] for name in step]
        assert len(set(round_ids)) == len(round_ids) == 26
