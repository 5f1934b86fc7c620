"""The scheduler process from its first line to its last: builds everything, runs, cleans up.

Upstream's `launch_server` starts it in place of its own scheduler (upstream:
`managers/scheduler.py::run_scheduler_process`, with the same arguments). The loop itself is
`pipeline_scheduler.py`; this file decides nothing about a request.
"""

import contextlib
import dataclasses
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import setproctitle
import zmq
from sglang.srt.runtime_context import get_serving, publish
from sglang.srt.utils import configure_logger

from sgl_pipeline.args import HOST_BACKEND, PipelineArgs
from sgl_pipeline.cluster.remote_workers import RemoteWorkers
from sgl_pipeline.errors import ConfigurationError, SglPipelineError
from sgl_pipeline.managers.channels.last_words import write_last_words
from sgl_pipeline.managers.channels.live_channel import LiveSocket, live_address
from sgl_pipeline.managers.channels.operator_channel import OperatorSocket, operator_address
from sgl_pipeline.managers.channels.span_channel import SpanSender, span_address
from sgl_pipeline.managers.command_line.model_files import ModelLimits, load_tokenizer, model_limits
from sgl_pipeline.managers.core_start import build_core, recovery_actions, saved_predictor
from sgl_pipeline.managers.disaggregation.open_rooms import open_rooms
from sgl_pipeline.managers.front.garbage import postpone_full_collections
from sgl_pipeline.managers.front.operator_replies import OperatorReplies
from sgl_pipeline.managers.front.reasoning_tokens import ReasoningMarks
from sgl_pipeline.managers.front.room_fields import RoomFields
from sgl_pipeline.managers.front.sglang_io import SglangFront
from sgl_pipeline.managers.front.tier_requests import object_layout
from sgl_pipeline.managers.grammars.channel import CompilerSetup
from sgl_pipeline.managers.grammars.client import GrammarCompilerClient
from sgl_pipeline.managers.grammars.queue import GrammarQueue, NoGrammars
from sgl_pipeline.managers.grammars.vocabulary import NoGrammarsError, read_vocabulary
from sgl_pipeline.managers.pipeline_scheduler import PipelineScheduler
from sgl_pipeline.managers.reports.live_report import LiveReport
from sgl_pipeline.managers.reports.load_report import LoadReport, loads_path
from sgl_pipeline.managers.reports.reports import Reports
from sgl_pipeline.managers.reports.server_info import describe_page, describe_start, summarize_start
from sgl_pipeline.managers.reports.trace_files import TraceFiles
from sgl_pipeline.managers.stages.stage_launcher import StageLauncher
from sgl_pipeline.managers.tiers.open_tier import OpenTier, StoreOpener, store_opener
from sgl_pipeline.managers.tiers.tier_driver import TierDriver
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.pipeline.pipeline_capacity import PipelineCapacity
from sgl_pipeline.pipeline.worker_source import WorkerSource
from sgl_pipeline.pp_runner.base.state_shape import slot_bytes_of_layers
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec
from sgl_pipeline.pp_runner.stage_spec import stage_spec
from sgl_pipeline.records.chrome_trace import ChromeTraceWriter
from sgl_pipeline.records.trace import EventWriter, TraceWriter
from sgl_pipeline.scheduling import StepScheduler

if TYPE_CHECKING:
    from sgl_pipeline.managers.reports.metrics_report import MetricsReport

logger = logging.getLogger(__name__)

PROCESS_TITLE = "sgl_pipeline::scheduler"  # in the manner of upstream's sglang::detokenizer


def run_scheduler_process(
    args: PipelineArgs,
    stage_pids: Callable[[], Sequence[int]],
    worker_source: WorkerSource,
    server_args: Any,
    port_args: Any,
    gpu_id: int,
    tp_rank: int,
    pp_rank: int,
    dp_rank: int | None,
    pipe_writer: "Connection[Any, Any]",
) -> None:
    """Serves until shut down; ends the process with exit code 1 when it cannot go on.

    Args:
        args: ours. After the next two, the arguments are those of upstream's scheduler; the ranks
            are all zero, because upstream is resolved at one process.
        stage_pids: waits for the first stage workers; their process ids, by number.
        worker_source: starts more workers.
        pipe_writer: gets the ready message that upstream's main process waits for.
    """
    setproctitle.setproctitle(PROCESS_TITLE)
    publish(server_args, role="scheduler")
    configure_logger(server_args, prefix=" scheduler")
    # Leave through `_serve`, which stops the stages, and not with 0: upstream's watchdog takes
    # that for a scheduler that was asked to exit, and would leave a front without one.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        _serve(args, stage_pids, worker_source, server_args, port_args, pipe_writer)
    except SglPipelineError as error:
        logger.error("%s", error)
        write_last_words(args.run_directory, str(error))
        sys.exit(1)
    except Exception as error:
        logger.exception("the scheduler process failed")
        write_last_words(args.run_directory, f"the scheduler process failed: {error!r}")
        sys.exit(1)


def _serve(
    args: PipelineArgs,
    stage_pids: Callable[[], Sequence[int]],
    worker_source: WorkerSource,
    server_args: Any,
    port_args: Any,
    pipe_writer: "Connection[Any, Any]",
) -> None:
    """Builds everything, reports that it is ready, and runs until shut down. What is open is closed
    in the reverse order, also where a step in between fails."""
    model = _read_model(args, server_args)
    poller = zmq.Poller()
    grammars = _grammars(args, model.limits, model.tokenizer, poller)
    predictor = saved_predictor(args, model.spec)
    with contextlib.ExitStack() as stack:
        stack.callback(grammars.close)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Waits a moment for the last answers to leave.
        stack.callback(context.destroy, linger=500)
        traces = TraceFiles(_open_traces(args))
        stack.callback(traces.close)
        # Before the stages load: an unusable folder is reported at once. Host memory has its
        # size from their pools.
        has_folder = args.tiers.backend not in (None, HOST_BACKEND)
        opened = store_opener(args, model.spec)(args.tiers) if has_folder else None
        launcher = _launcher(args, model.spec, stage_pids(), context, worker_source, predictor)
        stack.callback(launcher.stop)
        capacity = launcher.start()
        facts = _log_start(args, model.spec, capacity)
        core = build_core(args, model.spec, model.limits, capacity, predictor)
        loads = LoadReport(
            loads_path(args.run_directory), args.scheduling, capacity, args.disaggregation.mode
        )
        stack.callback(loads.close)
        live = _live_report(args, server_args, context, core.scheduler, facts)
        if live is not None:
            stack.callback(live.close)
        metrics = _open_metrics(args, server_args, model.limits, capacity)
        socket = OperatorSocket(context, operator_address(args.run_directory))
        operators = OperatorReplies(socket, core, grammars, args.grammars.compile_seconds)
        stack.callback(operators.close)
        front = _front(args, server_args, port_args, model, capacity, context)
        stack.callback(front.close)
        pipe_writer.send(_ready_message(args, model.limits, capacity))
        grammars.start()
        postpone_full_collections()
        if launcher.roster.incarnation > 0:
            launcher.broadcast(core.start_over(launcher.roster.incarnation))
        recovery = recovery_actions(args, core, launcher)
        open_store = store_opener(args, model.spec, capacity)
        store = _tier_driver(args, core.scheduler, open_store, opened, poller)
        if store is not None:
            stack.callback(store.close)
        rooms = open_rooms(args, model.spec, core, launcher.roster, server_args.port, poller)
        if rooms is not None:
            stack.callback(rooms.close)
        reports = Reports(facts, args.migration.mode, traces, loads, metrics, live)
        PipelineScheduler(
            front, core, launcher, recovery, grammars, operators, reports, store, poller, rooms
        ).run()


@dataclasses.dataclass(frozen=True)
class _ServedModel:
    """The model as far as this process needs it; the stages hold its weights."""

    spec: ModelSpec
    tokenizer: Any
    limits: ModelLimits
    reasoning: ReasoningMarks


def _read_model(args: PipelineArgs, server_args: Any) -> _ServedModel:
    tokenizer = load_tokenizer(server_args)
    spec = stage_spec(args.stages)
    # The published value: upstream has put a parser's name in the place of `auto`.
    reasoning = ReasoningMarks.of_parser(get_serving().reasoning_parser, tokenizer)
    limits = model_limits(spec, server_args.context_length, tokenizer)
    return _ServedModel(spec, tokenizer, limits, reasoning)


def _launcher(
    args: PipelineArgs,
    spec: ModelSpec,
    stage_pids: Sequence[int],
    context: "zmq.Context[zmq.Socket[bytes]]",
    worker_source: WorkerSource,
    predictor: StepPredictor | None,
) -> StageLauncher:
    # Several GPUs or hosts may differ; all stages on this machine's CPU are alike.
    is_one_cpu = args.stages.device == "cpu" and args.cluster.num_hosts == 1
    others = RemoteWorkers(args.run_directory) if args.cluster.num_hosts > 1 else None
    return StageLauncher(
        args,
        spec.num_layers,
        stage_pids,
        context,
        worker_source,
        predictor if is_one_cpu else None,
        others,
    )


def _log_start(args: PipelineArgs, spec: ModelSpec, capacity: PipelineCapacity) -> dict[str, Any]:
    """The facts of the start, for `/server_info` and the live page as well."""
    state_bytes = slot_bytes_of_layers(spec.states, args.stages.dtype)
    facts = describe_start(args, capacity, state_bytes)
    logger.info("%s", summarize_start(facts))
    logger.debug("pipeline ready: %s", facts)
    return facts


def _live_report(
    args: PipelineArgs,
    server_args: Any,
    context: "zmq.Context[zmq.Socket[bytes]]",
    steps: StepScheduler,
    facts: dict[str, Any],
) -> LiveReport | None:
    if args.ui != "on":
        return None
    socket = LiveSocket(context, live_address(args.run_directory))
    return LiveReport(socket, steps, facts | describe_page(args, server_args))


def _front(
    args: PipelineArgs,
    server_args: Any,
    port_args: Any,
    model: _ServedModel,
    capacity: PipelineCapacity,
    context: "zmq.Context[zmq.Socket[bytes]]",
) -> SglangFront:
    pool_tokens = capacity.num_pages * args.scheduling.page_size
    spans = None
    if server_args.enable_trace:
        spans = SpanSender(context, span_address(args.run_directory))
    return SglangFront(
        server_args,
        port_args,
        model.limits,
        pool_tokens,
        model.tokenizer,
        model.reasoning,
        context,
        spans,
        RoomFields(args.disaggregation.mode, args.disaggregation.bootstrap_port),
        args.scheduling.fair_shares_by,
    )


def _tier_driver(
    args: PipelineArgs,
    steps: StepScheduler,
    open_store: StoreOpener,
    opened: OpenTier | None,
    poller: zmq.Poller,
) -> TierDriver | None:
    """The driver of a store that is attached now or later; None without tiers.

    Args:
        opened: the store that is attached from the start, if it is not host memory.
    """
    if not args.tiers.enabled:
        return None
    if args.tiers.backend == HOST_BACKEND:
        opened = open_store(args.tiers)
    driver = TierDriver(steps.tier, args.tiers, open_store, poller)
    if opened is not None:
        driver.use(opened, args.tiers)
    return driver


def _grammars(
    args: PipelineArgs, limits: ModelLimits, tokenizer: Any, poller: zmq.Poller
) -> GrammarQueue | NoGrammars:
    """Structured output, as far as flags and model allow it."""
    options = args.grammars
    if not options.enabled:
        return NoGrammars("structured output is off: the server runs with --grammar-backend none")
    try:
        vocabulary = read_vocabulary(tokenizer, limits, get_serving().reasoning_parser)
    except NoGrammarsError as error:
        logger.warning("%s", error)
        return NoGrammars(str(error))
    if args.scheduling.draft_tokens:
        vocabulary.text_tokens.prepare()
    setup = CompilerSetup(
        vocabulary=vocabulary.tokenizer_info.serialize_json(),
        any_whitespace=options.any_whitespace,
        max_whitespace_count=options.max_whitespace_count,
        max_seconds=options.compile_seconds,
        max_memory_mib=options.compile_memory_mib,
    )
    client = GrammarCompilerClient(setup, poller)
    client.fork()  # before this process has a thread, such as zmq's
    return GrammarQueue(
        client,
        vocabulary,
        options.match_ms_per_token,
        args.scheduling.waiting_timeout_s,
    )


def _open_traces(args: PipelineArgs) -> list[EventWriter]:
    """The files that `--trace-path` and `--trace-steps` name."""
    kinds: tuple[tuple[str, str | None, Callable[[str], EventWriter]], ...] = (
        ("--trace-path", args.trace_path, TraceWriter),
        ("--trace-steps", args.trace_steps, ChromeTraceWriter),
    )
    writers = []
    for flag, path, writer in kinds:
        if path is not None:
            try:
                writers.append(writer(path))
            except OSError as error:
                raise ConfigurationError(f"{flag} {path}: {error.strerror}") from error
    return writers


def _open_metrics(
    args: PipelineArgs, server_args: Any, limits: ModelLimits, capacity: PipelineCapacity
) -> "MetricsReport | None":
    if not server_args.enable_metrics:
        return None
    from sgl_pipeline.managers.reports.metrics_report import MetricsReport

    return MetricsReport(
        server_args,
        engine_type=args.disaggregation.engine_type,
        num_stages=args.stages.num_stages,
        page_size=args.scheduling.page_size,
        num_pages=capacity.num_pages,
        context_length=limits.context_length,
    )


def _ready_message(
    args: PipelineArgs, limits: ModelLimits, capacity: PipelineCapacity
) -> dict[str, Any]:
    """The message that upstream's main process expects (`managers/scheduler.py::get_init_info`),
    with the values of `/server_info` that it does not know (`upstream_fields.UPSTREAM_VALUES`)."""
    pool_tokens = capacity.num_pages * args.scheduling.page_size
    return {
        "status": "ready",
        "max_total_num_tokens": pool_tokens,
        "max_req_input_len": min(limits.context_length, pool_tokens) - 1,
        "startup_time": {},
        "hicache_object_layout": object_layout(args.tiers, args.scheduling.page_size),
        "page_size": args.scheduling.page_size,
        "pp_size": args.stages.num_stages,
        "chunked_prefill_size": args.throttle.prefill_limit,
        "device": args.stages.device,
        "enable_hierarchical_cache": args.tiers.enabled,
        "max_mamba_cache_size": capacity.num_state_slots or None,
        "mamba_track_interval": args.scheduling.snapshot_interval,
    }
