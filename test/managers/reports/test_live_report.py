"""What the scheduler process tells the live page, and when."""

from typing import Any

import msgspec
import pytest
from support.pipelines import FakePipeline, make_request, new_scheduler

from sgl_pipeline.args import SchedulingArgs
from sgl_pipeline.managers.channels.live_channel import LiveHello, LiveTick
from sgl_pipeline.managers.reports import live_report
from sgl_pipeline.managers.reports.live_report import QUEUE_LINES, LiveReport
from sgl_pipeline.pipeline.open_step import OpenStep
from sgl_pipeline.requests import FinishReason
from sgl_pipeline.wire.stage_orders import SealedOrder


class FakeSocket:
    """Somebody looks from `come` to `go`; keeps what is sent unless it is full."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_watched = self.is_full = self._has_come = False

    def come(self) -> None:
        self.is_watched = self._has_come = True

    def take_subscriptions(self) -> bool:
        has_come, self._has_come = self._has_come, False
        return has_come

    def send(self, message: Any) -> bool:
        if not self.is_full:
            self.sent.append(message)
        return not self.is_full

    def ticks(self) -> list[LiveTick]:
        return [message for message in self.sent if isinstance(message, LiveTick)]


class Server:
    """A pipeline that reports as the scheduler process does."""

    def __init__(self) -> None:
        scheduler = new_scheduler(
            SchedulingArgs(page_size=4, max_running_requests=2),
            num_pages=60,
            num_stages=2,
            context_length=128,
        )
        self.pipeline = FakePipeline(scheduler, 4)
        self.socket = FakeSocket()
        self.report = LiveReport(self.socket, scheduler, {"model": "m"})  # type: ignore[arg-type]
        self.now_s = 100.0
        self.num_completed = 0

    def add(self, name: str, num_tokens: int = 3, num_prompt: int = 8) -> None:
        request = make_request(name, [ord(name[-1])] * num_prompt, num_tokens)
        request.arrival_s = self.now_s
        self.pipeline.scheduler.add(request)
        self.report.arrived(request)

    def step(self, num_steps: int = 1) -> list[OpenStep]:
        steps = []
        for _ in range(num_steps):
            self.pipeline.fill()
            if not self.pipeline.steps_in_flight:
                break
            self.pipeline.complete()
            microbatch = self.pipeline.microbatches[self.num_completed]
            self.num_completed += 1
            steps.append(OpenStep(microbatch, SealedOrder(0, 0, 0, b""), self.now_s))
            self.report.booked(steps[-1])
        return steps

    def publish(self, after_s: float = 0.25) -> LiveTick | None:
        """The tick that this moment brings, if it brings one."""
        self.now_s += after_s
        before = len(self.socket.ticks())
        self.report.publish(self.pipeline.core.state(self.now_s))
        ticks = self.socket.ticks()
        return ticks[-1] if len(ticks) > before else None


@pytest.fixture
def server() -> Server:
    return Server()


def steps_of(tick: LiveTick | None) -> list[int]:
    assert tick is not None
    return [step.step_id for step in tick.state.recent_steps]


def test_while_nobody_looks_nothing_is_sent_kept_or_looked_up(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.pipeline.scheduler, "explain_queue", None)
    server.add("ui-a", 9)
    server.step(3)
    assert server.publish(10.0) is None
    assert server.socket.sent == [] and server.report._carried == []


def test_a_newcomer_gets_facts_then_the_recent_steps_then_only_what_is_new(
    server: Server,
) -> None:
    server.add("a", 20)
    server.step(4)
    server.socket.come()
    assert steps_of(server.publish()) == [0, 1, 2, 3]
    assert server.socket.sent[0] == LiveHello({"model": "m"})
    server.step(2)
    assert server.publish(0.1) is None, "not yet due"
    assert steps_of(server.publish(0.15)) == [4, 5]
    assert steps_of(server.publish()) == []
    # The next newcomer begins from the start.
    server.socket.come()
    assert steps_of(server.publish(0.01)) == [0, 1, 2, 3, 4, 5]
    assert [type(message) for message in server.socket.sent].count(LiveHello) == 2


def test_an_idle_server_says_little(server: Server) -> None:
    server.socket.come()
    assert server.publish() is not None
    assert server.publish(0.5) is None
    assert server.publish(0.6) is not None
    server.add("a", 2)
    server.step()
    server.publish(1.1)
    assert server.publish(0.3) is not None, "there is work again"


def test_what_could_not_be_sent_comes_with_the_next_tick_and_is_counted(server: Server) -> None:
    server.socket.come()
    server.add("a", 30)
    server.publish()
    server.socket.is_full = True
    server.step(2)
    assert server.publish() is None and server.publish() is None
    server.socket.is_full = False
    tick = server.publish()
    assert tick is not None and tick.missed_ticks == 2 and steps_of(tick) == [0, 1]
    tick = server.publish()
    assert tick is not None and tick.missed_ticks == 0


def test_the_queue_is_told_once_a_second_and_only_its_beginning(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_report, "QUEUE_INTERVAL_S_PER_REQUEST", 0.0)
    server.socket.come()
    for number in range(QUEUE_LINES + 4):
        server.add(chr(ord("a") + number), 40)
    server.step()
    tick = server.publish()
    assert tick is not None and tick.queue is not None
    assert len(tick.queue) == QUEUE_LINES and tick.state.waiting_requests == QUEUE_LINES + 2
    first, second = tick.queue[:2]
    assert (first.request_id, first.rule, first.prompt_tokens) == ("c", "running-limit", 8)
    assert first.waited_s == pytest.approx(0.25)
    assert (second.rule, second.behind) == ("order", "c")
    later = server.publish()
    assert later is not None and later.queue is None
    for _ in range(3):
        last = server.publish()
    assert last is not None and last.queue is not None


def test_a_long_queue_is_looked_at_less_often(server: Server) -> None:
    server.socket.come()
    waiting = 20_000
    state = server.pipeline.core.state(server.now_s)
    server.report.publish(msgspec.structs.replace(state, waiting_requests=waiting))
    gap_s = server.report._next_queue_s - server.now_s
    assert gap_s > 1.0 + waiting * 1e-4


def test_the_way_of_the_pages_own_requests_is_told_and_of_no_other(server: Server) -> None:
    server.socket.come()
    server.publish()
    server.add("other", 3)
    server.add("ui-a", 3)
    booked = server.step(2)
    tick = server.publish()
    assert tick is not None
    (followed,) = tick.followed
    assert (followed.request_id, followed.state, followed.prompt_tokens) == ("ui-a", "running", 8)
    expected = [
        (step.microbatch.step_id, chunk.start, chunk.length, chunk.is_decode)
        for step in booked
        for chunk in step.microbatch.chunks
        if chunk.request.request_id == "ui-a"
    ]
    carried = [(one.step_id, one.start, one.length, one.is_decode) for one in tick.carried]
    assert carried == expected != []
    assert {one.request_id for one in tick.carried} == {"ui-a"}
    server.step(4)
    tick = server.publish()
    assert tick is not None and [one.state for one in tick.followed] == ["finished"]
    assert tick.followed[0].output_tokens == 3
    tick = server.publish(1.1)
    assert tick is not None and tick.followed == tick.carried == ()


def test_an_aborted_request_is_followed_to_its_end_and_many_are_not_all_followed(
    server: Server,
) -> None:
    server.socket.come()
    server.publish()
    for number in range(live_report.MAX_FOLLOWED + 5):
        server.add(f"ui-{number}", 9)
    server.pipeline.scheduler.abort("ui-0", FinishReason("abort"))
    tick = server.publish()
    assert tick is not None and len(tick.followed) == live_report.MAX_FOLLOWED
    assert tick.followed[0].state == "finished"
    assert tick.followed[1].text != ""
