"""`python -m sgl_pipeline.simulator` as a user types it."""

import re
from pathlib import Path

import msgspec
import pytest

from sgl_pipeline.args import POLICIES
from sgl_pipeline.records.trace import read_trace
from sgl_pipeline.simulator.__main__ import main
from sgl_pipeline.simulator.tune import FLAGS
from sgl_pipeline.throttle import POLICY_TABLE

LENIENT = ["--target-ttft-ms", "1e6", "--target-tpot-ms", "1e6"]
SMALL = ["--model", "Qwen2.5-14B", "--requests", "30", "--trace", "sharegpt"]
FEW = ["--model", "Qwen2.5-14B", "--requests", "8", "--trace", "sharegpt"]


def test_policies_and_rates_make_a_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines, steps = tmp_path / "runs.jsonl", tmp_path / "steps.jsonl"
    arguments = ["run", *FEW, "--rate", "4,inf", "--policy", "throttle,sarathi"]
    arguments += ["--json", str(lines), "--trace-path", str(steps)]
    arguments += LENIENT
    assert main(arguments) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[:2] for row in rows] == [
        ["throttle", "4"],
        ["throttle", "inf"],
        ["sarathi", "4"],
        ["sarathi", "inf"],
    ]
    assert all(row.endswith("100.0%") for row in rows)
    runs = [msgspec.json.decode(line) for line in lines.read_bytes().splitlines()]
    assert [run["summary"]["num_requests"] for run in runs] == [8] * 4
    records = list(read_trace(steps))
    assert len(records) == runs[-1]["summary"]["num_steps"]
    assert len(records[0].stages) == 4


def test_unless_policies_are_named_the_default_of_the_server_comes_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", *FEW]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["throttle-time", "throttle", "sarathi"]
    assert main(["run", *FEW, "--device", "a100-80g", "--pd", "1:1"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["throttle-time", "throttle", "sarathi"]


def test_state_slots_bound_the_requests_that_run(tmp_path: Path) -> None:
    arguments = ["run", *FEW, "--rate", "inf", "--policy", "throttle", "--disable-radix-cache"]
    most = {}
    for slots in ("0", "3"):
        steps = tmp_path / f"{slots}.jsonl"
        own = ["--max-mamba-cache-size", slots, "--trace-path", str(steps)]
        assert main([*arguments, *own]) == 0
        most[slots] = max(record.running_decodes for record in read_trace(steps))
    assert most["3"] == 3 < most["0"]


def test_moves_stand_below_the_row_of_their_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "--model", "Qwen2.5-14B", "--trace", "sharegpt", "--requests", "80"]
    arguments += ["--rate", "24", "--policy", "throttle"]
    assert main(arguments) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main([*arguments, "--migration", "auto", "--forecast", "online"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[3].startswith("    layers 12,12,12,12 to ")
    assert "done" in rows[3]
    plain = re.findall(r"([\d.]+) MB", "\n".join(rows[3:]))
    # States of 16 MiB beside the pages of every fourth layer.
    states = ["--max-mamba-cache-size", "256", "--state-mib", "16", "--disable-radix-cache"]
    assert main([*arguments, "--migration", "auto", "--forecast", "online", *states]) == 0
    with_states = re.findall(r"([\d.]+) MB", capsys.readouterr().out)
    assert float(with_states[0]) > 2.0 * float(plain[0])


def test_what_a_store_did_stands_below_the_row_of_its_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["run", "--model", "Qwen2.5-14B", "--trace", "azure_conv", "--requests", "20"]
    arguments += ["--hit-rate", "0.8", "--sharing-requests", "3", "--rate", "1"]
    arguments += ["--policy", "throttle", "--pool-tokens", "5000"]
    assert main(arguments) == 0
    assert "store" not in capsys.readouterr().out
    assert main([*arguments, "--store-capacity-gb", "50", "--store-read-gb-per-s", "10"]) == 0
    row = capsys.readouterr().out.splitlines()[3]
    assert row.startswith("    store: ") and not row.startswith("    store: 0.0%")


def test_what_drafts_gave_stands_below_the_row_of_its_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["run", *FEW, "--rate", "0.05", "--policy", "throttle"]
    assert main(arguments) == 0
    without = capsys.readouterr().out.splitlines()
    assert len(without) == 3
    assert main([*arguments, "--draft-acceptance", "0.5,0.9", "--draft-found", "0.8"]) == 0
    row, drafts = capsys.readouterr().out.splitlines()[2:]
    assert drafts.startswith("    drafts: ") and drafts.endswith(" tokens")
    tpot_ms = [float(one.split()[5]) for one in (without[2], row)]
    assert tpot_ms[1] < 0.8 * tpot_ms[0]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--store-capacity-gb", "1", "--store-latency-ms", "-1"], "must not be below 0"),
        (
            ["--store-capacity-gb", "1", "--calibrate", "steps.jsonl", "--pool-tokens", "9999"],
            "without --calibrate",
        ),
        (
            ["--store-capacity-gb", "1", "--max-mamba-cache-size", "4"],
            "--store-capacity-gb without --max-mamba-cache-size",
        ),
    ],
)
def test_a_store_that_cannot_be_simulated_is_refused(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *SMALL, *flags]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_tune_ends_with_flags_for_the_server(
    policy: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "short.csv"
    trace.write_text("input_tokens,output_tokens\n" + "900,3\n" * 8)
    arguments = ["tune", "--model", "Qwen2.5-14B", "--trace", str(trace), "--policy", policy]
    arguments += ["--target-ttft-ms", "300", "--target-tpot-ms", "200"]
    assert main(arguments) == 0
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last[::2] == ["--policy", *(FLAGS[name] for name in POLICY_TABLE[policy].searched)]
    assert last[1] == policy


def test_tune_refuses_a_policy_that_is_none_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "--policy", "sarathi,throttled"])
    assert "unknown: throttled; choose from throttle," in capsys.readouterr().err


def test_a_recorded_run_takes_the_place_of_kernel_tables(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    steps = str(tmp_path / "steps.jsonl")
    assert main(["run", *SMALL, "--pp", "2", "--policy", "sarathi", "--trace-path", steps]) == 0
    table = capsys.readouterr().out.splitlines()
    again = ["run", *SMALL, "--policy", "sarathi", "--calibrate", steps, "--pool-tokens", "100000"]
    assert main(again) == 0
    fitted = capsys.readouterr().out.splitlines()
    assert "mean error of step times" in fitted[0]
    measured, predicted = (float(lines[-1].split()[2]) for lines in (table, fitted))
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("rate", "message"), [("4,fast", "rates are numbers or inf"), ("0", "rates must be above 0")]
)
def test_a_rate_that_is_none_is_a_usage_error(
    rate: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--rate", rate])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--trace", "nowhere"], "there is no trace 'nowhere'"),
        (["run", "--model", "Llama-3.1-70B", "--pp", "2"], "stage 0 needs 70.6 GB"),
        (["run", "--model", "Llama-3.1-8B"], "no kernel times of Llama-3.1-8B"),
        (["run", "--calibrate", "x"], "--calibrate needs --pool-tokens"),
        (
            ["run", "--calibrate", "x", "--pool-tokens", "9", "--migration", "auto"],
            "layers cannot move in a recorded pipeline",
        ),
        (["run", "--draft-found", "0.5"], "--draft-found does nothing without --draft-acceptance"),
        (
            ["run", "--speculative-num-draft-tokens", "8"],
            "--speculative-num-draft-tokens does nothing without --draft-acceptance",
        ),
        (["run", "--draft-acceptance", "0.5,2"], "2 is not a chance: it must be between 0 and 1"),
        (
            ["run", "--draft-acceptance", "1", "--speculative-num-draft-tokens", "1"],
            "--speculative-num-draft-tokens 1 must be between 2 and 64",
        ),
        (["run", "--migration-window", "0"], "--migration-window 0 must be at least 1"),
        (
            ["run", "--state-mib", "2", "--migration", "auto"],
            "--state-mib does nothing without --migration auto and --max-mamba-cache-size",
        ),
        (["tune", *SMALL], "needs --target-ttft-ms"),
        (["tune", *SMALL, *LENIENT], "all requests at once meet the target"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


PD = ["run", *SMALL, "--policy", "throttle", "--rate", "4", "--pd", "1:2", "--pd-pp", "2:1"]


def test_prefill_and_decode_apart_have_a_table_of_their_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = tmp_path / "runs.jsonl"
    record = ["--model", "Llama-2-13B", "--device", "a100-80g", "--json", str(lines)]
    assert main([*PD, *record, *LENIENT, "--pd-prefill-policy", "sarathi"]) == 0
    described, _, row = capsys.readouterr().out.splitlines()
    assert "1 x prefill (layers (20, 20)" in described and "2 x decode (layers (40,)" in described
    assert row.split()[:2] == ["throttle", "4"]
    busy = ["--trace", "azure_conv", "--rate", "inf", "--pd", "1:1"]
    assert main([*PD, *record, *busy, "--pd-offload", "--pd-offload-bound", "1"]) == 0
    assert "offload bound 1.00" in capsys.readouterr().out
    plain, offloaded = [
        msgspec.json.decode(line)["summary"] for line in lines.read_bytes().splitlines()
    ]
    assert plain["serving"]["num_requests"] == offloaded["serving"]["num_requests"] == 30
    assert (plain["num_devices"], offloaded["num_devices"]) == (4, 3)
    assert plain["loaded_gb"] > 0 and offloaded["loaded_gb"] > 0
    assert plain["goodput_per_device"] > 0 and plain["offloaded_share"] == 0
    assert offloaded["offloaded_share"] > 0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--pp", "2"], "leave out --pp"),
        (["--pd-offload-bound", "0.5"], "needs --pd-offload"),
        (["--store-capacity-gb", "1"], "not simulated with prefill and decode apart"),
        (["--disable-radix-cache"], "found in the radix cache"),
        (["--draft-acceptance", "0.5"], "--draft-acceptance without --pd"),
        (["--max-mamba-cache-size", "4"], "--max-mamba-cache-size without --pd"),
        (["--calibrate", "steps.jsonl", "--pool-tokens", "9999"], "without --calibrate"),
    ],
)
def test_what_is_not_simulated_with_prefill_and_decode_apart_is_refused(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PD, "--device", "a100-80g", *flags]) == 2
    assert reason in capsys.readouterr().err


def test_numbers_of_servers_are_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--pd", "1:0"])
    assert "two numbers from 1 such as 1:2" in capsys.readouterr().err
