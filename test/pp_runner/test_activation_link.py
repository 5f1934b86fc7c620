"""Activations arrive whole, in order and bit for bit, over each kind of link."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zmq

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.activation_link import ActivationShape, HostLink, open_activation_link

CPU = torch.device("cpu")


def host_links(tmp_path: Path, dtype: torch.dtype) -> list[HostLink]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    shape = ActivationShape(8, dtype, CPU)
    links = tuple(f"ipc://{tmp_path}/link-{boundary}" for boundary in range(2))
    opened = [open_activation_link(context, shape, links, stage) for stage in range(3)]
    assert all(isinstance(link, HostLink) for link in opened)
    return opened


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_cross_two_boundaries_bit_for_bit_and_in_order(tmp_path, dtype):
    first, middle, last = host_links(tmp_path, dtype)
    sent = [torch.randn(rows, 8).to(dtype) for rows in (1, 5, 300)]
    for step_id, hidden in enumerate(sent):
        first.send(step_id, hidden)
    for step_id, hidden in enumerate(sent):
        middle.send(step_id, middle.receive(step_id, len(hidden)))
    for step_id, hidden in enumerate(sent):
        assert torch.equal(last.receive(step_id, len(hidden)), hidden)
    for link in (first, middle, last):
        link.close()


def test_a_view_with_strides_is_sent_as_what_it_shows(tmp_path):
    first, middle, _ = host_links(tmp_path, torch.float32)
    wide = torch.randn(4, 16)
    first.send(0, wide[:, ::2])
    assert torch.equal(middle.receive(0, 4), wide[:, ::2])


@pytest.mark.parametrize(("step_id", "num_rows"), [(1, 4), (0, 3)])
def test_another_steps_rows_are_a_protocol_error(tmp_path, step_id, num_rows):
    first, middle, _ = host_links(tmp_path, torch.float32)
    first.send(0, torch.randn(4, 8))
    with pytest.raises(ProtocolError, match="received 128 bytes of step 0"):
        middle.receive(step_id, num_rows)


GLOO_STAGE = """
import sys, torch, zmq
from sgl_pipeline.pp_runner.activation_link import ActivationShape, open_activation_link
stage, path = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
link = open_activation_link(
    zmq.Context(), ActivationShape(8, torch.bfloat16, torch.device("cpu")), (f"gloo:{path}",), stage
)
for step_id, rows in enumerate((1, 5, 300)):
    expected = torch.arange(rows * 8).reshape(rows, 8).to(torch.bfloat16) + step_id
    if stage == 0:
        link.send(step_id, expected)
    else:
        assert torch.equal(link.receive(step_id, rows), expected)
link.close()
"""


@pytest.mark.multiproc
def test_distributed_link_carries_rows_between_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-c", GLOO_STAGE]
    stages = [
        subprocess.Popen([*command, str(stage), str(tmp_path / "rendezvous")]) for stage in (0, 1)
    ]
    assert [process.wait(120) for process in stages] == [0, 0]
