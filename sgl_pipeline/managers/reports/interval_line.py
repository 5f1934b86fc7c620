"""The line that the log gets every ten seconds under load."""

import logging

from sgl_pipeline.pipeline.draft_state import DraftState
from sgl_pipeline.pipeline.pipeline_state import PipelineState, TierState

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


class IntervalLine:
    """Logs the state while requests are served, and nothing while the server is idle."""

    def __init__(self) -> None:
        # The state at the start of the interval that the next line covers; None while idle.
        self._since: PipelineState | None = None

    def report(self, state: PipelineState) -> None:
        """Logs a line, if it is time."""
        if not state.has_work:
            self._since = None
        elif self._since is None:
            self._since = state
        elif state.now_s - self._since.now_s >= INTERVAL_S:
            logger.info("%s", status_line(self._since, state))
            self._since = state


def status_line(since: PipelineState, state: PipelineState) -> str:
    """One line about `state`; tokens a second are those scheduled since `since`, of
    drafts the right ones."""
    num_tokens = state.prefill_tokens + state.decoded_tokens
    num_tokens -= since.prefill_tokens + since.decoded_tokens
    idle = ", ".join(f"{1.0 - shares.busy:.0%}" for shares in state.bubble_shares())
    move = state.current_move
    moving = f", moving layers to {','.join(map(str, move.after))}" if move is not None else ""
    missed = state.recent_steps[-1].missed_target if state.recent_steps else None
    replacing = ", replacing a stage" if state.current_recovery is not None else ""
    if state.missing_stages:
        replacing += f", {state.plan.num_stages} of {state.configured_stages} stages"
    slots = ""
    if state.state_slots:
        unused = state.state_slots - state.used_state_slots
        slots = f"free state slots {unused} of {state.state_slots}, "
    slow = "".join(
        f", stage {number} slow ({stage.slowdown:.1f} times)"
        for number, stage in state.slow_stages.items()
    )
    return (
        f"step {state.num_steps}{', paused' if state.is_paused else ''}{moving}{replacing}{slow}: "
        f"waiting {state.waiting_requests} ({state.load.waiting_tokens} tokens), "
        f"running {state.running_requests}, free pages {state.load.free_share:.0%}, {slots}"
        f"{num_tokens / (state.now_s - since.now_s):.0f} tokens/s, "
        f"{_drafts(since.drafts, state.drafts)}"
        f"stages idle {idle or 'unknown'}{f', {missed} target missed' if missed else ''}"
        f"{_store(since.tier, state.tier)}"
    )


def _drafts(since: DraftState, now: DraftState) -> str:
    """The part about drafts that were checked since `since`, or why there were none."""
    steps = now.steps - since.steps
    if not steps:
        return f"no drafts ({now.reason}), " if now.reason and now.rule != "idle" else ""
    accepted = now.accepted_tokens - since.accepted_tokens
    return (
        f"{accepted} of {now.drafted_tokens - since.drafted_tokens} draft tokens right "
        f"({1 + accepted / steps:.1f} tokens a decode with drafts), "
    )


def _store(since: TierState | None, now: TierState | None) -> str:
    """The store's part; tokens are those loaded and saved since `since`."""
    if now is None or now.backend is None:
        return ""
    before = since or TierState(backend=None)
    return (
        f", store {now.backend}: {now.loading_tokens} tokens to load, "
        f"{now.loaded_tokens - before.loaded_tokens} loaded, "
        f"{now.saved_tokens - before.saved_tokens} saved"
    )
