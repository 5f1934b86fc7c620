"""All sections together, and the checks between them."""

from dataclasses import dataclass, field

from sgl_pipeline.args.checks import require, seconds_from
from sgl_pipeline.args.cluster_args import ClusterArgs, require_stage_on_each
from sgl_pipeline.args.disaggregation_args import DisaggregationArgs
from sgl_pipeline.args.flags import check_flags, our_flag, without_flag
from sgl_pipeline.args.grammar_args import GrammarArgs
from sgl_pipeline.args.migration_args import MigrationArgs
from sgl_pipeline.args.recovery_args import DEFAULT_LOG_MIB, RecoveryArgs
from sgl_pipeline.args.scheduling_args import SchedulingArgs
from sgl_pipeline.args.stage_args import StageArgs
from sgl_pipeline.args.state_refusals import refuse_with_states
from sgl_pipeline.args.throttle_args import ThrottleArgs
from sgl_pipeline.args.tier_args import TierArgs
from sgl_pipeline.throttle import POLICY_TABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineArgs:
    """All sections. The default `drain_timeout_s` is less than the 30 s that Kubernetes gives a
    container."""

    stages: StageArgs
    scheduling: SchedulingArgs = field(default_factory=SchedulingArgs)
    throttle: ThrottleArgs = field(default_factory=ThrottleArgs)
    migration: MigrationArgs = field(default_factory=MigrationArgs)
    recovery: RecoveryArgs = field(default_factory=RecoveryArgs)
    grammars: GrammarArgs = field(default_factory=GrammarArgs)
    cluster: ClusterArgs = field(default_factory=ClusterArgs)
    tiers: TierArgs = field(default_factory=TierArgs)
    disaggregation: DisaggregationArgs = field(default_factory=DisaggregationArgs)
    # Mode 0700; holds the sockets.
    run_directory: str = without_flag("", "the server makes it at the start")
    trace_path: str | None = our_flag(
        None, "--trace-path", help="Writes one JSON line per step to this file."
    )
    trace_steps: str | None = our_flag(
        None,
        "--trace-steps",
        help="Writes the steps on all stages to this file, as a Chrome trace for ui.perfetto.dev.",
    )
    drain_timeout_s: float = our_flag(
        25.0,
        "--drain-timeout-s",
        help="Seconds that running requests may go on after Ctrl-C or a SIGTERM.",
        check=seconds_from(0),
    )
    ui: str = our_flag(
        "on",
        "--ui",
        help="Whether the live page is served, at /ui, with the events that it shows, at "
        "/pipeline/events.",
        choices=("on", "off"),
    )

    @property
    def most_prefill_tokens(self) -> int:
        """The most prefill tokens of a step that may be asked for while the server runs: a GPU
        has room for the step that it was started for, or for one of the usual size."""
        usual = POLICY_TABLE["throttle"].prefill_limit if self.stages.device == "cuda" else 65_536
        return max(self.throttle.prefill_limit, usual)

    @property
    def log_mib(self) -> int:
        """Memory of each boundary log; 0: there are none."""
        recovery = self.recovery
        has_states = self.scheduling.num_state_slots > 0
        if recovery.mode == "off" or self.stages.device != "cpu" or has_states:
            return 0
        return DEFAULT_LOG_MIB if recovery.log_mib is None else recovery.log_mib

    def __post_init__(self) -> None:
        check_flags(self)
        if self.scheduling.num_state_slots:
            refuse_with_states(self.stages.device, self.recovery, self.tiers, self.disaggregation)
        require(
            self.stages.device == "cpu" or not self.recovery.log_mib,
            f"--recovery-log-mib {self.recovery.log_mib} needs --device cpu, this is "
            f"{self.stages.device}: rows that leave a GPU are not kept yet; set it to 0",
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
        require(
            self.scheduling.radix_cache or not self.tiers.enabled,
            "--enable-hierarchical-cache keeps pages of the radix cache, and --disable-radix-cache "
            "switches that off; give one of them",
        )
        require(
            self.scheduling.radix_cache or not self.disaggregation.is_on,
            f"--disaggregation-mode {self.disaggregation.mode} hands pages of the radix cache on, "
            "and --disable-radix-cache switches that off; give one of them",
        )
        require(
            self.stages.device == "cpu" or not self.disaggregation.attention_offload,
            f"--enable-attention-offload with --device {self.stages.device} is not built: it is "
            "for CPUs only; leave it out",
        )
        hosts = self.cluster.num_hosts
        require_stage_on_each(self.stages.num_stages, hosts)
        require(
            not self.cluster.use_ray or self.stages.device == "cpu",
            f"--use-ray with --device {self.stages.device} is not built yet: agents would be "
            "placed where no GPU is free; start the hosts by hand, or use --device cpu",
        )


SECTIONS = (
    StageArgs,
    ThrottleArgs,
    SchedulingArgs,
    GrammarArgs,
    MigrationArgs,
    RecoveryArgs,
    ClusterArgs,
    TierArgs,
    DisaggregationArgs,
    PipelineArgs,
)
