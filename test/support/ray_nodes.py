"""A Ray cluster on hosts of namespaces, and a server that has Ray start its other hosts.

Ray is in a folder of its own (`make test-alone` installs requirements/ray.txt there), or on the
path.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.live_hosts import HostProcess, LiveHosts, new_key
from support.live_server import START_TIMEOUT_S

from benchmark.hosts.namespaces import Host, hosts

RAY_PORT, CLIENT_PORT = 6379, 10001
_SPEC = importlib.util.find_spec("ray")
FOLDER = Path(_SPEC.origin).parents[1] if _SPEC and _SPEC.origin else Path(sys.prefix) / "ray"
# A node that is switched off is noticed within seconds.
_QUICK = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
}


def why_no_ray() -> str:
    """What is missing; "" where Ray can be started."""
    if (FOLDER / "ray").is_dir():
        return ""
    return f"Ray is not installed in {FOLDER}; `make test-alone` does it"


def _python_path() -> str:
    return os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])


def start_node(host: Host, head: Host, num_cpus: int, environment: dict[str, str]) -> HostProcess:
    """`ray start` on a host; `head` has what the cluster itself needs."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    command += [f"--node-ip-address={host.address}", f"--num-cpus={num_cpus}"]
    command += ["--object-store-memory=80000000", "--disable-usage-stats"]
    # Hosts of namespaces share files: two nodes that start at once would choose the same names.
    command += [f"--temp-dir={environment['RAY_TMPDIR']}/{host.name}"]
    if host is head:
        command += ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        command += [f"--ray-client-server-port={CLIENT_PORT}"]
    else:
        command += [f"--address={head.address}:{RAY_PORT}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return HostProcess(host.start(*command, env=environment, **pipes))


def placement_groups(head: Host) -> list[str]:
    """The state of each that Ray has ever made."""
    code = (
        "import json, ray\n"
        f"ray.init(address='{head.address}:{RAY_PORT}', logging_level='ERROR')\n"
        "groups = ray.util.placement_group_table().values()\n"
        "print(json.dumps([group['state'] for group in groups]))\n"
    )
    text = head.run("env", f"PYTHONPATH={_python_path()}", sys.executable, "-c", code)
    return list(json.loads(text.splitlines()[-1]))


@dataclass(frozen=True, slots=True)
class LiveRay:
    """A server over two hosts, ready: the first of the network is its head, one of `nodes` has the
    agent. `head` is Ray's own, which has no CPUs for agents; `logs` are Ray's."""

    server: LiveHosts
    head: Host
    nodes: Sequence[Host]
    logs: Path


@contextmanager
def live_ray(
    directory: Path, *flags: str, num_nodes: int = 2, is_head_outside: bool = False
) -> Iterator[LiveRay]:
    """The server's head is on Ray's head, or `is_head_outside` on a host that is none of Ray's
    nodes."""
    with (
        hosts(1 + num_nodes + is_head_outside) as network,
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as logs,
    ):
        head, *others = network.hosts
        ray_head = others.pop() if is_head_outside else head
        # The paths of its sockets are long.
        environment = os.environ | _QUICK | {"RAY_TMPDIR": logs, "PYTHONPATH": _python_path()}
        nodes = [start_node(ray_head, ray_head, 0, environment)]
        nodes[0].until("Ray runtime started", START_TIMEOUT_S)
        nodes += [start_node(host, ray_head, 1, environment) for host in others]
        live = LiveHosts(network, 2, new_key(directory), ("--cpu-threads-per-stage", "1", *flags))
        environment["RAY_ADDRESS"] = (
            f"ray://{ray_head.address}:{CLIENT_PORT}"
            if is_head_outside
            else f"{ray_head.address}:{RAY_PORT}"
        )
        live.processes[0] = live.start(0, "--use-ray", env=environment)
        live.head.until("Ready:", START_TIMEOUT_S)
        yield LiveRay(live, ray_head, others, Path(logs))
