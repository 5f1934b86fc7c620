"""Operators ask a live server why a request waits, turn its knobs and have them tuned."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from support.live_server import (
    ANSWER_S,
    LiveServer,
    live_server,
    wait_until,
    wait_until_equal,
    wait_until_idle,
)
from support.traced_events import read_events

from sgl_pipeline.records.throttle_change import ThrottleChange
from sgl_pipeline.records.trace import read_trace
from test.server.test_metrics_and_drain import Samples

pytestmark = pytest.mark.multiproc
LONG_PROMPT = "Repeat after me: " + "one two three four " * 60
# Ten steps of eight tokens: two dozen of them are the steps that tuning needs, and little more, as
# every trial serves them all again.
SHORT_PROMPT = "one two three four " * 20
ESTIMATES = ("runs_in_s", "next_token_in_s")
# Of a request that runs while others come one by one and are asked about.
NUM_TOKENS = 800


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "steps.jsonl"


@pytest.fixture(scope="module")
def server(trace: Path) -> Iterator[LiveServer]:
    flags = ["--max-running-requests", "4", "--enable-metrics", "--trace-path", str(trace)]
    with live_server("--pp", "2", "--dtype", "float32", *flags) as server:
        yield server


def explain(server: LiveServer, rid: str) -> tuple[int, dict[str, Any]]:
    reply = requests.get(f"{server.url}/pipeline/explain/{rid}", timeout=ANSWER_S)
    return reply.status_code, reply.json()


def patch(server: LiveServer, **body: Any) -> tuple[int, dict[str, Any]]:
    reply = requests.patch(f"{server.url}/pipeline/throttle", json=body, timeout=30)
    return reply.status_code, reply.json()


def throttle(server: LiveServer) -> dict[str, Any]:
    reply = requests.get(f"{server.url}/pipeline/throttle", timeout=ANSWER_S)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def ask(server: LiveServer, rid: str, num_tokens: int, text: str = LONG_PROMPT) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    reply = server.generate(text=f"{rid} {text}", rid=rid, sampling_params=sampling)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["output_ids"])


class Crowd:
    """Clients that ask one after the other."""

    def __init__(self, server: LiveServer, num_clients: int, num_tokens: int) -> None:
        self._is_over = threading.Event()
        self.num_answers = 0
        self._pool = ThreadPoolExecutor(num_clients)
        self._clients = [
            self._pool.submit(self._run, server, number, num_tokens)
            for number in range(num_clients)
        ]

    def _run(self, server: LiveServer, number: int, num_tokens: int) -> None:
        turn = 0
        while not self._is_over.is_set():
            ask(server, f"crowd-{number}-{turn}-{time.monotonic_ns()}", num_tokens, SHORT_PROMPT)
            turn += 1
            self.num_answers += 1

    def leave(self) -> None:
        self._is_over.set()
        for client in self._clients:
            client.result()
        self._pool.shutdown()


def ahead(server: LiveServer, first: str, last: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `first` and `last` of a queue are told, once both are told to wait for some time.

    Zero is right too, while a step is late that may be the last one of who draws a token in it.
    """
    told: list[dict[str, Any]] = []

    def have_to_wait() -> bool:
        # The last one first: time that passes in between can then only make the other's shorter.
        told[:] = (explain(server, rid)[1] for rid in (last, first))
        return all(one["estimate"][name] > 0 for one in told for name in ESTIMATES)

    wait_until(have_to_wait)
    return told[1], told[0]


def test_a_full_house_is_explained_to_who_waits_and_who_runs(server: LiveServer) -> None:
    ask(server, "warm", 40)
    names = [f"guest-{number}" for number in range(6)]
    with ThreadPoolExecutor(len(names)) as clients:
        replies: list[Future[list[int]]] = []
        for name in names:
            replies.append(clients.submit(ask, server, name, NUM_TOKENS))
            wait_until(lambda rid=name: explain(server, rid)[0] == 200)  # type: ignore[misc]
        wait_until(lambda: explain(server, names[3])[1].get("state") == "decoding")
        first_waiting, last = ahead(server, *names[4:])
        _, running = explain(server, names[0])
        requests.post(f"{server.url}/pause_generation", json={"mode": "in_place"}, timeout=30)
        # Upstream answers when it has sent the word, not when the scheduler has it.
        wait_until(lambda: explain(server, names[5])[1].get("rule") == "pause")
        _, paused = explain(server, names[5])
        requests.post(f"{server.url}/continue_generation", json={}, timeout=30)
        assert [len(reply.result()) for reply in replies] == [NUM_TOKENS] * 6
    assert (last["state"], last["rule"], last["behind"]) == ("waiting", "order", names[4])
    assert first_waiting["rule"] == "running-limit"
    assert "4 requests run" in first_waiting["text"]
    assert first_waiting["numbers"]["running_requests"] == 4
    # Not by one forecast: pace and lengths of answers are learned between the two.
    assert last["estimate"]["num_steps"] >= 0.8 * first_waiting["estimate"]["num_steps"]
    assert last["estimate"]["num_steps"] >= 8 and last["estimate"]["num_ended"] >= 1
    assert (running["state"], running["estimate"]["runs_in_s"]) == ("decoding", 0.0)
    assert (
        running["max_new_tokens"] == NUM_TOKENS and running["estimate"]["last_token_within_s"] > 0
    )
    assert paused["estimate"]["runs_in_s"] is None
    assert "one two three" not in str(last) + str(running)
    status, gone = explain(server, names[0])
    assert status == 404 and "it has ended, or never came" in gone["error"]["message"]


def throttle_gauges(samples: Samples) -> list[float]:
    """The two knobs, whether the two policies are in force, and how often a change was undone."""
    knobs = ("max_prefill_tokens", "prefill_spread_steps")
    return [
        *(samples.value("sgl_pipeline_throttle_knob", knob=knob) for knob in knobs),
        *(samples.value("sgl_pipeline_policy", policy=one) for one in ("throttle-time", "sarathi")),
        samples.value("sgl_pipeline_throttle_changes_total", cause="undo"),
    ]


def test_a_knob_is_turned_under_load_and_no_token_changes(server: LiveServer, trace: Path) -> None:
    alone = ask(server, "same", 300)
    requests.post(f"{server.url}/flush_cache", timeout=30)
    with ThreadPoolExecutor(1) as client:
        output = client.submit(ask, server, "same", 300)
        wait_until(lambda: explain(server, "same")[0] == 200)
        status, told = patch(server, prefill_spread_steps=4, max_prefill_tokens=64)
        assert status == 200, told
        assert patch(server, policy="sarathi")[0] == 200
        assert patch(server, undo=True)[1]["policy"] == "throttle-time"
        assert output.result() == alone
    change = told["change"]
    assert change["after"] == {"prefill_spread_steps": 4, "max_prefill_tokens": 64}
    assert change["by"] == {"key": "none", "client": "127.0.0.1"}
    assert abs(change["at_unix_s"] - time.time()) < 600
    assert throttle(server)["history"][0] == change
    line = (
        "throttle change 0 (operator, key none, client 127.0.0.1): prefill_spread_steps 8 to 4, "
        f"max_prefill_tokens None to 64, from step {change['first_step']} on"
    )
    wait_until(lambda: line in server.text)
    wait_until_equal(lambda: throttle_gauges(Samples(server)), [64, 4, 1, 0, 1])
    requests.post(f"{server.url}/flush_cache", timeout=30)
    ask(server, "other", 2)
    wait_until_idle(server)
    first_step = change["first_step"]
    carried = [one.prefill_tokens for one in read_trace(trace) if one.step_id >= first_step]
    assert 0 < max(carried) <= 64 + 16
    changes = list(read_events(trace, ThrottleChange))
    assert [one.cause for one in changes] == ["operator", "operator", "undo"]
    assert changes[0].first_step == first_step


def test_a_trial_goes_back_by_itself_also_when_nothing_runs(server: LiveServer) -> None:
    before = throttle(server)
    status, told = patch(server, accounting="naive", revert_after_s=5)
    assert (status, told["accounting"]) == (200, "naive")
    assert told["revert"]["to"] == {"accounting": "radix"}
    assert server.facts()["accounting"] == "naive"
    wait_until(lambda: throttle(server)["accounting"] == "radix")
    newest = throttle(server)["history"][-1]
    assert newest["cause"] == "revert" and newest["by"] == {"key": "clock", "client": ""}
    assert throttle(server)["prefill_spread_steps"] == before["prefill_spread_steps"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prefill_spread_steps": 0}, "must be between 1 and 1024"),
        ({"max_prefill_tokens": 10**9}, "must be between 1 and 65536"),
        ({"policy": "best"}, "must be one of throttle"),
        ({"spread": 1}, "unknown field"),
    ],
)
def test_what_cannot_be_is_a_400(server: LiveServer, body: dict[str, Any], words: str) -> None:
    status, told = patch(server, **body)
    assert status == 400 and words in told["error"]["message"]


def tune(server: LiveServer, **body: Any) -> tuple[int, dict[str, Any]]:
    reply = requests.post(f"{server.url}/pipeline/tune", json=body, timeout=180)
    return reply.status_code, reply.json()


def tuning_processes(server: LiveServer) -> list[psutil.Process]:
    name = "sgl_pipeline.simulator.tune_process"
    return [one for one in server.descendants() if name in one.cmdline()]


def test_knobs_are_tuned_from_life_one_task_at_a_time(server: LiveServer) -> None:
    tiny = {"max_prefill_tokens": 8, "min_prefill_tokens": 8, "prefill_spread_steps": 64}
    assert patch(server, **tiny)[0] == 200
    began_s = time.monotonic()
    crowd = Crowd(server, 6, 12)
    try:
        wait_until(lambda: crowd.num_answers >= 24, 150)
        with ThreadPoolExecutor(1) as client:
            first = client.submit(tune, server, ttft_ms=50, tpot_ms=40, timeout_s=5, window_s=600)
            wait_until(lambda: [one.nice() for one in tuning_processes(server)] == [19])
            status, refused = tune(server, ttft_ms=50, tpot_ms=40)
            assert status == 409 and "tuned already" in refused["error"]["message"]
            # Beside a crowd that keeps all cores busy, a process of this niceness hardly runs.
            crowd.leave()
            status, told = first.result()
        assert status == 200, told
        assert told["applied"] is None and throttle(server)["max_prefill_tokens"] == 8
    finally:
        crowd.leave()
    window_s = time.monotonic() - began_s
    status, applied = tune(
        server,
        ttft_ms=50,
        tpot_ms=40,
        timeout_s=20,
        window_s=window_s,
        apply=True,
        revert_after_s=3600,
    )
    assert told["knobs_in_force"]["max_prefill_tokens"] == 8
    assert told["measured"]["requests_ended"] >= 20
    assert told["now"]["ttft_ms"]["p50"] > 0 and told["num_trials"] >= 1
    assert len(told["step_time_errors"]) == 2
    assert not tuning_processes(server)
    assert status == 200, applied
    # With 8 tokens a step, each prompt takes ten and more.
    assert applied["knobs"].get("max_prefill_tokens", 0) > 8, applied
    assert applied["proposed"]["lateness"] < applied["now"]["lateness"]
    shown = throttle(server)
    assert {name: shown[name] for name in applied["knobs"]} == applied["knobs"]
    newest = shown["history"][-1]
    assert (newest["cause"], newest["revert_after_s"]) == ("tune", 3600.0)
    assert shown["revert"]["in_s"] > 3000


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"ttft_ms": 50}, "missing required field `tpot_ms`"),
        ({"ttft_ms": 0, "tpot_ms": 1}, "$.ttft_ms"),
        ({"ttft_ms": 1, "tpot_ms": 1, "timeout_s": 1e6}, "<= 600.0"),
        ({"ttft_ms": 1, "tpot_ms": 1, "policies": ["best"]}, "policies: 'best'"),
        ({"ttft_ms": 1, "tpot_ms": 1, "revert_after_s": 5}, 'needs "apply": true'),
    ],
)
def test_a_wish_that_cannot_be_is_a_400(
    server: LiveServer, body: dict[str, Any], words: str
) -> None:
    status, told = tune(server, **body)
    assert status == 400 and words in told["error"]["message"]


def test_without_a_past_nothing_is_tuned(server: LiveServer) -> None:
    time.sleep(1.1)
    status, told = tune(server, ttft_ms=50, tpot_ms=40, window_s=1)
    assert status == 503 and "tuning needs 200 and 20" in told["error"]["message"]
