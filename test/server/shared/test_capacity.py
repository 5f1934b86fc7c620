"""The command `capacity` against a server that runs, beside its prediction."""

from pathlib import Path

import msgspec
import pytest
import requests
from support.live_server import LiveServer
from support.saved_costs import costs_of, flat

from sgl_pipeline.capacity.command import main
from sgl_pipeline.capacity.load import CapacityLoad, LengthRange
from sgl_pipeline.capacity.load_client import LoadClient
from sgl_pipeline.capacity.result import CapacityResult
from sgl_pipeline.costs.step_costs import LayerCost, RowCost, StepCosts
from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL
from sgl_pipeline.managers.planning.cost_files import DIRECTORY_VARIABLE, save_costs

pytestmark = pytest.mark.multiproc
LENGTHS = LengthRange(input_tokens=128, output_tokens=4, ratio=0.5)
NUM_LAYERS = 16
FLAGS = ["--model", str(DEMO_MODEL), "--dtype", "float32", "--cpu-threads-per-stage", "1"]
FLAGS += ["--input-tokens", "128", "--output-tokens", "4", "--range-ratio", "0.5"]
FLAGS += ["--requests", "20", "--rounds", "1"]


@pytest.fixture
def ttft_ms(demo_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """A target that holds for a few requests and not for twenty at once; costs like the server's
    are saved, so that the prediction has a capacity as well."""
    load = CapacityLoad(source=LENGTHS, num_requests=20)
    asked = load.apart(5, 0.0)
    client = LoadClient(demo_server.url, 200, None)
    client.alone(asked)
    alone = [one for one in client.alone(load.apart(10, 0.0)[5:]).latencies if one is not None]
    first_ms = sum(one.ttft_ms for one in alone) / len(alone)
    further_ms = sum(one.tpot_ms or 0.0 for one in alone) / len(alone)
    # Prompts have 96 tokens on average.
    row_ms = max(0.0, first_ms - further_ms) / 95 / NUM_LAYERS
    rows = RowCost((1.0,), (further_ms / NUM_LAYERS,), row_ms)
    costs = StepCosts(
        layer=LayerCost(rows, 0.0, 0.0, 0.0),
        embedding=flat(0.0),
        tail=flat(0.0),
        layer_weights=(1.0,) * NUM_LAYERS,
    )
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "costs"))
    save_costs(costs_of(DEMO_MODEL.name, costs=costs))
    return 4 * max(one.ttft_ms for one in alone)


def run(server: LiveServer, ttft_ms: float, path: Path, *flags: str) -> CapacityResult:
    words = [*FLAGS, "--url", f"{server.url}/", "--ttft-ms", str(ttft_ms), "--json", str(path)]
    assert main([*words, *flags]) == 0
    return msgspec.json.decode(path.read_bytes(), type=CapacityResult)


def test_the_measured_capacity_stands_beside_the_predicted_one(
    demo_server: LiveServer, ttft_ms: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(demo_server, ttft_ms, tmp_path / "found.json")
    sides = [one.side for one in found.sides]
    # What requests alone take may change between two looks at a busy machine.
    predicted = {"predicted", "predicted at the server's pace"}
    assert len({*sides} & predicted) + len(found.notes) == 2
    assert sides[-1] == "measured"
    for side in found.sides:
        assert side.capacity is not None and side.capacity.value > 0
        assert all(row.num_failed == 0 for row in side.rates)
    assert found.slowness is not None and found.slowness > 0
    assert "measured, throttle-time: " in capsys.readouterr().out


def test_policies_take_turns_on_one_server_which_gets_its_own_back(
    demo_server: LiveServer, ttft_ms: float, tmp_path: Path
) -> None:
    def in_force() -> str:
        return str(
            requests.get(f"{demo_server.url}/pipeline/throttle", timeout=30).json()["policy"]
        )

    before = in_force()
    flags = ["--policy", "sarathi,throttle", "--rate", "4"]
    found = run(demo_server, ttft_ms, tmp_path / "found.json", *flags)
    measured = [one for one in found.sides if one.side == "measured"]
    assert [one.policy for one in measured] == ["sarathi", "throttle"]
    assert [row.num_requests for one in measured for row in one.rates] == [20, 20]
    (ratio,) = [one for one in found.ratios if one.side == "measured"]
    assert (ratio.policy, ratio.against, ratio.rate_per_s) == ("throttle", "sarathi", 4.0)
    assert in_force() == before


def test_targets_that_a_request_alone_misses_are_said_with_what_it_gets(
    demo_server: LiveServer, ttft_ms: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FLAGS, "--url", demo_server.url, "--ttft-ms", "0.01"]) == 1
    message = capsys.readouterr().err
    assert "no rate holds these targets: measured, a request that is alone" in message


def test_an_address_without_a_server_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--url", "http://127.0.0.1:9", "--ttft-ms", "100"]) == 1
    assert "no answer from http://127.0.0.1:9/server_info" in capsys.readouterr().err
