"""What a soak of two servers is judged by, against hand-worked minutes."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmark.disaggregation.pair import ProcessFacts, ServerFacts, memory_mib, role_of
from benchmark.disaggregation.soak_report import (
    Limits,
    Minute,
    one_line,
    record_of,
    router_line,
    verdict_table,
    verdicts,
)

LIMITS = Limits(warm_up_s=60.0, memory_share=0.1, descriptors=2)
REST = ServerFacts(
    running=0,
    waiting=0,
    free_pages=8,
    total_pages=8,
    rooms=0,
    pages=0,
    transferred=5,
    failed=1,
)
NAMES = ("prefill main", "decode stage 0", "router")


def minute(elapsed_s: float, own_mib: float = 100.0, descriptors: int = 7) -> Minute:
    facts = ProcessFacts(pss_mib=300.0, own_mib=own_mib, descriptors=descriptors, cpu_s=1.0)
    return Minute(
        elapsed_s,
        Counter(served=3, left=1, failed=0, stuck=0),
        {"prefill": REST, "decode": REST},
        dict.fromkeys(NAMES, facts),
    )


# Twice as large in the warm-up, which does not count.
MINUTES = [minute(0.0, 50.0), minute(60.0), minute(120.0)]


def failed(minutes: list[Minute]) -> list[str]:
    return [one.what for one in verdicts(minutes, LIMITS) if not one.passed]


def test_a_quiet_soak_passes() -> None:
    found = verdicts(MINUTES, LIMITS)
    assert all(one.passed for one in found)
    assert "memory of router" not in [one.what for one in found]
    assert "FAILED" not in verdict_table(found)


@pytest.mark.parametrize(
    ("last", "what"),
    [
        (replace(MINUTES[2], outcomes=Counter(served=3, failed=1)), "requests that failed"),
        (replace(MINUTES[2], outcomes=Counter(served=3, stuck=1)), "requests stuck at the client"),
        *(
            (replace(MINUTES[2], servers={"prefill": REST, "decode": replace(REST, **kept)}), what)
            for what, kept in [
                ("decode server at rest", {"pages": 1}),
                ("decode server at rest", {"rooms": 1}),
                ("decode server at rest", {"free_pages": 7}),
                ("decode server at rest", {"waiting": 1}),
            ]
        ),
        (
            replace(MINUTES[2], processes={name: MINUTES[2].processes[name] for name in NAMES[1:]}),
            "processes that came or went",
        ),
    ],
)
def test_a_fault_is_named(last: Minute, what: str) -> None:
    assert failed([*MINUTES[:2], last]) == [what]


def test_growth_is_judged_from_the_end_of_the_warm_up() -> None:
    assert failed([*MINUTES[:2], minute(120.0, own_mib=109.0)]) == []
    grown = [*MINUTES[:2], minute(120.0, own_mib=111.0)]
    assert failed(grown) == ["memory of prefill main", "memory of decode stage 0"]
    assert "100.0 -> 111.0 MiB, +11.00 MiB/min" in router_line(grown, LIMITS)
    assert failed([*MINUTES[:2], minute(120.0, descriptors=9)]) == []
    many = failed([*MINUTES[:2], minute(120.0, descriptors=10)])
    assert many == ["descriptors of prefill main", "descriptors of decode stage 0"]


def test_nothing_is_judged_that_was_seen_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        verdicts(MINUTES[:2], LIMITS)


def test_a_line_and_the_record_have_all_that_was_seen() -> None:
    line = one_line(MINUTES[2])
    assert "2 min: 3 served, 1 left; prefill: 0 running, 0 rooms, 0 pages kept, 5 rooms" in line
    assert "CPU 3 s" in line and "decode stage 0 300 (7)" in line
    (_, _, last) = record_of(MINUTES)["minutes"]
    assert last["own_mib"]["router"] == 100.0
    assert last["servers"]["decode"]["transferred"] == 5


def test_rooms_and_pages_of_both_sides_are_counted() -> None:
    rooms = dict.fromkeys(
        ("bootstrap_requests", "transfer_requests", "held_pages", "promised_pages"), 2
    )
    more = {"transferred": 9, "bootstrap_failed": 1, "transfer_failed": 3}
    state: dict[str, Any] = {
        "num_running_requests": 1,
        "num_waiting_requests": 0,
        "free_pages": 5,
        "total_pages": 8,
        "rooms": rooms | more,
    }
    facts = ServerFacts.of(state)
    assert (facts.rooms, facts.pages, facts.transferred, facts.failed) == (4, 4, 9, 4)
    assert not facts.is_at_rest


def test_pages_of_files_are_no_growth() -> None:
    rollup = (
        "55c681fe9000-7ffe90771000 ---p 00000000 00:00 0    [rollup]\n"
        "Rss:                9000 kB\n"
        "Pss:                4096 kB\n"
        "Pss_Anon:           1024 kB\n"
        "Pss_File:           2048 kB\n"
        "Pss_Shmem:          1024 kB\n"
    )
    assert memory_mib(rollup) == (4.0, 2.0)


def test_servers_are_named_by_their_role() -> None:
    assert role_of(["python", "--disaggregation-mode", "decode", "--pp", "1"]) == "decode"
    assert role_of(["sglang::router"]) == ""
