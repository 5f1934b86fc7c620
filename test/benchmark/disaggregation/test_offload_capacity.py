from benchmark.disaggregation.apart_report import LoadRun
from benchmark.disaggregation.mixed_clients import Answered
from benchmark.disaggregation.mixed_load import Place
from benchmark.disaggregation.offload_capacity import (
    OffloadRun,
    Sample,
    reasons,
    table,
    unequal,
)

STATE = {
    "num_running_requests": 5,
    "rooms": {"offload": {"requests": 2, "wait_share": 0.25, "last_refusal": "no room"}},
}


def run(ratio: str, number: int, output: tuple[int, ...]) -> OffloadRun:
    answer = Answered(
        place=Place("load", 1, "answers", 0, 0),
        input_tokens=8,
        sent_s=0.0,
        moments_s=tuple(0.5 + 0.1 * index for index in range(len(output))),
        tokens=tuple(range(1, len(output) + 1)),
        output=output,
    )
    load = LoadRun(setup=ratio, load="load", round=number, seconds=2.0, answers=(answer,), busy=())
    return OffloadRun(ratio, load, (Sample.of(STATE), Sample(7, 0, 0.5, "steps wait")))


def test_a_server_that_offloads_none_has_no_state_of_it() -> None:
    state = {"num_running_requests": 5, "rooms": {"offload": None}}
    assert Sample.of(state) == Sample(5, 0, 0.0, "")


def test_figures_are_means_of_what_was_seen() -> None:
    found = run("inf", 1, (1, 2, 3)).figures()
    assert (found["running at once"], found["of these offloaded"]) == (6.0, 1.0)
    assert round(found["TPOT p50 ms"]) == 100 and found["tokens/s out"] == 1.5
    assert "| inf | 6.0 (6.0 to 6.0) | 1.0 (1.0 to 1.0) |" in table([run("inf", 1, (1, 2, 3))])
    assert "| inf | 1 | 50% | steps wait |" in reasons([run("inf", 1, (1, 2, 3))])


def test_answers_are_compared_as_far_as_both_go() -> None:
    assert not unequal([run("0", 1, (1, 2, 3)), run("inf", 1, (1, 2))])
    assert len(unequal([run("0", 1, (1, 2, 3)), run("inf", 1, (1, 4))])) == 1
