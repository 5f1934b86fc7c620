"""An OpenTelemetry collector in this process: OTLP over HTTP, as protobuf.

OpenTelemetry is in a folder of its own (`make test` installs requirements/tracing.txt there): in
site-packages every server would import it with SGLang.
"""

import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(sys.prefix) / "tracing"
ENVIRONMENT = {
    "PYTHONPATH": str(FOLDER),
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "200",
}


@pytest.fixture
def opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the SDK importable in this process."""
    if not (FOLDER / "opentelemetry").is_dir():
        pytest.skip(f"OpenTelemetry is not installed in {FOLDER}; `make test` does it")
    monkeypatch.syspath_prepend(str(FOLDER))
    # The API is in site-packages, and the rest of the same namespace in the folder.
    importlib.invalidate_caches()


@dataclass(frozen=True)
class CollectedSpan:
    """What came of one span; ids are hexadecimal, and `parent_id` of a root is empty."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, Any]


@dataclass
class Collector:
    """`spans` is all that has come; it answers each export with `status`."""

    endpoint: str
    status: int = 200
    spans: list[CollectedSpan] = field(default_factory=list)

    def of_trace(self, trace_id: str) -> list[CollectedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def named(self, beginning: str) -> list[CollectedSpan]:
        return [span for span in self.spans if span.name.startswith(beginning)]

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _plain(group.resource.attributes).get("service.name", "")
            for scope in group.scope_spans:
                self.spans += [_collected(span, service) for span in scope.spans]


@contextmanager
def collector() -> Iterator[Collector]:
    """One that listens while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if collected.status == 200:
                collected.take(body)
            self.send_response(collected.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collected = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield collected
    finally:
        server.shutdown()
        server.server_close()


def _collected(span: Any, service: str) -> CollectedSpan:
    return CollectedSpan(
        span.name,
        service,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == span.status.STATUS_CODE_ERROR,
        _plain(span.attributes),
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
