"""Layer splits that need no measurement: even, or as `--pp-layer-partition` writes them out.

A split by measured times is made in `migration/partition.py`.
"""

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.stage_plan import StagePlan


def even_layer_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Counts that differ by at most one. The remainder goes to the stages before the last, which
    also runs norm, lm_head and sampler (vLLM pull request 13839 does the same)."""
    base, remainder = divmod(num_layers, num_stages)
    counts = [base] * num_stages
    for stage in range(num_stages - 1 - remainder, num_stages - 1):
        counts[stage] += 1
    return tuple(counts)


def parse_layer_partition(
    text: str, num_stages: int, num_layers: int, source: str = "--pp-layer-partition"
) -> StagePlan | None:
    """The plan of epoch 0 for `--pp-layer-partition auto|even|a,b,..`; None where it is `auto`,
    which needs costs that are yet to be measured, and there is a choice. `source` is the flag or
    variable that errors name.

    Raises ConfigurationError when there are more stages than layers or the counts do not fit.
    """
    if num_stages > num_layers:
        raise ConfigurationError(
            f"--pp {num_stages} is more than the model's {num_layers} layers; "
            f"use --pp {num_layers} or less"
        )
    if text == "auto" and 1 < num_stages < num_layers:
        return None
    if text in ("auto", "even"):
        return StagePlan(0, even_layer_counts(num_layers, num_stages))
    return StagePlan(0, _explicit_layer_counts(text, num_stages, num_layers, source))


def _explicit_layer_counts(
    text: str, num_stages: int, num_layers: int, source: str
) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigurationError(
            f"{source} {text!r} is not auto, even or a list of counts like 5,4,4,3"
        ) from None
    if len(counts) != num_stages:
        raise ConfigurationError(
            f"{source} {text} names {len(counts)} stages, --pp asks for {num_stages}"
        )
    if min(counts) < 1:
        raise ConfigurationError(f"{source} {text}: each stage needs at least one layer")
    if sum(counts) != num_layers:
        raise ConfigurationError(
            f"{source} {text} sums to {sum(counts)}, the model has {num_layers} layers"
        )
    return counts
