"""The number of state slots, and the flags that a model with states refuses."""

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from support.state_models import write_state_model

from sgl_pipeline.args import MigrationArgs, StageArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.command_line import state_slots
from sgl_pipeline.managers.command_line.server_args import parse_command_line
from sgl_pipeline.managers.command_line.state_slots import (
    HeldBytes,
    host_loads,
    refuse_slots_without_states,
    settle_state_slots,
)
from sgl_pipeline.pp_runner.model.model_spec import read_model_spec
from sgl_pipeline.pp_runner.stage_loading import load_stage
from sgl_pipeline.stage_plan import StagePlan
from sgl_pipeline.wire.stage_messages import StageAssignment

MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_state_model(tmp_path_factory.mktemp("states")))


@pytest.fixture(autouse=True)
def _a_host_of_300_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_slots, "available_memory_bytes", lambda: 300 * MIB)


def options_of(**given: object) -> argparse.Namespace:
    values = {"max_mamba_cache_size": None, "mamba_full_memory_ratio": None}
    values["mamba_track_interval"] = None
    return argparse.Namespace(**values | {"disable_radix_cache": False} | given)


def of_hosts(*loads: tuple[int, int]) -> Callable[[], Sequence[HeldBytes]]:
    """Bytes of a slot and of weights, of each host."""
    return lambda: [HeldBytes(*load) for load in loads]


@pytest.mark.parametrize("disabled", [False, True])
def test_the_flag_is_the_number_and_the_radix_cache_is_as_asked(
    disabled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = options_of(max_mamba_cache_size=7, disable_radix_cache=disabled)
    assert settle_state_slots(options, of_hosts((MIB, 0)), 256) == 7
    assert options.disable_radix_cache is disabled
    assert not caplog.records


@pytest.mark.parametrize(("disabled", "slots"), [(False, 48), (True, 16)])
def test_without_the_flag_there_are_slots_for_running_requests_and_for_snapshots(
    disabled: bool, slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        options = options_of(disable_radix_cache=disabled)
        assert settle_state_slots(options, of_hosts((MIB, 0)), 16) == slots
    assert not caplog.records


def test_snapshots_get_what_memory_leaves_beside_the_running_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert settle_state_slots(options_of(), of_hosts((MIB, 0)), 100) == 142
    assert not caplog.records


def test_states_take_sglangs_share_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    options = options_of(disable_radix_cache=True, mamba_full_memory_ratio=1.0)
    # Half of what the weights leave.
    assert settle_state_slots(options, of_hosts((MIB, 100 * MIB)), 256) == 100
    (record,) = caplog.records
    assert record.getMessage() == (
        "100 requests run at once, not 256 (--max-running-requests): 100 state slots of 1.0 MiB "
        "fit into the share of memory that is for states (--mamba-full-memory-ratio 1.0)"
    )
    assert settle_state_slots(options_of(), of_hosts((MIB, 110 * MIB)), 256) == 90


@pytest.mark.parametrize(
    ("given", "slot_bytes", "words"),
    [
        (
            {"mamba_track_interval": 64, "disable_radix_cache": True},
            MIB,
            "--mamba-track-interval 64 does nothing beside --disable-radix-cache",
        ),
        ({"max_mamba_cache_size": 0}, MIB, "--max-mamba-cache-size 0 must be at least 1"),
        (
            {"max_mamba_cache_size": 3, "mamba_full_memory_ratio": 0.5},
            MIB,
            "--mamba-full-memory-ratio 0.5 does nothing beside --max-mamba-cache-size",
        ),
        ({"mamba_full_memory_ratio": -1.0}, MIB, "--mamba-full-memory-ratio -1.0 must be above 0"),
        ({}, 200 * MIB, "leaves 142 MiB for states, and one slot takes 200 MiB"),
    ],
)
def test_what_cannot_be_honored_is_named(
    given: dict[str, object], slot_bytes: int, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        settle_state_slots(options_of(**given), of_hosts((slot_bytes, 0)), 256)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_mamba_cache_size": 3}, "--max-mamba-cache-size 3 is for models with states"),
        ({"mamba_full_memory_ratio": 0.5}, "--mamba-full-memory-ratio 0.5 is for models"),
        ({"mamba_track_interval": 256}, "--mamba-track-interval 256 is for models with states"),
    ],
)
def test_flags_of_slots_are_for_models_with_states(given: dict[str, object], words: str) -> None:
    refuse_slots_without_states(options_of())
    with pytest.raises(ConfigurationError, match=words):
        refuse_slots_without_states(options_of(**given))


def test_the_host_with_the_least_room_decides() -> None:
    """One without states, whatever its weights take, limits nothing."""
    loads = of_hosts((MIB, 100 * MIB), (2 * MIB, 100 * MIB), (MIB, 0), (0, 299 * MIB))
    options = options_of(disable_radix_cache=True, mamba_full_memory_ratio=1.0)
    assert settle_state_slots(options, loads, 256) == 50


def test_memory_is_not_looked_at_where_the_number_is_given() -> None:
    options = options_of(max_mamba_cache_size=7)
    assert settle_state_slots(options, lambda: pytest.fail("sizes are not needed"), 256) == 7


STAGES = StageArgs(model_path="", dtype="bfloat16", num_stages=3)
# Of eight layers the fourth and the last have none.
PLAN = StagePlan(0, (3, 1, 4))


@pytest.mark.parametrize(
    ("migration", "states"),
    [
        (MigrationArgs(), (3, 3)),
        # Each stage may come to hold two layers more: five, three and six with a state.
        (MigrationArgs(mode="manual"), (5, 3 + 6)),
    ],
)
def test_a_host_holds_the_states_of_the_layers_that_its_stages_may_hold(
    model: str, migration: MigrationArgs, states: tuple[int, int]
) -> None:
    spec = read_model_spec(model)
    assert spec.state is not None
    loads = host_loads(spec, PLAN, STAGES, migration, 2)
    slot_bytes = spec.state.bytes_per_slot("bfloat16")
    assert [load.slot_bytes for load in loads] == [number * slot_bytes for number in states]


@pytest.mark.parametrize("weights", ["background", "resident"])
def test_a_host_holds_the_weights_that_its_stages_load_at_the_start(
    model: str, weights: str
) -> None:
    spec, migration = read_model_spec(model), MigrationArgs(mode="manual", weights=weights)
    loaded = [
        load_stage(
            StageAssignment(
                stage=stage,
                plan=PLAN,
                args=replace(STAGES, model_path=model, layer_kernels="torch"),
                page_size=16,
                links=(),
                cpu_threads=1,
                cpu_cores=(),
                spare_layers=migration.layers_to_load(PLAN, stage),
            )
        ).weight_bytes
        for stage in range(3)
    ]
    loads = host_loads(spec, PLAN, STAGES, migration, 2)
    # Host 0 starts one worker of three.
    assert [load.weight_bytes for load in loads] == pytest.approx(
        [loaded[0], loaded[1] + loaded[2]], rel=1e-3
    )


def test_a_server_of_such_a_model_has_slots_and_its_radix_cache(model: str) -> None:
    flags = ["--model-path", model, "--device", "cpu", "--max-running-requests", "6"]
    plan = parse_command_line(flags)
    scheduling = plan.pipeline.scheduling
    assert (scheduling.num_state_slots, scheduling.radix_cache) == (18, True)
    assert not plan.upstream.disable_radix_cache and plan.pipeline.log_mib == 0
    assert scheduling.snapshot_interval == 256
    asked = parse_command_line([*flags, "--mamba-track-interval", "64"]).pipeline.scheduling
    assert asked.snapshot_interval == 64
    scheduling = parse_command_line([*flags, "--disable-radix-cache"]).pipeline.scheduling
    assert (scheduling.num_state_slots, scheduling.radix_cache) == (6, False)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-mamba-cache-size", "0"], "--max-mamba-cache-size 0"),
        (["--mamba-track-interval", "40"], "--mamba-track-interval 40 must be a multiple"),
        (["--mamba-full-memory-ratio", "0"], "--mamba-full-memory-ratio 0.0"),
        (["--mamba-ssm-dtype", "bfloat16"], "--mamba-ssm-dtype bfloat16 cannot be honored"),
        (["--linear-attn-backend", "flashinfer"], "--linear-attn-backend flashinfer"),
        (["--recovery-log-mib", "8"], "--recovery-log-mib 8 is not built for models with states"),
        (
            ["--enable-hierarchical-cache", "--hicache-storage-backend", "file"],
            "--enable-hierarchical-cache is not built for models with states",
        ),
        (
            ["--disaggregation-mode", "decode"],
            "--disaggregation-mode decode is not built for models with states",
        ),
        (
            ["--disaggregation-mode", "decode", "--enable-attention-offload"],
            "--enable-attention-offload is not built for models with states",
        ),
        (
            ["--speculative-algorithm", "NGRAM"],
            "--speculative-algorithm NGRAM is not built for models with states",
        ),
        (["--schedule-policy", "lpm"], "--schedule-policy lpm is not built for models with states"),
        (["--schedule-policy", "dfs-weight"], "--schedule-policy dfs-weight is not built"),
        (["--enable-lora"], "--enable-lora"),
    ],
)
def test_what_a_model_with_states_cannot_do_is_one_line(
    model: str, flags: list[str], words: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_command_line(["--model-path", model, "--device", "cpu", "--pp", "2", *flags])
    assert words in str(refused.value) and "\n" not in str(refused.value)
