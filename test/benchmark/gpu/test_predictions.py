"""The predictions: their arithmetic, and that a run could measure every one of them."""

from pathlib import Path

import pytest
import torch

from benchmark.gpu import part_kernels, part_pipelines, prediction_table
from benchmark.gpu.attention_times import TENSOR_CORES, VLLM
from benchmark.gpu.bench_gpu import texts_of
from benchmark.gpu.expected_cards import CARDS, H100, H200, ExpectedCard, expected_card
from benchmark.gpu.limits import CardLimits
from benchmark.gpu.measures import idle_percent, less, of_card, over, slowest
from benchmark.gpu.prediction_table import Found, NotRunError, Prediction
from benchmark.gpu.predictions import SOURCES, predictions_for
from benchmark.gpu.session import Budget, Session
from benchmark.gpu.shapes import MODELS, STEPS, spec_of, step_work
from sgl_pipeline.layer_partition import even_layer_counts

STEPS_BY_NAME = {step.name: step for step in STEPS}
PREDICTIONS = predictions_for(H100)
every_card = pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)


@every_card
def test_floors_are_the_least_time_at_the_assumed_rates(card: ExpectedCard) -> None:
    limits = CardLimits("assumed", card.tb_per_s * 1e9, card.tflop_per_s * 1e9)
    predicted = {each.what: each for each in predictions_for(card)}
    for part, floor_ms in card.floors_ms.items():
        spec = spec_of(part.model)
        num_layers = even_layer_counts(spec.num_layers, part.stages)[part.stage]
        is_last = part.stage == part.stages - 1
        work = step_work(spec, num_layers, is_last, STEPS_BY_NAME[part.step].chunks)
        assert floor_ms == pytest.approx(limits.limit_ms(work), rel=0.02)
        floor = predicted[f"{part.in_words()}: kernels"]
        assert floor.low == floor.high == floor_ms
        is_of_bytes = limits.bytes_ms(work) > limits.flops_ms(work)
        assert floor.source.startswith("bytes" if is_of_bytes else "FLOPs")


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H100 80GB HBM3", H100),
        ("NVIDIA H200", H200),
        ("NVIDIA H100 PCIe", H100),
        ("CPU", H100),
    ],
)
def test_predictions_are_those_of_the_card_by_its_name(name: str, card: ExpectedCard) -> None:
    assert expected_card(name) is card
    session = Session(torch.device("cpu"), [], [], [], Budget(0.0))
    session.limits = CardLimits(name, 1.0, 1.0)
    session.book_row("card", {"name": name, "tb_per_s": 1.0, "tflop_per_s": 1.0})
    text = texts_of(session)[0]
    assert f"| copy | estimate | {card.tb_per_s:g} TB/s |" in text
    assert ("this is" in text) == (name != card.name)


def test_the_digest_changes_with_each_file_of_predictions(tmp_path: Path) -> None:
    assert [path.name for path in SOURCES] == ["predictions.py", "expected_cards.py"]
    copies = [tmp_path / path.name for path in SOURCES]
    seen = set()
    for changed in (None, *copies):
        for source, copy in zip(SOURCES, copies, strict=True):
            copy.write_text(source.read_text() + ("# 4.4" if copy == changed else ""))
        seen.add(prediction_table.digest(copies))
    assert len(seen) == 3 and prediction_table.digest(SOURCES) in seen


def everything_measured() -> Found:
    """A row wherever the parts book one, by the names of their own lists; every number is 2."""
    stages = [
        {"model": model, "stages": depth, "stage": stage, "graphs": "auto", "step": step.name}
        for model in MODELS
        for depth in (1, 2, 4)
        for stage in sorted({0, depth // 2, depth - 1})
        for step in STEPS
    ]
    columns = "layers step_ms kernels_ms num_kernels bytes_ms flops_ms limit_ms num_bytes num_flops"
    pipelines = [
        {"model": "Qwen3-8B", "stages": depth, "link": link, "requests": requests, "extra": extra}
        for depth in (1, 2, 4)
        for link in ("none", "host", "nccl")
        for requests in part_pipelines._CONCURRENCIES
        for extra in (0, 1, 2)
    ]
    attention = [
        {"model": model, "kind": kind, "step": step.name, "kernels": kernels}
        for model in MODELS
        for kind, steps in part_kernels._STEPS.items()
        for step in steps
        for kernels in ("fa2", "fa3", TENSOR_CORES, VLLM)
    ]
    return Found(
        {
            "card": [{"name": "a card", "tb_per_s": 2.0, "tflop_per_s": 2.0}],
            "stages": [{**row, **dict.fromkeys(columns.split(), 2.0)} for row in stages],
            "pipelines": [
                {**row, "round_ms": 2.0, "step_ms": 2.0, "turnaround_ms": 2.0, "tokens_per_s": 2.0}
                for row in pipelines
            ],
            "attention": [{**row, "layer_ms": 2.0} for row in attention],
        }
    )


@every_card
def test_a_whole_run_fills_every_prediction(card: ExpectedCard) -> None:
    for prediction in predictions_for(card):
        assert prediction.measured(everything_measured()) is not None, prediction.what
        assert prediction.low <= prediction.high and prediction.source


def test_what_was_not_run_says_so_and_nothing_else() -> None:
    nothing = Found({})
    assert {row["measured"] for row in prediction_table.record(PREDICTIONS, nothing)} == {None}
    lines = prediction_table.text(PREDICTIONS, nothing, "a card").splitlines()[-len(PREDICTIONS) :]
    assert all("| not run |  |  |" in line for line in lines)
    # A row without kernels, where the profiler saw none, measures nothing either.
    with pytest.raises(NotRunError):
        Found({"stages": [{"step": "a", "kernels_ms": None}]}).number(
            "stages", "kernels_ms", step="a"
        )


def test_the_turnaround_is_that_of_a_link_which_does_not_wait_for_kernels() -> None:
    (prediction,) = (each for each in PREDICTIONS if "from tokens to" in each.what)
    rows = [
        {"model": "Qwen3-8B", "stages": 4, "requests": 256, "extra": 0, "link": link}
        | {"turnaround_ms": turnaround_ms}
        for link, turnaround_ms in (("host", 9.0), ("nccl", 1.0))
    ]
    assert prediction.measured(Found({"pipelines": rows})) == 1.0
    assert prediction.measured(Found({"pipelines": rows[:1]})) is None


def test_what_follows_of_two_columns_by_hand() -> None:
    found = Found({"card": [{"small": 4.0, "large": 5.0, "missing": None}]})
    small, large, missing = (of_card(name) for name in ("small", "large", "missing"))
    assert over(small, large, 100.0)(found) == pytest.approx(80)
    assert idle_percent(small, large)(found) == pytest.approx(20)
    assert less(large, small)(found) == 1.0
    assert slowest([small, large, small])(found) == 5.0
    with pytest.raises(NotRunError):
        slowest([small, missing])(found)


def predicted(low: float, high: float, kind: prediction_table.Kind, value: float) -> list[str]:
    """Predicted, measured, ratio and verdict of a line of the table."""
    prediction = Prediction("a step", low, high, "ms", kind, "by hand", lambda found: value)
    line = prediction_table.text([prediction], Found({}), "a card").splitlines()[-1]
    return [cell.strip() for cell in line.split("|")][3:7]


def test_lines_of_the_table_by_hand() -> None:
    assert predicted(5.8, 5.8, "floor", 6.38) == ["5.8 ms", "6.38 ms", "1.10", ""]
    assert predicted(1.5, 2.5, "estimate", 3.0) == ["1.5 to 2.5 ms", "3 ms", "1.50", "outside"]
    assert predicted(1.5, 2.5, "estimate", 2.5)[3] == "within"
    assert predicted(85, 85, "at least", 84.9)[3] == "missed"
    assert predicted(85, 85, "at least", 85.0)[3] == "met"
    assert predicted(1.2, 1.2, "at most", 1.21)[3] == "missed"
    assert predicted(1.2, 1.2, "at most", 1.2)[3] == "met"


def test_another_card_than_the_predicted_one_is_named() -> None:
    found = everything_measured()
    assert "this is a card" in prediction_table.text(PREDICTIONS, found, "NVIDIA H200")
    assert "this is" not in prediction_table.text(PREDICTIONS, found, "a card")
