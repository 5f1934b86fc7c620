"""Token throttling in milliseconds: every microbatch takes the slowest stage the same time.

The policy `throttle-time`, our own, with the terms of `token_throttle.py`. A step may take what the
slowest stage needs for an equal share of the running decodes and, beside it, for as much of the
waiting work as the smallest term grants; admission fills it by predicted time. So a chunk late in a
long prompt is shorter than an early one, a step whose decodes came out cheap takes more prefill,
and a cached prefix costs its attention alone.
"""

from sgl_pipeline.pipeline_load import (
    Bound,
    DecodeShare,
    PipelineLoad,
    Target,
    TimeLimit,
    TokenBudget,
)
from sgl_pipeline.step_work import StepTimes
from sgl_pipeline.throttle.decode_balance import balanced_decodes
from sgl_pipeline.throttle.load_work import decode_work, ready_work, with_fresh, with_waiting
from sgl_pipeline.throttle.policy_args import PolicyArgs
from sgl_pipeline.throttle.prefill_spread import best_spread
from sgl_pipeline.throttle.token_throttle import token_throttle

# A step may nearly take what the longest one in flight takes: beside it a shorter one would only
# idle. When a burst of prompts is over, steps get shorter by this share in a round of the pipeline.
EBB_SHARE = 0.5
# A step may always take this much longer than its decodes alone: where the weights have to be read
# anyway, that is many prompt tokens.
MIN_GROWTH = 1.05
# Prompts may be spread over this many times #T steps: where rows are cheap beside decodes, and
# where steps that differ within a round of a deep pipeline would leave bubbles.
MOST_SPREADS = 1.5


def time_throttle(args: PolicyArgs, load: PipelineLoad) -> TokenBudget:
    """As `token_throttle`, without a `TokenBudget.time`, while the times of steps are unknown."""
    times = load.step_times
    if times is None:
        return token_throttle(args, load)
    decodes = _decode_share(load, times)
    if load.free_share < args.pause_free_share and load.is_moving:
        return TokenBudget(0, load.ready_decodes, "pause", TimeLimit(0.0, 0, times, decodes))
    step_ms, bound_by, missed = _step_limit(args, load, times)
    limit = TimeLimit(step_ms, args.min_prefill_tokens, times, decodes)
    return TokenBudget(args.prefill_limit, load.ready_decodes, bound_by, limit, missed)


def _step_limit(
    args: PolicyArgs, load: PipelineLoad, times: StepTimes
) -> tuple[float, Bound, Target | None]:
    """The most milliseconds of a step, the term that bounds them, the target that they miss."""
    decodes = decode_work(load)
    # Tokens of a term cost what the waiting ones cost in the mean.
    most, waiting = args.prefill_limit, max(1, load.waiting_tokens)
    terms: dict[Bound, float] = {"MaxP": times.step_ms(with_waiting(decodes, load, most, waiting))}
    threshold = args.pause_free_share
    if load.free_share >= threshold:
        headroom = (load.free_share - threshold) / (1.0 - threshold)
        free = int(headroom * most)
        terms["UT"] = times.step_ms(with_waiting(decodes, load, free, waiting))
    if args.target_tpot_ms is not None:
        # A request has a token in each round.
        terms["TPOT"] = args.target_tpot_ms / load.pipeline_depth
    most_steps = int(MOST_SPREADS * args.prefill_spread_steps)
    in_flight_ms = load.in_flight_ms
    steps, spread_ms = best_spread(load, times, most_steps, args.ttft_weight, in_flight_ms)
    held_ms = (1.0 - EBB_SHARE / load.pipeline_depth) * in_flight_ms
    terms["WT"] = max(spread_ms, held_ms)
    needed_ms, is_late = _ttft_ms(args.target_ttft_ms, load, times, steps)
    if needed_ms > terms["WT"]:
        del terms["WT"]
        terms["TTFT"] = needed_ms
    bound_by = min(terms, key=terms.__getitem__)
    missed: Target | None = "TTFT" if is_late or needed_ms > terms[bound_by] else None
    least_ms = _least_ms(args, load, times)
    if terms[bound_by] < least_ms:
        return least_ms, "MinP", "TPOT" if bound_by == "TPOT" else missed
    return terms[bound_by], bound_by, missed


def _least_ms(args: PolicyArgs, load: PipelineLoad, times: StepTimes) -> float:
    """Milliseconds that a step may take in any case."""
    # By the decodes that it can have: without its share of them, the fewest tokens take less.
    ready = ready_work(load)
    return max(
        times.step_ms(with_fresh(ready, args.min_prefill_tokens)),
        MIN_GROWTH * times.step_ms(ready),
    )


def _ttft_ms(
    target_ms: float | None, load: PipelineLoad, times: StepTimes, steps: int
) -> tuple[float, bool]:
    """Milliseconds of a step so that at most `steps` of them compute all waiting work before the
    newest request misses its target, and False. Where no length does, the one that ends first, and
    True: longer steps would end later still, because they leave the stages idle in turns."""
    if target_ms is None or not load.waiting_tokens:
        return 0.0, False
    left_ms = target_ms - load.newest_wait_ms
    decodes = decode_work(load)
    soonest_ms, needed_ms = float("inf"), 0.0
    for num_steps in range(steps, 0, -1):
        step_ms = times.step_ms(with_waiting(decodes, load, 1, num_steps))
        # The last one has to pass the pipeline.
        done_ms = (num_steps + load.pipeline_depth - 1) * step_ms
        if done_ms <= left_ms:
            return step_ms, False
        if done_ms < soonest_ms:
            soonest_ms, needed_ms = done_ms, step_ms
    return needed_ms, True


def _decode_share(load: PipelineLoad, times: StepTimes) -> DecodeShare:
    """As many decodes as `balanced_decodes`, of mean length: more short ones, fewer long ones.

    They bear the fixed cost of a step in equal parts: where contexts hardly count beside it, the
    decodes are shared out by number.
    """
    work = decode_work(load)
    if not work.decodes:
        return DecodeShare(0.0, 1.0, 0.0)
    without_context_ms = times.step_ms(work._replace(decode_attended_tokens=0))
    row_ms = without_context_ms / work.decodes
    # Leases attend elsewhere: decodes may attend to nothing here.
    attended_ms = (times.step_ms(work) - without_context_ms) / max(1, work.decode_attended_tokens)
    mean_ms = row_ms + attended_ms * load.decode_attended_tokens / load.running_decodes
    return DecodeShare(balanced_decodes(load) * mean_ms, row_ms, attended_ms)
