"""Counts how often the drafts of a text were right, by the run of right tokens behind each.

Text repeats itself in runs, so that a chance rises with the run. The simulator serves a text again
by these counts (`simulator/virtual_drafts.py`).
"""

import msgspec

# Right tokens of the longest run that is counted apart; longer runs count as it.
LONGEST_RUN = 11


def _zeros() -> list[int]:
    return [0] * (LONGEST_RUN + 1)


class DraftRuns(msgspec.Struct, array_like=True):
    """Counts of one text. Of its `lookups` behind a wrong token, or behind one without a draft,
    `found` had a draft. Of the draft tokens behind i right ones `checked[i]` were compared with
    what was drawn, and `right[i]` were equal. `run` is the present one."""

    lookups: int = 0
    found: int = 0
    checked: list[int] = msgspec.field(default_factory=_zeros)
    right: list[int] = msgspec.field(default_factory=_zeros)
    run: int = 0

    def note(self, num_drafted: int, num_right: int) -> None:
        """Another lookup: a draft of `num_drafted` tokens, 0 where there was none to find.

        Where a whole draft was right, the token behind it was not drafted: its run goes on.
        """
        if not self.run:
            self.lookups += 1
            self.found += num_drafted > 0
        for place in range(min(num_drafted, num_right + 1)):
            at = min(self.run + place, LONGEST_RUN)
            self.checked[at] += 1
            self.right[at] += place < num_right
        self.run = self.run + num_right + 1 if 0 < num_drafted == num_right else 0
