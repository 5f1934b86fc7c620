"""Drafts whose right tokens are known beforehand, and of which some are spoilt."""

from collections.abc import Mapping, Sequence
from random import Random

from sgl_pipeline.microbatch import Chunk
from sgl_pipeline.pipeline_load import PipelineLoad, TokenBudget
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.scheduling.drafts import Drafts


class ForcedDrafts(Drafts):
    """Drafts of 0 to `most_each` tokens for every decode, in steps with prompts too.

    Args:
        outputs: the output of each request, by its id.
        wrong_share: of the draft tokens that are another token than the request will have.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        outputs: Mapping[str, Sequence[int]],
        wrong_share: float,
        most_each: int = 6,
        seed: int = 0,
    ) -> None:
        super().__init__(most_each, scheduler._pages, scheduler._running)
        self._outputs = outputs
        self._wrong_share = wrong_share
        self._random = Random(seed)
        scheduler.drafts = scheduler._results._drafts = self

    def extend(self, chunks: list[Chunk], load: PipelineLoad, budget: TokenBudget) -> list[Chunk]:
        extended = [
            self._with_draft(chunk, self._forced(chunk.request)) if chunk.is_decode else chunk
            for chunk in chunks
        ]
        return sorted(extended, key=lambda chunk: (not chunk.is_decode, chunk.length > 1))

    def _forced(self, request: Request) -> tuple[int, ...]:
        length = self._random.randrange(self._most_each + 1)
        # The last token ends the request, and none follows it.
        right = self._outputs[request.request_id][len(request.output_ids) : -1][:length]
        is_wrong = [self._random.random() < self._wrong_share for _ in right]
        # Any other token is wrong; the smallest ids are of every vocabulary.
        pairs = zip(right, is_wrong, strict=True)
        return tuple(int(token == 0) if wrong else token for token, wrong in pairs)
