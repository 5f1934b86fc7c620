"""The flags and rules of a world: any that a server may have and that a schedule can tell apart."""

from dataclasses import replace
from random import Random

from sgl_pipeline.args import (
    ACCOUNTINGS,
    POLICIES,
    SCHEDULE_POLICIES,
    MigrationArgs,
    PipelineArgs,
    RecoveryArgs,
    SchedulingArgs,
    StageArgs,
    ThrottleArgs,
)
from sgl_pipeline.args.scheduling_args import CACHE_AWARE_POLICIES
from sgl_pipeline.args.tier_args import PREFETCH_POLICIES, WRITE_POLICIES
from sgl_pipeline.scheduling.tier_rules import TierRules


def random_args(rng: Random, *, may_have_states: bool = False) -> PipelineArgs:
    """Those of `rng`, of one stage to four; with `may_have_states` some are of a model with
    states."""
    max_prefill_tokens = rng.choice((4, 16, 64))
    num_stages = rng.choice((1, 2, 2, 3, 4))
    own_rng = _own_choice(rng)
    by = own_rng.choice((None, "user"))
    args = PipelineArgs(
        stages=StageArgs(
            num_stages=num_stages,
            layer_partition=rng.choice(("auto", "even")),
            model_path="fake",
            dtype="float32",
        ),
        scheduling=SchedulingArgs(
            page_size=rng.choice((1, 2, 4)),
            schedule_policy=rng.choice(SCHEDULE_POLICIES),
            max_overtakes=rng.choice((0, 1, 3, 128)),
            max_running_requests=rng.choice((2, 5, 64)),
            max_queued_requests=rng.choice((None, None, 3)),
            radix_cache=rng.random() < 0.8,
            accounting=rng.choice(sorted(ACCOUNTINGS)),
            duplicate_prefills=rng.random() < 0.2,
            preemption_threshold=rng.choice((None, 0, 1)),
            waiting_timeout_s=rng.choice((None, None, 2.0)),
            running_timeout_s=rng.choice((None, None, 4.0)),
            extra_steps_in_flight=rng.choice((0, 0, 1, 2)),
            draft_tokens=rng.choice((0, 0, 1, 4)),
            fair_shares_by=by,
            tenant_weights=None if by is None else '{"b": 3}',
        ),
        throttle=ThrottleArgs(
            policy=rng.choice(POLICIES),
            prefill_spread_steps=rng.choice((1, 2, 8)),
            max_prefill_tokens=max_prefill_tokens,
            min_prefill_tokens=rng.choice((1, max_prefill_tokens)),
        ),
        migration=MigrationArgs(
            mode=rng.choice(("off", "manual")) if num_stages > 1 else "off",
            spare_layers=rng.choice((1, 2)),
            timeout_s=rng.choice((0.2, 5.0, 5.0)),
        ),
        recovery=RecoveryArgs(
            max_restarts=rng.choice((0, 3, *[1_000] * 8)),
            restart_window_s=rng.choice((1.0, 60.0)),
            spare_workers=rng.choice((0, 0, 1, 2)),
            min_stages=rng.choice((1, 1, 1, num_stages)),
            retry_s=rng.choice((0.5, 5.0)),
        ),
        run_directory="virtual",
    )
    num_state_slots = own_rng.choice((0, 0, 0, 0, 0, 0, 1, 3, 8))
    track_pages = own_rng.choice((0, 1, 1, 2))
    return _with_states(args, num_state_slots, track_pages) if may_have_states else args


def _with_states(args: PipelineArgs, num_state_slots: int, track_pages: int) -> PipelineArgs:
    """`args` of a model with states, whose decodes leave snapshots after so many pages; as they are
    for 0 slots."""
    if num_state_slots == 0:
        return args
    order = args.scheduling.schedule_policy
    scheduling = replace(
        args.scheduling,
        num_state_slots=num_state_slots,
        track_interval=track_pages * args.scheduling.page_size,
        draft_tokens=0,
        # Rankings know pages, and no snapshots.
        schedule_policy="fcfs" if order in CACHE_AWARE_POLICIES else order,
    )
    return replace(args, scheduling=scheduling)


def _own_choice(rng: Random) -> Random:
    """One that takes nothing from `rng`: all other draws of a seed stay what they are."""
    same = Random()
    same.setstate(rng.getstate())
    return Random(same.getrandbits(64))


def random_rules(rng: Random) -> TierRules:
    """Those of a store, in which a few tokens are worth a load."""
    return TierRules(
        write_policy=rng.choice(WRITE_POLICIES),
        wait_policy=rng.choice(("timeout", *PREFETCH_POLICIES)),
        least_tokens=rng.choice((1, 1, 4, 8)),
        timeout_base_s=rng.choice((0.05, 1.0, 4.0)),
        load_share=rng.choice((0.25, 0.5, 0.9)),
        save_share=rng.choice((0.125, 0.5)),
    )
