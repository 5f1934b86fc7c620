"""The targets of a server, and what it reached under them; `held_targets.py` measures it."""

from dataclasses import dataclass

from sgl_pipeline.args import ThrottleArgs
from sgl_pipeline.goodput import LatencyTarget

POLICY = "throttle-time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The targets of one server, in milliseconds."""

    tpot_ms: float | None = None
    ttft_ms: float | None = None

    @property
    def flags(self) -> str:
        """Empty without a target."""
        flags = {"--target-tpot-ms": self.tpot_ms, "--target-ttft-ms": self.ttft_ms}
        return " ".join(f"{flag} {ms:g}" for flag, ms in flags.items() if ms is not None)

    @property
    def name(self) -> str:
        return self.flags.removeprefix("--target-") or "no target"

    @property
    def target(self) -> LatencyTarget:
        return LatencyTarget(
            ttft_ms=self.ttft_ms or float("inf"), tpot_ms=self.tpot_ms or float("inf")
        )

    @property
    def throttle(self) -> ThrottleArgs:
        return ThrottleArgs(policy=POLICY, target_tpot_ms=self.tpot_ms, target_ttft_ms=self.ttft_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The result of one load. `missed_steps[t]` is the share of the steps that named target `t` as
    missed, `late_requests` the share of requests beyond a target that there was, and
    `by_time_share` that of the steps which the policy limited by time."""

    setting: Setting
    source: str  # "server" or "simulator"
    rate_per_s: float
    tpot_p50_ms: float
    tpot_p95_ms: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    tokens_per_s: float
    missed_steps: dict[str, float]
    late_requests: float
    by_time_share: float
