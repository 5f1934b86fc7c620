"""What the scheduler admits, and in which order."""

from dataclasses import dataclass

from sgl_pipeline.args.checks import require, require_choice
from sgl_pipeline.args.throttle_args import ACCOUNTINGS

# The order of waiting requests: first come first served, or the one that may draw the most first.
SCHEDULE_POLICIES = ("fcfs", "lof")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingArgs:
    """Bounds on what the scheduler admits. Pages hold `page_size` tokens each."""

    page_size: int = 16
    # Which of SCHEDULE_POLICIES orders requests of equal priority.
    schedule_policy: str = "fcfs"
    max_running_requests: int = 256
    max_queued_requests: int | None = None
    # Of whatever policy; None: as it shares them out.
    max_decodes_per_step: int | None = None
    radix_cache: bool = True
    # Which of ACCOUNTINGS policies are given.
    accounting: str = "radix"
    # Every request computes its own prompt at once, even what another one is computing now.
    duplicate_prefills: bool = False
    # By how much more priority than a running request a waiting one takes its place; None: never.
    preemption_threshold: int | None = None
    # Seconds after which a request is ended, counted while it waits and since it first ran.
    waiting_timeout_s: float | None = None
    running_timeout_s: float | None = None
    # Steps in flight beyond one per stage; more hides scheduling time, fewer keeps tokens fresh.
    extra_steps_in_flight: int = 0

    def __post_init__(self) -> None:
        require(
            1 <= self.page_size <= 1024,
            f"--page-size {self.page_size} must be between 1 and 1024",
        )
        require(
            self.schedule_policy in SCHEDULE_POLICIES,
            f"--schedule-policy {self.schedule_policy!r} is not built; choose from "
            f"{', '.join(SCHEDULE_POLICIES)}",
        )
        require_choice("--accounting", self.accounting, ACCOUNTINGS)
        require(
            self.max_running_requests >= 1,
            f"--max-running-requests {self.max_running_requests} must be at least 1",
        )
        require(
            self.max_queued_requests is None or self.max_queued_requests >= 0,
            f"--max-queued-requests {self.max_queued_requests} must not be negative",
        )
        require(
            self.max_decodes_per_step is None or self.max_decodes_per_step >= 1,
            f"--pp-max-micro-batch-size {self.max_decodes_per_step} must be at least 1",
        )
        require(
            self.preemption_threshold is None or self.preemption_threshold >= 0,
            f"--priority-scheduling-preemption-threshold {self.preemption_threshold} must not be "
            "negative",
        )
        require(
            0 <= self.extra_steps_in_flight <= 8,
            f"--extra-steps-in-flight {self.extra_steps_in_flight} (SGLang's name: "
            "--pp-async-batch-depth) must be between 0 and 8",
        )
