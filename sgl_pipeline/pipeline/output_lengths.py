"""Estimates the lengths of answers from the lengths of recent ones.

Answers under way count too, as longer than their present length: without them the short ones, which
end first, would make all answers look short. The estimate of Kaplan and Meier (1958); beyond the
longest answer that has ended, ends come as often as over all tokens.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

_GOLDEN_RATIO = 0.6180339887498949


def even_share(number: int) -> float:
    """The `number`th of a sequence that is spread evenly over [0, 1), however long it is."""
    return (number * _GOLDEN_RATIO + 0.5) % 1.0


class OutputLengths:
    """The lengths of one moment.

    Args:
        ended: tokens of answers that have ended.
        running: tokens that answers under way have drawn.
    """

    def __init__(self, ended: Iterable[int], running: Iterable[int]) -> None:
        lengths = [(max(1, one), False) for one in ended]
        self.num_ended = len(lengths)
        lengths += [(one, True) for one in running if one > 0]
        total_tokens = sum(length for length, _ in lengths)
        self._ends_per_token = self.num_ended / total_tokens if total_tokens else 0.0
        # Lengths at which the share of continuing answers falls, and the new shares; these are kept
        # negative, because a search needs ascending values.
        self._lengths, self._shares = [0], [-1.0]
        at_risk = len(lengths)
        for length, is_running in sorted(lengths):
            if not is_running:
                self._lengths.append(length)
                self._shares.append(self._shares[-1] * (1.0 - 1.0 / at_risk))
            at_risk -= 1

    def left(self, drawn: int, most: int, share: float) -> int:
        """Tokens that an answer of `drawn` tokens will still draw at most with probability `share`.

        At least 1, at most up to `most` in all; up to `most` if no answer has ended.
        """
        left = max(1, most - drawn)
        if not self.num_ended:
            return left
        goes_on = -self._shares[bisect_right(self._lengths, drawn) - 1]
        wanted = goes_on * (1.0 - share)
        last = -self._shares[-1]
        if goes_on < 1e-9:
            length = drawn + self._tail(share)
        elif wanted < last:
            length = max(drawn, self._lengths[-1]) + self._tail(1.0 - wanted / last)
        else:
            length = self._lengths[bisect_left(self._shares, -wanted - 1e-12)]
        return min(max(1, round(length) - drawn), left)

    def _tail(self, share: float) -> float:
        """Most tokens that are drawn with probability `share` when ends come as often as over all
        tokens."""
        return -math.log1p(-min(share, 1.0 - 1e-9)) / self._ends_per_token
