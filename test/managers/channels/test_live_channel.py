"""The scheduler process's end of the live page's socket: who looks, and what a slow one misses."""

from collections.abc import Iterator

import pytest
import zmq
from support.live_server import wait_until

from sgl_pipeline.managers.channels.live_channel import (
    MAX_UNREAD_TICKS,
    LiveHello,
    LiveSocket,
    read_message,
)

ADDRESS = "inproc://live"


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def subscriber(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(ADDRESS)
    return socket


def test_who_looks_is_known_and_what_is_sent_arrives(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    live = LiveSocket(context, ADDRESS)
    assert not live.take_subscriptions() and not live.is_watched
    first = subscriber(context)
    wait_until(live.take_subscriptions)
    assert live.is_watched
    assert live.send(LiveHello({"model": "m"}))
    assert first.poll(2000) and read_message(first.recv()) == LiveHello({"model": "m"})
    # The next one is heard of although the first still listens, and one that leaves ends nothing.
    second = subscriber(context)
    wait_until(live.take_subscriptions)
    first.close(linger=0)
    wait_until(lambda: live._num_subscribers == 1 or live.take_subscriptions())
    assert live.is_watched
    second.close(linger=0)

    def nobody() -> bool:
        live.take_subscriptions()
        return not live.is_watched

    wait_until(nobody)
    live.close()


def test_a_subscriber_that_reads_nothing_holds_nobody_up(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    live = LiveSocket(context, ADDRESS)
    slow = subscriber(context)
    wait_until(live.take_subscriptions)
    sent = [live.send(LiveHello({"number": number})) for number in range(2 * MAX_UNREAD_TICKS)]
    assert sent[0] and not sent[-1]
    numbers = []
    while slow.poll(100):
        message = read_message(slow.recv())
        assert isinstance(message, LiveHello)
        numbers.append(message.facts["number"])
    assert numbers == list(range(sum(sent))), "what was sent is what was said to have been"
    assert live.send(LiveHello({}))
    live.close()
