"""The first requests, which the server sends to itself: it is ready when they are answered."""

import asyncio
import logging
import os
import time
from http import HTTPStatus
from typing import Any

import psutil
import requests
from sglang.srt.arg_groups.serving_hook import ssl_verify_of
from sglang.srt.entrypoints.http_server import (
    _send_disaggregation_warmup_requests,
    get_global_state,
)
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.runtime_context import get_disagg
from sglang.srt.utils import kill_process_tree

logger = logging.getLogger(__name__)

_LISTEN_S, _LISTEN_POLL_S = 20.0, 0.05  # seconds
_ANSWER_TIMEOUT_S = 600.0
_BODY: dict[str, Any] = {
    "text": "The capital city of France is",
    "sampling_params": {"temperature": 0, "max_new_tokens": 8},
}


def warm_up(server_args: Any) -> bool:
    """As upstream's `_execute_server_warmup`, which sleeps for a second before it asks whether the
    server listens. Ends the server, and returns False, where it does not answer."""
    if not wait_until_listening(server_args.port):
        return True  # uvicorn is about to end this process
    try:
        is_healthy = _are_answered(server_args)
    except Exception as error:
        logger.error("the first request failed: %s", error)
        kill_process_tree(os.getpid())
        return False
    status = ServerStatus.Up if is_healthy else ServerStatus.UnHealthy
    get_global_state().tokenizer_manager.server_status = status
    return True


def _are_answered(server_args: Any) -> bool:
    """Raises an error where a server that prefills and decodes does not answer."""
    headers = {}
    if server_args.api_key:
        headers["Authorization"] = f"Bearer {server_args.api_key}"
    ssl_verify = ssl_verify_of(server_args)
    if get_disagg().disaggregation_mode != "null":
        codes = asyncio.run(
            _send_disaggregation_warmup_requests(
                url=server_args.url(),
                headers=headers,
                ssl_verify=ssl_verify,
                timeout=_ANSWER_TIMEOUT_S,
            )
        )
        return all(code == HTTPStatus.OK for code in codes)
    requests.post(
        f"{server_args.url()}/generate",
        json=_BODY,
        headers=headers,
        timeout=_ANSWER_TIMEOUT_S,
        verify=ssl_verify,
    ).raise_for_status()
    return True


def wait_until_listening(port: int) -> bool:
    """False where this process does not: another server has been quicker to take the port."""
    end_s = time.monotonic() + _LISTEN_S
    while not _listens(port):
        if time.monotonic() > end_s:
            return False
        time.sleep(_LISTEN_POLL_S)
    return True


def _listens(port: int) -> bool:
    """True if a socket of this process waits for connections on `port`."""
    return any(
        one.status == psutil.CONN_LISTEN and one.laddr.port == port
        for one in psutil.Process().net_connections("tcp")
    )
