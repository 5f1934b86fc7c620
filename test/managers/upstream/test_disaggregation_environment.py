"""SGLang's variables for prefill and decode apart: some have a meaning, the rest are named."""

import pytest

from sgl_pipeline.args import DisaggregationArgs
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.managers.upstream.disaggregation_environment import (
    fields_of_environment,
    name_variables_of_other_transfers,
)

PREFIX = "SGLANG_DISAGGREGATION_"


def test_without_variables_the_defaults_hold() -> None:
    assert fields_of_environment() == {}


def test_variables_set_fields_of_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}BOOTSTRAP_TIMEOUT", "7")
    monkeypatch.setenv(f"{PREFIX}WAITING_TIMEOUT", "2.5")
    monkeypatch.setenv("SGLANG_TEST_DISAGG_FAILURE_PROB", "0.25")
    fields = fields_of_environment()
    args = DisaggregationArgs(mode="decode", **fields)  # type: ignore[arg-type]
    assert (args.bootstrap_timeout_s, args.waiting_timeout_s) == (7.0, 2.5)
    assert args.failure_probability == 0.25 and args.silence_s == DisaggregationArgs().silence_s


@pytest.mark.parametrize(
    ("interval", "failures", "silence_s"),
    [("3", "4", 12.0), ("0.5", None, 4.0), (None, "1", 5.0), ("6", None, 12.0)],
)
def test_a_peer_is_silent_for_as_long_as_upstreams_heartbeats_would_let_it(
    monkeypatch: pytest.MonkeyPatch, interval: str | None, failures: str | None, silence_s: float
) -> None:
    for name, value in (("INTERVAL", interval), ("MAX_FAILURE", failures)):
        if value is not None:
            monkeypatch.setenv(f"{PREFIX}HEARTBEAT_{name}", value)
    assert fields_of_environment() == {"silence_s": silence_s}


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        (f"{PREFIX}BOOTSTRAP_TIMEOUT", "soon", "above 0"),
        (f"{PREFIX}WAITING_TIMEOUT", "0", "above 0"),
        (f"{PREFIX}WAITING_TIMEOUT", "inf", "above 0"),
        (f"{PREFIX}HEARTBEAT_MAX_FAILURE", "-1", "above 0"),
        ("SGLANG_TEST_DISAGG_FAILURE_PROB", "1.5", "above 0 and at most 1"),
    ],
)
def test_a_value_that_is_no_such_number_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, limit: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=f"{name}={value} must be a number {limit}"):
        fields_of_environment()


def test_one_line_names_variables_of_upstreams_own_transfers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name_variables_of_other_transfers()
    assert not caplog.records
    monkeypatch.setenv(f"{PREFIX}NIXL_BACKEND", "UCX")
    monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", "1")
    monkeypatch.setenv(f"{PREFIX}WAITING_TIMEOUT", "3")
    name_variables_of_other_transfers()
    (record,) = caplog.records
    text = record.getMessage()
    assert "NIXL_BACKEND" in text and "STAGING_BUFFER" in text and "WAITING_TIMEOUT" not in text
