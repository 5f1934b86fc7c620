"""The server of attention under borrowers of every kind, and the orders behind it."""

import logging
import os
import pickle
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from support.clusters import until
from support.lent_pages import lease_order, plan_of, random_rows, stage_leases
from support.page_transfers import DIGEST, NUM_PAGES, filled_pool, shapes_of
from support.peers import Hosts, dial_door, next_frame, two_hosts

from sgl_pipeline.cluster.doors import DialError, dial
from sgl_pipeline.cluster.framed_stream import FramedStream
from sgl_pipeline.cluster.secure_stream import StreamClosed
from sgl_pipeline.errors import ProtocolError
from sgl_pipeline.pp_runner.lent_attention.stage_leases import StageLeases
from sgl_pipeline.wire.attention_messages import AttendedRows, encode, read_answer
from sgl_pipeline.wire.lease_orders import EndLease, LendPages, PagesLent

SHAPES = shapes_of(torch.bfloat16)
PLAN, ROWS = plan_of((4, 6, 1)), random_rows(0, SHAPES[0], 1)
DOOR = "attention-0"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with two_hosts(tmp_path) as hosts:
        yield hosts


@pytest.fixture
def lending(hosts: Hosts) -> Iterator[StageLeases]:
    """A stage with lease 4."""
    leases = stage_leases(filled_pool(range(3), SHAPES, 1), SHAPES, hosts.directory, DOOR)
    leases.obey(lease_order(4, [5, 0, 7, 2], 2))
    leases.begin()
    yield leases
    leases.close()


def ask(stream: FramedStream) -> AttendedRows:
    stream.send(encode(PLAN))
    stream.send(encode(ROWS))
    return read_answer(next_frame(stream))


def assert_served(hosts: Hosts) -> None:
    stream = dial_door(hosts, DOOR)
    answer = ask(stream)
    assert answer.refused == () and any(answer.output)
    stream.close()


class _Exploding:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os._exit, (3,)  # type: ignore[return-value]


MALFORMED = {
    "garbage": [b"\xc1\x00\xff"],
    "nothing": [b""],
    "a pickle": [pickle.dumps(_Exploding())],
    "no chunk": [msgspec.msgpack.encode(msgspec.structs.replace(PLAN, chunks=()))],
    "a chunk of no rows": [msgspec.msgpack.encode(plan_of((4, 6, 0)))],
    "a lease twice": [msgspec.msgpack.encode(plan_of((4, 6, 1), (4, 7, 1)))],
    "rows without a plan": [encode(ROWS)],
    "fewer rows than planned": [encode(plan_of((4, 6, 2))), encode(ROWS)],
    "an answer": [encode(AttendedRows(0, memoryview(b""), 0.0))],
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_borrower_with_a_malformed_message_loses_its_stream_and_no_other_does(
    hosts: Hosts, lending: StageLeases, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = dial_door(hosts, DOOR), dial_door(hosts, DOOR)
    ask(good)
    with caplog.at_level(logging.WARNING):
        for frame in MALFORMED[what]:
            bad.send(frame)
        with pytest.raises(StreamClosed):
            next_frame(bad)
    (record,) = caplog.records
    assert "127.0.0.1" in record.getMessage() and not record.exc_info
    ask(good)
    for stream in (good, bad):
        stream.close()
    assert_served(hosts)


def test_a_borrower_that_reads_no_results_holds_up_no_other_and_no_end(
    hosts: Hosts, lending: StageLeases
) -> None:
    stuck = dial_door(hosts, DOOR)
    stuck.send(encode(plan_of(*[(lease, 0, 3) for lease in range(100, 2100)])))
    rows = encode(random_rows(1, SHAPES[1], 6000))
    server = lending._server
    assert server is not None

    def is_stuck() -> bool:
        if not stuck.has_backlog:
            stuck.send(rows)
        stuck.flush()
        # Not `has_backlog`: the last answer may have filled the socket to its very end.
        waiting = [one._stream for one in server.visitors]
        return bool(waiting) and not select.select([], waiting, [], 0)[1]

    until(is_stuck)
    assert_served(hosts)
    lending.obey(EndLease(4))
    stuck.close()
    until(lambda: not server.visitors)


def test_an_error_of_ours_costs_one_stream(
    hosts: Hosts,
    lending: StageLeases,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(lending._leases, "attend", fail)
    stream = dial_door(hosts, DOOR)
    with caplog.at_level(logging.WARNING), pytest.raises(StreamClosed):
        ask(stream)
    stream.close()
    (record,) = caplog.records
    assert "no memory" in record.getMessage() and record.exc_info
    monkeypatch.undo()
    assert_served(hosts)


def test_the_end_of_a_stage_ends_its_streams_and_frees_its_door(hosts: Hosts) -> None:
    for _ in range(2):
        leases = stage_leases(filled_pool(range(3), SHAPES, 1), SHAPES, hosts.directory, DOOR)
        leases.obey(lease_order(4, [5, 0, 7, 2], 2))
        with pytest.raises(DialError):
            dial(hosts.address, DOOR, hosts.other)
        leases.begin()
        stream = dial_door(hosts, DOOR)
        ask(stream)
        leases.close()
        with pytest.raises(StreamClosed):
            next_frame(stream)
        stream.close()
        assert not any(thread.name == "lent attention" for thread in threading.enumerate())


# Orders


def test_a_lease_is_reported_when_it_has_begun_and_ends_at_any_time(
    hosts: Hosts, lending: StageLeases
) -> None:
    assert lending.take_reports() == [PagesLent(2, 4)] and not lending.is_open
    lending.obey(lease_order(5, [1, 2], 1))
    assert lending.is_open and lending.take_reports() == []
    lending.obey(EndLease(5))  # before it has begun
    lending.obey(EndLease(6))  # forgotten, or never made
    lending.begin()
    assert not lending.is_open
    lending.obey(EndLease(4))
    stream = dial_door(hosts, DOOR)
    (refused,) = ask(stream).refused
    assert refused.lease == 4
    stream.close()


def test_what_was_forgotten_is_not_reported(lending: StageLeases) -> None:
    lending.obey(lease_order(5, [1, 2], 1))
    lending.forget()
    assert not lending.is_open and lending.take_reports() == []
    lending.obey(lease_order(4, [1, 2], 1))  # another scheduler's
    lending.begin()
    assert lending.take_reports() == [PagesLent(2, 4)]


WRONG = {
    "twice": (lease_order(4, [1, 2], 1), "lease 4 was made twice"),
    "pages that the pool lacks": (lease_order(5, [1, NUM_PAGES], 1), "pages 1 to 8, the pool"),
    "negative pages": (lease_order(5, [-1, 1], 1), "pages -1 to 1"),
    "no pages": (lease_order(5, [], 0), "of 0 pages"),
    "no page of its own": (lease_order(5, [1, 2], 2), "no page of its own"),
    "half a page": (LendPages(5, b"\0" * 6, 0, DIGEST), "cannot be read"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_lease_that_cannot_be_breaks_the_protocol(lending: StageLeases, what: str) -> None:
    order, message = WRONG[what]
    with pytest.raises(ProtocolError, match=message):
        lending.obey(order)
