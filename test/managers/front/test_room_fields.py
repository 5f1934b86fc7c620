"""Where the two servers of a request meet, by the fields that a router adds."""

from typing import Any

import pytest
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from support.front_model import byte_tokenizer
from support.upstream_front import LIMITS, POOL_TOKENS, generate

from sgl_pipeline.args.disaggregation_args import Mode
from sgl_pipeline.errors import RequestError
from sgl_pipeline.managers.front.priority_rules import PriorityRules
from sgl_pipeline.managers.front.room_fields import NO_ROLE, RoomFields
from sgl_pipeline.managers.front.sglang_requests import RequestIntake
from sgl_pipeline.requests import Request, Room

ROUTED = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 2**63 - 1}
ROLES: tuple[Mode, ...] = ("prefill", "decode")


def build(mode: Mode, sampling: Any = None, **fields: Any) -> Request:
    rooms = RoomFields(mode, 8123)
    intake = RequestIntake(LIMITS, POOL_TOKENS, byte_tokenizer(), None, PriorityRules(), rooms)
    return intake.build(generate("r1", "hello", sampling=sampling, **fields), now_s=0.0)


@pytest.mark.parametrize("mode", ROLES)
def test_a_routed_request_has_its_room(mode: Mode) -> None:
    is_decode = mode == "decode"
    assert build(mode, **ROUTED).room == Room(2**63 - 1, "10.0.0.1:9000" * is_decode)
    without_port = build(mode, **ROUTED | {"bootstrap_port": None}).room
    assert without_port == Room(2**63 - 1, "10.0.0.1:8123" * is_decode)
    assert build(mode, **ROUTED | {"bootstrap_room": 0, "disagg_prefill_dp_rank": 0}).room


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_stands_in_brackets(host: str) -> None:
    assert build("decode", **ROUTED | {"bootstrap_host": host}).room == Room(
        2**63 - 1, "[::1]:9000"
    )


@pytest.mark.parametrize("mode", ROLES)
def test_a_request_without_a_room_is_told_where_to_go(mode: Mode) -> None:
    with pytest.raises(RequestError, match=rf"{mode} server.*bootstrap_room.*router.*without --d"):
        build(mode)
    with pytest.raises(RequestError, match="has no bootstrap_room"):
        build(mode, bootstrap_host="10.0.0.1")


@pytest.mark.parametrize("mode", ROLES)
def test_a_health_check_needs_no_peer(mode: Mode) -> None:
    check = build(mode, bootstrap_host=FAKE_BOOTSTRAP_HOST, bootstrap_room=0)
    assert check.room is None
    assert build(mode, bootstrap_host=FAKE_BOOTSTRAP_HOST).room is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"bootstrap_host": None}, "bootstrap_host must be a name or an address"),
        ({"bootstrap_host": ""}, "bootstrap_host must be"),
        ({"bootstrap_host": "h" * 256}, "bootstrap_host must be"),
        ({"bootstrap_port": 0}, "bootstrap_port must be between 1 and 65535, got 0"),
        ({"bootstrap_port": 65536}, "bootstrap_port must be"),
        ({"bootstrap_port": True}, "bootstrap_port must be .* got True"),
        ({"bootstrap_room": -1}, "bootstrap_room must be between 0 and"),
        ({"bootstrap_room": 2**63}, "bootstrap_room must be between 0 and"),
        ({"bootstrap_room": 1.5}, "bootstrap_room must be .* got 1.5"),
        ({"disagg_prefill_dp_rank": 1}, "disagg_prefill_dp_rank: 1 is not a rank"),
    ],
)
def test_fields_that_make_no_room_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    for mode in ROLES:
        with pytest.raises(RequestError, match=named) as caught:
            build(mode, **ROUTED | fields)
        assert caught.value.status_code == 400


@pytest.mark.parametrize("field", ["bootstrap_host", "bootstrap_port", "bootstrap_room"])
def test_a_server_without_a_role_refuses_each_of_them(field: str) -> None:
    with pytest.raises(RequestError, match=f"{field}: this server runs without --disaggregation-m"):
        build("null", **{field: ROUTED[field]})
    assert build("null").room is None


@pytest.mark.parametrize("asked", [None, 0, 1, 100])
def test_a_prefill_server_computes_one_token_whatever_is_asked(asked: int | None) -> None:
    sampling = {"max_new_tokens": asked}
    assert build("prefill", sampling, **ROUTED).stops.max_new_tokens == 1
    decoded = build("decode", sampling, **ROUTED).stops.max_new_tokens
    assert decoded == (POOL_TOKENS - 5 if asked is None else asked)


def test_a_prefill_server_refuses_a_length_that_a_decode_server_refuses() -> None:
    for mode in ROLES:
        with pytest.raises(RequestError, match="max_new_tokens"):
            build(mode, {"max_new_tokens": -1}, **ROUTED)


def test_a_refused_request_has_the_room_that_its_fields_make() -> None:
    rooms = RoomFields("decode")
    room = Room(2**63 - 1, "10.0.0.1:9000")
    assert rooms.room_of_refused(generate("r1", "hello", **ROUTED)) == room
    assert rooms.room_of_refused(generate("r1", "hello", bootstrap_room=1)) is None
    assert NO_ROLE.room_of_refused(generate("r1", "hello", **ROUTED)) is None
