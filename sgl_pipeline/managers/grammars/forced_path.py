"""Texts that a grammar forces behind an output and behind the tokens that were tried after it: how
the model writes one is learned when the output gets there."""

from sgl_pipeline.managers.grammars.text_tokens import TextTokens


class ForcedPath:
    """The forced texts of one output, by the number of tokens that were tried before them."""

    def __init__(self, text_tokens: TextTokens) -> None:
        self._text_tokens = text_tokens
        # The text that is forced behind the output, then behind each tried token; empty where none
        # is known.
        self._texts = [b""]
        self._tried: list[int] = []

    def forces(self, text: bytes, num_tried: int) -> None:
        """Behind the first `num_tried` tried tokens comes `text`."""
        self._texts[num_tried] = text

    def tries(self, token_id: int, num_tried: int) -> None:
        """`token_id` is tried behind the first `num_tried` ones; others that were are forgotten."""
        self._tried[num_tried:] = [token_id]
        self._texts[num_tried + 1 :] = [b""]

    def takes(self, token_id: int) -> None:
        """The output has `token_id` now."""
        text, *behind = self._texts
        rest = self._text_tokens.note(text, token_id) if text else b""
        if self._tried[:1] == [token_id]:
            del self._tried[0]
            self._texts = [behind[0] or rest, *behind[1:]]
        else:
            self._tried, self._texts = [], [rest]
