"""A prefill server's bootstrap port: a process of its own beside the server's main process.

`bootstrap_client.py` starts it, before the stages have loaded, so that a taken port is reported
at once. A decode server's scheduler process and stages greet here and are handed over to the doors
of this host; what speaks HTTP is answered here (`bootstrap_http.py`). Imports neither torch nor
sglang.
"""

import asyncio
import functools
import logging
import os
import signal
import sys

import msgspec

from sgl_pipeline.cluster.cluster_port import ClusterPort
from sgl_pipeline.cluster.doors import ROOMS_DOOR, door_path, join_address
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.hosts.bootstrap_http import BootstrapHttp, PrefillTopology
from sgl_pipeline.managers.hosts.detached_child import detach

logger = logging.getLogger(__name__)

# What it says when it listens.
LISTENING = "listening"
PORT_NAME = "the bootstrap port (--disaggregation-bootstrap-port)"


class BootstrapSetup(msgspec.Struct, frozen=True):
    """Setup that the process reads at its start: a line of JSON on its standard input."""

    run_directory: str
    host: str
    port: int
    topology: PrefillTopology


def open_bootstrap_port(setup: BootstrapSetup) -> ClusterPort:
    """The port, which listens. Raises ConfigurationError where it cannot."""
    door = door_path(setup.run_directory, ROOMS_DOOR)
    http = BootstrapHttp(setup.topology, functools.partial(os.path.exists, door))
    return ClusterPort(setup.host, setup.port, setup.run_directory, name=PORT_NAME, other=http)


async def _serve(port: ClusterPort, server: int) -> None:
    """Runs until the server's main process ends, which closes its end of the pipe `server`."""
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(server, ending.set)
    serving = loop.create_task(port.serve())
    await asyncio.wait(
        [serving, loop.create_task(ending.wait())], return_when=asyncio.FIRST_COMPLETED
    )
    if serving.done():
        serving.result()
    serving.cancel()


def main() -> int:
    """Runs as long as the server's main process; the exit code is 0, or 1 for an error."""
    setup, server = detach(BootstrapSetup)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="[bootstrap] %(message)s", level=logging.INFO)
    try:
        port = open_bootstrap_port(setup)
    except ConfigurationError as error:
        print(error, flush=True)
        return 1
    logger.info("bootstrap port %s", join_address(setup.host, setup.port))
    print(LISTENING, flush=True)
    asyncio.run(_serve(port, server))
    return 0


if __name__ == "__main__":
    sys.exit(main())
