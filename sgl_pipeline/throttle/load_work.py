"""The work of one step as policies that budget time count it: decodes, and prefill beside them."""

from sgl_pipeline.pipeline_load import PipelineLoad
from sgl_pipeline.step_work import StepWork, attended_tokens


def decode_work(load: PipelineLoad) -> StepWork:
    """An equal share of the running decodes, rounded up."""
    rows = -(-load.running_decodes // load.pipeline_depth)
    attended = -(-load.decode_attended_tokens // load.pipeline_depth)
    return StepWork(rows, rows, attended, 0, rows)


def ready_work(load: PipelineLoad) -> StepWork:
    """As many decodes of mean length, or all that are ready where those are fewer."""
    share = decode_work(load)
    rows = min(share.decodes, load.ready_decodes)
    if rows == share.decodes:
        return share
    attended = -(-share.decode_attended_tokens * rows // share.decodes)
    return StepWork(rows, rows, attended, 0, rows)


def with_waiting(work: StepWork, load: PipelineLoad, part: int, of: int) -> StepWork:
    """`work` and `part / of` of the waiting prefill, rounded up."""
    tokens, decodes, by_decodes, _, samples = work
    # Built anew, a dozen times in a decision: `_replace` takes twice as long.
    return StepWork(
        tokens - (-load.waiting_tokens * part // of),
        decodes,
        by_decodes,
        -(-load.waiting_attended_tokens * part // of),
        samples - (-load.prompts * part // of),
    )


def with_fresh(work: StepWork, tokens: int) -> StepWork:
    """`work` and the first tokens of a long prompt."""
    return work._replace(
        tokens=work.tokens + tokens, prefill_attended_tokens=attended_tokens(0, tokens)
    )
