"""Ports that are held for one test, so that two pytest workers can run side by side."""

import socket

import pytest
from support.ports import number_of, reserve_port


def test_a_reserved_port_is_refused_to_others_and_a_server_can_listen_on_it() -> None:
    with reserve_port() as reserved, socket.socket() as other, socket.socket() as server:
        address = ("127.0.0.1", number_of(reserved))
        with pytest.raises(OSError, match="in use"):
            other.bind(address)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        with socket.create_connection(address, timeout=10):
            server.accept()[0].close()
