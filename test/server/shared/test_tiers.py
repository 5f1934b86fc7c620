"""A live server with a store of files: restarts, other depths, killed stages, its routes and flags.

Answers are compared with those of the shared server, which has no store.
"""

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from support.live_server import (
    ANSWER_S,
    LiveServer,
    live_server,
    start_server,
    wait_until,
    wait_until_pages_are_back,
)
from support.streams import kill_stage

pytestmark = pytest.mark.multiproc

PAGE_SIZE, NUM_PROMPTS, PROMPT_TOKENS = 16, 6, 320
# Two and a half of the prompts.
POOL_TOKENS = 896
# However slow the machine is, pages that the store has are waited for.
PATIENT = {"prefetch_threshold": 32, "prefetch_timeout_base": 30.0}
ADMIN = {"Authorization": "Bearer secret"}


def prompt(number: int) -> list[int]:
    tokens = random.Random(number)
    return [tokens.randrange(10, 300) for _ in range(PROMPT_TOKENS)]


def ask(server: LiveServer, number: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    reply = server.generate(input_ids=prompt(number), sampling_params=sampling)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def ask_all(server: LiveServer) -> list[dict[str, Any]]:
    return [ask(server, number) for number in range(NUM_PROMPTS)]


def tokens_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def from_store(answers: list[dict[str, Any]]) -> list[int]:
    """Tokens of each prompt that the store had."""
    details = [answer["meta_info"]["cached_tokens_details"] or {} for answer in answers]
    return [one.get("storage", 0) for one in details]


def store_of(server: LiveServer) -> dict[str, Any]:
    return dict(server.facts()["store"])


def wait_until_saved(server: LiveServer) -> None:
    """All whole pages of the prompts and their answers are in the store."""
    wait_until(lambda: store_of(server)["saving_pages"] == 0)
    tokens = NUM_PROMPTS * (PROMPT_TOKENS // PAGE_SIZE) * PAGE_SIZE
    wait_until(lambda: store_of(server)["saved_tokens"] >= tokens)


@contextmanager
def tiered_server(folder: Path, depth: int, *flags: str) -> Iterator[LiveServer]:
    config = json.dumps({"file_storage_path": str(folder)} | PATIENT)
    own = ["--pp", str(depth), "--dtype", "float32", "--page-size", str(PAGE_SIZE)]
    own += ["--max-total-tokens", str(POOL_TOKENS), "--enable-hierarchical-cache"]
    own += ["--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", config]
    with live_server(*own, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def expected(demo_server: LiveServer) -> list[list[int]]:
    return tokens_of(ask_all(demo_server))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers") / "store"


WHOLE = [PROMPT_TOKENS - PAGE_SIZE] * NUM_PROMPTS  # a last token is always computed


def test_evicted_prompts_come_back_and_so_they_do_after_a_restart_at_another_depth(
    folder: Path, expected: list[list[int]]
) -> None:
    with tiered_server(folder, 2) as server:
        first = ask_all(server)
        assert tokens_of(first) == expected and sum(from_store(first)) == 0
        wait_until_saved(server)
        again = ask_all(server)
        assert tokens_of(again) == expected
        assert sum(from_store(again)) >= (NUM_PROMPTS - 2) * (PROMPT_TOKENS - PAGE_SIZE)
        details = again[0]["meta_info"]["cached_tokens_details"]
        assert details["storage_backend"] == "file" and details["host"] == 0
    with tiered_server(folder, 3, "--pp-layer-partition", "1,9,6", "--enable-metrics") as server:
        restarted = ask_all(server)
        assert tokens_of(restarted) == expected
        assert from_store(restarted) == WHOLE
        wanted = (
            rf"sglang:prefetched_tokens_total{{.*}} {float(sum(WHOLE))}",
            rf"sgl_pipeline_store_lookups_total{{.*}} {float(NUM_PROMPTS)}",
        )
        wait_until(lambda: all(re.search(one, _metrics(server)) for one in wanted))


def test_a_killed_stage_costs_no_request_and_no_token_while_pages_come_and_go(
    folder: Path, expected: list[list[int]]
) -> None:
    with tiered_server(folder, 2) as server, ThreadPoolExecutor(NUM_PROMPTS) as clients:
        for stage in (0, 1):
            answers = [clients.submit(ask, server, number) for number in range(NUM_PROMPTS)]
            wait_until(lambda: store_of(server)["lookups"] > 0)
            kill_stage(server, stage)
            assert tokens_of([answer.result() for answer in answers]) == expected
        assert store_of(server)["loaded_tokens"] > 0
        wait_until(lambda: not server.facts()["is_recovering"])
        # Pages on their way to the store are not free.
        wait_until(lambda: store_of(server)["saving_pages"] == 0)
        wait_until_pages_are_back(server)


def test_a_store_comes_goes_and_is_cleared_while_requests_are_served(
    tmp_path: Path, expected: list[list[int]]
) -> None:
    flags = ["--pp", "2", "--dtype", "float32", "--page-size", str(PAGE_SIZE)]
    flags += ["--max-total-tokens", str(POOL_TOKENS), "--enable-hierarchical-cache"]
    flags += ["--admin-api-key", "secret"]
    config = {"file_storage_path": str(tmp_path / "store")} | PATIENT
    attach = {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config_json": json.dumps(config),
    }
    with live_server(*flags) as server:
        route = f"{server.url}/hicache/storage-backend"

        def change(method: str, path: str = "", **body: Any) -> requests.Response:
            return requests.request(method, route + path, headers=ADMIN, timeout=30, **body)

        with ThreadPoolExecutor(1) as clients:
            asking = clients.submit(lambda: [ask_all(server) for _ in range(3)])
            assert store_of(server)["backend"] is None
            assert change("PUT", json=attach).status_code == 200
            assert change("GET").json()["hicache_storage_backend"] == "file"
            wait_until(lambda: store_of(server)["saved_tokens"] > 0)
            assert change("POST", "/clear").status_code == 200
            assert change("DELETE").status_code == 200
            for answers in asking.result():
                assert tokens_of(answers) == expected
        assert change("PUT", json=attach).status_code == 200
        assert tokens_of(ask_all(server)) == expected
        wait_until_saved(server)
        assert from_store(ask_all(server))[0] == WHOLE[0]
        other = attach | {"hicache_storage_backend_extra_config_json": '{"max_size": "no"}'}
        refused = change("PUT", json=other)
        assert refused.status_code == 400 and "max_size" in refused.text


def test_a_server_without_a_store_says_that_nothing_was_cleared(demo_server: LiveServer) -> None:
    answer = requests.post(f"{demo_server.url}/hicache/storage-backend/clear", timeout=30)
    assert answer.status_code == 400
    assert "nothing was cleared: no storage backend is attached" in answer.text


def test_a_folder_that_is_not_a_store_ends_the_start_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    config = json.dumps({"file_storage_path": str(tmp_path)})
    server = start_server(
        *("--dtype", "float32", "--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
        *("--hicache-storage-backend-extra-config", config),
    )
    assert server.wait_for_end() == 1
    assert "holds files that are not of a store, such as 'letter.txt'" in server.text
    assert "Traceback" not in server.text


def _metrics(server: LiveServer) -> str:
    return requests.get(f"{server.url}/metrics", timeout=ANSWER_S).text
