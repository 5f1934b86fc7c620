"""Tokens as text, and text as tokens: what a mask forces, and how a model would write it."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise, takewhile

import numpy as np

# Where more tokens are allowed, a text is hardly ever forced.
MOST_ALLOWED = 64
# Texts whose tokens are kept: grammars force few ones, again and again.
MAX_TEXTS = 4096
# A token stays the first of its text until another one was drawn as often, `MOST_VOTES` at most.
MOST_VOTES = 4
# Goes before a text, so that a tokenizer that begins each text with a space puts it there. No
# token of text has it inside.
_ANCHOR = "\0"


class TextTokens:
    """The texts of a vocabulary's tokens.

    Args:
        encode: the tokens of a text, without such as begin or end a text.
        all_bytes: the bytes of each token; asked for once, by `prepare` or when first needed.
        textless_ids: tokens that stand for no text.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        all_bytes: Callable[[], Sequence[bytes]],
        textless_ids: frozenset[int],
    ) -> None:
        self.textless_ids = textless_ids
        self._encode = encode
        self._all_bytes = lru_cache(1)(all_bytes)
        self._of_text = lru_cache(MAX_TEXTS)(self._tokens_of)
        # The token that a text was begun with, and its votes; those noted last come last.
        self._first_tokens: dict[bytes, tuple[int, int]] = {}

    def prepare(self) -> None:
        """Reads the bytes of all tokens, tens of milliseconds that a draft has no time for."""
        self._all_bytes()

    def forced_by(self, mask: np.ndarray) -> tuple[bytes, bool]:
        """The text that each allowed token is the beginning of, or begins with; and True if what
        follows it may be forced too.

        Args:
            mask: int32 [ceil(V / 32)], bit i % 32 of word i // 32 allows token i.
        """
        words = np.flatnonzero(mask)
        if not 0 < len(words) <= MOST_ALLOWED:
            return b"", False
        is_allowed = np.unpackbits(mask[words].view(np.uint8), bitorder="little").astype(bool)
        allowed = (words[:, None] * 32 + np.arange(32)).ravel()[is_allowed].tolist()
        if len(allowed) > MOST_ALLOWED or not self.textless_ids.isdisjoint(allowed):
            return b"", False
        all_bytes = self._all_bytes()
        texts = sorted(all_bytes[token] for token in allowed)
        # A text that others begin with stands right before one of them.
        longest = [one for one, after in pairwise(texts) if not after.startswith(one)]
        longest.append(texts[-1])
        return _common_beginning(longest[0], longest[-1]), len(longest) == 1

    def of(self, text: bytes) -> tuple[int, ...]:
        """The tokens in which the model is likely to write `text`, behind other text: as it did
        before, otherwise as its tokenizer does. A mask allows any tokens that spell a text, and a
        model that is held to one chooses others than the tokenizer would.

        Empty where they are not tokens of their own there. The part of a character at an end of it
        does not count."""
        token_ids: list[int] = []
        while text and (first := self._first_tokens.get(text)) is not None:
            token_ids.append(first[0])
            text = text[len(self._all_bytes()[first[0]]) :]
        return (*token_ids, *self._of_text(text.decode(errors="ignore")))

    def note(self, text: bytes, token_id: int) -> bytes:
        """The model has begun `text` with `token_id`. Returns the rest of the text; empty where the
        token goes beyond it, or is no beginning."""
        written = self._all_bytes()[token_id]
        if not written or not (text.startswith(written) or written.startswith(text)):
            return b""
        known_id, votes = self._first_tokens.pop(text, (token_id, 0))
        votes = min(votes + 1, MOST_VOTES) if token_id == known_id else votes - 1
        self._first_tokens[text] = (known_id, votes) if votes else (token_id, 1)
        if len(self._first_tokens) > MAX_TEXTS:
            del self._first_tokens[next(iter(self._first_tokens))]
        return text[len(written) :]

    def _tokens_of(self, text: str) -> tuple[int, ...]:
        token_ids, all_bytes = self._encode(_ANCHOR + text), self._all_bytes()
        expected = text.encode()
        begin, num_bytes = len(token_ids), 0
        while begin and num_bytes < len(expected):
            begin -= 1
            num_bytes += len(all_bytes[token_ids[begin]])
        behind = tuple(token_ids[begin:])
        is_equal = b"".join(all_bytes[token] for token in behind) == expected
        return behind if is_equal else ()


def _common_beginning(one: bytes, other: bytes) -> bytes:
    pairs = zip(one, other, strict=False)
    return bytes(byte for byte, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
