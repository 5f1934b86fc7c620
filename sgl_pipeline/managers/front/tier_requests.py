"""Answers upstream's messages about a store beyond the pool: `/hicache/storage-backend` and others.

A store is attached, detached and changed while requests are served: the scheduler, which orders all
loads and saves, gives up those under way, and no request. Upstream wants an idle server for it
(`managers/scheduler.py`, attach_hicache_storage_wrapped). Its routes ask for the administrator's
key before a message is sent.
"""

import dataclasses
import logging
from typing import Any, Protocol

from sglang.srt.managers import io_struct as io

from sgl_pipeline.args import TierArgs
from sgl_pipeline.args.store_config import StoreConfig
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.command_line.store_config_text import read_store_config
from sgl_pipeline.managers.tiers.tier_driver import Then, TierOutcome
from sgl_pipeline.managers.upstream.upstream_messages import AttachMessage, SglangMessage

logger = logging.getLogger(__name__)

TIER_TYPES: tuple[type, ...] = (
    io.ClearHiCacheReqInput,
    io.AttachHiCacheStorageReqInput,
    io.DetachHiCacheStorageReqInput,
    io.GetHiCacheL3LayoutReq,
)
_IS_OFF = (
    "Hierarchical cache is not enabled; start the server with --enable-hierarchical-cache and "
    "--hicache-storage-backend file"
)


class TierControl(Protocol):
    """Changes the store of a server that was started with tiers (`tier_driver.TierDriver`)."""

    @property
    def args(self) -> TierArgs:
        """The arguments in force; `backend` is None while no store is attached."""

    def attach(self, args: TierArgs, then: Then) -> None: ...
    def detach(self, then: Then) -> None: ...
    def clear(self, then: Then) -> None: ...


class Replies(Protocol):
    """Sends replies (`sglang_io.SglangFront`)."""

    def reply(self, message: SglangMessage, to: SglangMessage) -> None: ...


class TierRequests:
    """Serves or refuses one message at a time.

    Args:
        control: None where the server was started without tiers.
        page_size: tokens of a page.
    """

    def __init__(self, front: Replies, control: TierControl | None, page_size: int) -> None:
        self._front = front
        self._control = control
        self._page_size = page_size
        self._is_changing = False

    def answer(self, message: SglangMessage) -> None:
        """Answers `message`, which is of `TIER_TYPES`, at once or when the change is made."""
        if isinstance(message, io.GetHiCacheL3LayoutReq):
            args = TierArgs() if self._control is None else self._control.args
            layout = object_layout(args, self._page_size)
            self._front.reply(io.GetHiCacheL3LayoutReqOutput(layout=layout), message)
            return
        then = self._reply_to(message)
        if self._control is None:
            then(TierOutcome(False, _IS_OFF))
        elif self._is_changing:
            then(TierOutcome(False, "another change of the storage backend is under way"))
        else:
            self._change(self._control, message, then)

    def _change(self, control: TierControl, message: SglangMessage, then: Then) -> None:
        def finish(outcome: TierOutcome) -> None:
            self._is_changing = False
            then(outcome)

        self._is_changing = True
        if isinstance(message, io.AttachHiCacheStorageReqInput):
            try:
                wanted = _wanted(message, control.args)
            except ConfigurationError as error:
                finish(TierOutcome(False, str(error)))
            else:
                control.attach(wanted, finish)
        elif isinstance(message, io.DetachHiCacheStorageReqInput):
            if control.args.backend is None:  # upstream: detaching twice is no error
                finish(TierOutcome(True, "HiCache storage backend is detached."))
            else:
                control.detach(finish)
        elif control.args.backend is None:
            finish(TierOutcome(False, "no storage backend is attached"))
        else:
            control.clear(finish)

    def _reply_to(self, message: SglangMessage) -> Then:
        def then(outcome: TierOutcome) -> None:
            level = logging.INFO if outcome.succeeded else logging.WARNING
            logger.log(level, "%s: %s", type(message).__name__, outcome.message)
            self._front.reply(_reply(message, outcome), message)

        return then


def object_layout(args: TierArgs, page_size: int) -> dict[str, Any]:
    """The description of a store's objects for an external router, also in the ready message.
    Upstream describes Mooncake's only, and says of others why there is nothing
    (`mem_cache/hicache_storage.py`, disabled_l3_layout)."""
    is_on = args.enabled
    reason = "Mooncake storage is not attached" if is_on else "Hierarchical cache is disabled"
    return {
        "enabled": False,
        "backend": args.backend,
        "page_size": page_size,
        "hicache_object_layout": {"pools": []},
        "reason": reason,
    }


def _wanted(message: AttachMessage, now: TierArgs) -> TierArgs:
    """The arguments that `message` asks for where `now` is in force: what it does not name stays.

    Raises ConfigurationError for what cannot be honored, and for another store than that in use.
    """
    backend = message.hicache_storage_backend
    if now.backend is not None and backend != now.backend:
        raise ConfigurationError(
            f"HiCache storage backend is already enabled with backend '{now.backend}'. Cannot "
            f"attach different backend '{backend}'. Detach first."
        )
    store = _store(message.hicache_storage_backend_extra_config_json, now)
    folders = (now.store.file_storage_path, store.file_storage_path)
    if now.backend is not None and folders[0] != folders[1]:
        raise ConfigurationError(
            "the store in {} is attached, and {} is asked for. Detach first.".format(*folders)
        )
    changes: dict[str, Any] = {
        "backend": backend,
        "store": store,
        "write_policy": message.hicache_write_policy or now.write_policy,
        "prefetch_policy": message.hicache_storage_prefetch_policy or now.prefetch_policy,
    }
    return dataclasses.replace(now, **changes)


def _store(text: str | None, now: TierArgs) -> StoreConfig:
    if now.backend is not None and not text:
        return now.store
    return read_store_config(text, takes_files=False)


def _reply(message: SglangMessage, outcome: TierOutcome) -> SglangMessage:
    if isinstance(message, io.ClearHiCacheReqInput):
        return io.ClearHiCacheReqOutput(success=outcome.succeeded)
    kind = io.DetachHiCacheStorageReqOutput
    if isinstance(message, io.AttachHiCacheStorageReqInput):
        kind = io.AttachHiCacheStorageReqOutput
    return kind(success=outcome.succeeded, message=outcome.message)
