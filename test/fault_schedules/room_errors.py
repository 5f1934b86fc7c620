"""The errors with which a request of two halves may end, each with its HTTP status."""

import re

from fault_schedules.fake_front import BY_CLIENT

from sgl_pipeline.requests import FinishReason

SERVER_DIED = FinishReason("abort", message="the server died", status_code=500)
REFUSED = FinishReason("abort", message="connection refused", status_code=503)
_SERVER = r"the prefill server failed: "
REJECTED = rf"{_SERVER}digest \S+ of the decode server \S+ is not \S+, that of the prefill server"
# By patterns of their words; None: any status. First those of a request itself.
OWN_STATUSES = {
    r"the client has left": 500,
    r"\d+ requests wait already, the limit is \d+; ": 503,
    r"The request is aborted by a higher priority request\.$": 503,
    r"Request (waiting|running) timeout reached\.$": 503,
    r"\d+ prompt tokens and max_new_tokens \d+ do not fit the KV pool of \d+ tokens that is": 503,
    r"bootstrap_room \d+ belongs to another request$": 400,
}
STATUSES: dict[str, int | None] = {
    **OWN_STATUSES,
    # Of a room.
    r"the decode server is gone: it (broke|is silent)$": 503,
    rf"{_SERVER}p:\d is (gone: it broke|silent)$": 503,
    rf"{_SERVER}p:\d: (it broke|connection refused|no answer)$": 503,
    rf"{_SERVER}no host: cannot be dialed$": 503,
    REJECTED: 500,
    rf"{_SERVER}it has not said who it is$": 500,
    r"a stage of the prefill server was lost with the prompt's pages$": 503,
    r"the prefill server \S+( \S+)? was not ready for \S+ s$": 503,
    r"the prompt has not come for \S+ s: .+": 503,
    r"p:\d does not give the pages of the prompt: .+": 503,
    r"other requests needed the pages, and no decode server had asked for the room for \S+ s$": 503,
    r"no decode server has asked for the room for \S+ s$": 503,
    r"the decode server has not read the pages for \S+ s$": 503,
    r"the prefill server has got no request of the room for \S+ s$": 503,
    # Of a server that has ended.
    r"the server died$": 500,
    r"connection refused$": 503,
    r".*(stage|worker)": None,
}


def name_of(finish: FinishReason) -> str:
    """The pattern that an error has. Raises AssertionError for one that has none, or another
    status."""
    for pattern, status in STATUSES.items():
        if re.match(pattern, finish.message):
            # Nobody reads the status of a client that has left.
            is_right = status in (None, finish.status_code) or finish is BY_CLIENT
            assert is_right, f"another status: {finish}"
            return pattern
    raise AssertionError(f"an error without a name: {finish}")


def is_its_own(finish: FinishReason) -> bool:
    """True if a half has ended by itself, whatever has become of the other one."""
    return any(re.match(pattern, finish.message) for pattern in OWN_STATUSES)
