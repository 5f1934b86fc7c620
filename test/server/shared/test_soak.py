"""A few seconds of `benchmark/robustness/soak.py`: many clients, many of whom leave early."""

import pytest
from support.live_server import LiveServer

from benchmark.robustness.soak import Soak
from benchmark.robustness.soak_clients import SoakClients

pytestmark = pytest.mark.multiproc


def test_clients_that_come_and_go_leave_nothing_behind(demo_server: LiveServer) -> None:
    clients = SoakClients(demo_server.url, num_clients=20, departing_share=1 / 3, seed=7)
    soak, outcomes = Soak(demo_server.url, clients, process=None), clients.tally.outcomes
    # Few are set out to abort, and a fast server has answered some of them before they do.
    for _ in range(5):
        soak.run(duration_s=6)
        if all(outcomes[ending] > 0 for ending in ("served", "left", "aborted")):
            break
    else:
        pytest.fail(f"not all endings came up: {outcomes}")
    verdicts = soak.verdicts(warm_up_s=0, most_growth=0)
    assert [verdict for verdict in verdicts if not verdict.passed] == [], clients.tally.failures
