"""The load served by a server of ours: the measuring side."""

import time
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any

import msgspec
import requests

from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.capacity.load import CapacityLoad
from sgl_pipeline.capacity.load_client import LoadClient
from sgl_pipeline.capacity.processor_use import ProcessorMeter
from sgl_pipeline.capacity.rate_trial import Round
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.status_line import StatusLine, bar

_ANSWER_S = 60.0
_FLUSH_POLL_S = 0.2


class ServerFacts(msgspec.Struct, frozen=True):
    """The facts of its pipeline that a running server reports in `/server_info`."""

    num_stages: int
    layer_partition: list[int]
    page_size: int
    total_pages: int
    state_slots: int

    @property
    def pool_tokens(self) -> int:
        return self.page_size * self.total_pages

    def in_force(self, asked: SchedulingArgs) -> SchedulingArgs:
        """`asked` with the page size and state slots of the server."""
        return replace(asked, page_size=self.page_size, num_state_slots=self.state_slots)


class _Info(msgspec.Struct, frozen=True):
    internal_states: list[ServerFacts]


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """A server that is up at `url`, and the clients that load it. `pid` is that of its main process
    where it is known to be on this host."""

    url: str
    client: LoadClient
    load: CapacityLoad
    api_key: str | None = None
    pid: int | None = None

    def serve(self, rate_per_s: float, round_number: int) -> Round:
        """A `Serve`; the prefix cache is emptied before."""
        self._flush()
        asked = self.load.requests(rate_per_s, round_number)
        line, ended = StatusLine(), count(1)
        line.show(f"measured at {rate_per_s:.3g} req/s {bar(0, len(asked))}")
        meter = None if self.pid is None else ProcessorMeter(self.pid)
        served = self.client.serve(
            asked,
            lambda: line.show(f"measured at {rate_per_s:.3g} req/s {bar(next(ended), len(asked))}"),
        )
        line.clear()
        return served if meter is None else replace(served, processors=meter.used())

    def alone(self, count: int) -> Round:
        """The first requests, one by one."""
        self._flush()
        return self.client.alone(self.load.apart(count, 0.0))

    def facts(self) -> ServerFacts:
        """Raises ConfigurationError for a server that is not ours."""
        try:
            info = msgspec.json.decode(self._call("GET", "server_info"), type=_Info)
            return info.internal_states[0]
        except (msgspec.ValidationError, IndexError) as error:
            raise ConfigurationError(
                f"{self.url} does not describe its pipeline ({error}): is it a server of ours?"
            ) from None

    def knobs(self) -> dict[str, Any]:
        """The throttle's knobs in force: the fields of `ThrottleArgs`, and `accounting`."""
        knobs = msgspec.json.decode(self._call("GET", "pipeline/throttle"), type=dict[str, Any])
        names = [field.name for field in fields(ThrottleArgs)] + ["accounting"]
        if missing := [name for name in names if name not in knobs]:
            raise ConfigurationError(f"{self.url}: /pipeline/throttle does not have {missing}")
        return {name: knobs[name] for name in names}

    def set_policy(self, policy: str) -> None:
        """Changes the policy between two steps."""
        self._call("PATCH", "pipeline/throttle", {"policy": policy})

    def _flush(self) -> None:
        """Waits until nothing runs, and empties the prefix cache."""
        deadline_s = time.monotonic() + _ANSWER_S
        while True:
            reply = self._request("POST", "flush_cache", None)
            if reply.ok:
                return
            if time.monotonic() > deadline_s:
                raise ConfigurationError(
                    f"{self.url} is not idle: it has other requests ({reply.text[:200]})"
                )
            time.sleep(_FLUSH_POLL_S)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        reply = self._request(method, path, body)
        if not reply.ok:
            raise ConfigurationError(f"{self.url}/{path}: {reply.status_code} {reply.text[:300]}")
        return reply.content

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> requests.Response:
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        try:
            return requests.request(
                method, f"{self.url}/{path}", json=body, headers=headers, timeout=_ANSWER_S
            )
        except requests.RequestException as error:
            raise ConfigurationError(f"no answer from {self.url}/{path}: {error}") from None
