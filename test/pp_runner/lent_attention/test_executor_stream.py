"""A peer that should attend and is gone, hangs, or answers what it should not."""

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from support.clusters import SECRET, until
from support.lent_pages import plan_of, random_rows
from support.page_transfers import shapes_of
from support.peers import FakePeerStage, Hosts, next_frame, two_hosts

from sgl_pipeline.cluster.doors import Door
from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.cluster.secure_stream import StreamClosed
from sgl_pipeline.errors import PeerLost
from sgl_pipeline.pp_runner.lent_attention import executor_stream
from sgl_pipeline.pp_runner.lent_attention.executor_stream import ExecutorStream
from sgl_pipeline.wire.attention_messages import AttendedRows, encode

PLAN, ROWS = plan_of((4, 6, 1)), random_rows(1, shapes_of(torch.bfloat16)[1], 1)
OUTPUT = bytes(40)


def answer(layer: int = 1, output: bytes = OUTPUT) -> bytes:
    return encode(AttendedRows(layer, memoryview(output), 0.25))


class FakeExecutor(FakePeerStage):
    """Answers the frames behind each plan with what `next_answer` gives; None: never."""

    def __init__(self, hosts: Hosts, next_answer: Callable[[], bytes | None]) -> None:
        self._next_answer = next_answer
        self.frames: list[bytes] = []
        super().__init__(hosts)

    def _serve(self, stream: FramedStream) -> None:
        while True:
            self.frames.append(next_frame(stream, self._is_over))
            if self.frames[-1] == encode(ROWS) and (payload := self._next_answer()) is not None:
                stream.send(payload)


@contextmanager
def executor(hosts: Hosts, next_answer: Callable[[], bytes | None]) -> Iterator[FakeExecutor]:
    fake = FakeExecutor(hosts, next_answer)
    yield fake
    fake.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with two_hosts(tmp_path) as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_stream, "ANSWER_LIMIT_S", 0.4)
    monkeypatch.setattr(executor_stream, "REDIAL_PAUSE_S", 0.2)


def stream_to(hosts: Hosts) -> ExecutorStream:
    return ExecutorStream(f"{hosts.address}/fake", hosts.other)


def ask(stream: ExecutorStream) -> AttendedRows:
    stream.plan(PLAN)
    stream.send(ROWS)
    return stream.receive(1, len(OUTPUT))


def test_steps_follow_each_other_on_one_stream(hosts: Hosts) -> None:
    stream = stream_to(hosts)
    with executor(hosts, answer) as fake:
        for _ in range(3):
            assert bytes(ask(stream).output) == OUTPUT
        stream.plan(PLAN)  # of a step that is given up
        assert ask(stream).busy_s == 0.25
        until(lambda: len(fake.frames) == 9)
        assert len(fake.streams) == 1
        stream.close()


WRONG = {
    "another layer": (answer(layer=2), "40 bytes of layer 2, when 40 of layer 1 were due"),
    "less": (answer(output=OUTPUT[1:]), "39 bytes of layer 1"),
    "more": (answer(output=OUTPUT + b"!"), "41 bytes of layer 1"),
    "garbage": (b"\xc1\xff\x00garbage", "malformed"),
    "nothing": (b"", "malformed"),
    "a pickle": (pickle.dumps(print), "malformed"),
    "a question": (encode(ROWS), "malformed"),
    "no answer": (None, "did not answer within 0.4 s"),
}


@pytest.mark.parametrize("what", WRONG)
def test_whatever_is_wrong_ends_the_stream_and_the_next_comes_after_a_pause(
    hosts: Hosts, what: str
) -> None:
    payload, reason = WRONG[what]
    answers = iter([payload])
    stream = stream_to(hosts)
    with executor(hosts, lambda: next(answers, answer())) as fake:
        started_s = time.monotonic()
        with pytest.raises(PeerLost, match=f"{hosts.address}/fake: .*{reason}"):
            ask(stream)
        assert time.monotonic() - started_s < 5.0
        with pytest.raises(PeerLost, match="was lost a moment ago"):
            stream.plan(PLAN)
        time.sleep(0.2)
        assert bytes(ask(stream).output) == OUTPUT
        assert len(fake.streams) == 2
        stream.close()


def test_an_answer_that_comes_in_drops_is_not_waited_for_longer(hosts: Hosts) -> None:
    stream, fake = stream_to(hosts), FakeExecutor(hosts, lambda: None)
    stream.plan(PLAN)
    until(lambda: bool(fake.frames))
    going_on = threading.Event()

    def drip() -> None:
        sent = answer()
        for place in range(len(sent)):
            if going_on.wait(0.1):
                return
            header = len(sent).to_bytes(4, "little") if place == 0 else b""
            with suppress(StreamClosed):
                fake.streams[0]._stream.write(memoryview(header + sent[place : place + 1]))

    thread = threading.Thread(target=drip)
    thread.start()
    started_s = time.monotonic()
    stream.send(ROWS)
    with pytest.raises(PeerLost, match="did not answer"):
        stream.receive(1, len(OUTPUT))
    assert time.monotonic() - started_s < 0.1 * len(OUTPUT)
    going_on.set()
    thread.join()
    fake.close()


def test_a_stream_that_ended_between_two_steps_is_dialed_anew_at_once(hosts: Hosts) -> None:
    stream = stream_to(hosts)
    with executor(hosts, answer):
        ask(stream)
    with executor(hosts, answer) as fake:
        ask(stream)
        assert len(fake.streams) == 1
        stream.close()


def test_a_stage_that_cannot_be_reached_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    stream = stream_to(hosts)
    with pytest.raises(PeerLost, match="nothing is behind its door"):
        stream.plan(PLAN)
    with two_hosts(tmp_path / "others", SECRET[::-1]) as others:
        stream = ExecutorStream(f"{others.address}/fake", others.other)
        with pytest.raises(PeerLost, match="another cluster key"):
            stream.plan(PLAN)
    door = Door(hosts.directory, "fake")  # nobody shakes hands behind it
    started_s = time.monotonic()
    with pytest.raises(PeerLost, match=r"no handshake within 0.4 s"):
        stream_to(hosts).plan(PLAN)
    assert time.monotonic() - started_s < 4.0
    door.close()
