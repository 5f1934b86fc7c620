"""Forks stage workers whose links hold a few messages: one whose reader stands still is full soon.

Started by `faulty_server.py` in place of `sgl_pipeline.managers.stages.worker_nursery`.
"""

import socket
import sys

from sgl_pipeline.managers.stages import worker_nursery


class TightSocket(socket.socket):
    """The kernel gives it the smallest buffer that there is: room for some six messages."""

    def connect(self, address: object) -> None:
        self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        super().connect(address)  # type: ignore[arg-type]


if __name__ == "__main__":
    socket.socket = TightSocket  # type: ignore[misc]
    sys.exit(worker_nursery.main())
