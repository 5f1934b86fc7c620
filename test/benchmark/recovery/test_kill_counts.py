"""Requests are counted for the kills that met them."""

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from benchmark.recovery.apart_clients import Ending, Outcome, ask
from benchmark.recovery.kill_clients import Prompt
from benchmark.recovery.kill_counts import Kill, count_table, meetings

KILL = Kill(kind="a stage", killed_s=10.0, served_s=12.0, healthy_s=13.0)
PROMPT, EXPECTED = Prompt((5, 6), 3), [1, 2, 3]


def ending(began_s: float, ended_s: float, outcome: Outcome = Outcome.RIGHT) -> Ending:
    return Ending(began_s=began_s, ended_s=ended_s, outcome=outcome, reason="why")


def test_a_request_is_in_flight_at_a_kill_or_comes_until_all_is_mended() -> None:
    before, during = ending(8.0, 9.0), ending(9.0, 11.0, Outcome.NAMED)
    later, after = ending(12.0, 20.0, Outcome.CUT), ending(13.5, 20.0, Outcome.NAMED)
    endings = [before, during, later, after]
    (met,), others = meetings([KILL], endings)
    assert (met.in_flight, met.later, others) == ([during], [later], [after])
    in_flight, mended = count_table([KILL], endings).splitlines()[2:]
    assert in_flight.startswith("| a stage | 1 | in flight | 1 | 0 | 1 | 0 | 0 | 0 | 2.0 | 2.0 |")
    assert mended.startswith("|  |  | while it was mended | 1 | 0 | 0 | 1 | 0 | 0 | 8.0 |")


def test_a_request_that_outlives_a_kill_fails_for_the_next_one() -> None:
    second = Kill(kind="a stage", killed_s=30.0, served_s=31.0, healthy_s=32.0)
    whole, failed = ending(9.0, 40.0), ending(9.0, 35.0, Outcome.NAMED)
    (first_met, second_met), others = meetings([KILL, second], [whole, failed])
    assert first_met.in_flight == [whole] and second_met.in_flight == [whole, failed]
    assert others == []


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers with `status` and `lines`, and then closes."""

    status = 200
    lines: tuple[dict[str, Any], ...] = ()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.end_headers()
        for line in self.lines:
            start = b"data: " if self.status == 200 else b""
            self.wfile.write(start + json.dumps(line).encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def chunk(ids: list[int], finish: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"finish_reason": finish}}


@pytest.mark.parametrize(
    ("status", "lines", "outcome", "reason"),
    [
        (200, (chunk([1]), chunk([1, 2, 3])), Outcome.RIGHT, ""),
        (200, (chunk([1]), chunk([1, 3])), Outcome.WRONG, "after 2 tokens"),
        (200, (chunk([1]),), Outcome.CUT, "the stream ended early"),
        (200, ({"error": {"message": "gone"}},), Outcome.NAMED, "in the stream: gone"),
        (
            200,
            (chunk([1], {"type": "abort", "message": "lost"}),),
            Outcome.NAMED,
            "in the stream: lost",
        ),
        (503, ({"error": {"message": "none"}},), Outcome.NAMED, "503: none"),
        (500, (), Outcome.CUT, "500: "),
    ],
)
def test_a_request_ends_as_its_client_sees_it(
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    lines: tuple[dict[str, Any], ...],
    outcome: Outcome,
    reason: str,
) -> None:
    monkeypatch.setattr(Answers, "status", status)
    monkeypatch.setattr(Answers, "lines", lines)
    found = ask(url, PROMPT, EXPECTED)
    assert (found.outcome, found.reason) == (outcome, reason)
