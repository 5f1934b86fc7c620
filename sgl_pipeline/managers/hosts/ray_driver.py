"""The Ray driver (`ray_hosts.py`), as the server's main process owns it: started, and kept alive.

It has the life of this process at its standard input. Where Ray itself is lost, and the driver with
it, another one is started until there is a cluster again.
"""

import importlib.util
import logging
import os
import threading
from pathlib import Path

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.hosts.detached_child import DetachedChild
from sgl_pipeline.managers.hosts.early_options import EarlyOptions
from sgl_pipeline.managers.hosts.ray_hosts import CONNECTED, PLACED, RaySetup
from sgl_pipeline.pipeline.assignment import workers_of_host

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE = "RAY_ADDRESS"
CONNECT_LIMIT_S = 60.0
# Beyond the driver's own limit, after which it says more than this process can.
_SLACK_S = 10.0
_STOP_TIMEOUT_S = 5.0
_RESTART_S = 5.0


class RayDriver:
    """Raises ConfigurationError where Ray is not installed.

    Args:
        secret: the cluster's key.
        temporary_directory: the user's; below it Ray looks for a cluster of this host.
    """

    def __init__(self, options: EarlyOptions, secret: bytes, temporary_directory: str) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigurationError(
                "--use-ray needs Ray on every host: pip install 'sgl_pipeline[ray]'"
            )
        self._setup = ray_setup(options, secret)
        self._environment = os.environ | {"TMPDIR": temporary_directory}
        self._is_closing = threading.Event()
        self._lock = threading.Lock()
        self._keeper: threading.Thread | None = None
        self._child = self._start()

    def wait_until_placed(self) -> None:
        """Returns when all hosts have their agents. Raises ConfigurationError where they cannot."""
        for expected, limit_s in (
            (CONNECTED, CONNECT_LIMIT_S),
            (PLACED, self._setup.wait_s + _SLACK_S),
        ):
            answer = self._answer(limit_s)
            if answer != expected:
                raise ConfigurationError(answer)

    def keep(self) -> None:
        """From now on another driver takes the place of one that has ended. Starts a thread."""
        self._keeper = threading.Thread(target=self._restart, daemon=True, name="ray-driver")
        self._keeper.start()

    def close(self) -> None:
        """Has Ray take back the agents."""
        self._is_closing.set()
        with self._lock:
            self._child.close_input()
        # It says nothing more: its output ends when it has ended.
        if self._keeper is not None:
            self._keeper.join(_STOP_TIMEOUT_S)
        else:
            self._child.has_output(_STOP_TIMEOUT_S)
        if self._keeper is None or not self._keeper.is_alive():
            self._child.let_go()

    def _start(self) -> DetachedChild:
        return DetachedChild(
            "sgl_pipeline.managers.hosts.ray_hosts", self._setup, self._environment
        )

    def _answer(self, limit_s: float) -> str:
        if not self._child.has_output(limit_s):
            return (
                f"--use-ray: Ray at {self._setup.address!r} has not answered within {limit_s:g} s; "
                f"look at `ray status`, and at {ADDRESS_VARIABLE}"
            )
        return self._child.read_line() or "--use-ray: the Ray driver has ended; see above"

    def _restart(self) -> None:
        while True:
            answers = self._last_answers()
            if self._is_closing.wait(_RESTART_S):
                return
            logger.warning(
                "the Ray driver has ended (%s), and the agents with it; it is started again",
                answers or "see above",
            )
            with self._lock:
                if self._is_closing.is_set():
                    return
                self._child.let_go()
                self._child = self._start()

    def _last_answers(self) -> str:
        """The last line that the driver says, when it has ended."""
        last = ""
        while line := self._child.read_line():
            last = line
        return last


def ray_setup(options: EarlyOptions, secret: bytes) -> RaySetup:
    """The driver's part of the command line."""
    cluster = options.cluster
    model = options.model
    if model is not None and Path(model).expanduser().exists():
        model = str(Path(model).expanduser().resolve())
    shared = ["--nnodes", str(cluster.num_hosts), "--dist-init-addr", cluster.head_address or ""]
    shared += ["--host-silence-s", str(cluster.silence_s)]
    for flag, value in (
        ("--model-path", model),
        ("--revision", options.revision),
        ("--download-dir", options.cache_dir),
        ("--load-format", options.load_format),
    ):
        shared += [] if value is None else [flag, value]
    ranks = range(1, cluster.num_hosts)
    per_stage = options.cpu_threads or 1
    return RaySetup(
        address=os.environ.get(ADDRESS_VARIABLE) or "auto",
        wait_s=cluster.ray_wait_s,
        cpus=[
            per_stage * len(workers_of_host(options.num_stages, cluster.num_hosts, rank))
            for rank in ranks
        ],
        flags=[[*shared, "--node-rank", str(rank)] for rank in ranks],
        secret=secret,
    )
