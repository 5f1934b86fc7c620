"""Servers on the same two cores: prefill and decode on one core each, and one pipeline, or several
decode servers that share a core and a prefill server.

Each server has a namespace of its own; router and clients are in the caller's, on both cores.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from benchmark.disaggregation.apart_report import APART, TOGETHER
from benchmark.hosts.namespaces import Host, Network
from benchmark.hosts.servers import HTTP_PORT
from benchmark.support.paths import SCRATCH
from benchmark.support.starts import answers, wait_for_start
from benchmark.tiers.tiered_servers import router_folder
from sgl_pipeline.cluster.keys import KEY_VARIABLE
from sgl_pipeline.managers.serve_pd import (
    HOST,
    ROUTER_FLAGS,
    has_both,
    router_environment,
)
from sgl_pipeline.process_lifetime import die_with_parent

BOOTSTRAP_PORT = 8998
# The router notices servers sooner.
_INTERVALS = ("--health-check-interval-secs", "5", "--worker-startup-check-interval", "1")
_STOP_TIMEOUT_S = 40.0


@contextmanager
def both_setups(
    network: Network, model: Path, flags: list[str], port: int
) -> Iterator[dict[str, str]]:
    """The addresses that clients ask, by set-up, all servers ready.

    Args:
        network: hosts for prefill, decode and the pipeline of two stages, by their cores.
        flags: of every server.
        port: of the router, on loopback; its metrics are at the next one.

    Raises EngineFailure where one does not come up.
    """
    prefill, decode, whole = network.hosts
    key = {KEY_VARIABLE: secrets.token_hex(32)}
    common = ["--model-path", str(model), "--host", "0.0.0.0", "--port", str(HTTP_PORT), *flags]
    with ExitStack() as stack:
        log = stack.enter_context(_log().open("w"))
        servers = {}
        for host, mode in ((prefill, "prefill"), (decode, "decode")):
            role = ["--pp", "1", "--disaggregation-mode", mode]
            role += ["--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT)]
            servers[_url(host)] = _start(stack, host, [*common, *role], key, log)
        servers[_url(whole)] = _start(stack, whole, [*common, "--pp", "2"], {}, log)
        _wait_for(servers)
        yield {APART: _start_router(stack, prefill, decode, port, log), TOGETHER: _url(whole)}


class LendingSetup(NamedTuple):
    """One decode server of several: the router before it, and itself."""

    router: str
    decode: str


@contextmanager
def lending_setups(
    network: Network,
    model: Path,
    prefill_flags: Sequence[str],
    decode_flags: Mapping[str, Sequence[str]],
    port: int,
) -> Iterator[dict[str, LendingSetup]]:
    """Decode servers by name, each with a router of its own, and one prefill server for all.

    Args:
        network: hosts for prefill and for each decode server.
        decode_flags: of each decode server; those of the prefill server are `prefill_flags`.
        port: of the first router; each takes two.

    Raises EngineFailure as `both_setups`.
    """
    prefill, *decodes = network.hosts
    key = {KEY_VARIABLE: secrets.token_hex(32)}
    common = ["--model-path", str(model), "--host", "0.0.0.0", "--port", str(HTTP_PORT), "--pp"]
    common += ["1", "--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT)]
    with ExitStack() as stack:
        log = stack.enter_context(_log().open("w"))
        servers = {}
        of_decode = zip(decodes, decode_flags.values(), strict=True)
        for host, mode, flags in (
            (prefill, "prefill", prefill_flags),
            *((host, "decode", flags) for host, flags in of_decode),
        ):
            role = ["--disaggregation-mode", mode, *flags]
            servers[_url(host)] = _start(stack, host, [*common, *role], key, log)
        _wait_for(servers)
        yield {
            name: LendingSetup(
                _start_router(stack, prefill, host, port + 2 * index, log), _url(host)
            )
            for index, (name, host) in enumerate(zip(decode_flags, decodes, strict=True))
        }


def _start_router(stack: ExitStack, prefill: Host, decode: Host, port: int, log: IO[str]) -> str:
    """The address of a router that has found both servers."""
    router = subprocess.Popen(
        _router_command(prefill, decode, port),
        env=router_environment(str(router_folder())),
        stdout=log,
        stderr=subprocess.STDOUT,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    stack.callback(_stop, router)
    url = f"http://{HOST}:{port}"
    wait_for_start("the router", lambda: has_both(url), [router], _log())
    return url


def _start(
    stack: ExitStack,
    host: Host,
    flags: list[str],
    variables: Mapping[str, str],
    log: IO[str],
) -> "subprocess.Popen[str]":
    server = host.start(
        *(sys.executable, "-m", "sgl_pipeline.launch_server", *flags),
        env=os.environ | variables,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    stack.callback(_stop, server)
    return server


def _wait_for(servers: "Mapping[str, subprocess.Popen[str]]") -> None:
    """Returns when all answer, by their addresses."""
    for url, server in servers.items():
        wait_for_start(url, partial(answers, url), [server], _log())


def _router_command(prefill: Host, decode: Host, port: int) -> list[str]:
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--prefill", _url(prefill), str(BOOTSTRAP_PORT), "--decode", _url(decode)]
    command += ["--host", HOST, "--port", str(port)]
    command += ["--prometheus-host", HOST, "--prometheus-port", str(port + 1)]
    return [*command, *ROUTER_FLAGS, *_INTERVALS]


def _url(host: Host) -> str:
    return f"http://{host.address}:{HTTP_PORT}"


def _log() -> Path:
    return SCRATCH / "servers_apart.log"


def _stop(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
