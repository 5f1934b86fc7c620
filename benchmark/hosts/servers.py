"""Our server over hosts of namespaces: started on each of them, waited for and ended.

Used by the measurements of this folder. The head is the first host.
"""

import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import requests

from benchmark.hosts.namespaces import Network
from benchmark.support.engines import EngineFailure
from benchmark.support.paths import SCRATCH

HTTP_PORT, CLUSTER_PORT = 30000, 20000
START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0


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
    processes = []
    with (SCRATCH / "hosts.log").open("w") as log:
        for rank, host in enumerate(network.hosts):
            options = {"stdout": log, "stderr": subprocess.STDOUT}
            processes.append(host.start(*own, *cluster_flags(network, rank), **options))
        try:
            url = f"http://{network.hosts[0].address}:{HTTP_PORT}"
            _wait_until_ready(processes, url, Path(log.name))
            yield url
        finally:
            for process in processes:
                process.terminate()
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
