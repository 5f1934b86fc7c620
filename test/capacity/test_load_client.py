"""The clients against a made-up server that answers at known moments."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from sgl_pipeline.capacity.load_client import LoadClient
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.simulator.workload import Segment, SimulatedRequest

FIRST_S, GAP_S = 0.1, 0.02


class Answer(BaseHTTPRequestHandler):
    """Streams the tokens that are asked for; a prompt of `odd` tokens gets another answer."""

    bodies: ClassVar[list[dict[str, Any]]] = []
    arrivals_s: ClassVar[list[float]] = []
    odd: ClassVar[dict[int, str]] = {}

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.arrivals_s.append(time.perf_counter())
        what = self.odd.get(len(body["input_ids"]), "")
        self.send_response(503 if what == "refused" else 200)
        self.end_headers()
        if what == "refused":
            self.wfile.write(b"the queue is full")
            return
        time.sleep(FIRST_S)
        count = body["sampling_params"]["max_new_tokens"]
        for token in range(1, count + (what != "short")):
            self._part({"text": "a", "meta_info": {"completion_tokens": token}})
            if token < count:
                time.sleep(GAP_S)
        if what == "error":
            self._part({"error": {"message": "a stage is lost"}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _part(self, part: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(part).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(odd: dict[int, str]) -> Iterator[str]:
    Answer.bodies, Answer.arrivals_s, Answer.odd = [], [], odd
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def request(arrival_s: float, inputs: int, outputs: int, first: int = 0) -> SimulatedRequest:
    return SimulatedRequest(
        arrival_s=arrival_s, prompt=(Segment(first, inputs),), output=Segment(10**6, outputs)
    )


def test_times_and_moments_are_those_of_the_server() -> None:
    with served({}) as url:
        load = [request(0.0, 5, 6), request(0.3, 5, 1)]
        found = LoadClient(url, 100, "secret").serve(load)
    first, second = found.latencies
    assert first is not None and second is not None
    # A busy machine is late, never early.
    assert FIRST_S * 1e3 <= first.ttft_ms < FIRST_S * 1e3 + 150
    assert first.tpot_ms is not None
    assert GAP_S * 1e3 * 0.9 <= first.tpot_ms < GAP_S * 1e3 + 30
    assert second.tpot_ms is None
    assert Answer.arrivals_s[1] - Answer.arrivals_s[0] == pytest.approx(0.3, abs=0.15)
    assert 0 < found.total_tokens_per_s < 17 / 0.3
    assert Answer.bodies[0]["sampling_params"]["ignore_eos"] is True


def test_equal_ids_stay_equal_and_all_are_of_the_vocabulary() -> None:
    with served({}) as url:
        load = [request(0.0, 30, 1), request(0.0, 30, 1), request(0.0, 30, 1, first=7)]
        LoadClient(url, 50, None).alone(load)
    one, same, other = (body["input_ids"] for body in Answer.bodies)
    assert one == same and one[7:] == other[:-7] and one != other
    assert all(0 <= token < 50 for token in one)


def test_requests_alone_wait_for_each_other() -> None:
    with served({}) as url:
        LoadClient(url, 100, None).alone([request(0.0, 5, 2), request(0.0, 5, 2)])
    assert Answer.arrivals_s[1] - Answer.arrivals_s[0] >= FIRST_S + GAP_S


def test_requests_that_fail_are_none_and_the_reasons_are_kept() -> None:
    with served({1: "refused", 2: "short", 3: "error"}) as url:
        client = LoadClient(url, 100, None)
        found = client.serve([request(0.0, inputs, 3) for inputs in (1, 2, 3, 4)])
    assert [one is None for one in found.latencies] == [True, True, True, False]
    reasons = "; ".join(client.failures)
    assert "status 503: the queue is full" in reasons
    assert "2 of 3 tokens" in reasons and "a stage is lost" in reasons
    assert sum(client.failures.values()) == 3


def test_a_server_that_answers_nothing_is_an_error_with_its_reason() -> None:
    with served({5: "refused"}) as url, pytest.raises(ConfigurationError, match="queue is full"):
        LoadClient(url, 100, None).serve([request(0.0, 5, 2)])
    with pytest.raises(ConfigurationError, match="answered no request"):
        LoadClient("http://127.0.0.1:9", 100, None).serve([request(0.0, 5, 2)])
