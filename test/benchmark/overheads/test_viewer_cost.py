"""The cost of viewers: ratios are taken within a round, and viewers count what they read."""

import io
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmark.overheads.page_viewers import look
from benchmark.overheads.viewer_cost import ViewedRun, ratio_table


def run(load: str, round_number: int, viewers: int, tokens_per_s: float) -> ViewedRun:
    return ViewedRun(
        load=load,
        round_number=round_number,
        viewers=viewers,
        tokens_per_s=tokens_per_s,
        decide_and_book_ms=0.2 if viewers else 0.1,
        scheduler_cpu_ms=0.5,
        ticks=10 * viewers,
        dropped=viewers // 4,
    )


# The machine is twice as fast in the second round, where the viewed run comes first.
RUNS = [
    run("offline", 1, 0, 100.0),
    run("offline", 1, 4, 90.0),
    run("offline", 2, 4, 180.0),
    run("offline", 2, 0, 200.0),
]


def test_ratios_are_taken_within_a_round() -> None:
    table = ratio_table(RUNS)
    assert "| offline | 0.900 (0.900 to 0.900) | 2.000 (2.000 to 2.000) | 1.000 " in table


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    class Events(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            for part in (
                b"event: hello\ndata: {}\n\nevent: ti",
                b"ck\ndata: {}\n\nevent: dropped\n",
            ):
                self.wfile.write(part)
                self.wfile.flush()
                time.sleep(0.02)
            self.wfile.write(b'data: {"events":3}\n\nevent: tick\ndata: {}\n\n')

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Events)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class UntilRead(io.StringIO):
    """A standard input that ends when the viewers have had time to read all."""

    def read(self, size: int | None = -1) -> str:
        time.sleep(1.0)
        return ""


def test_viewers_count_updates_however_they_are_cut(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", UntilRead())
    counts = look(f"http://127.0.0.1:{server.server_port}", 2)
    assert counts == {"ticks": 4, "dropped": 6}
