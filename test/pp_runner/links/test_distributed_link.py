"""Rows over torch.distributed, by gloo, since there is no GPU: on one host and between two."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from support.ports import number_of, reserve_port

from benchmark.hosts.namespaces import hosts, why_no_hosts
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.pp_runner.links.distributed_link import DistributedLink

pytestmark = pytest.mark.multiproc
PORT = 9100
TIMEOUT_S = 120

STAGE = """
import sys, torch
from torch import distributed
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape
from sgl_pipeline.pp_runner.links.open_link import open_activation_link
stage, num_stages, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
used = []

def watched(operation):
    def call(rows, neighbor, group):
        used.append((operation.__name__, neighbor, distributed.get_process_group_ranks(group)))
        return operation(rows, neighbor, group=group)
    return call

link = open_activation_link(
    ActivationShape(8, torch.bfloat16, torch.device("cpu")),
    (f"gloo:{rendezvous}",) * (num_stages - 1),
    stage,
)
distributed.isend, distributed.recv = watched(distributed.isend), watched(distributed.recv)
sizes = (1, 5, 300)
for step_id, rows in enumerate(sizes):
    expected = torch.arange(rows * 8).reshape(rows, 8).to(torch.bfloat16) + step_id
    hidden = expected if stage == 0 else link.receive(step_id, rows)
    assert torch.equal(hidden, expected)
    if stage < num_stages - 1:
        link.send(step_id, hidden)
link.close()
own = []
if stage > 0:
    own.append(("recv", stage - 1, [stage - 1, stage]))
if stage < num_stages - 1:
    own.append(("isend", stage + 1, [stage, stage + 1]))
assert used == own * len(sizes), used
"""


def command_of(stage: int, num_stages: int, rendezvous: str) -> list[str]:
    return [sys.executable, "-c", STAGE, str(stage), str(num_stages), rendezvous]


def run_stage(*words: str) -> None:
    sys.argv[1:] = words
    exec(STAGE, {})


def require_all_end_well(stages: list["subprocess.Popen[str]"]) -> None:
    try:
        assert [process.wait(TIMEOUT_S) for process in stages] == [0] * len(stages)
    finally:
        for process in stages:
            process.kill()
            process.wait()


@pytest.fixture(params=["file", "tcp"])
def rendezvous(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield str(tmp_path / "rendezvous")
        return
    with reserve_port() as port:
        yield f"tcp://127.0.0.1:{number_of(port)}"


def test_distributed_link_carries_rows_over_a_group_for_each_boundary(
    rendezvous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    stages = [
        get_context("fork").Process(target=run_stage, args=(str(stage), "3", rendezvous))
        for stage in range(3)
    ]
    for process in stages:
        process.start()
    try:
        for process in stages:
            process.join(TIMEOUT_S)
        assert [process.exitcode for process in stages] == [0] * 3
    finally:
        for process in stages:
            process.kill()


def test_stage_0_names_the_address_at_which_it_cannot_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shape = ActivationShape(8, torch.float32, torch.device("cpu"))
        with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1 port {port},.*in use"):
            DistributedLink(shape, "gloo", f"tcp://127.0.0.1:{port}", 0, 2)


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_stages_of_two_hosts_meet_at_one_address_and_listen_at_no_other() -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0"}
    with hosts(2) as network:
        first, second = network.hosts
        rendezvous = f"tcp://{first.address}:{PORT}"
        stages = [first.start(*command_of(0, 2, rendezvous), env=environment)]
        try:
            deadline_s = time.monotonic() + TIMEOUT_S
            while not (listening := first.listeners()) and time.monotonic() < deadline_s:
                time.sleep(0.1)
            assert listening == [f"{first.address}:{PORT}"]
        finally:
            stages.append(second.start(*command_of(1, 2, rendezvous), env=environment))
            require_all_end_well(stages)
