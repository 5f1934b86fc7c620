"""Compiled grammars by kind and text, the least recently used forgotten first.

Also remembers why a grammar cannot be compiled, where that is certain.
"""

from collections import OrderedDict

import xgrammar


class GrammarCache:
    """Keeps at most `max_bytes`, as xgrammar estimates them, and the texts."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._outcomes: OrderedDict[tuple[str, str], tuple[xgrammar.CompiledGrammar | str, int]] = (
            OrderedDict()
        )

    def __len__(self) -> int:
        return len(self._outcomes)

    def get(self, key: tuple[str, str]) -> xgrammar.CompiledGrammar | str | None:
        """The grammar, the reason why there is none, or None if it is not known."""
        if key not in self._outcomes:
            return None
        self._outcomes.move_to_end(key)
        return self._outcomes[key][0]

    def put(self, key: tuple[str, str], outcome: xgrammar.CompiledGrammar | str) -> None:
        """Remembers the outcome for `key`, which must not be here yet."""
        # A character of Python text takes at most four bytes.
        num_bytes = 4 * len(key[1])
        num_bytes += 4 * len(outcome) if isinstance(outcome, str) else outcome.memory_size_bytes
        self._outcomes[key] = (outcome, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            _, (_, forgotten_bytes) = self._outcomes.popitem(last=False)
            self._num_bytes -= forgotten_bytes

    def clear(self) -> None:
        self._outcomes.clear()
        self._num_bytes = 0
