"""HTTP on a prefill server's bootstrap port: the topology, as SGLang's bootstrap server has it.

For tools that look at it; decode servers of ours speak through doors. One answer a connection, and
nothing of a body is read.
"""

import asyncio
import re
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec

MAX_HEAD_BYTES = 8192
_RANKS = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
_METHOD = re.compile(rb"[A-Z]{3,7}( |$)")
_END_OF_HEAD = b"\r\n\r\n"


class PrefillTopology(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to `GET /route`, by SGLang's names (upstream: `PrefillServerInfo`). There is one
    rank of each kind except pipeline stages."""

    pp_size: int
    page_size: int
    kv_cache_dtype: str
    prefill_http_port: int
    attn_tp_size: int = 1
    attn_cp_size: int = 1
    dp_size: int = 1
    follow_bootstrap_room: bool = True
    enable_dsa_cache_layer_split: bool = False
    decode_allocation_policy: str = "prefill_complete"
    enable_kv_cache_sharding: bool = False
    target_tp_rank: int | None = None
    target_tp_ranks: list[int] | None = None
    target_cp_ranks: list[int] | None = None
    target_pp_ranks: list[int] | None = None
    required_dst_info_num: int | None = None
    required_prefill_response_num: int | None = None


class HttpAnswer(NamedTuple):
    status: HTTPStatus
    content: bytes
    content_type: str = "text/plain; charset=utf-8"


class BootstrapHttp:
    """Answers connections to the port (`cluster_port.OtherProtocol`).

    Args:
        is_ready: whether decode servers can meet the scheduler process.
    """

    def __init__(self, topology: PrefillTopology, is_ready: Callable[[], bool]) -> None:
        self._topology = topology
        self._is_ready = is_ready

    async def __call__(self, connection: socket.socket, start: bytes) -> bool:
        """True if this was HTTP. The caller bounds the time, and closes the connection."""
        if not _METHOD.match(start):
            return False
        loop, head = asyncio.get_running_loop(), start
        while _END_OF_HEAD not in head:
            more = await loop.sock_recv(connection, MAX_HEAD_BYTES + 1 - len(head))
            head += more
            if not more or len(head) > MAX_HEAD_BYTES:
                return False
        method, target, version = (*head.partition(b"\r\n")[0].split(b" "), b"", b"")[:3]
        if not version.startswith(b"HTTP/1."):
            return False
        answer = self.answer(method, target)
        await loop.sock_sendall(connection, _response(answer, has_body=method != b"HEAD"))
        return True

    def answer(self, method: bytes, target: bytes) -> HttpAnswer:
        """The answer to one request line."""
        try:
            url = urlsplit(target.decode("ascii"))
        except ValueError:
            return HttpAnswer(HTTPStatus.BAD_REQUEST, b"the address cannot be read")
        if url.path not in ("/health", "/route"):
            return HttpAnswer(HTTPStatus.NOT_FOUND, b"this port has /health and /route")
        if method not in (b"GET", b"HEAD"):
            return HttpAnswer(
                HTTPStatus.METHOD_NOT_ALLOWED,
                b"nothing registers here: this is a prefill server of sgl_pipeline, whose stages "
                b"are known to it, and whose decode servers are sgl_pipeline's",
            )
        if url.path == "/health":
            return HttpAnswer(HTTPStatus.OK, b"OK")
        return self._route(url.query)

    def _route(self, query: str) -> HttpAnswer:
        given = parse_qs(query)
        ranks = [given.get(name, [""])[0] for name in _RANKS]
        if not all(re.fullmatch(r"-?[0-9]{1,9}", rank) for rank in ranks):
            text = f"{', '.join(_RANKS)} are needed, each a rank or -1"
            return HttpAnswer(HTTPStatus.BAD_REQUEST, text.encode())
        if any(rank != "-1" for rank in ranks):
            return HttpAnswer(
                HTTPStatus.NOT_FOUND,
                b"no rank has a port of its own: --disaggregation-transfer-backend page_link uses "
                b"this one",
            )
        if not self._is_ready():
            return HttpAnswer(HTTPStatus.SERVICE_UNAVAILABLE, b"the prefill server is starting")
        topology = msgspec.json.encode(self._topology)
        return HttpAnswer(HTTPStatus.OK, topology, "application/json; charset=utf-8")


def _response(answer: HttpAnswer, *, has_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.content)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (answer.content if has_body else b"")
