"""The command `capacity` as a user types it, in simulation."""

from pathlib import Path

import msgspec
import pytest
from support.saved_costs import costs_of
from support.tiny_models import tiny_model

from sgl_pipeline.__main__ import main as sgl_pipeline
from sgl_pipeline.capacity.command import main
from sgl_pipeline.capacity.predicted import pace
from sgl_pipeline.capacity.rate_trial import Round
from sgl_pipeline.capacity.result import CapacityResult
from sgl_pipeline.goodput import RequestLatency
from sgl_pipeline.managers.planning import cost_files
from sgl_pipeline.managers.planning.cost_files import save_costs
from sgl_pipeline.simulator.__main__ import main as simulate

CARD = ["--model", "Qwen2.5-14B", "--device", "a100-40g-pcie", "--pp", "4"]
SHORT = ["--requests", "24", "--rounds", "2", "--input-tokens", "2048", "--output-tokens", "16"]
TARGETS = ["--ttft-ms", "1200", "--tpot-ms", "120"]


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cost_files.DIRECTORY_VARIABLE, str(tmp_path / "costs"))
    return tmp_path / "costs"


def read(path: Path) -> CapacityResult:
    return msgspec.json.decode(path.read_bytes(), type=CapacityResult)


def test_a_cards_capacity_has_a_table_an_interval_and_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    assert sgl_pipeline(["capacity", *CARD, *SHORT, *TARGETS, "--json", str(path)]) == 0
    printed = capsys.readouterr()
    found = read(path)
    (side,) = found.sides
    assert side.capacity is not None
    assert side.capacity.low <= side.capacity.value <= side.capacity.high
    rates = [row.rate_per_s for row in side.rates]
    assert rates == sorted(rates) and rates[0] <= side.capacity.value <= rates[-1]
    assert side.rates[0].goodput >= 0.9 > side.rates[-1].goodput
    assert {row.num_requests for row in side.rates} == {48}
    assert f"predicted, throttle-time: {side.capacity} requests a second" in printed.out
    assert printed.out.count("%") > len(rates)
    # Progress, a line for each rate.
    assert printed.err.count("predicted, throttle-time: ") == len(rates)


def test_stricter_targets_and_shares_carry_less(tmp_path: Path) -> None:
    def found(*flags: str) -> float:
        path = tmp_path / "found.json"
        assert main([*CARD, *SHORT, *load, "--json", str(path), *flags]) == 0
        capacity = read(path).sides[0].capacity
        assert capacity is not None
        return capacity.value

    load = ["--requests", "40", "--rounds", "1"]
    usual = found(*TARGETS)
    assert found("--ttft-ms", "1200", "--tpot-ms", "80") < usual
    assert found(*TARGETS, "--goodput", "0.6") > usual


def test_policies_are_compared_by_pairs_of_rounds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    policies = ["--policy", "throttle", "--policy", "sarathi", "--rate", "1,4"]
    assert main([*CARD, *SHORT, *TARGETS, *policies, "--json", str(path)]) == 0
    found = read(path)
    assert [(one.policy, one.capacity is not None) for one in found.sides] == [
        ("throttle", True),
        ("sarathi", True),
        ("throttle", False),
        ("sarathi", False),
    ]
    assert [(one.policy, one.against, one.rate_per_s) for one in found.ratios] == [
        ("sarathi", "throttle", None),
        ("sarathi", "throttle", 1.0),
        ("sarathi", "throttle", 4.0),
    ]
    assert set(found.ratios[0].ratios) == {"capacity"}
    assert set(found.ratios[1].ratios) == {"goodput", "TTFT", "TPOT", "tokens/s"}
    assert "predicted, sarathi / throttle at 4 req/s: goodput " in capsys.readouterr().out


def test_costs_of_a_fit_are_found_for_the_model(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    save_costs(costs_of(model.name))
    flags = ["--model", str(model), "--dtype", "float32", "--cpu-threads-per-stage", "1"]
    flags += ["--max-total-tokens", "4096", "--requests", "60", "--rounds", "2"]
    flags += [
        "--input-tokens",
        "128",
        "--output-tokens",
        "16",
        "--ttft-ms",
        "60",
        "--policy",
        "throttle",
    ]
    path = tmp_path / "found.json"
    assert main([*flags, "--json", str(path)]) == 0
    capacity = read(path).sides[0].capacity
    assert capacity is not None
    # A stage takes 4 ms for its layers, the last one as long with fewer layers and the head.
    assert 5.0 < capacity.value < 500.0


def test_a_recorded_server_is_another_source(tmp_path: Path) -> None:
    steps, path = tmp_path / "steps.jsonl", tmp_path / "found.json"
    recorded = ["run", "--model", "Qwen2.5-14B", "--requests", "40", "--trace", "sharegpt"]
    recorded += ["--pp", "2", "--policy", "sarathi", "--trace-path", str(steps)]
    assert simulate(recorded) == 0
    flags = ["--model", "any", "--calibrate", str(steps), "--max-total-tokens", "50000"]
    assert main([*flags, *SHORT, *TARGETS, "--json", str(path)]) == 0
    assert read(path).sides[0].capacity is not None


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([*CARD, *SHORT], "say --ttft-ms, --tpot-ms or both"),
        ([*CARD, *SHORT, "--ttft-ms", "1"], "a request that is alone gets its first token after"),
        ([*CARD, *SHORT, "--ttft-ms", "1e6"], "use more --requests"),
        ([*CARD, *TARGETS, "--hit-rate", "1"], "--hit-rate 1.0 must be in [0, 1)"),
        ([*CARD, *TARGETS, "--trace", "sharegpt_multiturn"], "holds conversations"),
        ([*CARD, *TARGETS, "--trace", "none.csv"], "there is no trace"),
        ([*CARD[:2], *TARGETS, "--calibrate", "x"], "--max-total-tokens"),
        (
            [*CARD[:2], *TARGETS, "--calibrate", "none.jsonl", "--max-total-tokens", "9999"],
            "--calibrate cannot be read: [Errno 2] No such file or directory: 'none.jsonl'",
        ),
        (
            [*CARD, *TARGETS, "--policy", "sarathi", "--target-tpot-ms", "50"],
            "--target-tpot-ms needs --policy",
        ),
        ([*CARD, *TARGETS, "--schedule-policy", "random"], "--schedule-policy 'random'"),
        ([*CARD, *TARGETS, "--measure"], "leave it out with --measure"),
        (["--model", "Llama-9", *CARD[2:], *TARGETS], "'Llama-9' is unknown"),
    ],
)
def test_mistakes_are_explained(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("capacity: error: ") and reason in message


@pytest.mark.parametrize("more", [[], ["--measure"]])
def test_without_costs_the_command_that_measures_them_is_named(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a server is started."""
    flags = ["--model", str(tiny_model("qwen3")), "--max-total-tokens", "4096", *TARGETS]
    assert main([*flags, "--dtype", "float32", *more]) == 1
    assert f"`sgl-pipeline fit --model {tiny_model('qwen3')} --pp 2 --dtype float32`" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--policy", "throttled", "'throttled' is unknown; choose from"),
        ("--goodput", "1.5", "must be a share in (0, 1]"),
        ("--rounds", "0", "must be a number from 1"),
        ("--ttft-ms", "-1", "must be a number above 0"),
    ],
)
def test_values_that_are_none_are_refused_by_their_flag(
    flag: str, value: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*CARD, *TARGETS, flag, value])
    message = capsys.readouterr().err
    assert flag in message and reason in message


def test_the_pace_of_a_server_is_that_of_requests_alone() -> None:
    predicted = Round((RequestLatency(100.0, 10.0), RequestLatency(200.0, None), None), 1.0)
    measured = Round((RequestLatency(170.0, 15.0), RequestLatency(320.0, None), None), 1.0)
    assert pace(predicted, measured) == (1.5, 20.0)
    # Answers of one token alone tell no time per token.
    one, other = (Round((RequestLatency(ms, None),), 1.0) for ms in (100.0, 150.0))
    assert pace(one, other) == (1.5, 0.0)
