"""A stopping server waits for its requests, for so long, and ends those that are left."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq

from sgl_pipeline.managers.entrance import graceful_stop
from sgl_pipeline.managers.entrance.graceful_stop import StopSignals, drain


class FakeManager:
    """Two requests that run and one that a pause holds back; `on_abort` is what an abort does."""

    def __init__(self, on_abort: Callable[["FakeManager"], None]) -> None:
        self.rid_to_state = {"a": None, "b": None, "held": None}
        self.is_pause = True
        self.messages: list[Any] = []
        self._on_abort = on_abort

    async def continue_generation(self, message: Any) -> None:
        self.is_pause = False

    def _dispatch_to_scheduler(self, message: Any) -> None:
        self.messages.append(message)
        self._on_abort(self)


def test_nothing_is_aborted_while_there_is_time() -> None:
    manager = FakeManager(lambda manager: None)

    async def finish_while_draining() -> bool:
        asyncio.get_running_loop().call_soon(manager.rid_to_state.clear)
        return await drain(manager, timeout_s=60)

    assert asyncio.run(finish_while_draining())
    assert manager.messages == []


def test_what_is_left_gets_a_503_also_what_was_held_back_by_a_pause() -> None:
    def end(manager: FakeManager) -> None:
        # What comes from the pause arrives after the first abort.
        manager.rid_to_state = {} if len(manager.messages) == 2 else {"held": None}

    manager = FakeManager(end)
    assert asyncio.run(drain(manager, timeout_s=0))
    assert not manager.is_pause
    for message in manager.messages:
        assert isinstance(message, AbortReq) and message.abort_all
        assert message.finished_reason is not None
        assert message.finished_reason["status_code"] == 503


def test_a_scheduler_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graceful_stop, "_ABORT_TIMEOUT_S", 0.0)
    assert not asyncio.run(drain(FakeManager(lambda manager: None), timeout_s=0))


class Stopping:
    """A manager with its signal handlers, in a running loop."""

    def __init__(self) -> None:
        self.stop_requested = asyncio.Event()
        self.gracefully_exit = False
        self.codes: list[int] = []
        self.ended = asyncio.Event()
        self.signals = StopSignals(self)

    def end_now(self, code: int) -> None:
        self.codes.append(code)
        self.ended.set()


def test_the_first_sigterm_drains_and_the_second_ends_at_once() -> None:
    async def twice() -> None:
        manager = Stopping()
        manager.signals.sigterm_handler()
        assert manager.gracefully_exit and manager.stop_requested.is_set()
        assert manager.codes == []
        manager.signals.sigterm_handler()
        assert manager.codes == [143]

    asyncio.run(twice())


def test_ctrl_c_ends_at_once() -> None:
    async def interrupt() -> None:
        manager = Stopping()
        signal.raise_signal(signal.SIGINT)
        await asyncio.wait_for(manager.ended.wait(), timeout=30)
        assert manager.codes == [130]

    asyncio.run(interrupt())
