"""The scripted plans, applied by the stages' own mirror."""

from benchmark.gpu.script import PlanWriter, Script
from sgl_pipeline.wire.step_order import RequestMirror, StepOrder

SCRIPT = Script(num_requests=6, prompt_tokens=5, num_rounds=3, prefill_requests=4)


def applied(mirror: RequestMirror, plans: list[StepOrder]) -> list[list[tuple[int, int, int]]]:
    """The first page, start and length of each chunk, step by step; every chunk has all tokens and
    pages of its request."""
    steps = []
    for plan in plans:
        chunks = mirror.apply(plan)
        for chunk in chunks:
            assert len(chunk.request.tokens) == chunk.start + chunk.length
            assert len(chunk.request.pages) * 4 >= chunk.start + chunk.length
        steps.append([(chunk.request.pages[0], chunk.start, chunk.length) for chunk in chunks])
    return steps


def test_prompts_are_prefilled_once_each_on_pages_of_their_own() -> None:
    mirror, writer = RequestMirror(), PlanWriter(SCRIPT, page_size=4, vocab_size=100)
    steps = applied(mirror, writer.prefills())
    assert steps == [[(2 * request, 0, 5) for request in range(4)], [(8, 0, 5), (10, 0, 5)]]
    pages = [page for request in mirror for page in request.pages]
    assert sorted(pages) == list(range(SCRIPT.total_tokens(4) // 4))


def test_decodes_begin_again_after_the_prompt_with_the_same_tokens() -> None:
    mirror, writer = RequestMirror(), PlanWriter(SCRIPT, page_size=4, vocab_size=100)
    applied(mirror, writer.prefills())
    whole = {tuple(request.pages): request.tokens.tolist() for request in mirror}
    for num_requests, num_groups in ((6, 2), (4, 3)):
        steps = applied(mirror, writer.decodes(num_requests, num_groups))
        assert len(steps) == 3 * num_groups
        for round_number in range(3):
            of_round = steps[round_number * num_groups : (round_number + 1) * num_groups]
            decoded = sorted(chunk for step in of_round for chunk in step)
            assert decoded == [(2 * each, 5 + round_number, 1) for each in range(num_requests)]
        for request in mirror:
            assert request.tokens.tolist()[:5] == whole[tuple(request.pages)]
    # A request is open once, however often it was opened.
    assert len(mirror) == 6
