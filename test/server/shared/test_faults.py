"""Clients that vanish, processes that are killed, servers that are told to go."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from support.live_server import (
    ANSWER_S,
    LAUNCHER,
    PATIENCE_S,
    LiveServer,
    live_server,
    start_server,
    wait_until,
)

pytestmark = [pytest.mark.alone, pytest.mark.multiproc]
LONG = {
    "text": "<|user|>Hello",
    "sampling_params": {"max_new_tokens": 20_000, "ignore_eos": True, "temperature": 0},
}


class LongRequest:
    """A request in a thread of its own that would run for minutes."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self.response: requests.Response | None = None
        self.error: Exception | None = None
        steps_before = server.facts()["num_steps"]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_until(lambda: server.facts()["num_steps"] > steps_before + 5)

    def join(self, timeout_s: float) -> bool:
        """Whether it ended in time, however."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.response = requests.post(f"{self._server.url}/generate", json=LONG, timeout=120)
        except requests.RequestException as error:
            self.error = error


def test_a_client_that_disconnects_mid_stream_frees_its_pages(demo_server):
    requests.post(f"{demo_server.url}/flush_cache", timeout=30).raise_for_status()
    total = demo_server.facts()["total_pages"]
    with requests.post(
        f"{demo_server.url}/generate", json=LONG | {"stream": True}, stream=True, timeout=30
    ) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        wait_until(lambda: demo_server.facts()["free_pages"] < total)
        wait_until(lambda: demo_server.facts()["num_running_requests"] == 1)
    wait_until(lambda: demo_server.facts()["num_running_requests"] == 0)
    # The step that was in flight holds its pages until it has come back.
    wait_until(lambda: demo_server.facts()["free_pages"] == total)


def test_two_servers_run_side_by_side_and_leave_nothing(directory):
    """Busy as they are, one is stopped by a second Ctrl-C, the other by a second SIGTERM."""
    shared_memory = set(os.listdir("/dev/shm"))
    with (
        live_server("--pp", "2", launcher=LAUNCHER) as first,
        live_server("--pp", "2", launcher=LAUNCHER) as second,
    ):
        answers = [server.generate(**short_request()).json()["text"] for server in (first, second)]
        assert answers[0] == answers[1]
        lost = [LongRequest(first), LongRequest(second)]
        first_processes = first.descendants()
        first.process.send_signal(signal.SIGINT)
        wait_until(lambda: "for 1 running request; Ctrl-C again ends at once" in first.text)
        stop(first, lambda: first.process.send_signal(signal.SIGINT))
        assert first.process.returncode == 130
        assert second.generate(**short_request()).status_code == 200
        second_processes = second.descendants()
        second.process.terminate()
        wait_until(lambda: second.generate(**short_request()).status_code == 503)
        stop(second, second.process.terminate)
        assert second.process.returncode == 143
        assert all(request.join(PATIENCE_S) and request.error for request in lost)
        assert_nothing_left(first_processes + second_processes, directory, shared_memory)
    assert "Traceback" not in first.text + second.text


def test_without_recovery_a_killed_stage_ends_requests_and_server_and_is_named(directory):
    shared_memory = set(os.listdir("/dev/shm"))
    with live_server("--pp", "2", "--stage-recovery", "off") as server:
        processes = server.descendants()
        request = LongRequest(server)
        server.stages()[1].kill()
        assert request.join(PATIENCE_S), "the request in flight was left waiting"
        assert request.response is not None, request.error
        assert request.response.status_code == 500
        assert "stage 1 failed" in request.response.text
        assert server.process.wait(PATIENCE_S) != 0
        assert_nothing_left(processes, directory, shared_memory)
    assert "stage 1 failed after step" in server.text


class WantedMove:
    """A move by hand, in a thread of its own, that the stages have not got ready for."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        first, last = self.plan()["layer_counts"]
        self._counts = [first - 1, last + 1]
        self.response: requests.Response | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_until(lambda: self.plan()["move_under_way"] is not None)

    def plan(self) -> dict[str, Any]:
        return requests.get(f"{self._server.url}/pipeline/plan", timeout=ANSWER_S).json()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(requests.ConnectionError):
            self.response = requests.post(
                f"{self._server.url}/pipeline/plan",
                json={"layer_counts": self._counts},
                timeout=60,
            )


@pytest.mark.parametrize("victim", [0, 1], ids=["source", "target"])
def test_without_recovery_a_stage_killed_while_it_hands_over_a_layer_ends_the_server(
    directory, victim
):
    shared_memory = set(os.listdir("/dev/shm"))
    flags = ("--pp", "2", "--migration", "manual", "--stage-recovery", "off")
    with live_server(*flags) as server:
        processes = server.descendants()
        request = LongRequest(server)
        stages = server.stages()
        stages[1].suspend()  # the target gets no further
        move = WantedMove(server)
        stages[victim].kill()
        assert request.join(PATIENCE_S) and request.response is not None, request.error
        assert request.response.status_code == 500
        assert f"stage {victim} failed" in request.response.text
        move.join()
        assert move.response is None or move.response.status_code == 503
        assert server.process.wait(PATIENCE_S) != 0
        assert_nothing_left(processes, directory, shared_memory)


def test_a_stage_that_is_slow_costs_the_move_and_nothing_else(directory):
    flags = ("--pp", "2", "--migration", "manual", "--migration-timeout-s", "5")
    body = {"text": "<|user|>Hello", "sampling_params": {"max_new_tokens": 40, "temperature": 0}}
    with live_server(*flags) as server:
        expected = requests.post(f"{server.url}/generate", json=body, timeout=60).json()["text"]
        target = server.stages()[1]
        target.suspend()
        move = WantedMove(server)
        move.join()
        assert move.response is not None and move.response.status_code == 503
        assert "--migration-timeout-s" in move.response.text
        target.resume()
        after = requests.post(f"{server.url}/generate", json=body, timeout=60).json()["text"]
        assert after == expected
        plan = move.plan()
        assert plan["epoch"] == 0 and plan["history"][-1]["outcome"] == "abandoned"
        # What was given up can be done again.
        first, last = plan["layer_counts"]
        again = requests.post(
            f"{server.url}/pipeline/plan", json={"layer_counts": [first - 1, last + 1]}, timeout=60
        )
        assert again.status_code == 200
        after = requests.post(f"{server.url}/generate", json=body, timeout=60).json()["text"]
        assert after == expected


@pytest.mark.parametrize("victim", ["main", "scheduler", "detokenizer"])
def test_kill_minus_nine_leaves_no_process_socket_or_shared_memory(directory, victim):
    shared_memory = set(os.listdir("/dev/shm"))
    with live_server("--pp", "2") as server:
        processes = server.descendants()
        {
            "main": server.process.kill,
            "scheduler": server.scheduler().kill,
            "detokenizer": server.detokenizer().kill,
        }[victim]()
        assert server.process.wait(PATIENCE_S) != 0
        assert_nothing_left(processes, directory, shared_memory)


def test_a_scheduler_that_is_told_to_go_takes_the_server_with_it(directory):
    shared_memory = set(os.listdir("/dev/shm"))
    with live_server("--pp", "2") as server:
        processes = server.descendants()
        request = LongRequest(server)
        server.scheduler().terminate()
        assert request.join(PATIENCE_S), "the request in flight was left waiting"
        assert server.process.wait(PATIENCE_S) != 0
        assert_nothing_left(processes, directory, shared_memory)


def test_sigterm_while_starting_leaves_nothing(directory):
    shared_memory = set(os.listdir("/dev/shm"))
    server = start_server("--pp", "2", launcher=LAUNCHER)
    try:
        # The scheduler and the stages are being started.
        wait_until(lambda: len(server.descendants()) >= 3, timeout_s=120)
        processes = server.descendants()
        stop(server, server.process.terminate)
        assert_nothing_left(processes, directory, shared_memory)
    finally:
        server.process.kill()


def short_request() -> dict:
    return {"text": "abc", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}


def stop(server: LiveServer, ask: Callable[[], object]) -> None:
    ask()
    server.process.wait(PATIENCE_S)


def assert_nothing_left(
    processes: list[psutil.Process], directory: Path, shared_memory: set[str]
) -> None:
    """No process, no file of the server in its directory, no new shared memory of ours."""
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert alive == []
    wait_until(lambda: list(directory.iterdir()) == [])
    left = set(os.listdir("/dev/shm")) - shared_memory
    assert [name for name in left if name.startswith(("sglang", "sgl", "torch", "psm"))] == []
