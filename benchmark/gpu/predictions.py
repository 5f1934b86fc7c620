"""What is expected of one H200, written down before anything of this project ran on a GPU.

A result's table of them is filled by the run alone (`prediction_table.py`) and goes with the
SHA-256 of this file. Never change a prediction after a measurement: add another with its source.

`reading` is a reading of the GPU path beside the libraries' sources of 2026-11-22, with host times
taken on a CPU; its arithmetic is given. Floors are the bytes of `shapes.step_work` at 4.3 TB/s or
its FLOPs at 790 TFLOP/s, whichever take longer; a test computes them again.
"""

from collections.abc import Sequence

from benchmark.gpu.measures import (
    first_measured,
    idle_percent,
    less,
    of_attention,
    of_card,
    of_pipeline,
    of_stage,
    over,
    slowest,
)
from benchmark.gpu.prediction_table import Prediction

CARD_NAME = "NVIDIA H200"  # as torch calls it
ASSUMED_BYTES_PER_MS = 4.3e9
ASSUMED_FLOPS_PER_MS = 790e9

_RATES = "a copy and a bf16 product of 8192 by torch on an H200, as others measured them"
_FLOOR = "bytes of weights, head, keys and values at 4.3 TB/s"
_FLOPS_FLOOR = "FLOPs at 790 TFLOP/s"
_AIM = "aim, set with the reading of 2026-11-22"

_DECODE_1, _DECODE_64, _DECODE_256 = "1 decode at 1024", "64 decodes at 1024", "256 decodes at 1024"
_PREFILL = "prefill 2048"


CARD = (
    Prediction("copy", 4.3, 4.3, "TB/s", "estimate", _RATES, of_card("tb_per_s")),
    Prediction("bf16 product", 790, 790, "TFLOP/s", "estimate", _RATES, of_card("tflop_per_s")),
)


def _floor(model: str, step: str, ms: float, source: str) -> Prediction:
    what = f"{model}, one stage, {step}: kernels"
    return Prediction(what, ms, ms, "ms", "floor", source, of_stage("kernels_ms", step, model))


FLOORS = {
    ("Qwen3-8B", _DECODE_64): _floor("Qwen3-8B", _DECODE_64, 5.8, _FLOOR),
    ("Qwen3-8B", _DECODE_1): _floor("Qwen3-8B", _DECODE_1, 3.5, _FLOOR),
    ("Qwen3-8B", _PREFILL): _floor("Qwen3-8B", _PREFILL, 37, _FLOPS_FLOOR),
    ("Qwen3-0.6B", _DECODE_64): _floor("Qwen3-0.6B", _DECODE_64, 2.02, _FLOOR),
    ("Qwen3-14B", _DECODE_64): _floor("Qwen3-14B", _DECODE_64, 9.0, _FLOOR),
}

AIMS = (
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
        for step in (_DECODE_1, _DECODE_64, _DECODE_256)
    ),
    Prediction(
        "Qwen3-8B, one stage, prefill 2048: arithmetic of its kernels",
        70,
        70,
        "% of 790 TFLOP/s",
        "at least",
        _AIM,
        over(
            of_stage("num_flops", _PREFILL),
            of_stage("kernels_ms", _PREFILL),
            100.0 / ASSUMED_FLOPS_PER_MS,
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
            (1, 0, _DECODE_1),
            (1, 0, _DECODE_64),
            (1, 0, _PREFILL),
            (4, 2, _DECODE_64),
        )
    ),
)

PIPELINES = (
    Prediction(
        "Qwen3-8B, pp 4, 64 decodes a step: from tokens to the group's next step",
        1.5,
        2.0,
        "ms",
        "estimate",
        "reading: there with the scheduler's decision, measured without; not over the host link",
        first_measured(
            of_pipeline("turnaround_ms", 4, 256, 0, "nccl"),
            of_pipeline("turnaround_ms", 4, 256, 0, "cuda-ipc"),
        ),
    ),
    Prediction(
        "Qwen3-8B, pp 4 with a GPU for each stage, 64 decodes a step: idle share",
        24,
        29,
        "%",
        "estimate",
        "reading: H / (p t + H), p = 4, t = 1.2 ms, H = 1.5 to 2 ms",
        idle_percent(
            slowest([of_stage("kernels_ms", _DECODE_64, stages=4, stage=n) for n in (0, 2, 3)]),
            of_pipeline("step_ms", 4, 256, 0, "nccl"),
        ),
    ),
    Prediction(
        "Qwen3-8B, last stage of 4, 64 decodes at 1024: step less kernels",
        0.7,
        1.0,
        "ms",
        "estimate",
        "reading: it prepares a step only after its own tokens",
        less(
            of_stage("step_ms", _DECODE_64, stages=4, stage=3),
            of_stage("kernels_ms", _DECODE_64, stages=4, stage=3),
        ),
    ),
    Prediction(
        "Qwen3-8B, pp 1, 64 requests: idle share of a decode step",
        25,
        40,
        "%",
        "estimate",
        "reading: host and GPU in turn",
        idle_percent(of_stage("kernels_ms", _DECODE_64), of_pipeline("step_ms", 1, 64, 0)),
    ),
    Prediction(
        "Qwen3-8B, pp 1, 64 requests: tokens/s with 1 extra step in flight over none",
        0.83,
        1.03,
        "times",
        "estimate",
        "two floors of 32 decodes (4.6 ms each) hide the host; one of 64 (5.8 ms) idles 25 to 40 %",
        over(of_pipeline("tokens_per_s", 1, 64, 1), of_pipeline("tokens_per_s", 1, 64, 0)),
    ),
    Prediction(
        "Qwen3-8B, pp 4 on one GPU, 256 requests: a round over cuda-ipc over one over host",
        1.0,
        1.0,
        "times",
        "at most",
        "reading: the host link makes a stage wait for its kernels",
        over(
            of_pipeline("round_ms", 4, 256, 0, "cuda-ipc"),
            of_pipeline("round_ms", 4, 256, 0, "host"),
        ),
    ),
)

KERNELS = (
    Prediction(
        "Qwen3-8B, one stage, 64 decodes at 1024: kernels a layer",
        14,
        15,
        "kernels",
        "estimate",
        "reading: 14 with add and norm in one, and those outside of the 36 layers",
        over(of_stage("num_kernels", _DECODE_64), of_stage("layers", _DECODE_64)),
    ),
    Prediction(
        "attention of Qwen3-8B, prefill 2048: FA2 over FA3",
        1.0,
        1.0,
        "times",
        "at least",
        "reading: FA3 is for long fresh prompts",
        over(of_attention("Qwen3-8B", _PREFILL, "fa2"), of_attention("Qwen3-8B", _PREFILL, "fa3")),
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
)

PREDICTIONS: Sequence[Prediction] = (*CARD, *FLOORS.values(), *AIMS, *PIPELINES, *KERNELS)
