"""Expectations of `predictions.py` that differ by card: its rates, and what follows of them.

Written down before anything of this project ran on a GPU. `reading` is a reading of the GPU path
beside the libraries' sources, of 2026-11-22 for the H200 and of 2026-11-24 for the H100; its
arithmetic is given. Never change a number after a measurement: add another with its source.
"""

from collections.abc import Mapping
from dataclasses import dataclass

DECODE_1, DECODE_64, DECODE_256 = "1 decode at 1024", "64 decodes at 1024", "256 decodes at 1024"
PREFILL = "prefill 2048"


@dataclass(frozen=True, slots=True)
class Range:
    """From `low` to `high`, and why."""

    low: float
    high: float
    source: str


@dataclass(frozen=True, slots=True)
class StagePart:
    """A stage of a model cut into `stages`, and a step by its name in `shapes.STEPS`."""

    model: str
    step: str
    stages: int = 1
    stage: int = 0

    def in_words(self) -> str:
        place = "one stage" if self.stages == 1 else f"stage {self.stage} of {self.stages}"
        return f"{self.model}, {place}, {self.step}"


@dataclass(frozen=True, slots=True)
class ExpectedCard:
    """One card.

    Attributes:
        name: as torch calls it.
        tb_per_s, tflop_per_s: assumed of a large copy and of a large bf16 product.
        floors_ms: the bytes or the FLOPs of `shapes.step_work` at these rates, whichever take
            longer; a test computes them again.
        idle_percent_of_4: of a pipeline of four cards, 64 decodes a step.
        idle_percent_alone: of a decode step of 64 requests in one stage.
        extra_step_gain: tokens/s of 64 requests in one stage with 1 extra step over none.
    """

    name: str
    tb_per_s: float
    tflop_per_s: float
    rates_source: str
    floors_ms: Mapping[StagePart, float]
    idle_percent_of_4: Range
    idle_percent_alone: Range
    extra_step_gain: Range


H200 = ExpectedCard(
    name="NVIDIA H200",
    tb_per_s=4.3,
    tflop_per_s=790,
    rates_source="a copy and a bf16 product of 8192 by torch on an H200, as others measured them",
    floors_ms={
        StagePart("Qwen3-8B", DECODE_64): 5.8,
        StagePart("Qwen3-8B", DECODE_1): 3.5,
        StagePart("Qwen3-8B", PREFILL): 37,
        StagePart("Qwen3-0.6B", DECODE_64): 2.02,
        StagePart("Qwen3-14B", DECODE_64): 9.0,
    },
    idle_percent_of_4=Range(24, 29, "reading: H / (p t + H), p = 4, t = 1.2 ms, H = 1.5 to 2 ms"),
    idle_percent_alone=Range(25, 40, "reading: host and GPU in turn"),
    extra_step_gain=Range(
        0.83,
        1.03,
        "two floors of 32 decodes (4.6 ms each) hide the host; one of 64 (5.8 ms) idles 25 to 40 %",
    ),
)

H100 = ExpectedCard(
    name="NVIDIA H100 80GB HBM3",
    tb_per_s=3.0,
    tflop_per_s=798,
    rates_source="reading: 90 % of the datasheet's 3.35 TB/s, as of the H200's; 81 % of its 989 "
    "TFLOP/s",
    floors_ms={
        StagePart("Qwen3-8B", DECODE_1): 5.10,
        StagePart("Qwen3-8B", DECODE_64): 8.27,
        StagePart("Qwen3-8B", DECODE_256): 17.9,
        StagePart("Qwen3-8B", PREFILL): 37.2,
        StagePart("Qwen3-8B", DECODE_64, 4, 0): 1.96,
        StagePart("Qwen3-8B", DECODE_64, 4, 3): 2.38,
        StagePart("Qwen3-0.6B", DECODE_1): 0.44,
        StagePart("Qwen3-0.6B", DECODE_64): 2.91,
        StagePart("Qwen3-0.6B", DECODE_256): 10.4,
        StagePart("Qwen3-0.6B", PREFILL): 2.86,
        StagePart("Qwen3-14B", DECODE_1): 9.38,
        StagePart("Qwen3-14B", DECODE_64): 12.9,
        StagePart("Qwen3-14B", PREFILL): 70.0,
    },
    idle_percent_of_4=Range(16, 20, "reading: H / (p t + H), p = 4, t = 1.96 ms, H = 1.5 to 2 ms"),
    idle_percent_alone=Range(
        19, 32, "the host's 1.9 to 3.9 ms that idle 25 to 40 % of an H200, beside 8.27 ms"
    ),
    extra_step_gain=Range(
        0.77,
        0.91,
        "two floors of 32 decodes (6.7 ms each) hide the host; one of 64 (8.3 ms) idles 19 to 32 %",
    ),
)

# What a run on any other card is held against comes first.
CARDS = (H100, H200)


def expected_card(name: str) -> ExpectedCard:
    """The card that torch calls `name`; the first of CARDS where nothing is expected of it, which
    a result then says."""
    return next((card for card in CARDS if card.name == name), CARDS[0])
