"""The server's configuration, in frozen sections; each class takes its own section, not the lot.

`managers/command_line/server_args.py` fills them from the command line, whose defaults are the
ones written here, once. What is measured (page counts, free memory) never comes back into these: it
arrives in messages.
"""

from sgl_pipeline.args.checks import require, require_choice, require_seconds
from sgl_pipeline.args.cluster_args import ClusterArgs, require_stage_on_each
from sgl_pipeline.args.grammar_args import GrammarArgs
from sgl_pipeline.args.migration_args import MIGRATION_MODES, MIGRATION_WEIGHTS, MigrationArgs
from sgl_pipeline.args.pipeline_args import UI_MODES, PipelineArgs
from sgl_pipeline.args.recovery_args import DEFAULT_LOG_MIB, RECOVERY_MODES, RecoveryArgs
from sgl_pipeline.args.scheduling_args import SCHEDULE_POLICIES, SchedulingArgs
from sgl_pipeline.args.stage_args import (
    ATTENTION_BACKENDS,
    KV_CACHE_DTYPES,
    LAYER_KERNELS,
    LOAD_FORMATS,
    PREFILL_KERNELS,
    STAGE_GRAPHS,
    STAGE_LINKS,
    StageArgs,
    stage_load_format,
)
from sgl_pipeline.args.throttle_args import (
    ACCOUNTINGS,
    POLICIES,
    Accounting,
    ThrottleArgs,
)

__all__ = [
    "ACCOUNTINGS",
    "ATTENTION_BACKENDS",
    "DEFAULT_LOG_MIB",
    "KV_CACHE_DTYPES",
    "LAYER_KERNELS",
    "LOAD_FORMATS",
    "MIGRATION_MODES",
    "MIGRATION_WEIGHTS",
    "POLICIES",
    "PREFILL_KERNELS",
    "RECOVERY_MODES",
    "SCHEDULE_POLICIES",
    "STAGE_GRAPHS",
    "STAGE_LINKS",
    "UI_MODES",
    "Accounting",
    "ClusterArgs",
    "GrammarArgs",
    "MigrationArgs",
    "PipelineArgs",
    "RecoveryArgs",
    "SchedulingArgs",
    "StageArgs",
    "ThrottleArgs",
    "require",
    "require_choice",
    "require_seconds",
    "require_stage_on_each",
    "stage_load_format",
]
