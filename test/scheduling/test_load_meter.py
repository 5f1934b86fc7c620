"""The load that policies see: the wait of the newest request, and the prompt that is begun."""

from support.pipelines import make_request, new_scheduler

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.requests import FinishReason, Request


def arrived(request_id: str, arrival_s: float) -> Request:
    request = make_request(request_id, [ord(request_id)] * 20)
    request.arrival_s = arrival_s
    return request


def test_the_newest_wait_is_that_of_the_newest_prompt_that_is_not_scheduled_whole() -> None:
    """Of those that wait; where none waits, of those that are being prefilled.
    `first_prompt_tokens` are those of the first one that is being prefilled."""
    throttle = ThrottleArgs(policy="sarathi", max_prefill_tokens=16, min_prefill_tokens=16)
    scheduler = new_scheduler(
        SchedulingArgs(page_size=2, max_running_requests=2), throttle, num_pages=400, num_stages=8
    )
    for request in (arrived("a", 1.0), arrived("b", 2.0), arrived("c", 4.0)):
        scheduler.add(request)
    scheduled = []
    waits_ms = []
    first_tokens = [scheduler.load().first_prompt_tokens]
    for _ in range(2):
        step = scheduler.next_microbatch(now_s=10.0)
        assert step is not None
        scheduled.append([(one.request.request_id, one.end) for one in step.chunks])
        waits_ms.append(scheduler.load().newest_wait_ms)
        first_tokens.append(scheduler.load().first_prompt_tokens)
        if len(scheduled) == 1:
            scheduler.abort("c", FinishReason("abort", message="gone"))
    assert scheduled == [[("a", 16)], [("a", 20), ("b", 12)]]
    assert waits_ms == [6000.0, 8000.0]
    assert first_tokens == [0, 4, 8]
    scheduler.next_microbatch(now_s=11.0)
    assert scheduler.load().first_prompt_tokens == 0
    assert scheduler.load().newest_wait_ms == 0.0
