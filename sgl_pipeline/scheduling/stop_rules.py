"""Decides whether a request ends with its newest token.

It never changes the request, except its constraint, which takes the token.
"""

from sgl_pipeline.requests import FinishReason, Request

LENGTH = FinishReason("length")


def finish_reason(request: Request) -> FinishReason | None:
    """The reason why the request ends now, or None. In SGLang's order: a constraint that cannot go
    on, stop string, stop token, length, a constraint that is complete.

    Called once after each new output token, and after the prefill of a request that wants no
    tokens. A stop check that raises ends its own request with status 500.
    """
    stops, output_ids = request.stops, request.output_ids
    constrained = None
    if output_ids:
        if request.constraint is not None:
            constrained = request.constraint.accept(output_ids[-1])
            if constrained is not None and constrained.kind == "abort":
                return constrained
        if stops.check_text is not None:
            try:
                matched_text = stops.check_text(output_ids)
            except Exception as error:
                message = f"the check for stop strings failed: {error}"
                return FinishReason("abort", message=message, status_code=500)
            if matched_text is not None:
                return matched_text
        if output_ids[-1] in stops.stop_token_ids:
            return FinishReason("stop", matched=output_ids[-1])
    return LENGTH if len(output_ids) >= stops.max_new_tokens else constrained
