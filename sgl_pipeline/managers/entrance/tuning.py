"""`POST /pipeline/tune`: asks the scheduler process for its last minutes, and a process of its own
for the knobs that would have served them better.

One at a time. The simulator is never imported in the HTTP server's process: it runs as
`python -m sgl_pipeline.simulator.tune_process`.
"""

import asyncio
import os
import subprocess
import sys
from typing import Annotated

import msgspec
from msgspec import Meta

from sgl_pipeline.args import POLICIES, ThrottleArgs
from sgl_pipeline.errors import RequestError
from sgl_pipeline.process_lifetime import child_environment

# For the start of the process, the run under the knobs in force, and the answer.
GRACE_S = 60.0
HOW_TO_TUNE = (
    'send {"ttft_ms": 1000, "tpot_ms": 50}, the latencies that requests should have; "apply": true '
    "sets what is proposed"
)
_Milliseconds = Annotated[float, Meta(gt=0.0, le=1e7)]


class TuneBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /pipeline/tune. `window_s` seconds of arrivals are run again, for at most
    `timeout_s` seconds; `policies` are tried, by default the one in force, the server's
    default and `throttle`."""

    ttft_ms: _Milliseconds
    tpot_ms: _Milliseconds
    apply: bool = False
    revert_after_s: float | None = None
    window_s: Annotated[float, Meta(ge=1.0, le=3600.0)] = 300.0
    timeout_s: Annotated[float, Meta(ge=1.0, le=600.0)] = 60.0
    policies: Annotated[tuple[str, ...], Meta(max_length=len(POLICIES))] | None = None

    def check(self) -> None:
        """Raises RequestError for faults that the types do not exclude."""
        unknown = [one for one in self.policies or () if one not in POLICIES]
        if unknown:
            raise RequestError(f"policies: {unknown[0]!r} is not one of {', '.join(POLICIES)}")
        if self.revert_after_s is not None and not self.apply:
            raise RequestError('revert_after_s needs "apply": true')


class _Task(msgspec.Struct, frozen=True, kw_only=True):
    """`simulator.propose.TuneTask`, with the work as the scheduler process encoded it."""

    work: msgspec.Raw
    ttft_ms: float
    tpot_ms: float
    policies: tuple[str, ...]
    timeout_s: float


class Tuner:
    """Runs one task at a time."""

    def __init__(self) -> None:
        self._is_busy = False

    def begin(self) -> None:
        """Takes the one place. Raises RequestError (409) while it is taken."""
        if self._is_busy:
            raise RequestError("the knobs are being tuned already; wait for that", status_code=409)
        self._is_busy = True

    def end(self) -> None:
        """Gives the place back."""
        self._is_busy = False

    async def run(self, body: TuneBody, work: bytes, policy: str) -> bytes:
        """The proposal, as msgpack.

        Args:
            work: a `RecentWork` as msgpack.
            policy: the one in force.

        Raises RequestError: 503 where the task cannot be done, 500 where its process failed.
        """
        policies = body.policies or tuple(
            dict.fromkeys((policy, ThrottleArgs().policy, "throttle"))
        )
        task = _Task(
            work=msgspec.Raw(work),
            ttft_ms=body.ttft_ms,
            tpot_ms=body.tpot_ms,
            policies=policies,
            timeout_s=body.timeout_s,
        )
        # Started by this thread, which lives as long as the server; waited for by another.
        process = _start()
        payload, timeout_s = msgspec.msgpack.encode(task), body.timeout_s + GRACE_S
        try:
            output, text = await asyncio.to_thread(process.communicate, payload, timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RequestError(
                f"tuning took longer than {timeout_s:g} s and was ended; ask for a shorter "
                "window_s, or when the cores are less busy: it has the lowest priority",
                status_code=503,
            ) from error
        finally:
            process.kill()
            process.wait()
        if process.returncode == 0:
            return output
        reason = text.decode(errors="replace").strip().rpartition("\n")[2]
        status = 503 if process.returncode == 2 else 500
        raise RequestError(f"nothing can be proposed: {reason}", status_code=status)


def _start() -> "subprocess.Popen[bytes]":
    environment = child_environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    command = [sys.executable, "-m", "sgl_pipeline.simulator.tune_process"]
    command += ["--parent", str(os.getpid())]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe)
