"""A change of the throttle's knobs while the server runs: by whom, when, from what to what."""

from typing import ClassVar, Literal

import msgspec

from sgl_pipeline.records.event import Event

Knob = bool | int | float | str | None
Cause = Literal["operator", "undo", "revert", "tune"]


class Author(msgspec.Struct, frozen=True):
    """The author of a change: one with the `admin` key, with the `api` key, or where none is needed
    (`none`), and the address. The clock is the author of what goes back by itself."""

    key: Literal["admin", "api", "none", "clock"]
    client: str


class ThrottleChange(msgspec.Struct, Event, frozen=True, kw_only=True):
    """`before` and `after` hold the knobs that changed. `first_step` is the first step that the new
    ones decide, `changed_s` a moment of the driver's clock. `revert_after_s`: seconds until the
    change goes back by itself; None: it stays."""

    trace_key: ClassVar[str] = "throttle_change"

    change: int
    cause: Cause
    author: Author
    changed_s: float
    first_step: int
    before: dict[str, Knob]
    after: dict[str, Knob]
    revert_after_s: float | None = None

    @property
    def label(self) -> str:
        return f"throttle change {self.change}"
