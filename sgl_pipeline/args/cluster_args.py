"""The hosts of one pipeline."""

from dataclasses import dataclass

from sgl_pipeline.args.checks import at_least, require, seconds_from
from sgl_pipeline.args.flags import check_flags, our_flag, upstream_flag


def require_stage_on_each(num_stages: int, num_hosts: int) -> None:
    """Raises ConfigurationError where hosts would be without a stage."""
    require(
        num_stages >= num_hosts,
        f"--pp {num_stages} leaves some of the {num_hosts} hosts (--nnodes) without a stage; start "
        f"with --pp {num_hosts} or more",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterArgs:
    """Hosts that serve one pipeline.

    Host 0 is the head. `head_address` is HOST:PORT of its cluster port; the other hosts listen on
    the same port number. With `use_ray` Ray starts the other hosts.
    """

    num_hosts: int = upstream_flag(1, "--nnodes", check=at_least(1))
    rank: int = upstream_flag(0, "--node-rank")
    head_address: str | None = upstream_flag(None, "--dist-init-addr", "--nccl-init-addr")
    key_file: str | None = our_flag(
        None,
        "--cluster-key-file",
        help="The file of the key that all hosts (--nnodes), and a prefill and a decode server "
        "(--disaggregation-mode), share; else it is taken from SGL_PIPELINE_CLUSTER_KEY.",
    )
    silence_s: float = our_flag(
        4.0,
        "--host-silence-s",
        help="With --nnodes, seconds after which a silent host counts as lost.",
        check=seconds_from(1),
    )
    use_ray: bool = upstream_flag(False, "--use-ray")
    ray_wait_s: float = our_flag(
        60.0,
        "--ray-wait-s",
        help="With --use-ray, seconds that Ray may take at the start to place the other hosts.",
        check=seconds_from(1),
    )

    def __post_init__(self) -> None:
        check_flags(self)
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
            not self.use_ray or self.num_hosts > 1,
            "--use-ray has Ray start the hosts beside the head; start with --nnodes 2 or more",
        )
        require(
            not self.use_ray or self.rank == 0,
            f"--use-ray --node-rank {self.rank}: with --use-ray one command starts all hosts, that "
            "of the head",
        )
