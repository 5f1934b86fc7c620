"""Whose request one is, from its route to the message of the scheduler."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from starlette.requests import Request
from support.upstream_front import generate

from sgl_pipeline.managers.entrance.front_guard import GuardedTokenizerManager
from sgl_pipeline.managers.entrance.request_tenant import RequestTenants, name_of_key

KEY = "sk-secret"


async def _request(headers: dict[str, str], body: bytes, *, is_read: bool = True) -> Request:
    """A POST, whose body the route has read."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": raw}
    request = Request(scope, receive)
    if is_read:
        await request.body()
    return request


def name(by: str, headers: dict[str, str], body: object = None, *, is_read: bool = True) -> Any:
    """The name that the scheduler's message carries."""
    message = generate("r1", "hello")
    message.routing_key = "by the client"
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def run() -> None:
        tenants = RequestTenants(by)
        await tenants.begin(await _request(headers, encoded, is_read=is_read))
        tenants.mark(message)

    asyncio.run(run())
    return message.routing_key


def test_a_key_is_never_a_name() -> None:
    found = name("api-key", {"Authorization": f"Bearer {KEY}"})
    assert found == name_of_key(KEY) == "key-746b4ad1ca91", "as sha256sum has it"
    assert found == name("api-key", {"authorization": f"bearer  {KEY} "})
    assert found != name("api-key", {"authorization": "Bearer another"})


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Basic x"}, {"Authorization": "Bearer"}])
def test_who_presents_no_key_has_no_name(headers: dict[str, str]) -> None:
    assert name("api-key", headers) is None


def test_a_header_names_the_tenant() -> None:
    assert name("header:X-Tenant", {"x-tenant": "alice"}) == "alice"
    assert name("header:X-Tenant", {"x-other": "alice"}) is None
    assert name("header:X-Tenant", {"x-tenant": ""}) is None


def test_the_field_user_names_the_tenant() -> None:
    assert name("user", {}, {"user": "alice"}) == "alice"


@pytest.mark.parametrize("body", [{}, {"user": 3}, {"user": ""}, [1], b"", b"{", b"\xff"])
def test_a_body_without_a_user_names_nobody(body: object) -> None:
    assert name("user", {}, body) is None


def test_a_body_that_no_route_has_read_is_left_alone() -> None:
    assert name("user", {}, {"user": "alice"}, is_read=False) is None


def test_every_message_of_a_request_carries_its_tenant_and_no_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two requests at a time, one of which is several messages."""
    sent: list[Any] = []

    async def sends(self: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        await asyncio.sleep(0.01)
        message = generate(obj.text, "hello")
        if obj.text == "many":
            other = generate("other", "hello")
            message = BatchTokenizedGenerateReqInput(batch=[message, other])
        self._dispatch_to_scheduler(message)
        yield {"text": "a"}

    monkeypatch.setattr(TokenizerManager, "generate_request", sends)
    monkeypatch.setattr(
        TokenizerManager, "_dispatch_to_scheduler", lambda self, obj: sent.append(obj)
    )
    manager = GuardedTokenizerManager.__new__(GuardedTokenizerManager)
    manager.context_len, manager.disaggregation_mode = 100, None
    manager.enable_trace, manager.tenants = False, RequestTenants("header:X-Tenant")

    async def ask(text: str, tenant: str) -> None:
        request = await _request({"x-tenant": tenant}, b"{}")
        async for _ in manager.generate_request(GenerateReqInput(text=text), request):
            pass

    async def run() -> None:
        await asyncio.gather(ask("many", "alice"), ask("one", "bob"))

    asyncio.run(run())
    many = next(one for one in sent if isinstance(one, BatchTokenizedGenerateReqInput))
    one = next(one for one in sent if one is not many)
    assert [message.routing_key for message in many.batch] == ["alice", "alice"]
    assert one.routing_key == "bob"


def test_without_shares_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenizerManager, "_dispatch_to_scheduler", lambda self, obj: None)
    manager = GuardedTokenizerManager.__new__(GuardedTokenizerManager)
    manager.enable_trace = False
    message: Any = SimpleNamespace(routing_key="by the client")
    manager._dispatch_to_scheduler(message)
    assert message.routing_key == "by the client"
