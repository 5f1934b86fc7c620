"""Drafts are given where they cost others nothing, and what they wrote is never taken for more."""

from dataclasses import replace

from support.microbatches import BUDGET, LOAD
from support.pipelines import FakePipeline, make_request, new_scheduler, output_when_alone

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.microbatch import Chunk, Microbatch
from sgl_pipeline.requests import FinishReason, Lease, Request
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.scheduling.drafts import FIRST_CHANCES
from sgl_pipeline.scheduling.grammar_drafts import Draft, DraftKind, guessed
from sgl_pipeline.throttle.draft_budget import ROWS_UNTIMED, Acceptance

LOOP = [1, 2, 3, 4] * 4  # what follows is likely to go on like this
ABORTED = FinishReason("abort", message="the client went away")


def scheduler_of(
    *, draft_tokens: int = 4, num_pages: int = 40, page_size: int = 4
) -> StepScheduler:
    args = SchedulingArgs(page_size=page_size, draft_tokens=draft_tokens)
    return new_scheduler(args, ThrottleArgs(policy="throttle"), num_pages=num_pages, num_stages=1)


def decode_step(scheduler: StepScheduler, *requests: Request) -> Microbatch:
    """The first step after the prompts of `requests`, all of which drew 1."""
    for request in requests:
        scheduler.add(request)
    while True:
        microbatch = scheduler.next_microbatch(0.0)
        assert microbatch is not None
        if microbatch.num_decodes:
            return microbatch
        scheduler.on_result(microbatch.step_id, [1] * microbatch.num_samples, 0.0)


def loop_request(name: str = "loop", max_new_tokens: int = 9) -> Request:
    return make_request(name, LOOP, max_new_tokens)


def drafts_of(microbatch: Microbatch) -> list[tuple[int, ...]]:
    return [chunk.draft_ids for chunk in microbatch.chunks]


def test_a_decode_has_its_draft_behind_its_token() -> None:
    microbatch = decode_step(scheduler_of(), loop_request())
    chunk = microbatch.chunks[0]
    assert chunk.draft_ids == (2, 3, 4)  # ROWS_UNTIMED in all
    assert (chunk.start, chunk.length, chunk.num_samples) == (len(LOOP), ROWS_UNTIMED, ROWS_UNTIMED)
    assert microbatch.work.tokens == microbatch.num_samples == ROWS_UNTIMED
    assert microbatch.work.decodes == 1
    assert microbatch.work.decode_attended_tokens == len(LOOP) + 1
    assert microbatch.work.prefill_attended_tokens == sum(len(LOOP) + 1 + n for n in (1, 2, 3))


def test_without_draft_tokens_no_index_is_made() -> None:
    scheduler = scheduler_of(draft_tokens=0)
    assert drafts_of(decode_step(scheduler, loop_request())) == [()]
    assert not scheduler.drafts._drafters


def test_right_drafts_become_output_at_once() -> None:
    scheduler, request = scheduler_of(), loop_request()
    microbatch = decode_step(scheduler, request)
    (event,) = scheduler.on_result(microbatch.step_id, [2, 3, 1, 1], 0.0)
    assert event.token_ids == (2, 3, 1)
    assert request.output_ids == [1, 2, 3, 1]
    assert request.num_computed == request.num_scheduled == request.num_tokens - 1
    drafts = scheduler.drafts
    assert (drafts.num_steps, drafts.num_drafted, drafts.num_accepted) == (1, 3, 2)


def test_the_pipeline_counts_drafts() -> None:
    pipeline = FakePipeline(scheduler_of(num_pages=99), page_size=4)
    for number in range(3):
        pipeline.scheduler.add(loop_request(str(number), max_new_tokens=80))
    pipeline.drain()
    state, drafts = pipeline.core.state(0.0), pipeline.scheduler.drafts
    assert 0 < state.drafts.accepted_tokens == drafts.num_accepted
    assert state.drafts.accept_rate == drafts.num_accepted / drafts.num_drafted
    assert state.drafts.accept_length == 1.0 + drafts.num_accepted / drafts.num_steps
    # The prompts' steps draw the first tokens.
    num_drawn = 3 * len(output_when_alone(loop_request(max_new_tokens=80)))
    assert num_drawn - 3 <= state.decoded_tokens <= num_drawn
    assert state.prefill_tokens + state.cached_tokens == 3 * len(LOOP)


def test_drafts_end_before_the_request_must() -> None:
    # Two tokens are left, and the step draws one behind the draft.
    assert drafts_of(decode_step(scheduler_of(), loop_request(max_new_tokens=3))) == [(2,)]
    assert drafts_of(decode_step(scheduler_of(), loop_request(max_new_tokens=2))) == [()]


def test_the_draft_of_a_request_with_a_grammar_is_what_the_grammar_says_and_then_a_guess() -> None:
    """The grammar says 2, 3, 4 but is not sure of the last, and the loop goes on with 1."""
    scheduler, request = scheduler_of(), make_request("grammar", LOOP, 9, constrained=True)
    microbatch = decode_step(scheduler, request)
    assert drafts_of(microbatch) == [(2, 3, 4)]
    drafter = scheduler.drafts._drafters[request]
    kinds = (DraftKind.FORCED, DraftKind.FORCED, DraftKind.GUESS)
    assert drafter.draft == Draft((2, 3, 4), kinds)
    scheduler.on_result(microbatch.step_id, [2, 3, 1, 1], 0.0)
    # Of two forced tokens both were right, the guess was wrong.
    first = FIRST_CHANCES[DraftKind.FORCED]
    assert drafter.acceptance[DraftKind.FORCED].chance == (2 + 2 * first) / (2 + 2)
    assert drafter.acceptance[DraftKind.GUESS].chance == (0 + 1) / (1 + 2)


def test_a_kind_that_a_draft_has_none_of_is_slowly_forgotten() -> None:
    scheduler, request = scheduler_of(), loop_request()
    decode_step(scheduler, request)
    drafter, wrong = scheduler.drafts._drafters[request], Acceptance(9.0, 0.0, 0.9)
    drafter.acceptance[DraftKind.FORCED] = wrong
    drafter.learn(3, 1)
    assert drafter.acceptance[DraftKind.FORCED] == wrong
    drafter.note_step(guessed([2, 3]))
    assert wrong.chance < drafter.acceptance[DraftKind.FORCED].chance < 0.9


def test_requests_with_a_lease_have_none() -> None:
    scheduler, request = scheduler_of(), loop_request()
    chunk = decode_step(scheduler, request).chunks[0]
    undrafted = [Chunk(request, chunk.start, 1, is_decode=True, samples=True)]
    no_prompt_waits = replace(LOAD, waiting_tokens=0)
    assert scheduler.drafts.extend(undrafted, no_prompt_waits, BUDGET) != undrafted
    request.lease = Lease("a prefill server", 1)
    assert scheduler.drafts.extend(undrafted, no_prompt_waits, BUDGET) == undrafted


def test_rows_by_themselves_come_first() -> None:
    plain = make_request("plain", [9, 8, 7, 6, 5], 9)
    microbatch = decode_step(scheduler_of(), loop_request(), plain)
    assert [chunk.request.request_id for chunk in microbatch.chunks] == ["plain", "loop"]
    assert [len(draft) for draft in drafts_of(microbatch)] == [0, ROWS_UNTIMED - 2]


def test_pages_for_drafts_are_those_that_no_running_request_is_about_to_need() -> None:
    """The prompt fills eight pages of two; the ninth has room for one draft token."""
    for num_pages, draft in ((10, (2,)), (11, (2, 3, 4))):
        scheduler = scheduler_of(num_pages=num_pages, page_size=2)
        assert drafts_of(decode_step(scheduler, loop_request(max_new_tokens=5))) == [draft]


def test_steps_with_prompts_have_none() -> None:
    scheduler = scheduler_of()
    microbatch = decode_step(scheduler, loop_request())
    request, start = microbatch.chunks[0].request, microbatch.chunks[0].start
    undrafted = [Chunk(request, start, 1, is_decode=True, samples=True)]
    assert scheduler.drafts.extend(undrafted, LOAD, BUDGET) is undrafted
    no_prompt_waits = replace(LOAD, waiting_tokens=0)
    assert scheduler.drafts.extend(undrafted, no_prompt_waits, BUDGET) != undrafted
    with_prompt = [*undrafted, Chunk(request, 0, 4, is_decode=False, samples=False)]
    assert scheduler.drafts.extend(with_prompt, no_prompt_waits, BUDGET) is with_prompt


def test_an_aborted_draft_reaches_no_cache() -> None:
    scheduler, request = scheduler_of(), loop_request()
    microbatch = decode_step(scheduler, request)
    scheduler.abort("loop", ABORTED)
    assert scheduler.on_result(microbatch.step_id, [2, 3, 4, 1], 0.0) == []
    scheduler.check_invariants()
    assert not scheduler.drafts._drafters
    # The prompt and the token that was computed are cached: no whole page more.
    assert len(scheduler._pages.pages_in_use()) == 4
