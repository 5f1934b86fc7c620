"""The assignment of layers to stages.

Layers keep their model-wide index for ever; a stage owns one contiguous run of them, which may be
empty only between two moves.
"""

import msgspec


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
