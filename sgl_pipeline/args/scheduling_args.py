"""Settings of the scheduler: the requests that it admits, and their order."""

from dataclasses import dataclass

from sgl_pipeline.args.checks import at_least, between, require, require_not_negative
from sgl_pipeline.args.flags import check_flags, our_flag, upstream_flag, without_flag
from sgl_pipeline.args.tenant_flags import check_fair_shares_by, read_tenant_weights
from sgl_pipeline.args.throttle_args import ACCOUNTINGS

# By what the radix cache has of them: the longest prefix first, or its tree in depth-first order.
CACHE_AWARE_POLICIES = ("lpm", "dfs-weight")
# The order of waiting requests: first come first served, the one that may draw the most first, or
# one of the above.
SCHEDULE_POLICIES = ("fcfs", "lof", *CACHE_AWARE_POLICIES)
# SGLang's default of --mamba-track-interval.
TRACK_INTERVAL = 256
# SGLang's default of --speculative-num-draft-tokens, and our limit.
DRAFT_ROWS, MOST_DRAFT_ROWS = 12, 64


def draft_tokens_of(rows: int | None) -> int:
    """Most draft tokens of a decode that has at most `rows` rows in a step (None: SGLang's
    default), which count the token before them too. Raises ConfigurationError."""
    rows = DRAFT_ROWS if rows is None else rows
    between(2, MOST_DRAFT_ROWS)("--speculative-num-draft-tokens", rows)
    return rows - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingArgs:
    """Bounds on what the scheduler admits. Pages hold `page_size` tokens each."""

    page_size: int = upstream_flag(16, "--page-size", check=between(1, 1024))
    # Which of SCHEDULE_POLICIES orders requests of equal priority.
    schedule_policy: str = upstream_flag("fcfs", "--schedule-policy")
    max_overtakes: int = our_flag(
        128,
        "--max-overtakes",
        help="With --schedule-policy lpm or dfs-weight: the most later requests that are served "
        "before a waiting one.",
        check=require_not_negative,
    )
    max_running_requests: int = upstream_flag(256, "--max-running-requests", check=at_least(1))
    # Places for the states of running requests; 0: the model has no layers with a state.
    num_state_slots: int = upstream_flag(0, "--max-mamba-cache-size", check=require_not_negative)
    # Tokens between the places where a decode leaves a snapshot of its state; 0: it leaves none,
    # None: SGLang's, in whole pages.
    track_interval: int | None = upstream_flag(
        None, "--mamba-track-interval", check=require_not_negative
    )
    max_queued_requests: int | None = upstream_flag(
        None, "--max-queued-requests", check=require_not_negative
    )
    # Under every policy; None: as the policy shares them out.
    max_decodes_per_step: int | None = upstream_flag(
        None, "--pp-max-micro-batch-size", check=at_least(1)
    )
    # Whose requests share the server fairly: of one API key, one `user`, or one value of a header;
    # None: all are of one tenant.
    fair_shares_by: str | None = our_flag(
        None,
        "--fair-shares-by",
        help="Tenants share prefill, places and pages by weight, and none waits for another's "
        "queue: api-key (the bearer token that a request presents), user (its field `user`) or "
        "header:NAME (the value of that header).",
        check=check_fair_shares_by,
    )
    tenant_weights: str | None = our_flag(
        None,
        "--tenant-weights",
        help="The weights of tenants as a JSON object of names and numbers, or @FILE with one; "
        "1 for all others. The name of an API key is `key-` and the first 12 digits of its SHA-256 "
        "in hex.",
    )
    fair_step_cost: float = our_flag(
        0.03,
        "--fair-step-cost",
        help="With --fair-shares-by: steps are shorter, so that a tenant that comes waits less for "
        "those on their way, where their work takes at most this share more time for it, by "
        "prediction. Before step times are known, the first steps of several tenants are short "
        "at any cost. 0: as long as the policy makes them.",
    )
    radix_cache: bool = upstream_flag(True, "--disable-radix-cache")
    accounting: str = our_flag(
        "radix",
        "--accounting",
        help="Waiting tokens and free pages as the policy sees them: exact by the radix tree, or, "
        "for comparison, without some or all of what it knows.",
        choices=tuple(ACCOUNTINGS),
    )
    duplicate_prefills: bool = our_flag(
        False,
        "--duplicate-prefills",
        help="For comparison: a request computes a prefix that another one is computing already, "
        "and does not wait for it.",
    )
    # A waiting request takes the place of a running one of that much less priority; None: never.
    preemption_threshold: int | None = upstream_flag(
        None, "--priority-scheduling-preemption-threshold", check=require_not_negative
    )
    # Most draft tokens of a decode, which its step checks; 0: none.
    draft_tokens: int = without_flag(0, "--speculative-num-draft-tokens, less one")
    # Seconds after which a request is ended, counted while it waits and since it first ran.
    waiting_timeout_s: float | None = without_flag(None, "SGLANG_REQ_WAITING_TIMEOUT sets it")
    running_timeout_s: float | None = without_flag(None, "SGLANG_REQ_RUNNING_TIMEOUT sets it")
    # More hides scheduling time, fewer keeps tokens fresh.
    extra_steps_in_flight: int = our_flag(
        0,
        "--extra-steps-in-flight",
        help="Steps in flight beyond one per stage.",
        same_as="--pp-async-batch-depth",
    )

    @property
    def weights_of_tenants(self) -> dict[str, float]:
        """The weights that were given, by name.

        Raises ConfigurationError for weights that cannot be read.
        """
        return {} if self.tenant_weights is None else read_tenant_weights(self.tenant_weights)

    @property
    def most_running_requests(self) -> int:
        """Most requests that run at once: each may need a state slot."""
        return min(self.max_running_requests, self.num_state_slots or self.max_running_requests)

    @property
    def snapshot_interval(self) -> int:
        """Tokens between the places where a decode leaves a snapshot; 0: it leaves none, as without
        states or without the cache."""
        if not (self.num_state_slots and self.radix_cache):
            return 0
        if self.track_interval is not None:
            return self.track_interval
        return -(-TRACK_INTERVAL // self.page_size) * self.page_size

    def __post_init__(self) -> None:
        check_flags(self)
        require(
            self.track_interval is None or self.track_interval % self.page_size == 0,
            f"--mamba-track-interval {self.track_interval} must be a multiple of --page-size "
            f"{self.page_size}, or 0: a prefix is cached in whole pages",
        )
        require(
            not self.num_state_slots
            or not self.radix_cache
            or self.schedule_policy not in CACHE_AWARE_POLICIES,
            f"--schedule-policy {self.schedule_policy} is not built for models with states: it "
            "ranks by pages, and a prefix begins with a snapshot of the states; leave it out",
        )
        require(
            not self.num_state_slots or not self.draft_tokens,
            "--speculative-algorithm NGRAM is not built for models with states: a draft that is "
            "wrong could not be taken out of a state; leave it out",
        )
        require(
            self.fair_shares_by is not None or self.tenant_weights is None,
            "--tenant-weights has no effect without --fair-shares-by, which tells tenants apart; "
            "give both",
        )
        require(
            0.0 <= self.fair_step_cost <= 1.0,
            f"--fair-step-cost {self.fair_step_cost} must be a share from 0 to 1",
        )
        self.weights_of_tenants  # noqa: B018 - refused at the start
        require(
            self.schedule_policy in SCHEDULE_POLICIES,
            f"--schedule-policy {self.schedule_policy!r} is not built; choose from "
            f"{', '.join(SCHEDULE_POLICIES)}",
        )
        require(
            0 <= self.extra_steps_in_flight <= 8,
            f"--extra-steps-in-flight {self.extra_steps_in_flight} (SGLang's name: "
            "--pp-async-batch-depth) must be between 0 and 8",
        )
