"""A rotary embedding (RoFormer, arXiv 2104.09864): its base and how its frequencies are scaled."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by `factor` (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's: see `rotary.py`. `original_context` in tokens."""

    factor: float
    low_turns: float
    high_turns: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN's (arXiv 2309.00071): pairs that turn more than `fast_turns` times in `original_context`
    tokens are kept, those with less than `slow_turns` are stretched by `factor`, with a ramp
    between, whose ends are whole pairs if they are `truncated`."""

    factor: float
    original_context: int
    fast_turns: float
    slow_turns: float
    truncated: bool


@dataclass(frozen=True, slots=True)
class PairScaling:
    """LongRoPE's (arXiv 2402.13753): each pair is stretched by a factor of its own."""

    factors: tuple[float, ...]


Scaling = LinearScaling | Llama3Scaling | YarnScaling | PairScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The rotary embedding: base `theta`, how its frequencies are scaled, and the factor of cosines
    and sines that goes with it.

    The first `rotated_share` of a head's dimensions are rotated, in pairs of neighbors where
    `interleaved`, else of the two halves.
    """

    theta: float
    scaling: Scaling | None = None
    attention_factor: float = 1.0
    rotated_share: float = 1.0
    interleaved: bool = False

    def rotated_dims(self, head_dim: int) -> int:
        """Number of a head's dimensions that are rotated."""
        return int(head_dim * self.rotated_share)
