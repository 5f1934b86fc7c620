"""`GET /pipeline/events`: what the live page shows, as server-sent events.

The route needs the API key where there is one, else the administrator's key where there is one. The
page itself is `live_page.py`.
"""

import asyncio
import functools
import logging
from typing import Any

from sglang.srt.utils.auth import AuthLevel, auth_level
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.channels.live_channel import live_address
from sgl_pipeline.managers.entrance.error_reply import reply_to
from sgl_pipeline.managers.entrance.live_hub import LiveHub

logger = logging.getLogger(__name__)

# A viewer that reads nothing for this long gives its place to another.
SEND_TIMEOUT_S = 30.0
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def add_live_routes(app: Any, run_directory: str, *, has_api_key: bool) -> LiveHub:
    """Adds the route to upstream's FastAPI application, before it is started.

    Args:
        run_directory: holds the scheduler process's socket.
        has_api_key: whether `--api-key` is set.

    Returns the hub, which must be closed before the HTTP server waits for its connections.
    """
    hub = LiveHub(live_address(run_directory), functools.partial(pipeline_routes_of, app))

    @auth_level(AuthLevel.NORMAL if has_api_key else AuthLevel.ADMIN_OPTIONAL)
    async def live_events() -> Response:
        """The pipeline's events, a few times a second, for as long as the client listens."""
        return LiveResponse(hub)

    app.add_api_route("/pipeline/events", live_events, methods=["GET"], response_model=None)
    return hub


def pipeline_routes_of(app: Any) -> list[str]:
    """The paths below /pipeline that this server has, from which the page derives its controls."""
    paths = {getattr(route, "path", "") for route in app.routes}
    return sorted(path for path in paths if path.startswith("/pipeline/"))


class LiveResponse(Response):
    """The events of one viewer, which leaves when the response ends."""

    def __init__(self, hub: LiveHub) -> None:
        super().__init__()
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send(message)
            except TimeoutError as error:
                logger.warning(
                    "a viewer of the live page has read nothing for %g s", SEND_TIMEOUT_S
                )
                raise ClientDisconnect from error

        try:
            viewer = self._hub.join()
        except RequestError as error:
            await reply_to(error)(scope, receive, send)
            return
        stream = StreamingResponse(
            viewer.events(), media_type="text/event-stream", headers=_HEADERS
        )
        try:
            await stream(scope, receive, send_in_time)
        except ClientDisconnect:
            pass  # also how Starlette reports a client that has left
        finally:
            self._hub.leave(viewer)
