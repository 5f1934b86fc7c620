"""The TokenizerManager of an HTTP server.

It knows when the application is complete, reads the loads for their route, refuses what a route
would call done, and has an end with a time limit.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import ClearHiCacheReqOutput
from sglang.srt.managers.load_snapshot import LoadSnapshot, ShmLoadSnapshotReader
from starlette.background import BackgroundTask

from sgl_pipeline.managers.entrance import quiet_start
from sgl_pipeline.managers.entrance.front_guard import GuardedTokenizerManager
from sgl_pipeline.managers.entrance.graceful_stop import StopSignals, drain
from sgl_pipeline.managers.entrance.request_tenant import RequestTenants


class HttpTokenizerManager(GuardedTokenizerManager):
    """The guarded one, behind routes.

    Args:
        loads_path: the file of `load_report.py`.
        drain_timeout_s: seconds that running requests may go on after Ctrl-C or a SIGTERM.
        on_interrupt: called when Ctrl-C stops the server.
        end_now: ends the whole server with an exit code; the rest is upstream's.
        before_listening: called when upstream's application is complete.
        before_closing: called when the HTTP server is about to wait for its open connections.
        tenants: names the tenants, with `--fair-shares-by`.
    """

    def __init__(
        self,
        server_args: Any,
        port_args: Any,
        *,
        loads_path: str,
        drain_timeout_s: float,
        end_now: Callable[[int], NoReturn],
        on_interrupt: Callable[[], None],
        before_listening: Callable[[], None],
        before_closing: Callable[[], None],
        tenants: RequestTenants | None = None,
    ) -> None:
        super().__init__(server_args, port_args)
        self.tenants = tenants
        self._before_listening = before_listening
        self._before_closing = before_closing
        self.load_snapshot_reader = ShmLoadSnapshotReader(loads_path, dp_size=1)
        self.stop_requested = asyncio.Event()
        self.end_now = end_now
        self.on_interrupt = on_interrupt
        self.signal_handler_class = StopSignals
        self.drain_timeout_s = drain_timeout_s

    def set_server_stop_hook(self, hook: Callable[[], None]) -> None:
        """Upstream calls it right before it listens: all its own middleware has been added."""
        super().set_server_stop_hook(hook)
        self._before_listening()

    async def sigterm_watchdog(self) -> None:
        """As upstream's, which goes on at once if no request is left."""
        await self.stop_requested.wait()
        if not await drain(self, self.drain_timeout_s):
            self.end_now(1)
        self._before_closing()
        if self.server_args.log_level != "debug":
            quiet_start.begin()  # upstream logs its end at length
        await super().sigterm_watchdog()

    @property
    def computes_for_peers(self) -> bool:
        """True if this is a prefill server."""
        return self.disaggregation_mode is DisaggregationMode.PREFILL

    async def num_wanted_rooms(self) -> int:
        """Prompts that decode servers wait for and have not read yet."""
        if not self.computes_for_peers:
            return 0
        (state,) = await self.get_internal_state()
        return int(state["rooms"]["wanted_requests"])

    async def get_loads(
        self, include: list[str] | None = None, dp_rank: int | None = None
    ) -> list[LoadSnapshot]:
        """As upstream's, which notices an unknown section too late for a 400: a ValueError."""
        if unknown := set(include or ()) - LoadSnapshot.VALID_SECTIONS:
            valid = ", ".join(sorted(LoadSnapshot.VALID_SECTIONS))
            raise ValueError(f"include: {', '.join(sorted(unknown))}; choose from {valid}")
        loads: list[LoadSnapshot] = await super().get_loads(include, dp_rank)
        return loads

    async def clear_hicache_storage(self) -> ClearHiCacheReqOutput:
        """As upstream's, whose route says "cleared" whatever the reply is: a ValueError, with the
        reason, where nothing was."""
        reply = await super().clear_hicache_storage()
        if not reply.success:
            backend = self.config_value("hicache_storage_backend")
            raise ValueError(f"nothing was cleared: {_why_not_cleared(backend)}")
        return reply

    def create_abort_task(self, obj: Any) -> BackgroundTask:
        """As upstream's, which does not recognize a request that was refused at the entrance."""
        abort = super().create_abort_task(obj)

        async def abort_if_taken() -> None:
            if hasattr(obj, "is_single"):
                await abort()

        return BackgroundTask(abort_if_taken)


def _why_not_cleared(backend: str | None) -> str:
    """The reason, which the reply of the scheduler process has no field for."""
    if backend is None:
        return (
            "no storage backend is attached; start the server with --enable-hierarchical-cache "
            "and --hicache-storage-backend file"
        )
    return (
        f"another change of the storage backend {backend} is under way, or it cannot be cleared; "
        "the server's log says which"
    )
