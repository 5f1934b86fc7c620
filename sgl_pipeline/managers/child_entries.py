"""Entry functions of upstream's child processes, in place of its own.

Imports neither sglang nor torch at its top: a spawned child imports this module before it asks to
be killed with its parent.
"""

import os
import signal
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.managers.entrance import quiet_start
from sgl_pipeline.managers.server_end import leave
from sgl_pipeline.process_lifetime import die_with_parent

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from sgl_pipeline.pipeline.worker_source import WorkerSource


class ChildEntry:
    """A function for a child process of upstream's, forked or spawned.

    A spawned one is readied while this is being unpickled: the arguments that follow it are
    upstream's, and unpickling those already imports sglang.
    """

    def __init__(
        self, function: Callable[..., None], *arguments: Any, parent_pid: int | None = None
    ) -> None:
        self._parent_pid = parent_pid or os.getpid()
        self._function = function
        self._arguments = arguments

    def __call__(self, *arguments: Any, **more: Any) -> None:
        die_with_parent(self._parent_pid)
        # A fork has upstream's handler, which ends the main process's descendants.
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        try:
            self._function(*self._arguments, *arguments, **more)
        except SystemExit as ending:
            leave(ending.code if isinstance(ending.code, int) else 0)
        leave(0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _enter_child, (self._parent_pid, self._function, *self._arguments)


def _enter_child(parent_pid: int, function: Callable[..., None], *arguments: Any) -> ChildEntry:
    die_with_parent(parent_pid)
    prepare_imports()
    return ChildEntry(function, *arguments, parent_pid=parent_pid)


def run_scheduler(
    pipeline_args: PipelineArgs,
    worker_pipe: "Connection[Any, Any]",
    *upstream: Any,
    **more: Any,
) -> None:
    """The scheduler process. What follows `worker_pipe` is what upstream gives its own."""
    from sgl_pipeline.managers.scheduler_process import run_scheduler_process
    from sgl_pipeline.managers.stages.main_process_workers import MainProcessWorkers

    local = MainProcessWorkers(worker_pipe)
    source: WorkerSource = local
    if pipeline_args.cluster.num_hosts > 1:
        from sgl_pipeline.managers.hosts.cluster_workers import ClusterWorkers

        source = ClusterWorkers(pipeline_args, local)
    run_scheduler_process(pipeline_args, local.first_pids, source, *upstream, **more)


def run_detokenizer(*upstream: Any, **more: Any) -> None:
    """Upstream's Detokenizer, with upstream's messages shown."""
    quiet_start.end()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*upstream, **more)


def prepare_imports() -> None:
    """Readies this process for its first import of sglang."""
    from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

    install_torchvision_shim()
    # It warns of missing GPU kernels, of which none is used here.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")
