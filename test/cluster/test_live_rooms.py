"""A prefill server over two hosts of namespaces, and a decode server over two others.

Each stage of the one reads from the stages of the other, on whatever host they are.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from support.live_hosts import LiveHosts, live_hosts
from support.live_server import live_server

from benchmark.hosts.namespaces import Network, why_no_hosts

pytestmark = [
    pytest.mark.alone,
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()),
]
FLAGS = ("--pp", "2", "--dtype", "float32", "--migration", "manual", "--pp-layer-partition")
BOOTSTRAP_PORT = 8998
NUM_PAGES, PAGE_SIZE = 20, 16
IDS = [5 + place * place % 200 for place in range(NUM_PAGES * PAGE_SIZE)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveHosts, LiveHosts]]:
    role = (*FLAGS, "8,8", "--disaggregation-mode", "prefill")
    with live_hosts(2, tmp_path_factory.mktemp("hosts"), *role, strangers=2) as prefill:
        others = Network(prefill.network.address, prefill.network.hosts[2:])
        role = (*FLAGS, "6,10", "--disaggregation-mode", "decode", "--cpu-threads-per-stage", "1")
        decode = LiveHosts(others, 2, prefill.key_file, role)
        for rank in (1, 0):
            decode.processes[rank] = decode.start(rank)
        decode.head.until("Ready:")
        yield prefill, decode


def body(room: int | None = None, host: str | None = None) -> dict[str, Any]:
    """A request; with a room, one of its halves."""
    rooms = {"bootstrap_room": room, "bootstrap_host": host, "bootstrap_port": BOOTSTRAP_PORT}
    sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    return {"input_ids": IDS, "sampling_params": sampling} | (rooms if room is not None else {})


def test_stages_on_any_host_read_those_on_any_other(pair: tuple[LiveHosts, LiveHosts]) -> None:
    prefill, decode = pair
    half = body(1, prefill.network.hosts[0].address)
    with ThreadPoolExecutor() as threads:
        asked = [
            threads.submit(requests.post, f"{server.url}/generate", json=half, timeout=60)
            for server in pair
        ]
        answers = [one.result() for one in asked]
    assert [one.status_code for one in answers] == [200, 200], [one.text for one in answers]
    assert decode.facts()["rooms"]["loaded_pages"] == NUM_PAGES - 1
    assert prefill.facts()["rooms"]["held_pages"] == 0
    with live_server(*FLAGS, "8,8") as whole:
        expected = requests.post(f"{whole.url}/generate", json=body(), timeout=60).json()
    assert answers[1].json()["output_ids"] == expected["output_ids"]
