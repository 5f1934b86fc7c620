"""Metrics of a live server, and how it ends: one server for both, so the order of tests matters."""

import threading
from collections.abc import Iterator

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families
from support.live_server import (
    ANSWER_S,
    PATIENCE_S,
    LiveServer,
    live_server,
    wait_until,
    wait_until_equal,
)

from sgl_pipeline.records.stage_timing import BUBBLE_CAUSES

pytestmark = pytest.mark.multiproc

# Long enough for the short request, also on a machine many times slower than usual.
DRAIN_TIMEOUT_S = 12.0
HEALTH_TIMEOUT_S = 5
# The names in SGLang's Grafana board (examples/monitoring/grafana/dashboards/json/
# sglang-dashboard.json); every one applies to a text server without disaggregation or speculation.
GRAFANA_BOARD = {
    "sglang:e2e_request_latency_seconds_bucket",
    "sglang:e2e_request_latency_seconds_sum",
    "sglang:e2e_request_latency_seconds_count",
    "sglang:time_to_first_token_seconds_bucket",
    "sglang:time_to_first_token_seconds_sum",
    "sglang:time_to_first_token_seconds_count",
    "sglang:num_running_reqs",
    "sglang:gen_throughput",
    "sglang:cache_hit_rate",
    "sglang:num_queue_reqs",
}
# Further names that SGLang documents (docs: production metrics).
DOCUMENTED = {
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
    "sglang:cached_tokens_total",
    "sglang:num_requests_total",
    "sglang:token_usage",
    "sglang:num_used_tokens",
    "sglang:inter_token_latency_seconds_bucket",
    "sglang:queue_time_seconds_bucket",
    "sglang:num_grammar_queue_reqs",
    "sglang:num_retracted_reqs",
    "sglang:max_total_num_tokens",
    "sglang:realtime_tokens_total",
}
OURS = {
    "sgl_pipeline_num_stages",
    "sgl_pipeline_waiting_tokens",
    "sgl_pipeline_free_page_share",
    "sgl_pipeline_naive_waiting_tokens",
    "sgl_pipeline_naive_free_page_share",
    "sgl_pipeline_microbatch_tokens",
    "sgl_pipeline_microbatch_budget_tokens",
    "sgl_pipeline_steps_in_flight",
    "sgl_pipeline_steps_total",
    "sgl_pipeline_step_tokens_total",
    "sgl_pipeline_stage_compute_seconds_total",
    "sgl_pipeline_stage_input_wait_seconds_total",
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGLANG_HEALTH_CHECK_TIMEOUT", str(HEALTH_TIMEOUT_S))
        yield from started_server()


def started_server() -> Iterator[LiveServer]:
    flags = ("--enable-metrics", "--drain-timeout-s", str(DRAIN_TIMEOUT_S))
    with live_server("--pp", "2", *flags) as server:
        yield server


class Samples:
    """One reading of /metrics."""

    def __init__(self, server: LiveServer) -> None:
        text = requests.get(f"{server.url}/metrics", timeout=ANSWER_S).text
        families = text_string_to_metric_families(text)
        self._samples = [sample for family in families for sample in family.samples]
        self.names = {sample.name for sample in self._samples}

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name and labels."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def labels(self, name: str) -> set[str]:
        return {label for sample in self._samples if sample.name == name for label in sample.labels}


def generate(server: LiveServer, max_new_tokens: int, **body: object) -> requests.Response:
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return server.generate(text="Repeat after me: one two", sampling_params=sampling, **body)


class Client:
    """One request in a thread of its own."""

    def __init__(self, server: LiveServer, max_new_tokens: int) -> None:
        self.response: requests.Response | None = None
        self._thread = threading.Thread(target=self._run, args=(server, max_new_tokens))
        self._thread.start()

    def join(self) -> requests.Response:
        self._thread.join(PATIENCE_S)
        assert self.response is not None
        return self.response

    def _run(self, server: LiveServer, max_new_tokens: int) -> None:
        self.response = generate(server, max_new_tokens)


def test_metrics_have_sglangs_names_and_count_what_was_served(server: LiveServer) -> None:
    for _ in range(2):
        assert generate(server, 24, stream=True).status_code == 200

    def differing() -> list[tuple[dict[str, float], dict[str, float]]]:
        """Stages whose gauges are not what the scheduler tells, and both."""
        told = server.facts()["recent_steps"]["stages"]
        both = zip(bubbles(Samples(server)), told, strict=True)
        return [(shown, stage) for shown, stage in both if shown != pytest.approx(stage)]

    # Written when the last step has come back, and with it the rest of what is told of that moment.
    wait_until_equal(differing, [])
    samples = Samples(server)
    assert sorted((GRAFANA_BOARD | DOCUMENTED | OURS) - samples.names) == []
    facts = server.facts()
    assert samples.value("sglang:generation_tokens_total") >= 48
    assert samples.value("sglang:time_to_first_token_seconds_count") >= 2
    assert samples.value("sglang:queue_time_seconds_count") >= 2
    assert samples.value("sglang:max_total_num_tokens") == facts["total_pages"] * 16
    assert samples.value("sgl_pipeline_num_stages") == 2
    assert samples.value("sgl_pipeline_step_tokens_total", kind="decode") == facts["decodes"]
    assert samples.value("sgl_pipeline_stage_compute_seconds_total", stage="1") > 0
    assert samples.value("sgl_pipeline_budget_bound_by") == 1
    # Nothing runs: the prompt's pages are cached, free for those who know.
    naive, exact = (f"sgl_pipeline_{kind}free_page_share" for kind in ("naive_", ""))
    assert samples.value(naive) < samples.value(exact) == 1
    assert {"model_name", "engine_type", "tp_rank"} <= samples.labels("sglang:num_running_reqs")


def bubbles(samples: Samples) -> list[dict[str, float]]:
    """The gauges of each stage, and what they leave of its time."""
    name = "sgl_pipeline_stage_bubble_share"
    stages = [
        {cause: samples.value(name, stage=stage, cause=cause) for cause in BUBBLE_CAUSES}
        for stage in ("0", "1")
    ]
    return [{"busy": 1 - sum(shares.values())} | shares for shares in stages]


def test_gauges_follow_a_running_request(server: LiveServer) -> None:
    client = Client(server, 30_000)
    wait_until(lambda: Samples(server).value("sglang:num_running_reqs") == 1)
    wait_until(lambda: Samples(server).value("sglang:gen_throughput") > 0)
    assert Samples(server).value("sglang:num_used_tokens") > 0
    assert health(server) == 200
    requests.post(f"{server.url}/abort_request", json={"abort_all": True}, timeout=30)
    client.join()
    wait_until(lambda: Samples(server).value("sglang:num_running_reqs") == 0)


def health(server: LiveServer) -> int:
    return requests.get(f"{server.url}/health", timeout=ANSWER_S).status_code


def test_health_is_good_when_idle_and_fails_in_a_pause_as_upstreams(server: LiveServer) -> None:
    assert health(server) == 200
    requests.post(f"{server.url}/pause_generation", json={"mode": "in_place"}, timeout=30)
    assert health(server) == 503
    requests.post(f"{server.url}/continue_generation", json={}, timeout=30)
    assert health(server) == 200


def test_a_sigterm_drains(server: LiveServer) -> None:
    """The last test of this server: a short request ends well, a long one with a 503."""
    long = Client(server, 32_000)
    wait_until(lambda: server.facts()["num_running_requests"] == 1)
    short = Client(server, 200)
    wait_until(lambda: server.facts()["num_running_requests"] == 2)
    server.process.terminate()
    wait_until(lambda: generate(server, 1).status_code == 503)
    assert health(server) == 503
    assert requests.get(f"{server.url}/ready", timeout=30).status_code == 503
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    refused = requests.post(f"{server.url}/v1/chat/completions", json=chat, timeout=30)
    assert refused.status_code == 503
    assert "shutting down" in refused.text
    assert short.join().status_code == 200
    ended = long.join()
    assert ended.status_code == 503
    assert "shutting down" in ended.text
    assert server.wait_for_end() == 0
    assert f"did not finish within --drain-timeout-s {DRAIN_TIMEOUT_S:g}" in server.text
    assert "Traceback" not in server.text
