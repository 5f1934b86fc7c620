"""The throttle's knobs while the server runs: checked, changed between two steps, taken back.

`PipelineCore` asks before each step whether a change is to go back. The policy itself stays a pure
function: a change puts another one in its place.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace

import msgspec

from sgl_pipeline.args import ACCOUNTINGS, POLICIES, ThrottleArgs
from sgl_pipeline.errors import ConfigurationError, RequestError
from sgl_pipeline.records.event import Event
from sgl_pipeline.records.throttle_change import Author, Cause, Knob, ThrottleChange
from sgl_pipeline.scheduling import StepScheduler
from sgl_pipeline.throttle import make_policy

MAX_HISTORY = 64
MAX_SPREAD_STEPS = 1024
MAX_TTFT_WEIGHT = 1024.0
MIN_TARGET_MS, MAX_TARGET_MS = 0.01, 1e7
# None leaves them to the policy.
OPTIONAL_KNOBS = ("max_prefill_tokens", "target_tpot_ms", "target_ttft_ms")
MAX_REVERT_S = 7 * 24 * 3600.0
CLOCK = Author("clock", "")


class ThrottleState(msgspec.Struct, frozen=True, kw_only=True):
    """The knobs in force. `prefill_limit` is the most prefill tokens of a step, which the policy
    names where `max_prefill_tokens` is None. `reverts_to` has the knobs that revert at
    `reverts_at_s`, if any. `history` holds the newest changes, oldest first."""

    knobs: dict[str, Knob]
    prefill_limit: int
    reverts_at_s: float | None
    reverts_to: dict[str, Knob]
    history: tuple[ThrottleChange, ...]


class ThrottleControl:
    """The knobs of one scheduler: the fields of `ThrottleArgs`, and `accounting`. `events` gets
    each change; it is the list of the `PipelineCore` that has this control.

    Args:
        throttle: the arguments that `scheduler` was made with.
        accounting: the same.
        most_prefill_tokens: the most that the stages have memory for in a step.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        throttle: ThrottleArgs,
        accounting: str,
        most_prefill_tokens: int,
    ) -> None:
        self._scheduler = scheduler
        self._most_prefill_tokens = most_prefill_tokens
        self.at_start = self._knobs = asdict(throttle) | {"accounting": accounting}
        self._prefill_limit = throttle.prefill_limit
        self._history: deque[ThrottleChange] = deque(maxlen=MAX_HISTORY)
        self._num_changes = 0
        self.events: list[Event] = []
        # Time and values to which all knobs revert.
        self._revert_s: float | None = None
        self._revert_knobs = self._knobs

    @property
    def knobs(self) -> dict[str, Knob]:
        """The knobs in force."""
        return dict(self._knobs)

    @property
    def ranges(self) -> dict[str, list[Knob]]:
        """The smallest and the largest value of each knob, or all its names."""
        return {
            "policy": list(POLICIES),
            "prefill_spread_steps": [1, MAX_SPREAD_STEPS],
            "max_prefill_tokens": [1, self._most_prefill_tokens],
            "min_prefill_tokens": [1, self._most_prefill_tokens],
            "pause_free_share": [0.0, 0.999],
            "dynamic_chunking": [False, True],
            "ttft_weight": [0.0, MAX_TTFT_WEIGHT],
            "target_tpot_ms": [MIN_TARGET_MS, MAX_TARGET_MS],
            "target_ttft_ms": [MIN_TARGET_MS, MAX_TARGET_MS],
            "accounting": list(ACCOUNTINGS),
        }

    def state(self) -> ThrottleState:
        """The current knobs."""
        reverts = self._revert_s is not None
        return ThrottleState(
            knobs=self.knobs,
            prefill_limit=self._prefill_limit,
            reverts_at_s=self._revert_s,
            reverts_to=_changed(self._revert_knobs, self._knobs) if reverts else {},
            history=tuple(self._history),
        )

    def change(
        self,
        values: Mapping[str, Knob],
        author: Author,
        now_s: float,
        revert_after_s: float | None = None,
        cause: Cause = "operator",
    ) -> ThrottleChange | None:
        """Sets some knobs; None where all of them have these values already.

        With `revert_after_s` all knobs go back after that time. Several such changes in a row go
        back to where the first began; a change that is to stay keeps them all. Raises RequestError
        (400), with the range, for a value outside it.
        """
        if revert_after_s is not None and not 0.0 < revert_after_s <= MAX_REVERT_S:
            raise RequestError(
                f"revert_after_s is {revert_after_s:g}; it must be above 0 and at most "
                f"{MAX_REVERT_S:.0f}"
            )
        knobs = self._checked(values)
        if revert_after_s is None:
            self._revert_s = None
        elif self._revert_s is not None or knobs != self._knobs:
            if self._revert_s is None:
                self._revert_knobs = self._knobs
            self._revert_s = now_s + revert_after_s
        return self._set(knobs, author, now_s, cause, revert_after_s)

    def undo(self, author: Author, now_s: float) -> ThrottleChange:
        """Goes back to the knobs before the newest change, which an `undo` may have been.

        Raises RequestError (409) if nothing has changed.
        """
        if not self._history:
            raise RequestError("no knob has changed: there is nothing to undo", status_code=409)
        self._revert_s = None
        change = self._set(self._knobs | self._history[-1].before, author, now_s, "undo", None)
        assert change is not None, "a change that changed nothing is in the history"
        return change

    def revert_if_due(self, now_s: float) -> None:
        """Reverts changes whose time is over; to be called before each step."""
        if self._revert_s is not None and now_s >= self._revert_s:
            self._revert_s = None
            self._set(self._revert_knobs, CLOCK, now_s, "revert", None)

    def _checked(self, values: Mapping[str, Knob]) -> dict[str, Knob]:
        """All knobs, with these values replaced. Raises RequestError as `change`."""
        ranges = self.ranges
        for name, value in values.items():
            if name not in ranges:
                raise RequestError(f"there is no knob {name!r}; there are {', '.join(ranges)}")
            allowed = ranges[name]
            if isinstance(allowed[0], str | bool):
                if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
                    names = ", ".join(map(str, allowed))
                    raise RequestError(f"{name} is {value!r}; it must be one of {names}")
            elif name not in OPTIONAL_KNOBS or value is not None:
                low, high = allowed
                if not (isinstance(value, int | float) and low <= value <= high):  # type: ignore[operator]
                    raise RequestError(f"{name} is {value!r}; it must be between {low} and {high}")
        knobs = self._knobs | dict(values)
        limit = _throttle(knobs).prefill_limit
        if limit > self._most_prefill_tokens:
            raise RequestError(
                f"policy {knobs['policy']} would give a step {limit} prefill tokens, the stages "
                f"have memory for {self._most_prefill_tokens}; set max_prefill_tokens as well"
            )
        return knobs

    def _set(
        self,
        knobs: dict[str, Knob],
        author: Author,
        now_s: float,
        cause: Cause,
        revert_after_s: float | None,
    ) -> ThrottleChange | None:
        """Puts `knobs` in force and notes what changed, if anything did."""
        after = _changed(knobs, self._knobs)
        if not after:
            return None
        throttle = _throttle(knobs)
        self._scheduler.use_policy(make_policy(throttle), str(knobs["accounting"]))
        change = ThrottleChange(
            change=self._num_changes,
            cause=cause,
            author=author,
            changed_s=now_s,
            first_step=self._scheduler.next_step_id,
            before=_changed(self._knobs, knobs),
            after=after,
            revert_after_s=revert_after_s,
        )
        self._knobs, self._prefill_limit = knobs, throttle.prefill_limit
        self._num_changes += 1
        self._history.append(change)
        self.events.append(change)
        return change


def _changed(knobs: Mapping[str, Knob], others: Mapping[str, Knob]) -> dict[str, Knob]:
    """The `knobs` that differ from the others."""
    return {name: value for name, value in knobs.items() if value != others[name]}


def _throttle(knobs: Mapping[str, Knob]) -> ThrottleArgs:
    """The arguments of the policy. Raises RequestError if two of them do not go together."""
    values = {name: value for name, value in knobs.items() if name != "accounting"}
    try:
        return replace(ThrottleArgs(), **values)  # type: ignore[arg-type]
    except ConfigurationError as error:
        raise RequestError(str(error)) from error
