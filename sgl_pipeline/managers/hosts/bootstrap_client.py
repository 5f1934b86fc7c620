"""The role of a prefill or a decode server at its start: the key that both need, the bootstrap
port."""

from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.cluster.keys import read_secret, write_identity
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.hosts.bootstrap_http import PrefillTopology
from sgl_pipeline.managers.hosts.bootstrap_process import LISTENING, BootstrapSetup
from sgl_pipeline.managers.hosts.detached_child import DetachedChild

NEEDED_BY = "a prefill and a decode server (--disaggregation-mode)"


class BootstrapPort:
    """The process behind a prefill server's bootstrap port. It ends when this process does, in
    whatever way, or at `close`.

    Raises ConfigurationError where it cannot listen.
    """

    def __init__(self, setup: BootstrapSetup) -> None:
        self._child = DetachedChild("sgl_pipeline.managers.hosts.bootstrap_process", setup)
        answer = self._child.read_line()
        if answer != LISTENING:
            raise ConfigurationError(answer or "the bootstrap port did not open; see above")

    def close(self) -> None:
        self._child.let_go()


def write_key(args: PipelineArgs) -> None:
    """Writes what this host's processes need to talk to the other server's into the run directory;
    the head of several hosts has done so (`head_client.py`).

    Raises ConfigurationError where there is no key.
    """
    secret = read_secret(args.cluster.key_file, NEEDED_BY)
    if args.cluster.num_hosts == 1:
        write_identity(secret, args.run_directory)


def bootstrap_setup(args: PipelineArgs, host: str, http_port: int) -> BootstrapSetup:
    """The setup of a prefill server's port.

    Args:
        host, http_port: where clients reach the server.
    """
    stages = args.stages
    topology = PrefillTopology(
        pp_size=stages.num_stages,
        page_size=args.scheduling.page_size,
        kv_cache_dtype=stages.kv_dtype,
        prefill_http_port=http_port,
    )
    return BootstrapSetup(args.run_directory, host, args.disaggregation.bootstrap_port, topology)
