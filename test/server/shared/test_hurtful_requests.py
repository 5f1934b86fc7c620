"""No request can hurt another: each of a long table gets its answer beside a stream that goes on.

How fast, and at what pace the stream goes on, is measured by
`benchmark/robustness/hurtful_requests.py`.
"""

import socket
from dataclasses import dataclass

import pytest
import requests
from support.live_server import LiveServer, wait_until, wait_until_pages_are_back

from benchmark.robustness.hurtful_table import HURTFUL_REQUESTS
from benchmark.robustness.neighbor import Neighbor

pytestmark = pytest.mark.multiproc

REASONS = [request.reason for request in HURTFUL_REQUESTS]


@dataclass
class Campaign:
    """What came of sending the whole table."""

    faults: dict[str, str]
    quiet: Neighbor
    beside: Neighbor


@pytest.fixture(scope="module")
def campaign(demo_server: LiveServer) -> Campaign:
    requests.post(f"{demo_server.url}/flush_cache", timeout=30).raise_for_status()
    with Neighbor(demo_server.url) as quiet:
        pass
    faults = {}
    with Neighbor(demo_server.url) as beside:
        for request in HURTFUL_REQUESTS:
            try:
                faults[request.reason] = request.fault_of(request.send(demo_server.url))
            except requests.RequestException as error:
                faults[request.reason] = repr(error)
    wait_until(lambda: demo_server.facts()["num_running_requests"] == 0)
    return Campaign(faults, quiet, beside)


@pytest.mark.parametrize("reason", REASONS)
def test_is_answered_as_it_must_be(campaign: Campaign, reason: str) -> None:
    assert campaign.faults[reason] == ""


def test_every_reason_is_given_once() -> None:
    assert len(set(REASONS)) == len(REASONS)


def test_the_stream_beside_was_complete_and_the_same(campaign: Campaign) -> None:
    assert campaign.quiet.error is None and campaign.beside.error is None
    assert set(campaign.beside.texts) == set(campaign.quiet.texts)
    assert len(campaign.quiet.texts[0]) > 0


def test_all_pages_are_back(campaign: Campaign, demo_server: LiveServer) -> None:
    wait_until_pages_are_back(demo_server)


def test_the_server_still_answers_right(campaign: Campaign, demo_server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
    reply = requests.post(
        f"{demo_server.url}/v1/chat/completions", json={"model": "m", **body}, timeout=30
    )
    assert reply.json()["choices"][0]["message"]["content"] == "42"


@pytest.mark.parametrize(
    "head",
    [
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"tex\r\n',
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b'Content-Length: 1000\r\n\r\n{"text": ',
        b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"GARBAGE\x00\xff\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
    ],
)
def test_a_body_that_stops_half_way_keeps_nobody_waiting(
    demo_server: LiveServer, head: bytes
) -> None:
    """Not while the connection is open, nor after it has been cut."""
    with socket.create_connection(("127.0.0.1", demo_server.port), timeout=30) as client:
        client.sendall(head)
        assert_serves(demo_server)
    assert_serves(demo_server)


def assert_serves(server: LiveServer) -> None:
    answer = server.generate(text="ab", sampling_params={"max_new_tokens": 1})
    assert answer.status_code == 200, answer.text
