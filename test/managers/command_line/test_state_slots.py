"""The number of state slots: asked for, or as many as memory has room for."""

import argparse
import logging

import pytest

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.command_line import state_slots
from sgl_pipeline.managers.command_line.state_slots import settle_state_slots

MIB = 2**20


@pytest.fixture(autouse=True)
def _a_host_of_300_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_slots, "available_memory_bytes", lambda: 300 * MIB)


def options_of(**given: object) -> argparse.Namespace:
    values = {"max_mamba_cache_size": None, "mamba_full_memory_ratio": None}
    return argparse.Namespace(**values | {"disable_radix_cache": False} | given)


def test_the_flag_is_the_number_and_the_radix_cache_is_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = options_of(max_mamba_cache_size=7)
    assert settle_state_slots(options, MIB, 256, 0) == 7
    assert options.disable_radix_cache
    (record,) = caplog.records
    assert record.getMessage().startswith("the radix cache is off, as with --disable-radix-cache")


def test_without_the_flag_each_running_request_has_a_slot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert settle_state_slots(options_of(disable_radix_cache=True), MIB, 16, 0) == 16
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
