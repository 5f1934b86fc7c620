"""A few seconds of `benchmark/soak.py`: clients of all sorts, many of which leave early."""

import pytest
from support.live_server import LiveServer

from benchmark.soak import Soak
from benchmark.soak_clients import SoakClients

pytestmark = pytest.mark.multiproc


def test_clients_that_come_and_go_leave_nothing_behind(demo_server: LiveServer) -> None:
    clients = SoakClients(demo_server.url, num_clients=20, departing_share=1 / 3, seed=7)
    soak = Soak(demo_server.url, clients, process=None)
    soak.run(duration_s=6)
    verdicts = soak.verdicts(warm_up_s=0, most_growth=0)
    assert [verdict for verdict in verdicts if not verdict.passed] == [], clients.tally.failures
    assert all(clients.tally.outcomes[ending] > 0 for ending in ("served", "left", "aborted"))
