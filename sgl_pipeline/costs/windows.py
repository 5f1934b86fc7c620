"""The work of a step in a layer that sees only a window of the last tokens."""

from sgl_pipeline.step_work import StepWork


def windowed_work(work: StepWork, window: int) -> StepWork:
    """`work` where no row attends to more than `window` tokens.

    Exact where either all rows of a kind, decodes or a prompt's, see the whole window or none does;
    else an upper bound, since the numbers of a step are sums. More work never becomes less.
    """
    tokens, decodes, by_decodes, by_prefill, samples = work
    return StepWork(
        tokens,
        decodes,
        min(by_decodes, window * decodes),
        min(by_prefill, window * (tokens - decodes)),
        samples,
    )
