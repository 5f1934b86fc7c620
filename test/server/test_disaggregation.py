"""A prefill and a decode server behind SGLang's router: answers are those of one server."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import requests
from support.live_server import LiveServer, start_server, wait_until, wait_until_ready
from support.ports import number_of, reserve_port
from support.router import FOLDER, NEEDS_ROUTER

from sgl_pipeline.cluster.keys import KEY_VARIABLE
from sgl_pipeline.managers.serve_pd import HOST, Ports, router_command, router_environment

pytestmark = NEEDS_ROUTER
# Longer than a page.
PROMPT = "What is 17 + 25? Add the numbers, and say nothing but the sum. "
RANKS = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")


@dataclass
class Apart:
    """Both servers, one that does all, and the router before the two."""

    router: str
    prefill: LiveServer
    decode: LiveServer
    whole: LiveServer
    bootstrap: str

    def ask(self, **body: Any) -> tuple[Any, Any]:
        """The answers of `/generate` by the two and by the one."""
        answers = []
        for url in (self.router, self.whole.url):
            answer = requests.post(f"{url}/generate", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())
        return answers[0], answers[1]


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    with ExitStack() as stack:
        flags = ("--dtype", "float32", "--cpu-threads-per-stage", "1")
        bootstrap, router, metrics = (
            stack.enter_context(closing(reserve_port())) for _ in range(3)
        )
        role = ("--disaggregation-bootstrap-port", str(number_of(bootstrap)))
        key = {KEY_VARIABLE: "a key of the tests, as long as is needed"}
        servers = []
        for more in (("prefill", "2"), ("decode", "1")):
            roles = ("--disaggregation-mode", more[0], "--pp", more[1], *role)
            servers.append(start_server(*roles, *flags, environment=key))
        servers.append(start_server("--pp", "1", *flags))
        for server in servers:
            stack.callback(stop, server.process)
        for server in servers:
            wait_until_ready(server)
        prefill, decode, whole = servers
        ports = Ports(
            number_of(router), prefill.port, decode.port, number_of(bootstrap), number_of(metrics)
        )
        intervals = ["--health-check-interval-secs", "1", "--worker-startup-check-interval", "1"]
        process = subprocess.Popen(
            router_command(ports, intervals), env=router_environment(str(FOLDER))
        )
        stack.callback(stop, process)
        url = f"http://{HOST}:{ports.router}"
        wait_until(lambda: num_healthy(url) == 2, 60)
        yield Apart(url, prefill, decode, whole, f"http://{HOST}:{ports.bootstrap}")


def num_healthy(url: str) -> int:
    try:
        workers = requests.get(f"{url}/workers", timeout=10).json()["workers"]
    except requests.ConnectionError:
        return 0
    return sum(one["is_healthy"] for one in workers)


def stop(process: Any) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "sampling_seed": 7}])
def test_tokens_are_those_of_one_server(apart: Apart, sampling: dict[str, Any]) -> None:
    wanted = {"max_new_tokens": 16, "ignore_eos": True} | sampling
    ours, whole = apart.ask(text=PROMPT, sampling_params=wanted)
    assert ours["output_ids"] == whole["output_ids"] and len(ours["output_ids"]) == 16


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


def test_a_bad_request_is_a_400_by_the_two(apart: Apart) -> None:
    body = {"text": PROMPT, "sampling_params": {"temperature": -1}}
    answer = requests.post(f"{apart.router}/generate", json=body, timeout=60)
    assert answer.status_code == 400 and "temperature" in answer.text


def test_a_server_asked_by_itself_names_the_router(apart: Apart) -> None:
    for server in (apart.prefill, apart.decode):
        answer = server.generate(text=PROMPT)
        assert answer.status_code == 400 and "bootstrap_room" in answer.text
        health = requests.get(f"{server.url}/health_generate", timeout=30)
        assert health.status_code == 200


def test_the_bootstrap_port_shows_the_topology(apart: Apart) -> None:
    answer = requests.get(f"{apart.bootstrap}/route", params=dict.fromkeys(RANKS, -1), timeout=10)
    assert answer.status_code == 200, answer.text
    topology = answer.json()
    assert (topology["pp_size"], topology["kv_cache_dtype"]) == (2, "float32")
    assert topology["prefill_http_port"] == apart.prefill.port
