"""Answers `GET /pipeline/explain/{rid}`, in JSON types and without any request's text."""

from dataclasses import asdict
from typing import Any

from sgl_pipeline.pipeline.request_forecast import RequestForecast
from sgl_pipeline.requests import Request
from sgl_pipeline.scheduling import Explanation, Outlook
from sgl_pipeline.scheduling.draft_reasons import DraftReason

# Rule -> the state of a waiting request that it holds, where that has a name.
_STATES = {"shared-prefix": "parked", "loading": "loading"}


def describe_wait(
    explanation: Explanation,
    outlook: Outlook,
    forecast: RequestForecast,
    drafts: DraftReason | None,
    now_s: float,
) -> dict[str, Any]:
    """A request that waits or runs. `state` is `waiting`, `parked` (another one computes its
    prefix), `loading` (its prefix comes from the store), `retracted`, `prefilling` or `decoding`;
    `rule` and `text` say what holds it; those of `drafts` why it has none now, if the server has
    any.

    Args:
        now_s: the clock of `Request.arrival_s`.
    """
    request, load = outlook.request, outlook.load
    budget = outlook.policy(load)
    state: str = explanation.state
    if state == "waiting" and explanation.rule in _STATES:
        state = _STATES[explanation.rule]
    elif state == "waiting" and request.num_retractions:
        state = "retracted"
    return _described(
        request,
        now_s,
        state=state,
        rule=explanation.rule,
        text=explanation.text,
        behind=explanation.behind,
        num_ahead=explanation.num_ahead,
        drafts=None if drafts is None else _describe_drafts(request, drafts),
        numbers={
            "tokens_ahead": outlook.tokens_ahead,
            "prefill_tokens_left": outlook.own.prefill_tokens,
            "pages_needed": outlook.own.new_pages,
            "pages_available": outlook.available_pages,
            "pages_held": len(request.pages),
            "pages_total": load.total_pages,
            "running_requests": outlook.num_running,
            "max_running_requests": outlook.max_running_requests,
            "running_decodes": load.running_decodes,
            "ready_decodes": load.ready_decodes,
            "waiting_tokens": load.waiting_tokens,
            "prefill_budget": budget.prefill_tokens,
            "decode_budget": budget.decodes,
            "budget_ms": None if budget.time is None else round(budget.time.step_ms, 3),
            "bound_by": budget.bound_by,
            "missed_target": budget.missed,
            "steps_in_flight": load.steps_in_flight,
        },
        estimate=_estimate(forecast) | {"last_token_within_s": _last_token_s(request, now_s)},
    )


def describe_compile(
    request: Request, num_compiling: int, most_seconds: float, now_s: float
) -> dict[str, Any]:
    """A request whose grammar is being compiled, which keeps it out of the queue.

    Args:
        num_compiling: requests that wait for a grammar, this one among them.
        most_seconds: that a compile may take.
        now_s: the clock of `Request.arrival_s`.
    """
    return _described(
        request,
        now_s,
        state="compiling",
        rule="grammar",
        text=f"its grammar is being compiled, which takes at most {most_seconds:g} s "
        "(--grammar-compile-seconds), beside up to three others; then it joins the queue",
        behind=None,
        num_ahead=0,
        drafts=None,
        numbers={"compiling_requests": num_compiling, "most_compile_seconds": most_seconds},
        estimate=_estimate(
            RequestForecast(reason="how long a grammar takes to compile is not known beforehand")
        )
        | {"last_token_within_s": None},
    )


def _describe_drafts(request: Request, reason: DraftReason) -> dict[str, Any]:
    """Counts of the request's drafts so far, and why it has one now or none."""
    counts = request.drafts
    return {
        "rule": reason.rule,
        "text": reason.text,
        "steps": counts.num_steps,
        "drafted_tokens": counts.drafted_tokens,
        "accepted_tokens": counts.accepted_tokens,
    }


def _estimate(forecast: RequestForecast) -> dict[str, Any]:
    numbers = {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in asdict(forecast).items()
    }
    return numbers | {"reason": forecast.reason or None}


def _last_token_s(request: Request, now_s: float) -> float | None:
    """Seconds until its last token, if it draws all that it may, as fast as so far."""
    drawn = len(request.output_ids)
    if request.first_token_s is None or drawn < 2:
        return None
    a_token_s = (now_s - request.first_token_s) / (drawn - 1)
    return round(a_token_s * (request.stops.max_new_tokens - drawn), 3)


def _described(request: Request, now_s: float, **more: Any) -> dict[str, Any]:
    """The fields that every request has, and `more`."""
    return {
        "rid": request.request_id,
        "age_s": round(now_s - request.arrival_s, 3),
        "priority": request.priority,
        "prompt_tokens": len(request.prompt_ids),
        "cached_tokens": request.cached_tokens,
        "loaded_tokens": request.loaded_tokens,
        "computed_tokens": request.num_computed,
        "output_tokens": len(request.output_ids),
        "max_new_tokens": request.stops.max_new_tokens,
        "num_retractions": request.num_retractions,
    } | more
