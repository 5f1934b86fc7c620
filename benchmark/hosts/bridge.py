"""The kernel's own network between hosts of namespaces: a bridge, with a veth pair to each host.

It takes far less of the processors than `switch.py`, and has no cables that can be set.
"""

import re
import subprocess
from pathlib import Path

_NAME = re.compile(r"\d+: (sglp(\d+)\.\d+):")


def ip(*arguments: str) -> str:
    """The output of iproute2's `ip`. Raises CalledProcessError where it fails."""
    return subprocess.run(["ip", *arguments], text=True, capture_output=True, check=True).stdout


def add_bridge(name: str) -> None:
    """A bridge without ports; `name` holds the process id of its maker, as `sglp<pid>.<number>`."""
    ip("link", "add", name, "type", "bridge")


def add_port(bridge: str, device: str) -> None:
    """A veth pair: `device`, which may go into a namespace, and a port of the bridge."""
    port = f"{device}p"
    ip("link", "add", port, "type", "veth", "peer", "name", device)
    ip("link", "set", port, "master", bridge, "up")


def remove_bridge(name: str) -> None:
    """Removes it with its veth pairs. A namespace takes its end of a pair along, but later: so
    remove bridges before namespaces."""
    for line in ip("-o", "link", "show", "master", name).splitlines():
        ip("link", "delete", line.split()[1].partition("@")[0])
    ip("link", "delete", name)


def remove_left_bridges() -> list[str]:
    """Removes the bridges of processes that have ended without doing so; returns their names."""
    left = []
    for line in ip("-o", "link", "show", "type", "bridge").splitlines():
        found = _NAME.match(line)
        if found and not Path("/proc", found[2]).exists():
            remove_bridge(found[1])
            left.append(found[1])
    return left
