"""Who looks at the live page gets its events; nobody waits for a slow viewer."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from fastapi import FastAPI
from starlette.types import Message
from support.malformed_data import MSGPACK
from support.moves import movable_core
from support.step_records import step_record

from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.channels.live_channel import (
    LiveHello,
    LiveSocket,
    LiveTick,
    live_address,
)
from sgl_pipeline.managers.entrance import live_hub, live_routes
from sgl_pipeline.managers.entrance.live_hub import (
    MAX_BACKLOG_EVENTS,
    MAX_RING_EVENTS,
    MAX_VIEWERS,
    LiveHub,
    Viewer,
)
from sgl_pipeline.managers.entrance.live_routes import (
    LiveResponse,
    add_live_routes,
    pipeline_routes_of,
)

WAIT_S = 5.0


class Stage:
    """The scheduler process's end, and a hub."""

    def __init__(self, directory: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = live_address(str(directory))
        self.live = LiveSocket(self.context, address)
        self.hub = LiveHub(address, lambda: ["/pipeline/events"])
        self.num_sent = 0

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def greet(self) -> None:
        await self.until(self.live.take_subscriptions)
        self.live.send(LiveHello({"model": "m"}))

    def tick(self) -> None:
        """One tick, with a step whose id says which."""
        state = movable_core(2, 2).state(50.0).showing((step_record(self.num_sent),), ())
        self.num_sent += 1
        tick = LiveTick(state=state, queue=None, followed=(), carried=(), missed_ticks=0)
        assert self.live.send(tick)

    async def gone(self) -> None:
        def nobody() -> bool:
            self.live.take_subscriptions()
            return not self.live.is_watched

        await self.until(nobody)

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def read(data: bytes) -> list[tuple[str, Any]]:
    events = []
    for part in data.decode().split("\n\n")[:-1]:
        name, body = part.split("\n")
        events.append((name.removeprefix("event: "), json.loads(body.removeprefix("data: "))))
    return events


def step_ids(events: list[tuple[str, Any]]) -> list[int]:
    return [data["steps"][0][0] for name, data in events if name == "tick"]


async def collect(viewer: Viewer, num_events: int) -> list[tuple[str, Any]]:
    events: list[tuple[str, Any]] = []
    stream: AsyncIterator[bytes] = viewer.events()
    async with asyncio.timeout(WAIT_S):
        while len(events) < num_events:
            events += read(await anext(stream))
    return events


def test_a_newcomer_gets_what_the_others_have_got(stage: Stage) -> None:
    async def scene() -> None:
        first = stage.hub.join()
        await stage.greet()
        for _ in range(3):
            stage.tick()
        seen = await collect(first, 4)
        assert seen[0] == ("hello", {"model": "m", "routes": ["/pipeline/events"]})
        assert step_ids(seen) == [0, 1, 2]
        second = stage.hub.join()
        assert await collect(second, 4) == seen
        stage.tick()
        (late,) = await collect(second, 1)
        assert step_ids([late]) == [3] and late[1]["viewers"] == 2
        stage.hub.leave(first)
        stage.hub.leave(second)

    asyncio.run(scene())


def test_messages_that_cannot_be_decoded_are_passed_over(stage: Stage) -> None:
    async def scene() -> None:
        viewer = stage.hub.join()
        await stage.greet()
        for frame in MSGPACK.values():
            stage.live._socket.send(frame)
        stage.tick()
        assert [name for name, _ in await collect(viewer, 2)] == ["hello", "tick"]
        stage.hub.leave(viewer)

    asyncio.run(scene())


def test_the_scheduler_is_subscribed_to_once_and_only_while_somebody_looks(stage: Stage) -> None:
    async def scene() -> None:
        viewers = [stage.hub.join() for _ in range(4)]
        await stage.greet()
        assert stage.live._num_subscribers == 1
        for viewer in viewers:
            stage.hub.leave(viewer)
        await stage.gone()
        # Who comes now begins anew: nothing old is replayed.
        late = stage.hub.join()
        await stage.greet()
        assert [name for name, _ in await collect(late, 1)] == ["hello"]
        stage.hub.leave(late)
        await stage.gone()

    asyncio.run(scene())


def test_the_ninth_viewer_is_a_503_and_gets_the_place_of_one_that_leaves(stage: Stage) -> None:
    async def scene() -> None:
        viewers = [stage.hub.join() for _ in range(MAX_VIEWERS)]
        assert MAX_VIEWERS == 8
        with pytest.raises(RequestError, match="8 pages") as refused:
            stage.hub.join()
        assert refused.value.status_code == 503
        stage.hub.leave(viewers.pop())
        viewers.append(stage.hub.join())
        stage.hub.close()
        stage.hub.leave(viewers.pop())
        with pytest.raises(RequestError, match="shutting down"):
            stage.hub.join()
        for viewer in viewers:
            async with asyncio.timeout(WAIT_S):
                assert [data async for data in viewer.events()] == [], "its stream has ended"
            stage.hub.leave(viewer)

    asyncio.run(scene())


def test_a_slow_viewer_loses_the_oldest_and_is_told_how_many(stage: Stage) -> None:
    async def scene() -> None:
        slow, quick = stage.hub.join(), stage.hub.join()
        await stage.greet()
        total = MAX_BACKLOG_EVENTS + 6
        got = await collect(quick, 1)
        for _ in range(total):
            stage.tick()
            got += await collect(quick, 1)
        assert step_ids(got) == list(range(total)), "the quick one has lost nothing"
        seen = await collect(slow, MAX_BACKLOG_EVENTS + 1)
        # The hello was one of those dropped.
        assert seen[0] == ("dropped", {"events": 7})
        assert step_ids(seen) == list(range(6, total))
        stage.tick()
        assert [name for name, _ in await collect(slow, 1)] == ["tick"]
        stage.hub.leave(slow)
        stage.hub.leave(quick)

    asyncio.run(scene())


def test_the_ring_is_bounded_in_events_and_bytes(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = stage.hub
    for number in range(MAX_RING_EVENTS + 5):
        hub._keep(b"%05d" % number)
    assert len(hub._ring) == MAX_RING_EVENTS and hub._ring[0] == b"00005"
    assert hub._ring_bytes == 5 * MAX_RING_EVENTS
    monkeypatch.setattr(live_hub, "MAX_RING_BYTES", 100)
    hub._keep(b"x" * 40)
    assert b"".join(hub._ring)[-40:] == b"x" * 40
    assert hub._ring_bytes == sum(map(len, hub._ring)) <= 100


async def respond(
    hub: LiveHub, send: Callable[[Message], Awaitable[None]], asgi: str = "2.4"
) -> None:
    async def receive() -> Message:
        await asyncio.sleep(WAIT_S)
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "GET", "asgi": {"spec_version": asgi}, "headers": []}
    await LiveResponse(hub)(scope, receive, send)


@pytest.mark.parametrize("asgi", ["2.3", "2.4"])
def test_a_viewer_that_takes_nothing_gives_its_place_away(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, asgi: str
) -> None:
    monkeypatch.setattr(live_routes, "SEND_TIMEOUT_S", 0.05)

    async def scene() -> None:
        async def stuck(message: Message) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(WAIT_S)

        response = asyncio.create_task(respond(stage.hub, stuck, asgi))
        await stage.greet()
        async with asyncio.timeout(WAIT_S / 2):
            await response
        assert stage.hub.num_viewers == 0

    asyncio.run(scene())


def test_a_viewer_that_leaves_in_the_middle_gives_its_place_away(stage: Stage) -> None:
    async def scene() -> None:
        async def gone(message: Message) -> None:
            if message["type"] == "http.response.body":
                raise OSError("the client has left")

        response = asyncio.create_task(respond(stage.hub, gone))
        await stage.greet()
        async with asyncio.timeout(WAIT_S):
            await response
        assert stage.hub.num_viewers == 0

    asyncio.run(scene())


def test_the_page_learns_which_routes_there_are() -> None:
    app = FastAPI()
    add_live_routes(app, "/nowhere", has_api_key=False)
    app.add_api_route("/pipeline/throttle", lambda: None, methods=["GET"])
    assert pipeline_routes_of(app) == ["/pipeline/events", "/pipeline/throttle"]
