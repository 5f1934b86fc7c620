"""What an idle pair is judged by."""

from dataclasses import replace

from benchmark.disaggregation.idle import (
    Answered,
    answer_verdicts,
    idle_table,
    process_verdicts,
)
from benchmark.disaggregation.pair import ProcessFacts

FIRST = [Answered("42", 1.0, is_good=True), Answered("cat", 2.0, is_good=True)]
BEFORE = {
    "prefill main": ProcessFacts(pss_mib=200.0, own_mib=90.0, descriptors=40, cpu_s=6.0),
    "router": ProcessFacts(pss_mib=300.0, own_mib=90.0, descriptors=13, cpu_s=4.0),
}


def test_answers_must_be_the_same_and_soon() -> None:
    assert all(one.passed for one in answer_verdicts(FIRST, FIRST, 2.0))
    late = answer_verdicts(FIRST, FIRST, 1.9)
    assert [one.passed for one in late] == [True, False]
    other = answer_verdicts(FIRST, [FIRST[0], replace(FIRST[1], text="cut")], 5.0)
    assert not other[0].passed and "1 of 2" in other[0].seen and "cut" in other[0].seen
    refused = [replace(one, text="503", is_good=False) for one in FIRST]
    assert not answer_verdicts(refused, refused, 5.0)[0].passed


def test_processor_time_counts_while_idle() -> None:
    after = {name: replace(one, cpu_s=one.cpu_s + 3.6) for name, one in BEFORE.items()}
    rows = idle_table(BEFORE, after, 360.0).splitlines()[2:]
    assert rows[0] == "| prefill main | 3.6 | 1.00% | 200 -> 200 | 40 -> 40 |"
    assert rows[-1] == "| all | 7.2 | 2.00% |  |  |"


def test_a_process_that_ended_is_noticed() -> None:
    (found,) = process_verdicts(BEFORE, {"router": BEFORE["router"]})
    assert not found.passed and found.seen == "prefill main"
    assert process_verdicts(BEFORE, BEFORE)[0].passed
