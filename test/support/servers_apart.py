"""Prefill and decode servers behind SGLang's router, and one server that does all: whole processes.

Used by the tests of test/server/ that ask both and compare the answers.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import requests
from support.live_server import (
    ANSWER_S,
    PATIENCE_S,
    START_TIMEOUT_S,
    LiveServer,
    start_server,
    wait_until,
    wait_until_ready,
)
from support.ports import number_of, reserve_port
from support.router import FOLDER

from sgl_pipeline.cluster.keys import KEY_VARIABLE
from sgl_pipeline.managers.serve_pd import HOST, Ports, router_command, router_environment

PAGE_SIZE = 16
SAME_TOKENS = ("--dtype", "float32", "--cpu-threads-per-stage", "1")
KEY = {KEY_VARIABLE: "a key of the tests, as long as is needed"}
_WATCHFUL = ("--health-check-interval-secs", "1", "--worker-startup-check-interval", "1")


@dataclass
class Apart:
    """The servers of both roles, one that does all, and the router before those of the roles.

    Args:
        bootstraps: the addresses of the prefill servers' bootstrap ports.
    """

    router: str
    prefills: list[LiveServer]
    decodes: list[LiveServer]
    whole: LiveServer
    bootstraps: list[str]

    @property
    def prefill(self) -> LiveServer:
        """The first."""
        return self.prefills[0]

    @property
    def decode(self) -> LiveServer:
        """The first."""
        return self.decodes[0]

    @property
    def bootstrap(self) -> str:
        """That of the first prefill server."""
        return self.bootstraps[0]

    def ask(self, **body: Any) -> tuple[Any, Any]:
        """The answers of `/generate` by those apart and by the one."""
        return generate(self.router, **body), generate(self.whole.url, **body)

    def wait_until_at_rest(self) -> None:
        """Fails unless soon nothing is held or promised, because all clients have their answers."""
        for server in (*self.prefills, *self.decodes):
            wait_until(lambda server=server: is_at_rest(server))  # type: ignore[misc]


def generate(url: str, **body: Any) -> Any:
    """The answer of `/generate`, which must be one."""
    answer = requests.post(f"{url}/generate", json=body, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def is_at_rest(server: LiveServer) -> bool:
    """True if a server has no request, and nothing is held or promised for another."""
    facts = server.facts()
    rooms = facts["rooms"]
    kept = ("bootstrap_requests", "transfer_requests", "held_pages", "promised_pages")
    return not (facts["num_running_requests"] or any(rooms[name] for name in kept))


def num_healthy(router: str) -> int:
    """The servers to which the router sends requests."""
    try:
        workers = requests.get(f"{router}/workers", timeout=ANSWER_S).json()["workers"]
    except requests.ConnectionError:
        return 0
    return sum(one["is_healthy"] for one in workers)


@contextmanager
def servers_apart(
    prefills: Sequence[str],
    decodes: Sequence[str],
    whole: str = "--pp 1",
    flags: Sequence[str] = SAME_TOKENS,
    router_flags: Sequence[str] = (),
) -> Iterator[Apart]:
    """All of them, ready.

    Args:
        prefills, decodes: the flags of each server of the role.
        whole: those of the one server.
        flags: of all servers.
    """
    with ExitStack() as stack:

        def port() -> int:
            return number_of(stack.enter_context(closing(reserve_port())))

        bootstraps = [port() for _ in prefills]
        started: list[LiveServer] = []
        for mode, own in (("prefill", prefills), ("decode", decodes)):
            for number, words in enumerate(own):
                roles = ["--disaggregation-mode", mode, *words.split()]
                if mode == "prefill":
                    roles += ["--disaggregation-bootstrap-port", str(bootstraps[number])]
                started.append(start_server(*roles, *flags, environment=KEY))
                stack.callback(stop, started[-1].process)
        started.append(start_server(*whole.split(), *flags))
        stack.callback(stop, started[-1].process)
        for server in started:
            wait_until_ready(server)
        prefill, decode = started[: len(prefills)], started[len(prefills) : -1]
        ports = Ports(port(), prefill[0].port, decode[0].port, bootstraps[0], port())
        more = [*_WATCHFUL, *router_flags]
        for server, bootstrap in zip(prefill[1:], bootstraps[1:], strict=True):
            more += ["--prefill", server.url, str(bootstrap)]
        for server in decode[1:]:
            more += ["--decode", server.url]
        command = router_command(ports, more)
        process = subprocess.Popen(command, env=router_environment(str(FOLDER)))
        stack.callback(stop, process)
        url = f"http://{HOST}:{ports.router}"
        wait_until(lambda: num_healthy(url) == len(started) - 1, START_TIMEOUT_S)
        addresses = [f"http://{HOST}:{number}" for number in bootstraps]
        yield Apart(url, prefill, decode, started[-1], addresses)


def stop(process: Any) -> None:
    """Ends a server or the router, by force if need be."""
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
