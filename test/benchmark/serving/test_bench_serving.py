"""What the benchmark refuses, and what it writes down."""

import dataclasses
import json
from pathlib import Path
from random import Random

import pytest
from support.workloads import fixed_lengths

from benchmark.serving.bench_serving import main, report_of
from benchmark.support.command import Command
from benchmark.support.engine import EngineFailure
from benchmark.support.loads import Load
from benchmark.support.measured_runs import (
    check_equal_work,
    client_latencies,
    take_requests,
    turns,
)
from benchmark.support.paths import RESULTS
from benchmark.support.serving_report import METRICS, Run
from sgl_pipeline.args import SchedulingArgs, ThrottleArgs
from sgl_pipeline.goodput import LatencyTarget, RequestLatency
from sgl_pipeline.simulator.experiment import Cluster, simulate
from sgl_pipeline.simulator.workload import poisson_arrivals

RUN = Run(
    engine="ours --pp 2",
    round=1,
    input_tokens=100,
    output_tokens=20,
    duration_s=1.0,
    metrics=dict.fromkeys(METRICS, 1.0),
)


def test_the_default_load_is_that_of_the_peers_table() -> None:
    flags = " ".join(Load().client_flags())
    assert flags == (
        "--dataset-name random-ids --num-prompts 64 --random-input-len 256 "
        "--random-output-len 64 --random-range-ratio 0.25 --seed 1 --request-rate inf"
    )


def test_runs_of_unequal_work_are_not_compared() -> None:
    check_equal_work([RUN, dataclasses.replace(RUN, engine="vllm")])
    with pytest.raises(EngineFailure, match=r"100 in, 20 out.*90 in, 20 out"):
        check_equal_work([RUN, dataclasses.replace(RUN, engine="vllm", input_tokens=90)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--against", "vllm --pp 2"], "is none of the engines"),
        (["--base-url", "http://127.0.0.1:1", "--engine", "ours"], "drop --engine"),
        (["--engine", "tgi"], "must begin with one of"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_before_a_server_starts(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model-path", str(tmp_path), *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "load"),
    [
        (["--num-clients", "1", "--num-requests", "4"], Load(num_clients=1, num_requests=4)),
        (["--requests-per-s", "2.5"], Load(requests_per_s=2.5)),
    ],
)
def test_the_flags_of_the_load_are_those_of_the_client(
    words: list[str], load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Load] = []

    def measure_rounds(engines: object, model: Path, warm_up: Load, *others: object) -> list[Run]:
        measured.append(warm_up)
        return [RUN]

    monkeypatch.setattr("benchmark.serving.bench_serving.measure_rounds", measure_rounds)
    assert main(["--model-path", str(tmp_path), "--no-save", *words]) == 0
    assert measured == [load]


def test_a_result_names_the_command_the_machine_and_every_run(tmp_path: Path) -> None:
    report = report_of("sample", Load(), Path("0.27b"), [RUN])
    command = Command("benchmark.serving.bench_serving", None, folder=tmp_path)
    assert command.run(lambda options: report, []) == 0
    (stem,) = (path.with_suffix("") for path in tmp_path.glob("*.json"))
    record = json.loads(stem.with_suffix(".json").read_text())
    assert record["command"].startswith("python -m benchmark.serving.bench_serving")
    assert {"cores", "memory"} <= set(record["machine"])
    assert "python" in record["software"]
    assert record["load"]["requests_per_s"] == "inf"
    assert [run["engine"] for run in record["runs"]] == ["ours --pp 2"]
    text = stem.with_suffix(".md").read_text()
    assert "| ours --pp 2 |" in text
    assert "100 tokens in, 20 out a run" in text


def test_the_steps_of_a_run_are_those_until_its_last_request_has_ended() -> None:
    pipeline = Cluster(model="Qwen2.5-14B", device="a100-40g-pcie")
    workload = poisson_arrivals(fixed_lengths(8, 64, 4), 0.5, Random(0))
    simulation = simulate(pipeline, ThrottleArgs(policy="throttle"), SchedulingArgs(), workload)
    records = iter([step.record for step in simulation.steps])
    first, second = take_requests(records, 5), take_requests(records, 3)
    assert [len([one for r in part for one in r.ended]) for part in (first, second)] == [5, 3]
    assert first[-1].ended and second[-1].ended
    assert len(first) + len(second) == len(simulation.steps)


def test_the_results_folder_is_beside_the_benchmark() -> None:
    assert (RESULTS / "README.md").exists()


def test_turns_run_to_and_fro():
    assert [*turns(["a", "b"], 3)] == [(1, "a"), (1, "b"), (2, "b"), (2, "a"), (3, "a"), (3, "b")]


def test_the_clients_details_give_each_requests_latency() -> None:
    result = {"ttfts": [0.5, 0.25], "itls": [[0.125, 0.375], []], "output_lens": [3, 1]}
    assert client_latencies(result) == (RequestLatency(500.0, 250.0), RequestLatency(250.0, None))


def test_a_target_gives_a_column_and_is_in_the_facts() -> None:
    run = dataclasses.replace(RUN, latencies=(RequestLatency(100.0, 10.0),))
    target = LatencyTarget(ttft_ms=500.0)
    report = report_of("serving", Load(), Path("model"), [run], target=target)
    assert "goodput %" in report.texts[0]
    assert report.facts["model"]["goodput"] == "within TTFT 500 ms"
    assert "goodput" not in report_of("serving", Load(), Path("model"), [run]).facts["model"]
