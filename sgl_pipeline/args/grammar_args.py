"""Limits on output that is held to a grammar."""

from dataclasses import dataclass

from sgl_pipeline.args.checks import at_least, require
from sgl_pipeline.args.flags import check_flags, our_flag, upstream_flag, without_flag


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarArgs:
    """Settings that hold output to a grammar (JSON schema, regex, EBNF, structural tag).

    `compile_seconds` are of wall time, `match_ms_per_token` of CPU time.
    """

    enabled: bool = without_flag(True, "off with --grammar-backend none")
    any_whitespace: bool = upstream_flag(True, "--constrained-json-disable-any-whitespace")
    max_whitespace_count: int | None = upstream_flag(
        None, "--constrained-json-max-whitespace-cnt", check=at_least(1)
    )
    compile_seconds: float = our_flag(
        10.0,
        "--grammar-compile-seconds",
        help="Longest compile of a request's grammar; a longer one ends that request.",
    )
    compile_memory_mib: int = our_flag(
        1024,
        "--grammar-compile-memory-mib",
        help="Most memory of such a compile.",
        check=at_least(64),
    )
    match_ms_per_token: float = our_flag(
        20.0,
        "--grammar-match-ms-per-token",
        help="Most CPU time to match a grammar, for each token on average.",
    )

    def __post_init__(self) -> None:
        check_flags(self)
        require(
            0.0 < self.compile_seconds <= 3600.0,
            f"--grammar-compile-seconds {self.compile_seconds} must be above 0 and at most 3600",
        )
        require(
            self.match_ms_per_token > 0.0,
            f"--grammar-match-ms-per-token {self.match_ms_per_token} must be above 0",
        )
