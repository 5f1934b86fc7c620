"""A store for keys and values beyond the pool."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from sgl_pipeline.args.checks import at_least, one_of, require
from sgl_pipeline.args.flags import Flag, check_flags, flags_of, upstream_flag, without_flag
from sgl_pipeline.args.store_config import EXTRA_CONFIG_FLAG, KEYS, StoreConfig

# Files of our own, and SGLang's own classes in a process of theirs.
STORAGE_BACKENDS = ("file", "dynamic", "nixl", "mooncake")
# The tier of a GPU that is given no other one: memory of the stages' own processes.
HOST_BACKEND = "host"
WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicy = Literal["timeout", "best_effort", "wait_complete"]
WRITE_POLICIES: tuple[WritePolicy, ...] = get_args(WritePolicy)
PREFETCH_POLICIES: tuple[PrefetchPolicy, ...] = get_args(PrefetchPolicy)
_ENABLE = "--enable-hierarchical-cache"


def _require_backend(flag: str, value: str) -> None:
    require(
        value in (*STORAGE_BACKENDS, HOST_BACKEND),
        f"{flag} {value} is not built; choose from {', '.join(STORAGE_BACKENDS)}",
    )


def _require_positive(flag: str, value: float) -> None:
    require(0 < value < float("inf"), f"{flag} {value} must be a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierArgs:
    """A store of pages beyond the pool, by SGLang's flags.

    `backend` None: none is attached. "host": each stage keeps pages in host memory, `host_ratio`
    times as many as the pool has, or as many as fit in `host_size_gb` (10^9 bytes) on every stage,
    if that is not 0. `write_policy` says when a page is saved: once it is computed
    (`write_through`), at its second use (`write_through_selective`), or when the pool needs its
    room (`write_back`). `prefetch_policy` says how long a request waits for pages that the store
    has: as `store` says (`timeout`), no longer than it waits anyway (`best_effort`), or until they
    are there (`wait_complete`).
    """

    enabled: bool = upstream_flag(False, _ENABLE, "--enable-hicache")
    backend: str | None = upstream_flag(None, "--hicache-storage-backend", check=_require_backend)
    store: StoreConfig = field(
        default=StoreConfig(), metadata=Flag(upstream=(EXTRA_CONFIG_FLAG,)).metadata
    )
    write_policy: WritePolicy = upstream_flag(
        "write_through", "--hicache-write-policy", check=one_of(WRITE_POLICIES)
    )
    prefetch_policy: PrefetchPolicy = upstream_flag(
        "timeout", "--hicache-storage-prefetch-policy", check=one_of(PREFETCH_POLICIES)
    )
    host_ratio: float = upstream_flag(2.0, "--hicache-ratio", check=_require_positive)
    host_size_gb: int = upstream_flag(0, "--hicache-size", check=at_least(0))
    # Whether a store may be attached while the server runs.
    is_attachable: bool = without_flag(False, "--admin-api-key sets it")
    # So that host memory is a tier beyond it.
    pool_is_on_gpu: bool = without_flag(False, "--device sets it")

    def __post_init__(self) -> None:
        check_flags(self)
        if not self.enabled:
            for one, flag in flags_of(self):
                require(
                    getattr(self, one.name) == one.default,
                    f"{flag.names[0]} does nothing without {_ENABLE}",
                )
            return
        unknown = ", ".join(sorted(self.store.backend_settings))
        require(
            not unknown or self.backend not in ("file", HOST_BACKEND),
            f"{EXTRA_CONFIG_FLAG}: {unknown} is unknown to {self.backend}; the keys are "
            f"{', '.join(KEYS)}",
        )
        has_tier = self.backend is not None or self.is_attachable
        require(
            has_tier and (self.backend != HOST_BACKEND or self.pool_is_on_gpu),
            f"{_ENABLE} alone keeps pages in host memory, a tier for --device cuda: on a CPU the "
            "pool is in host memory already (--max-total-tokens is its size). Give a store, "
            "--hicache-storage-backend file, or --admin-api-key, with which one can be attached "
            "while the server runs",
        )
