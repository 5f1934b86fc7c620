"""The entry: `python -m sgl_pipeline.launch_server --pp 4`.

Starts the stage workers, then upstream's server with our scheduler process in the place of its own,
and makes sure that all of it ends with it. Never imports sglang or torch at its top: they come
after the workers have been started, and a spawned child runs this module again before it does
anything else.
"""

import contextlib
import dataclasses
import functools
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, NoReturn

from sgl_pipeline import __version__
from sgl_pipeline.args import PipelineArgs, require
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.entrance import quiet_start
from sgl_pipeline.process_lifetime import die_with_parent

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from sgl_pipeline.managers.command_line.server_args import LaunchPlan
    from sgl_pipeline.managers.command_line.upstream_arguments import SglangServerArgs
    from sgl_pipeline.managers.hosts.early_options import EarlyOptions
    from sgl_pipeline.managers.hosts.head_client import HeadProcess
    from sgl_pipeline.managers.run_directory import RunDirectory
    from sgl_pipeline.managers.stages.stage_processes import StageProcesses
    from sgl_pipeline.pipeline.worker_source import WorkerSource

_SUPPORTED_PYTHONS = ((3, 11), (3, 12))
_EXIT_INTERRUPTED = 130
_LAST_SPANS_S = 3.0  # what exporting the last spans may take
_FROM_EXTRAS = ("torch", "zmq", "sglang", "torchvision")
# SGLang's package asks for CUDA's packages everywhere: without a GPU it comes without them.
_HOW_TO_INSTALL = (
    "with an NVIDIA GPU, pip install 'sgl_pipeline[cuda]'; without one, pip install "
    "'sgl_pipeline[cpu]' and then pip install --no-deps sglang==0.5.23 torchvision==0.28.0"
)


def main(argv: list[str] | None = None) -> int:
    """Serves until stopped. Returns the exit code: 0, 130 after Ctrl-C, 1 for an error."""
    try:
        return _launch(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


def _launch(argv: list[str]) -> int:
    if sys.version_info[:2] not in _SUPPORTED_PYTHONS:
        supported = " or ".join(f"{major}.{minor}" for major, minor in _SUPPORTED_PYTHONS)
        return _fail(f"Python {supported} is needed, this is {sys.version.split()[0]}")
    # Looked up past `torchvision_hook.py`, which would import torch.
    if missing := [name for name in _FROM_EXTRAS if PathFinder.find_spec(name) is None]:
        return _fail(f"{missing[0]} is not installed: {_HOW_TO_INSTALL}")
    from sgl_pipeline.managers.hosts.early_options import read_early_options
    from sgl_pipeline.managers.hosts.head_client import HeadProcess
    from sgl_pipeline.managers.run_directory import RunDirectory
    from sgl_pipeline.managers.stages.stage_processes import StageProcesses

    try:
        run_directory = RunDirectory()
    except ConfigurationError as error:
        return _fail(str(error))
    stages, head = StageProcesses(run_directory.path), HeadProcess()
    try:
        early = read_early_options(argv)
        if early is not None and early.cluster.rank > 0:
            return _run_agent(early, run_directory)
        _serve(argv, run_directory, stages, head, early)
    except ConfigurationError as error:
        return _fail(str(error))
    finally:
        _end_children(stages, head)
        run_directory.remove()
    return 0


def run_and_exit(argv: list[str] | None = None) -> NoReturn:
    """`main` as a command."""
    _leave(main(argv))


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


def _run_agent(early: "EarlyOptions", run_directory: "RunDirectory") -> int:
    """This host is not the head: it runs workers for it. Returns the exit code."""
    from sgl_pipeline.managers.command_line.model_files import find_model
    from sgl_pipeline.managers.hosts.agent import run_agent

    model_path = find_model(early.model, early.revision, early.cache_dir)
    return run_agent(early.cluster, model_path, run_directory.path)


def _start_head(
    early: "EarlyOptions",
    run_directory: "RunDirectory",
    stages: "StageProcesses",
    head: "HeadProcess",
) -> None:
    """Opens the port that the other hosts dial, and lets this one's workers know of it."""
    from sgl_pipeline.cluster.interfaces import head_own_address
    from sgl_pipeline.managers.command_line.model_files import find_model
    from sgl_pipeline.managers.stages.stage_processes import WorkerPlace

    model_path = find_model(early.model, early.revision, early.cache_dir)
    head.start(early, model_path, run_directory.path)
    assert early.cluster.head_address is not None
    interface = head_own_address(early.cluster.head_address).interface
    stages.place = WorkerPlace(host_address=early.cluster.head_address, interface=interface)


def _run_scheduler(
    pipeline_args: PipelineArgs,
    stage_pids: Sequence[int],
    worker_pipe: "Connection[Any, Any]",
    *upstream: Any,
    **more: Any,
) -> None:
    from sgl_pipeline.managers.scheduler_process import run_scheduler_process
    from sgl_pipeline.managers.stages.main_process_workers import MainProcessWorkers

    local = MainProcessWorkers(worker_pipe)
    source: WorkerSource = local
    if pipeline_args.cluster.num_hosts > 1:
        from sgl_pipeline.managers.hosts.cluster_workers import ClusterWorkers

        source = ClusterWorkers(pipeline_args, local)
    run_scheduler_process(pipeline_args, stage_pids, source, *upstream, **more)


def _run_detokenizer(*upstream: Any, **more: Any) -> None:
    quiet_start.end()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*upstream, **more)


def _serve(
    argv: list[str],
    run_directory: "RunDirectory",
    stages: "StageProcesses",
    head: "HeadProcess",
    early: "EarlyOptions | None",
) -> None:
    _set_environment(run_directory.path)
    if early is not None and early.cluster.num_hosts > 1:
        _start_head(early, run_directory, stages, head)
    stages.start_unchecked(argv)
    gc.disable()  # SGLang's imports make millions of objects, and hardly any garbage
    quiet_start.begin()
    _prepare_imports()
    from sgl_pipeline.managers.command_line.server_args import (
        check_port_is_free,
        parse_command_line,
    )
    from sgl_pipeline.pipeline.assignment import workers_of_host

    plan = parse_command_line(argv)
    if plan.upstream.log_level == "debug":
        quiet_start.end()
    host, port = plan.upstream.host, plan.upstream.port
    check_port_is_free(host, port)
    pipeline_args = dataclasses.replace(plan.pipeline, run_directory=run_directory.path)
    print(
        f"sgl_pipeline {__version__}: loading {plan.upstream.model_path} on "
        f"{_count_stages(pipeline_args)} of {pipeline_args.stages.device}",
        flush=True,
    )
    cluster, num_stages = pipeline_args.cluster, pipeline_args.stages.num_stages
    if early is not None and (cluster, num_stages) != (early.cluster, early.num_stages):
        require(
            cluster.num_hosts == early.cluster.num_hosts == 1,
            "several hosts (--nnodes) need --nnodes, --node-rank, --dist-init-addr and --pp "
            "written in full, as they are read before all other flags",
        )
    own_stages = workers_of_host(num_stages, cluster.num_hosts, cluster.rank)
    stages.start(len(own_stages), pipeline_args.stages.cpu_threads)
    head.wait_for_ray()

    from sglang.srt.entrypoints.engine import init_tokenizer_manager

    from sgl_pipeline.managers.entrance.front_guard import GuardedTokenizerManager
    from sgl_pipeline.managers.reports.load_report import loads_path
    from sgl_pipeline.managers.stages.main_process_workers import serve_worker_requests

    front = _complete_app(plan, pipeline_args)
    own_pipe_end, scheduler_pipe_end = multiprocessing.Pipe()
    interrupted = threading.Event()
    tokenizer_manager = functools.partial(
        GuardedTokenizerManager,
        loads_path=loads_path(run_directory.path),
        drain_timeout_s=pipeline_args.drain_timeout_s,
        end_now=functools.partial(_end_now, run_directory, stages, head),
        on_interrupt=interrupted.set,
        before_listening=front.before_listening,
        before_closing=front.before_closing,
    )

    def start_front(*arguments: Any, **more: Any) -> Any:
        """Upstream calls it when it has started its children."""
        serve_worker_requests(own_pipe_end, stages)
        head.keep_ray()
        return init_tokenizer_manager(*arguments, TokenizerManagerClass=tokenizer_manager, **more)

    # Never look at all that again, and in the forks leave it on the pages that they share.
    gc.freeze()
    gc.enable()
    try:
        with _start_errors(host, port):
            _upstream_launcher(pipeline_args)(
                plan.upstream,
                init_tokenizer_manager_func=start_front,
                run_scheduler_process_func=ChildEntry(
                    _run_scheduler, pipeline_args, stages.pids, scheduler_pipe_end
                ),
                run_detokenizer_process_func=ChildEntry(_run_detokenizer),
                launch_callback=functools.partial(_announce, plan.upstream, pipeline_args),
            )
    finally:
        front.after_serving()
    if interrupted.is_set():
        raise KeyboardInterrupt


@contextlib.contextmanager
def _start_errors(host: str, port: int) -> Iterator[None]:
    """Raises ConfigurationError for what upstream's server raises when it cannot start."""
    from sgl_pipeline.managers.command_line.server_args import check_port_is_free

    try:
        yield
    except RuntimeError as error:
        # Upstream's word for a scheduler that did not come up; that one has said why.
        raise ConfigurationError(f"the server did not start: {error}") from error
    except SystemExit as error:
        if error.code:  # uvicorn's, where another server was quicker to take the port
            check_port_is_free(host, port)
        raise


@dataclasses.dataclass
class _FrontHooks:
    """What the HTTP server's parts of ours want to be told of."""

    before_listening: Callable[[], None]
    before_closing: Callable[[], None]
    after_serving: Callable[[], None]


def _complete_app(plan: "LaunchPlan", pipeline_args: PipelineArgs) -> _FrontHooks:
    """Adds our routes and checks to upstream's application."""
    from sglang.srt.entrypoints.http_server import app, get_global_state

    from sgl_pipeline.managers.desk_channel import desk_address
    from sgl_pipeline.managers.entrance.live_page import serve_page
    from sgl_pipeline.managers.entrance.live_routes import add_live_routes
    from sgl_pipeline.managers.entrance.ollama_errors import OllamaErrors
    from sgl_pipeline.managers.entrance.pipeline_routes import add_pipeline_routes
    from sgl_pipeline.managers.entrance.request_spans import RequestSpans, open_request_spans
    from sgl_pipeline.managers.entrance.route_guard import guard_routes
    from sgl_pipeline.managers.entrance.streamed_calls import read_calls_piece_by_piece
    from sgl_pipeline.managers.entrance.throttle_body import ServerKeys
    from sgl_pipeline.managers.span_channel import span_address

    run_directory, upstream = pipeline_args.run_directory, plan.upstream
    app.add_middleware(OllamaErrors)
    read_calls_piece_by_piece()
    add_pipeline_routes(
        app,
        desk_address(run_directory),
        pipeline_args.migration.timeout_s,
        ServerKeys(upstream.api_key, upstream.admin_api_key),
    )
    guard_routes(
        app,
        plan.context_length,
        plan.features,
        is_stopping=lambda: get_global_state().tokenizer_manager.gracefully_exit,
    )
    has_page, spans = pipeline_args.ui == "on", list[RequestSpans]()
    hub = None
    if has_page:
        hub = add_live_routes(app, run_directory, has_api_key=bool(upstream.api_key))

    def before_listening() -> None:
        if has_page:
            serve_page(app)
        if upstream.enable_trace:
            spans.append(open_request_spans(span_address(run_directory), upstream))

    def after_serving() -> None:
        for one in spans:
            one.close(_LAST_SPANS_S)

    return _FrontHooks(before_listening, hub.close if hub else _nothing, after_serving)


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
    if not _listens(server_args.port):
        return  # upstream's warm-up was answered by another server, and this one is about to fail
    quiet_start.end()
    url = server_args.url()
    stages = _count_stages(pipeline_args)
    key = " -H 'Authorization: Bearer <api key>'" if server_args.api_key else ""
    body = '{"messages": [{"role": "user", "content": "What is 17 + 25?"}]}'
    print(
        f"\nReady: {server_args.served_model_name} on {stages} at {url}\n"
        f"Try:   curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f"-d '{body}'\n" + (f"Watch: {url}/ui\n" if pipeline_args.ui == "on" else ""),
        flush=True,
    )


def _count_stages(args: PipelineArgs) -> str:
    count = args.stages.num_stages
    return f"{count} stage{'s' * (count > 1)}"


def _listens(port: int) -> bool:
    """Whether a socket of this process waits for connections there."""
    import psutil

    return any(
        one.status == psutil.CONN_LISTEN and one.laddr.port == port
        for one in psutil.Process().net_connections("tcp")
    )


def _nothing() -> None:
    """For a server without a page."""


def _end_children(stages: "StageProcesses", head: "HeadProcess") -> None:
    """Kills what is left of the scheduler, the detokenizer and the stages."""
    # It takes a moment, in which one more Ctrl-C would leave something behind. SIGQUIT is how
    # upstream's watchdog answers a child's end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    head.close()
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    stages.close()


def _end_now(
    run_directory: "RunDirectory", stages: "StageProcesses", head: "HeadProcess", code: int
) -> NoReturn:
    """Ends the whole server from wherever it is, and leaves nothing behind."""
    _end_children(stages, head)
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
