"""Which stage owns which layers.

Built at start-up from `--pp-layer-partition`, later by `migration/`; read by everybody. Layers keep
their model-wide index for ever; a stage owns one contiguous run of them, which may be empty only
between two moves.
"""

import msgspec

from sgl_pipeline.errors import ConfigurationError


class StagePlan(msgspec.Struct, frozen=True, array_like=True):
    """`layer_counts[s]` consecutive layers belong to stage `s`; `epoch` numbers the plans."""

    epoch: int
    layer_counts: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.layer_counts)

    @property
    def num_layers(self) -> int:
        return sum(self.layer_counts)

    def layers_of(self, stage: int) -> range:
        """The model-wide ids of the layers that `stage` runs, in order."""
        start = sum(self.layer_counts[:stage])
        return range(start, start + self.layer_counts[stage])


def even_layer_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Counts that differ by at most one. The remainder goes to the stages before the last, which
    also runs norm, lm_head and sampler (vLLM pull request 13839 does the same)."""
    base, remainder = divmod(num_layers, num_stages)
    counts = [base] * num_stages
    for stage in range(num_stages - 1 - remainder, num_stages - 1):
        counts[stage] += 1
    return tuple(counts)


def auto_layer_counts(num_layers: int, num_stages: int, head_layers: float) -> tuple[int, ...]:
    """Counts for a load of decodes and prefill alike. Every stage keeps at least one layer.

    A decode step is bound by the weights it reads, of which lm_head has as many as `head_layers`
    layers; in a prefill step the head has few rows and costs next to nothing. The sum of both
    steps' slowest stages is minimised, so that a large vocabulary takes layers off the last stage,
    but fewer than decodes alone would.
    """
    if num_stages == 1:
        return (num_layers,)
    candidates = []
    for last in range(1, num_layers - num_stages + 2):
        base, remainder = divmod(num_layers - last, num_stages - 1)
        upstream = base + (remainder > 0)
        cost = max(upstream, last + head_layers) + max(upstream, last)
        # Ties go to the more even split.
        candidates.append((cost, abs(upstream - last), last))
    _, _, last = min(candidates)
    base, remainder = divmod(num_layers - last, num_stages - 1)
    upstream_counts = [base + (stage < remainder) for stage in range(num_stages - 1)]
    return (*upstream_counts, last)


def parse_layer_partition(
    text: str, num_layers: int, num_stages: int, head_layers: float
) -> StagePlan:
    """The plan of epoch 0 for `--pp-layer-partition auto|even|a,b,..`.

    Raises ConfigurationError when there are more stages than layers or the counts do not fit.
    """
    if num_stages > num_layers:
        raise ConfigurationError(
            f"--pp {num_stages} is more than the model's {num_layers} layers; "
            f"use --pp {num_layers} or less"
        )
    if text == "auto":
        return StagePlan(0, auto_layer_counts(num_layers, num_stages, head_layers))
    if text == "even":
        return StagePlan(0, even_layer_counts(num_layers, num_stages))
    return StagePlan(0, _explicit_layer_counts(text, num_layers, num_stages))


def _explicit_layer_counts(text: str, num_layers: int, num_stages: int) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigurationError(
            f"--pp-layer-partition {text!r} is not auto, even or a list of counts like 5,4,4,3"
        ) from None
    if len(counts) != num_stages:
        raise ConfigurationError(
            f"--pp-layer-partition {text} names {len(counts)} stages, --pp asks for {num_stages}"
        )
    if min(counts) < 1:
        raise ConfigurationError(
            f"--pp-layer-partition {text}: each stage needs at least one layer"
        )
    if sum(counts) != num_layers:
        raise ConfigurationError(
            f"--pp-layer-partition {text} sums to {sum(counts)}, the model has {num_layers} layers"
        )
    return counts
