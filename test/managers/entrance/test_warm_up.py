"""A server asks itself before it is called ready, and ends where it gets no answer."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.tokenizer_manager import ServerStatus

from sgl_pipeline.managers.entrance import warm_up


@contextmanager
def server(status: int) -> Iterator[tuple[int, list[str]]]:
    """The port of one that answers with `status`, and the keys that it was asked with."""
    keys: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            keys.append(self.headers["Authorization"])
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one.server_address[1], keys
        one.shutdown()


@pytest.mark.parametrize(
    ("code", "is_well", "status"),
    [(200, True, ServerStatus.Up), (500, False, ServerStatus.Starting)],
)
def test_it_is_up_when_its_own_request_is_answered_and_ends_otherwise(
    monkeypatch: pytest.MonkeyPatch, code: int, is_well: bool, status: ServerStatus
) -> None:
    manager = SimpleNamespace(server_status=ServerStatus.Starting)
    ended: list[int] = []
    monkeypatch.setattr(
        warm_up, "get_global_state", lambda: SimpleNamespace(tokenizer_manager=manager)
    )
    monkeypatch.setattr(warm_up, "get_disagg", lambda: SimpleNamespace(disaggregation_mode="null"))
    monkeypatch.setattr(warm_up, "ssl_verify_of", lambda arguments: False)
    monkeypatch.setattr(warm_up, "kill_process_tree", ended.append)
    with server(code) as (port, keys):
        arguments = SimpleNamespace(
            port=port, api_key="secret", url=lambda: f"http://127.0.0.1:{port}"
        )
        assert warm_up.warm_up(arguments) is is_well
    assert keys == ["Bearer secret"]
    assert manager.server_status is status and bool(ended) is not is_well


def test_a_port_that_another_process_has_is_not_listened_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm_up, "_LISTEN_S", 0.0)
    assert not warm_up.wait_until_listening(1)
