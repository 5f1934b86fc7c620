"""Predictions for a card, written down before anything of this project ran on a GPU.

A result's table of them is filled by the run alone (`prediction_table.py`) and goes with the
SHA-256 of `SOURCES`. Never change a prediction after a measurement: add another with its source.
What differs from card to card is in `expected_cards.py`, which says what a `reading` is.
"""

from pathlib import Path

from benchmark.gpu import expected_cards
from benchmark.gpu.attention_times import TENSOR_CORES, VLLM
from benchmark.gpu.expected_cards import (
    DECODE_1,
    DECODE_64,
    DECODE_256,
    PREFILL,
    ExpectedCard,
    Range,
    StagePart,
)
from benchmark.gpu.measures import (
    idle_percent,
    less,
    of_attention,
    of_card,
    of_pipeline,
    of_stage,
    over,
    slowest,
)
from benchmark.gpu.prediction_table import Measure, Prediction

SOURCES = (Path(__file__), Path(expected_cards.__file__))
LONG_DECODES = "16 decodes at 8192"
_AIM = "aim, set with the reading of 2026-11-22"


def predictions_for(card: ExpectedCard) -> tuple[Prediction, ...]:
    """All that is predicted of a run on `card`."""
    floors = (_floor(card, part, ms) for part, ms in card.floors_ms.items())
    return (*_rates(card), *floors, *_aims(card), *_pipelines(card), *_KERNELS)


def _rates(card: ExpectedCard) -> tuple[Prediction, ...]:
    return tuple(
        _estimate(what, Range(rate, rate, card.rates_source), unit, of_card(column))
        for what, rate, unit, column in (
            ("copy", card.tb_per_s, "TB/s", "tb_per_s"),
            ("bf16 product", card.tflop_per_s, "TFLOP/s", "tflop_per_s"),
        )
    )


def _floor(card: ExpectedCard, part: StagePart, ms: float) -> Prediction:
    source = f"bytes of weights, head, keys and values at {card.tb_per_s} TB/s"
    if part.step == PREFILL:
        source = f"FLOPs at {card.tflop_per_s:g} TFLOP/s"
    measure = of_stage("kernels_ms", part.step, part.model, part.stages, part.stage)
    return Prediction(f"{part.in_words()}: kernels", ms, ms, "ms", "floor", source, measure)


def _estimate(what: str, expected: Range, unit: str, measure: Measure) -> Prediction:
    return Prediction(what, expected.low, expected.high, unit, "estimate", expected.source, measure)


def _aims(card: ExpectedCard) -> tuple[Prediction, ...]:
    return (
        *(
            Prediction(
                f"Qwen3-8B, one stage, {step}: bytes limit over kernels",
                85,
                85,
                "%",
                "at least",
                _AIM,
                over(of_stage("bytes_ms", step), of_stage("kernels_ms", step), 100.0),
            )
            for step in (DECODE_1, DECODE_64, DECODE_256)
        ),
        Prediction(
            "Qwen3-8B, one stage, prefill 2048: arithmetic of its kernels",
            70,
            70,
            f"% of {card.tflop_per_s:g} TFLOP/s",
            "at least",
            _AIM,
            over(
                of_stage("num_flops", PREFILL),
                of_stage("kernels_ms", PREFILL),
                100.0 / (card.tflop_per_s * 1e9),
            ),
        ),
        *(
            Prediction(
                f"Qwen3-8B, stage {stage} of {stages}, {step}: step over kernels",
                1.2,
                1.2,
                "times",
                "at most",
                _AIM,
                over(
                    of_stage("step_ms", step, stages=stages, stage=stage),
                    of_stage("kernels_ms", step, stages=stages, stage=stage),
                ),
            )
            for stages, stage, step in (
                (1, 0, DECODE_1),
                (1, 0, DECODE_64),
                (1, 0, PREFILL),
                (4, 2, DECODE_64),
            )
        ),
    )


def _pipelines(card: ExpectedCard) -> tuple[Prediction, ...]:
    return (
        _estimate(
            "Qwen3-8B, pp 4, 64 decodes a step: from tokens to the group's next step",
            Range(
                1.5,
                2.0,
                "reading: there with the scheduler's decision, measured without; not over the host "
                "link",
            ),
            "ms",
            of_pipeline("turnaround_ms", 4, 256, 0, "nccl"),
        ),
        _estimate(
            "Qwen3-8B, pp 4 with a GPU for each stage, 64 decodes a step: idle share",
            card.idle_percent_of_4,
            "%",
            idle_percent(
                slowest([of_stage("kernels_ms", DECODE_64, stages=4, stage=n) for n in (0, 2, 3)]),
                of_pipeline("step_ms", 4, 256, 0, "nccl"),
            ),
        ),
        _estimate(
            "Qwen3-8B, last stage of 4, 64 decodes at 1024: step less kernels",
            Range(0.7, 1.0, "reading: it prepares a step only after its own tokens"),
            "ms",
            less(
                of_stage("step_ms", DECODE_64, stages=4, stage=3),
                of_stage("kernels_ms", DECODE_64, stages=4, stage=3),
            ),
        ),
        _estimate(
            "Qwen3-8B, pp 1, 64 requests: idle share of a decode step",
            card.idle_percent_alone,
            "%",
            idle_percent(of_stage("kernels_ms", DECODE_64), of_pipeline("step_ms", 1, 64, 0)),
        ),
        _estimate(
            "Qwen3-8B, pp 1, 64 requests: tokens/s with 1 extra step in flight over none",
            card.extra_step_gain,
            "times",
            over(of_pipeline("tokens_per_s", 1, 64, 1), of_pipeline("tokens_per_s", 1, 64, 0)),
        ),
    )


_KERNELS = (
    Prediction(
        "Qwen3-8B, one stage, 64 decodes at 1024: kernels a layer",
        14,
        15,
        "kernels",
        "estimate",
        "reading: 14 with add and norm in one, and those outside of the 36 layers",
        over(of_stage("num_kernels", DECODE_64), of_stage("layers", DECODE_64)),
    ),
    Prediction(
        "attention of Qwen3-8B, prefill 2048: FA2 over FA3",
        1.0,
        1.0,
        "times",
        "at least",
        "reading: FA3 is for long fresh prompts",
        over(of_attention("Qwen3-8B", PREFILL, "fa2"), of_attention("Qwen3-8B", PREFILL, "fa3")),
    ),
    *(
        Prediction(
            f"attention of {model}, {step}: FA2 over FA3",
            1.0,
            1.0,
            "times",
            "at most",
            "reading: FlashInfer's FA3 does not split the keys of short chunks",
            over(of_attention(model, step, "fa2"), of_attention(model, step, "fa3")),
        )
        for model, step in (
            ("Qwen3-0.6B", "prefill 512 after 4096"),
            ("Qwen3-8B", "prefill 128 after 16384"),
        )
    ),
    Prediction(
        f"attention of Qwen3-8B, {LONG_DECODES}: FlashInfer on tensor cores over {VLLM}",
        1.05,
        1.15,
        "times",
        "estimate",
        "reading of 2026-11-24: FA3 of their own build is 5 to 15 % of decodes at long context",
        over(
            of_attention("Qwen3-8B", LONG_DECODES, TENSOR_CORES),
            of_attention("Qwen3-8B", LONG_DECODES, VLLM),
        ),
    ),
)
