"""Limits on output that is held to a grammar."""

from dataclasses import dataclass

from sgl_pipeline.args.checks import require


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarArgs:
    """How output is held to a grammar (JSON schema, regex, EBNF, structural tag).

    A compile may take `compile_seconds` of wall time and `compile_memory_mib` MiB. Matching may
    take `match_ms_per_token` of CPU time for each token, on average.
    """

    enabled: bool = True
    any_whitespace: bool = True
    max_whitespace_count: int | None = None
    compile_seconds: float = 10.0
    compile_memory_mib: int = 1024
    match_ms_per_token: float = 20.0

    def __post_init__(self) -> None:
        require(
            self.max_whitespace_count is None or self.max_whitespace_count >= 1,
            f"--constrained-json-max-whitespace-cnt {self.max_whitespace_count} must be at least 1",
        )
        require(
            0.0 < self.compile_seconds <= 3600.0,
            f"--grammar-compile-seconds {self.compile_seconds} must be above 0 and at most 3600",
        )
        require(
            self.compile_memory_mib >= 64,
            f"--grammar-compile-memory-mib {self.compile_memory_mib} must be at least 64",
        )
        require(
            self.match_ms_per_token > 0.0,
            f"--grammar-match-ms-per-token {self.match_ms_per_token} must be above 0",
        )
