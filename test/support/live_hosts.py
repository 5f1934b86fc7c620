"""A server over hosts of namespaces: the head and the agents, each as its user would start it.

Used by test/cluster/. The test itself is one more host: it asks the head over the network.
"""

import concurrent.futures
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from support.live_server import ANSWER_S, PATIENCE_S, START_TIMEOUT_S

from benchmark.hosts.namespaces import Host, Network, hosts

HTTP_PORT, CLUSTER_PORT = 30000, 20000
PROMPTS = ("<|user|>Hello", "<|user|>What is 17 + 25?", "abc")
NUM_TOKENS = 64


@dataclass
class HostProcess:
    """What a user started on a host; `text` is all that it has printed."""

    process: "subprocess.Popen[str]"
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def until(self, words: str, timeout_s: float = START_TIMEOUT_S) -> str:
        """The first line that has these words. Fails where it does not come in time."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            found = next((line for line in list(self.lines) if words in line), None)
            if found is not None:
                return found
            assert time.monotonic() < deadline_s, f"no {words!r} in:\n{self.text}"
            time.sleep(0.05)

    def stop(self) -> int:
        """Ends it as Ctrl-C would; the exit code."""
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@dataclass
class LiveHosts:
    """A server over the first `count` hosts of a network; others are strangers to it."""

    network: Network
    count: int
    key_file: Path
    flags: Sequence[str]
    processes: dict[int, HostProcess] = field(default_factory=dict)

    @property
    def head(self) -> HostProcess:
        return self.processes[0]

    @property
    def url(self) -> str:
        return f"http://{self.network.hosts[0].address}:{HTTP_PORT}"

    @property
    def cluster_address(self) -> tuple[str, int]:
        return self.network.hosts[0].address, CLUSTER_PORT

    def command(self, rank: int, *more: str) -> list[str]:
        """The same on every host, but for the rank; what comes in `more` goes last and counts."""
        head, port = self.cluster_address
        command = [sys.executable, "-m", "sgl_pipeline.launch_server"]
        command += ["--nnodes", str(self.count), "--node-rank", str(rank)]
        command += ["--dist-init-addr", f"{head}:{port}", "--cluster-key-file", str(self.key_file)]
        command += ["--host", "0.0.0.0", "--port", str(HTTP_PORT), *self.flags]
        return [*command, *more]

    def start(
        self, rank: int, *more: str, on: Host | None = None, env: dict[str, str] | None = None
    ) -> HostProcess:
        """Starts one on its host, or `on` another, and returns at once."""
        host = on or self.network.hosts[rank]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return HostProcess(host.start(*self.command(rank, *more), env=env, **pipes))

    def facts(self) -> dict[str, Any]:
        """The scheduler's part of /server_info."""
        answer = requests.get(f"{self.url}/server_info", timeout=ANSWER_S)
        facts: dict[str, Any] = answer.json()["internal_states"][0]
        return facts

    def until(self, what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until `what`, a Python expression over `facts`, is true."""
        deadline_s = time.monotonic() + timeout_s
        while not eval(what, {}, {"facts": (facts := self.facts())}):
            assert time.monotonic() < deadline_s, f"{what}: {facts}\n{self.head.text}"
            time.sleep(0.1)

    def ask(self, num_tokens: int = NUM_TOKENS) -> "concurrent.futures.Future[list[list[int]]]":
        """The tokens of `PROMPTS`, each asked for in a thread of its own."""
        result: concurrent.futures.Future[list[list[int]]] = concurrent.futures.Future()

        def run() -> None:
            try:
                with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
                    asked = [pool.submit(tokens_of, self.url, one, num_tokens) for one in PROMPTS]
                result.set_result([one.result() for one in asked])
            except Exception as error:
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return result


def new_key(directory: Path) -> Path:
    """The file of a new cluster key."""
    key_file = directory / "cluster.key"
    key_file.touch(mode=0o600)
    key_file.write_text(secrets.token_hex(32))
    return key_file


def tokens_of(url: str, prompt: str, num_tokens: int = NUM_TOKENS) -> list[int]:
    """What a server answers, greedily."""
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    body = {"text": prompt, "sampling_params": sampling}
    answer = requests.post(f"{url}/generate", json=body, timeout=START_TIMEOUT_S)
    answer.raise_for_status()
    return list(answer.json()["output_ids"])


@contextmanager
def live_hosts(
    count: int,
    directory: Path,
    *flags: str,
    strangers: int = 0,
    while_starting: Callable[[LiveHosts], None] = lambda live: None,
    **options: Any,
) -> Iterator[LiveHosts]:
    """A server over `count` hosts, ready; `options` are those of `hosts`."""
    with hosts(count + strangers, **options) as network:
        live = LiveHosts(
            network, count, new_key(directory), ("--cpu-threads-per-stage", "1", *flags)
        )
        for rank in reversed(range(count)):  # the head comes last: agents wait for it
            live.processes[rank] = live.start(rank)
        while_starting(live)
        live.head.until("Ready:")
        yield live


def dial(address: tuple[str, int]) -> socket.socket:
    """A connection of a stranger."""
    return socket.create_connection(address, timeout=10)
