"""The doctor's part on every host: it opens the cluster port, and answers the others' probes."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from sgl_pipeline.cluster.cluster_port import ClusterPort
from sgl_pipeline.cluster.doors import Door, split_address
from sgl_pipeline.cluster.link_probe import (
    PROBE_DOOR,
    ProbeFailed,
    answer_probe,
    probe_link,
)
from sgl_pipeline.managers.doctor.doctor_messages import Probed

logger = logging.getLogger(__name__)

# How often each end of a connection is heard of, and how long it may be silent: links are loaded.
PING_INTERVAL_S = 0.5
SILENCE_S = 10.0


@asynccontextmanager
async def host_end(address: str, run_directory: str) -> AsyncIterator[ClusterPort]:
    """The cluster port at `address` (HOST:PORT), with the door for probes.

    Raises ConfigurationError where it cannot listen there.
    """
    port = ClusterPort(*split_address(address), run_directory)
    door = Door(run_directory, PROBE_DOOR)
    loop = asyncio.get_running_loop()

    def accept() -> None:
        while (accepted := door.accept()) is not None:
            # The end of the command waits for none of them.
            arguments = (accepted[0], run_directory)
            threading.Thread(target=answer_probe, args=arguments, daemon=True).start()

    loop.add_reader(door, accept)
    serving = loop.create_task(port.serve())
    try:
        yield port
    finally:
        loop.remove_reader(door)
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        port.close()
        door.close()


async def probe(rank: int, address: str, run_directory: str, window_s: float) -> Probed:
    """Measures the link from here to host `rank`."""
    try:
        reading = await asyncio.to_thread(probe_link, address, run_directory, window_s)
    except ProbeFailed as failure:
        return Probed(rank, None, str(failure))
    return Probed(rank, reading)
