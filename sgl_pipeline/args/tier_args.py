"""A store for keys and values beyond the pool."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from sgl_pipeline.args.checks import one_of, require
from sgl_pipeline.args.flags import Flag, check_flags, flags_of, upstream_flag, without_flag
from sgl_pipeline.args.store_config import EXTRA_CONFIG_FLAG, KEYS, StoreConfig

# Files of our own, and SGLang's own classes in a process of theirs.
STORAGE_BACKENDS = ("file", "dynamic", "nixl", "mooncake")
WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicy = Literal["timeout", "best_effort", "wait_complete"]
WRITE_POLICIES: tuple[WritePolicy, ...] = get_args(WritePolicy)
PREFETCH_POLICIES: tuple[PrefetchPolicy, ...] = get_args(PrefetchPolicy)
_ENABLE = "--enable-hierarchical-cache"


def _require_backend(flag: str, value: str) -> None:
    require(
        value in STORAGE_BACKENDS,
        f"{flag} {value} is not built; choose from {', '.join(STORAGE_BACKENDS)}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierArgs:
    """A store of pages beyond the pool, by SGLang's flags.

    `backend` None: none is attached. `write_policy` says when a page is saved: once it is computed
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
    # Whether a store may be attached while the server runs.
    is_attachable: bool = without_flag(False, "--admin-api-key sets it")

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
            not unknown or self.backend != "file",
            f"{EXTRA_CONFIG_FLAG}: {unknown} is unknown to file; the keys are {', '.join(KEYS)}",
        )
        require(
            self.backend is not None or self.is_attachable,
            f"{_ENABLE} alone keeps pages in host memory, a tier that is not built: on a CPU the "
            "pool is in host memory already (--max-total-tokens is its size). Give a store, "
            "--hicache-storage-backend file, or --admin-api-key, with which one can be attached "
            "while the server runs",
        )
