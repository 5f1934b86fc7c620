"""Upstream's TokenizerManager with checks before it and an end that has a time limit.

Installed by `launch_server.py` through upstream's official door, because a few requests would hold
or break upstream's own front; `route_guard.py` is the other door. Nothing of upstream is patched,
and nothing that works is changed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, NoReturn

from sglang.srt.managers.load_snapshot import LoadSnapshot, ShmLoadSnapshotReader
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sgl_pipeline.managers.graceful_stop import StopSignals, drain
from sgl_pipeline.managers.sample_seeds import spread_seeds

# Upstream copies a request per sample before it looks at it: 100,000 of them hold it for seconds.
MAX_SAMPLES_PER_PROMPT = 128
MAX_SEQUENCES_PER_REQUEST = 16384


class RefusedRequestError(ValueError):
    """What upstream's handlers turn into an error reply of this status."""

    def __init__(self, message: str, status_code: HTTPStatus) -> None:
        super().__init__(message)
        self.status_code = status_code


class GuardedTokenizerManager(TokenizerManager):
    """Upstream's, with a check in front of it, refusals that also reach streams, and an end that
    has a time limit.

    Args:
        loads_path: the file of `load_report.py`.
        drain_timeout_s: how long running requests may go on after a SIGTERM.
        end_now: ends the whole server with an exit code; the rest is upstream's.
    """

    def __init__(
        self,
        server_args: Any,
        port_args: Any,
        *,
        loads_path: str,
        drain_timeout_s: float,
        end_now: Callable[[int], NoReturn],
    ) -> None:
        super().__init__(server_args, port_args)
        self.load_snapshot_reader = ShmLoadSnapshotReader(loads_path, dp_size=1)
        self.stop_requested = asyncio.Event()
        self.end_now = end_now
        self.signal_handler_class = StopSignals
        self._drain_timeout_s = drain_timeout_s

    async def sigterm_watchdog(self) -> None:
        """As upstream's, which goes on at once where no request is left."""
        await self.stop_requested.wait()
        if not await drain(self, self._drain_timeout_s):
            self.end_now(1)
        await super().sigterm_watchdog()

    async def get_loads(
        self, include: list[str] | None = None, dp_rank: int | None = None
    ) -> list[LoadSnapshot]:
        """As upstream's, which notices an unknown section too late for a 400: a ValueError."""
        if unknown := set(include or ()) - LoadSnapshot.VALID_SECTIONS:
            valid = ", ".join(sorted(LoadSnapshot.VALID_SECTIONS))
            raise ValueError(f"include: {', '.join(sorted(unknown))}; choose from {valid}")
        loads: list[LoadSnapshot] = await super().get_loads(include, dp_rank)
        return loads

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """As upstream's. Raises RefusedRequestError, a ValueError, for what is turned away."""
        check_sequences(obj)
        spread_seeds(obj)
        has_replied = False
        async with aclosing(super().generate_request(obj, request)) as replies:
            async for reply in replies:
                if (error := _refusal_in(reply)) is not None and not has_replied:
                    raise error
                has_replied = True
                yield reply


def check_sequences(obj: Any) -> None:
    """Raises RefusedRequestError when `obj` fans out into too many requests or cannot be read.

    Args:
        obj: a GenerateReqInput before upstream has touched it, or another request (not checked).
    """
    options = getattr(obj, "sampling_params", None) or {}
    prompts = getattr(obj, "text", None) or getattr(obj, "input_ids", None)
    num_prompts = len(prompts) if isinstance(prompts, list) and _is_several(prompts) else 1
    num_sequences = 0
    for one in options if isinstance(options, list) else [options] * num_prompts:
        if not isinstance(one, dict):
            raise _refused("sampling_params must be an object or a list of objects")
        samples = 1 if one.get("n") is None else one["n"]
        if not isinstance(samples, int) or not 1 <= samples <= MAX_SAMPLES_PER_PROMPT:
            raise _refused(f"n must be between 1 and {MAX_SAMPLES_PER_PROMPT}, got {samples!r}")
        # Upstream parses the expression itself, and answers a bad one with a 500.
        if one.get("stop_regex"):
            raise _refused("stop_regex: not supported by this server yet")
        # Upstream's own mark that it has checked the rest.
        if one.get("is_normalized"):
            raise _refused("is_normalized is not for clients to set")
        num_sequences += samples
    if num_sequences > MAX_SEQUENCES_PER_REQUEST:
        raise _refused(
            f"{num_sequences} sequences in one request; at most {MAX_SEQUENCES_PER_REQUEST}"
        )


def _is_several(prompts: list[Any]) -> bool:
    """Whether a list is one of prompts, and not the token ids of a single one."""
    return not prompts or not isinstance(prompts[0], int)


def _refused(message: str) -> RefusedRequestError:
    return RefusedRequestError(message, HTTPStatus.BAD_REQUEST)


def _refusal_in(reply: Any) -> RefusedRequestError | None:
    """The error that a reply of our scheduler reports, with the status that upstream looks for:
    its stream handlers expect an HTTPStatus, which the wire format turns into an integer."""
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not isinstance(finish, dict) or finish.get("status_code") is None:
        return None
    finish["status_code"] = HTTPStatus(finish["status_code"])
    return RefusedRequestError(str(finish.get("message")), finish["status_code"])
