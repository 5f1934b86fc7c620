"""The sizes of a step's chunks, on which its cost depends, without their requests.

Made from a `Microbatch`, or from a `MadeUpStep`, for the cost models; the only door between the
scheduler's requests and the simulated times.
"""

from collections.abc import Container
from dataclasses import dataclass

from sgl_pipeline.costs.stage_costs import MadeUpStep
from sgl_pipeline.microbatch import Microbatch
from sgl_pipeline.requests import Request
from sgl_pipeline.step_work import StepWork, attended_tokens


@dataclass(frozen=True, slots=True)
class StepShape:
    """`prefills` are pairs (tokens of the chunk, tokens of its request before it). The draft tokens
    of a decode are one of them: they read the same keys together.

    `decode_contexts` are the tokens that each decode attends to, its own among them; the attention
    of the last `num_remote` of them is computed elsewhere. `num_samples` rows go through the head.
    """

    prefills: tuple[tuple[int, int], ...]
    decode_contexts: tuple[int, ...]
    num_samples: int
    num_remote: int = 0

    @classmethod
    def of(cls, microbatch: Microbatch, remote: Container[Request] = ()) -> "StepShape":
        """The shape of `microbatch`, with the attention of decodes of `remote` elsewhere."""
        chunks = microbatch.chunks
        decodes = [chunk for chunk in chunks if chunk.is_decode]
        elsewhere = tuple(chunk.start + 1 for chunk in decodes if chunk.request in remote)
        here = tuple(chunk.start + 1 for chunk in decodes if chunk.request not in remote)
        prompts = [(chunk.length, chunk.start) for chunk in chunks if not chunk.is_decode]
        drafts = [(one.length - 1, one.start + 1) for one in decodes if one.length > 1]
        return cls(
            (*prompts, *drafts),
            here + elsewhere,
            microbatch.num_samples,
            len(elsewhere),
        )

    @classmethod
    def made_up(cls, step: MadeUpStep) -> "StepShape":
        prefills = ((step.prompt_tokens, step.prompt_start),) if step.prompt_tokens else ()
        return cls(prefills, (step.context_tokens + 1,) * step.decodes, step.decodes)

    @property
    def attended_here(self) -> "StepShape":
        """The step with no other decodes than those whose attention is computed here."""
        if not self.num_remote:
            return self
        return StepShape(self.prefills, self.decode_contexts[: -self.num_remote], self.num_samples)

    @property
    def attended_elsewhere(self) -> "StepShape":
        """The other decodes."""
        first = len(self.decode_contexts) - self.num_remote
        return StepShape((), self.decode_contexts[first:], 0)

    @property
    def num_decodes(self) -> int:
        return len(self.decode_contexts)

    @property
    def prefill_tokens(self) -> int:
        return sum(length for length, _ in self.prefills)

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.num_decodes

    @property
    def work(self) -> StepWork:
        """The step as a planner sees it."""
        return StepWork(
            tokens=self.num_tokens,
            decodes=self.num_decodes,
            decode_attended_tokens=sum(self.decode_contexts),
            prefill_attended_tokens=sum(
                attended_tokens(before, before + length) for length, before in self.prefills
            ),
            samples=self.num_samples,
        )
