"""The server's configuration, in frozen sections; each class takes its own section, not the lot.

A new flag is a field here, declared with `flags.our_flag`: parser, help and defaults follow, and a
stage's worker gets the whole `StageArgs`. Measured values (page counts, free memory) never come
back into these: they arrive in messages.
"""

from sgl_pipeline.args.checks import require
from sgl_pipeline.args.cluster_args import ClusterArgs, require_stage_on_each
from sgl_pipeline.args.disaggregation_args import DISAGGREGATION_MODES, DisaggregationArgs
from sgl_pipeline.args.grammar_args import GrammarArgs
from sgl_pipeline.args.migration_args import MIGRATION_MODES, MIGRATION_WEIGHTS, MigrationArgs
from sgl_pipeline.args.pipeline_args import SECTIONS, PipelineArgs
from sgl_pipeline.args.recovery_args import DEFAULT_LOG_MIB, RecoveryArgs
from sgl_pipeline.args.scheduling_args import SCHEDULE_POLICIES, SchedulingArgs
from sgl_pipeline.args.stage_args import (
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    MODEL_IMPLS,
    StageArgs,
)
from sgl_pipeline.args.throttle_args import (
    ACCOUNTINGS,
    POLICIES,
    Accounting,
    ThrottleArgs,
)
from sgl_pipeline.args.tier_args import HOST_BACKEND, STORAGE_BACKENDS, TierArgs

__all__ = [
    "ACCOUNTINGS",
    "DEFAULT_LOG_MIB",
    "DISAGGREGATION_MODES",
    "HOST_BACKEND",
    "KV_CACHE_DTYPES",
    "LOAD_FORMATS",
    "MIGRATION_MODES",
    "MIGRATION_WEIGHTS",
    "MODEL_IMPLS",
    "POLICIES",
    "SCHEDULE_POLICIES",
    "SECTIONS",
    "STORAGE_BACKENDS",
    "Accounting",
    "ClusterArgs",
    "DisaggregationArgs",
    "GrammarArgs",
    "MigrationArgs",
    "PipelineArgs",
    "RecoveryArgs",
    "SchedulingArgs",
    "StageArgs",
    "ThrottleArgs",
    "TierArgs",
    "require",
    "require_stage_on_each",
]
