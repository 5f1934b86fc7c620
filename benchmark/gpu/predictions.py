"""What is expected of one H200, written down before anything of this project ran on a GPU.

A result's table of them is filled by the run alone (`prediction_table.py`) and goes with the
SHA-256 of this file. Never change a prediction after a measurement: add another with its source.

`reading` is a reading of the GPU path beside the libraries' sources of 2026-11-22, with host times
taken on a CPU; its arithmetic is given. Floors are the bytes of `shapes.step_work` at 4.3 TB/s or
its FLOPs at 790 TFLOP/s, whichever take longer; a test computes them again.
"""

from collections.abc import Sequence

from benchmark.gpu.prediction_table import Found, Measure, Prediction

CARD_NAME = "NVIDIA H200"  # as torch calls it
ASSUMED_BYTES_PER_MS = 4.3e9
ASSUMED_FLOPS_PER_MS = 790e9

_RATES = "a copy and a bf16 product of 8192 by torch on an H200, as others measured them"
_FLOOR = "bytes of weights, head, keys and values at 4.3 TB/s"
_FLOPS_FLOOR = "FLOPs at 790 TFLOP/s"
_AIM = "aim, set with the reading of 2026-11-22"

_DECODE_1, _DECODE_64, _DECODE_256 = "1 decode at 1024", "64 decodes at 1024", "256 decodes at 1024"
_PREFILL = "prefill 2048"


def _stage(
    column: str, step: str, model: str = "Qwen3-8B", stages: int = 1, stage: int = 0
) -> Measure:
    """A column of the table of lone stages, with graphs."""
    place: dict[str, str | int] = {"model": model, "stages": stages, "stage": stage}
    return lambda found: found.number("stages", column, graphs="auto", step=step, **place)


def _pipeline(column: str, stages: int, requests: int, extra: int, link: str = "") -> Measure:
    """A column of the table of 8B's stage processes; any link where none is named."""
    where: dict[str, str | int] = {"model": "Qwen3-8B", "stages": stages}
    where |= {"requests": requests, "extra": extra} | ({"link": link} if link else {})
    return lambda found: found.number("pipelines", column, **where)


def _layer_ms(model: str, step: str, kernels: str) -> Measure:
    """A layer's attention."""
    return lambda found: found.number(
        "attention", "layer_ms", model=model, step=step, kernels=kernels
    )


def _card(column: str) -> Measure:
    return lambda found: found.number("card", column)


def _over(one: Measure, other: Measure, factor: float = 1.0) -> Measure:
    return lambda found: factor * one(found) / other(found)


def _percent(part: Measure, whole: Measure) -> Measure:
    return _over(part, whole, 100.0)


def _idle_percent(busy: Measure, whole: Measure) -> Measure:
    return lambda found: 100.0 - _percent(busy, whole)(found)


def _percent_of_assumed_flops(step: str) -> Measure:
    per_ms = _over(_stage("num_flops", step), _stage("kernels_ms", step))
    return lambda found: 100.0 * per_ms(found) / ASSUMED_FLOPS_PER_MS


def _less(one: Measure, other: Measure) -> Measure:
    return lambda found: one(found) - other(found)


def _fa2_over_fa3(model: str, step: str) -> Measure:
    return _over(_layer_ms(model, step, "fa2"), _layer_ms(model, step, "fa3"))


def _slowest_stage_of_4(found: Found) -> float:
    """Milliseconds of the kernels of the slowest of 8B's four stages in a step of 64 decodes."""
    stages = (_stage("kernels_ms", _DECODE_64, stages=4, stage=stage) for stage in (0, 2, 3))
    return max(measure(found) for measure in stages)


CARD = (
    Prediction("copy", 4.3, 4.3, "TB/s", "estimate", _RATES, _card("tb_per_s")),
    Prediction("bf16 product", 790, 790, "TFLOP/s", "estimate", _RATES, _card("tflop_per_s")),
)


def _floor(model: str, step: str, ms: float, source: str) -> Prediction:
    what = f"{model}, one stage, {step}: kernels"
    return Prediction(what, ms, ms, "ms", "floor", source, _stage("kernels_ms", step, model))


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
            _percent(_stage("bytes_ms", step), _stage("kernels_ms", step)),
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
        _percent_of_assumed_flops(_PREFILL),
    ),
    *(
        Prediction(
            f"Qwen3-8B, stage {stage} of {stages}, {step}: step over kernels",
            1.2,
            1.2,
            "times",
            "at most",
            _AIM,
            _over(
                _stage("step_ms", step, stages=stages, stage=stage),
                _stage("kernels_ms", step, stages=stages, stage=stage),
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
        "reading: there with the scheduler's decision, measured without",
        _pipeline("turnaround_ms", 4, 256, 0),
    ),
    Prediction(
        "Qwen3-8B, pp 4 with a GPU for each stage, 64 decodes a step: idle share",
        24,
        29,
        "%",
        "estimate",
        "reading: H / (p t + H), p = 4, t = 1.2 ms, H = 1.5 to 2 ms",
        _idle_percent(_slowest_stage_of_4, _pipeline("step_ms", 4, 256, 0, "nccl")),
    ),
    Prediction(
        "Qwen3-8B, last stage of 4, 64 decodes at 1024: step less kernels",
        0.7,
        1.0,
        "ms",
        "estimate",
        "reading: it prepares a step only after its own tokens",
        _less(
            _stage("step_ms", _DECODE_64, stages=4, stage=3),
            _stage("kernels_ms", _DECODE_64, stages=4, stage=3),
        ),
    ),
    Prediction(
        "Qwen3-8B, pp 1, 64 requests: idle share of a decode step",
        25,
        40,
        "%",
        "estimate",
        "reading: host and GPU in turn",
        _idle_percent(_stage("kernels_ms", _DECODE_64), _pipeline("step_ms", 1, 64, 0)),
    ),
    Prediction(
        "Qwen3-8B, pp 1, 64 requests: tokens/s with 1 extra step in flight over none",
        0.83,
        1.03,
        "times",
        "estimate",
        "two floors of 32 decodes (4.6 ms each) hide the host; one of 64 (5.8 ms) idles 25 to 40 %",
        _over(_pipeline("tokens_per_s", 1, 64, 1), _pipeline("tokens_per_s", 1, 64, 0)),
    ),
    Prediction(
        "Qwen3-8B, pp 4 on one GPU, 256 requests: a round over cuda-ipc over one over host",
        1.0,
        1.0,
        "times",
        "at most",
        "reading: the host link makes a stage wait for its kernels",
        _over(
            _pipeline("round_ms", 4, 256, 0, "cuda-ipc"), _pipeline("round_ms", 4, 256, 0, "host")
        ),
    ),
)

KERNELS = (
    Prediction(
        "Qwen3-8B, one stage, 64 decodes at 1024: kernels a layer",
        15,
        16,
        "kernels",
        "estimate",
        "reading: 15, and those outside of the layers",
        lambda found: _stage("num_kernels", _DECODE_64)(found) / 36,
    ),
    Prediction(
        "attention of Qwen3-8B, prefill 2048: FA2 over FA3",
        1.0,
        1.0,
        "times",
        "at least",
        "reading: FA3 is for long fresh prompts",
        _fa2_over_fa3("Qwen3-8B", _PREFILL),
    ),
    *(
        Prediction(
            f"attention of {model}, {step}: FA2 over FA3",
            1.0,
            1.0,
            "times",
            "at most",
            "reading: FlashInfer's FA3 does not split the keys of short chunks",
            _fa2_over_fa3(model, step),
        )
        for model, step in (
            ("Qwen3-0.6B", "prefill 512 after 4096"),
            ("Qwen3-8B", "prefill 128 after 16384"),
        )
    ),
)

PREDICTIONS: Sequence[Prediction] = (*CARD, *FLOORS.values(), *AIMS, *PIPELINES, *KERNELS)
