"""Connections find their process through the one port; strangers are dropped and counted."""

import contextlib
import os
import pickle
import socket
import ssl
import time
from pathlib import Path

import psutil
import pytest
from support.clusters import accept, host_directory, open_port, stream_pair, until

from sgl_pipeline.cluster.doors import (
    GREETING_BYTES,
    MAGIC,
    DialError,
    Door,
    dial,
    door_path,
    greeting,
    join_address,
    split_address,
)
from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.cluster.keys import greeting_key
from sgl_pipeline.cluster.secure_stream import SecureStream, StreamClosed


def test_frames_of_any_size_arrive_whole_and_in_order(tmp_path: Path) -> None:
    with stream_pair(tmp_path) as (dialed, taken_in):
        one, other = FramedStream(dialed), FramedStream(taken_in)
        sent = [b"", b"x", os.urandom(70_000), os.urandom(9_000_000), b"end"]
        for payload in sent:
            one.send(payload)
        # More than the network takes: it waited for nobody.
        assert one.has_backlog
        received: list[bytes] = []

        def work() -> bool:
            one.flush()
            if (frame := other.receive()) is not None:
                received.append(frame)
            return len(received) == len(sent)

        until(work)
        assert received == sent and not one.has_backlog
        other.send(b"back")
        until(lambda: one.receive() == b"back")


def test_the_end_of_the_other_side_is_noticed(tmp_path: Path) -> None:
    with stream_pair(tmp_path) as (dialed, taken_in):
        dialed.close()
        with pytest.raises(StreamClosed):
            until(lambda: taken_in.read_into(memoryview(bytearray(1))) < 0)


def test_what_was_sent_before_the_end_is_read_before_it_is_noticed(tmp_path: Path) -> None:
    with stream_pair(tmp_path) as (dialed, taken_in):
        one, other = FramedStream(dialed), FramedStream(taken_in)
        until(lambda: dialed.open() and taken_in.open())
        for payload in (b"first", b"last"):
            one.send(payload)
        assert not one.has_backlog
        one.close()
        time.sleep(0.1)  # both frames and the end have arrived
        assert [other.receive(), other.receive()] == [b"first", b"last"]
        for _ in range(2):
            with pytest.raises(StreamClosed, match="closed the connection"):
                other.receive()


def test_what_crosses_is_encrypted(tmp_path: Path) -> None:
    with stream_pair(tmp_path) as (dialed, taken_in):
        assert dialed._tls.version() == taken_in._tls.version() == "TLSv1.3"


def test_a_frame_beyond_the_limit_ends_the_stream(tmp_path: Path) -> None:
    with stream_pair(tmp_path) as (dialed, taken_in):
        assert dialed.write(memoryview(b"\xff\xff\xff\xff")) == 4
        frames = FramedStream(taken_in)
        with pytest.raises(StreamClosed, match="a frame of 4294967295 bytes"):
            until(lambda: frames.receive() is not None)


def test_each_connection_finds_the_door_that_it_names(tmp_path: Path) -> None:
    directory = host_directory(tmp_path / "host")
    with open_port(directory) as (address, port):
        doors = [Door(directory, name) for name in ("link-1-0", "link-1-1")]
        for name, door in zip(("link-1-0", "link-1-1"), doors, strict=True):
            mine, theirs = dial(address, name, directory), accept(door)
            mine.sendall(name.encode())
            theirs.setblocking(True)
            assert theirs.recv(99) == name.encode()
            mine.close()
            theirs.close()
        with pytest.raises(DialError, match="'link-9-9'"):
            dial(address, "link-9-9", directory)
        for door in doors:
            door.close()
        assert port.dropped == {"no process at the door": 1}


def test_a_port_at_an_ipv6_address_takes_connections(tmp_path: Path) -> None:
    if not any(one.address == "::1" for one in psutil.net_if_addrs().get("lo", [])):
        pytest.skip("this machine has no IPv6")
    directory = host_directory(tmp_path / "host")
    with open_port(directory, "::1") as (address, _):
        door = Door(directory, "agents")
        mine, theirs = dial(address, "agents", directory), accept(door)
        assert theirs.getpeername() == mine.getsockname()
        for end in (mine, theirs, door):
            end.close()


def test_another_key_is_named_and_opens_nothing(tmp_path: Path) -> None:
    directory = host_directory(tmp_path / "host")
    stranger = host_directory(tmp_path / "stranger", b"another secret, which is as long as that")
    with open_port(directory) as (address, port):
        door = Door(directory, "agents")
        with pytest.raises(DialError, match="has another cluster key") as caught:
            dial(address, "agents", stranger)
        assert caught.value.is_final
        assert door.accept() is None
        assert port.dropped == {"another key": 1}
        door.close()


def test_whoever_only_repeats_a_greeting_gets_no_further_than_the_handshake(
    tmp_path: Path,
) -> None:
    directory = host_directory(tmp_path / "host")
    stranger = host_directory(tmp_path / "stranger", b"another secret, which is as long as that")
    with open_port(directory) as (address, _):
        door = Door(directory, "agents")
        connection = socket.create_connection(split_address(address))
        connection.sendall(greeting(greeting_key(directory), "agents"))
        assert connection.recv(1) == b"+"
        taken_in = SecureStream(accept(door), directory, is_server=True)
        dialed = SecureStream(connection, stranger, is_server=False)
        for end in (dialed, taken_in):
            with pytest.raises(StreamClosed, match="TLS handshake"):
                until(lambda end=end: _both_open(end, dialed, taken_in))
        door.close()


def _both_open(end: SecureStream, dialed: SecureStream, taken_in: SecureStream) -> bool:
    for other in (dialed, taken_in):
        try:
            other.open()
        except StreamClosed:
            if other is end:
                raise
    return False


def test_without_a_certificate_nobody_is_taken_in(tmp_path: Path) -> None:
    directory = host_directory(tmp_path / "host")
    with open_port(directory) as (address, _):
        door = Door(directory, "agents")
        connection = dial(address, "agents", directory)
        taken_in = SecureStream(accept(door), directory, is_server=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection.setblocking(False)
        anonymous = context.wrap_socket(connection, do_handshake_on_connect=False)

        def work() -> bool:
            with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                anonymous.do_handshake()
            return taken_in.open()

        with pytest.raises(StreamClosed, match="peer did not return a certificate"):
            until(work)
        anonymous.close()
        door.close()


GARBAGE = {
    "a pickle": pickle.dumps({"a": 1}) * 9,
    "random bytes": os.urandom(GREETING_BYTES),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(99),
    "nothing": b"",
    "half a greeting": greeting(b"k", "agents")[:40],
    "another version": MAGIC[:-1] + b"9" + bytes(GREETING_BYTES - 8),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_what_is_no_greeting_is_dropped_and_counted(tmp_path: Path, what: str) -> None:
    directory = host_directory(tmp_path / "host")
    with open_port(directory) as (address, port):
        door = Door(directory, "agents")
        stranger = socket.create_connection(split_address(address))
        with contextlib.suppress(OSError), stranger:
            stranger.sendall(GARBAGE[what])
            stranger.shutdown(socket.SHUT_WR)
        until(lambda: port.dropped.total() == 1)
        assert door.accept() is None
        # The port still serves.
        dial(address, "agents", directory).close()
        door.close()


def test_a_name_cannot_lead_out_of_the_run_directory(tmp_path: Path) -> None:
    for name in ("../etc", "a/b", "", "a--b", "a b", "."):
        with pytest.raises(ValueError, match="door"):
            door_path(str(tmp_path), name)
    directory = host_directory(tmp_path / "host")
    with open_port(directory) as (address, _), pytest.raises(DialError, match="nothing is behind"):
        dial(address, "../x", directory)


def test_why_a_host_cannot_be_dialed_is_said(tmp_path: Path) -> None:
    directory = host_directory(tmp_path / "host")
    with pytest.raises(DialError, match="refuses"):
        dial("127.0.0.1:1", "agents", directory)
    with pytest.raises(DialError, match="cannot be resolved"):
        dial("no-such-host.invalid:1", "agents", directory)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = join_address(*other.getsockname())
        with pytest.raises(DialError, match="does not answer"):
            dial(address, "agents", directory, timeout_s=0.2)


@pytest.mark.parametrize("address", ["h", "h:", ":1", "h:x", "h:0", "h:65536"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        split_address(address)


def test_addresses_of_both_families_come_back() -> None:
    for address in ("10.0.0.1:5000", "[fe80::1]:5000", "head:1"):
        assert join_address(*split_address(address)) == address
