"""Bodies of `PATCH /pipeline/throttle` and `POST /pipeline/tune`, read strictly, and their authors.

Types are checked here, ranges where the knobs are (`pipeline/throttle_control.py`).
"""

from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from sgl_pipeline.decoding import decode
from sgl_pipeline.errors import MalformedData, RequestError
from sgl_pipeline.managers.channels.operator_channel import ChangeThrottle, UndoThrottle
from sgl_pipeline.records.throttle_change import Author, Knob

_HOW_TO_CHANGE = (
    'send knobs such as {"prefill_spread_steps": 4}, with "revert_after_s" if they should revert, '
    'or {"undo": true}; GET /pipeline/throttle shows knobs and ranges'
)
Body = TypeVar("Body")


class ThrottleBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of PATCH /pipeline/throttle; what is left out stays."""

    policy: str | UnsetType = UNSET
    prefill_spread_steps: int | UnsetType = UNSET
    max_prefill_tokens: int | UnsetType | None = UNSET
    min_prefill_tokens: int | UnsetType = UNSET
    pause_free_share: float | UnsetType = UNSET
    dynamic_chunking: bool | UnsetType = UNSET
    ttft_weight: float | UnsetType = UNSET
    target_tpot_ms: float | UnsetType | None = UNSET
    target_ttft_ms: float | UnsetType | None = UNSET
    accounting: str | UnsetType = UNSET
    revert_after_s: float | None = None
    undo: bool = False

    @property
    def knobs(self) -> dict[str, Knob]:
        """The knobs that are named."""
        named = ((name, getattr(self, name)) for name in KNOBS)
        return {name: value for name, value in named if value is not UNSET}

    def question(self, author: Author) -> ChangeThrottle | UndoThrottle:
        """The question to ask. Raises RequestError unless knobs or `undo` are named."""
        if self.undo:
            if self.knobs or self.revert_after_s is not None:
                raise RequestError(f"undo stands alone; {_HOW_TO_CHANGE}")
            return UndoThrottle(author)
        if not self.knobs:
            raise RequestError(f"no knob is named; {_HOW_TO_CHANGE}")
        return ChangeThrottle(self.knobs, author, self.revert_after_s)


KNOBS = tuple(
    field.name
    for field in msgspec.structs.fields(ThrottleBody)
    if field.name not in ("revert_after_s", "undo")
)


def read_body(body: bytes, kind: type[Body], how_to_ask: str = _HOW_TO_CHANGE) -> Body:
    """The body as a `kind`. Raises RequestError for any other."""
    try:
        return decode(msgspec.json.Decoder(kind), body)
    except MalformedData as error:
        raise RequestError(f"the body cannot be read: {error}; {how_to_ask}") from error


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The keys that upstream checks before our routes are called."""

    api_key: str | None = None
    admin_api_key: str | None = None

    def author_of(self, request: Request) -> Author:
        """The author of an accepted request."""
        client = request.client.host if request.client is not None else ""
        # Upstream's order for administrative routes.
        if self.admin_api_key:
            return Author("admin", client)
        return Author("api" if self.api_key else "none", client)
