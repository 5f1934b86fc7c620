"""A full queue, priorities and preemption on a live server that runs one request at a time.

With one request at a time, requests end in the order in which they were let in, and the trace has
that order. Whether a request waits or runs is asked before the next one is sent.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from support.live_server import ANSWER_S, LiveServer, live_server, wait_until, wait_until_idle

from sgl_pipeline.records.trace import RequestRecord, read_trace

pytestmark = pytest.mark.multiproc
THRESHOLD = 10
QUEUE_LIMIT = 3
FOR_MINUTES = 30_000
SHORT = 24


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "steps.jsonl"


@pytest.fixture(scope="module")
def server(trace: Path) -> Iterator[LiveServer]:
    flags = ["--enable-priority-scheduling", "--default-priority-value", "0"]
    flags += ["--priority-scheduling-preemption-threshold", str(THRESHOLD)]
    flags += ["--max-running-requests", "1", "--max-queued-requests", str(QUEUE_LIMIT)]
    flags += ["--trace-path", str(trace)]
    with live_server("--pp", "2", "--dtype", "float32", *flags) as server:
        yield server


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def generate(server: LiveServer, rid: str, num_tokens: int, **body: Any) -> requests.Response:
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return server.generate(text=f"Say: {rid[:3]}", rid=rid, sampling_params=sampling, **body)


def explain(server: LiveServer, rid: str) -> dict[str, Any]:
    """What the server says of a request; nothing where it neither waits nor runs."""
    reply = requests.get(f"{server.url}/pipeline/explain/{rid}", timeout=ANSWER_S)
    return dict(reply.json()) if reply.status_code == 200 else {}


class Guests:
    """Requests that are sent one after the other, each once the one before is where it should be.

    `replies` has them by their ids.
    """

    def __init__(self, server: LiveServer, clients: ThreadPoolExecutor) -> None:
        self._server, self._clients = server, clients
        self.replies: dict[str, Future[requests.Response]] = {}

    def run(self, rid: str, num_tokens: int = FOR_MINUTES, **body: Any) -> None:
        """Sends one that has drawn some tokens when this returns."""
        self._send(rid, num_tokens, **body)
        wait_until(lambda: explain(self._server, rid).get("output_tokens", 0) >= 20)

    def wait(self, rid: str, num_tokens: int = SHORT, **body: Any) -> dict[str, Any]:
        """Sends one that waits when this returns, with the reason."""
        self._send(rid, num_tokens, **body)
        wait_until(lambda: bool(explain(self._server, rid)))
        told = explain(self._server, rid)
        assert told["state"] == "waiting", told
        return told

    def _send(self, rid: str, num_tokens: int, **body: Any) -> None:
        self.replies[rid] = self._clients.submit(generate, self._server, rid, num_tokens, **body)

    def leave(self, rid: str) -> None:
        """Ends that request, so that others get its place."""
        requests.post(f"{self._server.url}/abort_request", json={"rid": rid}, timeout=30)
        self.replies.pop(rid).result()

    def output_ids(self, rid: str) -> list[int]:
        reply = self.replies[rid].result()
        assert reply.status_code == 200, reply.text
        return list(reply.json()["output_ids"])


@pytest.fixture
def guests(server: LiveServer, clients: ThreadPoolExecutor) -> Iterator[Guests]:
    yield Guests(server, clients)
    requests.post(f"{server.url}/abort_request", json={"abort_all": True}, timeout=30)
    wait_until_idle(server)


def ended(server: LiveServer, trace: Path, *rids: str) -> list[RequestRecord]:
    """Those of the requests that ran to their end, in the order in which they did."""
    wait_until_idle(server)
    records = [one for step in read_trace(trace) for one in step.ended]
    return [one for one in records if one.request_id in rids]


def test_the_higher_priority_goes_first_and_equal_ones_by_arrival(
    server: LiveServer, trace: Path, guests: Guests
) -> None:
    guests.run("holder")
    guests.wait("low-1")
    guests.wait("low-2", priority=0)
    high = guests.wait("high", priority=THRESHOLD)
    assert (high["priority"], high["rule"], high["num_ahead"]) == (THRESHOLD, "running-limit", 0)
    assert explain(server, "low-2")["num_ahead"] == 2
    guests.leave("holder")
    lengths = {rid: len(guests.output_ids(rid)) for rid in ("low-1", "low-2", "high")}
    assert set(lengths.values()) == {SHORT}
    order = ended(server, trace, *lengths)
    assert [one.request_id for one in order] == ["high", "low-1", "low-2"]
    assert [one.num_retractions for one in order] == [0, 0, 0]


def fill(guests: Guests) -> list[str]:
    """One runs, and as many wait as may."""
    guests.run("holder")
    names = [f"low-{number}" for number in range(QUEUE_LIMIT)]
    for name in names:
        guests.wait(name)
    return names


def test_a_full_queue_is_a_503_that_says_when_to_come_back(
    server: LiveServer, trace: Path, guests: Guests
) -> None:
    alone = generate(server, "low-alone", SHORT).json()["output_ids"]
    waiting = fill(guests)
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    refused = [
        generate(server, "one-too-many", SHORT),
        requests.post(f"{server.url}/v1/chat/completions", json=chat, timeout=30),
    ]
    # SGLang's front has answered a stream with 200 before it knows.
    streamed = generate(server, "streamed", SHORT, stream=True)
    assert streamed.status_code == 200 and '"code":503' in streamed.text
    for reply in refused:
        assert reply.status_code == 503, reply.text
        assert int(reply.headers["Retry-After"]) > 0
    for reply in (*refused, streamed):
        assert f"{QUEUE_LIMIT} requests wait already" in reply.text
        assert "--max-queued-requests" in reply.text
    assert requests.get(f"{server.url}/health", timeout=30).status_code == 200
    guests.leave("holder")
    assert [guests.output_ids(rid) for rid in waiting] == [alone] * QUEUE_LIMIT
    assert [one.request_id for one in ended(server, trace, *waiting)][-QUEUE_LIMIT:] == waiting
    assert generate(server, "afterwards", 2).status_code == 200


def test_a_higher_priority_takes_the_last_place_of_a_full_queue(
    server: LiveServer, trace: Path, guests: Guests
) -> None:
    first, second, last = fill(guests)
    guests.wait("vip", priority=1)
    displaced = guests.replies.pop(last).result()
    assert displaced.status_code == 503
    assert int(displaced.headers["Retry-After"]) > 0
    assert "aborted by a higher priority request" in displaced.text
    assert generate(server, "no-vip", SHORT, priority=0).status_code == 503
    guests.leave("holder")
    for rid in guests.replies:
        guests.output_ids(rid)
    order = [one.request_id for one in ended(server, trace, "vip", first, second, last)]
    assert order[-3:] == ["vip", first, second]


def test_only_much_more_priority_takes_the_place_of_a_request_that_runs(
    server: LiveServer, trace: Path, guests: Guests
) -> None:
    """What was taken from is computed again, and its tokens are those of an undisturbed run."""
    num_tokens = 800  # enough to ask three things meanwhile, however slow the answers are
    alone = generate(server, "victim-alone", num_tokens).json()["output_ids"]
    requests.post(f"{server.url}/flush_cache", timeout=30)
    guests.run("victim", num_tokens, priority=0)
    guests.wait("no-more-than-the-threshold", priority=THRESHOLD)
    assert explain(server, "victim")["state"] == "decoding"
    urgent = generate(server, "urgent", SHORT, priority=THRESHOLD + 1)
    assert urgent.status_code == 200
    assert guests.output_ids("victim") == alone
    guests.output_ids("no-more-than-the-threshold")
    order = ended(server, trace, "urgent", *guests.replies)
    retractions = {one.request_id: one.num_retractions for one in order}
    assert list(retractions) == ["urgent", "no-more-than-the-threshold", "victim"]
    assert retractions.pop("victim") == 1
    assert set(retractions.values()) == {0}
