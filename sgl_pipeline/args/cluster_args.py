"""The hosts of one pipeline."""

from dataclasses import dataclass

from sgl_pipeline.args.checks import require


def require_stage_on_each(num_stages: int, num_hosts: int) -> None:
    """Raises ConfigurationError where hosts would be without a stage."""
    require(
        num_stages >= num_hosts,
        f"--pp {num_stages} leaves some of the {num_hosts} hosts (--nnodes) without a stage; start "
        f"with --pp {num_hosts} or more",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterArgs:
    """Hosts that serve one pipeline; SGLang's flags `--nnodes`, `--node-rank`, `--dist-init-addr`.

    Host 0 is the head. `head_address` is HOST:PORT of its cluster port; the other hosts listen on
    the same port number. A host that says nothing for `silence_s` is lost. With `use_ray` Ray
    starts the others, for which it has `ray_wait_s` at the start of the server.
    """

    num_hosts: int = 1
    rank: int = 0
    head_address: str | None = None
    key_file: str | None = None
    silence_s: float = 4.0
    use_ray: bool = False
    ray_wait_s: float = 60.0

    def __post_init__(self) -> None:
        require(self.num_hosts >= 1, f"--nnodes {self.num_hosts} must be at least 1")
        require(
            0 <= self.rank < self.num_hosts,
            f"--node-rank {self.rank} must be between 0 and {self.num_hosts - 1} with --nnodes "
            f"{self.num_hosts}",
        )
        require(
            self.num_hosts == 1 or self.head_address is not None,
            f"--nnodes {self.num_hosts} needs --dist-init-addr HOST:PORT, the same on every host: "
            "an address of rank 0 that the others can reach, and a free port",
        )
        require(
            1.0 <= self.silence_s < float("inf"),
            f"--host-silence-s {self.silence_s} must be a number of seconds, 1 or more",
        )
        require(
            not self.use_ray or self.num_hosts > 1,
            "--use-ray has Ray start the hosts beside the head; start with --nnodes 2 or more",
        )
        require(
            not self.use_ray or self.rank == 0,
            f"--use-ray --node-rank {self.rank}: with --use-ray one command starts all hosts, that "
            "of the head",
        )
        require(
            1.0 <= self.ray_wait_s < float("inf"),
            f"--ray-wait-s {self.ray_wait_s} must be a number of seconds, 1 or more",
        )
