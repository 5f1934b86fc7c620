"""A stopping server waits for its requests, for so long, and ends those that are left."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq

from sgl_pipeline.managers.entrance import graceful_stop
from sgl_pipeline.managers.entrance.graceful_stop import (
    CHILD_ENDED,
    StopSignals,
    answer_all,
    drain,
)


class FakeManager:
    """Two requests that run and one that a pause holds back; `on_abort` is what an abort does."""

    def __init__(self, on_abort: Callable[["FakeManager"], None]) -> None:
        self.rid_to_state = {"a": None, "b": None, "held": None}
        self.is_pause = True
        self.messages: list[Any] = []
        self.num_rooms: list[int] = []  # the answers of the scheduler; the last one stays
        self._on_abort = on_abort

    async def num_wanted_rooms(self) -> int:
        return self.num_rooms.pop(0) if len(self.num_rooms) > 1 else self.num_rooms[0]

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

    manager.num_rooms = [0]
    assert asyncio.run(finish_while_draining())
    assert manager.messages == []


def test_prompts_that_decode_servers_read_are_waited_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graceful_stop, "_POLL_S", 0.001)
    manager = FakeManager(lambda manager: None)
    manager.rid_to_state.clear()
    manager.num_rooms = [2, 2, 1, 0]
    assert asyncio.run(drain(manager, timeout_s=60))
    assert manager.num_rooms == [0], "it went on before all were read"
    told = capfd.readouterr().err
    assert told == "sgl_pipeline: ending: waiting for 2 prompts that decode servers read\n"


def test_prompts_that_are_not_read_in_time_are_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = FakeManager(lambda manager: None)
    manager.rid_to_state.clear()
    manager.num_rooms = [3]
    began_s = time.monotonic()
    assert asyncio.run(drain(manager, timeout_s=0.2))
    assert 0.2 <= time.monotonic() - began_s < 5.0
    assert "3 prompts were not read within --drain-timeout-s" in caplog.text
    # Nor when the time is over because of requests.
    manager.rid_to_state["a"] = None
    manager._on_abort = lambda manager: manager.rid_to_state.clear()
    manager.num_rooms = []
    assert asyncio.run(drain(manager, timeout_s=0))


def test_a_scheduler_that_does_not_say_what_is_read_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graceful_stop, "_ABORT_TIMEOUT_S", 0.01)
    manager: Any = FakeManager(lambda manager: None)
    manager.rid_to_state.clear()
    manager.num_wanted_rooms = asyncio.Event().wait
    assert not asyncio.run(drain(manager, timeout_s=60))


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


def test_all_get_a_503_without_the_scheduler_and_so_does_who_comes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graceful_stop, "_FAREWELL_S", 0.15)
    monkeypatch.setattr(graceful_stop, "_POLL_S", 0.05)

    class Manager:
        def __init__(self) -> None:
            self.rid_to_state: dict[str, None] = {"a": None, "b": None}
            self.ends: list[AbortReq] = []

        def _handle_abort_req(self, end: AbortReq) -> None:
            del self.rid_to_state[end.rid]
            self.ends.append(end)
            if end.rid == "b":
                self.rid_to_state["late"] = None

    manager = Manager()
    asyncio.run(answer_all(manager))
    assert [end.rid for end in manager.ends] == ["a", "b", "late"]
    for end in manager.ends:
        assert end.finished_reason is not None
        assert end.finished_reason["status_code"] == 503
        assert end.finished_reason["message"] == CHILD_ENDED


class Stopping:
    """A manager with its signal handlers, in a running loop."""

    def __init__(self, num_running: int, *, computes_for_peers: bool = False) -> None:
        self.computes_for_peers = computes_for_peers
        self.stop_requested = asyncio.Event()
        self.gracefully_exit = False
        self.drain_timeout_s = 25.0
        self.rid_to_state = dict.fromkeys(range(num_running))
        self.num_interrupts = 0
        self.codes: list[int] = []
        self.ended = asyncio.Event()
        # As upstream does.
        handlers = StopSignals(self)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, handlers.sigterm_handler)

    def on_interrupt(self) -> None:
        self.num_interrupts += 1

    def end_now(self, code: int) -> None:
        self.codes.append(code)
        self.ended.set()

    async def stop(self, number: int) -> None:
        """Sends a first signal, and waits until it is seen."""
        signal.raise_signal(number)
        await asyncio.wait_for(self.stop_requested.wait(), timeout=30)
        assert self.gracefully_exit
        assert self.codes == []


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts the signal handlers of the tests' own process back."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_says_what_it_waits_for_and_the_second_ends_at_once(
    first: int, second: int, capfd: pytest.CaptureFixture[str]
) -> None:
    async def twice() -> None:
        manager = Stopping(2)
        await manager.stop(first)
        told = capfd.readouterr().err
        assert told.startswith(
            "sgl_pipeline: ending: waiting up to 25 s (--drain-timeout-s) for 2 running requests; "
        )
        assert told.endswith("ends at once\n")
        # Without a turn of the loop, which may be blocked.
        signal.raise_signal(second)
        assert manager.codes == [128 + second]
        assert manager.num_interrupts == (first == signal.SIGINT)
        assert capfd.readouterr().err == ("sgl_pipeline: ended at once, 2 running requests lost\n")

    asyncio.run(twice())


@pytest.mark.usefixtures("handlers")
def test_ctrl_c_ends_an_idle_server_at_once() -> None:
    async def interrupt() -> None:
        manager = Stopping(0)
        signal.raise_signal(signal.SIGINT)
        await asyncio.wait_for(manager.ended.wait(), timeout=30)
        assert manager.codes == [130]

    asyncio.run(interrupt())


@pytest.mark.usefixtures("handlers")
def test_ctrl_c_lets_decode_servers_read_what_an_idle_prefill_server_has() -> None:
    async def interrupt() -> None:
        manager = Stopping(0, computes_for_peers=True)
        await manager.stop(signal.SIGINT)
        assert manager.num_interrupts == 1

    asyncio.run(interrupt())


@pytest.mark.usefixtures("handlers")
def test_a_sigterm_of_an_idle_server_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    asyncio.run(_stop_idle())
    assert capfd.readouterr().err == (
        "sgl_pipeline: ending: no request runs; a second SIGTERM or Ctrl-C ends at once\n"
    )


async def _stop_idle() -> None:
    await Stopping(0).stop(signal.SIGTERM)
