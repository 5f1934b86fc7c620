"""Rows between stages of two hosts: what was sent arrives, nobody waits, and an end is noticed."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.clusters import host_directory, open_port, until

from sgl_pipeline.cluster.doors import dial
from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.links.activation_link import ActivationShape, NeighborGone
from sgl_pipeline.pp_runner.links.open_link import open_activation_link
from sgl_pipeline.pp_runner.links.tcp_link import _NEWS, TcpInbox, TcpOutbox

SHAPE = ActivationShape(48, torch.bfloat16, torch.device("cpu"))
# More than sockets hold: what is left is written by a thread.
LARGE = ActivationShape(4096, torch.float32, torch.device("cpu"))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A run directory, and the address of the cluster port in front of it."""
    directory = host_directory(tmp_path / "host")
    with open_port(directory) as (address, _):
        yield directory, address


def rows_of(shape: ActivationShape, num_rows: int, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(num_rows, shape.hidden_size).to(shape.dtype)


def test_steps_of_any_size_come_as_they_were_sent(host: tuple[str, str]) -> None:
    directory, address = host
    links = (f"tcp:{address}/link-0-0",)
    downstream = open_activation_link(SHAPE, links, 1, directory)
    upstream = open_activation_link(SHAPE, links, 0, directory)
    for step_id, num_rows in enumerate((1, 3, 700, 64, 65, 2)):
        rows = rows_of(SHAPE, num_rows, step_id)
        sent = rows.clone()
        upstream.send(step_id, sent)
        sent.zero_()  # the stage goes on with its tensor
        until(downstream.has_rows)
        received = downstream.receive(step_id, num_rows)
        # Valid until the next `receive`, whatever arrives meanwhile.
        upstream.send(99, rows_of(SHAPE, num_rows, 99))
        until(downstream.has_rows)
        assert received.dtype == rows.dtype and torch.equal(received, rows)
        downstream.receive(99, num_rows)
    upstream.close()
    downstream.close()


def test_buffers_are_used_again(host: tuple[str, str]) -> None:
    directory, address = host
    inbox = TcpInbox("link-0-0", SHAPE, directory)
    outbox = TcpOutbox(f"{address}/link-0-0", SHAPE, directory)
    places = set()
    for tag in range(20):
        outbox.send(tag, rows_of(SHAPE, 60, tag))
        until(inbox.has_news)
        taken = inbox.take()
        assert taken is not None and taken[0] == tag
        places.add(taken[1].data_ptr())
    assert len(places) == 2
    until(lambda: outbox.num_unread() == 0)
    assert len(outbox._free) <= 2
    outbox.close()
    inbox.close()


def test_a_stage_that_sends_does_not_wait_for_one_that_does_not_read(
    host: tuple[str, str],
) -> None:
    directory, address = host
    inbox = TcpInbox("link-0-0", LARGE, directory)
    outbox = TcpOutbox(f"{address}/link-0-0", LARGE, directory)
    sent = [rows_of(LARGE, 512, tag) for tag in range(6)]  # 8 MiB each
    for tag, rows in enumerate(sent):
        outbox.send(tag, rows)
    # Nothing was read so far, and all of it would not fit into the network.
    for tag, rows in enumerate(sent):
        until(inbox.has_news)
        taken = inbox.take()
        assert taken is not None and taken[0] == tag and torch.equal(taken[1], rows)
    until(lambda: outbox.num_unread() == 0)
    outbox.close()
    inbox.close()


def test_rows_may_be_sent_before_the_other_end_listens(host: tuple[str, str]) -> None:
    directory, address = host
    outbox = TcpOutbox(f"{address}/link-0-0", SHAPE, directory)
    with pytest.raises(ConnectionError):
        outbox.num_unread()
    rows = rows_of(SHAPE, 5, 0)
    outbox.send(7, rows)
    outbox.send(8, rows)
    outbox.close()  # what was sent still leaves
    time.sleep(0.1)
    inbox = TcpInbox("link-0-0", SHAPE, directory)
    for tag in (7, 8):
        until(inbox.has_news)
        taken = inbox.take()
        assert taken is not None and taken[0] == tag and torch.equal(taken[1], rows)
    until(inbox.has_news)
    assert inbox.take() is None
    inbox.close()


def test_half_a_message_is_no_news_and_the_end_of_the_other_side_is(
    host: tuple[str, str],
) -> None:
    directory, address = host
    links = (f"tcp:{address}/link-0-0",)
    downstream = open_activation_link(LARGE, links, 1, directory)
    outbox = TcpOutbox(f"{address}/link-0-0", LARGE, directory)
    outbox.send(0, rows_of(LARGE, 1, 0))
    until(downstream.has_rows)
    downstream.receive(0, 1)
    assert outbox._stream is not None
    part = _NEWS.pack(1, 1, LARGE.row_bytes) + bytes(99)
    assert outbox._stream.write(memoryview(part)) == len(part)
    time.sleep(0.05)
    assert not downstream.has_rows()
    outbox._stream.close()
    until(downstream.has_rows)
    with pytest.raises(NeighborGone):
        downstream.receive(1, 1)
    downstream.close()


def test_a_stranger_at_the_door_does_not_take_the_place_of_the_stage_upstream(
    host: tuple[str, str],
) -> None:
    directory, address = host
    inbox = TcpInbox("link-0-0", SHAPE, directory)
    stranger = dial(address, "link-0-0", directory)
    stranger.sendall(b"no handshake of TLS " * 9)
    silent = dial(address, "link-0-0", directory)
    outbox = TcpOutbox(f"{address}/link-0-0", SHAPE, directory)
    rows = rows_of(SHAPE, 4, 1)
    outbox.send(3, rows)
    until(inbox.has_news)
    taken = inbox.take()
    assert taken is not None and taken[0] == 3 and torch.equal(taken[1], rows)
    for end in (stranger, silent, outbox, inbox):
        end.close()


def test_rows_of_another_size_are_a_protocol_error(host: tuple[str, str]) -> None:
    directory, address = host
    inbox = TcpInbox("link-0-0", LARGE, directory)
    outbox = TcpOutbox(f"{address}/link-0-0", SHAPE, directory)
    outbox.send(0, rows_of(SHAPE, 1, 0))
    with pytest.raises(ProtocolError, match="expected rows of 16384 bytes, received 1 of 96"):
        until(inbox.has_news)
    outbox.close()
    inbox.close()


def test_a_stage_may_have_one_neighbor_here_and_one_elsewhere(
    host: tuple[str, str], tmp_path: Path
) -> None:
    directory, address = host
    links = (f"unix:{tmp_path}/link-0-0", f"tcp:{address}/link-0-1")
    stages = [open_activation_link(SHAPE, links, stage, directory) for stage in range(3)]
    rows = rows_of(SHAPE, 9, 2)
    stages[0].send(0, rows)
    stages[1].send(0, stages[1].receive(0, 9))
    until(stages[2].has_rows)
    assert torch.equal(stages[2].receive(0, 9), rows)
    for stage in stages:
        stage.close()
