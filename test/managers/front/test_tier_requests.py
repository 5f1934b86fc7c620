"""`/hicache/storage-backend` and its like, with a control that records what it is asked for."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.managers import io_struct as io
from sglang.srt.mem_cache.hicache_storage import disabled_l3_layout, merge_l3_layouts

from sgl_pipeline.args import TierArgs
from sgl_pipeline.args.store_config import StoreConfig
from sgl_pipeline.managers.front.tier_requests import TierRequests, object_layout
from sgl_pipeline.managers.tiers.tier_driver import Then, TierOutcome

IN_X = TierArgs(enabled=True, backend="file", store=StoreConfig(file_storage_path="/x"))
NO_STORE = TierArgs(enabled=True, is_attachable=True)


class FakeControl:
    """Answers when it is told to."""

    def __init__(self, args: TierArgs) -> None:
        self.args = args
        self.asked: list[Any] = []
        self._then: Then | None = None

    def attach(self, args: TierArgs, then: Then) -> None:
        self._wait(args, then)

    def detach(self, then: Then) -> None:
        self._wait("detach", then)

    def clear(self, then: Then) -> None:
        self._wait("clear", then)

    def finish(self, *, succeeded: bool = True) -> None:
        assert self._then is not None
        self._then(TierOutcome(succeeded, "so it is"))

    def _wait(self, asked: Any, then: Then) -> None:
        self.asked.append(asked)
        self._then = then


class FakeFront:
    def __init__(self) -> None:
        self.replies: list[tuple[Any, Any]] = []

    def reply(self, message: Any, to: Any) -> None:
        self.replies.append((io.msgpack_decode(io.msgpack_encode(message)), to))


def attach(backend: str = "file", config: Any = None, **policies: str) -> Any:
    return io.AttachHiCacheStorageReqInput(
        hicache_storage_backend=backend,
        hicache_storage_backend_extra_config_json=None if config is None else json.dumps(config),
        **policies,
    )


def detach() -> Any:
    return io.DetachHiCacheStorageReqInput()


def clear() -> Any:
    return io.ClearHiCacheReqInput()


def answered(message: Any, control: FakeControl | None) -> Any:
    """The reply that `message` gets at once."""
    front = FakeFront()
    TierRequests(front, control, page_size=16).answer(message)
    [(reply, to)] = front.replies
    assert to is message
    return reply


def asked(message: Any, args: TierArgs) -> Any:
    """What `message` asks of the control; its reply waits for that."""
    front, control = FakeFront(), FakeControl(args)
    TierRequests(front, control, page_size=16).answer(message)
    assert front.replies == []
    control.finish()
    [(reply, _)] = front.replies
    assert reply.success and getattr(reply, "message", "so it is") == "so it is"
    return control.asked[0]


@pytest.mark.parametrize("make", [attach, detach, clear])
def test_a_server_without_tiers_says_so(make: Callable[[], Any]) -> None:
    reply = answered(make(), None)
    assert not reply.success
    assert "not enabled" in getattr(reply, "message", "not enabled")


def test_a_store_is_attached_with_what_the_message_says() -> None:
    config = {"file_storage_path": "/y", "prefetch_threshold": 32}
    message = attach(
        config=config,
        hicache_write_policy="write_back",
        hicache_storage_prefetch_policy="wait_complete",
    )
    assert asked(message, NO_STORE) == TierArgs(
        enabled=True,
        is_attachable=True,
        backend="file",
        store=StoreConfig(file_storage_path="/y", prefetch_threshold=32),
        write_policy="write_back",
        prefetch_policy="wait_complete",
    )


def test_the_same_store_again_changes_its_rules_alone() -> None:
    changed = asked(attach(hicache_write_policy="write_through_selective"), IN_X)
    assert (changed.store, changed.prefetch_policy) == (IN_X.store, "timeout")
    assert changed.write_policy == "write_through_selective"
    config = {"file_storage_path": "/x", "prefetch_timeout_base": 3}
    assert asked(attach(config=config), IN_X).store.prefetch_timeout_base == 3.0


@pytest.mark.parametrize(
    ("message", "args", "named"),
    [
        (attach("mooncake"), IN_X, "Cannot attach different backend 'mooncake'. Detach first."),
        (attach(config={"file_storage_path": "/y"}), IN_X, "/x is attached, and /y is asked for"),
        (attach("nothing"), NO_STORE, "nothing is not built; choose from file"),
        (attach(hicache_write_policy="no"), NO_STORE, "--hicache-write-policy 'no' is unknown"),
        (attach(config={"size": 1}), NO_STORE, "size is unknown to file; the keys are"),
        (attach(config=[]), NO_STORE, "must be an object"),
    ],
)
def test_what_cannot_be_attached_is_said_and_changes_nothing(
    message: Any, args: TierArgs, named: str
) -> None:
    control = FakeControl(args)
    reply = answered(message, control)
    assert not reply.success and named in reply.message
    assert control.asked == []


def test_a_store_is_detached_and_detaching_twice_is_no_error() -> None:
    assert asked(detach(), IN_X) == "detach"
    assert answered(detach(), FakeControl(NO_STORE)).success


def test_a_store_is_cleared_where_there_is_one() -> None:
    assert asked(clear(), IN_X) == "clear"
    assert not answered(clear(), FakeControl(NO_STORE)).success


def test_one_change_at_a_time_and_a_failure_is_told() -> None:
    front, control = FakeFront(), FakeControl(IN_X)
    requests = TierRequests(front, control, page_size=16)
    requests.answer(clear())
    requests.answer(detach())
    [(reply, _)] = front.replies
    assert not reply.success and "another change" in reply.message
    control.finish(succeeded=False)
    assert isinstance(front.replies[1][0], io.ClearHiCacheReqOutput)
    assert not front.replies[1][0].success
    requests.answer(detach())
    control.finish()
    assert control.asked == ["clear", "detach"] and front.replies[2][0].success


@pytest.mark.parametrize("args", [TierArgs(), NO_STORE, IN_X])
def test_the_layout_of_objects_is_upstreams_refusal(args: TierArgs) -> None:
    layout = object_layout(args, 16)
    expected = disabled_l3_layout(layout["reason"], backend=args.backend, page_size=16)
    assert layout == expected == merge_l3_layouts([layout])
    control = None if args == TierArgs() else FakeControl(args)
    assert answered(io.GetHiCacheL3LayoutReq(), control).layout == layout
