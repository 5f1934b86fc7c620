"""Builds the core of a server from its arguments: scheduler, forecast, layer moves and recovery."""

import dataclasses
import logging
from collections.abc import Sequence

from sgl_pipeline.args import MigrationArgs, PipelineArgs, RecoveryArgs
from sgl_pipeline.managers.command_line.model_files import ModelLimits
from sgl_pipeline.managers.planning.cost_files import find_costs
from sgl_pipeline.managers.stages.recovery_actions import RecoveryActions
from sgl_pipeline.managers.stages.stage_launcher import StageLauncher
from sgl_pipeline.migration.move_prices import MovePrices
from sgl_pipeline.migration.planner import LayerPlanner
from sgl_pipeline.migration.planner_args import PlannerArgs
from sgl_pipeline.migration.predictor import StepPredictor
from sgl_pipeline.migration.step_forecast import StepForecast
from sgl_pipeline.pipeline.migration_control import MigrationControl
from sgl_pipeline.pipeline.pipeline_capacity import PipelineCapacity
from sgl_pipeline.pipeline.pipeline_core import PipelineCore
from sgl_pipeline.pipeline.recovery import StageRecovery
from sgl_pipeline.pipeline.stage_watch import StageWatch
from sgl_pipeline.pipeline.throttle_control import ThrottleControl
from sgl_pipeline.pp_runner.base.state_shape import slot_bytes_of_layers
from sgl_pipeline.pp_runner.model.model_spec import ModelSpec
from sgl_pipeline.scheduling import RecoveryLog, StepScheduler
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.throttle import make_policy

logger = logging.getLogger(__name__)


def build_core(
    args: PipelineArgs,
    spec: ModelSpec,
    limits: ModelLimits,
    capacity: PipelineCapacity,
    predictor: StepPredictor | None,
) -> PipelineCore:
    """The pipeline over stages of this capacity, with all that may change while it serves."""
    steps = StepScheduler(
        # Stages may have fewer slots than were asked for, as they may have fewer pages.
        dataclasses.replace(args.scheduling, num_state_slots=capacity.num_state_slots),
        make_policy(args.throttle),
        num_pages=capacity.num_pages,
        num_stages=args.stages.num_stages,
        context_length=limits.context_length,
        log=_recovery_log(args, capacity),
    )
    forecast = StepForecast(
        capacity.plan,
        predictor,
        learns=args.stages.device == "cpu",
        layer_windows=[attention.window for attention in spec.attentions],
    )
    state_bytes = slot_bytes_of_layers(spec.states, args.stages.dtype)
    migration = _migration(args.migration, capacity.plan, forecast, steps, state_bytes)
    throttle = ThrottleControl(
        steps, args.throttle, args.scheduling.accounting, args.most_prefill_tokens
    )
    return PipelineCore(steps, capacity.plan, migration, forecast, throttle, limits.vocab_size)


def recovery_actions(
    args: PipelineArgs, core: PipelineCore, launcher: StageLauncher
) -> RecoveryActions:
    """The recovery of lost stages; without it a hang goes unnoticed as well."""
    options = _recovery_args(args, launcher)
    recovery = StageRecovery(core, launcher.roster, options)
    if options.mode == "off":
        return RecoveryActions(recovery, launcher)
    watch = StageWatch(core, options.silence_s, launcher.roster.rehearsal_s, launcher.core_waits_s)
    return RecoveryActions(recovery, launcher, watch)


def saved_predictor(args: PipelineArgs, spec: ModelSpec) -> StepPredictor | None:
    """The predictor that `sgl-pipeline fit` has saved for stages like these, if there is one."""
    file = find_costs(args.stages, spec.num_layers)
    if file is None:
        return None
    logger.info("step costs of %s are those fitted on %s", file.model, file.date)
    return StepPredictor(file.costs)


def _migration(
    options: MigrationArgs,
    plan: StagePlan,
    forecast: StepForecast,
    steps: StepScheduler,
    state_bytes: Sequence[int],
) -> MigrationControl:
    """The control of layer moves, with a planner unless layers stay where they are.
    `state_bytes` is the size of a request's state in each layer."""
    if options.mode == "off":
        return MigrationControl.off(plan)
    args = PlannerArgs(
        window_steps=options.window_steps,
        evaluate_steps=min(PlannerArgs().evaluate_steps, options.window_steps),
    )
    planner = LayerPlanner(
        args,
        plan,
        forecast,
        max_layers=options.max_layers(plan),
        prices=MovePrices(args, state_bytes, lambda: steps.state_slots.num_used),
    )
    return MigrationControl.of(options, plan, planner)


def _recovery_args(args: PipelineArgs, launcher: StageLauncher) -> RecoveryArgs:
    """The arguments of recovery, which is off where the stages' links do not allow it."""
    options = args.recovery
    if options.mode == "off" or launcher.roster.can_regroup:
        return options
    logger.warning(
        "a stage that is lost will end the server: NCCL joins stages for life; with --stage-link "
        "host it would be replaced"
    )
    return dataclasses.replace(options, mode="off", spare_workers=0)


def _recovery_log(args: PipelineArgs, capacity: PipelineCapacity) -> RecoveryLog | None:
    """The rows from which a lost stage can compute again by itself; None where none are kept."""
    if args.log_mib == 0:
        return None
    stages, size = args.stages.num_stages, args.scheduling.page_size
    return RecoveryLog(stages, size, capacity.log_pages)
