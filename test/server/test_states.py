"""A server of a model whose layers keep states: its tokens are transformers', whatever happens.

The pool has room for two requests at most and there are three state slots, so that requests wait,
and are retracted. Decodes leave a snapshot every 16 tokens.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests
from support.greedy_oracle import count_ties
from support.live_server import (
    LiveServer,
    live_server,
    wait_until,
    wait_until_pages_are_back,
)
from support.state_models import write_state_model
from support.streams import Stream, kill_stage

from test.server.test_metrics_and_drain import Samples

pytestmark = [pytest.mark.alone, pytest.mark.multiproc]
PROMPTS = [[(7 * place + number) % 250 + 3 for place in range(9 + number)] for number in range(5)]
SLOTS, TRACK_INTERVAL = 3, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_state_model(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    flags = ["--model-path", str(model), "--dtype", "float32", "--device", "cpu", "--pp", "2"]
    flags += ["--migration", "manual", "--migration-spare-layers", "8"]
    flags += ["--max-mamba-cache-size", str(SLOTS), "--page-size", "4", "--max-total-tokens", "160"]
    flags += ["--mamba-track-interval", str(TRACK_INTERVAL)]
    with live_server(*flags, "--enable-metrics") as server:
        yield server


def streams_of(server: LiveServer, count: int) -> list[Stream]:
    """`count` tokens of each prompt, all at once."""
    sampling = {"max_new_tokens": count, "ignore_eos": True, "temperature": 0}
    return [
        Stream(server.url, "", {"text": None, "input_ids": ids, "sampling_params": sampling})
        for ids in PROMPTS
    ]


def check(model: Path, streams: list[Stream], count: int) -> None:
    """Each stream has had all its tokens, and transformers gives the same."""
    for prompt, stream in zip(PROMPTS, streams, strict=True):
        stream.join()
        assert stream.errors == []
        assert len(stream.ids) == count
        count_ties(model, prompt, stream.ids)


def check_all_is_free(server: LiveServer) -> None:
    """Whatever is not free is cached, and gives way."""
    wait_until_pages_are_back(server)
    facts = server.facts()
    assert facts["free_state_slots"] + facts["evictable_state_slots"] == SLOTS
    assert facts["state_slots"] == SLOTS


def flush(server: LiveServer) -> None:
    requests.post(f"{server.url}/flush_cache", timeout=30).raise_for_status()


def move_layers(server: LiveServer, counts: list[int]) -> None:
    """Returns when the stages hold so many layers each."""
    reply = requests.post(f"{server.url}/pipeline/plan", json={"layer_counts": counts}, timeout=60)
    assert reply.status_code == 200, reply.text


def generate(server: LiveServer, ids: list[int], count: int = 8) -> tuple[list[int], int]:
    """`count` tokens after the prompt `ids`, and how many tokens of it were cached."""
    sampling = {"max_new_tokens": count, "ignore_eos": True, "temperature": 0}
    body = {"input_ids": ids, "sampling_params": sampling}
    reply = requests.post(f"{server.url}/generate", json=body, timeout=60)
    reply.raise_for_status()
    answer = reply.json()
    return answer["output_ids"], answer["meta_info"]["cached_tokens"]


def test_server_info_tells_the_interval_the_slots_and_the_bytes_of_a_state(
    server: LiveServer,
) -> None:
    info = requests.get(f"{server.url}/server_info", timeout=30).json()
    for facts in (info, server.facts()):
        assert facts["mamba_track_interval"] == TRACK_INTERVAL
        assert facts["max_mamba_cache_size"] == SLOTS
    # 4 heads of 16 x 16 in fp32, and 3 inputs of 2 * 2 * 16 + 4 * 16 channels; six layers of eight.
    state_bytes = 4 * 16 * 16 * 4 + 3 * 128 * 4
    facts = server.facts()
    assert (facts["state_bytes_of_layer"], facts["state_bytes"]) == (state_bytes, 6 * state_bytes)


def test_a_shared_prefix_is_computed_once(server: LiveServer, model: Path) -> None:
    flush(server)
    prefix = [(11 * place) % 250 + 3 for place in range(24)]
    first, *others = ([*prefix, number, 5, 7] for number in range(3, 6))
    tokens, num_cached = generate(server, first)
    assert num_cached == 0
    # The same prompt again, and others: the second of these leaves a snapshot for the third.
    assert generate(server, first) == (tokens, len(prefix))
    for other in others:
        answer, num_cached = generate(server, other)
        assert num_cached == len(prefix)
        count_ties(model, other, answer)
    check_all_is_free(server)


def take_turn(server: LiveServer, model: Path, chat: list[int], count: int) -> int:
    """The user adds three tokens to `chat`, or begins it with nine, and the server `count`, the
    ones of transformers. Returns the number of tokens that were cached."""
    chat += [5 + len(chat), 7, 11] if chat else PROMPTS[0]
    answer, num_cached = generate(server, chat, count)
    assert len(answer) == count
    count_ties(model, chat, answer)
    chat += answer
    return num_cached


# All but the last token are computed: 42, 66, 87 and 99 of them after the turns. The last snapshot
# of the prompts would be at 8, 44 and 68.
ANSWERS, CACHED = (34, 21, 18, 9), [0, 32, 64, 80]


def test_the_next_turn_of_a_chat_begins_behind_the_last_answer(
    server: LiveServer, model: Path
) -> None:
    flush(server)
    chat: list[int] = []
    assert [take_turn(server, model, chat, count) for count in ANSWERS] == CACHED
    check_all_is_free(server)


def test_what_an_answer_has_left_moves_with_its_layers(server: LiveServer, model: Path) -> None:
    """Six layers change hands between two turns, four or five of them with states."""
    plan = server.facts()["layer_partition"]
    flush(server)
    chat: list[int] = []
    cached = [take_turn(server, model, chat, ANSWERS[0])]
    for counts, answer in zip(([1, 7], [7, 1], plan), ANSWERS[1:], strict=True):
        if server.facts()["layer_partition"] != counts:
            move_layers(server, counts)
        cached.append(take_turn(server, model, chat, answer))
    assert cached == CACHED
    check_all_is_free(server)


def test_after_a_flush_a_chat_is_computed_again_once(server: LiveServer, model: Path) -> None:
    flush(server)
    chat: list[int] = []
    cached = [take_turn(server, model, chat, count) for count in ANSWERS[:2]]
    flush(server)
    assert server.facts()["free_state_slots"] == SLOTS
    cached += [take_turn(server, model, chat, count) for count in ANSWERS[2:]]
    assert cached == [*CACHED[:2], 0, CACHED[3]]
    check_all_is_free(server)


def test_requests_wait_for_slots_and_retracted_ones_begin_anew(
    server: LiveServer, model: Path
) -> None:
    streams = streams_of(server, 100)
    wait_until(lambda: server.facts()["num_running_requests"] > 0)
    most = 0
    while any(stream._thread.is_alive() for stream in streams):
        most = max(most, server.facts()["num_running_requests"])
    check(model, streams, 100)
    assert 1 < most <= SLOTS
    assert server.facts()["num_retractions"] > 0
    check_all_is_free(server)
    assert f"{SLOTS} state slots, " in server.text


@pytest.mark.parametrize("stage", [0, 1])
def test_a_killed_stage_changes_no_token(server: LiveServer, model: Path, stage: int) -> None:
    num_recoveries = len(server.facts()["recoveries"])
    streams = streams_of(server, 100)
    wait_until(lambda: sum(len(one.ids) > 10 for one in streams) > 1)
    kill_stage(server, stage)
    check(model, streams, 100)
    wait_until(lambda: len(server.facts()["recoveries"]) > num_recoveries)
    wait_until(lambda: server.facts()["recoveries"][-1]["is_over"])
    newest = server.facts()["recoveries"][-1]
    # Both stages compute all of it again.
    assert newest["tokens"] > 0 and newest["replay_tokens"] == 0
    check_all_is_free(server)


def test_a_stage_that_leaves_changes_no_token(server: LiveServer, model: Path) -> None:
    num_recoveries = len(server.facts()["recoveries"])
    streams = streams_of(server, 100)
    wait_until(lambda: sum(len(one.ids) > 10 for one in streams) > 1)
    psutil.Process(server.facts()["stage_pids"][1]).terminate()
    check(model, streams, 100)
    wait_until(lambda: len(server.facts()["recoveries"]) > num_recoveries)
    wait_until(lambda: server.facts()["recoveries"][-1]["is_over"])
    assert server.facts()["recoveries"][-1]["is_planned"]
    check(model, streams_of(server, 30), 30)
    check_all_is_free(server)


def test_aborted_requests_give_their_slots_back(server: LiveServer, model: Path) -> None:
    sampling = {"max_new_tokens": 120, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor() as pool:
        bodies = [
            {"input_ids": ids, "sampling_params": sampling, "rid": f"gone-{number}"}
            for number, ids in enumerate(PROMPTS)
        ]
        replies = [
            pool.submit(requests.post, f"{server.url}/generate", json=body, timeout=60)
            for body in bodies
        ]
        wait_until(lambda: server.facts()["num_running_requests"] > 1)
        requests.post(f"{server.url}/abort_request", json={"abort_all": True}, timeout=30)
        for reply in replies:
            reply.result()
    wait_until(lambda: server.facts()["num_running_requests"] == 0)
    check(model, streams_of(server, 20), 20)
    check_all_is_free(server)


def test_slots_are_in_sglangs_metrics(server: LiveServer) -> None:
    flush(server)
    wait_until(lambda: Samples(server).value("sglang:mamba_available_tokens") == SLOTS)
    generate(server, PROMPTS[0])
    # One at the end of the prompt's whole pages, one where the answer ends on a whole page.
    wait_until(lambda: Samples(server).value("sglang:mamba_evictable_tokens") == 2)
    samples = Samples(server)
    assert samples.value("sglang:mamba_available_tokens") == SLOTS - 2
    assert samples.value("sglang:mamba_used_tokens") == 0
    assert samples.value("sglang:mamba_usage") == 0


def test_layers_that_move_take_their_states_along(server: LiveServer, model: Path) -> None:
    streams = streams_of(server, 100)
    wait_until(lambda: sum(len(one.ids) > 10 for one in streams) > 1)
    plan = requests.get(f"{server.url}/pipeline/plan", timeout=30).json()["layer_counts"]
    for counts in ([plan[0] - 1, plan[1] + 1], [plan[0] + 1, plan[1] - 1], plan):
        move_layers(server, counts)
    check(model, streams, 100)
    check_all_is_free(server)
