"""Requests whose keys and values stay on the prefill server: answers are those of one server."""

import itertools
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests
from support.live_server import PATIENCE_S, LiveServer, start_server, wait_until, wait_until_ready
from support.ports import number_of, reserve_port

from sgl_pipeline.cluster.keys import KEY_VARIABLE

pytestmark = [pytest.mark.alone, pytest.mark.multiproc, pytest.mark.slow]
HOST = "127.0.0.1"
PAGE_SIZE = 16
FLAGS = ("--dtype", "float32", "--cpu-threads-per-stage", "1")
KEY = {KEY_VARIABLE: "a key of the tests, as long as is needed"}
OFFLOADS = ("--enable-attention-offload",)
PROMPT = "What is 17 + 25? Add the numbers, and say nothing but the sum. "


@dataclass
class Apart:
    """A prefill server, a decode server that offloads, and one that does all."""

    prefill: LiveServer
    decode: LiveServer
    whole: LiveServer
    port: int
    threads: ThreadPoolExecutor
    rooms: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def ask(self, **body: Any) -> tuple[Any, Any]:
        """The answers of `/generate` by the two and by the one."""
        ours, whole = self.begin(**body), self.whole.generate(**body)
        assert whole.status_code == 200, whole.text
        return answer_of(ours), whole.json()

    def begin(self, decode: LiveServer | None = None, **body: Any) -> "Future[requests.Response]":
        """Sends both halves, as a router does; gives that of the decode server."""
        room = {
            "bootstrap_host": HOST,
            "bootstrap_port": self.port,
            "bootstrap_room": next(self.rooms),
        }
        self.threads.submit(self.prefill.generate, **body, **room)
        return self.threads.submit((decode or self.decode).generate, **body, **room)

    def offload(self) -> dict[str, Any]:
        """What the decode server offloads."""
        return offload_of(self.decode)


def offload_of(server: LiveServer) -> dict[str, Any]:
    found: dict[str, Any] = server.facts()["rooms"]["offload"]
    return found


def answer_of(half: "Future[requests.Response]") -> Any:
    answer = half.result(120)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module", params=["1", "2"])
def apart(request: pytest.FixtureRequest) -> Iterator[Apart]:
    """With a decode server of one stage or of two."""
    with ExitStack() as stack:
        bootstrap = stack.enter_context(closing(reserve_port()))
        threads = stack.enter_context(ThreadPoolExecutor(64))
        port = ("--disaggregation-bootstrap-port", str(number_of(bootstrap)))
        roles = (
            (*("--disaggregation-mode", "prefill", "--pp", "2"), *port, *OFFLOADS),
            (
                *("--disaggregation-mode", "decode", "--pp", request.param, *OFFLOADS),
                *("--attention-offload-ratio", "inf"),
            ),
            ("--pp", "1"),
        )
        servers = [start_server(*role, *FLAGS, environment=KEY) for role in roles]
        for server in servers:
            stack.callback(stop, server)
        for server in servers:
            wait_until_ready(server)
        yield Apart(*servers, number_of(bootstrap), threads)


@pytest.fixture(autouse=True)
def nothing_is_lent(apart: Apart) -> Iterator[None]:
    """Soon after all clients have their answers."""
    yield
    wait_until(lambda: offload_of(apart.prefill)["lent_pages"] == 0)
    wait_until(lambda: apart.offload()["requests"] == 0)


def stop(server: LiveServer) -> None:
    server.process.terminate()
    try:
        server.process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "sampling_seed": 7}])
def test_tokens_are_those_of_one_server(apart: Apart, sampling: dict[str, Any]) -> None:
    before = apart.offload()["offloaded"]
    wanted = {"max_new_tokens": 40, "ignore_eos": True} | sampling
    ours, whole = apart.ask(text=PROMPT, sampling_params=wanted)
    assert ours["output_ids"] == whole["output_ids"] and len(ours["output_ids"]) == 40
    after = apart.offload()
    assert after["offloaded"] == before + 1 and after["ended_early"] == 0


def test_log_probabilities_of_the_output_are_those_of_one_server(apart: Apart) -> None:
    ours, whole = apart.ask(
        text=PROMPT + "1",
        return_logprob=True,
        top_logprobs_num=3,
        sampling_params={"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
    )
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert ours["meta_info"][name] == whole["meta_info"][name]


def test_an_answer_has_its_grammar(apart: Apart) -> None:
    wanted = {"max_new_tokens": 8, "temperature": 1, "sampling_seed": 5, "regex": "[a-f]{3}-[0-9]"}
    ours, whole = apart.ask(text=PROMPT + "3", sampling_params=wanted)
    assert ours["text"] == whole["text"]


def test_many_at_once_are_those_of_one_server(apart: Apart) -> None:
    wanted = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}
    prompts = [PROMPT * (1 + number % 3) + f"{number}" for number in range(12)]
    halves = [apart.begin(text=prompt, sampling_params=wanted) for prompt in prompts]
    for prompt, half in zip(prompts, halves, strict=True):
        whole = apart.whole.generate(text=prompt, sampling_params=wanted).json()
        assert answer_of(half)["output_ids"] == whole["output_ids"]


@pytest.mark.parametrize("ratio", ["1", "auto"])
def test_a_decode_server_keeps_a_part_of_the_attention(apart: Apart, ratio: str) -> None:
    flags = ("--disaggregation-mode", "decode", "--attention-offload-ratio", ratio, "--pp", "1")
    second = start_server(*flags, *OFFLOADS, *FLAGS, environment=KEY)
    wanted = {"max_new_tokens": 300, "temperature": 0, "ignore_eos": True}
    try:
        wait_until_ready(second)
        halves = []
        for number in range(8):
            halves.append(apart.begin(second, text=PROMPT + f"{number}", sampling_params=wanted))
            wait_until(lambda: second.facts()["num_running_requests"] == len(halves))
        offloaded = offload_of(second)["offloaded"]
        # Whether it can be hidden is up to the machine; one request finds out.
        assert 2 <= offloaded <= 5 if ratio == "1" else offloaded >= 1
        for number, half in enumerate(halves):
            whole = apart.whole.generate(text=PROMPT + f"{number}", sampling_params=wanted)
            assert answer_of(half)["output_ids"] == whole.json()["output_ids"]
        print(offload_of(second))
    finally:
        stop(second)


def test_a_client_that_leaves_ends_its_lease(apart: Apart) -> None:
    half = apart.begin(
        text=PROMPT + "4",
        rid="leaves",
        sampling_params={"max_new_tokens": 3000, "ignore_eos": True},
    )
    wait_until(lambda: apart.offload()["requests"] == 1)
    wait_until(lambda: apart.prefill.facts()["rooms"]["offload"]["lent_rooms"] == 1)
    requests.post(f"{apart.decode.url}/abort_request", json={"rid": "leaves"}, timeout=30)
    half.result(PATIENCE_S)


def test_a_lost_stage_of_the_prefill_server_costs_no_answer(apart: Apart) -> None:
    wanted = {"max_new_tokens": 300, "temperature": 0, "ignore_eos": True}
    prompts = [PROMPT + f"lost {number}" for number in range(4)]
    before = apart.offload()["ended_early"]
    halves = [apart.begin(text=prompt, sampling_params=wanted) for prompt in prompts]
    # One that has a lease and has not begun fails with its room.
    wait_until(
        lambda: (
            apart.offload()["requests"] == 4 and apart.decode.facts()["num_running_requests"] == 4
        )
    )
    apart.prefill.stages()[0].kill()
    for prompt, half in zip(prompts, halves, strict=True):
        whole = apart.whole.generate(text=prompt, sampling_params=wanted).json()
        assert answer_of(half)["output_ids"] == whole["output_ids"]
    assert apart.offload()["ended_early"] == before + 4
    wait_until(lambda: not apart.prefill.facts()["is_recovering"])
    # Leases are made again afterwards.
    ours, whole = apart.ask(text=PROMPT + "after", sampling_params=wanted | {"max_new_tokens": 5})
    assert ours["output_ids"] == whole["output_ids"]
