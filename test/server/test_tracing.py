"""`--enable-trace` on a running server: the spans that a collector gets of a request."""

import time
from collections.abc import Iterator

import pytest
import requests
from support.live_server import LAUNCHER, LiveServer, live_server, wait_until
from support.trace_collector import (
    ENVIRONMENT,
    FOLDER,
    CollectedSpan,
    Collector,
    collector,
)

pytestmark = pytest.mark.multiproc

TRACE_ID, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SPAN = "text_completion tracer"
PHASES = ("queue", "prefill", "decode")
SECRET = "xylophone"


@pytest.fixture(scope="module")
def collecting() -> Iterator[Collector]:
    if not FOLDER.is_dir():
        pytest.skip(f"OpenTelemetry is not installed in {FOLDER}; `make test-servers` does it")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        with collector() as collected:
            yield collected


@pytest.fixture(scope="module")
def traced(collecting: Collector) -> Iterator[LiveServer]:
    flags = ["--pp", "2", "--dtype", "float32", "--served-model-name", "tracer", "--ui", "off"]
    flags += ["--enable-trace", "--otlp-traces-endpoint", collecting.endpoint]
    with live_server(
        *flags, "--otlp-service-name", "under test", launcher=LAUNCHER, environment=ENVIRONMENT
    ) as server:
        yield server


def chat(server: LiveServer, flags: str = "01", **body) -> requests.Response:
    messages = [{"role": "user", "content": f"What is a {SECRET}?"}]
    return requests.post(
        f"{server.url}/v1/chat/completions",
        json={"model": "tracer", "messages": messages, "max_tokens": 5, "temperature": 0.5} | body,
        headers={"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-{flags}"},
        timeout=60,
    )


def whole_trace(collected: Collector) -> dict[str, CollectedSpan]:
    """The spans of the client's trace by name, with upstream's root as "root"; empties it."""

    def is_complete() -> bool:
        names = [span.name for span in collected.of_trace(TRACE_ID)]
        return {SPAN, *PHASES} <= {*names} and any(one.strip().startswith("Req") for one in names)

    wait_until(is_complete)
    time.sleep(0.5)
    spans = {
        "root" if span.name.strip().startswith("Req") else span.name: span
        for span in collected.of_trace(TRACE_ID)
    }
    collected.spans.clear()
    return spans


def test_a_request_is_one_trace_that_the_client_began(
    traced: LiveServer, collecting: Collector
) -> None:
    reply = chat(traced).json()
    spans = whole_trace(collecting)
    root, model = spans["root"], spans[SPAN]
    assert root.parent_id == CLIENT_SPAN and model.parent_id == root.span_id
    assert {span.service for span in spans.values()} == {"under test"}
    phases = [spans[name] for name in PHASES]
    assert {span.parent_id for span in phases} == {model.span_id}
    moments = [root.start_ns, model.start_ns, phases[0].start_ns]
    moments += [span.end_ns for span in phases]
    assert moments == sorted(moments)
    assert [phases[0].end_ns, phases[1].end_ns] == [phases[1].start_ns, phases[2].start_ns]
    assert phases[2].end_ns == model.end_ns
    usage, told = reply["usage"], model.attributes
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert told["gen_ai.response.finish_reasons"] == [reply["choices"][0]["finish_reason"]]
    assert told["gen_ai.response.id"] == reply["id"]
    assert told["gen_ai.request.model"] == "tracer"
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.temperature"]) == (5, 0.5)
    seconds = told["gen_ai.latency.e2e"]
    assert seconds == pytest.approx((model.end_ns - model.start_ns) / 1e9, rel=1e-6)
    first = told["gen_ai.latency.time_to_first_token"]
    assert first == pytest.approx((phases[1].end_ns - model.start_ns) / 1e9, rel=1e-6)
    assert SECRET not in str(spans)


def test_a_prompt_that_was_seen_before_is_told_as_read_from_the_cache(
    traced: LiveServer, collecting: Collector
) -> None:
    chat(traced)
    whole_trace(collecting)
    chat(traced)
    told = whole_trace(collecting)[SPAN].attributes
    assert 0 < told["gen_ai.usage.cache_read.input_tokens"] < told["gen_ai.usage.input_tokens"]


def test_several_prompts_of_one_request_have_a_span_each(
    traced: LiveServer, collecting: Collector
) -> None:
    traced.generate(text=["one", "two", "three"], sampling_params={"max_new_tokens": 2})
    wait_until(lambda: len(collecting.named(SPAN)) == 3)
    assert len({span.parent_id for span in collecting.named(SPAN)}) == 3
    collecting.spans.clear()


def test_a_request_that_is_aborted_is_an_error(traced: LiveServer, collecting: Collector) -> None:
    with requests.post(
        f"{traced.url}/generate",
        json={
            "rid": "given up",
            "text": "one",
            "stream": True,
            "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
        },
        stream=True,
        timeout=60,
    ) as stream:
        next(stream.iter_lines())
    wait_until(lambda: bool(collecting.named(SPAN)))
    (span,) = collecting.named(SPAN)
    assert span.is_error and span.attributes["error.type"] == "abort"
    assert span.attributes["gen_ai.response.id"] == "given up"
    assert 0 < span.attributes["gen_ai.usage.output_tokens"] < 400
    collecting.spans.clear()


def test_what_the_client_does_not_sample_is_not_traced(
    traced: LiveServer, collecting: Collector
) -> None:
    chat(traced, flags="00")
    chat(traced)
    assert whole_trace(collecting)[SPAN].attributes["gen_ai.usage.cache_read.input_tokens"] > 0
    assert collecting.named(SPAN) == []


def test_a_level_of_zero_ends_the_tracing_until_it_is_raised(
    traced: LiveServer, collecting: Collector
) -> None:
    requests.post(f"{traced.url}/set_trace_level?level=0", timeout=30)
    chat(traced)
    requests.post(f"{traced.url}/set_trace_level?level=3", timeout=30)
    chat(traced)
    whole_trace(collecting)
    assert collecting.named(SPAN) == []


def test_a_collector_that_fails_costs_spans_and_no_answer(
    traced: LiveServer, collecting: Collector
) -> None:
    collecting.status = 400
    assert chat(traced).status_code == 200
    wait_until(lambda: "Failed to export" in traced.text)
    collecting.status = 200
    assert chat(traced).status_code == 200
    whole_trace(collecting)
