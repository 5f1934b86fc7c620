"""Pausing and profiling a live server; SGLang's own kit says what a pause must do."""

import gzip
import json
import threading
import unittest

import pytest
import requests
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from support.live_server import ANSWER_S, PATIENCE_S, LiveServer, wait_until

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="class")
def kit_server(request: pytest.FixtureRequest, demo_server: LiveServer) -> None:
    request.cls.base_url = demo_server.url


@pytest.mark.usefixtures("kit_server")
class TestPause(PauseResumeInPlaceMixin, unittest.TestCase):
    pause_num_requests = 4
    pause_max_new_tokens = 700
    pause_duration = 0.5
    pause_ignore_eos = True


def post(server: LiveServer, path: str, **body: object) -> requests.Response:
    return requests.post(f"{server.url}/{path}", json=body, timeout=ANSWER_S)


def long_request(server: LiveServer) -> tuple[threading.Thread, list[requests.Response]]:
    """A running request of 500 tokens, and where its answer will be."""
    answers: list[requests.Response] = []
    sampling = {"temperature": 0, "max_new_tokens": 500, "ignore_eos": True}

    def ask() -> None:
        answers.append(server.generate(text="Say: one two", sampling_params=sampling))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: server.facts()["num_running_requests"] == 1)
    return thread, answers


def text_of(server: LiveServer) -> str:
    thread, answers = long_request(server)
    thread.join(PATIENCE_S)
    return answers[0].json()["text"]


def test_a_pause_that_retracts_lets_the_cache_be_flushed_and_changes_no_answer(
    demo_server: LiveServer,
) -> None:
    expected = text_of(demo_server)
    thread, answers = long_request(demo_server)
    assert post(demo_server, "pause_generation", mode="retract").status_code == 200
    wait_until(lambda: demo_server.facts()["num_running_requests"] == 0)
    facts = demo_server.facts()
    assert (facts["is_paused"], facts["num_waiting_requests"]) == (True, 1)
    assert requests.get(f"{demo_server.url}/ready", timeout=30).status_code == 503
    wait_until(lambda: post(demo_server, "flush_cache").status_code == 200)
    assert demo_server.facts()["free_pages"] == facts["total_pages"]
    assert post(demo_server, "continue_generation").status_code == 200
    thread.join(PATIENCE_S)
    assert answers[0].json()["text"] == expected
    assert answers[0].json()["meta_info"]["num_retractions"] == 1
    assert requests.get(f"{demo_server.url}/ready", timeout=30).status_code == 200


def test_requests_wait_and_can_be_aborted_while_paused(demo_server: LiveServer) -> None:
    thread, answers = long_request(demo_server)
    post(demo_server, "pause_generation", mode="in_place").raise_for_status()
    assert post(demo_server, "flush_cache").status_code == 400
    newcomer = threading.Thread(target=lambda: answers.append(demo_server.generate(text="a")))
    newcomer.start()
    post(demo_server, "abort_request", abort_all=True).raise_for_status()
    thread.join(PATIENCE_S)
    assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert newcomer.is_alive()
    post(demo_server, "continue_generation").raise_for_status()
    newcomer.join(PATIENCE_S)
    assert answers[1].status_code == 200


def test_a_pause_in_mode_abort_ends_what_runs(demo_server: LiveServer) -> None:
    thread, answers = long_request(demo_server)
    post(demo_server, "pause_generation").raise_for_status()
    thread.join(PATIENCE_S)
    assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    post(demo_server, "continue_generation").raise_for_status()
    assert demo_server.generate(text="a").status_code == 200


def test_every_stage_writes_a_trace_of_the_steps_asked_for(
    demo_server: LiveServer, tmp_path
) -> None:
    body = {"output_dir": str(tmp_path / "traces"), "num_steps": 4, "profile_id": "p"}
    started = post(demo_server, "start_profile", activities=["CPU"], with_stack=False, **body)
    assert (started.status_code, started.text) == (200, "Start profiling.\n")
    again = post(demo_server, "start_profile", **body)
    assert again.status_code == 400 and "already in progress" in again.text
    sampling = {"max_new_tokens": 16, "ignore_eos": True}
    assert demo_server.generate(text="a", sampling_params=sampling).status_code == 200
    # It is over by itself, on both stages.
    wait_until(lambda: "not in progress" in post(demo_server, "stop_profile").text)
    files = sorted((tmp_path / "traces").iterdir())
    stages = [f"p-TP-0-PP-{n}.trace.json.gz" for n in range(2)]
    assert [file.name for file in files] == [*stages, "p-steps.trace.json"]
    tracks = {event["tid"] for event in json.loads(files.pop().read_text())}
    assert tracks == {0, 1, 2}
    for file in files:
        with gzip.open(file) as trace:
            names = [event.get("name") for event in json.load(trace)["traceEvents"]]
        assert "aten::cos" in names  # the rotary embedding; compiled kernels are none of torch's


def test_a_profile_that_cannot_be_written_is_a_400_and_the_server_goes_on(
    demo_server: LiveServer, tmp_path
) -> None:
    (tmp_path / "file").write_text("")
    refused = post(demo_server, "start_profile", output_dir=str(tmp_path / "file"))
    assert refused.status_code == 400 and "FileExistsError" in refused.text
    assert demo_server.generate(text="a").status_code == 200
