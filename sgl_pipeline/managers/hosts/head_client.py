"""The head process, as the server's main process owns it: started at once, and surely ended.

It is detached, because it still has to tell the agents of the other hosts that the server has
ended. With `--use-ray` the driver that has Ray start those agents comes and goes with it.
"""

import os

from sgl_pipeline.cluster.keys import own_or_new_secret, read_secret, write_identity
from sgl_pipeline.cluster.model_digest import model_digest
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.hosts.detached_child import DetachedChild
from sgl_pipeline.managers.hosts.early_options import EarlyOptions
from sgl_pipeline.managers.hosts.head_process import FAREWELL, LISTENING, HeadSetup
from sgl_pipeline.managers.hosts.ray_driver import RayDriver

STOP_TIMEOUT_S = 2.0


class HeadProcess:
    """Ends when this process does, in whatever way; after `close` with a farewell to the agents."""

    def __init__(self) -> None:
        self._child: DetachedChild | None = None
        self._ray: RayDriver | None = None

    def start(self, options: EarlyOptions, model_path: str, run_directory: str) -> None:
        """Returns when it listens, and Ray is at work. Raises ConfigurationError where it cannot
        listen."""
        read = own_or_new_secret if options.cluster.use_ray else read_secret
        secret = read(options.cluster.key_file)
        write_identity(secret, run_directory)
        setup = HeadSetup(
            run_directory,
            options.cluster,
            options.num_stages,
            options.cpu_threads,
            model_digest(model_path, options.load_format),
        )
        self._child = DetachedChild("sgl_pipeline.managers.hosts.head_process", setup)
        answer = self._child.read_line()
        if answer != LISTENING:
            raise ConfigurationError(answer or "the head process did not start; see above")
        if options.cluster.use_ray:
            # The user's own directory for temporary files is where the run directory is.
            self._ray = RayDriver(options, secret, os.path.dirname(run_directory))

    def wait_for_ray(self) -> None:
        """Returns when the other hosts are placed, where Ray does that. Raises ConfigurationError
        where it cannot."""
        if self._ray is not None:
            self._ray.wait_until_placed()

    def keep_ray(self) -> None:
        """To be called when no more forks will be made: from now on a lost driver is replaced."""
        if self._ray is not None:
            self._ray.keep()

    def close(self) -> None:
        """Ends it, if it was started: the agents learn that the server has ended."""
        if self._child is not None:
            self._say_farewell(self._child)
        if self._ray is not None:
            self._ray.close()

    def _say_farewell(self, child: DetachedChild) -> None:
        try:
            child.write(FAREWELL)
        except BrokenPipeError:
            pass
        else:
            child.has_output(STOP_TIMEOUT_S)  # it writes nothing more: it has ended
        child.let_go()
        self._child = None
