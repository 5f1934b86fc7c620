"""`--migration auto` on a live server: the planner itself leaves a split that is far from balanced.

It knows no costs at the start, so all that it decides by are this server's own steps.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from support.live_server import ANSWER_S, LiveServer, live_server, wait_until

pytestmark = pytest.mark.multiproc
START = [2, 14]
PROMPTS = [f"{number} Repeat after me: one two three four" for number in range(6)]
NUM_TOKENS = 200
# A second or two of steps teach what a layer takes, and as much again pays for the move.
MOST_SECONDS = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    flags = ["--migration", "auto", "--migration-spare-layers", "14"]
    flags += ["--pp-layer-partition", ",".join(map(str, START))]
    with live_server("--pp", "2", "--dtype", "float32", *flags) as server:
        yield server


def output_of(server: LiveServer, prompt: str) -> list[int]:
    # A greedy answer would hide small errors.
    sampling = {"temperature": 1.5, "sampling_seed": 7, "max_new_tokens": NUM_TOKENS}
    sampling |= {"ignore_eos": True}
    reply = server.generate(text=prompt, sampling_params=sampling)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["output_ids"])


def plan(server: LiveServer) -> dict[str, Any]:
    reply = requests.get(f"{server.url}/pipeline/plan", timeout=ANSWER_S)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_the_planner_leaves_a_bad_split_under_load_and_no_token_changes(
    server: LiveServer, demo_server: LiveServer
) -> None:
    expected = [output_of(demo_server, prompt) for prompt in PROMPTS]
    is_over = threading.Event()

    def ask_until_it_is_over(number: int) -> None:
        while not is_over.is_set():
            assert output_of(server, PROMPTS[number]) == expected[number]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        clients = [pool.submit(ask_until_it_is_over, number) for number in range(len(PROMPTS))]
        try:
            wait_until(lambda: bool(plan(server)["history"]), MOST_SECONDS)
        finally:
            is_over.set()
        for client in clients:
            client.result()
    # A further move may have begun with the last steps.
    wait_until(lambda: plan(server)["move_under_way"] is None)
    shown = plan(server)
    first, last = shown["history"][0], shown["history"][-1]
    assert (first["wanted_by"], first["outcome"], first["before"]) == ("auto", "done", START)
    assert first["copied_bytes"] + first["patched_bytes"] > 0, "no request ran during the move"
    # Whatever else the machine does, a stage of 14 layers is not the faster one.
    assert first["after"][0] > START[0]
    assert shown["layer_counts"] == last["after"] and shown["epoch"] == last["epoch"]
