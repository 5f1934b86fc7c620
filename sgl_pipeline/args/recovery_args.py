"""Settings for the loss of a stage."""

from dataclasses import dataclass

from sgl_pipeline.args.checks import (
    at_least,
    between,
    require,
    require_not_negative,
    require_seconds,
)
from sgl_pipeline.args.flags import check_flags, our_flag

DEFAULT_LOG_MIB = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryArgs:
    """Settings for the loss of a stage's worker.

    Spare workers have imported all they need. A `log_mib` of None is the device's default.
    """

    mode: str = our_flag(
        "auto",
        "--stage-recovery",
        help="What happens when the process of a stage ends or hangs: it is replaced and requests "
        "go on, on fewer stages where no worker is available (auto; not over NCCL links), or the "
        "server ends (off).",
        choices=("auto", "off"),
    )
    max_restarts: int = our_flag(
        3,
        "--max-stage-restarts",
        help="Most stages that may be lost within --stage-restart-window-s; one more ends the "
        "server: what kills one stage after the other would kill fewer stages too. Workers that "
        "end before they have served do not count; after two of them the others serve on without.",
        check=require_not_negative,
    )
    restart_window_s: float = our_flag(
        60.0,
        "--stage-restart-window-s",
        help="Seconds within which --max-stage-restarts counts.",
        check=require_seconds,
    )
    min_stages: int = our_flag(
        1,
        "--min-stages",
        help="Fewest stages to serve with where no worker is available for a lost one: those that "
        "are left share its layers. With fewer, or where memory does not hold the layers, requests "
        "get a 503 and the server ends. As many as --pp: never fewer.",
        check=at_least(1),
    )
    retry_s: float = our_flag(
        30.0,
        "--stage-retry-s",
        help="Seconds after which a worker that was not available is asked for again, while fewer "
        "stages serve; twice as long after each failure, at most 16 times.",
        check=require_seconds,
    )
    join_limit_s: float = our_flag(
        120.0,
        "--stage-join-limit-s",
        help="Seconds that a worker may take to start, or to load and join the others, before "
        "another one is asked for.",
        check=require_seconds,
    )
    silence_s: float = our_flag(
        5.0,
        "--stage-silence-s",
        help="Seconds after which a silent stage counts as hung and is replaced, unless its own "
        "steps took a twentieth of that or more.",
        check=require_seconds,
    )
    spare_workers: int = our_flag(
        0,
        "--spare-workers",
        help="Workers that wait, started, to take the place of a lost one.",
        check=between(0, 16),
    )
    log_mib: int | None = our_flag(
        None,
        "--recovery-log-mib",
        help="MiB in which each stage but the last keeps the rows that it sends, so that only a "
        "stage that is replaced computes keys and values again; 0: all stages do. By default "
        f"{DEFAULT_LOG_MIB} on a CPU; not built for GPUs.",
        check=between(0, 1 << 20),
    )

    def __post_init__(self) -> None:
        check_flags(self)
        require(
            self.mode != "off" or not self.log_mib,
            f"--recovery-log-mib {self.log_mib} is for stages that are replaced, and "
            "--stage-recovery is off",
        )
        require(
            self.mode != "off" or self.spare_workers == 0,
            f"--spare-workers {self.spare_workers} take the place of lost ones, and "
            "--stage-recovery is off",
        )
