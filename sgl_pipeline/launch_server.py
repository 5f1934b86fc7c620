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
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from sgl_pipeline import __version__
from sgl_pipeline.args import PipelineArgs, require
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.child_entries import prepare_imports
from sgl_pipeline.managers.entrance import quiet_start
from sgl_pipeline.managers.main_process import set_environment, upstream_functions, why_not_here
from sgl_pipeline.managers.server_end import end_children, end_now, leave

if TYPE_CHECKING:
    from sgl_pipeline.managers.channels.run_directory import RunDirectory
    from sgl_pipeline.managers.command_line.server_args import LaunchPlan
    from sgl_pipeline.managers.hosts.early_options import EarlyOptions
    from sgl_pipeline.managers.hosts.head_client import HeadProcess
    from sgl_pipeline.managers.stages.stage_processes import StageProcesses
    from sgl_pipeline.managers.upstream.upstream_arguments import SglangServerArgs

_EXIT_INTERRUPTED = 130
_LAST_SPANS_S = 3.0  # the limit for exporting the last spans
_LISTEN_S, _LISTEN_POLL_S = 20.0, 0.05  # seconds


def main(argv: list[str] | None = None) -> int:
    """Serves until stopped. Returns the exit code: 0, 130 after Ctrl-C, 1 for an error."""
    try:
        return _launch(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


def _launch(argv: list[str]) -> int:
    if (reason := why_not_here()) is not None:
        return _fail(reason)
    from sgl_pipeline.managers.channels.run_directory import RunDirectory
    from sgl_pipeline.managers.hosts.early_options import read_early_options
    from sgl_pipeline.managers.hosts.head_client import HeadProcess
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
        end_children(stages, head)
        run_directory.remove()
    return 0


def run_and_exit(argv: list[str] | None = None) -> NoReturn:
    """`main` as a command."""
    leave(main(argv))


def _run_agent(early: "EarlyOptions", run_directory: "RunDirectory") -> int:
    """This host is not the head: it runs workers for it. Returns the exit code."""
    from sgl_pipeline.managers.command_line.model_files import find_model
    from sgl_pipeline.managers.hosts.agent import run_agent

    model_path = find_model(early.model, early.revision, early.cache_dir, early.load_format)
    return run_agent(early, model_path, run_directory.path)


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

    model_path = find_model(early.model, early.revision, early.cache_dir, early.load_format)
    head.start(early, model_path, run_directory.path)
    assert early.cluster.head_address is not None
    interface = head_own_address(early.cluster.head_address).interface
    stages.place = WorkerPlace(host_address=early.cluster.head_address, interface=interface)


def _serve(
    argv: list[str],
    run_directory: "RunDirectory",
    stages: "StageProcesses",
    head: "HeadProcess",
    early: "EarlyOptions | None",
) -> None:
    """Starts workers, reads the flags, and runs the server until it ends."""
    from sgl_pipeline.managers.command_line.model_files import require_model

    set_environment(run_directory.path)
    if early is not None:
        if not {"-h", "--help"} & {*argv}:
            require_model(early.model, early.load_format)  # before the seconds that SGLang takes
        num_hosts = early.cluster.num_hosts
        if num_hosts > 1:
            _start_head(early, run_directory, stages, head)
        forks = early.device == "cpu"
        stages.start_unchecked(early.num_stages, num_hosts, early.cpu_threads, forks=forks)
    gc.disable()  # SGLang's imports make millions of objects, and hardly any garbage
    quiet_start.begin()
    prepare_imports()
    plan, args = _read_flags(argv, run_directory)
    _check_early_options(early, args)
    interrupted = threading.Event()
    with contextlib.ExitStack() as stack:
        if args.disaggregation.is_on:
            _take_role(plan, args, stack)
        own_stages = _own_stages(args)
        forks = args.stages.device == "cpu"
        stages.start(len(own_stages), args.stages.cpu_threads, forks=forks)
        head.wait_for_ray()
        hooks = _complete_app(plan, args, stack)
        _run_upstream(plan, args, run_directory, stages, head, hooks, interrupted)
    if interrupted.is_set():
        raise KeyboardInterrupt


def _read_flags(
    argv: list[str], run_directory: "RunDirectory"
) -> tuple["LaunchPlan", PipelineArgs]:
    """Reads the command line and prints what is about to be loaded."""
    from sgl_pipeline.managers.command_line.server_args import (
        check_port_is_free,
        parse_command_line,
    )

    plan = parse_command_line(argv)
    if plan.upstream.log_level == "debug":
        quiet_start.end()
    check_port_is_free(plan.upstream.host, plan.upstream.port)
    args = dataclasses.replace(plan.pipeline, run_directory=run_directory.path)
    print(
        f"sgl_pipeline {__version__}: loading {plan.upstream.model_path} on "
        f"{_count_stages(args)} of {args.stages.device}",
        flush=True,
    )
    return plan, args


def _check_early_options(early: "EarlyOptions | None", args: PipelineArgs) -> None:
    """Raises ConfigurationError where several hosts' flags were read differently the first time."""
    cluster = args.cluster
    read = (cluster, args.stages.num_stages, args.stages.load_format)
    if early is not None and read != (early.cluster, early.num_stages, early.load_format):
        require(
            cluster.num_hosts == early.cluster.num_hosts == 1,
            "several hosts (--nnodes) need --nnodes, --node-rank, --dist-init-addr, --pp and "
            "--load-format written in full, as they are read before all other flags",
        )


def _take_role(plan: "LaunchPlan", args: PipelineArgs, stack: contextlib.ExitStack) -> None:
    """Prepares a prefill or a decode server for its peers; `stack` closes what this opens."""
    from sgl_pipeline.managers.hosts.bootstrap_client import (
        BootstrapPort,
        bootstrap_setup,
        write_key,
    )

    write_key(args)
    if args.disaggregation.mode == "prefill":
        port = BootstrapPort(bootstrap_setup(args, plan.upstream.host, plan.upstream.port))
        stack.callback(port.close)


def _own_stages(args: PipelineArgs) -> Sequence[int]:
    """The stages whose workers run on this host."""
    from sgl_pipeline.pipeline.assignment import workers_of_host

    return workers_of_host(args.stages.num_stages, args.cluster.num_hosts, args.cluster.rank)


def _run_upstream(
    plan: "LaunchPlan",
    args: PipelineArgs,
    run_directory: "RunDirectory",
    stages: "StageProcesses",
    head: "HeadProcess",
    hooks: "_FrontHooks",
    interrupted: threading.Event,
) -> None:
    """Runs upstream's server, with our scheduler and front, until it ends. A Ctrl-C that ends it
    sets `interrupted`."""
    from sgl_pipeline.managers.entrance.http_front import HttpTokenizerManager
    from sgl_pipeline.managers.entrance.request_tenant import RequestTenants
    from sgl_pipeline.managers.reports.load_report import loads_path

    by = args.scheduling.fair_shares_by
    tokenizer_manager = functools.partial(
        HttpTokenizerManager,
        loads_path=loads_path(run_directory.path),
        drain_timeout_s=args.drain_timeout_s,
        end_now=functools.partial(end_now, run_directory, stages, head),
        on_interrupt=interrupted.set,
        before_listening=hooks.before_listening,
        before_closing=hooks.before_closing,
        tenants=None if by is None else RequestTenants(by),
    )

    # Never look at all that again, and in the forks leave it on the pages that they share.
    gc.freeze()
    gc.enable()
    with _start_errors(plan.upstream.host, plan.upstream.port):
        _upstream_launcher(args)(
            plan.upstream,
            **upstream_functions(args, stages, head, tokenizer_manager),
            launch_callback=functools.partial(_announce, plan.upstream, args),
        )


@contextlib.contextmanager
def _start_errors(host: str, port: int) -> Iterator[None]:
    """Raises ConfigurationError for what upstream's server raises when it cannot start."""
    from sgl_pipeline.managers.command_line.server_args import check_port_is_free

    try:
        yield
    except RuntimeError as error:
        # Upstream raises it when the scheduler process does not come up, which has said why.
        raise ConfigurationError(f"the server did not start: {error}") from error
    except SystemExit as error:
        if error.code:  # uvicorn's, where another server was quicker to take the port
            check_port_is_free(host, port)
        raise


@dataclasses.dataclass
class _FrontHooks:
    """The work of our parts of the HTTP server at its start and end."""

    before_listening: Callable[[], None]
    before_closing: Callable[[], None]


def _complete_app(
    plan: "LaunchPlan", pipeline_args: PipelineArgs, stack: contextlib.ExitStack
) -> _FrontHooks:
    """Adds our routes and checks to upstream's application; `stack` closes what they open."""
    from sglang.srt.entrypoints.http_server import app, get_global_state

    from sgl_pipeline.managers.channels.operator_channel import operator_address
    from sgl_pipeline.managers.channels.span_channel import span_address
    from sgl_pipeline.managers.entrance.live_page import serve_page
    from sgl_pipeline.managers.entrance.live_routes import add_live_routes
    from sgl_pipeline.managers.entrance.ollama_routes import OllamaErrors
    from sgl_pipeline.managers.entrance.pipeline_routes import add_pipeline_routes
    from sgl_pipeline.managers.entrance.request_spans import open_request_spans
    from sgl_pipeline.managers.entrance.route_guard import guard_routes
    from sgl_pipeline.managers.entrance.streamed_calls import read_calls_piece_by_piece
    from sgl_pipeline.managers.entrance.throttle_body import ServerKeys

    run_directory, upstream = pipeline_args.run_directory, plan.upstream
    app.add_middleware(OllamaErrors)
    read_calls_piece_by_piece()
    add_pipeline_routes(
        app,
        operator_address(run_directory),
        pipeline_args.migration.timeout_s,
        ServerKeys(upstream.api_key, upstream.admin_api_key),
    )
    guard_routes(
        app,
        plan.context_length,
        plan.features,
        is_stopping=lambda: get_global_state().tokenizer_manager.gracefully_exit,
    )
    has_page, hub = pipeline_args.ui == "on", None
    if has_page:
        hub = add_live_routes(app, run_directory, has_api_key=bool(upstream.api_key))

    def before_listening() -> None:
        if has_page:
            serve_page(app)
        if upstream.enable_trace:
            spans = open_request_spans(span_address(run_directory), upstream)
            stack.callback(spans.close, _LAST_SPANS_S)

    return _FrontHooks(before_listening, hub.close if hub else _nothing)


def _upstream_launcher(pipeline_args: PipelineArgs) -> Callable[..., None]:
    """The function that starts upstream's server, with forked children where that is safe."""
    if pipeline_args.stages.device == "cuda":
        from sglang.srt.entrypoints.http_server import launch_server

        return launch_server
    from sgl_pipeline.managers.forked_children import launch_server_forking

    return launch_server_forking


def _announce(server_args: "SglangServerArgs", pipeline_args: PipelineArgs) -> None:
    # Without a warm-up upstream calls this before it listens. With one that another server has
    # answered, this server is about to fail.
    end_s = time.monotonic() + _LISTEN_S
    while not _listens(server_args.port):
        if time.monotonic() > end_s:
            return
        time.sleep(_LISTEN_POLL_S)
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
    """True if a socket of this process waits for connections on `port`."""
    import psutil

    return any(
        one.status == psutil.CONN_LISTEN and one.laddr.port == port
        for one in psutil.Process().net_connections("tcp")
    )


def _nothing() -> None:
    """Does nothing, for a server without a page."""


def _fail(message: str) -> int:
    print(f"sgl_pipeline: error: {message}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    run_and_exit()
