"""A prefill and a decode server behind SGLang's router: answers are those of one server."""

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import openai
import pytest
import requests
from support.live_server import (
    ANSWER_S,
    PATIENCE_S,
    LiveServer,
    start_server,
    wait_until,
    wait_until_ready,
)
from support.ports import number_of, reserve_port
from support.router import NEEDS_ROUTER
from support.servers_apart import KEY, PAGE_SIZE, SAME_TOKENS, Apart, is_at_rest, servers_apart

from sgl_pipeline.args.disaggregation_args import DisaggregationArgs
from sgl_pipeline.managers.serve_pd import HOST

pytestmark = NEEDS_ROUTER
# What a machine many times slower than usual may add to a limit of the servers.
SLOWNESS_S = 30.0
# Longer than a page.
PROMPT = "What is 17 + 25? Add the numbers, and say nothing but the sum. "
RANKS = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    with servers_apart(["--pp 2"], ["--pp 1"]) as apart:
        yield apart


@pytest.fixture(autouse=True)
def no_page_is_kept(apart: Apart) -> Iterator[None]:
    """Nothing is held or promised when all clients have their answers."""
    yield
    apart.wait_until_at_rest()


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "sampling_seed": 7}])
def test_tokens_are_those_of_one_server(apart: Apart, sampling: dict[str, Any]) -> None:
    wanted = {"max_new_tokens": 16, "ignore_eos": True} | sampling
    ours, whole = apart.ask(text=PROMPT, sampling_params=wanted)
    assert ours["output_ids"] == whole["output_ids"] and len(ours["output_ids"]) == 16


def test_a_prompt_is_computed_once(apart: Apart) -> None:
    ids = [5 + place * place % 200 for place in range(20 * PAGE_SIZE)]
    wanted = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
    before, computed = apart.decode.facts(), []
    for _ in range(2):
        ours, whole = apart.ask(input_ids=ids, sampling_params=wanted)
        assert ours["output_ids"] == whole["output_ids"]
        computed.append(apart.decode.facts()["prefill_tokens"] - before["prefill_tokens"])
    # A page of each request, and what the router's health checks have.
    assert PAGE_SIZE <= computed[0] < 2 * PAGE_SIZE <= computed[1] < 3 * PAGE_SIZE
    loaded = apart.decode.facts()["rooms"]["loaded_pages"] - before["rooms"]["loaded_pages"]
    assert loaded == 19  # those of the second request were cached


def test_log_probabilities_of_prompt_and_output_are_those_of_one_server(apart: Apart) -> None:
    ours, whole = apart.ask(
        text=PROMPT + "1",
        return_logprob=True,
        logprob_start_len=0,
        sampling_params={"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
    )
    for name in ("input_token_logprobs", "output_token_logprobs"):
        one, other = ours["meta_info"][name], whole["meta_info"][name]
        assert [ids for _, ids, _ in one] == [ids for _, ids, _ in other], name
        assert [p for p, *_ in one[1:]] == pytest.approx([p for p, *_ in other[1:]], abs=1e-3)


def test_a_stream_has_the_log_probabilities_of_its_prompt(apart: Apart) -> None:
    body = {
        "text": PROMPT * 2 + "2",
        "return_logprob": True,
        "logprob_start_len": 5,
        "stream": True,
        "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
    }
    last = []
    for url in (apart.router, apart.whole.url):
        with requests.post(f"{url}/generate", json=body, timeout=60, stream=True) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: {")]
        last.append(json.loads(lines[-1]))
    ours, whole = last
    assert ours["output_ids"] == whole["output_ids"]
    one, other = (chunk["meta_info"]["input_token_logprobs"] for chunk in last)
    assert len(one) > 3 * PAGE_SIZE and [ids for _, ids, _ in one] == [ids for _, ids, _ in other]
    assert [p for p, *_ in one[1:]] == pytest.approx([p for p, *_ in other[1:]], abs=1e-3)


def test_several_prompts_and_samples_are_those_of_one_server(apart: Apart) -> None:
    ids = [[5 + number, *range(40)] for number in range(3)]
    sampling = {"max_new_tokens": 5, "temperature": 1, "sampling_seed": 3, "n": 2}
    ours, whole = apart.ask(input_ids=ids, sampling_params=sampling)
    assert [one["output_ids"] for one in ours] == [one["output_ids"] for one in whole]
    assert len(ours) == 6


def test_a_chat_of_two_choices_is_streamed_as_by_one_server(apart: Apart) -> None:
    def chat(url: str) -> list[str]:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(
            model="sgl-pipeline-demo",
            messages=[{"role": "user", "content": PROMPT}],
            temperature=0,
            n=2,
            stream=True,
        )
        texts = ["", ""]
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        return texts

    assert chat(apart.router) == chat(apart.whole.url) != ["", ""]


def test_an_answer_has_its_grammar(apart: Apart) -> None:
    wanted = {"max_new_tokens": 8, "temperature": 1, "sampling_seed": 5, "regex": "[a-f]{3}-[0-9]"}
    ours, whole = apart.ask(text=PROMPT + "3", sampling_params=wanted)
    assert ours["text"] == whole["text"] and re.fullmatch(wanted["regex"], ours["text"])


def test_a_bad_request_is_a_400_by_the_two(apart: Apart) -> None:
    body = {"text": PROMPT, "sampling_params": {"temperature": -1}}
    answer = requests.post(f"{apart.router}/generate", json=body, timeout=60)
    assert answer.status_code == 400 and "temperature" in answer.text


def test_a_server_asked_by_itself_names_the_router(apart: Apart) -> None:
    for server in (apart.prefill, apart.decode):
        answer = server.generate(text=PROMPT)
        assert answer.status_code == 400 and "bootstrap_room" in answer.text
        health = requests.get(f"{server.url}/health_generate", timeout=ANSWER_S)
        assert health.status_code == 200


def test_the_bootstrap_port_shows_the_topology(apart: Apart) -> None:
    answer = requests.get(
        f"{apart.bootstrap}/route", params=dict.fromkeys(RANKS, -1), timeout=ANSWER_S
    )
    assert answer.status_code == 200, answer.text
    topology = answer.json()
    assert (topology["pp_size"], topology["kv_cache_dtype"]) == (2, "float32")
    assert topology["prefill_http_port"] == apart.prefill.port


def test_a_client_that_leaves_ends_its_room_on_both(apart: Apart) -> None:
    body = {
        "text": PROMPT * 4,
        "stream": True,
        "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True},
    }
    with requests.post(f"{apart.router}/generate", json=body, timeout=60, stream=True) as answer:
        assert next(answer.iter_lines()).startswith(b"data: {")
        assert apart.decode.facts()["num_running_requests"] == 1
    wait_until(lambda: is_at_rest(apart.prefill) and is_at_rest(apart.decode))


def test_an_aborted_half_ends_the_other(apart: Apart) -> None:
    """The decode server's half waits for a prompt that nobody computes."""
    port = int(apart.bootstrap.rpartition(":")[2])
    with ThreadPoolExecutor() as threads:
        half = threads.submit(ask_half, apart.decode, 77, port, rid="left-alone")
        wait_until(lambda: apart.decode.facts()["rooms"]["bootstrap_requests"] == 1)
        requests.post(f"{apart.decode.url}/abort_request", json={"rid": "left-alone"}, timeout=30)
        half.result(PATIENCE_S)
    answer = ask_half(apart.prefill, 77, port)
    assert answer.status_code >= 400 and "abort" in answer.text.lower(), answer.text


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_prefill_server_that_dies_or_hangs_ends_its_requests_and_no_others(
    apart: Apart, end: signal.Signals
) -> None:
    with second_prefill() as (second, port), ThreadPoolExecutor() as threads:
        both = [
            threads.submit(ask_half, server, 5, port, max_new_tokens=400)
            for server in (second, apart.decode)
        ]
        assert both[0].result(PATIENCE_S).status_code == 200
        waiting = threads.submit(ask_half, apart.decode, 6, port)
        wait_until(lambda: apart.decode.facts()["rooms"]["bootstrap_requests"] == 1)
        second.scheduler().send_signal(end)
        # Long before SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, which would end it too.
        answer = waiting.result(DisaggregationArgs().silence_s + SLOWNESS_S)
        assert answer.status_code == 503 and f"{HOST}:{port}" in answer.text, answer.text
        assert len(both[1].result(PATIENCE_S).json()["output_ids"]) == 400


def test_a_prefill_server_that_is_stopped_lets_its_prompts_be_read_first(apart: Apart) -> None:
    new = "6" + PROMPT * 4  # which the decode server has not cached
    with second_prefill() as (second, port), ThreadPoolExecutor() as threads:
        reading = threads.submit(ask_half, apart.decode, 20, port, text=new)
        wait_until(lambda: apart.decode.facts()["rooms"]["bootstrap_requests"] == 1)
        stages = apart.decode.stages()
        for stage in stages:
            stage.suspend()
        try:
            assert ask_half(second, 20, port, text=new).status_code == 200
            second.process.terminate()
            wait_until(lambda: "waiting for 1 prompt that decode servers read" in second.text)
            assert second.process.poll() is None
        finally:
            for stage in stages:
                stage.resume()
        assert reading.result(PATIENCE_S).status_code == 200
        assert second.wait_for_end() == 0


@contextmanager
def second_prefill() -> Iterator[tuple[LiveServer, int]]:
    """A prefill server that no router knows, and its bootstrap port."""
    with closing(reserve_port()) as reserved:
        port = number_of(reserved)
        roles = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
        second = start_server(*roles, "--pp", "1", *SAME_TOKENS, environment=KEY)
        try:
            wait_until_ready(second)
            yield second, port
        finally:
            second.process.kill()
            second.process.wait()


def test_a_decode_server_that_dies_leaves_no_page_held(apart: Apart) -> None:
    port = int(apart.bootstrap.rpartition(":")[2])
    with ThreadPoolExecutor() as threads:
        second = start_server(
            "--disaggregation-mode", "decode", "--pp", "3", *SAME_TOKENS, environment=KEY
        )
        try:
            wait_until_ready(second)
            body = {"max_new_tokens": 20}
            both = [
                threads.submit(ask_half, server, 8, port, **body)
                for server in (apart.prefill, second)
            ]
            tokens = both[1].result(PATIENCE_S).json()["output_ids"]
            assert both[0].result(PATIENCE_S).status_code == 200
            assert ask_half(apart.whole, None, None, **body).json()["output_ids"] == tokens
            # It asks for rooms, and has read none of their pages when it dies.
            new = PROMPT * 4 + "4"  # more than it has cached
            rooms = [threads.submit(ask_half, second, 10 + one, port, text=new) for one in range(2)]
            wait_until(lambda: second.facts()["rooms"]["bootstrap_requests"] == 2)
            for stage in second.stages():
                stage.suspend()
            assert ask_half(apart.prefill, 10, port, text=new).status_code == 200
            assert apart.prefill.facts()["rooms"]["held_pages"] > 0
            second.process.kill()
            second.process.wait()
            for room in rooms:
                assert room.exception(PATIENCE_S) is not None
            wait_until(lambda: is_at_rest(apart.prefill))
            answer = ask_half(apart.prefill, 11, port)
            assert answer.status_code == 503 and "decode server" in answer.text, answer.text
        finally:
            second.process.kill()
            second.process.wait()


def ask_half(
    server: LiveServer,
    room: int | None,
    port: int | None,
    rid: str | None = None,
    max_new_tokens: int = 4,
    text: str = PROMPT * 3,
) -> requests.Response:
    """One of the two requests that a router makes of one; without a room, that one."""
    return server.generate(
        text=text,
        rid=rid,
        bootstrap_host=HOST if room is not None else None,
        bootstrap_port=port,
        bootstrap_room=room,
        sampling_params={"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True},
    )
