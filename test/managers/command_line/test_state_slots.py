"""The number of state slots, and the flags that a model with states refuses."""

import argparse
import logging

import pytest
from support.state_models import write_state_model

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.command_line import state_slots
from sgl_pipeline.managers.command_line.server_args import parse_command_line
from sgl_pipeline.managers.command_line.state_slots import settle_state_slots

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


@pytest.mark.parametrize("disabled", [False, True])
def test_the_flag_is_the_number_and_the_radix_cache_is_as_asked(
    disabled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = options_of(max_mamba_cache_size=7, disable_radix_cache=disabled)
    assert settle_state_slots(options, MIB, 256, 0) == 7
    assert options.disable_radix_cache is disabled
    assert not caplog.records


@pytest.mark.parametrize(("disabled", "slots"), [(False, 48), (True, 16)])
def test_without_the_flag_there_are_slots_for_running_requests_and_for_snapshots(
    disabled: bool, slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert settle_state_slots(options_of(disable_radix_cache=disabled), MIB, 16, 0) == slots
    assert not caplog.records


def test_snapshots_get_what_memory_leaves_beside_the_running_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert settle_state_slots(options_of(), MIB, 100, 0) == 142
    assert not caplog.records


def test_states_take_sglangs_share_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    options = options_of(disable_radix_cache=True, mamba_full_memory_ratio=1.0)
    # Half of what the weights leave.
    assert settle_state_slots(options, MIB, 256, 100 * MIB) == 100
    (record,) = caplog.records
    assert record.getMessage() == (
        "100 requests run at once, not 256 (--max-running-requests): 100 state slots of 1.0 MiB "
        "fit into the share of memory that is for states (--mamba-full-memory-ratio 1.0)"
    )
    assert settle_state_slots(options_of(), MIB, 256, 110 * MIB) == 90


@pytest.mark.parametrize(
    ("given", "slot_bytes", "words"),
    [
        ({"max_mamba_cache_size": 3}, 0, "--max-mamba-cache-size 3 is for models with states"),
        ({"mamba_full_memory_ratio": 0.5}, 0, "--mamba-full-memory-ratio 0.5 is for models"),
        ({"mamba_track_interval": 256}, 0, "--mamba-track-interval 256 is for models with states"),
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
        settle_state_slots(options_of(**given), slot_bytes, 256, 0)


def test_a_model_without_states_keeps_its_radix_cache() -> None:
    options = options_of()
    assert settle_state_slots(options, 0, 256, 0) == 0
    assert not options.disable_radix_cache


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
