"""Refuses requests that can never be served.

It does not refuse for a momentary lack of room: a request that fits an empty server is accepted and
waits.
"""

from dataclasses import dataclass, replace

from sgl_pipeline.errors import RequestError
from sgl_pipeline.requests import FinishReason, Request


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """`context_length` in tokens is the model's bound, `pool_tokens` that of all KV pages.
    `usual_pool_tokens` is the number at the server's start, if it has fewer now."""

    context_length: int
    pool_tokens: int
    usual_pool_tokens: int = 0

    def with_pool(self, pool_tokens: int) -> "RequestLimits":
        """These limits with a pool of `pool_tokens` tokens; the largest pool so far counts as the
        usual one."""
        usual = max(self.usual_pool_tokens, self.pool_tokens)
        return replace(self, pool_tokens=pool_tokens, usual_pool_tokens=usual)

    def refusal(self, request: Request) -> FinishReason | None:
        """The end of a request that is already served and that `check` raises for; else None."""
        try:
            self.check(request)
        except RequestError as error:
            return FinishReason("abort", message=str(error), status_code=error.status_code)
        return None

    def check(self, request: Request) -> None:
        """Raises RequestError (400) when the request could not be served even alone; 503 if it
        could be served with the usual number of pages."""
        prompt_tokens = len(request.prompt_ids)
        new_tokens = request.stops.max_new_tokens
        if prompt_tokens == 0:
            raise RequestError("the prompt is empty; send at least one token")
        if new_tokens < 0:
            raise RequestError(f"max_new_tokens is {new_tokens}; it must not be negative")
        if prompt_tokens > self.context_length:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens, the context holds {self.context_length}; "
                "shorten the prompt or raise --context-length"
            )
        if prompt_tokens + new_tokens > self.context_length:
            raise RequestError(
                f"{prompt_tokens} prompt tokens and max_new_tokens {new_tokens} exceed the context "
                f"of {self.context_length} tokens; ask for at most "
                f"{self.context_length - prompt_tokens} new tokens or raise --context-length"
            )
        # The last new token is never fed back, so its key and value are never stored.
        stored_tokens = prompt_tokens + max(0, new_tokens - 1)
        if self.pool_tokens < stored_tokens <= self.usual_pool_tokens:
            raise RequestError(
                f"{prompt_tokens} prompt tokens and max_new_tokens {new_tokens} do not fit the KV "
                f"pool of {self.pool_tokens} tokens that is left while fewer stages serve; ask for "
                f"less, or later, when it has {self.usual_pool_tokens} again",
                status_code=503,
            )
        if stored_tokens > self.pool_tokens:
            raise RequestError(
                f"{prompt_tokens} prompt tokens and max_new_tokens {new_tokens} do not fit the KV "
                f"pool of {self.pool_tokens} tokens, even alone; ask for less or raise "
                "--max-total-tokens"
            )
