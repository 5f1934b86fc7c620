"""Timeouts, aborts, priorities and load reports of a whole server, with SGLang's own kit."""

import threading
import time
import unittest
from typing import Any, ClassVar

import pytest
import requests
from sglang.test.kits.abort_timeout_kit import (
    AbortAllMixin,
    RunningTimeoutTwoWaveMixin,
    WaitingTimeoutMixin,
)
from support.live_server import ANSWER_S, LiveServer, live_server, wait_until

pytestmark = pytest.mark.multiproc

# What is asked of a request while it runs takes less, also on a machine that is many times slower.
RUNNING_TIMEOUT_S = 15.0
# No machine draws so many in that time.
NUM_TOKENS = 30_000


class _Served(unittest.TestCase):
    """Starts the server that upstream's mix-ins ask for."""

    flags: ClassVar[tuple[str, ...]] = ()
    environment: ClassVar[dict[str, str]] = {}
    server: ClassVar[LiveServer]
    base_url: ClassVar[str]
    process: ClassVar[Any]

    @classmethod
    def setUpClass(cls) -> None:
        environment = cls.enterClassContext(pytest.MonkeyPatch.context())
        for name, value in cls.environment.items():
            environment.setenv(name, value)
        cls.server = cls.enterClassContext(live_server("--pp", "2", *cls.flags))
        cls.base_url, cls.process = cls.server.url, cls.server.process

    def generate(self, max_new_tokens: int, **body: Any) -> requests.Response:
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        return self.server.generate(text="Say: one two", sampling_params=sampling, **body)


class TestWaitingTimeout(WaitingTimeoutMixin, _Served):
    flags = ("--max-running-requests", "1")
    environment: ClassVar[dict[str, str]] = {"SGLANG_REQ_WAITING_TIMEOUT": "0.001"}


class TestRunningTimeout(AbortAllMixin, RunningTimeoutTwoWaveMixin, _Served):
    flags = ("--enable-priority-scheduling", "--default-priority-value", "0")
    environment: ClassVar[dict[str, str]] = {"SGLANG_REQ_RUNNING_TIMEOUT": str(RUNNING_TIMEOUT_S)}
    running_timeout_max_new_tokens = NUM_TOKENS

    def test_a_request_that_runs_too_long_is_a_503_that_says_so(self) -> None:
        response = self.generate(NUM_TOKENS, priority=5)
        assert response.status_code == 503
        assert response.json()["message"] == "Request running timeout reached."
        wait_until(lambda: self.server.facts()["num_running_requests"] == 0)

    def test_a_stream_that_runs_too_long_ends_with_an_error(self) -> None:
        events = self.generate(NUM_TOKENS, stream=True).text.split("\n\n")
        assert "Request running timeout reached." in events[-3]
        assert events[-2] == "data: [DONE]"

    def test_loads_follow_what_is_being_served(self) -> None:
        def load() -> dict[str, Any]:
            (one,) = requests.get(f"{self.base_url}/v1/loads", timeout=ANSWER_S).json()["loads"]
            return one

        wait_until(lambda: load()["num_running_reqs"] == 0)
        client = threading.Thread(target=self.generate, args=(NUM_TOKENS,))
        client.start()
        busy: dict[str, Any] = {}

        def is_busy() -> bool:
            busy.update(load())
            return bool(busy["num_running_reqs"] == 1)

        wait_until(is_busy)
        assert busy["num_used_tokens"] > 0
        assert busy["timestamp"] <= time.time()
        text = requests.get(f"{self.base_url}/v1/loads?format=prometheus", timeout=30).text
        assert 'sglang_num_running_reqs{dp_rank="0"} 1' in text
        requests.post(f"{self.base_url}/abort_request", json={"abort_all": True}, timeout=30)
        client.join()
        wait_until(lambda: load()["num_running_reqs"] == 0)

    def test_an_unknown_section_of_the_loads_is_a_400(self) -> None:
        response = requests.get(f"{self.base_url}/v1/loads?include=everything", timeout=30)
        assert response.status_code == 400
        assert "disagg" in response.text
