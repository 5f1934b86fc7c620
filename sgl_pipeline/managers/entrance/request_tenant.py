"""Names the tenant of each request, by `--fair-shares-by`.

The name travels in SGLang's `routing_key`, which says to its scheduler whose request it is
("routing key for routing-key schedule policy"), in place of what a client's header may have put
there. A key is never a name: its hash is.
"""

import hashlib
from contextvars import ContextVar
from typing import Any

from sgl_pipeline.args.tenant_flags import API_KEY, USER, header_of

# Of the request whose parts are being sent to the scheduler; each HTTP request has a task, and so a
# context, of its own.
_name: ContextVar[str | None] = ContextVar("tenant", default=None)


def name_of_key(key: str) -> str:
    """The name of a tenant that presents an API key."""
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


class RequestTenants:
    """Names the tenant of each request.

    Args:
        by: the value of `--fair-shares-by`.
    """

    def __init__(self, by: str) -> None:
        self._by = by
        self._header = header_of(by)

    async def begin(self, request: Any) -> None:
        """Takes `request` for the sender of all that is sent until the next call in this context;
        None: it came by no route."""
        _name.set(None if request is None else await self._name_of(request))

    def mark(self, message: Any) -> None:
        """Writes the name into a TokenizedGenerateReqInput."""
        message.routing_key = _name.get()

    async def _name_of(self, request: Any) -> str | None:
        """The name that the Starlette `request` presents; None if it presents none."""
        if self._header is not None:
            value: str | None = request.headers.get(self._header)
            return value or None
        if self._by == API_KEY:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            key = key.strip()
            return name_of_key(key) if scheme.lower() == "bearer" and key else None
        assert self._by == USER
        return await _user_of(request)


async def _user_of(request: Any) -> str | None:
    """The field `user` of a JSON body."""
    # The route has read the body; of one that has not, reading it here would take it away.
    if not hasattr(request, "_body"):
        return None
    try:
        body = await request.json()
    except ValueError:
        return None
    user = body.get("user") if isinstance(body, dict) else None
    return user if isinstance(user, str) and user else None
