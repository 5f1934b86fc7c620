"""The flags that sgl_pipeline adds to SGLang's: a table, and how argparse gets it.

Used by `server_args.py`. Defaults are not written here but in `args/`, next to what they mean.
"""

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sgl_pipeline.args import (
    ACCOUNTINGS,
    ATTENTION_BACKENDS,
    DEFAULT_LOG_MIB,
    LAYER_KERNELS,
    MIGRATION_MODES,
    MIGRATION_WEIGHTS,
    POLICIES,
    PREFILL_KERNELS,
    RECOVERY_MODES,
    STAGE_GRAPHS,
    STAGE_LINKS,
    UI_MODES,
    ClusterArgs,
    GrammarArgs,
    MigrationArgs,
    PipelineArgs,
    RecoveryArgs,
    SchedulingArgs,
    StageArgs,
    ThrottleArgs,
)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag that sets `field` of the argument section `section`; of kind bool, to True.

    `upstream_name` is SGLang's own way to say it: then the parser gives None for what is not given,
    and `server_args.py` chooses.
    """

    name: str
    section: type
    field: str
    text: str
    kind: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None
    upstream_name: str | None = None


OUR_FLAGS = (
    Flag(
        "--pp-layer-partition",
        StageArgs,
        "layer_partition",
        "Layers of each stage: auto (by times measured at the start), even, or counts such "
        "as 5,4,4,3.",
        upstream_name="SGLANG_PP_LAYER_PARTITION",
    ),
    Flag(
        "--stage-attention-backend",
        StageArgs,
        "attention_backend",
        "Attention kernels of the stages.",
        choices=ATTENTION_BACKENDS,
    ),
    Flag(
        "--stage-prefill-kernels",
        StageArgs,
        "prefill_kernels",
        "FlashInfer's attention kernels for prefill chunks: fa2 (any GPU), fa3 (Hopper, compute "
        "capability 9); auto is FlashInfer's own choice, fa3 on Hopper.",
        choices=PREFILL_KERNELS,
    ),
    Flag(
        "--stage-graphs",
        StageArgs,
        "graphs",
        "CUDA graphs of the stages on a GPU: auto or off; a CPU has none.",
        choices=STAGE_GRAPHS,
    ),
    Flag(
        "--stage-link",
        StageArgs,
        "link",
        "How rows go from stage to stage: host (shared memory), nccl (a GPU each); auto is "
        "nccl where each host has as many GPUs as stages, else host.",
        choices=STAGE_LINKS,
    ),
    Flag(
        "--stage-kernels",
        StageArgs,
        "layer_kernels",
        "Kernels of the stages for all but the attention: products, norms, rotary embedding, "
        "KV writes, the MLP's gate.",
        choices=LAYER_KERNELS,
    ),
    Flag(
        "--cpu-threads-per-stage",
        StageArgs,
        "cpu_threads",
        "Compute threads of a stage; by default the cores are split over the stages.",
        int,
    ),
    Flag(
        "--policy",
        ThrottleArgs,
        "policy",
        "How many tokens a microbatch carries: token throttling (gLLM; by predicted time; with a "
        "reserve that adapts; or without one of its terms), a fixed budget (Sarathi-Serve), or "
        "vLLM's greedy queue.",
        choices=POLICIES,
    ),
    Flag(
        "--accounting",
        SchedulingArgs,
        "accounting",
        "Waiting tokens and free pages as the policy sees them: exact by the radix tree, or, for "
        "comparison, without some or all of what it knows.",
        choices=tuple(ACCOUNTINGS),
    ),
    Flag(
        "--duplicate-prefills",
        SchedulingArgs,
        "duplicate_prefills",
        "For comparison: a request computes a prefix that another one is computing already, and "
        "does not wait for it.",
        bool,
    ),
    Flag(
        "--prefill-spread-steps",
        ThrottleArgs,
        "prefill_spread_steps",
        "Steps over which waiting prompt tokens are spread (gLLM #T).",
        int,
    ),
    Flag(
        "--min-prefill-tokens",
        ThrottleArgs,
        "min_prefill_tokens",
        "Fewest prefill tokens worth a step (gLLM #MinP); --chunked-prefill-size is the most.",
        int,
    ),
    Flag(
        "--target-tpot-ms",
        ThrottleArgs,
        "target_tpot_ms",
        "With --policy throttle-time: no more prefill than leaves this many milliseconds between "
        "the tokens of a request. Comes before --target-ttft-ms where both cannot be met.",
        float,
    ),
    Flag(
        "--target-ttft-ms",
        ThrottleArgs,
        "target_ttft_ms",
        "With --policy throttle-time: prefill faster than it would where a request would get its "
        "first token later than this many milliseconds after it came.",
        float,
    ),
    Flag(
        "--pause-free-share",
        ThrottleArgs,
        "pause_free_share",
        "No prefill while a smaller share of the KV pages is free (gLLM KVthresh).",
        float,
    ),
    Flag(
        "--extra-steps-in-flight",
        SchedulingArgs,
        "extra_steps_in_flight",
        "Steps in flight beyond one per stage.",
        int,
        upstream_name="--pp-async-batch-depth",
    ),
    Flag(
        "--grammar-compile-seconds",
        GrammarArgs,
        "compile_seconds",
        "Longest compile of a request's grammar; a longer one ends that request.",
        float,
    ),
    Flag(
        "--grammar-compile-memory-mib",
        GrammarArgs,
        "compile_memory_mib",
        "Most memory of such a compile.",
        int,
    ),
    Flag(
        "--grammar-match-ms-per-token",
        GrammarArgs,
        "match_ms_per_token",
        "Most CPU time to match a grammar, for each token on average.",
        float,
    ),
    Flag(
        "--migration",
        MigrationArgs,
        "mode",
        "Whether layers may move between stages while requests run: never, by hand "
        "(POST /pipeline/plan), or by the planner as well. Needs two stages.",
        choices=MIGRATION_MODES,
    ),
    Flag(
        "--migration-spare-layers",
        MigrationArgs,
        "spare_layers",
        "With --migration, most layers that a stage may hold beyond those that it starts with; "
        "memory is kept free for them.",
        int,
    ),
    Flag(
        "--migration-weights",
        MigrationArgs,
        "weights",
        "Weights of layers that may come: loaded when a move begins (background), or at the start, "
        "of the spare layers on either side of a stage's own (resident).",
        choices=MIGRATION_WEIGHTS,
    ),
    Flag(
        "--migration-window",
        MigrationArgs,
        "window_steps",
        "Steps over which the planner must be of one mind before it moves layers.",
        int,
    ),
    Flag(
        "--migration-timeout-s",
        MigrationArgs,
        "timeout_s",
        "Seconds that the stages may take to get ready for a move; a longer one is abandoned.",
        float,
    ),
    Flag(
        "--stage-recovery",
        RecoveryArgs,
        "mode",
        "What happens when the process of a stage ends or hangs: it is replaced and requests go "
        "on, on fewer stages where no worker is available (auto; not over NCCL links), or the "
        "server ends (off).",
        choices=RECOVERY_MODES,
    ),
    Flag(
        "--max-stage-restarts",
        RecoveryArgs,
        "max_restarts",
        "Most stages that may be lost within --stage-restart-window-s; one more ends the server: "
        "what kills one stage after the other would kill fewer stages too. Workers that end before "
        "they have served do not count; after two of them the others serve on without.",
        int,
    ),
    Flag(
        "--stage-restart-window-s",
        RecoveryArgs,
        "restart_window_s",
        "Seconds within which --max-stage-restarts counts.",
        float,
    ),
    Flag(
        "--min-stages",
        RecoveryArgs,
        "min_stages",
        "Fewest stages to serve with where no worker is available for a lost one: those that are "
        "left share its layers. With fewer, or where memory does not hold the layers, requests get "
        "a 503 and the server ends. As many as --pp: never fewer.",
        int,
    ),
    Flag(
        "--stage-retry-s",
        RecoveryArgs,
        "retry_s",
        "Seconds after which a worker that was not available is asked for again, while fewer "
        "stages serve; twice as long after each failure, at most 16 times.",
        float,
    ),
    Flag(
        "--stage-join-limit-s",
        RecoveryArgs,
        "join_limit_s",
        "Seconds that a worker may take to start, or to load and join the others, before another "
        "one is asked for.",
        float,
    ),
    Flag(
        "--stage-silence-s",
        RecoveryArgs,
        "silence_s",
        "Seconds after which a silent stage counts as hung and is replaced, unless its own steps "
        "took a twentieth of that or more.",
        float,
    ),
    Flag(
        "--spare-workers",
        RecoveryArgs,
        "spare_workers",
        "Workers that wait, started, to take the place of a lost one.",
        int,
    ),
    Flag(
        "--recovery-log-mib",
        RecoveryArgs,
        "log_mib",
        "MiB in which each stage but the last keeps the rows that it sends, so that only a stage "
        "that is replaced computes keys and values again; 0: all stages do. By default "
        f"{DEFAULT_LOG_MIB} on a CPU; not built for GPUs.",
        int,
    ),
    Flag(
        "--cluster-key-file",
        ClusterArgs,
        "key_file",
        "With --nnodes, the file of the key that all hosts share; else it is taken from "
        "SGL_PIPELINE_CLUSTER_KEY.",
    ),
    Flag(
        "--host-silence-s",
        ClusterArgs,
        "silence_s",
        "With --nnodes, seconds after which a silent host counts as lost.",
        float,
    ),
    Flag(
        "--ray-wait-s",
        ClusterArgs,
        "ray_wait_s",
        "With --use-ray, seconds that Ray may take at the start to place the other hosts.",
        float,
    ),
    Flag("--trace-path", PipelineArgs, "trace_path", "Writes one JSON line per step to this file."),
    Flag(
        "--trace-steps",
        PipelineArgs,
        "trace_steps",
        "Writes the steps on all stages to this file, as a Chrome trace for ui.perfetto.dev.",
    ),
    Flag(
        "--drain-timeout-s",
        PipelineArgs,
        "drain_timeout_s",
        "Seconds that running requests may go on after Ctrl-C or a SIGTERM.",
        float,
    ),
    Flag(
        "--ui",
        PipelineArgs,
        "ui",
        "Whether the live page is served, at /ui, with the events that it shows, at "
        "/pipeline/events.",
        choices=UI_MODES,
    ),
)


def add_our_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--pp` and the flags of the table."""
    ours = parser.add_argument_group("sgl_pipeline")
    ours.add_argument("--pp", dest="pp_size", type=int, help="Pipeline stages, as --pp-size.")
    for flag in OUR_FLAGS:
        if flag.kind is bool:
            ours.add_argument(flag.name, action="store_true", help=flag.text)
            continue
        default = default_of(flag.section, flag.field)
        alias = f"; SGLang's: {flag.upstream_name}" if flag.upstream_name else ""
        ours.add_argument(
            flag.name,
            default=None if flag.upstream_name else default,
            type=flag.kind,
            choices=flag.choices,
            help=f"{flag.text} (default: {default}{alias})",
        )


def default_of(section: type, name: str) -> Any:
    """The default of a field, written once: in `args/`."""
    return next(field.default for field in dataclasses.fields(section) if field.name == name)
