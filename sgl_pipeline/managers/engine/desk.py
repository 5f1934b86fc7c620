"""Answers the calls of a program in the engine's process, in place of an HTTP server's routes.

Requests are checked as `/generate` checks a body, and go to the same TokenizerManager.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import HTTPException
from pydantic import TypeAdapter, ValidationError
from sglang.srt.entrypoints.api_contract import generate_contract_error
from sglang.srt.managers.io_struct import GenerateReqInput, ProfileReq
from sglang.srt.utils import build_server_info
from sglang.srt.utils.msgspec_utils import msgspec_to_builtins
from sglang.version import __version__

from sgl_pipeline.managers.engine.channel import (
    LENGTH_BYTES,
    Ask,
    Cancel,
    Done,
    EndEngine,
    EngineFailed,
    FromEngine,
    Generate,
    Refused,
    Reply,
    ToEngine,
    encode_frame,
)
from sgl_pipeline.managers.entrance.front_guard import refusal_in
from sgl_pipeline.managers.upstream.request_checks import RefusedRequestError

logger = logging.getLogger(__name__)

_decoder = msgspec.msgpack.Decoder(ToEngine)
_requests = TypeAdapter(GenerateReqInput)
_FIELDS = frozenset(GenerateReqInput.__dataclass_fields__)
_MODEL_VALUES = ("weight_version", "load_format", "reasoning_parser", "tool_call_parser")


class EngineDesk:
    """One program's calls.

    Args:
        manager: the TokenizerManager.
        scheduler_info: the scheduler's ready message.
        reader, writer: the stream of `channel.py` from and to the program.
    """

    def __init__(
        self,
        manager: Any,
        scheduler_info: dict[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._manager = manager
        self._scheduler_info = scheduler_info
        self._reader = reader
        self._writer = writer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._questions: dict[str, Callable[..., Awaitable[Any]]] = {
            "flush_cache": self._flush_cache,
            "get_model_info": self._get_model_info,
            "get_server_info": self._get_server_info,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
        }

    def fail(self, reason: str) -> None:
        """Has `serve` end, and the program know why."""
        if not self._failure.done():
            self._failure.set_result(reason)

    async def serve(self) -> None:
        """Answers calls until the program wants no more, is gone, or the engine fails."""
        reading = asyncio.create_task(self._read_calls())
        ends: set[asyncio.Future[Any]] = {reading, self._failure}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()
        if self._failure.done():
            with contextlib.suppress(OSError):
                self._send(EngineFailed(self._failure.result()))
                await self._writer.drain()

    async def _read_calls(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
                message = _decoder.decode(await self._reader.readexactly(length))
                if isinstance(message, EndEngine):
                    return
                self._take(message)

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Cancel):
            if (task := self._tasks.get(message.call)) is not None:
                task.cancel()
            return
        assert isinstance(message, Generate | Ask)
        answer = self._generate if isinstance(message, Generate) else self._answer
        task = asyncio.create_task(self._guard(message, answer))
        self._tasks[message.call] = task
        task.add_done_callback(lambda done: self._tasks.pop(message.call))

    async def _guard(self, message: Any, answer: Callable[[Any], Awaitable[None]]) -> None:
        """Ends every call that is not cancelled with one last answer."""
        last: FromEngine = Done(message.call)
        try:
            await answer(message)
        except HTTPException as error:
            last = Refused(message.call, str(error.detail), error.status_code)
        except ValueError as error:
            status = getattr(error, "status_code", HTTPStatus.BAD_REQUEST)
            last = Refused(message.call, str(error), int(status))
        except Exception as error:
            logger.exception("a call could not be answered")
            text = f"internal error: {error!r}; see the log"
            last = Refused(message.call, text, int(HTTPStatus.INTERNAL_SERVER_ERROR))
        self._send(last)

    async def _generate(self, message: Generate) -> None:
        async for reply in self._manager.generate_request(read_request(message.fields)):
            # Upstream ends a stream that fails with a reply; a program gets the error.
            if (error := refusal_in(reply)) is not None:
                raise error
            self._send(Reply(message.call, reply))

    async def _answer(self, message: Ask) -> None:
        value = await self._questions[message.question](**message.fields)
        self._send(Reply(message.call, value))

    def _send(self, message: FromEngine) -> None:
        """Never waits: the program's end reads always."""
        self._writer.write(encode_frame(message))

    async def _flush_cache(self) -> tuple[bool, str]:
        result = await self._manager.flush_cache()
        return result.success, result.message

    async def _get_server_info(self) -> Any:
        """As upstream's `/server_info`."""
        states = await self._manager.get_internal_state()
        server_args = self._manager.server_args
        return msgspec_to_builtins(
            {
                **build_server_info(server_args, self._scheduler_info),
                "startup_time": self._manager.startup_time,
                "internal_states": states,
                "version": __version__,
            }
        )

    async def _get_model_info(self) -> Any:
        """As upstream's `Engine.get_model_info`."""
        manager = self._manager
        names = ("model_path", "served_model_name", "is_generation")
        return {name: getattr(manager, name) for name in names} | {
            name: manager.config_value(name) for name in _MODEL_VALUES
        }

    async def _start_profile(self, **fields: Any) -> None:
        await self._profile(self._manager.start_profile(msgspec.convert(fields, ProfileReq)))

    async def _stop_profile(self) -> None:
        await self._profile(self._manager.stop_profile())

    async def _profile(self, result: Awaitable[Any]) -> None:
        try:
            await result
        except RuntimeError as error:  # a refusal
            raise _refused(str(error)) from error


def read_request(fields: dict[str, Any]) -> GenerateReqInput:
    """The request with these fields. Raises RefusedRequestError as `/generate` refuses a body, and
    for a field that there is not, which that route ignores."""
    if unknown := sorted(fields.keys() - _FIELDS):
        raise _refused(f"generate() has no argument {unknown[0]!r}")
    if (error := generate_contract_error(fields)) is not None:
        raise _refused(f"{_field_of(error, fields)}{error}")
    try:
        return _requests.validate_python(fields)
    except ValidationError as error:
        raise _refused(str(error)) from error


def _field_of(error: str, fields: dict[str, Any]) -> str:
    """The name of the field that upstream complains of, which it leaves out: without it there is no
    such complaint."""
    for name, value in fields.items():
        if generate_contract_error(_without(name, fields)) == error:
            continue
        for inner in value if isinstance(value, dict) else ():
            if generate_contract_error(fields | {name: _without(inner, value)}) != error:
                return f"{inner}: "
        return f"{name}: "
    return ""


def _without(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {other: value for other, value in fields.items() if other != name}


def _refused(message: str) -> RefusedRequestError:
    return RefusedRequestError(message, HTTPStatus.BAD_REQUEST)
