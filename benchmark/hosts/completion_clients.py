"""Clients that ask OpenAI's `/v1/completions`, which every engine has."""

from typing import Any

from benchmark.moves.move_gains import Clients, ClosedLoop


class CompletionClients(Clients):
    """A chunk may hold several tokens, and does not say how many: it counts as one, and the rest of
    an answer, whose length is known, counts at its end.

    Args:
        model: the name that the model is served by.
    """

    PATH = "/v1/completions"

    def __init__(self, url: str, load: ClosedLoop, model: str) -> None:
        self._model = model
        super().__init__(url, load)  # starts asking

    def _body(self, prompt: list[int], output_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }

    def _tokens_out(self, line: bytes, shown: int, output_tokens: int) -> int:
        if line == b"data: [DONE]":
            # Below zero where one more chunk has said that the answer ends.
            return output_tokens - shown
        return super()._tokens_out(line, shown, output_tokens)
