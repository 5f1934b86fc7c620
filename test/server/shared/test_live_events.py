"""`/pipeline/events` of a live server: what viewers get, how many there may be, how it ends."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from support.live_server import ANSWER_S, LiveServer, live_server, wait_until

pytestmark = pytest.mark.multiproc

SECRET = "zebra"


def events(reply: requests.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in reply.iter_lines():
        if line.startswith(b"event: "):
            name = line.removeprefix(b"event: ").decode()
        elif line.startswith(b"data: "):
            yield name, json.loads(line.removeprefix(b"data: "))


def look(server: LiveServer) -> requests.Response:
    return requests.get(f"{server.url}/pipeline/events", stream=True, timeout=ANSWER_S)


def ticks_until_ended(
    told: Iterator[tuple[str, dict[str, Any]]], request_id: str
) -> list[dict[str, Any]]:
    """All ticks up to that in which the request has ended."""
    ticks = []
    for name, data in told:
        if name == "tick":
            ticks.append(data)
            if any(ended[0] == request_id for ended in data["ended"]):
                return ticks
    raise AssertionError("the stream has ended")


def generate(server: LiveServer, request_id: str) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    reply = server.generate(text=f"Spell {SECRET}", rid=request_id, sampling_params=sampling)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_a_viewer_sees_each_step_of_a_request_and_nothing_that_it_says(
    demo_server: LiveServer,
) -> None:
    with look(demo_server) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        stream = events(reply)
        name, facts = next(stream)
        assert name == "hello" and facts["num_stages"] == 2
        assert {"/pipeline/events", "/pipeline/plan"} <= set(facts["routes"])
        answer = generate(demo_server, "ui-mine")
        ticks = ticks_until_ended(stream, "ui-mine")
    ended = next(one for tick in ticks for one in tick["ended"] if one[0] == "ui-mine")
    meta = answer["meta_info"]
    assert ended[2] == meta["prompt_tokens"] and ended[4] == meta["completion_tokens"] == 40
    steps = {step[0]: step for tick in ticks for step in tick["steps"]}
    carried = [one for tick in ticks for one in tick["carried"]]
    assert sum(length for *_, length, _ in carried) == meta["prompt_tokens"] + 39
    assert {step for step, *_ in carried} <= set(steps)
    for step_id, request_id, _, length, is_decode in carried:
        assert request_id == "ui-mine"
        assert steps[step_id][3 if is_decode else 2] >= length
    assert all(len(step[-1]) == 2 for step in steps.values())
    told = json.dumps([facts, ticks])
    assert SECRET not in told and answer["text"][:8] not in told


def test_requests_of_others_are_counted_and_not_followed(demo_server: LiveServer) -> None:
    with look(demo_server) as reply:
        stream = events(reply)
        next(stream)
        generate(demo_server, "somebodys")
        ticks = ticks_until_ended(stream, "somebodys")
    # What another viewer's own request did may be among what is replayed.
    told = json.dumps([[tick["followed"], tick["carried"]] for tick in ticks])
    assert "somebodys" not in told
    assert max(tick["prefill_tokens"] for tick in ticks) > 0


def test_the_ninth_viewer_is_a_503_until_one_leaves(demo_server: LiveServer) -> None:
    wait_until(lambda: viewers_of(demo_server) == 1)
    replies = [look(demo_server) for _ in range(8)]
    try:
        refused = look(demo_server)
        assert refused.status_code == 503
        assert "8 pages" in refused.json()["error"]["message"]
        replies.pop().close()

        def is_let_in() -> bool:
            replies.append(look(demo_server))
            return replies[-1].status_code == 200

        wait_until(is_let_in)
    finally:
        for reply in replies:
            reply.close()


def viewers_of(server: LiveServer) -> int:
    """How many look, this one among them."""
    with look(server) as reply:
        for name, data in events(reply):
            if name == "tick":
                return int(data["viewers"])
    raise AssertionError("the stream has ended")


def test_without_the_page_there_is_no_file_of_it_and_no_route() -> None:
    with live_server("--pp", "1", "--ui", "off") as off:
        html = {"Accept": "text/html"}
        for path in ("/ui", "/ui/", "/ui/app.js", "/pipeline/events"):
            assert requests.get(f"{off.url}{path}", timeout=30).status_code == 404, path
        assert requests.get(f"{off.url}/", headers=html, timeout=30).json() == "SGLang is running"
        assert "Watch:" not in off.text
        assert requests.get(f"{off.url}/pipeline/plan", timeout=30).status_code == 200


def test_a_server_with_viewers_stops_as_soon_as_one_without() -> None:
    with live_server("--pp", "1") as server:
        assert f"Watch: {server.url}/ui" in server.text
        replies = [look(server) for _ in range(3)]
        streams = [events(reply) for reply in replies]
        assert [next(stream)[0] for stream in streams] == ["hello"] * 3
        server.process.terminate()
        # Uvicorn by itself would wait for the viewers for ever.
        assert server.wait_for_end() == 0
        for stream in streams:
            assert {name for name, _ in stream} <= {"tick"}, "it ends in order"
        assert "Traceback" not in server.text, server.text
