"""Prepares a main process for serving, that of a server and that of an engine.

Imports neither sglang nor torch at its top: they come after the workers have been started, and a
spawned child runs the main module again before it does anything else.
"""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.managers.child_entries import ChildEntry, run_detokenizer, run_scheduler

if TYPE_CHECKING:
    from sgl_pipeline.managers.hosts.head_client import HeadProcess
    from sgl_pipeline.managers.stages.stage_processes import StageProcesses

_SUPPORTED_PYTHONS = ((3, 11), (3, 12))
_FROM_EXTRAS = ("torch", "zmq", "sglang", "torchvision")
# SGLang's package asks for CUDA's packages everywhere: without a GPU it comes without them.
_HOW_TO_INSTALL = (
    "with an NVIDIA GPU, pip install 'sgl_pipeline[cuda]'; without one, pip install "
    "'sgl_pipeline[cpu]' and then pip install --no-deps sglang==0.5.23 torchvision==0.28.0"
)


def why_not_here() -> str | None:
    """The reason why this Python cannot serve at all; None if it can."""
    if sys.version_info[:2] not in _SUPPORTED_PYTHONS:
        supported = " or ".join(f"{major}.{minor}" for major, minor in _SUPPORTED_PYTHONS)
        return f"Python {supported} is needed, this is {sys.version.split()[0]}"
    # Looked up past `torchvision_hook.py`, which would import torch.
    if missing := [name for name in _FROM_EXTRAS if PathFinder.find_spec(name) is None]:
        return f"{missing[0]} is not installed: {_HOW_TO_INSTALL}"
    return None


def set_environment(run_directory: str) -> None:
    """Sets what this process and its children need before they import sglang."""
    # Upstream puts its sockets into the temporary directory.
    os.environ["TMPDIR"] = tempfile.tempdir = run_directory
    # Its own default sends pickles over them.
    os.environ["SGLANG_USE_PICKLE_IPC"] = "false"
    # Its kernels are not used: which version is installed does not matter.
    os.environ["SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"] = "true"
    # It would wait five seconds, once a child has ended, before it dumps schedulers of its own.
    for name in ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
        os.environ.setdefault(name, "false")


def upstream_functions(
    args: PipelineArgs,
    stages: "StageProcesses",
    head: "HeadProcess",
    tokenizer_manager: Callable[..., Any],
) -> dict[str, Callable[..., Any]]:
    """Functions that upstream's launchers take in the place of their own.

    Args:
        tokenizer_manager: makes it, from upstream's arguments and addresses.
    """
    from sglang.srt.entrypoints.engine import init_tokenizer_manager

    from sgl_pipeline.managers.stages.main_process_workers import serve_worker_requests

    own_pipe_end, scheduler_pipe_end = multiprocessing.Pipe()

    def start_front(*arguments: Any, **more: Any) -> Any:
        """Upstream calls it when it has started its children."""
        serve_worker_requests(own_pipe_end, stages)
        head.keep_ray()
        return init_tokenizer_manager(*arguments, TokenizerManagerClass=tokenizer_manager, **more)

    return {
        "init_tokenizer_manager_func": start_front,
        "run_scheduler_process_func": ChildEntry(run_scheduler, args, scheduler_pipe_end),
        "run_detokenizer_process_func": ChildEntry(run_detokenizer),
    }
