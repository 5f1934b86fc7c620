"""A bootstrap port over real sockets: peers find doors, tools find the topology."""

import http.client
import json
import os
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from support.clusters import SECRET, accept, host_directory, served, until
from support.ports import number_of, reserve_port

from sgl_pipeline.args import ClusterArgs, DisaggregationArgs, PipelineArgs, StageArgs
from sgl_pipeline.cluster import cluster_port
from sgl_pipeline.cluster.cluster_port import ClusterPort
from sgl_pipeline.cluster.doors import (
    GREETING_BYTES,
    MAGIC,
    OTHER_VERSION,
    ROOMS_DOOR,
    DialError,
    Door,
    dial,
    greeting,
    split_address,
)
from sgl_pipeline.cluster.keys import KEY_VARIABLE, greeting_key
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.hosts.bootstrap_client import (
    BootstrapPort,
    bootstrap_setup,
    write_key,
)
from sgl_pipeline.managers.hosts.bootstrap_http import MAX_HEAD_BYTES
from sgl_pipeline.managers.hosts.bootstrap_process import BootstrapSetup, open_bootstrap_port

RANKS = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
WHOLE = "/route?" + "&".join(f"{name}=-1" for name in RANKS)


def args_of(directory: str, port: int, **stages: Any) -> PipelineArgs:
    return PipelineArgs(
        stages=StageArgs(model_path="m", dtype="bfloat16", num_stages=3, **stages),
        disaggregation=DisaggregationArgs(mode="prefill", bootstrap_port=port),
        run_directory=directory,
    )


def setup_of(directory: str, port: int, **stages: Any) -> BootstrapSetup:
    return bootstrap_setup(args_of(directory, port, **stages), "127.0.0.1", 30000)


@dataclass
class Opened:
    port: ClusterPort
    address: str
    directory: str

    def get(self, target: str, method: str = "GET", body: str | None = None) -> tuple[int, bytes]:
        """Status and content of an answer."""
        with closing(http.client.HTTPConnection(*split_address(self.address), timeout=10)) as link:
            link.request(method, target, body)
            answer = link.getresponse()
            return answer.status, answer.read()

    def send(self, data: bytes, *, is_all: bool = True) -> bytes:
        """What comes back until the port closes the connection."""
        with closing(socket.create_connection(split_address(self.address), timeout=10)) as link:
            back = b""
            with suppress(ConnectionError):  # it need not read all that is sent
                link.sendall(data)
                if is_all:
                    with suppress(OSError):  # the port has closed it already
                        link.shutdown(socket.SHUT_WR)
                while more := link.recv(4096):
                    back += more
            return back


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    directory = host_directory(tmp_path / "host")
    with closing(reserve_port()) as reserved:
        number = number_of(reserved)
        port = open_bootstrap_port(setup_of(directory, number))
        with served(port):
            yield Opened(port, f"127.0.0.1:{number}", directory)


def test_a_peer_finds_the_door_that_it_names(opened: Opened) -> None:
    for name in (ROOMS_DOOR, "pages-1"):
        with closing(Door(opened.directory, name)) as door:
            mine = dial(opened.address, name, opened.directory)
            theirs = accept(door)
            mine.sendall(b"hello")
            theirs.setblocking(True)
            assert theirs.recv(99) == b"hello"
            mine.close()
            theirs.close()
    assert not opened.port.dropped


def test_a_door_that_is_not_open_yet_is_said(opened: Opened) -> None:
    with pytest.raises(DialError, match="is starting, and nothing is behind its door 'rooms'"):
        dial(opened.address, ROOMS_DOOR, opened.directory)
    assert opened.port.dropped == {"no process at the door": 1}


def test_another_key_is_named_and_opens_nothing(opened: Opened, tmp_path: Path) -> None:
    stranger = host_directory(tmp_path / "stranger", b"another secret, which is as long as that")
    with closing(Door(opened.directory, ROOMS_DOOR)) as door:
        with pytest.raises(DialError, match="has another cluster key"):
            dial(opened.address, ROOMS_DOOR, stranger)
        assert door.accept() is None
    assert opened.port.dropped == {"another key": 1}


def test_another_version_is_named(opened: Opened) -> None:
    assert opened.send(MAGIC[:-1] + b"9" + bytes(GREETING_BYTES - len(MAGIC))) == OTHER_VERSION
    assert opened.port.dropped == {"another version": 1}


STRANGERS = {
    "nothing": b"",
    "half a magic": MAGIC[:4],
    "random bytes": bytes(range(128, 248)),
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "a word": b"HELLO WORLD, AND MORE\r\n\r\n",
    "HTTP without a version": b"GET /health\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "half a request": b"GET /health HTTP/1.1\r\nHost: x\r\n",
    "a head without end": b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * MAX_HEAD_BYTES,
}


@pytest.mark.parametrize("what", STRANGERS)
def test_strangers_are_dropped_and_counted(opened: Opened, what: str) -> None:
    assert opened.send(STRANGERS[what]) == b""
    until(lambda: opened.port.dropped == {"no greeting": 1})
    assert opened.get("/health") == (200, b"OK")


@pytest.mark.parametrize(
    "beginning", [b"", MAGIC, b"GET /health HTTP/1.1\r\n"], ids=["nothing", "greeting", "HTTP"]
)
def test_who_sends_slowly_is_dropped(
    opened: Opened, beginning: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_port, "GREETING_TIMEOUT_S", 0.05)
    assert opened.send(beginning, is_all=False) == b""
    until(lambda: opened.port.dropped == {"no greeting": 1})


def test_a_request_may_come_in_pieces(opened: Opened) -> None:
    with closing(socket.create_connection(split_address(opened.address), timeout=10)) as link:
        for piece in (b"GE", b"T /hea", b"lth HTTP/1.0\r\n", b"\r", b"\n"):
            link.sendall(piece)
        back = b""
        while more := link.recv(4096):
            back += more
    assert back.startswith(b"HTTP/1.1 200 OK\r\n") and back.endswith(b"\r\n\r\nOK")


def test_a_greeting_may_come_in_pieces(opened: Opened) -> None:
    whole = greeting(greeting_key(opened.directory), ROOMS_DOOR)
    with (
        closing(Door(opened.directory, ROOMS_DOOR)) as door,
        closing(socket.create_connection(split_address(opened.address), timeout=10)) as link,
    ):
        for place in range(0, len(whole), 5):
            link.sendall(whole[place : place + 5])
        accept(door).close()
        assert link.recv(1) == b"+"


def test_the_topology_is_upstreams_once_the_scheduler_is_there(opened: Opened) -> None:
    status, content = opened.get(WHOLE)
    assert (status, content) == (503, b"the prefill server is starting")
    with closing(Door(opened.directory, ROOMS_DOOR)):
        status, content = opened.get(WHOLE)
    assert status == 200
    # As upstream's own decode server reads it.
    info = PrefillServerInfo(**json.loads(content))
    assert (info.pp_size, info.page_size, info.kv_cache_dtype) == (3, 16, "bfloat16")
    assert (info.attn_tp_size, info.attn_cp_size, info.dp_size) == (1, 1, 1)
    assert info.prefill_http_port == 30000 and info.follow_bootstrap_room
    assert info.decode_allocation_policy == "prefill_complete"


def test_coded_keys_and_values_are_named_by_their_own_dtype(tmp_path: Path) -> None:
    setup = setup_of(os.fspath(tmp_path), 1, kv_cache_dtype="int8")
    assert setup.topology.kv_cache_dtype == "int8"


@pytest.mark.parametrize(
    ("target", "method", "status", "text"),
    [
        ("/route", "GET", 400, b"prefill_dp_rank"),
        (WHOLE.replace("target_pp_rank=-1", ""), "GET", 400, b"target_pp_rank"),
        (WHOLE.replace("-1", "x"), "GET", 400, b"a rank or -1"),
        (WHOLE.replace("-1", "0"), "GET", 404, b"no rank has a port of its own"),
        ("/route", "PUT", 405, b"nothing registers here"),
        ("/health", "POST", 405, b"nothing registers here"),
        ("/register_dp_rank", "POST", 404, b"/health and /route"),
        ("//[", "GET", 400, b"cannot be read"),
        (WHOLE, "HEAD", 503, b""),
    ],
)
def test_other_questions_are_answered_by_what_is_wrong(
    opened: Opened, target: str, method: str, status: int, text: bytes
) -> None:
    answer = opened.get(target, method)
    assert answer[0] == status and text in answer[1] and bool(text) == bool(answer[1])
    assert not opened.port.dropped


@pytest.mark.multiproc
def test_the_process_listens_until_its_starter_lets_go(tmp_path: Path) -> None:
    directory = host_directory(tmp_path / "host")
    with closing(reserve_port()) as reserved:
        setup = setup_of(directory, number_of(reserved))
        port = BootstrapPort(setup)
        with pytest.raises(
            ConfigurationError, match=r"--disaggregation-bootstrap-port\): Address already in use"
        ):
            BootstrapPort(setup)
        address = f"127.0.0.1:{setup.port}"
        with closing(Door(directory, ROOMS_DOOR)) as door:
            dial(address, ROOMS_DOOR, directory).close()
            accept(door).close()
        port.close()
        until(lambda: is_closed(address))


def is_closed(address: str) -> bool:
    try:
        socket.create_connection(split_address(address)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_role_needs_a_key_and_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = args_of(os.fspath(tmp_path), 1)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(
        ConfigurationError, match=r"a prefill and a decode server.*need a key.*token_hex\(32\)"
    ):
        write_key(args)
    assert not [*tmp_path.iterdir()]
    monkeypatch.setenv(KEY_VARIABLE, SECRET.decode())
    write_key(args)
    assert len(greeting_key(os.fspath(tmp_path))) == 32


def test_the_head_of_several_hosts_has_written_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, SECRET.decode())
    one = args_of(os.fspath(tmp_path), 1)
    hosts = ClusterArgs(num_hosts=2, head_address="h:1")
    write_key(
        PipelineArgs(
            stages=one.stages,
            disaggregation=one.disaggregation,
            cluster=hosts,
            run_directory=one.run_directory,
        )
    )
    assert not [*tmp_path.iterdir()]
