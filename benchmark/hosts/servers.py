"""Servers over hosts of namespaces, ours and vLLM: started on each host, waited for and ended.

Used by the measurements of this folder. A server's head is on the first host.
"""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import requests

from benchmark.hosts.namespaces import Network
from benchmark.peers.install_vllm_cpu import vllm_environment
from benchmark.support.engines import EngineFailure
from benchmark.support.paths import SCRATCH, VLLM_DIRECTORY

HTTP_PORT, CLUSTER_PORT = 30000, 20000
START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0

# The command of the host with that rank.
CommandOf = Callable[[int], Sequence[str]]


def cluster_flags(network: Network, rank: int) -> list[str]:
    """Those of server and doctor that make `network` one cluster, whose key is made anew by rank
    0."""
    key = SCRATCH / "cluster.key"
    if rank == 0:
        key.touch(mode=0o600)
        key.write_text(secrets.token_hex(32))
    address = f"{network.hosts[0].address}:{CLUSTER_PORT}"
    flags = ["--nnodes", str(len(network.hosts)), "--node-rank", str(rank)]
    return [*flags, "--dist-init-addr", address, "--cluster-key-file", str(key)]


@contextmanager
def served(network: Network, model: Path, *flags: str) -> Iterator[str]:
    """The address of our server over all hosts, one stage each, ready.

    Raises EngineFailure where it does not come up.
    """
    own = [sys.executable, "-m", "sgl_pipeline.launch_server", "--model-path", str(model)]
    own += ["--pp", str(len(network.hosts)), "--host", "0.0.0.0", "--port", str(HTTP_PORT)]
    own += ["--disable-radix-cache", *flags]
    with _running(network, "ours", lambda rank: [*own, *cluster_flags(network, rank)]) as url:
        yield url


@contextmanager
def vllm_served(network: Network, model: Path) -> Iterator[str]:
    """The address of vLLM over all hosts, one stage each, ready.

    Raises EngineFailure where it does not come up, ConfigurationError where it is not installed.
    """
    own = [str(VLLM_DIRECTORY / "bin" / "vllm"), "serve", str(model), "--dtype", "bfloat16"]
    own += ["--pipeline-parallel-size", str(len(network.hosts)), "--max-model-len", "4096"]
    own += ["--no-enable-prefix-caching", "--distributed-executor-backend", "mp"]
    own += ["--nnodes", str(len(network.hosts)), "--master-addr", network.hosts[0].address]

    def command(rank: int) -> list[str]:
        ends = ["--headless"] if rank else ["--host", "0.0.0.0", "--port", str(HTTP_PORT)]
        return [*own, "--node-rank", str(rank), *ends]

    environments = [
        vllm_environment(VLLM_DIRECTORY)
        | {
            "VLLM_HOST_IP": host.address,
            "GLOO_SOCKET_IFNAME": "eth0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, host.cores)),
        }
        for host in network.hosts
    ]
    with _running(network, "vllm", command, environments) as url:
        yield url


@contextmanager
def _running(
    network: Network,
    name: str,
    command: CommandOf,
    environments: Sequence[Mapping[str, str]] = (),
) -> Iterator[str]:
    processes = []
    with (SCRATCH / f"hosts_{name}.log").open("w") as log:
        for rank, host in enumerate(network.hosts):
            environment = os.environ | (environments[rank] if environments else {})
            options = {"stdout": log, "stderr": subprocess.STDOUT, "env": environment}
            processes.append(host.start(*command(rank), **options))
        try:
            url = f"http://{network.hosts[0].address}:{HTTP_PORT}"
            _wait_until_ready(processes, url, Path(log.name))
            yield url
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(_STOP_TIMEOUT_S)


def _wait_until_ready(processes: Sequence["subprocess.Popen[str]"], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not _answers(url):
        ended = any(process.poll() is not None for process in processes)
        if ended or time.monotonic() > deadline_s:
            raise EngineFailure(f"the server is not up; see {log}")
        time.sleep(0.5)


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/v1/models", timeout=5).status_code == 200
    except requests.RequestException:
        return False
