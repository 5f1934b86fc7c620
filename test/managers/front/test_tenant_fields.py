import pytest
from support.upstream_front import generate

from sgl_pipeline.args.tenant_flags import MAX_TENANT_NAME_LENGTH
from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.front.tenant_fields import ANONYMOUS, TenantFields


def tenant(by: str | None, routing_key: str | None) -> str:
    message = generate("r1", "hello")
    message.routing_key = routing_key
    return TenantFields(by).tenant(message)


def test_requests_are_of_whom_their_message_names() -> None:
    assert tenant("user", "alice") == "alice"
    assert tenant("user", None) == tenant("user", "") == ANONYMOUS


def test_without_shares_all_are_of_one_tenant() -> None:
    assert tenant(None, "alice") == tenant(None, None) == ""


def test_a_name_that_is_too_long_is_refused() -> None:
    tenant("user", "a" * MAX_TENANT_NAME_LENGTH)
    with pytest.raises(RequestError, match="may have 256 characters, got 257") as caught:
        tenant("user", "a" * (MAX_TENANT_NAME_LENGTH + 1))
    assert caught.value.status_code == 400
