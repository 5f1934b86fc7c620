"""Formats beside bf16: what their servers are told, what passes, and what the table says."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark.clients import formats, run
from benchmark.clients.demo_server import MODEL_NAME, engine
from benchmark.clients.formats import (
    LARGEST_LOSS,
    Measured,
    in_order,
    judge,
    measure_formats,
    server_flags,
)
from benchmark.clients.lm_eval_client import Scores, read_scores
from benchmark.models.precisions import PRECISIONS
from benchmark.support.paths import DEMO_MODEL
from sgl_pipeline.managers.command_line.server_args import make_parser

RIGHT, WRONG = ("1+1", "2"), ("1+1", "3")
EXACT = Scores(0.99, 0.98, {"1+1": "2"}, {RIGHT: -0.25, WRONG: -8.0}, {RIGHT: -0.25})


def _measured(name: str, depth: int = 2, scores: Scores = EXACT) -> Measured:
    return Measured(PRECISIONS[name], depth, scores)


def _faults(*measured: Measured) -> list[list[str]]:
    return [row.faults for row in judge(measured)]


@pytest.mark.parametrize("names", [["fp8"], ["fp8", "bf16", "fp8"]])
def test_bf16_comes_first_and_each_format_once(names: list[str]) -> None:
    assert [one.name for one in in_order(names)] == ["bf16", "fp8"]


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_server_is_told_checkpoint_and_format(name: str, tmp_path: Path) -> None:
    precision = PRECISIONS[name]
    command = engine(4, 31000, server_flags(precision, tmp_path)).command
    options = make_parser().parse_args(list(command[3:]))
    stored = precision.stored
    assert Path(options.model_path) == (tmp_path / stored if stored else DEMO_MODEL)
    assert (Path(options.model_path) / "model.safetensors").exists()
    assert options.served_model_name == MODEL_NAME
    assert (options.dtype, options.pp_size, options.port) == ("bfloat16", 4, 31000)
    assert options.quantization == precision.quantization
    assert options.kv_cache_dtype == precision.kv_cache_dtype


@pytest.mark.parametrize("score", ["exact_match", "accuracy"])
def test_a_score_may_be_below_that_of_bf16_by_the_margin_and_no_more(score: str) -> None:
    at_the_margin = getattr(EXACT, score) - LARGEST_LOSS
    passes = replace(EXACT, **{score: at_the_margin})
    fails = replace(EXACT, **{score: at_the_margin - 0.001})
    assert _faults(_measured("bf16"), _measured("fp8", scores=passes)) == [[], []]
    of_bf16, of_fp8 = _faults(_measured("bf16"), _measured("fp8", scores=fails))
    assert of_bf16 == []
    assert of_fp8 == [f"{score.replace('_', ' ')} 0.021 below bf16's"]


def test_a_score_above_that_of_bf16_passes() -> None:
    worse = replace(EXACT, exact_match=0.95, accuracy=0.95)
    assert _faults(_measured("bf16", scores=worse), _measured("fp8")) == [[], []]


def test_bf16_itself_must_answer() -> None:
    (faults,) = _faults(_measured("bf16", scores=replace(EXACT, exact_match=0.5)))
    assert faults == ["exact match below 0.9"]


def test_depths_of_a_format_must_agree_to_the_bit() -> None:
    another = replace(EXACT, likelihoods={RIGHT: -0.25, WRONG: -8.0000001})
    rows = [_measured(name, depth) for name in ("bf16", "fp8") for depth in (2, 1)]
    assert _faults(*rows) == [[], [], [], []]
    faults = _faults(*rows[:3], _measured("fp8", 1, another))
    assert faults[:3] == [[], [], []]
    assert faults[3] == ["likelihoods differ by up to 1.0e-07 from those at --pp 2"]
    talkative = replace(EXACT, answers={"1+1": "2 "})
    assert _faults(*rows[:3], _measured("fp8", 1, talkative))[3] == ["other answers than at --pp 2"]


def test_formats_may_differ_in_likelihoods_and_are_held_against_their_own_depth() -> None:
    other = replace(EXACT, likelihoods={RIGHT: -0.5, WRONG: -7.0}, right_likelihoods={RIGHT: -0.5})
    row = judge([_measured("bf16"), _measured("fp8", scores=other)])[1]
    assert row.faults == []
    assert (row.mean_difference_right, row.largest_difference) == (0.25, 1.0)
    weak = replace(EXACT, accuracy=0.95)
    at_depth_1 = [_measured("bf16", 1, weak), _measured("fp8", 1, weak)]
    faults = _faults(_measured("bf16"), *at_depth_1, _measured("fp8"))
    assert faults == [[], [], [], []]


def test_a_server_runs_for_each_format_at_each_depth_and_faults_are_problems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[tuple[int, tuple[str, ...]]] = []

    @contextmanager
    def demo_server(depth: int, port: int, flags: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
        served.append((depth, flags[4:]))
        yield "http://127.0.0.1", tmp_path

    def evaluate(url: str, directory: Path, questions: int) -> Scores:
        assert questions == 3
        return replace(EXACT, accuracy=0.9) if served[-1][1] else EXACT

    monkeypatch.setattr(formats, "demo_server", demo_server)
    monkeypatch.setattr(formats, "evaluate", evaluate)
    monkeypatch.setattr(formats, "program", lambda *_: None)
    report = measure_formats(["fp8"], [2, 1], 31000, 3)
    fp8 = ("--quantization", "fp8")
    assert served == [(2, ()), (1, ()), (2, fp8), (1, fp8)]
    assert report.problems == [f"fp8 --pp {depth}: accuracy 0.080 below bf16's" for depth in (2, 1)]
    assert len(report.record["rows"]) == 4
    assert "at most 0.02 below those of bf16" in report.texts[1]


def test_scores_are_read_from_what_lm_eval_writes(tmp_path: Path) -> None:
    directory = tmp_path / "sgl-pipeline-demo"
    directory.mkdir()
    results = {"demo_generate": {"exact_match,none": 0.5}, "demo_choose": {"acc,none": 0.25}}
    (directory / "results_2026.json").write_text(json.dumps({"results": results}))
    doc = {"prompt": "1+1", "answer": "2"}
    generated = {"doc": doc, "arguments": {}, "filtered_resps": ["2"]}
    (directory / "samples_demo_generate_2026.jsonl").write_text(json.dumps(generated) + "\n")
    arguments = {f"gen_args_{i}": {"arg_0": "1+1", "arg_1": str(i)} for i in (2, 3)}
    responses = [["-0.25", "True"], ["-8.0", "False"]]
    chosen = {"doc": doc, "arguments": arguments, "filtered_resps": responses}
    (directory / "samples_demo_choose_2026.jsonl").write_text(json.dumps(chosen) + "\n")
    assert read_scores(tmp_path) == replace(EXACT, exact_match=0.5, accuracy=0.25)


def test_formats_are_measured_by_lm_eval_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--format", "fp8", "--client", "guidellm", "--no-save"]) == 1
    assert "--format is measured by lm-eval" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--format", "fp8"], (["fp8"], [2], 31960, 50)),
        (
            [
                "--format",
                "fp8",
                "--client",
                "lm-eval",
                "--pp",
                "4",
                "--pp",
                "1",
                "--questions",
                "7",
            ],
            (["fp8"], [4, 1], 31960, 7),
        ),
    ],
)
def test_the_command_hands_formats_and_depths_on(
    argv: list[str], expected: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(formats, "measure_formats", lambda *given: seen.append(given))
    assert run.main([*argv, "--no-save"]) == 0
    assert seen == [expected]
