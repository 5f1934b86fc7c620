"""The tokens in which a model is likely to write a text."""

from collections.abc import Callable, Sequence
from functools import lru_cache

# Of a longer text the beginning, which is more than a draft.
MAX_CHARACTERS = 128
MAX_TEXTS = 4096
# Goes before a text, so that a tokenizer that begins each text with a space puts it there. No
# token of text has it inside.
_ANCHOR = "\0"


class TextTokens:
    """Remembers the tokens of the latest MAX_TEXTS texts: grammars force few ones, again and again.

    Args:
        encode: the tokens of a text, without such as begin or end a text.
        all_bytes: the bytes of each token; asked for once, with the first text.
    """

    def __init__(
        self, encode: Callable[[str], Sequence[int]], all_bytes: Callable[[], Sequence[bytes]]
    ) -> None:
        self._encode = encode
        self._all_bytes = lru_cache(1)(all_bytes)
        self._of_text = lru_cache(MAX_TEXTS)(self._tokens_of)

    def of(self, text: str) -> tuple[int, ...]:
        """The tokens of the first MAX_CHARACTERS of `text`; none where they are not tokens of their
        own behind other text."""
        return self._of_text(text[:MAX_CHARACTERS])

    def _tokens_of(self, text: str) -> tuple[int, ...]:
        token_ids, token_bytes = self._encode(_ANCHOR + text), self._all_bytes()
        expected = text.encode()
        begin, num_bytes = len(token_ids), 0
        while begin and num_bytes < len(expected):
            begin -= 1
            num_bytes += len(token_bytes[token_ids[begin]])
        behind = tuple(token_ids[begin:])
        is_equal = b"".join(token_bytes[token] for token in behind) == expected
        return behind if is_equal else ()
