"""The protocols of what is read of upstream, against upstream's own classes."""

from array import array
from collections.abc import Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from sglang.srt.managers import io_struct
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

from sgl_pipeline.managers.entrance import sample_seeds
from sgl_pipeline.managers.front.control_requests import CONTROL_TYPES
from sgl_pipeline.managers.grammars.spec import KIND_OF_FIELD
from sgl_pipeline.managers.reports import profiles
from sgl_pipeline.managers.upstream import request_checks, upstream_arguments, upstream_messages

UPSTREAM = {
    upstream_messages.SglangMessage: io_struct.BaseReq,
    upstream_messages.SamplingMessage: SamplingParams,
    upstream_messages.GenerateMessage: io_struct.TokenizedGenerateReqInput,
    upstream_messages.PackedMessage: io_struct.PickleWrapper,
    upstream_messages.AbortMessage: io_struct.AbortReq,
    upstream_messages.FlushMessage: io_struct.FlushCacheReqInput,
    upstream_messages.AttachMessage: io_struct.AttachHiCacheStorageReqInput,
    upstream_messages.PauseMessage: io_struct.PauseGenerationReqInput,
    upstream_messages.SessionMessage: io_struct.OpenSessionReqInput,
    upstream_messages.LoggingMessage: io_struct.ConfigureLoggingReq,
    upstream_messages.ProfileMessage: io_struct.ProfileReq,
    upstream_arguments.SglangServerArgs: ServerArgs,
    upstream_arguments.SglangPortArgs: PortArgs,
}
FIELDS = [
    (protocol, name, kind)
    for protocol in UPSTREAM
    for name, kind in get_type_hints(protocol).items()
]


def agree(ours: Any, theirs: Any) -> bool:
    """Whether two types are the same, however written. In ours, object and Any stand for all, a
    protocol for its class, and a sequence for an array, of which upstream does not say more."""
    if ours in (object, Any) or UPSTREAM.get(ours, ours) == theirs:
        return True
    origins = [
        Union if get_origin(kind) is UnionType else get_origin(kind) or kind
        for kind in (ours, theirs)
    ]
    if origins == [Sequence, array]:
        return True
    if origins[0] != origins[1]:
        return False
    our_parts, their_parts = get_args(ours), get_args(theirs)
    if not our_parts or len(our_parts) != len(their_parts):
        return False
    if origins[0] is Union:
        return all(any(agree(our, their) for our in our_parts) for their in their_parts)
    return all(map(agree, our_parts, their_parts))


@pytest.mark.parametrize(
    ("protocol", "name", "kind"), FIELDS, ids=[f"{one.__name__}.{name}" for one, name, _ in FIELDS]
)
def test_upstream_has_what_is_read_of_it_and_of_the_same_type(
    protocol: type, name: str, kind: Any
) -> None:
    theirs = get_type_hints(UPSTREAM[protocol])
    assert name in theirs
    assert agree(kind, theirs[name]), f"upstream: {theirs[name]}"


def test_every_protocol_has_its_class() -> None:
    declared = {
        one
        for module in (upstream_messages, upstream_arguments)
        for one in vars(module).values()
        if isinstance(one, type) and one.__module__ == module.__name__
    }
    assert declared == set(UPSTREAM)


def test_upstreams_arguments_know_their_url() -> None:
    assert callable(ServerArgs.url)


def test_every_control_message_says_where_its_reply_goes() -> None:
    assert all(issubclass(kind, io_struct.BaseReq) for kind in CONTROL_TYPES)


@pytest.mark.parametrize(
    ("names", "upstream"),
    [
        (KIND_OF_FIELD, SamplingParams),
        (profiles._UNSUPPORTED_OPTIONS, io_struct.ProfileReq),
        (request_checks._UNBUILT_INPUTS, io_struct.GenerateReqInput),
        (sample_seeds._PER_PROMPT, io_struct.GenerateReqInput),
    ],
)
def test_fields_that_are_read_by_name_are_upstreams(names: Any, upstream: type) -> None:
    assert set(names) <= set(get_type_hints(upstream))


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (list[int], list[str], False),
        (set[int] | None, set[int], False),
        (set[int], set[int] | None, False),
        (str | None, int | None, False),
        (dict[str, Any] | None, dict[str, int] | None, True),
        (Sequence[int], array, True),
        (list[int], list, False),
    ],
)
def test_types_that_differ_are_told_apart(ours: Any, theirs: Any, same: bool) -> None:
    assert agree(ours, theirs) is same
