"""The rules by which pages go to a store and come back.

Times and thresholds are upstream's (SGLang 0.5.23, `hybrid_cache_controller.py`); tokens that a
load declines are computed, all of them: no request computes one part of a prefix while another part
of it is loaded.
"""

from dataclasses import dataclass

from sgl_pipeline.args import TierArgs
from sgl_pipeline.args.tier_args import PrefetchPolicy, WritePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRules:
    """`write_policy`: a page is saved when it is cached, when it is hit, or before it is evicted.

    A prefix is loaded if at least `least_tokens` of it are in the store and not cached.
    `wait_policy` says how long a request waits for it: `timeout_base_s` and
    `timeout_s_per_ki_token` for every 1,024 tokens, at most `timeout_cap_s`; not at all; or as long
    as it takes. The prefixes of at most `look_ahead` requests are looked up or loaded at a time.
    Loads fill at most `load_share` of all pages at a time, saves keep at most `save_share` of them
    from eviction.
    """

    write_policy: WritePolicy = "write_through"
    wait_policy: PrefetchPolicy = "timeout"
    least_tokens: int = 256
    timeout_base_s: float = 1.0
    timeout_s_per_ki_token: float = 0.25
    timeout_cap_s: float = 30.0
    look_ahead: int = 64
    load_share: float = 0.5
    save_share: float = 0.125

    @classmethod
    def of(cls, args: TierArgs) -> "TierRules":
        """The rules that a server's arguments ask for."""
        store = args.store
        return cls(
            write_policy=args.write_policy,
            wait_policy=args.prefetch_policy,
            least_tokens=store.prefetch_threshold,
            timeout_base_s=store.prefetch_timeout_base,
            timeout_s_per_ki_token=store.prefetch_timeout_per_ki_token,
            timeout_cap_s=store.prefetch_timeout_max,
        )

    def patience_s(self, num_tokens: int) -> float:
        """Seconds for which a request waits for `num_tokens` tokens."""
        if self.wait_policy == "wait_complete":
            return float("inf")
        if self.wait_policy == "best_effort":
            return 0.0
        wanted_s = self.timeout_base_s + self.timeout_s_per_ki_token * num_tokens / 1024
        return min(wanted_s, self.timeout_cap_s)
