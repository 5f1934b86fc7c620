"""Clients of a mixed load: what they ask, when they leave, and what they make of errors."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmark.disaggregation.mixed_clients import prefill_seconds, run_load
from benchmark.disaggregation.mixed_load import Kind, MixedLoad
from benchmark.support.engine import EngineFailure

STREAMS = Kind(name="streams", input_tokens=4, output_tokens=3, clients=2)
PROMPTS = Kind(name="prompts", input_tokens=9, output_tokens=2, prefill_share=0.5)
LOAD = MixedLoad("load", (STREAMS, PROMPTS))
PERIOD_S = 0.02


class _Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.tokens_left_out = 0
        self.is_endless = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    """Answers a token each PERIOD_S, all so far in each part, as SGLang does."""

    server: _Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count = body["sampling_params"]["max_new_tokens"] - self.server.tokens_left_out
        for number in range(10**6 if self.server.is_endless else count):
            time.sleep(PERIOD_S)
            part = {"output_ids": list(range(number + 1)), "text": "x"}
            try:
                self._write(b"data: " + json.dumps(part).encode() + b"\n\n")
            except OSError:
                self.close_connection = True
                return
        self._write(b"data: [DONE]\n\n")
        self._write(b"")

    def _write(self, chunk: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        self.wfile.flush()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.01,))
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def test_all_kinds_are_asked_until_the_time_is_over(server: _Server) -> None:
    answers = run_load(server.url, 500, LOAD, 1, 0.5, {"prompts": 0.05})
    assert answers == sorted(answers, key=lambda one: one.place)
    prompts = [one for one in answers if one.place.kind == "prompts"]
    assert [one.place.number for one in prompts] == [0, 1, 2, 3, 4]
    assert all(one.sent_s >= 0.1 * one.place.number + 0.05 for one in prompts)
    for client in (0, 1):
        own = [one for one in answers if (one.place.kind, one.place.client) == ("streams", client)]
        assert len(own) > 1
        assert len(own[0].output) == STREAMS.output_tokens_of(client, 0)
        assert own[1].output == (0, 1, 2) and own[1].tokens == (1, 2, 3)
        assert own[1].moments_s[0] >= own[1].sent_s + PERIOD_S
    assert {len(body["input_ids"]) for body in server.asked} == {4, 9}
    sampling = server.asked[0]["sampling_params"]
    assert sampling["ignore_eos"] and sampling["temperature"] == 0


def test_a_client_leaves_after_the_end_with_its_first_token(server: _Server) -> None:
    server.is_endless = True
    load = MixedLoad("load", (STREAMS,))
    for one in run_load(server.url, 500, load, 1, 0.2, {}):
        assert all(moment_s < 0.2 for moment_s in one.moments_s[:-1])
        assert one.moments_s[-1] >= 0.2
    (late,) = run_load(server.url, 500, MixedLoad("load", (PROMPTS,)), 1, 0.01, {"prompts": 0.005})
    assert late.output == (0,)


def test_an_answer_that_ends_too_early_is_a_failure(server: _Server) -> None:
    server.tokens_left_out = 1
    with pytest.raises(EngineFailure, match=r"of [23] tokens"):
        run_load(server.url, 500, MixedLoad("load", (STREAMS,)), 1, 0.5, {})


def test_a_prefill_takes_until_its_first_token(server: _Server) -> None:
    taken_s = prefill_seconds(server.url, 500, PROMPTS, 3)
    assert len(taken_s) == 3 and all(PERIOD_S <= one < 1.0 for one in taken_s)
