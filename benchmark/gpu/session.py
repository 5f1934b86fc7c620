"""One run of the GPU benchmark: what it was asked for, what it found, and how much time is left.

Shared by the parts (`part_*.py`). Work is done in pieces, each by `Session.attempt`: a piece that
does not fit the time, or that raises an error, is named with the reason and ends nothing else.
All that was found is saved after every piece.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmark.gpu.checks import Check
from benchmark.gpu.device_times import release_memory
from benchmark.gpu.limits import CardLimits

Row = dict[str, Any]

_ERROR_CHARACTERS = 400
# FlashInfer's error, and its flag, which a stage process's report may be all that is left of.
_MISSING_KERNEL_SIGNS = ("MissingJITCacheError", "FLASHINFER_DISABLE_JIT")


class Budget:
    """The seconds of a run, and how long pieces of each kind have taken.

    Args:
        clock: seconds, of any origin.
        deadline_s: when the run should end, by that clock.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._longest_s: dict[str, float] = {}

    @property
    def left_s(self) -> float:
        return self._deadline_s - self._clock()

    def expected_s(self, kind: str, guess_s: float) -> float:
        """The longest that a piece of `kind` has taken; `guess_s` before the first."""
        return self._longest_s.get(kind, guess_s)

    def book(self, kind: str, seconds: float) -> None:
        """Takes note of how long a piece of `kind` took."""
        self._longest_s[kind] = max(seconds, self._longest_s.get(kind, 0.0))

    def now_s(self) -> float:
        return self._clock()


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A piece that gave no result. `is_failure`: an error that nothing foresaw, whose `trace` is
    Python's; time, memory, or a kernel that was never built are none."""

    part: str
    what: str
    why: str
    is_failure: bool = False
    trace: str = ""


@dataclass
class Session:
    """The options of a run and its findings so far.

    `rows` are the results by table. `save` writes all of it.
    """

    device: torch.device
    models: Sequence[str]
    depths: Sequence[int]
    extra_steps: Sequence[int]
    budget: Budget
    save: Callable[["Session"], None] = lambda session: None
    limits: CardLimits | None = None
    checks: list[Check] = field(default_factory=list)
    rows: dict[str, list[Row]] = field(default_factory=dict)
    not_measured: list[NotMeasured] = field(default_factory=list)
    part: str = ""  # the one that runs
    parts_left: tuple[str, ...] = ()
    is_card_lost: bool = False

    def attempt(
        self, what: str, work: Callable[[], None], *, kind: str = "", guess_s: float = 0.0
    ) -> bool:
        """Does `work` if there is time for it, and says whether it ended well.

        Args:
            kind: pieces that take about equally long, of which the longest so far must fit into
                the time that is left; `guess_s` is for the first.
        """
        kind = kind or what
        left_s, needed_s = self.budget.left_s, self.budget.expected_s(kind, guess_s)
        if left_s <= needed_s:
            self.skip(what, f"no time: {max(0.0, left_s):.0f} s left, about {needed_s:.0f} needed")
            return False
        print(f"[{left_s:4.0f} s left] {what}", flush=True)
        started_s = self.budget.now_s()
        is_done = self._survive(what, work)
        self.budget.book(kind, self.budget.now_s() - started_s)
        self.save(self)
        return is_done

    def skip(self, what: str, why: str) -> None:
        """Names what is not measured."""
        print(f"    not measured: {what} ({why})", flush=True)
        self.not_measured.append(NotMeasured(self.part, what, why))
        self.save(self)

    def say(self, line: str) -> None:
        """Progress within a piece."""
        print(f"    {line}", flush=True)

    def book_checks(self, *checks: Check) -> None:
        """Shows and saves what was compared."""
        for check in checks:
            self.say(" | ".join(check.cells()))
        self.checks += checks
        self.save(self)

    def book_row(self, table: str, row: Row) -> None:
        """Saves what was measured."""
        self.rows.setdefault(table, []).append(row)
        self.save(self)

    def table(self, name: str) -> list[Row]:
        """The rows that were measured for one table."""
        return self.rows.get(name, [])

    @property
    def is_rehearsal(self) -> bool:
        """True if there is no GPU, and steps are few and small."""
        return self.device.type == "cpu"

    @property
    def is_sound(self) -> bool:
        """True if every check that was asked for passed and nothing failed. A check without its
        kernel has not passed; one that there was no time for is named, and no failure."""
        return all(check.passed for check in self.checks) and not any(
            piece.is_failure for piece in self.not_measured
        )

    def _survive(self, what: str, work: Callable[[], None]) -> bool:
        if self.is_card_lost:
            self.skip(what, "an earlier error has cost this process its GPU")
            return False
        try:
            work()
            return True
        except Exception as error:
            self._book_error(what, error)
        # Outside of the handler, where the error's frames hold no more tensors.
        self._look_for_the_card(what)
        return False

    def _book_error(self, what: str, error: Exception) -> None:
        kernel = missing_kernel(error)
        text = " ".join(f"{type(error).__name__}: {error}".split())[:_ERROR_CHARACTERS]
        why = f"no prebuilt kernel {kernel}: {text}" if kernel else text
        is_failure = not kernel or self.part == "checks"
        trace = "" if kernel else "".join(traceback.format_exception(error))
        print(f"    NOT MEASURED: {why}\n{trace}", flush=True)
        self.not_measured.append(NotMeasured(self.part, what, why, is_failure, trace))

    def _look_for_the_card(self, what: str) -> None:
        """After an illegal access every later call of the process would fail as well."""
        if not torch.cuda.is_initialized():
            return
        try:
            torch.cuda.synchronize()
            release_memory()
        except RuntimeError as error:
            self.is_card_lost = True
            self._book_error(f"the GPU after {what}", error)


def missing_kernel(error: BaseException) -> str:
    """The module that FlashInfer was not allowed to compile, if `error` or a cause of it says so:
    `(not named)` where it says no more. Otherwise nothing."""
    found = ""
    cause: BaseException | None = error
    while cause is not None:
        if name := getattr(getattr(cause, "spec", None), "name", ""):
            return str(name)
        if any(sign in f"{type(cause).__name__} {cause}" for sign in _MISSING_KERNEL_SIGNS):
            found = "(not named)"
        cause = cause.__cause__ or cause.__context__
    return found
