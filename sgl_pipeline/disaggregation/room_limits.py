"""The times for which the two servers of a room wait, and the pages that they keep."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomLimits:
    """Names and defaults of times are SGLang's (`SGLANG_DISAGGREGATION_...`).

    A room fails where the other server has not heard of it `bootstrap_timeout_s` later, or has not
    read its pages `waiting_timeout_s` after these could be read. A decode server begins no load
    without `reserved_tokens` tokens for each request that may grow; where a prompt does not come
    for a reason that is not the request's, it computes it itself if `falls_back`. A prefill server
    admits no request while more than `held_share` of its pages wait to be read, and `lends` pages
    or does not. A peer that says nothing for `silence_s` is dead: a cut of the network of two
    seconds is over by then, since TCP repeats what was lost.
    """

    bootstrap_timeout_s: float = 300.0
    waiting_timeout_s: float = 300.0
    reserved_tokens: int = 512
    held_share: float = 0.5
    falls_back: bool = False
    lends: bool = False
    silence_s: float = 4.0
