"""Two replicas behind SGLang's router, unmodified, with its cache-aware policy.

Answers do not depend on the replica that gives them.
"""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
import requests
from support.live_server import (
    ANSWER_S,
    PATIENCE_S,
    START_TIMEOUT_S,
    LiveServer,
    start_server,
    wait_until,
    wait_until_ready,
)
from support.ports import number_of, reserve_port
from support.router import FOLDER, NEEDS_ROUTER

pytestmark = NEEDS_ROUTER
# Several pages each, with nothing in common.
FAMILIES = (
    "<|user|>What is 17 + 25? Add the numbers, and say nothing but the sum. ",
    "abc def ghi jkl mno pqr stu vwx yz, and once more from the first letter on: ",
)


@dataclass
class Router:
    process: "subprocess.Popen[str]"
    url: str
    replicas: list[LiveServer]
    lines: list[str] = field(default_factory=list)

    def ask(self, text: str, url: str = "") -> dict[str, Any]:
        sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
        body = {"text": text, "sampling_params": sampling}
        answer = requests.post(f"{url or self.url}/generate", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def num_healthy(self) -> int:
        workers = requests.get(f"{self.url}/workers", timeout=ANSWER_S).json()["workers"]
        return sum(one["is_healthy"] for one in workers)


def num_asked(replica: LiveServer) -> int:
    return replica.text.count('"POST /generate ')


def asked_since(router: "Router", before: list[int]) -> list[int]:
    """How often each replica was asked since `num_asked` was `before`, the lower number first."""
    after = map(num_asked, router.replicas)
    return sorted(now - then for now, then in zip(after, before, strict=True))


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    with ExitStack() as stack:
        flags = ("--pp", "1", "--dtype", "float32", "--cpu-threads-per-stage", "1")
        replicas = [start_server(*flags) for _ in range(2)]
        for replica in replicas:
            stack.callback(stop, replica.process)
        ports = [stack.enter_context(closing(reserve_port())) for _ in range(2)]
        for replica in replicas:
            wait_until_ready(replica)
        command = [sys.executable, "-m", "sglang_router.launch_router", "--policy", "cache_aware"]
        command += ["--worker-urls", *(replica.url for replica in replicas)]
        command += ["--host", "127.0.0.1", "--port", str(number_of(ports[0]))]
        command += ["--prometheus-port", str(number_of(ports[1]))]
        command += ["--health-check-interval-secs", "1", "--worker-startup-check-interval", "1"]
        paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        stack.callback(stop, process)
        found = Router(process, f"http://127.0.0.1:{number_of(ports[0])}", replicas)
        assert process.stdout is not None
        threading.Thread(target=found.lines.extend, args=(process.stdout,), daemon=True).start()
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not is_up(found):
            assert process.poll() is None and time.monotonic() < deadline_s, "".join(found.lines)
            time.sleep(0.1)
        yield found


def is_up(router: Router) -> bool:
    try:
        return router.num_healthy() == 2
    except requests.ConnectionError:
        return False


def stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def test_prompts_with_a_common_beginning_meet_it_in_one_replicas_cache(router: Router) -> None:
    answers = {}
    for family in FAMILIES:
        before = [num_asked(replica) for replica in router.replicas]
        texts = [f"{family}{number}" for number in range(4)]
        cached = []
        for text in texts:
            answers[text] = router.ask(text)
            cached.append(answers[text]["meta_info"]["cached_tokens"])
        # A line of the log follows its answer.
        wait_until(lambda before=before: sum(asked_since(router, before)) >= 4)  # type: ignore[misc]
        assert asked_since(router, before) == [0, 4]
        assert cached[0] == 0
        assert min(cached[1:]) > 0
    for text, answer in answers.items():
        for replica in router.replicas:
            assert router.ask(text, replica.url)["output_ids"] == answer["output_ids"]


def test_a_chat_is_streamed_as_by_a_replica(router: Router) -> None:
    def chat(url: str) -> list[str | None]:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(
            model="sgl-pipeline-demo",
            messages=[{"role": "user", "content": "What is 17 + 25?"}],
            temperature=0,
            stream=True,
        )
        return [chunk.choices[0].delta.content for chunk in stream if chunk.choices]

    through_router = chat(router.url)
    assert len(through_router) > 1
    assert "".join(filter(None, through_router)) == "".join(
        filter(None, chat(router.replicas[0].url))
    )


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"),
        ("GET", "/readiness"),
        ("GET", "/health_generate"),
        ("GET", "/v1/models"),
        ("GET", "/get_model_info"),
        ("GET", "/get_server_info"),
        ("GET", "/get_loads"),
        ("POST", "/flush_cache"),
    ],
)
def test_the_routers_own_questions_are_answered(router: Router, method: str, path: str) -> None:
    answer = requests.request(method, f"{router.url}{path}", timeout=30)
    assert answer.status_code == 200, answer.text


def test_no_question_of_the_router_was_one_that_a_replica_lacks(router: Router) -> None:
    """By what the replicas have logged of all tests before.

    Apart from `/get_load`, which SGLang 0.5.23 has no longer either: `/get_loads` answers without.
    """
    text = "".join(replica.text for replica in router.replicas)
    asked = set(re.findall(r'"(?:GET|POST) (\S+) HTTP/1.1" (\d+)', text))
    assert {path for path, _ in asked} > {"/generate", "/health"}
    assert {one for one in asked if one[1] != "200"} <= {("/get_load", "404")}


def test_a_replica_that_ends_is_replaced_by_the_other(router: Router) -> None:
    """The last of this router."""
    texts = [f"{family}9" for family in FAMILIES]
    expected = [router.ask(text)["output_ids"] for text in texts]
    max(router.replicas, key=num_asked).process.kill()
    wait_until(lambda: router.num_healthy() == 1)
    assert [router.ask(text)["output_ids"] for text in texts] == expected
