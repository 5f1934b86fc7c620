"""One user's request, and its progress.

Only `scheduling/` changes a `Request`, which never leaves the scheduler process; only its
`SamplingSpec` and `LogprobSpec` travel to the stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, Protocol

import msgspec

from sgl_pipeline.draft_runs import DraftRuns

# Below it a softmax in fp32 is greedy anyway, and soon not finite (upstream: _SAMPLING_EPS).
MIN_TEMPERATURE = 1e-6


class SamplingSpec(msgspec.Struct, frozen=True, array_like=True):
    """The parameters by which the next token is drawn. Travels to the last stage, so it is a
    Struct.

    `top_k == 0` means the whole vocabulary. The random number of a position is a hash of
    (seed, position), so a token does not depend on the microbatch that it shared.

    The penalties look at the output tokens alone, as SGLang's do. `logit_bias` holds pairs of a
    token id and the number added to its logit, each id once. `masked_token_ids` cannot be drawn
    before there are `min_new_tokens` output tokens. All ids are of the vocabulary, and their number
    is bounded where the spec is made (`managers/front/sglang_requests.py`).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    masked_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def penalises_output(self) -> bool:
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def changes_logits(self) -> bool:
        """True if some token's logit differs from the model's, for some output."""
        has_minimum = self.min_new_tokens > 0 and bool(self.masked_token_ids)
        return self.penalises_output or bool(self.logit_bias) or has_minimum


GREEDY = SamplingSpec(temperature=0.0)

# Most of the highest log-probabilities that a position is asked for.
MAX_TOP_LOGPROBS = 128


class LogprobSpec(msgspec.Struct, frozen=True, array_like=True):
    """The log-probabilities that a request wants. Travels to the last stage, so it is a Struct.

    The logits of position p describe the token at p + 1. A row describes one position: the
    log-probability of the token that follows, the `num_top` highest, and those of `token_ids`. Each
    position from `prompt_start` on gives one, and so does always the prompt's last, whose row is
    about the first output token: for the output alone `prompt_start` is the prompt's length. All
    ids are of the vocabulary, and the counts are bounded where the spec is made
    (`managers/front/sglang_requests.py`).
    """

    prompt_start: int
    num_top: int = 0
    token_ids: tuple[int, ...] = ()


class LogprobRows(msgspec.Struct, frozen=True, array_like=True):
    """The rows of R consecutive positions of one request, as C-ordered arrays in bytes.

    All numbers are finite.
    """

    num_rows: int
    chosen: bytes = b""  # float32 [R]: of the token that follows
    top: bytes = b""  # float32 [R, num_top], highest first
    top_ids: bytes = b""  # int32 [R, num_top]
    of_token_ids: bytes = b""  # float32 [R, len(token_ids)]


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """The pages that the prefill server `source` (`PeerPlace.name`) lends to one request under the
    number of its room: the attention over them is computed there. Travels to the stages, so it is a
    Struct."""

    source: str
    number: int


@dataclass(frozen=True, slots=True)
class FinishReason:
    """The reason why a request ended. `matched` is the stop token id or stop string, if any."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str = ""
    status_code: int | None = None


class StopCheck(Protocol):
    """A stop rule that needs more than token ids (text: `managers/upstream/stop_text.py`)."""

    def __call__(self, output_ids: list[int]) -> FinishReason | None:
        """Called once for each new output token, with all output ids so far."""


class TokenConstraint(Protocol):
    """A grammar that the output must match (`managers/grammars/constraint.py`).

    It follows the output tokens, which a retraction does not change. Tokens behind them can be
    tried, for drafts; all are taken back before the next mask or output token. No method raises.
    """

    def allowed_tokens_masks(self, draft_ids: Sequence[int] = ()) -> list[bytes]:
        """A mask of the tokens that may be drawn next, and one for after each of `draft_ids`, which
        can be tried one after the other. Bit `i % 8` of byte `i // 8` stands for token i, over
        4 * ceil(V / 32) bytes for a vocabulary of V. Empty: any token may be drawn."""

    def accept(self, token_id: int) -> FinishReason | None:
        """Takes the newest output token. Gives the reason why the request cannot go on: "stop" when
        the output is complete and ended, "abort" when it cannot be continued by the rules."""

    def forced_tokens(self) -> tuple[int, ...]:
        """The text that must come next, after the tokens that were tried, in the tokens that a
        model is likely to write it in. The last may be drawn as one with what follows it."""

    def try_token(self, token_id: int) -> bool:
        """True if the token may come next and does not end the output; then the next call is about
        what follows it."""

    def take_back(self) -> None:
        """Forgets the tokens that were tried."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """The conditions under which a request ends. `stop_token_ids` already holds the EOS ids, unless
    they are ignored."""

    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    check_text: StopCheck | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """The bond of the two halves of a request whose prompt one server computes and whose tokens
    another one draws (SGLang's bootstrap_room).

    No other request of either server has its `number`. `peer` is the port of the server that
    computes the prompt, HOST:PORT; empty on that server.
    """

    number: int
    peer: str = ""


@dataclass(slots=True)
class DraftCounts:
    """The drafts of one request so far: its steps with a draft, by the number of draft tokens that
    were right, and all draft tokens; `runs` once a draft was looked up."""

    steps_by_right: list[int] = field(default_factory=list)
    drafted_tokens: int = 0
    runs: DraftRuns | None = None

    def note_none(self) -> None:
        """A lookup found no draft."""
        self.runs = self.runs or DraftRuns()
        self.runs.note(0, 0)

    def note(self, num_drafted: int, num_right: int) -> None:
        """Another step had a draft."""
        self.runs = self.runs or DraftRuns()
        self.runs.note(num_drafted, num_right)
        self.drafted_tokens += num_drafted
        missing = num_right + 1 - len(self.steps_by_right)
        self.steps_by_right += [0] * missing
        self.steps_by_right[num_right] += 1

    @property
    def num_steps(self) -> int:
        return sum(self.steps_by_right)

    @property
    def accepted_tokens(self) -> int:
        return sum(right * steps for right, steps in enumerate(self.steps_by_right))


class RequestState(Enum):
    """The state of a request. WAITING holds no pages; RUNNING does; FINISHED never comes back."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its progress. Token counts are over `prompt_ids + output_ids`.

    `num_computed <= num_scheduled <= num_tokens`: the KV of the first `num_computed` tokens is
    committed on every stage, that of the first `num_scheduled` is committed or in flight. While
    `num_scheduled` is below `prefill_end` it is prefilling; afterwards it decodes, a token a step.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingSpec
    stops: StopRules
    arrival_s: float = 0.0
    priority: int = 0
    # Requests of different namespaces never share cached pages (SGLang's extra_key, cache_salt). It
    # is the hash before the first page, in hex (`page_hash.namespace_hash`).
    cache_namespace: str = ""
    # The name of whoever sent it, by --fair-shares-by; all are one tenant without it.
    tenant: str = ""
    constraint: TokenConstraint | None = None
    logprobs: LogprobSpec | None = None
    room: Room | None = None

    # (-priority, -max_new_tokens or 0, arrival number), set by `StepScheduler.add`: the order in
    # which requests are served, unless it is cache-aware, and the reverse of that in which they
    # are retracted.
    order: tuple[int, int, int] = (0, 0, 0)
    output_ids: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    # Tokens that must be prefilled before the next sample: the prompt, or, after a retraction,
    # the prompt and all output so far.
    prefill_end: int = 0
    num_scheduled: int = 0
    num_computed: int = 0
    # Prompt tokens served from the radix cache at the first admission (reported to the user); those
    # of the server that computed the prompt, where another one did.
    cached_tokens: int = 0
    peer_cached_tokens: int | None = None
    # Of these, tokens whose pages were loaded from the store for it.
    loaded_tokens: int = 0
    # Where its keys and values are, if not here; it has a page here for its rows of a step.
    lease: Lease | None = None
    # Tokens whose keys and values are there before it begins to run; 0 without a lease.
    leased_tokens: int = 0
    num_retractions: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    # KV pages in token order; the leading ones may be shared through the radix cache.
    pages: list[int] = field(default_factory=list)
    # Its place in the pools of states, while it has pages; None in models without states.
    state_slot: int | None = None
    # What has come back of the log-probabilities: runs of rows without a gap between them.
    logprob_runs: list[LogprobRows] = field(default_factory=list)
    num_logprob_rows: int = 0
    steps_in_flight: int = 0
    # When its first chunk was scheduled and its first token known, on the clock of `arrival_s`.
    started_s: float | None = None
    first_token_s: float | None = None
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        self.prefill_end = len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_prefilling(self) -> bool:
        return self.num_scheduled < self.prefill_end

    @property
    def remaining_prefill(self) -> int:
        """Prompt tokens not yet scheduled; a chunk in flight no longer counts."""
        return max(0, self.prefill_end - self.num_scheduled)

    @property
    def first_logits_position(self) -> int:
        """The first position whose logits the request still needs: a hit in the prefix cache must
        end there. Without log-probabilities it is the last token to prefill."""
        if self.logprobs is None:
            return self.prefill_end - 1
        return min(self.logprobs.prompt_start, len(self.prompt_ids) - 1) + self.num_logprob_rows

    def tokens(self, start: int, end: int) -> list[int]:
        """The token ids of positions `start` to `end` (exclusive) of prompt and output."""
        split = len(self.prompt_ids)
        if end <= split:
            return self.prompt_ids[start:end]
        return self.prompt_ids[start:split] + self.output_ids[max(0, start - split) : end - split]


class TokenEvent(msgspec.Struct, frozen=True):
    """New output tokens of one request, and the reason for its end if it ended."""

    request: Request
    token_ids: tuple[int, ...]
    finish: FinishReason | None
