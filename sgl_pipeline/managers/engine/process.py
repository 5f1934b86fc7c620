"""The process behind `sgl_pipeline.Engine`: the main process of a pipeline without an HTTP server.

The program that asks for an engine has threads, signal handlers and event loops of its own, and
SGLang's front wants all of those too; so it runs here, and forks its children before it has a
thread. Never imports sglang or torch at its top, as `launch_server.py`.
"""

import argparse
import asyncio
import dataclasses
import functools
import gc
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgspec

from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.channels.last_words import read_last_words
from sgl_pipeline.managers.channels.run_directory import RunDirectory
from sgl_pipeline.managers.child_entries import prepare_imports
from sgl_pipeline.managers.engine.channel import (
    Done,
    Reply,
    StartEngine,
    StartFailed,
    encode_frame,
    read_frame,
)
from sgl_pipeline.managers.entrance import quiet_start
from sgl_pipeline.managers.hosts.early_options import read_early_options
from sgl_pipeline.managers.hosts.head_client import HeadProcess
from sgl_pipeline.managers.main_process import set_environment, upstream_functions, why_not_here
from sgl_pipeline.managers.server_end import end_children, leave
from sgl_pipeline.managers.stages.stage_processes import StageProcesses
from sgl_pipeline.managers.upstream.upstream_fields import SERVER_ONLY
from sgl_pipeline.process_lifetime import die_with_parent

if TYPE_CHECKING:
    from sgl_pipeline.managers.command_line.server_args import LaunchPlan
    from sgl_pipeline.managers.engine.desk import EngineDesk

LOG_LEVEL = "error"  # that of SGLang's Engine


def main(connection: socket.socket) -> None:
    """Serves the program at the other end until it wants no more, or is gone."""
    with connection.makefile("rb") as stream:
        payload = read_frame(cast(BinaryIO, stream))
    if payload is None:
        return
    start = msgspec.msgpack.decode(payload, type=StartEngine)
    # The program must see the end of this process, whatever forks of it live.
    os.register_at_fork(after_in_child=connection.close)
    try:
        if (reason := why_not_here()) is not None:
            raise ConfigurationError(reason)
        _run(connection, start)
    except ConfigurationError as error:
        kind = type(error).__name__
        connection.sendall(encode_frame(StartFailed(start.call, kind, str(error))))


def _run(connection: socket.socket, start: StartEngine) -> None:
    run_directory = RunDirectory()
    stages, head = StageProcesses(run_directory.path), HeadProcess()
    try:
        set_environment(run_directory.path)
        gc.disable()  # as for a server
        plan, args = _read_arguments(start.arguments, run_directory.path, stages)
        manager, scheduler_info = _start_children(plan, args, stages, head)
        connection.sendall(encode_frame(Reply(start.call, None)))
        connection.sendall(encode_frame(Done(start.call)))
        asyncio.run(_serve(connection, manager, scheduler_info, run_directory.path))
    finally:
        end_children(stages, head)
        run_directory.remove()


def _read_arguments(
    arguments: Mapping[str, Any], run_directory: str, stages: StageProcesses
) -> tuple["LaunchPlan", PipelineArgs]:
    """Reads the keywords while the workers start."""
    early = read_early_options(_early_words(arguments))
    if early is not None and early.cluster.num_hosts == 1:
        forks = early.device == "cpu"
        stages.start_unchecked(early.num_stages, 1, early.cpu_threads, forks=forks)
    quiet_start.begin()
    prepare_imports()
    from sgl_pipeline.managers.command_line.keyword_arguments import parse_keywords

    plan = parse_keywords({"log_level": LOG_LEVEL, **arguments})
    quiet_start.end()
    args = dataclasses.replace(plan.pipeline, run_directory=run_directory, ui="off")
    forks = args.stages.device == "cpu"
    stages.start(args.stages.num_stages, args.stages.cpu_threads, forks=forks)
    return plan, args


def _early_words(arguments: Mapping[str, Any]) -> list[str]:
    """A rough command line, made before SGLang's parser is there."""
    return [
        f"--{name.replace('_', '-')}={value}"
        for name, value in arguments.items()
        if isinstance(value, str | int)
        and not isinstance(value, bool)
        and name not in SERVER_ONLY  # refused by name, later
    ]


def _start_children(
    plan: "LaunchPlan", args: PipelineArgs, stages: StageProcesses, head: HeadProcess
) -> tuple[Any, dict[str, Any]]:
    """Starts all that a server has beside its routes. Returns the TokenizerManager and the
    scheduler's ready message; raises ConfigurationError with what the scheduler process said."""
    from sgl_pipeline.managers.entrance.front_guard import GuardedTokenizerManager

    gc.freeze()
    gc.enable()
    functions = upstream_functions(args, stages, head, GuardedTokenizerManager)
    try:
        manager, _, _, started, watchdog, _ = _upstream_engine(args)._launch_subprocesses(
            plan.upstream, **functions
        )
    except RuntimeError as error:
        reason = read_last_words(args.run_directory) or str(error)
        raise ConfigurationError(f"the engine did not start: {reason}") from error
    manager._subprocess_watchdog = watchdog
    return manager, started.scheduler_infos[0]


def _upstream_engine(args: PipelineArgs) -> Any:
    """The class that launches upstream's processes, as forks where that is safe."""
    if args.stages.device == "cuda":
        from sglang.srt.entrypoints.engine import Engine

        return Engine
    from sgl_pipeline.managers.forked_children import ForkingEngine

    return ForkingEngine


async def _serve(
    connection: socket.socket, manager: Any, scheduler_info: dict[str, Any], run_directory: str
) -> None:
    from sgl_pipeline.managers.engine.desk import EngineDesk

    connection.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    desk = EngineDesk(manager, scheduler_info, reader, writer)
    manager.signal_handler_class = functools.partial(_ChildSignals, desk, run_directory)
    manager.auto_create_handle_loop()
    await desk.serve()


class _ChildSignals:
    """The handlers that upstream's manager installs: the engine's end, at anyone's request.

    Upstream's watchdog answers a child's end with SIGQUIT.
    """

    def __init__(self, desk: "EngineDesk", run_directory: str, manager: Any) -> None:
        self._desk = desk
        self._run_directory = run_directory

    def sigterm_handler(self) -> None:
        self._desk.fail("its process got SIGTERM")

    def running_phase_sigquit_handler(self) -> None:
        reason = read_last_words(self._run_directory)
        self._desk.fail(reason or "the scheduler process or the detokenizer was killed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent)
    main(socket.socket(fileno=options.socket))
    leave(0)
