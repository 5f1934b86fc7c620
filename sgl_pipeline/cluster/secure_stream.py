"""An encrypted, authenticated stream of bytes to a process of another host, which never waits.

TLS over a connection that came through the cluster port (`doors.py`). `framed_stream.py` sends
messages over it, `pp_runner/links/tcp_link.py` rows. One thread may read while another one writes.
"""

import socket
import ssl

from sgl_pipeline.cluster.keys import tls_context

# A TLS record holds 16 KiB; OpenSSL wants a write that could not be done repeated as it was.
WRITE_BYTES = 64 * 1024


class StreamClosed(Exception):
    """The other end is gone, or was never one of ours. The text says what was noticed."""


class SecureStream:
    """One end of a stream.

    Args:
        connection: to the other process, through its host's cluster port.
        run_directory: where the keys are.
        is_server: this end was dialed.
    """

    def __init__(self, connection: socket.socket, run_directory: str, *, is_server: bool) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._tls = tls_context(run_directory, is_server=is_server).wrap_socket(
            connection, server_side=is_server, do_handshake_on_connect=False
        )
        self._is_open = False
        self._ending: StreamClosed | None = None

    def fileno(self) -> int:
        return self._tls.fileno()

    def open(self) -> bool:
        """Goes on with the handshake; whether it is done. Raises StreamClosed."""
        if self._is_open:
            return True
        try:
            self._tls.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as error:
            raise StreamClosed(f"TLS handshake: {reason_of(error)}") from error
        self._is_open = True
        return True

    def read_into(self, room: memoryview) -> int:
        """Reads what has arrived, as far as there is room; how many bytes that were. Nothing can be
        read before the file descriptor can when it was less than there is room for.

        Raises StreamClosed; for the end of the connection only when all that arrived before it has
        been read, and the descriptor stays readable until then.
        """
        num_read = 0
        while num_read < len(room) and self._ending is None:
            try:
                count = self._tls.recv_into(room[num_read:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except ssl.SSLError as error:
                raise StreamClosed(reason_of(error)) from error
            except OSError as error:
                self._ending = StreamClosed(reason_of(error))
                self._ending.__cause__ = error
            else:
                num_read += count
                if count == 0:
                    self._ending = StreamClosed("the other end has closed the connection")
        if self._ending is not None and num_read == 0:
            raise self._ending
        return num_read

    def write(self, data: memoryview) -> int:
        """Hands over the beginning of `data`; how many bytes that were. The rest must be tried
        again, unchanged, when the file descriptor can be written to. Raises StreamClosed."""
        num_written = 0
        try:
            while num_written < len(data):
                num_written += self._tls.send(data[num_written : num_written + WRITE_BYTES])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            raise StreamClosed(reason_of(error)) from error
        return num_written

    def close(self) -> None:
        """Closes it at once; what has not left the host may be lost."""
        self._tls.close()


def reason_of(error: OSError) -> str:
    """The reason for the end of a stream, as a clause."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).lower().replace("_", " ")
    return error.strerror or str(error)
