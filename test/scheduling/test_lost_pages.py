"""What is owed after a loss is computed again before it is read, or forgotten: nothing else is."""

from support.pipelines import make_request, new_scheduler

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.requests import Request, RequestState
from sgl_pipeline.scheduling import RecoveryLog
from sgl_pipeline.stage_plan import StagePlan

SIZE = 4


class Steps:
    """A scheduler of three stages whose steps come back at once."""

    def __init__(self, log_pages: int = 20) -> None:
        self.log = RecoveryLog(3, SIZE, log_pages)
        self.scheduler = new_scheduler(
            SchedulingArgs(page_size=SIZE),
            ThrottleArgs(policy="sarathi"),
            num_pages=20,
            num_stages=3,
            context_length=80,
            log=self.log,
        )
        self.lost_pages = self.scheduler.lost_pages

    def send(self) -> Microbatch:
        microbatch = self.scheduler.next_microbatch(0.0)
        assert microbatch is not None
        return microbatch

    def run(self) -> Microbatch:
        microbatch = self.send()
        self.scheduler.on_result(microbatch.step_id, [1] * microbatch.num_samples, 0.0)
        self.scheduler.check_invariants()
        return microbatch

    def start(
        self, name: str, length: int, num_steps: int = 1, max_new_tokens: int = 30
    ) -> Request:
        """A request with `num_steps` steps behind it; `name` gives its tokens."""
        request = make_request(name, [*range(ord(name), ord(name) + length)], max_new_tokens)
        self.scheduler.add(request)
        for _ in range(num_steps):
            self.run()
        return request

    def lose(self, *stages: int) -> None:
        self.scheduler.forget_in_flight()
        self.lost_pages.lose_stages(stages, 0.0)
        self.scheduler.check_invariants()


def replays_of(microbatch: Microbatch) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(one.start, one.length, one.stages) for one in microbatch.replays]


def test_a_request_goes_on_and_its_committed_tokens_are_computed_again_once() -> None:
    steps = Steps()
    request = steps.start("a", 9, num_steps=2)
    steps.send()
    steps.lose(1)
    assert request.state is RequestState.RUNNING and request.num_computed == 10
    microbatch = steps.run()
    assert replays_of(microbatch) == [(0, 10, (1,))] and microbatch.num_replay_tokens == 10
    assert [(one.start, one.length) for one in microbatch.chunks] == [(10, 1)]
    assert steps.run().replays == ()
    assert steps.log.replayed_tokens == [0, 10, 0]


def test_a_step_that_is_taken_back_has_computed_nothing_again() -> None:
    steps = Steps()
    steps.start("a", 9, num_steps=2)
    steps.lose(1)
    assert replays_of(steps.send()) == [(0, 10, (1,))]
    steps.lose(2)
    # Stage 1 may not have come so far, nor its log: stage 2 computes from what it sends now.
    assert replays_of(steps.run()) == [(0, 10, (1, 2))]


def test_a_lost_log_is_whole_again_when_its_stage_has_computed_again() -> None:
    steps = Steps()
    first = steps.start("a", 8, num_steps=2, max_new_tokens=2)
    assert first.state is RequestState.FINISHED
    steps.start("p", 9)
    steps.lose(1)
    assert replays_of(steps.run()) == [(0, 9, (1,))]
    steps.lose(2)
    # Stage 1 owes the cached pages of the first request as well, so both compute them.
    steps.scheduler.add(make_request("b", [*first.prompt_ids, 3], 3))
    assert sorted(replays_of(steps.run())) == [(0, 8, (1, 2)), (0, 10, (2,))]


def test_stage_0_needs_no_log() -> None:
    steps = Steps(log_pages=0)
    request = steps.start("a", 9, num_steps=2)
    steps.lose(0)
    assert replays_of(steps.run()) == [(0, 10, (0,))]
    steps.lose(0, 1)
    assert replays_of(steps.run()) == [(0, 11, (0, 1))]
    steps.lose(2)
    assert request.state is RequestState.WAITING


def test_what_left_the_log_is_dropped_from_the_cache_and_only_that() -> None:
    steps = Steps(log_pages=4)
    first = steps.start("a", 8, num_steps=2, max_new_tokens=2)
    second = steps.start("p", 12, num_steps=2, max_new_tokens=2)
    in_use = len(steps.scheduler.pages_in_use())
    steps.lose(1)
    # Of the first request's two pages the first has left; without it the second is of no use.
    assert in_use == 5 and len(steps.scheduler.pages_in_use()) == 3
    steps.scheduler.add(make_request("x", [*second.prompt_ids, 3], 3))
    assert replays_of(steps.run()) == [(0, 12, (1,))]
    again = make_request("y", [*first.prompt_ids, 3], 3)
    steps.scheduler.add(again)
    assert steps.run().replays == () and again.cached_tokens == 0


def test_what_leaves_the_log_while_it_is_owed_is_forgotten() -> None:
    steps = Steps(log_pages=4)
    first = steps.start("a", 8, num_steps=2, max_new_tokens=2)
    steps.lose(1)
    assert len(steps.scheduler.pages_in_use()) == 2
    steps.start("p", 16)
    again = make_request("y", [*first.prompt_ids, 3], 3)
    steps.scheduler.add(again)
    assert steps.run().replays == () and again.cached_tokens == 0


def test_nothing_is_owed_when_layers_are_about_to_move() -> None:
    steps = Steps()
    first = steps.start("a", 8, num_steps=2, max_new_tokens=2)
    running = steps.start("p", 9)
    steps.lose(1)
    assert steps.log.owes
    steps.lost_pages.forget_owed(0.0)
    assert not steps.log.owes and steps.scheduler.pages_in_use() == []
    assert running.state is RequestState.WAITING
    again = make_request("y", [*first.prompt_ids, 3], 3)
    steps.scheduler.add(again)
    assert steps.run().replays == () and again.cached_tokens == 0


def test_rows_of_a_boundary_that_moved_are_of_no_use() -> None:
    steps = Steps()
    request = steps.start("a", 9, num_steps=2)
    in_use = steps.scheduler.pages_in_use()
    steps.log.move(StagePlan(0, (3, 3, 2)), StagePlan(1, (2, 4, 2)), in_use)
    steps.lose(2)  # behind the other boundary
    assert request.state is RequestState.RUNNING
    steps.lose(1)
    assert request.state is RequestState.WAITING


def test_with_other_stages_all_is_lost_and_the_book_begins_anew() -> None:
    steps = Steps()
    request = steps.start("a", 10, num_steps=3)
    waits = make_request("b", [7] * 9, 4)
    steps.scheduler.add(waits)
    steps.send()  # it has pages, and nothing in them
    steps.lose(1)
    steps.scheduler.use_stages(2, 1.0)
    steps.scheduler.check_invariants()
    assert not steps.scheduler.pages_in_use() and not steps.log.owes
    assert {request.state, waits.state} == {RequestState.WAITING}
    assert steps.scheduler.use_pages(12, 5, 0) == [] and steps.log.capacity == 5
    assert steps.log.contents().pages == b""
    assert steps.run().replays == ()
    # Two stages: the second is the last, and owes what the first has kept.
    steps.lose(1)
    assert {one[2] for one in replays_of(steps.run())} == {(1,)}
    assert steps.log.replayed_tokens[1] > 0 and steps.log.replayed_tokens[2] == 0


def test_of_one_stage_the_tokens_are_all_that_is_needed() -> None:
    steps = Steps(log_pages=0)
    steps.scheduler.use_stages(1, 0.0)
    steps.start("a", 10, num_steps=3)
    steps.lose(0)
    assert {one[2] for one in replays_of(steps.run())} == {(0,)}


def test_pages_that_the_log_holds_keep_its_room_as_it_is() -> None:
    steps = Steps()
    steps.start("a", 10)
    held = steps.log.contents()
    assert steps.scheduler.use_pages(20, 20, 0) == []
    assert steps.log.contents() == held and held.pages
