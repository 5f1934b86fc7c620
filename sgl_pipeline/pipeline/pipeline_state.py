"""The one snapshot of the pipeline, from which metrics, `/v1/loads`, `/server_info` and the status
line are written.

It is made about ten times a second, between steps. No field needs a look at each waiting request.
"""

from typing import Literal

import msgspec

from sgl_pipeline.pipeline.draft_state import DraftState
from sgl_pipeline.pipeline.throttle_control import ThrottleState
from sgl_pipeline.pipeline_load import PipelineLoad
from sgl_pipeline.records.move_record import MoveRecord
from sgl_pipeline.records.recovery_record import RecoveryRecord
from sgl_pipeline.records.stage_timing import BubbleShares, bubble_shares
from sgl_pipeline.records.trace import StepRecord
from sgl_pipeline.scheduling.tenant_state import TenantState
from sgl_pipeline.stage_plan import StagePlan


class StageState(msgspec.Struct, frozen=True, kw_only=True):
    """One stage since the start: the milliseconds it waited for work and computed, and the last
    step that it reported. `slowdown` is the ratio of measured to predicted time of its steps; the
    stage has been slow since `slow_since_s`, None if it is not slow (`slow_stages.py`).
    """

    input_wait_ms: float
    compute_ms: float
    last_step: int | None
    slowdown: float = 1.0
    slow_since_s: float | None = None


class TierState(msgspec.Struct, frozen=True, kw_only=True):
    """A store beyond the pool: `backend`, None while none is attached.

    Of the tokens of waiting requests, `cached_tokens` are in the pool, `loading_tokens` come from
    the store, the last of them after a predicted `loading_s` (0: unknown), and `compute_tokens` are
    the rest. `loading_pages` and `saving_pages` are under way. All else is since the start: times
    that the store was asked (`lookups`) and had something (`hits`), in all `found_tokens`; tokens
    loaded, and found but not loaded (`missed_tokens`, by reason); tokens saved, and not saved
    (`dropped_tokens`, by reason); pages whose objects were missing, short or altered
    (`broken_pages`); bytes, and the seconds that stages were busy with them, summed over stages.
    """

    backend: str | None
    cached_tokens: int = 0
    loading_tokens: int = 0
    compute_tokens: int = 0
    loading_s: float = 0.0
    loading_pages: int = 0
    saving_pages: int = 0
    lookups: int = 0
    hits: int = 0
    found_tokens: int = 0
    loaded_tokens: int = 0
    missed_tokens: dict[str, int] = {}
    saved_tokens: int = 0
    dropped_tokens: dict[str, int] = {}
    broken_pages: int = 0
    loaded_bytes: int = 0
    saved_bytes: int = 0
    load_s: float = 0.0
    save_s: float = 0.0


class OffloadState(msgspec.Struct, frozen=True, kw_only=True):
    """Attention that prefill servers compute for decode servers.

    On a prefill server `lent_rooms` have `lent_pages`, those of prompts counted for each, of at
    most `most_lent_pages`. On a decode server `requests` are offloaded, of `tokens` in all; `bound`
    is their largest ratio to those that are not (None: not known yet, or without a bound),
    `wait_share` of their time steps with them have waited. Since the start `offloaded` were, of
    these `ended_early` had to go on without; `last_refusal` says why the last one that could have
    been was not.
    """

    lent_rooms: int = 0
    lent_pages: int = 0
    most_lent_pages: int = 0
    requests: int = 0
    tokens: int = 0
    bound: float | None = None
    wait_share: float = 0.0
    offloaded: int = 0
    ended_early: int = 0
    last_refusal: str = ""


class RoomsState(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that this server shares with `num_peers` connected others: on a "prefill" server
    those whose prompts it computes for them, on a "decode" server those whose prompts it gets.

    `bootstrap_requests` have no prompt that can be read: on a prefill server no decode server has
    asked for them, on a decode server the prompt is being computed. `transfer_requests` have one
    that is being read, or waits for room. On a prefill server `wanted_requests` are all that a
    decode server waits for or reads, and `held_pages` are held for transfer; on a decode server
    `promised_pages` are being filled, and `pending_pages` wait for room. All else is since the
    start: rooms that ended well after a sum of `transfer_s`, and that failed before or while their
    prompts were read; of these `computed_here`; pages, bytes and busy seconds of all stages that
    loaded them. On a decode server `bootstrap_s` sums the seconds until the prompts of the rooms
    that ended well could be read, `alloc_s` those, of `transfer_s`, until their loads began.
    """

    mode: Literal["prefill", "decode"]
    num_peers: int
    bootstrap_requests: int
    transfer_requests: int
    wanted_requests: int = 0
    held_pages: int = 0
    promised_pages: int = 0
    pending_pages: int = 0
    transferred: int = 0
    transfer_s: float = 0.0
    bootstrap_s: float = 0.0
    alloc_s: float = 0.0
    bootstrap_failed: int = 0
    transfer_failed: int = 0
    computed_here: int = 0
    loaded_pages: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    offload: OffloadState | None = None  # None: it is switched off

    @property
    def mean_transfer_ms(self) -> float:
        """Mean milliseconds of a transfer since the start; 0 before the first."""
        return 1e3 * self.transfer_s / self.transferred if self.transferred else 0.0


class PipelineState(msgspec.Struct, frozen=True, kw_only=True):
    """One moment, `now_s` on the driver's monotonic clock. The stages of `plan` serve; the server
    was started with `configured_stages`.

    `load` counts exactly, `naive_load` whole prompts and free pages without the cached ones. Of the
    free pages of `load`, `unused_pages` hold nothing, the others cached prefixes. Of `state_slots`
    (0: the model has no states) `free_state_slots` have no owner, and `evictable_state_slots` hold
    snapshots for cached prefixes, which give way to requests.
    `waiting_requests` are in the queue, `compiling_requests` wait for their grammar before it.
    `queued_tokens` are all prompt tokens of the queue, cached or not, `decoding_tokens` all tokens
    of decoding requests. The totals since the start: tokens scheduled (`prefill_tokens`,
    `decodes`), prompt tokens served from the cache and admitted, retractions. `recent_steps` are
    the newest that all stages have reported, oldest first (`step_history.RECENT_STEPS`).
    `moves` are the newest layer moves, `recoveries` the newest recoveries, oldest first, those
    under way included. `replayed_tokens` counts the tokens that each stage alone has computed
    again since the start; it is empty without a recovery log, which has room for `log_pages`.
    `throttle` has the knobs of the policy, if they can be changed. `tier` is None where the
    server has no store and cannot get one, `rooms` where it does not share requests with other
    servers. `tenants` are the most served ones first, and none where all requests are of one.
    """

    now_s: float
    plan: StagePlan
    configured_stages: int
    is_paused: bool
    load: PipelineLoad
    naive_load: PipelineLoad
    unused_pages: int
    waiting_requests: int
    compiling_requests: int
    running_requests: int
    queued_tokens: int
    decoding_tokens: int
    prefill_tokens: int
    decodes: int
    cached_tokens: int
    prompt_tokens: int
    num_retractions: int
    drafts: DraftState
    recent_steps: tuple[StepRecord, ...]
    stages: tuple[StageState, ...]
    moves: tuple[MoveRecord, ...]
    replayed_tokens: tuple[int, ...] = ()
    log_pages: int = 0
    recoveries: tuple[RecoveryRecord, ...] = ()
    throttle: ThrottleState | None = None
    tier: TierState | None = None
    rooms: RoomsState | None = None
    tenants: tuple[TenantState, ...] = ()
    state_slots: int = 0
    free_state_slots: int = 0
    evictable_state_slots: int = 0

    @property
    def current_move(self) -> MoveRecord | None:
        """The layer move under way."""
        return self.moves[-1] if self.moves and not self.moves[-1].is_over else None

    @property
    def current_recovery(self) -> RecoveryRecord | None:
        """The recovery under way, during which no step runs."""
        newest = self.recoveries[-1] if self.recoveries else None
        return None if newest is None or newest.is_over else newest

    @property
    def missing_stages(self) -> int:
        """Number of stages that the server was started with and that do not serve."""
        return self.configured_stages - self.plan.num_stages

    @property
    def slow_stages(self) -> dict[int, StageState]:
        """The stages that are slow."""
        return {n: one for n, one in enumerate(self.stages) if one.slow_since_s is not None}

    @property
    def num_steps(self) -> int:
        """Steps decided since the start."""
        return self.load.step_id

    @property
    def has_work(self) -> bool:
        """True if any request waits, runs or has a step in flight."""
        return bool(self.waiting_requests or self.running_requests or self.load.steps_in_flight)

    @property
    def state_usage(self) -> float:
        """Share of the state slots in use; 0.0 in a model without states."""
        return self.used_state_slots / max(1, self.state_slots)

    @property
    def used_state_slots(self) -> int:
        """State slots that no request could get now."""
        return self.state_slots - self.free_state_slots - self.evictable_state_slots

    @property
    def cache_hit_rate(self) -> float:
        """Share of the prompt tokens admitted since the start that the cache has served."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def decoded_tokens(self) -> int:
        """Output tokens since the start that no prompt's step drew, those in flight included."""
        return self.decodes + self.drafts.accepted_tokens

    @property
    def steps_of_plan(self) -> tuple[StepRecord, ...]:
        """The recent steps that ran under the plan in use."""
        return tuple(step for step in self.recent_steps if step.epoch == self.plan.epoch)

    def showing(
        self, steps: tuple[StepRecord, ...], moves: tuple[MoveRecord, ...]
    ) -> "PipelineState":
        """The same moment with fewer of the recent steps and moves."""
        return msgspec.structs.replace(self, recent_steps=steps, moves=moves)

    def bubble_shares(self) -> tuple[BubbleShares, ...]:
        """Each stage's time in the recent steps, by its use; costs a millisecond."""
        return bubble_shares(self.recent_steps)
