"""Our server and vLLM over hosts of namespaces: started on each of them, waited for and ended.

Used by the measurements of this folder. The head is the first host.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from benchmark.hosts.namespaces import Network
from benchmark.support.paths import SCRATCH, VLLM_DIRECTORY
from benchmark.support.peer_engines import bind_threads, vllm_command
from benchmark.support.starts import answers, wait_for_start

HTTP_PORT, CLUSTER_PORT = 30000, 20000
_STOP_TIMEOUT_S = 60.0


def cluster_flags(network: Network, rank: int) -> list[str]:
    """The flags of server and doctor that make `network` one cluster, whose key is made anew by
    rank 0."""
    key = SCRATCH / "cluster.key"
    if rank == 0:
        key.touch(mode=0o600)
        key.write_text(secrets.token_hex(32))
    address = f"{network.hosts[0].address}:{CLUSTER_PORT}"
    flags = ["--nnodes", str(len(network.hosts)), "--node-rank", str(rank)]
    return [*flags, "--dist-init-addr", address, "--cluster-key-file", str(key)]


def served(network: Network, model: Path, *flags: str) -> AbstractContextManager[str]:
    """The address of our server over all hosts, one stage each, ready.

    Raises EngineFailure where it does not come up.
    """
    own = [sys.executable, "-m", "sgl_pipeline.launch_server", "--model-path", str(model)]
    own += ["--pp", str(len(network.hosts)), "--host", "0.0.0.0", "--port", str(HTTP_PORT)]
    own += ["--policy", "throttle", "--disable-radix-cache", *flags]
    ranks = range(len(network.hosts))
    commands = [[*own, *cluster_flags(network, rank)] for rank in ranks]
    return _running(network, commands, [{} for _ in ranks], SCRATCH / "hosts.log")


def vllm_served(
    network: Network, model: Path, environment: Mapping[str, str]
) -> AbstractContextManager[str]:
    """The same of vLLM; `environment` is what `vllm_environment` says."""
    ranks = range(len(network.hosts))
    commands = [vllm_host_command(network, model, rank) for rank in ranks]
    environments = [{**environment, **vllm_host_environment(network, rank)} for rank in ranks]
    return _running(network, commands, environments, SCRATCH / "hosts_vllm.log")


def vllm_host_command(network: Network, model: Path, rank: int) -> list[str]:
    """The command of one host. Only rank 0 answers clients, by the name `model`."""
    num_hosts = len(network.hosts)
    command = [*vllm_command(VLLM_DIRECTORY, model, model, num_hosts), "--no-enable-prefix-caching"]
    command += ["--nnodes", str(num_hosts), "--node-rank", str(rank)]
    command += ["--master-addr", network.hosts[0].address, "--distributed-executor-backend", "mp"]
    if rank == 0:
        return [*command, "--host", "0.0.0.0", "--port", str(HTTP_PORT)]
    return [*command, "--headless"]


def vllm_host_environment(network: Network, rank: int) -> dict[str, str]:
    """A thread on each of the host's cores, and the host's only interface."""
    host = network.hosts[rank]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": bind_threads(host.cores, 1),
        "VLLM_HOST_IP": host.address,
        "GLOO_SOCKET_IFNAME": "eth0",
    }


@contextmanager
def _running(
    network: Network,
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    log_path: Path,
) -> Iterator[str]:
    """By rank, what each host runs and what is in its environment beside ours."""
    processes = []
    with log_path.open("w") as log:
        for host, command, environment in zip(network.hosts, commands, environments, strict=True):
            options = {"stdout": log, "stderr": subprocess.STDOUT}
            processes.append(host.start(*command, env=os.environ | environment, **options))
        try:
            url = f"http://{network.hosts[0].address}:{HTTP_PORT}"
            wait_for_start("the server", lambda: answers(url), processes, log_path)
            yield url
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(_STOP_TIMEOUT_S)
