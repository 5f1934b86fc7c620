"""The server's configuration, in frozen sections; each class takes its own section, not the lot.

`managers/command_line/server_args.py` fills them from the command line, whose defaults are the
ones written here, once. What is measured (page counts, free memory) never comes back into these: it
arrives in messages.
"""

from dataclasses import dataclass, field

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.stage_plan import StagePlan

# Each policy, and the most prefill tokens that its authors give a step. `throttle/` has a function
# for each.
DEFAULT_PREFILL_LIMITS = {
    "throttle": 2048,
    "throttle-time": 2048,
    "throttle-adaptive": 8192,
    "no-wt": 2048,
    "no-ut": 2048,
    "no-threshold": 2048,
    "sarathi": 2048,
    "greedy-queue": 2048,
}
POLICIES = tuple(DEFAULT_PREFILL_LIMITS)
# The order of waiting requests: first come first served, or the one that may draw the most first.
SCHEDULE_POLICIES = ("fcfs", "lof")
ATTENTION_BACKENDS = ("auto", "flashinfer", "cpu", "torch")
PREFILL_KERNELS = ("auto", "fa2", "fa3")  # of FlashInfer
STAGE_GRAPHS = ("auto", "off")
STAGE_LINKS = ("auto", "host", "cuda-ipc", "nccl")
LAYER_KERNELS = ("auto", "flashinfer", "cpu", "torch")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "int8")  # auto: that of the model
UI_MODES = ("on", "off")
MIGRATION_MODES = ("off", "manual", "auto")
MIGRATION_WEIGHTS = ("resident", "background")
RECOVERY_MODES = ("auto", "off")


def require(condition: bool, message: str) -> None:
    """Raises ConfigurationError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigurationError(message)


def require_stage_on_each(num_stages: int, num_hosts: int) -> None:
    """Raises ConfigurationError where hosts would be without a stage."""
    require(
        num_stages >= num_hosts,
        f"--pp {num_stages} leaves some of the {num_hosts} hosts (--nnodes) without a stage; start "
        f"with --pp {num_hosts} or more",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottleArgs:
    """How many tokens a microbatch carries (gLLM, SC'25, section 3 and its default values).

    `max_prefill_tokens` is also the fixed budget of `sarathi` and `greedy-queue`, which decodes
    share there. Read it as `prefill_limit`, which knows the policy's own default.
    """

    policy: str = "throttle"
    prefill_spread_steps: int = 8  # gLLM #T
    max_prefill_tokens: int | None = None  # gLLM #MaxP; None: as the authors of `policy`
    min_prefill_tokens: int = 32  # gLLM #MinP
    pause_free_share: float = 0.05  # gLLM KVthresh: no prefill while KV_free is below
    # Chunks get shorter the later they lie in a prompt, so that all take as long as the first.
    dynamic_chunking: bool = False
    # Of `throttle-time`: mean milliseconds between a request's tokens, and to its first one.
    target_tpot_ms: float | None = None
    target_ttft_ms: float | None = None

    def __post_init__(self) -> None:
        require(
            self.policy in POLICIES,
            f"--policy {self.policy!r} is unknown; choose from {', '.join(POLICIES)}",
        )
        require(
            self.prefill_spread_steps >= 1,
            f"--prefill-spread-steps {self.prefill_spread_steps} must be at least 1",
        )
        require(
            1 <= self.min_prefill_tokens <= self.prefill_limit,
            f"--min-prefill-tokens {self.min_prefill_tokens} must be between 1 and "
            f"--chunked-prefill-size {self.prefill_limit}",
        )
        require(
            0.0 <= self.pause_free_share < 1.0,
            f"--pause-free-share {self.pause_free_share} must be in [0, 1)",
        )
        for flag, target_ms in (
            ("--target-tpot-ms", self.target_tpot_ms),
            ("--target-ttft-ms", self.target_ttft_ms),
        ):
            require(
                target_ms is None or 0.0 < target_ms < float("inf"),
                f"{flag} {target_ms} must be a number of milliseconds above 0",
            )
            require(
                target_ms is None or self.policy == "throttle-time",
                f"{flag} needs --policy throttle-time, this is {self.policy}: only a policy that "
                "budgets time can hold a time",
            )

    @property
    def prefill_limit(self) -> int:
        """The most prefill tokens of a step."""
        if self.max_prefill_tokens is not None:
            return self.max_prefill_tokens
        return DEFAULT_PREFILL_LIMITS[self.policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """What the counts that a policy sees take into account; pages are handed out alike under all.

    `hits`: tokens that the prefix cache will serve are not waiting. `shared_once`: of those left,
    what several requests wait for counts once, and not at all while one of them prefills it.
    `evictable`: cached pages that nobody uses count as free.
    """

    hits: bool
    shared_once: bool
    evictable: bool

    def __post_init__(self) -> None:
        assert self.hits or not self.shared_once, "whole prompts cannot be counted once"


ACCOUNTINGS = {
    "radix": Accounting(hits=True, shared_once=True, evictable=True),
    "radix-unshared": Accounting(hits=True, shared_once=False, evictable=True),
    "radix-free-list": Accounting(hits=True, shared_once=True, evictable=False),
    # gLLM's: a prompt waits whole until it is admitted.
    "gllm": Accounting(hits=False, shared_once=False, evictable=True),
    "naive": Accounting(hits=False, shared_once=False, evictable=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingArgs:
    """Bounds on what the scheduler admits. Pages hold `page_size` tokens each."""

    page_size: int = 16
    # Which of SCHEDULE_POLICIES orders requests of equal priority.
    schedule_policy: str = "fcfs"
    max_running_requests: int = 256
    max_queued_requests: int | None = None
    radix_cache: bool = True
    # Which of ACCOUNTINGS policies are given.
    accounting: str = "radix"
    # Every request computes its own prompt at once, even what another one is computing now.
    duplicate_prefills: bool = False
    # By how much more priority than a running request a waiting one takes its place; None: never.
    preemption_threshold: int | None = None
    # Seconds after which a request is ended, counted while it waits and since it first ran.
    waiting_timeout_s: float | None = None
    running_timeout_s: float | None = None
    # Steps in flight beyond one per stage; more hides scheduling time, fewer keeps tokens fresh.
    extra_steps_in_flight: int = 0

    def __post_init__(self) -> None:
        require(
            1 <= self.page_size <= 1024,
            f"--page-size {self.page_size} must be between 1 and 1024",
        )
        require(
            self.schedule_policy in SCHEDULE_POLICIES,
            f"--schedule-policy {self.schedule_policy!r} is not built; choose from "
            f"{', '.join(SCHEDULE_POLICIES)}",
        )
        require(
            self.accounting in ACCOUNTINGS,
            f"--accounting {self.accounting!r} is unknown; choose from {', '.join(ACCOUNTINGS)}",
        )
        require(
            self.max_running_requests >= 1,
            f"--max-running-requests {self.max_running_requests} must be at least 1",
        )
        require(
            self.max_queued_requests is None or self.max_queued_requests >= 0,
            f"--max-queued-requests {self.max_queued_requests} must not be negative",
        )
        require(
            self.preemption_threshold is None or self.preemption_threshold >= 0,
            f"--priority-scheduling-preemption-threshold {self.preemption_threshold} must not be "
            "negative",
        )
        require(
            0 <= self.extra_steps_in_flight <= 8,
            f"--extra-steps-in-flight {self.extra_steps_in_flight} must be between 0 and 8",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageArgs:
    """How the stages hold and run the model. `dtype` is a torch dtype name without `torch.`;
    `quantization` is that of the weights, in the checkpoint or from `--quantization`;
    `kv_cache_dtype` is one of KV_CACHE_DTYPES."""

    num_stages: int = 1
    layer_partition: str = "auto"
    model_path: str
    load_format: str = "safetensors"
    dtype: str
    device: str = "cpu"
    attention_backend: str = "auto"
    prefill_kernels: str = "auto"
    graphs: str = "auto"
    link: str = "auto"
    layer_kernels: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_total_tokens: int | None = None
    memory_fraction: float = 0.88
    cpu_threads: int | None = None

    @property
    def precision(self) -> str:
        """What is computed with, and so what fitted costs hold for."""
        parts = [self.dtype]
        if self.quantization is not None:
            parts.append(self.quantization)
        if self.kv_cache_dtype != "auto":
            parts.append(f"kv_{self.kv_cache_dtype}")
        return "-".join(parts)

    def __post_init__(self) -> None:
        require(self.num_stages >= 1, f"--pp {self.num_stages} must be at least 1")
        require(
            self.attention_backend in ATTENTION_BACKENDS,
            f"--stage-attention-backend {self.attention_backend!r} is unknown; choose from "
            f"{', '.join(ATTENTION_BACKENDS)}",
        )
        self._check_prefill_kernels()
        require(
            self.graphs in STAGE_GRAPHS,
            f"--stage-graphs {self.graphs!r} is unknown; choose from {', '.join(STAGE_GRAPHS)}",
        )
        require(
            self.link in STAGE_LINKS,
            f"--stage-link {self.link!r} is unknown; choose from {', '.join(STAGE_LINKS)}",
        )
        require(
            self.device == "cuda" or self.link in ("auto", "host"),
            f"--stage-link {self.link} needs --device cuda, this is {self.device}",
        )
        require(
            self.layer_kernels in LAYER_KERNELS,
            f"--stage-kernels {self.layer_kernels!r} is unknown; choose from "
            f"{', '.join(LAYER_KERNELS)}",
        )
        require(
            self.kv_cache_dtype in KV_CACHE_DTYPES,
            f"--kv-cache-dtype {self.kv_cache_dtype} is not built; choose from "
            f"{', '.join(KV_CACHE_DTYPES)}",
        )
        require(
            self.max_total_tokens is None or self.max_total_tokens >= 1,
            f"--max-total-tokens {self.max_total_tokens} must be at least 1",
        )
        require(
            self.cpu_threads is None or self.cpu_threads >= 1,
            f"--cpu-threads-per-stage {self.cpu_threads} must be at least 1",
        )
        require(
            0.0 < self.memory_fraction < 1.0,
            f"--mem-fraction-static {self.memory_fraction} must be between 0 and 1",
        )

    def _check_prefill_kernels(self) -> None:
        """What a card has no kernel for is refused where the card is known: on its stage."""
        flag = f"--stage-prefill-kernels {self.prefill_kernels}"
        require(
            self.prefill_kernels in PREFILL_KERNELS,
            f"--stage-prefill-kernels {self.prefill_kernels!r} is unknown; choose from "
            f"{', '.join(PREFILL_KERNELS)}",
        )
        require(
            self.prefill_kernels == "auto" or self.device == "cuda",
            f"{flag} needs --device cuda, this is {self.device}; leave it at auto",
        )
        require(
            self.prefill_kernels == "auto" or self.attention_backend in ("auto", "flashinfer"),
            f"{flag} chooses between FlashInfer's kernels, and --stage-attention-backend is "
            f"{self.attention_backend}; leave one of the two at auto",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationArgs:
    """Whether and how layers move between stages while requests run (DynaPipe, NeurIPS'25).

    `mode`: `off`, by hand (`manual`), or by the planner as well (`auto`). A stage may hold at most
    `spare_layers` more than it starts with; memory for their pages is kept free. With `weights`
    `resident` it loads the weights of that many layers on either side of its own at the start, with
    `background` when a move begins; those of layers that leave stay while there is room.
    `window_steps` is how long the planner must be of one mind.
    """

    mode: str = "off"
    spare_layers: int = 2
    weights: str = "background"
    window_steps: int = 25
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        require(
            self.mode in MIGRATION_MODES,
            f"--migration {self.mode!r} is unknown; choose from {', '.join(MIGRATION_MODES)}",
        )
        require(
            self.spare_layers >= 1,
            f"--migration-spare-layers {self.spare_layers} must be at least 1; layers stay where "
            "they are with --migration off",
        )
        require(
            self.weights in MIGRATION_WEIGHTS,
            f"--migration-weights {self.weights!r} is unknown; choose from "
            f"{', '.join(MIGRATION_WEIGHTS)}",
        )
        require(
            self.window_steps >= 1,
            f"--migration-window {self.window_steps} must be at least 1 step",
        )
        require(
            0.0 < self.timeout_s < float("inf"),
            f"--migration-timeout-s {self.timeout_s} must be a number of seconds above 0",
        )

    def max_layers(self, plan: StagePlan) -> tuple[int, ...]:
        """The most layers that each stage may hold at once, when it starts with `plan`."""
        spare = 0 if self.mode == "off" else self.spare_layers
        return tuple(min(count + spare, plan.num_layers) for count in plan.layer_counts)

    def layers_to_load(self, plan: StagePlan, stage: int) -> tuple[int, ...]:
        """The layers whose weights `stage` loads at its start beside its own."""
        if self.mode == "off" or self.weights == "background":
            return ()
        own, spare = plan.layers_of(stage), self.spare_layers
        before = range(max(0, own.start - spare), own.start)
        return (*before, *range(own.stop, min(own.stop + spare, plan.num_layers)))


DEFAULT_LOG_MIB = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryArgs:
    """What happens when a stage's worker is lost.

    `mode` `auto`: it is replaced, and requests go on; `off`: the server ends. At most
    `max_restarts` stages may be lost within `restart_window_s`. Where no worker is available, the
    stages that are left serve on, `min_stages` of them at least; `retry_s` later a worker is asked
    for again. `spare_workers` wait, started and imported. A worker that is to join gets
    `join_limit_s` for it. A stage counts as hung when it is silent for `silence_s` and for much
    longer than its steps of late have taken. Each stage keeps the rows that it sends, in at most
    `log_mib` MiB (None: the device's default; 0: it keeps none).
    """

    mode: str = "auto"
    max_restarts: int = 3
    restart_window_s: float = 60.0
    min_stages: int = 1
    retry_s: float = 30.0
    spare_workers: int = 0
    join_limit_s: float = 120.0
    silence_s: float = 5.0
    log_mib: int | None = None

    def __post_init__(self) -> None:
        require(
            self.mode in RECOVERY_MODES,
            f"--stage-recovery {self.mode!r} is unknown; choose from {', '.join(RECOVERY_MODES)}",
        )
        require(
            self.max_restarts >= 0,
            f"--max-stage-restarts {self.max_restarts} must not be negative",
        )
        require(
            0.0 < self.restart_window_s < float("inf"),
            f"--stage-restart-window-s {self.restart_window_s} must be a number of seconds above 0",
        )
        require(self.min_stages >= 1, f"--min-stages {self.min_stages} must be at least 1")
        require(
            0.0 < self.retry_s < float("inf"),
            f"--stage-retry-s {self.retry_s} must be a number of seconds above 0",
        )
        require(
            0 <= self.spare_workers <= 16,
            f"--spare-workers {self.spare_workers} must be between 0 and 16",
        )
        require(
            0.0 < self.join_limit_s < float("inf"),
            f"--stage-join-limit-s {self.join_limit_s} must be a number of seconds above 0",
        )
        require(
            0.0 < self.silence_s < float("inf"),
            f"--stage-silence-s {self.silence_s} must be a number of seconds above 0",
        )
        require(
            self.log_mib is None or 0 <= self.log_mib <= 1 << 20,
            f"--recovery-log-mib {self.log_mib} must be between 0 and {1 << 20}",
        )
        require(
            self.mode != "off" or not self.log_mib,
            f"--recovery-log-mib {self.log_mib} is for stages that are replaced, and "
            "--stage-recovery is off",
        )
        require(
            self.mode != "off" or self.spare_workers == 0,
            f"--spare-workers {self.spare_workers} take the place of lost ones, and "
            "--stage-recovery is off",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterArgs:
    """Hosts that serve one pipeline; SGLang's flags `--nnodes`, `--node-rank`, `--dist-init-addr`.

    Host 0 is the head. `head_address` is HOST:PORT of its cluster port; the other hosts listen on
    the same port number. A host that says nothing for `silence_s` is lost. With `use_ray` Ray
    starts the others, for which it has `ray_wait_s` at the start of the server.
    """

    num_hosts: int = 1
    rank: int = 0
    head_address: str | None = None
    key_file: str | None = None
    silence_s: float = 4.0
    use_ray: bool = False
    ray_wait_s: float = 60.0

    def __post_init__(self) -> None:
        require(self.num_hosts >= 1, f"--nnodes {self.num_hosts} must be at least 1")
        require(
            0 <= self.rank < self.num_hosts,
            f"--node-rank {self.rank} must be between 0 and {self.num_hosts - 1} with --nnodes "
            f"{self.num_hosts}",
        )
        require(
            self.num_hosts == 1 or self.head_address is not None,
            f"--nnodes {self.num_hosts} needs --dist-init-addr HOST:PORT, the same on every host: "
            "an address of rank 0 that the others can reach, and a free port",
        )
        require(
            1.0 <= self.silence_s < float("inf"),
            f"--host-silence-s {self.silence_s} must be a number of seconds, 1 or more",
        )
        require(
            not self.use_ray or self.num_hosts > 1,
            "--use-ray has Ray start the hosts beside the head; start with --nnodes 2 or more",
        )
        require(
            not self.use_ray or self.rank == 0,
            f"--use-ray --node-rank {self.rank}: with --use-ray one command starts all hosts, that "
            "of the head",
        )
        require(
            1.0 <= self.ray_wait_s < float("inf"),
            f"--ray-wait-s {self.ray_wait_s} must be a number of seconds, 1 or more",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarArgs:
    """How output is held to a grammar (JSON schema, regex, EBNF, structural tag).

    A compile may take `compile_seconds` of wall time and `compile_memory_mib` MiB. Matching may
    take `match_ms_per_token` of CPU time for each token, on average.
    """

    enabled: bool = True
    any_whitespace: bool = True
    max_whitespace_count: int | None = None
    compile_seconds: float = 10.0
    compile_memory_mib: int = 1024
    match_ms_per_token: float = 20.0

    def __post_init__(self) -> None:
        require(
            self.max_whitespace_count is None or self.max_whitespace_count >= 1,
            f"--constrained-json-max-whitespace-cnt {self.max_whitespace_count} must be at least 1",
        )
        require(
            0.0 < self.compile_seconds <= 3600.0,
            f"--grammar-compile-seconds {self.compile_seconds} must be above 0 and at most 3600",
        )
        require(
            self.compile_memory_mib >= 64,
            f"--grammar-compile-memory-mib {self.compile_memory_mib} must be at least 64",
        )
        require(
            self.match_ms_per_token > 0.0,
            f"--grammar-match-ms-per-token {self.match_ms_per_token} must be above 0",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineArgs:
    """All of it. `run_directory` (mode 0700) holds the sockets; `trace_path` gets StepRecords,
    `trace_steps` the same as a Chrome trace.

    `drain_timeout_s`: how long requests may go on after Ctrl-C or a SIGTERM, by default somewhat
    less than the 30 s that Kubernetes gives a container. `ui`: whether the live page is served.
    """

    stages: StageArgs
    scheduling: SchedulingArgs = field(default_factory=SchedulingArgs)
    throttle: ThrottleArgs = field(default_factory=ThrottleArgs)
    migration: MigrationArgs = field(default_factory=MigrationArgs)
    recovery: RecoveryArgs = field(default_factory=RecoveryArgs)
    grammars: GrammarArgs = field(default_factory=GrammarArgs)
    cluster: ClusterArgs = field(default_factory=ClusterArgs)
    run_directory: str = ""
    trace_path: str | None = None
    trace_steps: str | None = None
    drain_timeout_s: float = 25.0
    ui: str = "on"

    @property
    def most_prefill_tokens(self) -> int:
        """Of a step, however it is asked for while the server runs: a GPU has room for the step
        that it was started for, or for one of the usual size (`pp_runner/gpu_memory.py`)."""
        usual = DEFAULT_PREFILL_LIMITS["throttle"] if self.stages.device == "cuda" else 65_536
        return max(self.throttle.prefill_limit, usual)

    @property
    def log_mib(self) -> int:
        """Memory of each boundary log; 0: there are none."""
        recovery = self.recovery
        if recovery.mode == "off" or self.stages.device != "cpu":
            return 0
        return DEFAULT_LOG_MIB if recovery.log_mib is None else recovery.log_mib

    def __post_init__(self) -> None:
        require(
            self.stages.device == "cpu" or not self.recovery.log_mib,
            f"--recovery-log-mib {self.recovery.log_mib} needs --device cpu, this is "
            f"{self.stages.device}: rows that leave a GPU are not kept yet; set it to 0",
        )
        require(
            self.ui in UI_MODES, f"--ui {self.ui!r} is unknown; choose from {', '.join(UI_MODES)}"
        )
        require(
            0.0 <= self.drain_timeout_s < float("inf"),
            f"--drain-timeout-s {self.drain_timeout_s} must be a number of seconds, 0 or more",
        )
        require(
            self.recovery.min_stages <= self.stages.num_stages,
            f"--min-stages {self.recovery.min_stages} is more than the {self.stages.num_stages} "
            "stages of --pp",
        )
        require(
            self.migration.mode == "off" or self.stages.num_stages > 1,
            f"--migration {self.migration.mode} needs stages between which layers can move; start "
            "with --pp 2 or more",
        )
        hosts = self.cluster.num_hosts
        require_stage_on_each(self.stages.num_stages, hosts)
        require(
            hosts == 1 or self.stages.device == "cpu",
            f"--nnodes {hosts} with --device {self.stages.device} is not built yet; use --device "
            "cpu, or one host",
        )
