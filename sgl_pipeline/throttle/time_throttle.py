"""Token throttling in milliseconds: every microbatch takes the slowest stage the same time.

The policy `throttle-time`, chosen in `throttle/__init__.py`; our own. The terms are those of
`token_throttle.py`. A step may take what the slowest stage needs for an equal share of the running
decodes and, beside it, for as much of the waiting work as the smallest term grants; admission fills
it by predicted time. So a chunk late in a long prompt is shorter than an early one, a step whose
decodes came out cheap takes more prefill, and a cached prefix costs its attention alone.
"""

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.pipeline_load import Bound, DecodeShare, PipelineLoad, TimeLimit, TokenBudget
from sgl_pipeline.step_work import StepTimes, StepWork, attended_tokens
from sgl_pipeline.throttle.decode_balance import balanced_decodes
from sgl_pipeline.throttle.token_throttle import token_throttle

_NOTHING = StepWork(0, 0, 0, 0, 0)


def time_throttle(args: ThrottleArgs, load: PipelineLoad) -> TokenBudget:
    """As `token_throttle` while nobody knows what steps take; `TokenBudget.time` says which."""
    times = load.step_times
    if times is None:
        return token_throttle(args, load)
    decodes = _decode_share(load, times)
    if load.free_share < args.pause_free_share and load.is_moving:
        return TokenBudget(0, load.ready_decodes, "pause", TimeLimit(0.0, 0, times, decodes))
    step_ms, bound_by = _step_limit(args, load, times)
    limit = TimeLimit(step_ms, args.min_prefill_tokens, times, decodes)
    return TokenBudget(args.prefill_limit, load.ready_decodes, bound_by, limit)


def _step_limit(args: ThrottleArgs, load: PipelineLoad, times: StepTimes) -> tuple[float, Bound]:
    """What a step may take, and by which term."""
    decodes = _decode_work(load)
    terms: dict[Bound, float] = {"MaxP": times.step_ms(_with_fresh(decodes, args.prefill_limit))}
    threshold = args.pause_free_share
    if load.free_share >= threshold:
        headroom = (load.free_share - threshold) / (1.0 - threshold)
        terms["UT"] = times.step_ms(_with_fresh(decodes, int(headroom * args.prefill_limit)))
    terms["WT"] = times.step_ms(_with_waiting(decodes, load, args.prefill_spread_steps))
    bound_by = min(terms, key=terms.__getitem__)
    least_ms = times.step_ms(_with_fresh(decodes, args.min_prefill_tokens))
    if terms[bound_by] < least_ms:
        return least_ms, "MinP"
    return terms[bound_by], bound_by


def _decode_work(load: PipelineLoad) -> StepWork:
    """An equal share of the running decodes, rounded up."""
    rows = -(-load.running_decodes // load.pipeline_depth)
    attended = -(-load.decode_attended_tokens // load.pipeline_depth)
    return StepWork(rows, rows, attended, 0, rows)


def _with_waiting(work: StepWork, load: PipelineLoad, steps: int) -> StepWork:
    """`work` and what waits to be prefilled, spread over so many steps, rounded up."""
    return work._replace(
        tokens=work.tokens - (-load.waiting_tokens // steps),
        prefill_attended_tokens=-(-load.waiting_attended_tokens // steps),
        samples=work.samples - (-load.prompts // steps),
    )


def _with_fresh(work: StepWork, tokens: int) -> StepWork:
    """`work` and the first tokens of a long prompt."""
    return work._replace(
        tokens=work.tokens + tokens, prefill_attended_tokens=attended_tokens(0, tokens)
    )


def _decode_share(load: PipelineLoad, times: StepTimes) -> DecodeShare:
    """As many decodes as `balanced_decodes`, of mean length: more short ones, fewer long ones.

    Where rows cost nothing, because the weights have to be read anyway, and nothing is attended to,
    the decodes count alike.
    """
    work = _decode_work(load)
    if not work.decodes:
        return DecodeShare(0.0, 1.0, 0.0)
    without_context_ms = times.step_ms(work._replace(decode_attended_tokens=0))
    row_ms = (without_context_ms - times.step_ms(_NOTHING)) / work.decodes
    attended_ms = (times.step_ms(work) - without_context_ms) / work.decode_attended_tokens
    if row_ms <= 0.0 and attended_ms <= 0.0:
        row_ms = 1.0
    mean_ms = row_ms + attended_ms * load.decode_attended_tokens / load.running_decodes
    return DecodeShare(balanced_decodes(load) * mean_ms, row_ms, attended_ms)
