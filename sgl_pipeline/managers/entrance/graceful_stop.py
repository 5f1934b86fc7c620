"""How a server stops: SIGTERM lets running requests finish, a second one or Ctrl-C does not.

Upstream's TokenizerManager waits for its requests after a SIGTERM, for ever, and takes new ones
meanwhile. Used by `front_guard.py`, in the main process; what is done once nothing runs any more is
upstream's (`tokenizer_manager.py::sigterm_watchdog`).
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NoReturn

from sglang.srt.managers.io_struct import AbortReq, ContinueGenerationReqInput
from sglang.srt.managers.tokenizer_manager import SignalHandler

logger = logging.getLogger(__name__)

SHUTTING_DOWN = "the server is shutting down"
# How long the scheduler may take to end the requests that had no more time.
_ABORT_TIMEOUT_S = 5.0
_POLL_S = 0.1


class StopSignals(SignalHandler):  # type: ignore[misc]
    """What signals do once the server is up. Created in the event loop, by upstream.

    Its manager has `stop_requested`, an asyncio.Event, and `end_now(exit code)`.
    """

    def __init__(self, tokenizer_manager: Any) -> None:
        super().__init__(tokenizer_manager)
        self._end_now: Callable[[int], NoReturn] = tokenizer_manager.end_now
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._stop_at_once, 130)

    def sigterm_handler(self, signum: Any = None, frame: Any = None) -> None:
        if self.tokenizer_manager.stop_requested.is_set():
            self._stop_at_once(143)
        super().sigterm_handler(signum, frame)
        self.tokenizer_manager.stop_requested.set()

    def _stop_at_once(self, exit_code: int) -> None:
        logger.warning("stopping at once; requests that were running are lost")
        self._end_now(exit_code)


async def drain(manager: Any, timeout_s: float) -> bool:
    """Waits for all requests to end; those that have not after `timeout_s` get a 503.

    Returns whether all have ended: False when the scheduler does not answer any more.
    """
    deadline_s = time.monotonic() + timeout_s
    while manager.rid_to_state and time.monotonic() < deadline_s:
        await asyncio.sleep(_POLL_S)
    if not manager.rid_to_state:
        return True
    logger.warning(
        "%d requests did not finish within --drain-timeout-s %g and are ended",
        len(manager.rid_to_state),
        timeout_s,
    )
    if manager.is_pause:
        # The manager itself holds requests back in a pause, where no abort reaches them.
        await manager.continue_generation(ContinueGenerationReqInput())
    deadline_s = time.monotonic() + _ABORT_TIMEOUT_S
    while manager.rid_to_state and time.monotonic() < deadline_s:
        # Again and again: some of the requests may be on their way to the scheduler.
        manager._dispatch_to_scheduler(
            AbortReq(
                abort_all=True,
                finished_reason={
                    "type": "abort",
                    "message": SHUTTING_DOWN,
                    "status_code": int(HTTPStatus.SERVICE_UNAVAILABLE),
                },
            )
        )
        await asyncio.sleep(_POLL_S)
    return not manager.rid_to_state
