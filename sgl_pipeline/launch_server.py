"""The entry: `python -m sgl_pipeline.launch_server --pp 4`.

Starts the stage workers, then upstream's server with our scheduler process in the place of its own,
and sees to it that all of it goes away again. Never imports sglang or torch at its top: they come
after the workers have been started, and a spawned child runs this module again before it does
anything else.
"""

import dataclasses
import functools
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from sgl_pipeline.args import PipelineArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.process_lifetime import die_with_parent

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from sgl_pipeline.managers.command_line.upstream_arguments import SglangServerArgs
    from sgl_pipeline.managers.run_directory import RunDirectory
    from sgl_pipeline.managers.stages.stage_processes import StageProcesses

_SUPPORTED_PYTHONS = ((3, 11), (3, 12))
_EXIT_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Serves until stopped. Returns the exit code: 0, 130 after Ctrl-C, 1 for an error."""
    if sys.version_info[:2] not in _SUPPORTED_PYTHONS:
        supported = " or ".join(f"{major}.{minor}" for major, minor in _SUPPORTED_PYTHONS)
        return _fail(f"Python {supported} is needed, this is {sys.version.split()[0]}")
    from sgl_pipeline.managers.run_directory import RunDirectory
    from sgl_pipeline.managers.stages.stage_processes import StageProcesses

    try:
        run_directory = RunDirectory()
    except ConfigurationError as error:
        return _fail(str(error))
    stages = StageProcesses(run_directory.path)
    try:
        _serve(sys.argv[1:] if argv is None else argv, run_directory, stages)
    except ConfigurationError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    finally:
        _end_children(stages)
        run_directory.remove()
    return 0


def run_and_exit() -> NoReturn:
    """`main` as a command."""
    _leave(main())


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
            _leave(ending.code if isinstance(ending.code, int) else 0)
        _leave(0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _enter_child, (self._parent_pid, self._function, *self._arguments)


def _enter_child(parent_pid: int, function: Callable[..., None], *arguments: Any) -> ChildEntry:
    die_with_parent(parent_pid)
    _prepare_imports()
    return ChildEntry(function, *arguments, parent_pid=parent_pid)


def _run_scheduler(
    pipeline_args: PipelineArgs,
    stage_pids: Sequence[int],
    worker_pipe: "Connection[Any, Any]",
    *upstream: Any,
    **more: Any,
) -> None:
    from sgl_pipeline.managers.scheduler_process import run_scheduler_process
    from sgl_pipeline.managers.stages.main_process_workers import MainProcessWorkers

    source = MainProcessWorkers(worker_pipe)
    run_scheduler_process(pipeline_args, stage_pids, source, *upstream, **more)


def _run_detokenizer(*upstream: Any, **more: Any) -> None:
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*upstream, **more)


def _serve(argv: list[str], run_directory: "RunDirectory", stages: "StageProcesses") -> None:
    _set_environment(run_directory.path)
    stages.start_unchecked(argv)
    gc.disable()  # SGLang's imports make millions of objects, and hardly any garbage
    _prepare_imports()
    from sgl_pipeline.managers.command_line.server_args import (
        check_port_is_free,
        parse_command_line,
    )

    plan = parse_command_line(argv)
    host, port = plan.upstream.host, plan.upstream.port
    check_port_is_free(host, port)
    pipeline_args = dataclasses.replace(plan.pipeline, run_directory=run_directory.path)
    stages.start(pipeline_args.stages.num_stages, pipeline_args.stages.cpu_threads)

    from sglang.srt.entrypoints.engine import init_tokenizer_manager
    from sglang.srt.entrypoints.http_server import app, get_global_state

    from sgl_pipeline.managers.desk_channel import desk_address
    from sgl_pipeline.managers.entrance.front_guard import GuardedTokenizerManager
    from sgl_pipeline.managers.entrance.live_page import serve_page
    from sgl_pipeline.managers.entrance.live_routes import add_live_routes
    from sgl_pipeline.managers.entrance.ollama_errors import OllamaErrors
    from sgl_pipeline.managers.entrance.pipeline_routes import add_pipeline_routes
    from sgl_pipeline.managers.entrance.route_guard import guard_routes
    from sgl_pipeline.managers.entrance.streamed_calls import read_calls_piece_by_piece
    from sgl_pipeline.managers.entrance.throttle_body import ServerKeys
    from sgl_pipeline.managers.reports.load_report import loads_path
    from sgl_pipeline.managers.stages.main_process_workers import serve_worker_requests

    app.add_middleware(OllamaErrors)
    read_calls_piece_by_piece()
    add_pipeline_routes(
        app,
        desk_address(run_directory.path),
        pipeline_args.migration.timeout_s,
        ServerKeys(plan.upstream.api_key, plan.upstream.admin_api_key),
    )
    guard_routes(
        app,
        plan.context_length,
        plan.features,
        is_stopping=lambda: get_global_state().tokenizer_manager.gracefully_exit,
    )
    before_listening = before_closing = _nothing
    if pipeline_args.ui == "on":
        has_api_key = bool(plan.upstream.api_key)
        before_closing = add_live_routes(app, run_directory.path, has_api_key=has_api_key).close
        before_listening = functools.partial(serve_page, app)
    own_pipe_end, scheduler_pipe_end = multiprocessing.Pipe()
    tokenizer_manager = functools.partial(
        GuardedTokenizerManager,
        loads_path=loads_path(run_directory.path),
        drain_timeout_s=pipeline_args.drain_timeout_s,
        end_now=functools.partial(_end_now, run_directory, stages),
        before_listening=before_listening,
        before_closing=before_closing,
    )

    def start_front(*arguments: Any, **more: Any) -> Any:
        """Upstream calls it when it has started its children."""
        serve_worker_requests(own_pipe_end, stages)
        return init_tokenizer_manager(*arguments, TokenizerManagerClass=tokenizer_manager, **more)

    # Never look at all that again, and in the forks leave it on the pages that they share.
    gc.freeze()
    gc.enable()
    try:
        _upstream_launcher(pipeline_args)(
            plan.upstream,
            init_tokenizer_manager_func=start_front,
            run_scheduler_process_func=ChildEntry(
                _run_scheduler, pipeline_args, stages.pids, scheduler_pipe_end
            ),
            run_detokenizer_process_func=ChildEntry(_run_detokenizer),
            launch_callback=functools.partial(_announce, plan.upstream, pipeline_args),
        )
    except RuntimeError as error:
        # Upstream's word for a scheduler that did not come up; that one has said why.
        raise ConfigurationError(f"the server did not start: {error}") from error


def _upstream_launcher(pipeline_args: PipelineArgs) -> Callable[..., None]:
    """What starts upstream's server, with forked children where that is safe."""
    if pipeline_args.stages.device == "cuda":
        from sglang.srt.entrypoints.http_server import launch_server

        return launch_server
    from sgl_pipeline.managers.forked_children import launch_server_forking

    return launch_server_forking


def _set_environment(run_directory: str) -> None:
    """What must hold in this process and all that it starts, before sglang is imported."""
    # Upstream puts its sockets into the temporary directory.
    os.environ["TMPDIR"] = tempfile.tempdir = run_directory
    # Its own default sends pickles over them.
    os.environ["SGLANG_USE_PICKLE_IPC"] = "false"
    # Its kernels are not used: which version is installed does not matter.
    os.environ["SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"] = "true"


def _prepare_imports() -> None:
    """Readies this process for its first import of sglang."""
    from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

    install_torchvision_shim()
    # It warns of missing GPU kernels, of which none is used here.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")


def _announce(server_args: "SglangServerArgs", pipeline_args: PipelineArgs) -> None:
    url = server_args.url()
    stages = pipeline_args.stages.num_stages
    key = " -H 'Authorization: Bearer <api key>'" if server_args.api_key else ""
    body = '{"messages": [{"role": "user", "content": "What is 17 + 25?"}]}'
    print(
        f"\nReady: {server_args.served_model_name} on {stages} stage{'s' * (stages > 1)} at {url}\n"
        f"Try:   curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f"-d '{body}'\n" + (f"Watch: {url}/ui\n" if pipeline_args.ui == "on" else ""),
        flush=True,
    )


def _nothing() -> None:
    """For a server without a page."""


def _end_children(stages: "StageProcesses") -> None:
    """Kills what is left of the scheduler, the detokenizer and the stages."""
    # Upstream's watchdog answers a child's end with SIGQUIT to this process.
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    stages.close()


def _end_now(run_directory: "RunDirectory", stages: "StageProcesses", code: int) -> NoReturn:
    """Ends the whole server from wherever it is, and leaves nothing behind."""
    _end_children(stages)
    run_directory.remove()
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Ends this process without the interpreter's own clean-up, in which upstream's extension
    modules print pages of leak warnings. All that matters must have been cleaned up before."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fail(message: str) -> int:
    print(f"sgl_pipeline: error: {message}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    run_and_exit()
