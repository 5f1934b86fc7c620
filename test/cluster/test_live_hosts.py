"""Two hosts of namespaces serve one pipeline: what crosses, what is lost, and what is said of it.

The tests share a server and leave it whole; the oracle of tokens is a server on one host. Figures
of speed are `benchmark/hosts/link_speeds.py`'s.
"""

import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
from support.live_hosts import (
    CLUSTER_PORT,
    HTTP_PORT,
    NUM_TOKENS,
    PROMPTS,
    LiveHosts,
    dial,
    live_hosts,
    tokens_of,
)
from support.live_server import PATIENCE_S, START_TIMEOUT_S, live_server
from support.ray_nodes import live_ray, placement_groups, why_no_ray
from support.tiny_models import tiny_model

from benchmark.hosts.namespaces import why_no_hosts
from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL
from sgl_pipeline.model_directory import SINGLE_FILE

pytestmark = [
    pytest.mark.alone,
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()),
]
# A split by measured time could be any other where the machine is busy at the start.
FLAGS = ("--pp", "2", "--pp-layer-partition", "8,8", "--dtype", "float32", "--migration", "manual")
CLOCK_OFFSET_S = 777.25
NUM_FRAMES = int(os.environ.get("SGL_PIPELINE_BAD_FRAMES", "2000"))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Of one host."""
    with live_server(*FLAGS) as server:
        return [tokens_of(server.url, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def live(
    expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveHosts]:
    directory = tmp_path_factory.mktemp("hosts")
    clocks = (0.0, CLOCK_OFFSET_S, 0.0)
    with live_hosts(2, directory, *FLAGS, strangers=1, clock_offsets_s=clocks) as server:
        yield server


def test_tokens_are_those_of_one_host(live: LiveHosts, expected: list[list[int]]) -> None:
    assert all(len(tokens) == NUM_TOKENS for tokens in expected)
    assert live.ask().result(START_TIMEOUT_S) == expected


def test_a_host_listens_at_its_cluster_port_and_the_head_for_http(live: LiveHosts) -> None:
    head, other, _ = live.network.hosts
    outer = [
        [one for one in host.listeners() if not one.startswith(("127.", "[::1]"))]
        for host in (head, other)
    ]
    assert outer == [
        sorted([f"0.0.0.0:{HTTP_PORT}", f"{head.address}:{CLUSTER_PORT}"]),
        [f"{other.address}:{CLUSTER_PORT}"],
    ]


def test_the_interface_is_named_and_the_clock_is_known(live: LiveHosts) -> None:
    other = live.network.hosts[1]
    line = live.processes[1].until("cluster port")
    assert f"{other.address}:{CLUSTER_PORT} on interface eth0, because" in line
    host = live.facts()["hosts"][1]
    wrong_by_ms = host["clock_offset_ms"] + CLOCK_OFFSET_S * 1e3
    assert abs(wrong_by_ms) <= host["clock_error_ms"] < 100.0
    # Moments of the other host's stage are shifted by it: it waits a moment for rows, not minutes.
    stages = live.facts()["recent_steps"]["stages"]
    assert all(0.0 <= share <= 1.0 for stage in stages for share in stage.values())


def test_a_layer_moves_across_under_a_request(live: LiveHosts, expected: list[list[int]]) -> None:
    for counts in ([9, 7], [8, 8]):
        asked = live.ask()
        live.until("facts['num_running_requests'] == 3")
        reply = requests.post(
            f"{live.url}/pipeline/plan", json={"layer_counts": counts}, timeout=120
        )
        assert reply.status_code == 200, reply.text
        assert asked.result(START_TIMEOUT_S) == expected
        plan = requests.get(f"{live.url}/pipeline/plan", timeout=30).json()
        assert plan["layer_counts"] == counts


def test_a_killed_stage_of_the_other_host_is_replaced(
    live: LiveHosts, expected: list[list[int]]
) -> None:
    num_recoveries = len(live.facts()["recoveries"])
    asked = live.ask()
    live.until("facts['num_running_requests'] == 3")
    psutil.Process(live.facts()["stage_pids"][1]).kill()
    assert asked.result(START_TIMEOUT_S) == expected
    live.until(f"len(facts['recoveries']) == {num_recoveries + 1}")


def test_strangers_and_random_bytes_have_no_effect(
    live: LiveHosts, expected: list[list[int]]
) -> None:
    before = live.facts()
    asked = live.ask()
    for number in range(NUM_FRAMES):
        with dial(live.cluster_address) as stranger:
            stranger.sendall(_bad_frame(number))
    assert asked.result(START_TIMEOUT_S) == expected
    after = live.facts()
    assert len(after["recoveries"]) == len(before["recoveries"])
    assert [host["is_there"] for host in after["hosts"]] == [True, True]
    live.head.until("dropped")


def _bad_frame(number: int) -> bytes:
    """Shorter or longer than a greeting; a pickle, a TLS record, a right beginning."""
    random_bytes = secrets.token_bytes(1 + number % 300)
    beginnings = (b"", b"sglpipe1", b"\x80\x04cos\nsystem\n(S'true'\ntR.", b"\x16\x03\x01\x02\x00")
    return beginnings[number % len(beginnings)] + random_bytes


def test_a_host_with_another_key_is_named_on_both_sides(live: LiveHosts, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.key"
    wrong.write_text(secrets.token_hex(32))
    stranger = live.start(1, "--cluster-key-file", str(wrong), on=live.network.hosts[2])
    line = stranger.until("another cluster key")
    assert "give all hosts the same one" in line
    assert stranger.stop() != 0
    live.head.until("another key")


def test_a_host_with_another_model_is_named_on_both_sides(live: LiveHosts, tmp_path: Path) -> None:
    retrained = shutil.copytree(DEMO_MODEL, tmp_path / "retrained")
    weights = bytearray((retrained / SINGLE_FILE).read_bytes())
    weights[-1] ^= 1
    (retrained / SINGLE_FILE).write_bytes(weights)
    for model, words in (
        (tiny_model("qwen3"), "config.json differs and the names, dtypes or shapes of tensors"),
        (retrained, "tensors of the same names and shapes have other values"),
    ):
        other = live.start(1, "--model-path", str(model), on=live.network.hosts[2])
        line = other.until(words)
        head, stranger = live.network.hosts[0].address, live.network.hosts[2].address
        assert f"{head}:{CLUSTER_PORT}" in line and f"{stranger}:{CLUSTER_PORT}" in line
        assert "put the same files at --model-path" in line
        assert other.stop() != 0
        assert "is not taken in" in live.head.until(words)


def test_an_address_at_which_nobody_else_is_reached_is_refused(live: LiveHosts) -> None:
    for rank, words in ((0, "is the loopback address"), (1, "own loopback address")):
        address = f"127.0.0.1:{CLUSTER_PORT}"
        lost = live.start(rank, "--dist-init-addr", address, on=live.network.hosts[2])
        lost.until(words)
        assert lost.process.wait(PATIENCE_S) != 0


def test_a_cable_that_is_out_for_two_seconds_costs_a_pause(
    live: LiveHosts, expected: list[list[int]]
) -> None:
    num_recoveries = len(live.facts()["recoveries"])
    asked = live.ask()
    live.until("facts['num_running_requests'] == 3")
    live.network.hosts[1].cut_cable()
    time.sleep(2.0)
    live.network.hosts[1].cable()
    assert asked.result(START_TIMEOUT_S) == expected
    assert len(live.facts()["recoveries"]) == num_recoveries


def test_a_host_that_is_cut_off_is_lost_and_comes_back(
    live: LiveHosts, expected: list[list[int]]
) -> None:
    asked = live.ask()
    live.until("facts['num_running_requests'] == 3")
    live.network.hosts[1].cut_cable()
    line = live.head.until("is lost: it has been silent")
    assert f"host 1 (host2, {live.network.hosts[1].address}:{CLUSTER_PORT})" in line
    live.network.hosts[1].cable()
    assert asked.result(START_TIMEOUT_S) == expected
    live.until("facts['hosts'][1]['is_there']")


def test_a_host_is_restarted_alone(live: LiveHosts, expected: list[list[int]]) -> None:
    asked = live.ask()
    live.until("facts['num_running_requests'] == 3")
    live.network.hosts[1].power_off()
    live.processes[1] = live.start(1)
    assert asked.result(START_TIMEOUT_S) == expected
    assert live.ask().result(START_TIMEOUT_S) == expected
    live.until("facts['hosts'][1]['is_there']")


def other_host_has_a_stage(live: LiveHosts) -> bool:
    own = psutil.Process(live.processes[1].process.pid).children(recursive=True)
    return not {process.pid for process in own}.isdisjoint(live.facts()["stage_pids"])


def give_the_other_host_a_stage(live: LiveHosts) -> None:
    """A host that came back late has none: the head's own has taken both stages."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    killed_s = -math.inf
    while live.facts()["is_recovering"] or not other_host_has_a_stage(live):
        assert time.monotonic() < deadline_s, live.head.text
        # A host that has just failed is not asked at once.
        if not live.facts()["is_recovering"] and time.monotonic() - killed_s > 25.0:
            psutil.Process(live.facts()["stage_pids"][1]).kill()
            killed_s = time.monotonic()
        time.sleep(0.1)


def test_a_host_that_is_asked_to_leave_hands_its_stages_over_and_may_come_again(
    live: LiveHosts, expected: list[list[int]]
) -> None:
    give_the_other_host_a_stage(live)
    num_recoveries = len(live.facts()["recoveries"])
    asked = live.ask()
    live.until("facts['num_running_requests'] == 3")
    live.processes[1].process.terminate()
    assert live.processes[1].process.wait(PATIENCE_S) == 0
    assert asked.result(START_TIMEOUT_S) == expected
    *_, newest = live.facts()["recoveries"]
    assert len(live.facts()["recoveries"]) == num_recoveries + 1
    assert newest["is_planned"] and newest["tokens"] == newest["replay_tokens"] == 0
    live.head.until("has left")
    live.processes[1] = live.start(1)
    live.until("facts['hosts'][1]['is_there']")
    assert live.ask().result(START_TIMEOUT_S) == expected


def test_the_head_ends_all(live: LiveHosts) -> None:
    """The last of this server."""
    live.head.stop()
    assert live.processes[1].process.wait(PATIENCE_S) == 0
    assert [host.listeners() for host in live.network.hosts] == [[], [], []]


def lose_a_host(starting: LiveHosts) -> None:
    """The third loses its power when its stage is about to load, and is started again."""
    host = starting.network.hosts[2]
    host.cable(delay_ms=300.0)  # it gets ready a second later than it is lost
    starting.head.until("layer split")
    host.power_off()
    host.cable()
    starting.processes[2] = starting.start(2)
    assert "host 2 " in starting.head.until("the start waits for it")


def test_four_hosts_one_lost_during_the_start_answer_as_one_over_slow_links_that_lose_frames(
    expected: list[list[int]], tmp_path: Path
) -> None:
    """A thousandth of the frames; TCP sends them again, and nothing else notices."""
    flags = ["--pp", "4", "--dtype", "float32"]
    with live_hosts(4, tmp_path, *flags, while_starting=lose_a_host) as server:
        for host in server.network.hosts:
            host.cable(delay_ms=0.5, gbit_per_s=0.1, loss=0.001)
        assert server.ask().result(START_TIMEOUT_S) == expected
        assert [host["is_there"] for host in server.facts()["hosts"]] == [True] * 4
        for host in server.network.hosts:
            host.cable()
        server.head.stop()
        assert [server.processes[rank].process.wait(PATIENCE_S) for rank in (1, 2, 3)] == [0, 0, 0]


@pytest.mark.skipif(bool(why_no_ray()), reason=why_no_ray())
@pytest.mark.parametrize("is_head_outside", [False, True], ids=["head_in_ray", "head_outside"])
def test_ray_starts_the_other_host_and_a_third_one_when_its_node_dies(
    expected: list[list[int]], tmp_path: Path, is_head_outside: bool
) -> None:
    with live_ray(tmp_path, *FLAGS, is_head_outside=is_head_outside) as ray:
        server = ray.server
        assert server.ask().result(START_TIMEOUT_S) == expected
        address = server.facts()["hosts"][1]["address"]
        (host,) = (one for one in ray.nodes if address == f"{one.address}:{CLUSTER_PORT}")
        asked = server.ask()
        server.until("facts['num_running_requests'] == 3")
        host.power_off()
        assert asked.result(START_TIMEOUT_S) == expected
        server.until(f"facts['hosts'][1].get('address') not in (None, {address!r})")
        server.head.until("host 1: its actor is lost")
        assert server.ask().result(START_TIMEOUT_S) == expected
        assert server.head.stop() == 0
        key = server.key_file.read_bytes()
        texts = [path.read_bytes() for path in ray.logs.rglob("*.*") if path.is_file()]
        assert any(b"the head has taken this host in" in text for text in texts)
        assert not any(key in text for text in texts)
        # What Ray was asked for, it has back.
        assert placement_groups(ray.head) == ["REMOVED"]
        (left,) = [one for one in ray.nodes if one is not host]
        assert f"{left.address}:{CLUSTER_PORT}" not in left.listeners()
