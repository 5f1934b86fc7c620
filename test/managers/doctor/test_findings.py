"""What is wrong with made-up hosts and links, how their clocks differ, and how all that reads."""

from dataclasses import replace
from typing import Any

import pytest
from support.doctor_hosts import VERSIONS, facts_of, probed

from sgl_pipeline.managers.doctor.doctor_messages import Probed
from sgl_pipeline.managers.doctor.findings import Findings
from sgl_pipeline.managers.doctor.pipeline_forecast import measured_network
from sgl_pipeline.managers.doctor.report import as_facts, as_text

BOTH_WAYS = {(0, 1): probed(1, 4.0), (1, 0): probed(0, 3.0, median_ms=4.0, worst_ms=9.0)}


def findings_of(**other: Any) -> Findings:
    """Rank 0 as it should be, and another host."""
    return Findings(hosts={0: facts_of(0), 1: facts_of(1, **other)}, probes=BOTH_WAYS)


def test_equal_hosts_with_a_link_have_no_fault() -> None:
    findings = findings_of()
    assert findings.faults == ()
    assert "nothing is wrong" in as_text(findings, "no forecast", findings.faults)
    assert as_facts(findings, "no forecast", [])["is_well"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"version": "0.0.1"}, "runs sgl_pipeline 0.0.1"),
        ({"versions": VERSIONS | {"torch": "1.0"}}, "has torch 1.0, rank 0 2.9"),
        ({"versions": VERSIONS | {"sglang": ""}}, "has no sglang"),
        (
            {"model_digest": "config-others-x"},
            "is not that of host 0 (name0, 10.0.0.0:5000): the names",
        ),
        ({"model_digest": ""}, "one of them names no model"),
        ({"model_digest": "", "model_fault": "it is not there"}, "it is not there"),
    ],
)
def test_a_host_that_differs_is_named_once_with_what_to_do(
    other: dict[str, Any], words: str
) -> None:
    findings = findings_of(**other)
    (fault,) = findings.faults
    assert fault.startswith("host 1 (name1, 10.0.0.1:5000)") and words in fault
    assert f"wrong:\n  {fault}" in as_text(findings, "no forecast", findings.faults)


def test_a_model_that_rank_0_lacks_is_no_fault_of_the_others() -> None:
    hosts = {0: facts_of(0, model_digest="", model_fault="it is not there"), 1: facts_of(1)}
    (fault,) = Findings(hosts=hosts, probes=BOTH_WAYS).faults
    assert fault.startswith("host 0")


def test_a_link_that_fails_one_way_is_named_and_has_no_rate() -> None:
    probes = BOTH_WAYS | {(1, 0): Probed(0, None, "10.0.0.0:5000 cannot be reached")}
    findings = replace(findings_of(), probes=probes)
    assert findings.faults == ("host 1 has no link to host 0: 10.0.0.0:5000 cannot be reached",)
    assert findings.links == []


def test_links_of_a_host_that_was_lost_are_not_named_beside_it() -> None:
    findings = Findings(
        hosts={0: facts_of(0)},
        probes={(0, 1): Probed(1, None, "gone"), (1, 0): Probed(0, None, "gone")},
        connection_faults=("host 1 is lost",),
    )
    assert findings.faults == ("host 1 is lost",)


def test_a_link_has_the_rate_to_each_side_and_the_worst_of_both() -> None:
    (link,) = findings_of().links
    # Who dials measures what comes: 4 Gbit/s came to host 0.
    assert (link.gbit_per_s_there, link.gbit_per_s_back) == (3.0, 4.0)
    assert (link.gbit_per_s, link.median_ms, link.worst_ms) == (3.0, 3.0, 9.0)


def test_clocks_are_ahead_by_what_a_common_moment_shows() -> None:
    # At one moment the monotonic clocks read 50 and 150 s, the time of day 1050 and 1050.25 s.
    probes = BOTH_WAYS | {(0, 1): probed(1, offset_s=-100.0)}
    clock = replace(findings_of(wall_s=900.25), probes=probes).clock(1)
    assert clock is not None
    assert clock.monotonic_s == 100.0
    assert clock.wall_ms == pytest.approx(250.0)
    assert clock.error_ms == 1.0


def test_the_network_on_paper_is_the_one_that_was_measured() -> None:
    findings = Findings(
        hosts={0: facts_of(0, step_ms=10.0), 1: facts_of(1, step_ms=20.0)}, probes=BOTH_WAYS
    )
    network = measured_network(findings.hosts, findings.links, 3)
    assert [host.stages for host in network.hosts] == [1, 2]
    assert [host.speed for host in network.hosts] == [1.0, 0.5]
    # Two stages share what is available on the second.
    assert [host.memory for host in network.hosts] == ["8192MiB", "4096MiB"]
    link = network.between(0, 1)
    assert link is not None
    assert (link.gbit_per_s, link.delay_ms) == (3.0, 1.5)
