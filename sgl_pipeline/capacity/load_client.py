"""Puts a load on a server: each request at its moment, over SGLang's own `/generate`.

Not `sglang.bench_serving`, because a capacity needs the very requests and moments that the
simulator serves, and a dozen short loads in a row without the seconds that each of its starts
takes. Times are its own: from sending a request to the arrival of a part of its answer.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from sgl_pipeline.capacity.load import tokens_per_s
from sgl_pipeline.capacity.rate_trial import Round
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.goodput import RequestLatency
from sgl_pipeline.simulator.workload import SimulatedRequest

_DATA = b"data: "
# A request that has no token for so long has failed.
_SILENCE_S = 120.0
_SPREAD = 2_654_435_761  # of Knuth's multiplicative hash


class _Counts(msgspec.Struct):
    completion_tokens: int = 0


class _Part(msgspec.Struct):
    """The fields that count of a part of a streamed answer."""

    meta_info: _Counts = msgspec.field(default_factory=_Counts)
    error: Any = None


_decoder = msgspec.json.Decoder(_Part)


class _FailedRequestError(Exception):
    """A request was not served to its end."""


class LoadClient:
    """The clients of one server.

    Args:
        url: without a slash at its end.
        vocab_size: token ids of prompts are below it.
        api_key: None where the server wants none.
    """

    def __init__(self, url: str, vocab_size: int, api_key: str | None) -> None:
        self._url = f"{url}/generate"
        self._vocab_size = vocab_size
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # Why requests failed, over all loads.
        self.failures: Counter[str] = Counter()

    def serve(
        self, requests: Sequence[SimulatedRequest], on_ended: Callable[[], None] = lambda: None
    ) -> Round:
        """Each request at its `arrival_s`.

        Raises ConfigurationError if not one of them is answered.
        """
        return asyncio.run(self._serve(requests, on_ended))

    def alone(self, requests: Sequence[SimulatedRequest]) -> Round:
        """One after the other, whatever their arrivals. Raises as `serve`."""
        return asyncio.run(self._serve(requests, lambda: None, one_by_one=True))

    async def _serve(
        self,
        requests: Sequence[SimulatedRequest],
        on_ended: Callable[[], None],
        one_by_one: bool = False,
    ) -> Round:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            headers=self._headers, timeout=timeout, connector=connector
        ) as session:
            began_s = time.perf_counter()

            async def ask(request: SimulatedRequest) -> RequestLatency | None:
                if not one_by_one:
                    await asyncio.sleep(began_s + request.arrival_s - time.perf_counter())
                try:
                    return await self._ask(session, request)
                except (
                    aiohttp.ClientError,
                    TimeoutError,
                    ValueError,  # a line beyond what the client keeps
                    _FailedRequestError,
                ) as error:
                    self.failures[str(error) or type(error).__name__] += 1
                    return None
                finally:
                    on_ended()

            if one_by_one:
                found = [await ask(request) for request in requests]
            else:
                found = await asyncio.gather(*map(ask, requests))
            duration_s = time.perf_counter() - began_s
        is_served = [one is not None for one in found]
        if not any(is_served):
            (reason, _), *_ = self.failures.most_common(1)
            raise ConfigurationError(f"{self._url} answered no request: {reason}")
        return Round(tuple(found), tokens_per_s(requests, is_served, duration_s))

    async def _ask(
        self, session: aiohttp.ClientSession, request: SimulatedRequest
    ) -> RequestLatency:
        """Raises _FailedRequestError for an answer that is refused or ends too early."""
        body = {
            "input_ids": [self._token(token_id) for token_id in request.prompt_ids()],
            "sampling_params": {
                "max_new_tokens": request.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
            "stream": True,
        }
        sent_s = time.perf_counter()
        first_s = last_s = None
        last = b""
        async with session.post(self._url, json=body) as reply:
            if reply.status != 200:
                text = (await reply.text())[:300]
                raise _FailedRequestError(f"status {reply.status}: {text}")
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                last_s, last = time.perf_counter(), line
                first_s = last_s if first_s is None else first_s
        if first_s is None or last_s is None:
            raise _FailedRequestError("an answer without a token")
        num_tokens = _tokens_of(last)
        if num_tokens != request.output_tokens:
            raise _FailedRequestError(f"{num_tokens} of {request.output_tokens} tokens")
        return RequestLatency.of(
            (first_s - sent_s) * 1e3, (last_s - sent_s) * 1e3, request.output_tokens
        )

    def _token(self, token_id: int) -> int:
        """An id of the model's for one of the simulator's, equal ones for equal ones."""
        return token_id * _SPREAD % 2**32 % self._vocab_size


def _tokens_of(line: bytes) -> int:
    """Raises _FailedRequestError for a part that does not belong to an answer, such as an error."""
    try:
        part = _decoder.decode(line.removeprefix(_DATA))
    except msgspec.MsgspecError:
        raise _FailedRequestError(line.decode(errors="replace").strip()[:300]) from None
    if part.error is not None:
        raise _FailedRequestError(f"{part.error}"[:300])
    return part.meta_info.completion_tokens
