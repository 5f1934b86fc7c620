"""How the reserve for running decodes follows their remaining output and the retractions."""

from support.pipelines import FakePipeline, make_request, new_scheduler

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.scheduling.decode_reserve import DecodeReserve


def test_it_starts_with_seven_tenths_of_the_remaining_output() -> None:
    reserve = DecodeReserve(page_size=16, pipeline_depth=4)
    assert reserve.pages(1600) == 70
    assert reserve.pages(1601) == 71


def test_each_step_in_flight_keeps_a_page_at_least() -> None:
    assert DecodeReserve(page_size=16, pipeline_depth=4).pages(0) == 4


def test_the_ratio_falls_with_every_step_down_to_a_tenth() -> None:
    reserve = DecodeReserve(page_size=1, pipeline_depth=1)
    ratios = []
    for _ in range(400):
        reserve.note_step(num_shortages=0)
        ratios.append(reserve.ratio)
    assert ratios[:3] == [698, 696, 694]
    assert ratios[-1] == 100


def test_the_ratio_rises_once_for_a_step_that_retracted_up_to_one() -> None:
    reserve = DecodeReserve(page_size=1, pipeline_depth=1)
    reserve.note_step(num_shortages=3)
    assert reserve.ratio == 748
    reserve.note_step(num_shortages=3)
    assert reserve.ratio == 746
    for count in range(4, 20):
        reserve.note_step(num_shortages=count)
    assert reserve.ratio == 998


def test_asking_for_the_load_changes_nothing() -> None:
    scheduler = new_scheduler(
        SchedulingArgs(page_size=2),
        ThrottleArgs(policy="throttle-adaptive"),
        num_pages=400,
        num_stages=2,
    )
    pipeline = FakePipeline(scheduler, 2)
    scheduler.add(make_request("a", [1, 2, 3], 101))
    scheduler.add(make_request("b", [4, 5, 6], 201))
    for _ in range(10):
        pipeline.fill()
        pipeline.complete()
        assert scheduler.load() == scheduler.load()
    decoding = scheduler.requests()
    remaining = sum(r.stops.max_new_tokens - len(r.output_ids) for r in decoding)
    ratio = 700 - 2 * len(pipeline.microbatches)
    assert scheduler.load().reserved_pages == -(-remaining * ratio // 2000)


def test_retractions_for_want_of_pages_raise_the_ratio_and_those_for_priority_do_not() -> None:
    for priority, num_pages in ((0, 24), (1, 400)):
        scheduler = new_scheduler(
            SchedulingArgs(page_size=1, max_running_requests=2, preemption_threshold=0),
            ThrottleArgs(policy="sarathi"),
            num_pages=num_pages,
            num_stages=1,
        )
        pipeline = FakePipeline(scheduler, 1)
        for number in range(3):
            if number == 2:
                pipeline.schedule()
                pipeline.complete()
            prompt = [number] * 4
            scheduler.add(make_request(str(number), prompt, 12, priority=priority * number))
        pipeline.drain()
        assert scheduler.num_retractions > 0
        fell_only = 700 - 2 * len(pipeline.microbatches)
        ratio = scheduler._decode_reserve.ratio
        assert ratio > fell_only if priority == 0 else ratio == fell_only
