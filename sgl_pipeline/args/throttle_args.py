"""Settings of the throttle: the tokens of a microbatch, and the counts that its policy sees."""

from dataclasses import dataclass

from sgl_pipeline.args.checks import require, require_choice
from sgl_pipeline.args.flags import our_flag, upstream_flag
from sgl_pipeline.throttle import POLICY_TABLE

POLICIES = tuple(POLICY_TABLE)
_WITH_TARGETS = [name for name, entry in POLICY_TABLE.items() if entry.has_targets]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottleArgs:
    """Limits on the tokens of a microbatch (gLLM, SC'25, section 3 and its default values).

    `max_prefill_tokens` is also the fixed budget of `sarathi` and `greedy-queue`, which decodes
    share there. Read it as `prefill_limit`, which knows the policy's own default.
    """

    policy: str = our_flag(
        "throttle-time",
        "--policy",
        help="How many tokens a microbatch carries: token throttling (gLLM; by predicted time; "
        "with a reserve that adapts; or without one of its terms), a fixed budget (Sarathi-Serve), "
        "or vLLM's greedy queue.",
        choices=POLICIES,
    )
    prefill_spread_steps: int = our_flag(
        8,
        "--prefill-spread-steps",
        help="Steps over which waiting prompt tokens are spread (gLLM #T); with --policy "
        "throttle-time at most 1.5 times as many.",
    )
    # gLLM #MaxP; None: as the authors of `policy`.
    max_prefill_tokens: int | None = upstream_flag(None, "--chunked-prefill-size")
    min_prefill_tokens: int = our_flag(
        32,
        "--min-prefill-tokens",
        help="Fewest prefill tokens worth a step (gLLM #MinP); --chunked-prefill-size is the most.",
    )
    pause_free_share: float = our_flag(
        0.05,
        "--pause-free-share",
        help="No prefill while a smaller share of the KV pages is free (gLLM KVthresh).",
    )
    # Chunks get shorter the later they lie in a prompt, so that all take as long as the first.
    dynamic_chunking: bool = upstream_flag(False, "--enable-dynamic-chunking")
    ttft_weight: float = our_flag(
        1.0,
        "--ttft-weight",
        help="With --policy throttle-time: milliseconds between the tokens of running requests "
        "that one millisecond until a first token is worth. More fills steps with prefill, less "
        "spreads it; 1 is the least latency in sum.",
    )
    target_tpot_ms: float | None = our_flag(
        None,
        "--target-tpot-ms",
        help="With --policy throttle-time: no more prefill than leaves this many milliseconds "
        "between the tokens of a request. Comes before --target-ttft-ms where both cannot be met.",
    )
    target_ttft_ms: float | None = our_flag(
        None,
        "--target-ttft-ms",
        help="With --policy throttle-time: prefill faster than it would where a request would get "
        "its first token later than this many milliseconds after it came.",
    )

    def __post_init__(self) -> None:
        require_choice("--policy", self.policy, POLICIES)
        require(
            self.prefill_spread_steps >= 1,
            f"--prefill-spread-steps {self.prefill_spread_steps} must be at least 1",
        )
        require(
            1 <= self.min_prefill_tokens <= self.prefill_limit,
            f"--min-prefill-tokens {self.min_prefill_tokens} must be between 1 and "
            f"--chunked-prefill-size {self.prefill_limit}",
        )
        require(
            0.0 <= self.pause_free_share < 1.0,
            f"--pause-free-share {self.pause_free_share} must be in [0, 1)",
        )
        require(
            0.0 <= self.ttft_weight < float("inf"),
            f"--ttft-weight {self.ttft_weight} must be a number from 0 on",
        )
        for flag, target_ms in (
            ("--target-tpot-ms", self.target_tpot_ms),
            ("--target-ttft-ms", self.target_ttft_ms),
        ):
            require(
                target_ms is None or 0.0 < target_ms < float("inf"),
                f"{flag} {target_ms} must be a number of milliseconds above 0",
            )
            require(
                target_ms is None or self.policy in _WITH_TARGETS,
                f"{flag} needs --policy {' or '.join(_WITH_TARGETS)}, this is {self.policy}: only "
                "a policy that budgets time can hold a time",
            )

    @property
    def prefill_limit(self) -> int:
        """The most prefill tokens of a step."""
        if self.max_prefill_tokens is not None:
            return self.max_prefill_tokens
        return POLICY_TABLE[self.policy].prefill_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """Rules for the counts that a policy sees; pages are handed out alike under all.

    `hits`: tokens that the prefix cache will serve are not waiting. `shared_once`: of the others,
    those that several requests wait for count once, and not at all while one of them prefills them.
    `evictable`: unlocked cached pages count as free.
    """

    hits: bool
    shared_once: bool
    evictable: bool

    def __post_init__(self) -> None:
        assert self.hits or not self.shared_once, "whole prompts cannot be counted once"


ACCOUNTINGS = {
    "radix": Accounting(hits=True, shared_once=True, evictable=True),
    "radix-unshared": Accounting(hits=True, shared_once=False, evictable=True),
    "radix-free-list": Accounting(hits=True, shared_once=True, evictable=False),
    # gLLM's: a prompt waits whole until it is admitted.
    "gllm": Accounting(hits=False, shared_once=False, evictable=True),
    "naive": Accounting(hits=False, shared_once=False, evictable=False),
}
