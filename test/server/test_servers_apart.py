"""Several prefill and decode servers of different depths behind one router, layers that move on
either side, experts, pages in 8 bits: answers are those of one server.

`test_disaggregation.py` has the requests of clients in all their forms, with one server of each.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from support.live_server import LiveServer, wait_until
from support.router import NEEDS_ROUTER
from support.servers_apart import PAGE_SIZE, SAME_TOKENS, Apart, generate, servers_apart
from support.streams import NUM_TOKENS, Stream
from support.tiny_models import VOCAB_SIZE, tiny_model

from sgl_pipeline.managers.entrance.graceful_stop import CHILD_ENDED

pytestmark = NEEDS_ROUTER
ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "sgl_pipeline" / "demo_model"
CLIENTS = 4


@pytest.fixture(scope="module")
def four() -> Iterator[Apart]:
    """A dense model on two servers of each role, no two of which have the same split."""
    prefills = ["--pp 2 --pp-layer-partition 11,5 --migration manual", "--pp 1"]
    decodes = ["--pp 3 --pp-layer-partition 3,9,4", "--pp 2 --pp-layer-partition 6,10"]
    # `cache_aware` would leave servers out while few clients ask.
    with servers_apart(prefills, decodes, router_flags=("--policy", "random")) as apart:
        yield apart


@pytest.fixture(scope="module")
def two() -> Iterator[Apart]:
    """Experts and pages in 8 bits on a prefill server of one stage and a decode server of two."""
    model = ("--model-path", str(tiny_model("qwen3-moe")), "--tokenizer-path", str(TOKENIZER))
    flags = (*SAME_TOKENS, *model, "--kv-cache-dtype", "int8")
    decode = "--pp 2 --pp-layer-partition 2,4 --migration manual"
    with servers_apart(["--pp 1"], [decode], flags=flags) as apart:
        yield apart


def body_of(number: int, num_tokens: int = 12) -> dict[str, Any]:
    """A request of its own, of some pages and a rest; every other one is seeded. It wants the
    log-probabilities of its prompt from the second page on."""
    length = (3 + number % 5) * PAGE_SIZE + number % PAGE_SIZE
    prompt = [(7 * number * place + place * place + number) % VOCAB_SIZE for place in range(length)]
    sampling: dict[str, Any] = {"max_new_tokens": num_tokens, "ignore_eos": True}
    how = {"temperature": 1, "sampling_seed": number} if number % 2 else {"temperature": 0}
    logprobs = {"return_logprob": True, "logprob_start_len": PAGE_SIZE}
    return {"input_ids": prompt, "sampling_params": sampling | how, **logprobs}


def assert_same(ours: Any, whole: Any) -> None:
    """The two answers have the same tokens, whose log-probabilities are the same too."""
    assert ours["output_ids"] == whole["output_ids"] and ours["output_ids"]
    for name in ("input_token_logprobs", "output_token_logprobs"):
        one, other = ours["meta_info"][name], whole["meta_info"][name]
        assert [token for _, token, _ in one] == [token for _, token, _ in other], name
        # The first one of a prompt has none.
        assert [p for p, *_ in one[1:]] == pytest.approx([p for p, *_ in other[1:]], abs=1e-3)


def rooms_of(servers: list[LiveServer]) -> list[int]:
    return [server.facts()["rooms"]["transferred"] for server in servers]


def move(server: LiveServer, layer_counts: list[int]) -> None:
    answer = requests.post(
        f"{server.url}/pipeline/plan", json={"layer_counts": layer_counts}, timeout=120
    )
    assert answer.status_code == 200 and answer.json()["move"]["outcome"] == "done", answer.text


def answers_during_moves(
    apart: Apart, server: LiveServer, splits: list[list[int]], numbers: range
) -> None:
    """All answers are right while the layers of `server` move from one split to the next."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        asked: dict[int, Future[Any]] = {
            number: clients.submit(generate, apart.router, **body_of(number, 40))
            for number in numbers
        }
        wait_until(lambda: server.facts()["num_running_requests"] > 0)
        num_moves = 0
        while num_moves < 3 or not all(answer.done() for answer in asked.values()):
            move(server, splits[num_moves % len(splits)])
            num_moves += 1
    for number, answer in asked.items():
        assert_same(answer.result(), generate(apart.whole.url, **body_of(number, 40)))


def test_servers_of_different_depths_answer_as_one(four: Apart) -> None:
    splits = [one.facts()["layer_partition"] for one in (*four.prefills, *four.decodes)]
    assert splits == [[11, 5], [16], [3, 9, 4], [6, 10]]
    before = rooms_of(four.prefills), rooms_of(four.decodes)
    numbers = range(24)
    with ThreadPoolExecutor(CLIENTS) as clients:
        ours = list(clients.map(lambda one: generate(four.router, **body_of(one)), numbers))
    for number, answer in zip(numbers, ours, strict=True):
        assert_same(answer, generate(four.whole.url, **body_of(number)))
    four.wait_until_at_rest()
    after = rooms_of(four.prefills), rooms_of(four.decodes)
    for then, now in zip(before, after, strict=True):
        assert all(new > old for old, new in zip(then, now, strict=True)), (before, after)
        assert sum(now) - sum(then) >= len(numbers)


def test_layers_move_on_a_prefill_server_while_pages_cross(four: Apart) -> None:
    answers_during_moves(four, four.prefill, [[9, 7], [12, 4], [11, 5]], range(100, 130))
    four.wait_until_at_rest()


def test_experts_and_pages_in_8_bits_answer_as_one_server(two: Apart) -> None:
    before = two.decode.facts()["rooms"]["loaded_pages"]
    numbers = range(12)
    with ThreadPoolExecutor(CLIENTS) as clients:
        ours = list(clients.map(lambda one: generate(two.router, **body_of(one)), numbers))
    for number, answer in zip(numbers, ours, strict=True):
        assert_same(answer, generate(two.whole.url, **body_of(number)))
    whole_pages = [(len(body_of(number)["input_ids"]) - 1) // PAGE_SIZE for number in numbers]
    assert two.decode.facts()["rooms"]["loaded_pages"] - before == sum(whole_pages)
    two.wait_until_at_rest()


def test_layers_move_on_a_decode_server_while_pages_cross(two: Apart) -> None:
    answers_during_moves(two, two.decode, [[4, 2], [1, 5], [3, 3]], range(200, 230))
    two.wait_until_at_rest()


def test_a_decode_server_that_dies_ends_its_streams_by_name_and_no_others(four: Apart) -> None:
    """The last of these servers."""
    prompt = "What is 17 + 25? Add the numbers, and say nothing but the sum. "
    streams = [Stream(four.router, prompt + str(number)) for number in range(10)]
    dying = four.decodes[1]
    wait_until(lambda: all(len(one.ids) > 2 for one in streams))
    scheduler = dying.scheduler()
    num_dying = dying.facts()["num_running_requests"]
    scheduler.kill()
    assert 0 < num_dying < len(streams)
    ended = []
    for stream in streams:
        finish = stream.join().last["meta_info"]["finish_reason"]
        assert stream.errors == [] and finish["type"] in ("abort", "length")
        if finish["type"] == "abort":
            ended.append((finish["status_code"], finish["message"]))
        else:
            assert len(stream.ids) == NUM_TOKENS
    assert len(ended) == num_dying
    assert set(ended) == {(503, CHILD_ENDED)}
    assert dying.wait_for_end() != 0
