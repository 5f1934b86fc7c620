"""The step plans that drive stage processes in place of a scheduler.

What each request's tokens are is fixed beforehand, so that every depth and link that runs the same
steps must draw the same tokens. Written for `pipelines.py`; knows nothing of processes.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_pipeline.requests import GREEDY
from sgl_pipeline.wire.step_order import INT32, ChunkOrder, RequestOpen, StepOrder


@dataclass(frozen=True, slots=True)
class Script:
    """`num_requests` prompts of `prompt_tokens`, prefilled `prefill_requests` a step, and decodes
    of `num_rounds` tokens each that begin after the prompt, as often as they are asked for."""

    num_requests: int = 256
    prompt_tokens: int = 1000
    num_rounds: int = 48
    prefill_requests: int = 2

    @property
    def tokens_a_request(self) -> int:
        return self.prompt_tokens + self.num_rounds

    def pages_a_request(self, page_size: int) -> int:
        return -(-self.tokens_a_request // page_size)

    def total_tokens(self, page_size: int) -> int:
        """The tokens that the KV pool must hold."""
        return self.num_requests * self.pages_a_request(page_size) * page_size


class PlanWriter:
    """Writes the plans of a script, numbered like those of a server.

    Every request keeps its pages. Decodes open their requests anew after the prompt, whose keys and
    values are in these pages since the prefill: to a stage they are hits of a prefix cache.
    """

    def __init__(self, script: Script, page_size: int, vocab_size: int) -> None:
        self.script = script
        self._pages_each = script.pages_a_request(page_size)
        self._vocab_size = vocab_size
        self._handles: dict[int, int] = {}  # of the requests that are open
        self._next_handle = 0
        self._next_step_id = 0

    def prefills(self) -> list[StepOrder]:
        """All prompts, each in one chunk; to be run first."""
        requests = range(self.script.num_requests)
        size = self.script.prefill_requests
        groups = [requests[first : first + size] for first in requests[::size]]
        return [self._first_plan(group, 0, self.script.prompt_tokens) for group in groups]

    def decodes(self, num_requests: int, num_groups: int) -> list[StepOrder]:
        """Round after round, a step for each of `num_groups` groups of the first `num_requests`."""
        groups = [range(num_requests)[group::num_groups] for group in range(num_groups)]
        start = self.script.prompt_tokens
        plans = [self._first_plan(group, start, 1) for group in groups]
        for position in range(start + 1, self.script.tokens_a_request):
            for group in groups:
                chunks = [self._next_chunk(request, position) for request in group]
                plans.append(self._plan((), (), chunks))
        return plans

    def _first_plan(self, requests: Sequence[int], start: int, length: int) -> StepOrder:
        """Closes and opens `requests`, and runs `length` tokens of each from `start` on."""
        closes = tuple(self._handles.pop(each) for each in requests if each in self._handles)
        opens, chunks = [], []
        for request in requests:
            handle = self._handles[request] = self._next_handle
            self._next_handle += 1
            opens.append(RequestOpen(handle, GREEDY, self.script.prompt_tokens))
            pages = range(request * self._pages_each, (request + 1) * self._pages_each)
            tokens = self._tokens(request, 0, start + length)
            page_bytes = array(INT32, pages).tobytes()
            chunks.append(ChunkOrder(handle, start, length, True, tokens, page_bytes))
        return self._plan(closes, tuple(opens), chunks)

    def _next_chunk(self, request: int, position: int) -> ChunkOrder:
        tokens = self._tokens(request, position, 1)
        return ChunkOrder(self._handles[request], position, 1, True, tokens)

    def _plan(
        self, closes: tuple[int, ...], opens: tuple[RequestOpen, ...], chunks: list[ChunkOrder]
    ) -> StepOrder:
        plan = StepOrder(self._next_step_id, 0, closes, opens, tuple(chunks))
        self._next_step_id += 1
        return plan

    def _tokens(self, request: int, first: int, count: int) -> bytes:
        """The scripted tokens of positions `first` on."""
        positions = range(first, first + count)
        ids = [(request * 7919 + position * 31) % self._vocab_size for position in positions]
        return array(INT32, ids).tobytes()
