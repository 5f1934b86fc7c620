"""Requests that have ended, from the scheduler process's end of the socket to a collector."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from support.live_server import wait_until
from support.trace_collector import opentelemetry  # noqa: F401 - a fixture

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.managers.channels import span_channel
from sgl_pipeline.managers.channels.span_channel import EndedRequest, SpanSender, span_address
from sgl_pipeline.managers.entrance.request_spans import RequestSpans, attributes_of, phases_of
from sgl_pipeline.requests import FinishReason, Request, SamplingSpec, StopRules

PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
STOP = FinishReason("stop")
ENDED = EndedRequest(
    trace_parent=PARENT.decode(),
    request_id="r1",
    finish="stop",
    error=None,
    arrival_s=10.0,
    started_s=11.0,
    first_token_s=13.0,
    ended_s=17.0,
    prompt_tokens=30,
    cached_tokens=16,
    output_tokens=5,
    num_retractions=1,
    max_new_tokens=8,
    temperature=0.5,
    top_p=1.0,
    top_k=40,
    frequency_penalty=0.25,
    presence_penalty=0.5,
    num_dropped=0,
)
# Of SGLang and vLLM, beside the conventions.
LATENCIES = {
    "gen_ai.latency.time_in_queue": 1.0,
    "gen_ai.latency.time_to_first_token": 3.0,
    "gen_ai.latency.time_in_model_prefill": 2.0,
    "gen_ai.latency.time_in_model_decode": 4.0,
    "gen_ai.latency.time_in_model_inference": 6.0,
    "gen_ai.latency.e2e": 7.0,
}


class Exporter:
    """Keeps the spans that it is given."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def export(self, spans: Sequence[Any]) -> None:
        self.spans += spans

    def shutdown(self) -> None:
        pass


def exporting(address: str) -> tuple[RequestSpans, Exporter]:
    """Started, with a provider as upstream's, which exports soon."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter, provider = Exporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=10))
    spans = RequestSpans(address, "m", provider)
    spans.start()
    return spans, exporter


def message(rid: str, parent: bytes | None = PARENT) -> Any:
    packed = None if parent is None else SimpleNamespace(data=parent)
    return SimpleNamespace(rid=rid, time_stats=packed)


def request(rid: str) -> Request:
    return Request(rid, [1, 2, 3], SamplingSpec(), StopRules(max_new_tokens=4), arrival_s=1.0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return span_address(str(tmp_path))


@pytest.fixture
def sender(address: str) -> Any:
    context: zmq.Context[Any] = zmq.Context()
    sender = SpanSender(context, address)
    yield sender
    sender.close()
    context.destroy(linger=0)


@pytest.mark.usefixtures("opentelemetry")
def test_every_attribute_is_of_the_conventions_or_of_sglang() -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
    from opentelemetry.semconv.attributes import error_attributes

    known = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    old = {"gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens", "gen_ai.system"}
    told = attributes_of(msgspec.structs.replace(ENDED, error="503"), "m")
    others = {name for name in told if name not in known - old}
    assert others == {*LATENCIES, error_attributes.ERROR_TYPE, "sgl_pipeline.num_retractions"}
    assert {name: told[name] for name in LATENCIES} == LATENCIES


def test_a_request_that_never_ran_has_waited_only() -> None:
    waited = msgspec.structs.replace(ENDED, started_s=None, first_token_s=None, error="503")
    assert list(phases_of(waited)) == [("queue", 10.0, 17.0)]
    told = attributes_of(waited, "m")
    assert {name for name in told if name in LATENCIES} == {
        "gen_ai.latency.time_in_queue",
        "gen_ai.latency.e2e",
    }
    assert told["error.type"] == "503"


@pytest.mark.usefixtures("opentelemetry")
def test_what_ends_is_exported_and_what_has_no_parent_is_not(
    sender: SpanSender, address: str
) -> None:
    spans, exporter = exporting(address)
    for rid, parent in (("a", PARENT), ("b", None)):
        sender.began(message(rid, parent))
        sender.ended(request(rid), STOP, now_s=2.0)
    sender.ended(request("a"), STOP, now_s=3.0)  # the id has been told of
    wait_until(lambda: len(exporter.spans) == 2)
    spans.close(5.0)
    queue, whole = exporter.spans
    assert [whole.name, queue.name] == ["text_completion m", "queue"]
    assert f"{whole.parent.trace_id:032x}-{whole.parent.span_id:016x}" in PARENT.decode()
    assert (queue.parent.trace_id, queue.parent.span_id) == (
        whole.context.trace_id,
        whole.context.span_id,
    )


@pytest.mark.usefixtures("opentelemetry")
def test_moments_are_those_of_the_wall_clock(sender: SpanSender, address: str) -> None:
    spans, exporter = exporting(address)
    sender.began(message("a"))
    sender.ended(request("a"), STOP, now_s=time.monotonic())
    wait_until(lambda: bool(exporter.spans))
    spans.close(5.0)
    assert abs(exporter.spans[-1].end_time - time.time_ns()) < 20e9


@pytest.mark.usefixtures("opentelemetry")
def test_an_unreadable_message_costs_no_other_request(sender: SpanSender, address: str) -> None:
    spans, exporter = exporting(address)
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(address)
        stranger.send(b"\xc1")
        sender.began(message("a"))
        sender.ended(request("a"), STOP, now_s=2.0)
        wait_until(lambda: len(exporter.spans) == 2)
        spans.close(5.0)


@pytest.mark.usefixtures("opentelemetry")
def test_requests_without_spans_are_counted_in_the_log(
    sender: SpanSender, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    spans, _ = exporting(address)
    sender.num_dropped = 3
    sender.began(message("a"))
    sender.ended(request("a"), STOP, now_s=2.0)
    wait_until(lambda: spans.num_dropped == 3)
    spans.close(5.0)
    assert "3 requests" in caplog.text


def test_a_full_queue_drops_and_counts_and_never_waits(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_channel, "MAX_UNREAD_REQUESTS", 4)
    context: zmq.Context[Any] = zmq.Context()
    sender = SpanSender(context, address)
    for number in range(10):
        sender.began(message(str(number)))
        sender.ended(request(str(number)), STOP, now_s=2.0)
    assert sender.num_dropped == 6
    sender.close()
    context.destroy(linger=0)


def test_a_parent_that_is_none_is_refused(sender: SpanSender) -> None:
    with pytest.raises(ProtocolError, match="is not a traceparent"):
        sender.began(message("a", b"\x80\x04pickle"))
