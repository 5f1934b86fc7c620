"""Log-probabilities of the prompt, where prefill and decode are apart.

The prefill server has them, because it computes the prompt. SGLang's router puts its lists before
the decode server's in answers of `/generate` that are not streamed, and nowhere else: there the
decode server gives none, and elsewhere it computes what the client asks for.
"""

from typing import Any

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

MERGED_ROUTE = "/generate"


def leave_to_prefill(obj: Any, path: str) -> None:
    """Makes `obj` ask a decode server for log-probabilities of the output alone, where a router
    adds the prompt's.

    Args:
        obj: a GenerateReqInput before upstream has touched it, or another request (not changed).
        path: of its route.
    """
    host = getattr(obj, "bootstrap_host", None)
    if path == MERGED_ROUTE and not obj.stream and host not in (None, FAKE_BOOTSTRAP_HOST):
        obj.logprob_start_len = None
