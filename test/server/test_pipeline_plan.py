"""Layers of a live server moved by hand: what operators ask, and what requests notice of it."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from support.live_server import (
    ANSWER_S,
    PATIENCE_S,
    LiveServer,
    live_server,
    wait_until,
    wait_until_equal,
)
from support.traced_events import read_events

from sgl_pipeline.records.move_record import MoveRecord
from sgl_pipeline.records.trace import read_trace
from test.server.test_metrics_and_drain import Samples

pytestmark = pytest.mark.multiproc
PROMPTS = ["Repeat after me: one two", "What is 17 + 25?", "Spell the word house."]
DONE_BY_HAND = {"outcome": "done", "wanted_by": "operator"}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server(traces: Path) -> Iterator[LiveServer]:
    flags = ["--migration", "manual", "--pp-layer-partition", "8,8", "--enable-metrics"]
    flags += ["--trace-path", str(traces / "steps.jsonl")]
    flags += ["--trace-steps", str(traces / "steps.json")]
    with live_server("--pp", "2", "--dtype", "float32", *flags) as server:
        yield server


def plan(server: LiveServer) -> dict[str, Any]:
    reply = requests.get(f"{server.url}/pipeline/plan", timeout=ANSWER_S)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def change(server: LiveServer, **body: Any) -> tuple[int, dict[str, Any]]:
    reply = requests.post(f"{server.url}/pipeline/plan", json=body, timeout=120)
    return reply.status_code, reply.json()


def move(server: LiveServer, *layer_counts: int) -> dict[str, Any]:
    status, answer = change(server, layer_counts=list(layer_counts))
    assert status == 200, answer
    return dict(answer["move"])


def output_of(server: LiveServer, prompt: str, num_tokens: int) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    reply = server.generate(text=prompt, sampling_params=sampling)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["output_ids"])


def test_requests_in_flight_draw_the_same_tokens_while_layers_move(server: LiveServer) -> None:
    alone = [output_of(server, prompt, 400) for prompt in PROMPTS]
    requests.post(f"{server.url}/flush_cache", timeout=30)
    first_move = len(plan(server)["history"])
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        outputs = [clients.submit(output_of, server, prompt, 400) for prompt in PROMPTS]
        wait_until(lambda: server.facts()["num_running_requests"] == len(PROMPTS))
        moved = []
        while len(moved) < 24 and not all(output.done() for output in outputs):
            moved += [move(server, 6, 10), move(server, 9, 7), move(server, 8, 8)]
    assert [output.result() for output in outputs] == alone
    assert moved[0]["copied_bytes"] > 0, "no page had anything on it"
    assert {one["outcome"] for one in moved} == {"done"}
    assert sum(one["patched_bytes"] for one in moved) > 0, "no request ran during a move"
    epochs = [one["epoch"] for one in moved]
    assert epochs == list(range(first_move + 1, first_move + 1 + len(moved)))


def test_the_cache_of_a_prompt_moves_with_its_layers(server: LiveServer) -> None:
    prompt = "Repeat after me: " + "one two three four five six seven " * 8
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    before = server.generate(text=prompt, sampling_params=sampling).json()
    move(server, 7, 9)
    after = server.generate(text=prompt, sampling_params=sampling).json()
    move(server, 8, 8)
    assert after["meta_info"]["cached_tokens"] > before["meta_info"]["cached_tokens"]
    assert after["output_ids"] == before["output_ids"]


def test_every_report_follows_the_plan_in_use(server: LiveServer, traces: Path) -> None:
    made = move(server, 7, 9)
    output_of(server, PROMPTS[0], 8)
    shown, facts = plan(server), server.facts()
    assert (shown["layer_counts"], shown["epoch"]) == ([7, 9], made["epoch"])
    assert (facts["layer_partition"], facts["plan_epoch"]) == ([7, 9], made["epoch"])
    assert shown["migration"] == "manual" and shown["max_layer_counts"] == [10, 10]
    assert shown["measured_steps"] >= 7 and all(ms > 0 for ms in shown["stage_ms"])
    assert 0.0 < shown["bubble_share"] < 1.0
    (told,) = [one for one in shown["history"] if one["move"] == made["move"]]
    assert told == made
    assert abs(made["began_unix_s"] - time.time()) < 600

    total = len(shown["history"])
    name = "sgl_pipeline_layer_moves_total"

    def gauges() -> tuple[float, float]:
        """The epoch, which is told with the newest state, and the moves, once they are over."""
        told = Samples(server)
        return told.value("sgl_pipeline_plan_epoch"), told.value(name, **DONE_BY_HAND)

    wait_until_equal(gauges, (made["epoch"], total))
    samples = Samples(server)
    assert samples.value("sgl_pipeline_stage_layers", stage="1") == 9
    assert samples.value("sgl_pipeline_layer_move_seconds_count", outcome="done") == total
    for phase in ("copied", "patched"):
        moved_bytes = sum(one[f"{phase}_bytes"] for one in shown["history"])
        assert samples.value("sgl_pipeline_layer_move_bytes_total", phase=phase) == moved_bytes

    begun = f"layer move {made['move']} (operator): 8,8 to 7,9"
    for said in (f"{begun} begins", f"{begun} done in"):
        wait_until(lambda said=said: server.text.count(said) == 1)  # type: ignore[misc]

    whole = traces / "whole.jsonl"

    def moves() -> list[int]:
        # The last line may not be written to its end.
        whole.write_bytes(b"".join(lines_of(traces / "steps.jsonl")))
        return [one.move for one in read_events(whole, MoveRecord)]

    wait_until_equal(moves, list(range(total)))
    assert {step.epoch for step in read_trace(whole)} >= {0, made["epoch"]}
    num_alike = sum(one["after"] == [7, 9] for one in shown["history"])

    def drawn() -> list[int]:
        names = names_in(traces / "steps.json")
        return [names.count("prepare 7,9"), names.count("switch to 7,9")]

    wait_until_equal(drawn, [num_alike, num_alike])


def lines_of(path: Path) -> list[bytes]:
    """The lines of a file that is being written; the last one only if it is whole."""
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def names_in(path: Path) -> list[str]:
    """The names of all events in a Chrome trace; none while it is being written."""
    try:
        return [event["name"] for event in json.loads(path.read_bytes())]
    except json.JSONDecodeError:
        return []


def test_undo_goes_back_and_a_preview_of_it_does_not(server: LiveServer) -> None:
    if plan(server)["layer_counts"] != [8, 8]:
        move(server, 8, 8)
    move(server, 9, 7)
    for _ in range(3):  # the planner needs steps to predict anything
        output_of(server, PROMPTS[0], 64)
    status, answer = change(server, undo=True, preview=True)
    assert status == 200, answer
    assert answer["preview"]["layer_counts"] == [8, 8] and answer["preview"]["moved_layers"] == 1
    assert len(answer["preview"]["stage_ms_before"]) == 2
    assert plan(server)["layer_counts"] == [9, 7]
    status, answer = change(server, undo=True)
    assert status == 200, answer
    assert (answer["move"]["wanted_by"], answer["move"]["after"]) == ("undo", [8, 8])
    assert plan(server)["layer_counts"] == [8, 8]


def test_of_many_moves_at_once_each_is_done_or_a_409(server: LiveServer) -> None:
    """The moves that are done made a chain of plans, each from the one before."""
    start = plan(server)
    wishes = [[7, 9], [9, 7], [6, 10], [10, 6], [8, 8]] * 3
    with ThreadPoolExecutor(len(wishes)) as clients:
        answers = list(clients.map(lambda counts: change(server, layer_counts=counts), wishes))
    statuses = [status for status, _ in answers]
    assert set(statuses) <= {200, 400, 409} and {200, 409} <= set(statuses), statuses
    for status, answer in answers:
        if status != 200:
            words = "being moved" if status == 409 else "is the plan already"
            assert words in answer["error"]["message"] or "has room for" in str(answer)
    done = [answer["move"] for status, answer in answers if status == 200]
    done.sort(key=lambda one: one["epoch"])
    chain = [start["layer_counts"], *(one["after"] for one in done)]
    assert [one["before"] for one in done] == chain[:-1]
    assert plan(server)["layer_counts"] == chain[-1]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"layer_counts": [1, 15]}', "it has room for 10"),
        (b'{"layer_counts": [16]}', "this pipeline has 16 in 2"),
        (b'{"layer_counts": [0, 16]}', "at least one layer"),
        (b'{"layer_counts": [true, 15]}', "got `bool`"),
        (b'{"layer_counts": [-1, 17]}', ">= 0"),
        (b'{"layer_counts": [8.0, 8]}', "got `float`"),
        (b'{"undo": true, "now": true}', "unknown field `now`"),
        (b"[" * 10_000, "got `array`"),
        (b"\x00\xff", "malformed"),
        (b"", "truncated"),
    ],
)
def test_what_cannot_be_is_a_400_and_moves_nothing(
    server: LiveServer, body: bytes, words: str
) -> None:
    before = plan(server)
    headers = {"Content-Type": "application/json"}
    reply = requests.post(f"{server.url}/pipeline/plan", data=body, headers=headers, timeout=30)
    assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text
    assert plan(server)["history"] == before["history"]


def test_a_client_that_leaves_does_not_stop_its_move(server: LiveServer) -> None:
    before = plan(server)["layer_counts"]
    counts = [7, 9] if before != [7, 9] else [8, 8]
    body = json.dumps({"layer_counts": counts}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        head = "POST /pipeline/plan HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    wait_until(lambda: plan(server)["layer_counts"] == counts)
    assert output_of(server, PROMPTS[0], 4) == output_of(server, PROMPTS[0], 4)


def test_half_a_body_holds_nothing_up(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        head = "POST /pipeline/plan HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: 100\r\n\r\n".encode() + b'{"undo"')
        assert plan(server)["move_under_way"] is None
    assert plan(server)["move_under_way"] is None
    assert "Traceback" not in server.text


def test_many_who_look_hold_up_nobody(server: LiveServer) -> None:
    """Each gets an answer, a request is served meanwhile, and the server still answers."""
    over = threading.Event()
    statuses: set[int] = set()

    def look() -> None:
        while not over.is_set():
            reply = requests.get(f"{server.url}/pipeline/plan", timeout=60)
            statuses.add(reply.status_code)

    lookers = [threading.Thread(target=look) for _ in range(8)]
    for looker in lookers:
        looker.start()
    try:
        assert len(output_of(server, PROMPTS[1], 32)) == 32
    finally:
        over.set()
        for looker in lookers:
            looker.join(PATIENCE_S)
    assert statuses == {200}


def test_a_pause_does_not_hold_up_a_move(server: LiveServer) -> None:
    counts = [8, 8] if plan(server)["layer_counts"] != [8, 8] else [7, 9]
    requests.post(f"{server.url}/pause_generation", json={"mode": "in_place"}, timeout=30)
    try:
        assert move(server, *counts)["outcome"] == "done"
    finally:
        requests.post(f"{server.url}/continue_generation", json={}, timeout=30)
    assert len(output_of(server, PROMPTS[2], 4)) == 4
