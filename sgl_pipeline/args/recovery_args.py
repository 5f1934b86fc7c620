"""What happens when a stage is lost."""

from dataclasses import dataclass

from sgl_pipeline.args.checks import require, require_choice, require_seconds

RECOVERY_MODES = ("auto", "off")
DEFAULT_LOG_MIB = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryArgs:
    """What happens when a stage's worker is lost.

    `mode` `auto`: it is replaced, and requests go on; `off`: the server ends. At most
    `max_restarts` stages may be lost within `restart_window_s`. Where no worker is available, the
    stages that are left serve on, `min_stages` of them at least; `retry_s` later a worker is asked
    for again. `spare_workers` wait, started and imported. A worker that is to join gets
    `join_limit_s` for it. A stage counts as hung when it is silent for `silence_s` and for much
    longer than its steps of late have taken. Each stage keeps the rows that it sends, in at most
    `log_mib` MiB (None: the device's default; 0: it keeps none).
    """

    mode: str = "auto"
    max_restarts: int = 3
    restart_window_s: float = 60.0
    min_stages: int = 1
    retry_s: float = 30.0
    spare_workers: int = 0
    join_limit_s: float = 120.0
    silence_s: float = 5.0
    log_mib: int | None = None

    def __post_init__(self) -> None:
        require_choice("--stage-recovery", self.mode, RECOVERY_MODES)
        require(
            self.max_restarts >= 0,
            f"--max-stage-restarts {self.max_restarts} must not be negative",
        )
        require_seconds("--stage-restart-window-s", self.restart_window_s)
        require(self.min_stages >= 1, f"--min-stages {self.min_stages} must be at least 1")
        require_seconds("--stage-retry-s", self.retry_s)
        require(
            0 <= self.spare_workers <= 16,
            f"--spare-workers {self.spare_workers} must be between 0 and 16",
        )
        require_seconds("--stage-join-limit-s", self.join_limit_s)
        require_seconds("--stage-silence-s", self.silence_s)
        require(
            self.log_mib is None or 0 <= self.log_mib <= 1 << 20,
            f"--recovery-log-mib {self.log_mib} must be between 0 and {1 << 20}",
        )
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
