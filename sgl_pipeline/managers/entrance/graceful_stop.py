"""Stops the server: Ctrl-C and SIGTERM let running requests finish, a second one does not.

Upstream's TokenizerManager waits for its requests after a SIGTERM, for ever, and takes new ones
meanwhile. This runs in the main process; once no request runs, upstream ends the server
(`tokenizer_manager.py::sigterm_watchdog`). Where a child has ended by itself, upstream cuts all
answers off; here each gets an error first.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NoReturn

from sglang.srt.managers.io_struct import AbortReq, ContinueGenerationReqInput
from sglang.srt.managers.tokenizer_manager import SignalHandler

logger = logging.getLogger(__name__)

SHUTTING_DOWN = "the server is shutting down"
# Seconds in which the scheduler must end the remaining requests, or say what it has.
_ABORT_TIMEOUT_S = 5.0
_POLL_S = 0.1
CHILD_ENDED = "the server ends, because one of its processes has ended; its log says which"
# Seconds in which answers can leave a server that ends at once.
_FAREWELL_S = 0.5


class StopSignals(SignalHandler):  # type: ignore[misc]
    """Signal handlers once the server is up. Upstream creates them in the event loop.

    Its manager has the attributes of `HttpTokenizerManager`.
    """

    def __init__(self, tokenizer_manager: Any) -> None:
        super().__init__(tokenizer_manager)
        self._end_now: Callable[[int], NoReturn] = tokenizer_manager.end_now
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)

    def sigterm_handler(self, signum: Any = None, frame: Any = None) -> None:
        """The first SIGTERM."""
        self._begin("a second SIGTERM or Ctrl-C")

    def running_phase_sigquit_handler(self, signum: Any = None, frame: Any = None) -> None:
        """A child has ended, and the server ends with it: as upstream's, once all have answers."""
        self._farewell = asyncio.get_running_loop().create_task(self._end_with_answers())

    async def _end_with_answers(self) -> None:
        await answer_all(self.tokenizer_manager)
        super().running_phase_sigquit_handler()

    def _interrupt(self) -> None:
        """The first Ctrl-C."""
        self.tokenizer_manager.on_interrupt()
        manager = self.tokenizer_manager
        if manager.rid_to_state or manager.computes_for_peers:
            self._begin("Ctrl-C again")
        else:
            self._stop_at_once(signal.SIGINT)

    def _begin(self, way_out: str) -> None:
        manager = self.tokenizer_manager
        # No callbacks of the loop: upstream blocks it while the stages end.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, self._stop_at_once)
        manager.gracefully_exit = True
        manager.stop_requested.set()
        num_running = len(manager.rid_to_state)
        wait = f"waiting up to {manager.drain_timeout_s:g} s (--drain-timeout-s) for "
        wait += f"{num_running} running request{'s' * (num_running > 1)}"
        what = wait if num_running else "no request runs"
        line = f"sgl_pipeline: ending: {what}; {way_out} ends at once"
        print(line, file=sys.stderr, flush=True)

    def _stop_at_once(self, number: int, frame: Any = None) -> None:
        """A signal handler, so it may interrupt any write or log call of this thread."""
        num_lost = len(self.tokenizer_manager.rid_to_state)
        lost = f"{num_lost} running request{'s' * (num_lost > 1)} lost" if num_lost else "idle"
        os.write(2, f"sgl_pipeline: ended at once, {lost}\n".encode())
        self._end_now(128 + number)


def shutting_down(message: str) -> dict[str, Any]:
    """The end of a request, as upstream writes it."""
    status = int(HTTPStatus.SERVICE_UNAVAILABLE)
    return {"type": "abort", "message": message, "status_code": status}


async def answer_all(manager: Any) -> None:
    """Ends all requests with a 503, those that come meanwhile too, without the scheduler."""
    deadline_s = time.monotonic() + _FAREWELL_S
    while time.monotonic() < deadline_s:
        for request_id in [*manager.rid_to_state]:
            end = AbortReq(rid=request_id, finished_reason=shutting_down(CHILD_ENDED))
            manager._handle_abort_req(end)
        await asyncio.sleep(_POLL_S)


async def drain(manager: Any, timeout_s: float) -> bool:
    """Waits for all requests to end, and until decode servers have read the prompts that they wait
    for; requests still running after `timeout_s` get a 503.

    Returns whether all have ended: False when the scheduler does not answer any more.
    """
    deadline_s = time.monotonic() + timeout_s
    while manager.rid_to_state and time.monotonic() < deadline_s:
        await asyncio.sleep(_POLL_S)
    if not manager.rid_to_state:
        return await _wait_for_readers(manager, deadline_s)
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
            AbortReq(abort_all=True, finished_reason=shutting_down(SHUTTING_DOWN))
        )
        await asyncio.sleep(_POLL_S)
    return not manager.rid_to_state


async def _wait_for_readers(manager: Any, deadline_s: float) -> bool:
    """Waits until decode servers have read the prompts that they wait for, or it is too late. False
    when the scheduler does not answer."""
    num_rooms = 0
    while time.monotonic() < deadline_s:
        before = num_rooms
        try:
            num_rooms = await asyncio.wait_for(manager.num_wanted_rooms(), _ABORT_TIMEOUT_S)
        except TimeoutError:
            return False
        if not num_rooms:
            return True
        if not before:
            what = f"{num_rooms} prompt{'s' * (num_rooms > 1)} that decode servers read"
            print(f"sgl_pipeline: ending: waiting for {what}", file=sys.stderr, flush=True)
        await asyncio.sleep(_POLL_S)
    if num_rooms:
        logger.warning("%d prompts were not read within --drain-timeout-s", num_rooms)
    return True
