"""The orders and reports about pages that a prefill server lends for attention.

A decode server may leave the keys and values of a request on the prefill server that has computed
its prompt, and have the attention over them computed there (attention offload, Adrenaline, arXiv
2503.20552). The prefill server's scheduler lends a *lease*: the pages of the prompt, which no step
writes any more, and fresh pages for all tokens to come. Stages of the decode server send queries,
keys and values of the rows of a layer, and get the attention's results (`attention_messages.py`).

A stage that has obeyed `LendPages` says so; until then the scheduler announces the lease to no
server. A stage that has obeyed `EndLease` touches none of its pages any more, so steps behind that
order may write them. A stage forgets all leases where it forgets offers (`store_orders.py`); they
are not made again.
"""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]


class LendPages(msgspec.Struct, frozen=True, tag=True):
    """Let peers whose `digest` is this one attend over `pages` and write into those from
    `first_own` on. `pages` is an int32 array in the sequence of the request's tokens. The number of
    a `lease` is used once."""

    lease: Count
    pages: bytes
    first_own: Count
    digest: str


class EndLease(msgspec.Struct, frozen=True, tag=True):
    """Let no peer use the pages of `lease` any more."""

    lease: Count


class PagesLent(msgspec.Struct, frozen=True, tag=True):
    """The stage has obeyed a `LendPages`."""

    stage: Count
    lease: Count


class OffloadedWork(msgspec.Struct, frozen=True, array_like=True):
    """One stage's attention of one step that had offloaded rows, over all its layers.

    `local_tokens` and `remote_tokens` are pairs of a row and a token that it attends to, in one
    layer. Local attention took `local_s`, that of the executors `remote_s`, as these say; from the
    send of a layer's rows to their results it was `trip_s`, and the stage waited for `wait_s`
    behind its own attention.
    """

    num_layers: Count
    local_tokens: Count
    remote_tokens: Count
    local_s: float
    remote_s: float
    trip_s: float
    wait_s: float


LeaseOrder = LendPages | EndLease
