"""The doctor on two hosts of namespaces finds what their network was set to and forecasts by it."""

import json
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.live_hosts import CLUSTER_PORT
from support.live_server import PATIENCE_S, START_TIMEOUT_S
from support.saved_costs import costs_of
from support.tiny_models import tiny_model

from benchmark.hosts.namespaces import Network, hosts, why_no_hosts
from sgl_pipeline.managers.planning import cost_files

pytestmark = [
    pytest.mark.alone,
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()),
]
GBIT_PER_S = 0.05
# A frame takes the delay of both cables.
CABLE_DELAY_MS = 2.5
ROUND_TRIP_MS = 4 * CABLE_DELAY_MS
CLOCK_OFFSET_S = 777.25
# What headers of segments and TLS records leave, and a switch that shares the machine's cores.
LEAST_SHARE = 0.5


def start(network: Network, rank: int, key_file: Path, *more: str) -> "subprocess.Popen[str]":
    head = f"{network.hosts[0].address}:{CLUSTER_PORT}"
    command = [sys.executable, "-m", "sgl_pipeline", "doctor", "--nnodes", "2"]
    command += ["--node-rank", str(rank), "--dist-init-addr", head]
    command += ["--cluster-key-file", str(key_file), "--json", *more]
    return network.hosts[rank].start(*command, stdout=subprocess.PIPE)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 prints, after both have ended well."""
    directory, model = tmp_path_factory.mktemp("doctor"), tiny_model("qwen3")
    key_file = directory / "cluster.key"
    key_file.write_text(secrets.token_hex(32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cost_files.DIRECTORY_VARIABLE, str(directory))
        cost_files.save_costs(costs_of(model.name))
        flags = ["--model-path", str(model), "--dtype", "float32"]
        flags += ["--cpu-threads-per-stage", "1"]
        with hosts(2, clock_offsets_s=(0.0, CLOCK_OFFSET_S)) as network:
            for host in network.hosts:
                host.cable(delay_ms=CABLE_DELAY_MS, gbit_per_s=GBIT_PER_S)
            other, head = (start(network, rank, key_file, *flags) for rank in (1, 0))
            text, _ = head.communicate(timeout=START_TIMEOUT_S)
            assert json.loads(other.communicate(timeout=PATIENCE_S)[0]) == {
                "is_well": True,
                "faults": [],
            }
            assert [head.returncode, other.returncode] == [0, 0]
    facts: dict[str, Any] = json.loads(text)
    return facts


def test_rate_and_delay_are_those_that_the_network_was_set_to(found: dict[str, Any]) -> None:
    (link,) = found["links"]
    for way in ("gbit_per_s_there", "gbit_per_s_back"):
        assert LEAST_SHARE * GBIT_PER_S < link[way] < 1.05 * GBIT_PER_S
    assert ROUND_TRIP_MS <= link["median_ms"] < 3 * ROUND_TRIP_MS
    assert link["median_ms"] <= link["worst_ms"]


def test_the_other_clock_is_known_within_its_bound(found: dict[str, Any]) -> None:
    head, other = found["hosts"]
    assert head["clock"] is None
    clock = other["clock"]
    wrong_by_ms = abs(clock["monotonic_s"] - CLOCK_OFFSET_S) * 1e3
    assert wrong_by_ms <= clock["error_ms"] < 3 * ROUND_TRIP_MS
    # The time of day is the machine's; reading it beside the other clock takes a moment.
    assert abs(clock["wall_ms"]) < clock["error_ms"] + 10.0


def test_hosts_say_where_they_are_reached_and_why(found: dict[str, Any]) -> None:
    assert [host["interface"] for host in found["hosts"]] == ["eth0", "eth0"]
    assert "--dist-init-addr" in found["hosts"][0]["address_reason"]
    assert "route" in found["hosts"][1]["address_reason"]


def test_the_forecast_is_by_the_measured_link(found: dict[str, Any]) -> None:
    forecast, (link,) = found["forecast"], found["links"]
    assert forecast["best"] == forecast["as_ranked"]
    route, step = forecast["best"], forecast["step"]
    # A row of the tiny model has 64 floats; layers take 1 ms, the head two.
    rows_ms = (step["decodes"] + step["prompt_tokens"]) * 64 * 4 * 8e-6 / link["gbit_per_s"]
    assert route["busiest_link_ms"] == pytest.approx(rows_ms)
    assert route["layer_counts"] == [4, 2]
    assert route["slowest_stage_ms"] == pytest.approx(4.0)
    # 8 ms of stages, rows on their way, and the way back to the head; two steps are in flight.
    round_ms = 8.0 + rows_ms + link["median_ms"]
    assert route["round_ms"] == pytest.approx(round_ms)
    assert route["period_ms"] == pytest.approx(max(rows_ms, round_ms / 2))
    assert route["bound_by"] == "round"
    assert route["output_tokens_per_s"] == pytest.approx(step["decodes"] * 1e3 / (round_ms / 2))
