"""Activations arrive whole, in order and bit for bit, over each kind of link."""

import os
import select
import socket
from pathlib import Path

import pytest
import torch

from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape, NeighborGone
from sgl_pipeline.pp_runner.links.host_link import HostLink
from sgl_pipeline.pp_runner.links.open_link import open_activation_link

CPU = torch.device("cpu")


def host_links(tmp_path: Path, dtype: torch.dtype) -> list[HostLink]:
    """Those of three stages in a row."""
    shape = ActivationShape(8, dtype, CPU)
    links = tuple(f"unix:{tmp_path}/link-{boundary}" for boundary in range(2))
    opened = [open_activation_link(shape, links, stage) for stage in range(3)]
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


def test_a_link_knows_whether_it_would_wait_for_rows(tmp_path):
    first, middle, _ = host_links(tmp_path, torch.float32)
    assert not middle.has_rows()
    for step_id in range(2):
        first.send(step_id, torch.ones(3, 8))
        assert middle.has_rows()
        first_of_two = middle.receive(step_id, 3)
        assert not middle.has_rows()
        assert first_of_two.all()
    for step_id in (2, 3):
        first.send(step_id, torch.ones(3, 8))
    middle.receive(2, 3)
    assert middle.has_rows()


def test_a_view_with_strides_is_sent_as_what_it_shows(tmp_path):
    first, middle, _ = host_links(tmp_path, torch.float32)
    wide = torch.randn(4, 16)
    first.send(0, wide[:, ::2])
    assert torch.equal(middle.receive(0, 4), wide[:, ::2])


@pytest.mark.parametrize(("step_id", "num_rows"), [(1, 4), (0, 3)])
def test_another_steps_rows_are_a_protocol_error(tmp_path, step_id, num_rows):
    first, middle, _ = host_links(tmp_path, torch.float32)
    first.send(0, torch.randn(4, 8))
    with pytest.raises(ProtocolError, match="received 4 rows of step 0"):
        middle.receive(step_id, num_rows)


def test_buffers_are_shared_by_the_steps_that_fit_them(tmp_path):
    first, middle, _ = host_links(tmp_path, torch.float32)
    addresses = set()
    for step_id, num_rows in enumerate((3, 64, 1, 50, 17)):
        first.send(step_id, torch.full((num_rows, 8), float(step_id)))
        rows = middle.receive(step_id, num_rows)
        assert torch.equal(rows, torch.full((num_rows, 8), float(step_id)))
        addresses.add(rows.data_ptr())
    # A buffer is on its way back while the next step is written to another.
    assert len(addresses) == 2


def test_rows_stay_as_they_are_until_the_next_are_asked_for(tmp_path):
    first, middle, _ = host_links(tmp_path, torch.float32)
    first.send(0, torch.zeros(4, 8))
    held = middle.receive(0, 4)
    for step_id in range(1, 6):
        first.send(step_id, torch.ones(4, 8))
    assert torch.equal(held, torch.zeros(4, 8))


def test_steps_of_known_sizes_open_no_more_descriptors(tmp_path):
    first, middle, _ = host_links(tmp_path, torch.float32)
    counts = []
    for step_id in range(40):
        num_rows = 64 * (step_id % 10 + 1)
        first.send(step_id, torch.ones(num_rows, 8))
        middle.receive(step_id, num_rows)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] == counts[20]


def test_what_is_sent_to_a_neighbor_that_is_gone_is_dropped(tmp_path):
    first, middle, _ = host_links(tmp_path, torch.float32)
    first.send(0, torch.ones(4, 8))
    middle.receive(0, 4)
    middle.close()
    for step_id in range(1, 4):
        first.send(step_id, torch.ones(4, 8))


def test_what_is_sent_first_to_a_neighbor_that_is_gone_is_dropped(tmp_path):
    """Its address is gone as well."""
    first, middle, _ = host_links(tmp_path, torch.float32)
    middle.close()
    first.send(0, torch.ones(4, 8))
    assert not (tmp_path / "link-0").exists()


def test_who_waits_for_a_neighbor_that_is_gone_is_told(tmp_path):
    first, middle, _ = host_links(tmp_path, torch.float32)
    first.send(0, torch.ones(4, 8))
    middle.receive(0, 4)
    first.close()
    assert middle.has_rows()
    with pytest.raises(NeighborGone):
        middle.receive(1, 4)


def test_a_neighbor_that_connects_and_says_nothing_holds_nobody_up(tmp_path):
    _, middle, _ = host_links(tmp_path, torch.float32)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(str(tmp_path / "link-0"))
        assert not middle.has_rows()
        readable, _, _ = select.select([middle.descriptor], [], [], 0.0)
        assert not readable
    assert middle.has_rows()  # the news that it is gone
    with pytest.raises(NeighborGone):
        middle.receive(0, 1)


def test_rows_can_be_waited_for_beside_other_things(tmp_path):
    first, middle, _ = host_links(tmp_path, torch.float32)
    assert first.descriptor is None
    for step_id in range(2):
        assert not select.select([middle.descriptor], [], [], 0.0)[0]
        first.send(step_id, torch.ones(4, 8))
        assert select.select([middle.descriptor], [], [], 5.0)[0]
        middle.receive(step_id, 4)
