"""Ports that no other process of the machine is given between their choice and their use."""

import socket


def reserve_port() -> socket.socket:
    """Returns a socket that holds a free port of 127.0.0.1 until it is closed.

    A server may listen on the port meanwhile, if it sets SO_REUSEADDR as servers do: Linux lets
    sockets share a port where all set it and no other one listens. It hands a held port to no
    socket that asks for any port, whether to bind it or to connect from it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def number_of(port: socket.socket) -> int:
    """Returns the number of a port that `reserve_port` holds."""
    return int(port.getsockname()[1])
